"""Execute nvcc's PTX with interpreter.cpp, whose text has an instruction a line, with numbers for registers."""

import ctypes
import re
from pathlib import Path

from emulator import Emulator, build

FLAGS = ("-std=c++20", "-O2", "-fwrapv", "-fno-strict-aliasing", "-Wall", "-Werror")
SPECIAL = ("%tid.x", "%ctaid.x", "%ntid.x")  # the first registers, which the interpreter sets
ENTRY = re.compile(r"\.entry (\w+)\(.*?\n\{\n(.*?)\n\}", re.DOTALL)
FILE = re.compile(r'\.file\s+(\d+) ".*/cuda_ext/cuda/(.*)"')
INSTRUCTION = re.compile(r"(?:\{\s+)?(?:@(!?)(%p\d+)\s+)?([a-z][\w.]*)\s*(.*?);[ }]*")
ADDRESS = re.compile(r"\[([%\w.]+)(?:\+(-?\d+))?\]")
SIMPLER = {
    r"(@!?%p\d+\s+)?mov\.b(\d+)\s+\{([^\s,]+),\s*(\S+)\},\s*(\S+);": r"\1mov.b\2 \3, \5;\n\1high.b\2 \4, \5;",
    r"\bmov(\.b\d+\s+\S+,\s*\{)": r"pack\1",
    r"\.(rn|uni|shared|global|param|nc|v[24])\b": "",  # the usual rounding; an address tells its memory
    r"\b(ld|st|mov|selp)\.[fs](\d+)\b": r"\1.b\2",  # moved as bits
    r"\bcvt\.f32\.f16\b": "half.b16",
    r"\b_Z\w+_param_0\b": str(1 << 20),  # the addresses of the argument and of shared memory, as in interpreter.cpp
    r"\b_Z\w+fwp_shared_bytesE\b": str(2 << 20),
}


def translate(ptx_of_files: list[str]) -> dict[str, str]:
    """Return the interpreter's text of each kernel."""
    texts = dict[str, str]()
    for ptx in ptx_of_files:
        files = dict(FILE.findall(ptx))
        for pattern, simple in SIMPLER.items():
            ptx = re.sub(pattern, simple, ptx)
        texts |= {name: text_of(name, body, files) for name, body in ENTRY.findall(ptx)}
    return texts


def text_of(name: str, body: str, files: dict[str, str]) -> str:
    """Return a line of sizes, the values of constants by register, and a line for each instruction."""
    registers = {register: number for number, register in enumerate(SPECIAL)}
    labels, lines, place = dict[str, int](), list[str](), name

    def number(operand: str) -> int:
        return registers.setdefault(operand, len(registers))  # each constant has a register, too

    def value(constant: str) -> int:
        if constant[:2] in ("0f", "0d"):
            return int(constant[2:], 16)
        return labels[constant] if constant in labels else int(constant, 0) % 2**64

    for line in body.splitlines():
        line = line.partition("//")[0].strip()
        if found := re.match(r"\.loc\s+(\d+) (\d+)", line):
            if found[1] in files:  # not one of CUDA's or the compiler's
                place = f"{files[found[1]]}:{found[2]}"
        elif found := re.fullmatch(r"(\$\w+):", line):
            labels[found[1]] = len(lines)
        elif found := INSTRUCTION.fullmatch(line):
            negated, predicate, opcode, operands = found.groups("")
            offsets = [int(offset or 0) for _, offset in ADDRESS.findall(operands)]
            assert len(offsets) < 2 or not any(offsets), line
            assert not opcode.startswith("mov") or "{" not in operands, line
            assert opcode != "bar.warp.sync" or operands == "-1", line  # the whole warp
            numbers = [number(x) for x in re.findall(r"[^\s,|{}]+", ADDRESS.sub(r"\1", operands))]
            fields = (place, opcode, int(bool(negated)), number(predicate or "1"), sum(offsets) % 2**64)
            lines.append(" ".join(map(str, (*fields, len(numbers), *numbers))))
        else:
            assert not line or line.startswith((".reg", ".pragma", "{", "}")), (name, line)
    values = [f"{number} {value(x)}" for x, number in registers.items() if x[0] != "%"]
    return "\n".join([f"{name} {len(registers)} {len(values)} {len(lines)}", *values, *lines, ""])


class Interpreter(Emulator):
    """The operator, with launches in PTX, of translated kernels by name."""

    def __init__(self, kernels: dict[str, str]) -> None:
        super().__init__(build(source=Path(__file__).with_suffix(".cpp"), flags=FLAGS))
        self._library.interpreter_launched.restype = ctypes.c_char_p
        self.kernels = kernels
        for text in kernels.values():
            self.load(text)

    def load(self, text: str) -> None:
        self._library.interpreter_load(text.encode())

    def launched(self, execute: bool = True) -> dict[str, int]:
        """Return the kernels that were launched since the last call by name, with the instructions of all threads.

        Later launches are executed, or are not.
        """
        said = self._library.interpreter_launched(execute).decode().split()
        return dict(zip(said[::2], map(int, said[1::2]), strict=True))
