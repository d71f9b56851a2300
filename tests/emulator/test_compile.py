"""nvcc compiles the kernels for every generation of GPUs, without local memory."""

import re
import subprocess

import pytest
from emulator import HERE, KERNELS, compiler, units_of
from nvcc import compile_source, compiled_kernels, needs_nvcc, parse_report

# By the type of the computation. 128 registers leave room for four blocks of 128 threads in a multiprocessor, 168 for
# three; float64 takes two for each number. The backward scan of a fading rule has a state and its gradient. The
# passes on the tensor cores, whose threads hold 64 numbers of the state where it has 128 rows, have one block of 256.
GREATEST = {"f": 128, "wide f": 168, "backward f": 255, "d": 255, "L": 255, "segments": 128, "maps": 64}
GREATEST |= {"recurrent_deltas": 255}
# For each of the eight rules, the forward scan in three shapes (float64: two), and the backward scan in four (two).
# Four kernels of sums. On tensor cores (L), for each of four numbers of rows: both passes of four rules and their
# gradients of keys, and with decays by key, for two types, the states of four rules in both directions. For any
# rows, these four have the scores and the gradients of keys, for two types. One kernel goes from segment to segment.
# Both passes of maps, for four types; and of the recurrent delta rule, for two types and three sizes of heads.
KERNELS_BY_TYPE = {"f": 8 * (3 + 4) + 4, "d": 8 * (2 + 2) + 4, "L": (4 * 3 + 2 * 4 * 2) * 4 + 2 * 4 * 2}
KERNELS_BY_TYPE |= {"segments": 1, "maps": 2 * 4, "recurrent_deltas": 2 * 2 * 3}
# Bytes of local memory, at most, of all architectures: these passes use all registers, and keep some addresses outside.
# The most are those of float32, in three parts; in bfloat16, gradients have up to 272 and walks up to 112.
GREATEST_STACK = {
    "Gradients": 400,
    "KeyStatesILi128E": 328,
    "KeyStatesILi": 168,
    "KeyScores": 32,
    "segments_kernel": 8,
    "MapPassIdLb1E": 8,
    "RecurrentForwardPassIdLi64E": 184,  # float64 is there to check the rest
    "RecurrentBackwardPassIdLi64E": 888,
    "RecurrentBackwardPassIdLi32E": 32,
    "RecurrentForwardIfLNS_5FadesE1ELNS_6ErasesE1EEELi16E": 8,
    "ILi16ELb1E": 32,
    "ILi32ELb1E": 24,
    "ILi64ELb1E": 48,
    "ILi64ELb0ELb0E": 8,
    "ILi64ELb0ELb1E": 96,
    "ILi128ELb1E": 160,
    "ILi128ELb0ELb1E": 88,
    "ILi128ELb0ELb0E": 8,
    "RecurrentBackwardIdLNS_5FadesE0ELNS_6ErasesE1EEELi16E": 24,
}


def type_of(usage):
    """Return the first template argument that is not a class, in the compiler's spelling, or what others are for."""
    of_others = re.search(r"(map|segment|recurrent_delta)s?_kernel", usage.kernel)
    return f"{of_others[1]}s" if of_others else re.search(r"I([fdL])", usage.kernel)[1]


def faults(usages):
    found = []
    for usage in usages:
        kind = type_of(usage)
        if kind == "f":
            backward, wide = "RecurrentBackward" in usage.kernel, "ELi8ELi4EEE" in usage.kernel
            kind = "backward f" if backward else "wide f" if wide else "f"
        stack = next((most for name, most in GREATEST_STACK.items() if name in usage.kernel), 0)
        spills = usage.spilled_bytes > 0 and not stack
        if usage.stack_bytes > stack or spills or usage.registers > GREATEST[kind] or usage.shared_bytes:
            found.append(usage)
    return found


@needs_nvcc
def test_the_compiler_takes_the_kernels(tmp_path):
    """Its front end, which instantiates all templates and checks inline PTX; the rest takes minutes."""
    every = tmp_path / "every.cu"
    every.write_text("".join(f'#include "{unit}"\n' for unit in units_of(KERNELS)))
    command = ["nvcc", "-std=c++17", "-arch=sm_90a", "-ptx", "-fdevice-syntax-only", "-Werror", "all-warnings"]
    done = subprocess.run([*command, every, "-o", tmp_path / "k.ptx"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_nvcc
def test_launches_put_arguments_where_kernels_look(tmp_path):
    """nvcc rewrites host code for the C++ compiler, and drops some initializers of enumerators in templates."""
    source, said = HERE / "arguments.cu", []
    for command in (["nvcc", "-arch=sm_90a"], [*compiler(), "-x", "c++", "-include", HERE / "emulator.h"]):
        subprocess.run([*command, "-std=c++17", f"-I{KERNELS}", source, "-o", tmp_path / "program"], check=True)
        said.append(subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout)
    assert said[0] == said[1] and len(said[0].splitlines()) == 8


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["80", "90a", "100"])
def test_registers_hold_everything(architecture):
    report = parse_report(compiled_kernels(architecture).report)
    usages = list({usage.kernel: usage for usage in report}.values())  # files share some
    of_types = [type_of(usage) for usage in usages]
    by_type = {number: of_types.count(number) for number in KERNELS_BY_TYPE}
    assert by_type == KERNELS_BY_TYPE
    assert faults(usages) == []


@needs_nvcc
@pytest.mark.slow
def test_every_access_names_its_memory():
    """A pointer that was kept in shared memory loses it, and loads through it take longer: see in_global_memory()."""
    for ptx in compiled_kernels("90a").ptx:
        assert re.findall(r"\s(?:ld|st)\.(?!global|shared|param)\S+", ptx) == []


@needs_nvcc
def test_local_memory_is_found(tmp_path):
    """An array whose index is only known at run time cannot be in registers."""
    source = tmp_path / "local.cu"
    source.write_text(
        "template <typename T> __global__ void kernel(T* x, const int* at) {\n"
        "  T y[64];\n"
        "  for (int i = 0; i < 64; ++i) y[i] = x[i * 7];\n"
        "  for (int i = 0; i < 64; ++i) x[i] = y[at[i]];\n"
        "}\n"
        "template __global__ void kernel(float* x, const int* at);\n"
    )
    (usage,) = faults(parse_report(compile_source(source, "80", tmp_path).report))
    assert usage.stack_bytes == 256


def test_spills_and_registers_are_found():
    line = "ptxas info    : Compiling entry function '{0}' for 'sm_90a'\nptxas info    : Function properties for {0}\n"
    line += "    {1} bytes stack frame, {2} bytes spill stores, {3} bytes spill loads\n"
    line += "ptxas info    : Used {4} registers, used 1 barriers{5}\n"
    used = [("f", 0, 0, 128, ""), ("f", 0, 0, 129, ""), ("d", 0, 0, 129, ""), ("f", 8, 4, 9, "")]
    used.append(("f", 0, 0, 9, ", 16 bytes smem, 8 bytes cumulative stack size"))
    entries = [(f"kI{kind}E", stack, spilled, 0, registers, more) for kind, stack, spilled, registers, more in used]
    found = parse_report("".join(line.format(*entry) for entry in entries))
    assert faults(found) == [found[1], found[3], found[4]]
