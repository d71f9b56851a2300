"""Build the CUDA kernels for the CPU, with emulator.h instead of CUDA, and call them on tensors.

The operator takes the given arguments of ``fast_weights`` by name, and whether the rule erases.
"""

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from support.subjects import state_dtype
from torch import Tensor

from fairseq_fwp.ops.fast_weights import segments_of

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "cuda_ext" / "cuda"
CHUNK = 32  # tokens between two states that the forward pass of a forgetting rule keeps
# The folder of libraries and programs, which are used until a source changes.
CACHE = Path(os.environ.get("FWP_CACHE_DIR") or Path(tempfile.gettempdir()) / f"fwp_emulator_{os.getuid()}")
SHARED_KIB = 163  # an A100's
GUARD = 4096  # guard elements before and after each output
# The operator's arguments, and the launchers' names of its rules.
NAMES = ("q", "k", "v", "decay", "value_decay", "rate", "removal_key", "removal", "state", "first")
RULES = ("sum", "delta", "gated", "gated_by_key", "decay", "gated_delta", "gated_delta_by_key", "removal")
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def sources_of(kernels: Path) -> list[Path]:
    """Return the files of the kernels in a folder, in a fixed order."""
    return [kernels.parent / "rule.h", *sorted(path for path in kernels.rglob("*") if path.is_file())]


def units_of(kernels: Path) -> list[Path]:
    """Return the files that nvcc compiles."""
    return [path for path in sources_of(kernels) if path.suffix == ".cu"]


def make_once(name: str, command: Sequence[str], files: Iterable[Path], folder: Path = CACHE) -> Path:
    """Return what a compiler's command makes, made before if neither the command nor the files have changed since."""
    key = hashlib.sha256(repr(command).replace(str(HERE.parents[1]), "").encode())
    for path in files:
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    target = folder / f"{name}_{key.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:  # other processes wait for this compilation
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / name
                subprocess.run([*command, "-o", str(made)], check=True)
                os.replace(made, target)
    return target


def build(
    kernels: Path = KERNELS,
    *,
    program: bool = False,
    source: Path = HERE / "emulator.cpp",
    flags: Sequence[str] = ("-O1", "-Wall", "-Werror"),
    folder: Path = CACHE,
) -> Path:
    """Build a library of the kernels, or a program that runs them, unless it exists and no source has changed."""
    assert shutil.which(compiler()[0]), "the emulator needs a C++ compiler: install g++ 10 or later, or set CXX"
    kind = ["-DEMULATOR_PROGRAM"] if program else ["-fPIC", "-shared"]
    # Without an FMA instruction, each fma of a kernel is a call of about a hundred instructions.
    native = ["-march=native"] if os.uname().machine == "x86_64" else []
    command = [*compiler(), "-std=c++17", *native, *flags, *kind, "-ffp-contract=off"]
    command += ["-include", str(HERE / "emulator.h"), f"-I{kernels}", str(source)]
    files = (*sources_of(kernels), *sorted({*HERE.glob("*.[hc]*"), *source.parent.glob("*.[hc]*")}))
    return make_once("emulator", command, files, folder)


class _Structure(ctypes.Structure):
    """Return a structure of zeros, except the named fields."""


class _Sizes(_Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("B", "H", "L", "Dk", "Dv")]


class _InputArray(_Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
        ("type", ctypes.c_int),
    ]


class _OutputArray(_Structure):
    _fields_ = [("data", ctypes.c_void_p), ("type", ctypes.c_int), ("tokens_first", ctypes.c_bool)]


class _Call(_Structure):
    _fields_ = [
        ("size", _Sizes),
        ("type", ctypes.c_int),
        ("rule", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("begins", "workspace", "stream")),
    ]


PARTS = ("q", "k", "v", "head_decay", "key_decay", "value_decay", "rate", "removal_key", "removal")


class _Inputs(_Structure):
    _fields_ = [*((name, _InputArray) for name in PARTS), ("state", ctypes.c_void_p)]


