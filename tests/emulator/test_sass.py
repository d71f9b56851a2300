"""The machine code of the kernels: loads in flight and their width, tensor cores, instructions a chunk or token.

`python -m pytest -s tests/emulator/test_sass.py` prints the table, and times computed from its counts.
"""

import math
import re
from typing import NamedTuple

import pytest
import torch
from cubin import compile_cubin, kept_cubin, needs_nvcc, parse_report
from emulator import RULES, Emulator, Launch
from sass import FEATURES, Kernel, disassemble, measure_all, readable


class Expected(NamedTuple):
    """The limits of a kind of kernel."""

    # Greatest numbers in a round of the main loop: by scan or pass, and by the rows of a pass.
    instructions: dict[str, int]
    features: frozenset[str] = frozenset()
    # Greatest number of global loads and copies below 16 bytes: single numbers of a token. None: any.
    narrow: int | None = None
    in_flight: int = 0  # least number of simultaneous loads, unless there are asynchronous copies


ROWS = (16, 32, 64, 128)  # of a state in chunks, as compiled
# By rows and columns of a thread's tile; scans with a removal have half as much again.
BACKWARD = {"8 x 1": 770, "8 x 2": 790, "8 x 4": 1120, "16 x 1": 1290}
# A scan goes a token at a time; its tokens are copied meanwhile, 16 bytes at once where rows allow it, and else by
# several loads. It must not become longer than it is. A round of a pass in chunks is 32 tokens.
EXPECTED = {
    "scan": Expected(
        {
            "SumScan": 230,
            "DeltaForward": 280,
            "DeltaBackwardValues": 220,
            "DeltaBackwardQueries": 320,
            "DeltaBackwardKeys": 240,
            "ForgetForward": 350,
            **{f"ForgetBackward {tile}": most for tile, most in BACKWARD.items()},
            **{f"ForgetBackward {tile} removal": 3 * most // 2 for tile, most in BACKWARD.items()},
        },
        frozenset({"LDGSTS"}),
        in_flight=4,
    ),
    "chunk": Expected(
        {
            **{f"ChunkForward {rows}": most for rows, most in {16: 2200, 32: 2300, 64: 2500, 128: 2900}.items()},
            **{f"ChunkStates {rows}": most for rows, most in {16: 550, 32: 600, 64: 700, 128: 950}.items()},
            **{f"ChunkBackward {rows}": most for rows, most in {16: 2850, 32: 3000, 64: 3300, 128: 3800}.items()},
            **{f"ChunkForward {rows} fades": most for rows, most in {16: 2500, 32: 2600, 64: 2800, 128: 3200}.items()},
            **{f"ChunkBackward {rows} fades": most for rows, most in {16: 4100, 32: 4200, 64: 4500, 128: 5200}.items()},
            **{f"ChunkForward {rows} ends": most for rows, most in {16: 1500, 32: 1600, 64: 1750, 128: 2100}.items()},
            **{f"ChunkBackward {rows} ends": most for rows, most in {16: 2350, 32: 2550, 64: 2800, 128: 3400}.items()},
        },
        frozenset(FEATURES),
        narrow=4,
        in_flight=4,
    ),
    # With decays by key. A block of the scores and of the gradients has one chunk, and no loop over chunks.
    "keys": Expected(
        {
            **{f"ChunkKeyScores {rows}": 1750 for rows in ROWS},
            **{f"ChunkKeyScores {rows} erases": 3150 for rows in ROWS},
            **{f"ChunkKeyStates {rows}": most for rows, most in zip(ROWS, (1800, 1900, 2150, 2650), strict=True)},
            **{f"ChunkKeyStates {rows} ends": most for rows, most in zip(ROWS, (1200, 1250, 1300, 1400), strict=True)},
            **{
                f"ChunkKeyStates {rows} erases": most for rows, most in zip(ROWS, (2450, 2650, 3050, 3900), strict=True)
            },
            **{
                f"ChunkKeyStates {rows} erases ends": most
                for rows, most in zip(ROWS, (2000, 2150, 2450, 3100), strict=True)
            },
        },
        frozenset(FEATURES),
        narrow=4,
        in_flight=4,
    ),
    # These load states as pairs of numbers, or as single ones.
    "gradients": Expected(
        {
            **{f"ChunkKeyGradients {rows}": 4250 for rows in ROWS},
            **{f"ChunkKeyGradients {rows} erases": 6450 for rows in ROWS},
        },
        frozenset(FEATURES),
        narrow=36,
        in_flight=8,
    ),
    "other": Expected({}),
}

# For a GPU such as the H200; the clock is assumed.
MULTIPROCESSORS, CLOCK, SLOTS, BYTES_PER_SECOND, SHARED_KIB = 132, 1.755e9, 4, 4.3e12, 227
# Batch, heads, tokens and size of a key and value.
SHAPES = ((96, 8, 256, 16), (56, 8, 384, 32), (8, 16, 4096, 64), (1, 16, 32768, 128))
GATED = (1, 32, 8192, 128)
# In bfloat16, forward and backward, in microseconds.
TARGETS = {("delta", shape): target for shape, target in zip(SHAPES, (45, 60, 400, 2500), strict=True)}
TARGETS["gated_delta", GATED] = 1000


def kind_of(name: str) -> str:
    if name.startswith("scan_kernel"):
        return "scan"
    if name.startswith("chunk_kernel<ChunkKey"):
        return "gradients" if "Gradients" in name else "keys"
    return "chunk" if name.startswith("chunk_kernel") else "other"


def pass_of(name: str) -> str:
    """Return a pass in chunks with its rows, and what it has beyond others.

    This is erasing with decays by key, or decays by head; or the pass only finds the ends of segments.
    """
    if not (found := re.search(r"<(\w+)<(\d+)((?:, \w+)*)>", name)):
        return ""
    erases, second, ends = ([flag == "true" for flag in found[3].split(", ")[1:]] + 3 * [False])[:3]
    of_key = found[1].startswith("ChunkKey")
    more = [" erases" * (of_key and erases), " fades" * (second and not of_key and not ends), " ends" * ends]
    return f"{found[1]} {found[2]}{''.join(more)}"


def ceiling(name: str) -> int | None:
    """Return the greatest number of instructions in a round, by the scan or its rule and tile, or by the pass."""
    known = EXPECTED[kind_of(name)].instructions
    if scan := re.search(r"<(\w+)(?:<\w+, \d+, (\d+)>, (\d+), (\d+))?", name):
        kind, erases, rows, columns = scan.groups()
        of_tile = f"{kind} {rows} x {columns}{' removal' * (erases == '2')}"
        return known.get(of_tile, known.get(kind, known.get(pass_of(name))))
    return None


def faults(kernels: list[Kernel]) -> list[str]:
    """Return one sentence for each violated limit."""
    found = []
    for kernel in kernels:
        expected = EXPECTED[kind_of(kernel.name)]
        most, instructions = ceiling(kernel.name), instructions_a_round(kernel)
        if expected.instructions and most is None:
            found.append(f"{kernel.name} must have a ceiling of instructions in EXPECTED, it has {instructions:.0f}")
        elif most is not None and instructions > most:
            found.append(f"{kernel.name}: instructions a round must be at most {most}, got {instructions:.0f}")
        if missing := expected.features - kernel.found:
            found.append(f"{kernel.name} must have {', '.join(sorted(missing))} in its loops")
        narrow = sum(count for width, count in kernel.widths.items() if width < 16)
        if expected.narrow is not None and narrow > expected.narrow:
            found.append(
                f"{kernel.name}: loads of less than 16 bytes must be at most {expected.narrow}, got {narrow}:"
                f" {kernel.widths}"
            )
        if kernel.in_flight < expected.in_flight and "LDGSTS" not in kernel.found:
            found.append(
                f"{kernel.name}: loads in flight must be at least {expected.in_flight}, got {kernel.in_flight}"
            )
    return found


def table(kernels: list[Kernel], registers: list[int]) -> str:
    lines = [
        f"{'kernel':48} loads in flight  bytes a load  instructions  registers  features",
        f"{'':48} most    mean                   a round",
    ]
    for kernel, used in zip(kernels, registers, strict=True):
        widths = sorted(kernel.widths)
        of_bytes = f"{widths[0]}-{widths[-1]}" if len(widths) > 1 else "".join(map(str, widths))
        lines.append(
            f"{kernel.name:48} {kernel.in_flight:4} {kernel.mean_in_flight:7.1f} {of_bytes:>14}"
            f" {instructions_a_round(kernel):13.0f} {used:10}  {' '.join(sorted(kernel.found))}".rstrip()
        )
    return "\n".join(lines)


def instructions_a_round(kernel: Kernel) -> float:
    """Return the instructions of a token, or of a chunk of tokens.

    A backward scan that makes states again visits the 8 groups of a chunk 10 times, and then each for its results. The
    longest loop of a pass in chunks is the one over chunks.
    """
    if kernel.name.startswith("chunk_kernel"):
        return kernel.longest
    if not kernel.name.startswith("scan_kernel<ForgetBackward"):
        return kernel.instructions
    to_state, forward, back = kernel.loops
    return to_state * 10 / 8 + forward + back


def microseconds(kernel: Kernel, launch: Launch) -> float:
    """Return the time to issue all instructions of a launch: one a cycle from each slot of a multiprocessor.

    A lower bound: kernels also wait for memory and for their own results, and scans move tokens between their rounds.
    """
    blocks = math.ceil(launch.blocks / MULTIPROCESSORS)
    warps_a_slot = math.ceil(blocks * launch.threads / 32 / SLOTS)
    return instructions_a_round(kernel) * launch.rounds * warps_a_slot / CLOCK * 1e6


def bytes_of(rule: str, batch: int, heads: int, tokens: int, d: int, dtype: torch.dtype) -> int:
    """Return the bytes of all inputs, outputs and gradients; gates by key count as further keys."""
    vectors = {"sum": 10, "delta": 11, "gated": 10, "gated_delta": 11}.get(rule, 13)
    return batch * heads * tokens * (vectors * d + 6) * dtype.itemsize


def estimates(emulator: Emulator, kernels: dict[str, Kernel]) -> str:
    """Print lower bounds of the time of both passes, by instructions and by bytes, next to the targets."""
    lines = [f"{'forward and backward pass, in us':56} instructions    bytes  target"]
    cases = [(rule, shape, dtype) for dtype in (torch.bfloat16, torch.float32) for rule in RULES for shape in SHAPES]
    for rule, shape, dtype in [*cases, ("gated_delta", GATED, torch.bfloat16)]:
        launches = [
            launch
            for is_backward in (False, True)
            for launch in emulator.plan(rule, (*shape, shape[3]), dtype, is_backward, SHARED_KIB)
        ]
        issue = sum(microseconds(kernels[launch.kernel], launch) for launch in launches)
        moved = bytes_of(rule, *shape, dtype) / BYTES_PER_SECOND * 1e6
        target = TARGETS.get((rule, shape), "") if dtype == torch.bfloat16 else ""
        what = f"{rule}, {str(dtype).removeprefix('torch.')}, {shape}"
        lines.append(f"{what:56} {issue:12,.0f} {moved:8,.0f} {target:>7}".rstrip())
    return "\n".join(lines)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["80", "90a", "100"])
