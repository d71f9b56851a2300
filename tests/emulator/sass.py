"""The kernels in SASS, the instructions of a GPU: their loops, and counts in one round of the main loop.

Counts are of instructions as written: an inner loop that is not unrolled counts once, and so does an
instruction that a branch may skip.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABEL = re.compile(r"(\.L_x_\d+):")
KERNEL = re.compile(r"//-+ \.text\.(\S+) -+")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
REGISTER = re.compile(r"\bR(\d+)\b")
# Bytes that a load brings, by a part of its name; a load without one brings 4.
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
ARITHMETIC = ("FFMA", "FADD", "FMUL", "DFMA", "DADD", "DMUL", "HMMA.", "HGMMA.")
PRODUCTS = ("FFMA", "FMUL", "DFMA", "DMUL", "HMMA.", "HGMMA.")
FEATURES = ("LDGSTS", "LDSM", "HMMA", "F2FP.BF16")
ENDS = ("EXIT", "RET", "BRX", "JMP", "KILL", "BPT")


class Instruction(NamedTuple):
    label: str  # that stands before it
    predicate: str
    opcode: str
    operands: str

    @property
    def ends(self) -> bool:
        """Whether the next instruction is not reached from this one."""
        leaves = self.opcode.split(".")[0] in ENDS or self.opcode in ("BRA", "BRA.U")
        return leaves and not self.predicate and not re.match(r"!?U?P", self.operands)

    @property
    def bytes(self) -> int:
        return next((BYTES[part] for part in self.opcode.split(".") if part in BYTES), 4)


class Kernel(NamedTuple):
    """The counts of a kernel that have limits. All except local memory are those of its loops."""

    name: str  # as people read it
    instructions: int  # in a round of the main loop
    longest: int  # in a round of the longest loop
    in_flight: int  # greatest number of simultaneous global loads; asynchronous copies do not count
    mean_in_flight: float  # the same, on average over the waits for them
    widths: dict[int, int]  # number of global loads and asynchronous copies by the bytes of each
    found: frozenset[str]  # those of FEATURES that occur
    loops: tuple[int, ...]  # lengths of the innermost loops with a tenth of the multiplications, shortest first


def find_disassembler() -> str | None:
    """Return the path of nvdisasm: on PATH, or from the package nvidia-cuda-nvdisasm."""
    installed = (folder for path in sys.path for folder in Path(path).glob("nvidia/*/bin"))
    return next(filter(None, (shutil.which("nvdisasm", path=path) for path in [None, *map(str, installed)])), None)


def disassemble(cubin: Path) -> str:
    """Return the SASS of a cubin."""
    program = find_disassembler()
    assert program, "there is no nvdisasm: pip install nvidia-cuda-nvdisasm"
    return subprocess.run([program, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


def parse(sass: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel, by its mangled name."""
    kernels: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    label = ""
    for line in sass.splitlines():
        if found := KERNEL.match(line):
            body = kernels.setdefault(found[1], [])
        elif found := LABEL.match(line):
            label = found[1]
        elif found := INSTRUCTION.match(line):
            body.append(Instruction(label, found[2] or "", found[3], found[4].strip()))
            label = ""
    return kernels


def readable(names: Iterable[str]) -> list[str]:
    """Return the names of kernels without namespaces, return types and arguments."""
    said = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout
    return [_shortened(name) for name in said.splitlines()]


def _shortened(name: str) -> str:
    for old, new in (("void ", ""), ("fwp::cuda::", ""), ("(Fades)", ""), ("(Erases)", ""), (" >", ">")):
        name = name.replace(old, new)
    return re.sub(r"\(.*", "", name)


def successors(body: list[Instruction]) -> list[list[int]]:
    """Return for each instruction those that may follow, without the paths of diverged warps."""
    at = {instruction.label: i for i, instruction in enumerate(body) if instruction.label}
    found: list[list[int]] = []
    for i, instruction in enumerate(body):
        to = [] if instruction.ends or i + 1 == len(body) else [i + 1]
        if instruction.opcode in ("BRA", "BRA.U") and (target := TARGET.search(instruction.operands)):
            to.append(at[target[1]])
        found.append(to)
    return found


def loops(body: list[Instruction]) -> list[set[int]]:
    """Return the natural loops, largest first, each as the places of its instructions."""
    after = successors(body)
    before: list[list[int]] = [[] for _ in body]
    for i in _reached(after):
        for j in after[i]:
            before[j].append(i)
    found: dict[int, set[int]] = {}
    for tail, head in _backward_edges(after):
        inside, left = found.setdefault(head, {head}), [tail]
        while left:
            i = left.pop()
            if i not in inside:
                inside.add(i)
                left += before[i]
    return sorted(found.values(), key=len, reverse=True)