class _Outputs(_Structure):
    _fields_ = [("out", _OutputArray), *((to, ctypes.c_void_p) for to in ("state", "retrieved", "kept", "segments"))]


class _BackwardInputs(_Structure):
    _fields_ = [
        *((name, _InputArray) for name in ("retrieved", "d_out")),
        *((name, ctypes.c_void_p) for name in ("kept", "segments", "d_state")),
    ]


class _Gradients(_Structure):
    _fields_ = [*((name, _OutputArray) for name in PARTS), ("state", ctypes.c_void_p)]


class _Pretended(_Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("reversed", "multiprocessors", "shared_kib")]


def _fill(structure: type[_Structure], tensors: dict[str, Tensor]) -> _Structure:
    """Return the structure with the address and strides of each tensor."""
    filled = structure()
    for name, kind in structure._fields_:
        x = tensors.get(name)
        if x is None:
            continue
        if kind is _InputArray:
            vectors = x.dim() == 3 or x.stride(3) == 1 or x.shape[3] <= 1 or not x.numel()
            assert vectors, "the last dimension must be contiguous"
            setattr(filled, name, _InputArray(x.data_ptr(), *x.stride()[:3], TYPES[x.dtype]))
            continue
        tokens_first = name == "out"
        assert (x.transpose(1, 2) if tokens_first else x).is_contiguous()
        target = _OutputArray(x.data_ptr(), TYPES[x.dtype], tokens_first)
        setattr(filled, name, target if kind is _OutputArray else x.data_ptr())
    return filled


class EmulatorError(Exception):
    """A mistake in the kernels that the emulator has found."""


Given = dict[str, Tensor]