def test_kernels_keep_to_the_gate(architecture, emulator):
    cubin = kept_cubin(architecture)
    by_key = measure_all(disassemble(cubin.path))
    registers = {usage.kernel: usage.registers for usage in parse_report(cubin.report)}
    assert by_key.keys() == registers.keys()
    kernels = [by_key[key] for key in sorted(by_key, key=lambda key: by_key[key].name)]
    used = [registers[key] for key in sorted(by_key, key=lambda key: by_key[key].name)]
    print(f"\nsm_{architecture}\n{table(kernels, used)}\n\n{estimates(emulator, by_key)}")
    assert faults(kernels) == []


NARROW = """
#include <cuda_bf16.h>
template <int, bool> struct ChunkStates {};
template <typename> __global__ void chunk_kernel(const __nv_bfloat16* x, float* y, const int* at, int n) {
  constexpr int rows = 16;
  __shared__ float tile[rows];
  float sum = 0;
  for (int chunk = 0; chunk < n; ++chunk) {
    tile[threadIdx.x] = __bfloat162float(x[chunk * rows + threadIdx.x]);
    __syncthreads();
    for (int i = 0; i < rows; ++i) sum += tile[i] * y[at[chunk] & 63];
    __syncthreads();
  }
  y[threadIdx.x] = sum;
}
template __global__ void chunk_kernel<ChunkStates<16, false>>(const __nv_bfloat16*, float*, const int*, int);
"""
WIDE = """
#include <cuda_bf16.h>
template <int, bool> struct ChunkStates {};
template <typename> __global__ void chunk_kernel(const uint4* x, float* y, int n) {
  __shared__ uint4 tile[64];
  float c[4] = {0, 0, 0, 0};
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(tile + threadIdx.x));
  for (int chunk = 0; chunk < n; ++chunk) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(x + chunk * 64 + threadIdx.x));
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    unsigned a[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(to));
    const __nv_bfloat162 b = __floats2bfloat162_rn(c[0], c[1]);
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(*reinterpret_cast<const unsigned*>(&b)));
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = c[i];
}
template __global__ void chunk_kernel<ChunkStates<16, false>>(const uint4*, float*, int);
"""