def _reached(after: list[list[int]]) -> set[int]:
    """Return the instructions that can follow the entry: not those for diverged warps."""
    found, left = {0}, [0]
    while left:
        new = set(after[left.pop()]) - found
        found |= new
        left += new
    return found


def _backward_edges(after: list[list[int]]) -> Iterator[tuple[int, int]]:
    """Yield the edges to an instruction on the path from the entry: in compiled code, those that close a loop."""
    way, seen = [(0, iter(after[0]))], {0}
    on_way = {0}
    while way:
        i, to = way[-1]
        j = next(to, None)
        if j is None:
            way.pop()
            on_way.remove(i)
        elif j in on_way:
            yield i, j
        elif j not in seen:
            seen.add(j)
            on_way.add(j)
            way.append((j, iter(after[j])))


def main_loop(body: list[Instruction], found: list[set[int]]) -> set[int]:
    """Return the innermost loop with more than half of the arithmetic of all loops: one round is a token or a chunk."""
    arithmetic = {i for i, instruction in enumerate(body) if instruction.opcode.startswith(ARITHMETIC)}
    looped = arithmetic & set[int]().union(*found)
    return next((loop for loop in reversed(found) if 2 * len(loop & looped) > len(looped)), set())


def busy_loops(body: list[Instruction], found: list[set[int]]) -> tuple[int, ...]:
    """Return the lengths of the innermost loops with at least a tenth of the multiplications of all loops."""
    products = {i for i, instruction in enumerate(body) if instruction.opcode.startswith(PRODUCTS)}
    busy = [loop for loop in found if 10 * len(loop & products) >= len(products & set[int]().union(*found))]
    return tuple(sorted(len(loop) for loop in busy if not any(other < loop for other in busy)))


def runs_of_loads(body: list[Instruction]) -> list[int]:
    """Return the numbers of simultaneous global loads: runs without a use of a result.

    A barrier and the end of a path end a run too.
    """
    runs, pending = [0], set[int]()
    for instruction in body:
        named = [int(number) for number in REGISTER.findall(instruction.operands)]
        registers = {first + i for first in named for i in range(_width(instruction))}
        is_load = instruction.opcode.startswith("LDG.")
        # The register that a load fills comes first; two loads may share it, one for each side of a condition.
        used = registers - {_target(instruction)} if is_load else registers
        if used & pending or instruction.opcode.startswith("BAR") or instruction.ends:
            runs, pending = [*runs, 0], set()
        if is_load:
            runs[-1] += 1
            pending |= {_target(instruction) + i for i in range(max(instruction.bytes // 4, 1))}
    return [run for run in runs if run]


def _width(instruction: Instruction) -> int:
    """Return an upper bound of the registers of a name: those of an address are included."""
    if instruction.opcode.startswith("HMMA"):
        return 4
    return instruction.bytes // 4 if instruction.opcode.startswith(("STS.", "STG.")) and instruction.bytes > 4 else 1


def _target(load: Instruction) -> int:
    found = REGISTER.search(load.operands.split(",")[0])
    return int(found[1]) if found else -1


def measure(name: str, body: list[Instruction]) -> Kernel:
    """Return the counts of one kernel. If most of its arithmetic is outside of loops, it counts as one itself."""
    found = loops(body)
    arithmetic = [i for i, instruction in enumerate(body) if instruction.opcode.startswith(ARITHMETIC)]
    if 2 * len(set[int]().union(*found) & set(arithmetic)) < len(arithmetic):
        found = [_reached(successors(body)), *found]
    inside = set[int]().union(*found)
    looped = [body[i] for i in sorted(inside)]
    runs = runs_of_loads(looped)
    loads = [x.bytes for x in looped if x.opcode.startswith(("LDG.", "LDGSTS."))]
    return Kernel(
        name,
        len(main_loop(body, found)),
        max(map(len, found), default=0),
        max(runs, default=0),
        sum(runs) / max(len(runs), 1),
        {width: loads.count(width) for width in sorted({*loads})},
        frozenset(feature for feature in FEATURES if any(x.opcode.startswith(feature) for x in looped)),
        busy_loops(body, found),
    )


def measure_all(sass: str) -> dict[str, Kernel]:
    """Return the counts of all kernels, by their mangled names."""
    bodies = parse(sass)
    return {key: measure(name, bodies[key]) for key, name in zip(bodies, readable(bodies), strict=True)}