class Emulator:
    """The operator and its backward pass.

    Args:
        library: the result of :func:`build`.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emulator_forward.restype = self._library.emulator_backward.restype = ctypes.c_char_p
        self._library.emulator_workspace_bytes.restype = ctypes.c_size_t

    def forward(self, given: Given, erases: bool, **how: int) -> Given:
        """Return out, the state, and for the backward pass retrieved, kept and segments."""
        rule, parts = prepare(given, erases)
        q, v = given["q"], given["v"]
        sizes, dtype = (*q.shape[:2], q.shape[3], v.shape[3]), state_dtype(q.dtype)
        by_tokens = self._empty((v.shape[0], v.shape[2], v.shape[1], v.shape[3]), q.dtype)
        to = {"out": by_tokens.transpose(1, 2), "state": self._empty(sizes, dtype)}
        if erases or rule == "removal":
            to["retrieved"] = self._empty(v.shape, dtype)
        if rule not in ("sum", "delta"):
            to["kept"] = self._empty((*q.shape[:2], q.shape[2] // CHUNK, *sizes[2:]), dtype)
        if q.dtype == torch.bfloat16:
            segments = segments_of(*q.shape[1:3])
            to["segments"] = self._empty((*q.shape[:2], segments, q.shape[3] + v.shape[3], q.shape[3]), dtype)
        self._run(self._library.emulator_forward, rule, given, [_fill(_Inputs, parts), _fill(_Outputs, to)], to, **how)
        return to

    def backward(
        self, given: Given, erases: bool, results: Given, gradients: Sequence[Tensor | None], **how: int
    ) -> Given:
        """Return gradients of the arguments by name, and of the state if there is one."""
        rule, parts = prepare(given, erases)
        to = {name: self._empty(x.shape, x.dtype) for name, x in parts.items()}
        to = {name: x for name, x in to.items() if name != "rate" or "rate" in given}
        more = {name: x for name, x in results.items() if name in ("retrieved", "kept", "segments")}
        more |= {name: x for name, x in zip(("d_out", "d_state"), gradients, strict=True) if x is not None}
        structures = [_fill(_Inputs, parts), _fill(_BackwardInputs, more), _fill(_Gradients, to)]
        self._run(self._library.emulator_backward, rule, given, structures, to, **how)
        of_decay = to.pop("head_decay", to.pop("key_decay", None))
        if "decay" in given:
            to["decay"] = of_decay.sum(-1) if of_decay.dim() > given["decay"].dim() else of_decay
        return {f"d_{name}": x.to(given[name].dtype) for name, x in to.items()}

    def results(self, given: Given, erases: bool, gradients: Sequence[Tensor | None], **how: int) -> Given:
        """Return outputs and all gradients, by name."""
        found = self.forward(given, erases, **how)
        outputs = {name: found[name] for name in ("out", "state")}
        return outputs | self.backward(given, erases, found, gradients, **how)

    def workspace_bytes(
        self,
        rule: str,
        sizes: Sequence[int],
        dtype: torch.dtype,
        is_backward: bool = True,
        multiprocessors: int = 132,
        shared_kib: int = SHARED_KIB,
    ) -> int:
        how = _Pretended(0, multiprocessors, shared_kib)
        call = _Call(_Sizes(*sizes), TYPES[dtype], RULES.index(rule))
        return self._library.emulator_workspace_bytes(ctypes.byref(how), ctypes.byref(call), is_backward)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of NaN, with a guard on both sides."""
        numel = torch.Size(shape).numel()
        return torch.full((numel + 2 * GUARD,), float("nan"), dtype=dtype)[GUARD : GUARD + numel].view(shape)

    def _check_guards(self, x: Tensor) -> None:
        whole = torch.as_strided(x, (x.numel() + 2 * GUARD,), (1,), x.storage_offset() - GUARD)
        if not (whole[:GUARD].isnan().all() and whole[-GUARD:].isnan().all()):
            raise EmulatorError(f"an output of shape {tuple(x.shape)} was written beyond its ends")

    def _run(
        self,
        function: Any,
        rule: str,
        given: Given,
        structures: list[_Structure],
        outputs: Given,
        *,
        reverse: int = 0,
        multiprocessors: int = 132,
        shared_kib: int = SHARED_KIB,
    ) -> None:
        q, first = given["q"], given.get("first")
        sizes = (*q.shape, given["v"].shape[3])
        is_backward = function is self._library.emulator_backward
        start = None if first is None else first.data_ptr()
        call = _Call(_Sizes(*sizes), TYPES[q.dtype], RULES.index(rule), start)
        how = _Pretended(reverse, multiprocessors, shared_kib)
        need = self._library.emulator_workspace_bytes(ctypes.byref(how), ctypes.byref(call), is_backward)
        workspace = self._empty((-(-need // 4),), torch.float32)
        call.workspace = workspace.data_ptr() if need else None
        error = function(*map(ctypes.byref, (how, call, *structures)))
        if error is not None:
            raise EmulatorError(error.decode())
        for x in (workspace, *outputs.values()):
            self._check_guards(x)


def prepare(given: Given, erases: bool) -> tuple[str, Given]:
    """Return the rule and the launchers' settings of it, as in the binding, from the operator's arguments."""
    q, decay = given["q"], given.get("decay")
    parts = {name: x if x.stride(-1) == 1 else x.contiguous() for name, x in given.items() if name in (*PARTS, "state")}
    fades = decay is not None or "value_decay" in given or "removal_key" in given or ("rate" in given and not erases)
    parts.setdefault("rate", torch.ones((), dtype=q.dtype).expand(q.shape[:3]))
    if not fades:
        return "delta" if erases else "sum", parts
    if decay is None and ("value_decay" in given or "removal_key" in given):
        decay = torch.ones(q.shape[3], dtype=q.dtype).expand(q.shape)
    if decay is None or (decay.dim() == 3 and not {"value_decay", "removal_key"} & given.keys()):
        parts["head_decay"] = torch.ones((), dtype=q.dtype).expand(q.shape[:3]) if decay is None else decay
        return "gated_delta" if erases else "gated", parts
    parts["key_decay"] = decay if decay.dim() == 4 else decay.unsqueeze(-1).expand(q.shape).contiguous()
    if "removal_key" in given:
        return "removal", parts
    if "value_decay" in given:
        return "decay", parts
    return "gated_delta_by_key" if erases else "gated_by_key", parts