def compiled(text, folder):
    (folder / "kernel.cu").write_text(text)
    return list(measure_all(disassemble(compile_cubin(folder / "kernel.cu", "90a", folder).path)).values())


@needs_nvcc
def test_narrow_loads_are_found(tmp_path):
    """The bad kernel has single bfloat16 loads and no tensor cores."""
    (kernel,) = compiled(NARROW, tmp_path)
    assert kernel.name == "chunk_kernel<ChunkStates<16, false>>" and set(kernel.widths) == {2, 4}
    said = "\n".join(faults([kernel]))
    assert "must have F2FP.BF16, HMMA, LDGSTS, LDSM" in said
    assert "loads in flight must be at least 4" in said
    assert "loads of less than 16 bytes" in "\n".join(faults([kernel._replace(widths={2: 3, 4: 2})]))
    assert "instructions a round" in "\n".join(faults([kernel._replace(longest=551)]))


@needs_nvcc
def test_wide_copies_pass(tmp_path):
    (kernel,) = compiled(WIDE, tmp_path)
    assert set(kernel.widths) == {16} and kernel.found == frozenset(FEATURES)
    assert faults([kernel]) == []
    assert faults([kernel._replace(name="chunk_kernel<ChunkStates<48, false>>")]) != []


SASS = """
//--------------------- .text.{0} --------------------------
        /*0000*/                   LDG.E R20, desc[UR6][R2.64] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0020*/               @P0 LDG.E.U16 R8, desc[UR6][R2.64+0x20] ;
.L_x_2:
        /*0030*/                   FFMA R9, R10, R10, R9 ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
        /*0050*/                   {1} ;
        /*0060*/                   LDG.E R11, desc[UR6][R2.64] ;
        /*0070*/              @!P0 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3) ;
"""


@pytest.mark.parametrize(
    ("between", "in_flight"),
    [
        ("STS [R12], R6", 2),  # part of what the first load brings
        ("STS.64 [R12], R3", 2),  # R3 and R4
        ("BAR.SYNC.DEFER_BLOCKING 0x0", 2),
        ("IADD3 R12, R13, R14, RZ", 3),
    ],
)
def test_runs_of_loads(between, in_flight):
    ((_, kernel),) = measure_all(SASS.format("_Z6kernelv", between)).items()
    assert kernel.name == "kernel"
    assert kernel.in_flight == in_flight
    assert kernel.widths == {2: 1, 4: 1, 16: 1}  # that before the loops is none of theirs
    assert kernel.instructions == 2


def test_names_are_readable():
    assert readable(["_ZN3fwp4cuda13chunks_kernelINS0_11DeltaChunksILi128ELb1EEEEEvT_"]) == [
        "chunks_kernel<DeltaChunks<128, true>>"
    ]
