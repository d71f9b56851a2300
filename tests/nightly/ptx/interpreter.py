"""Execute nvcc's PTX with interpreter.cpp, whose text has an instruction a line, with numbers for registers."""

import ctypes
import re
from pathlib import Path
from typing import Any

from emulator import Emulator, build

SPECIAL = ("%tid.x", "%ctaid.x", "%ntid.x")  # the first registers, which the interpreter sets
SHARED_MEMORY = 4096  # its address, as in interpreter.cpp
ENTRY = re.compile(r"\.entry (\w+)\(.*?\n\{\n(.*?)\n\}", re.DOTALL)
FILE = re.compile(r'\.file\s+(\d+) ".*/cuda_ext/cuda/(.*)"')
INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.]*)\s*(.*);")
ACCESS = re.compile(r"(ld|st)(?:\.(shared|global|param))?(?:\.nc)?(?:\.v(\d))?(\.\w+)")
ADDRESS = re.compile(r"\[([%\w.]+)(?:\+(-?\d+))?\]")
# Rounding to nearest needs no name, and numbers are moved as bits.
NAMES = {r"\.(rn|uni)\b": "", r"^(ld|st|mov|selp)\.[fs](\d+)$": r"\1.b\2", r"^cvt\.f32\.f16$": "half.b16"}


class Kernel:
    """Registers, labels and translated instructions of a kernel."""

    def __init__(self, name: str) -> None:
        self.name, self.place = name, name
        self.registers = {register: number for number, register in enumerate(SPECIAL)}
        self.labels: dict[str, int] = {}
        self.lines: list[str] = []

    def number(self, operand: str) -> int:
        """Return the register of an operand; each constant has one, too."""
        return self.registers.setdefault(operand, len(self.registers))

    def value(self, constant: str) -> int:
        if constant.startswith(self.name):  # the address of its argument
            return 0
        if constant.endswith("fwp_shared_bytesE"):
            return SHARED_MEMORY
        if constant[:2] in ("0f", "0d"):
            return int(constant[2:], 16)
        return self.labels[constant] if constant in self.labels else int(constant, 0) % 2**64

    def add(self, negated: str, predicate: str, name: str, operands: str) -> None:
        space, count = "-", 1
        if access := ACCESS.fullmatch(name):
            name, space, count = access[1] + access[4], (access[2] or "global")[0], int(access[3] or 1)
        if name.startswith("mov.") and operands.startswith("{"):  # a register becomes two
            low, high, x = re.findall(r"[^\s,{}]+", operands)
            self.add(negated, predicate, name, f"{low}, {x}")
            name, operands = name.replace("mov", "high"), f"{high}, {x}"
        elif name.startswith("mov.") and "{" in operands:
            name = name.replace("mov", "pack")
        for old, new in NAMES.items():
            name = re.sub(old, new, name)
        offsets = [int(offset or 0) for _, offset in ADDRESS.findall(operands)]
        assert len(offsets) < 2 or not any(offsets), operands
        assert not name.startswith("bar") or operands in ("0", "-1"), operands  # the whole block, or warp
        numbers = [self.number(x) for x in re.findall(r"[^\s,|{}]+", ADDRESS.sub(r"\1", operands))]
        fields = (self.place, name, space, count, int(bool(negated)), self.number(predicate or "1"))
        self.lines.append(" ".join(map(str, (*fields, sum(offsets) % 2**64, len(numbers), *numbers))))

    def text(self) -> str:
        values = [f"{number} {self.value(x)}" for x, number in self.registers.items() if x[0] != "%"]
        sizes = f"{len(self.registers)} {len(values)} {len(self.lines)}"
        return "\n".join([f"{self.name} {sizes}", *values, *self.lines, ""])


def translate(ptx: str) -> dict[str, str]:
    """Return the interpreter's text of each kernel."""
    files, texts = dict(FILE.findall(ptx)), {}
    for name, body in ENTRY.findall(ptx):
        kernel = Kernel(name)
        for line in body.splitlines():
            line = line.partition("//")[0].strip()
            if place := re.match(r"\.loc\s+(\d+) (\d+)", line):
                if place[1] in files:  # not one of CUDA's or the compiler's
                    kernel.place = f"{files[place[1]]}:{place[2]}"
            elif label := re.fullmatch(r"(\$\w+):", line):
                kernel.labels[label[1]] = len(kernel.lines)
            elif instruction := INSTRUCTION.fullmatch(line.strip("{} ") if line.startswith("{ ") else line):
                kernel.add(*instruction.groups(""))
            else:
                assert not line or line.startswith((".reg", ".pragma")), (name, line)
        texts[name] = kernel.text()
    return texts


FLAGS = ("-std=c++20", "-O2", "-fwrapv", "-fno-strict-aliasing", "-Wall", "-Werror")
ARGUMENTS = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p)
LAUNCHER = ctypes.CFUNCTYPE(ctypes.c_void_p, *ARGUMENTS)


class Interpreter(Emulator):
    """The operator, with launches in PTX, of translated kernels by name. `launched` collects their names."""

    def __init__(self, kernels: dict[str, str]) -> None:
        super().__init__(build())
        self.kernels, self.launched, self.executes = kernels, set[str](), True
        self._interpreter = ctypes.CDLL(str(build(source=Path(__file__).with_suffix(".cpp"), flags=FLAGS)))
        self._interpreter.interpreter_launch.argtypes = ARGUMENTS
        self._interpreter.interpreter_launch.restype = ctypes.c_void_p
        self._launcher = LAUNCHER(self._launch)
        for text in kernels.values():
            self.load(text)

    def load(self, text: str) -> None:
        self._interpreter.interpreter_load(text.encode())

    def seed(self, seed: int) -> None:
        self._interpreter.interpreter_seed(ctypes.c_uint64(seed))

    def _launch(self, kernel: bytes, *how: Any) -> int | None:
        self.launched.add(kernel.decode())
        return self._interpreter.interpreter_launch(kernel, *how) if self.executes else None

    def _run(self, *arguments: Any, **how: Any) -> None:
        self._library.emulator_send_launches(self._launcher)
        try:
            super()._run(*arguments, **how)
        finally:
            self._library.emulator_send_launches(None)
