"""Building the CUDA kernels for the CPU, with twin.h in place of CUDA, and calling them on tensors."""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rule_cases import state_dtype
from torch import Tensor

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "cuda_ext" / "cuda"
CHUNK = 32  # tokens between two states that the forward pass of gated and decay keeps
# Where libraries and programs are kept for as long as no source changes.
CACHE = Path(os.environ.get("FWP_CACHE_DIR") or Path(tempfile.gettempdir()) / f"fwp_twin_{os.getuid()}")
GUARD = 4096  # elements before and after each output, which nothing may write to
ORDER = ("sum", "delta", "gated", "decay")
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def build(
    kernels: Path = KERNELS,
    *,
    program: bool = False,
    flags: Sequence[str] = ("-O1", "-Wall", "-Werror"),
    folder: Path = CACHE,
) -> Path:
    """A library of the kernels, or a program that runs them, in a folder; the one that lies there if none changed."""
    assert shutil.which(compiler()[0]), "the twin needs a C++ compiler: install g++ 10 or later, or set CXX"
    key = hashlib.sha256(repr((compiler(), tuple(flags), program)).encode())
    for source in sorted([*kernels.iterdir(), *HERE.glob("twin.[hc]*")]):
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    target = folder / f"twin_{key.hexdigest()[:16]}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        kind = ["-DTWIN_PROGRAM"] if program else ["-fPIC", "-shared"]
        # Without an FMA instruction each of a kernel's fma is a call of some hundred instructions.
        native = ["-march=native"] if os.uname().machine == "x86_64" else []
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "twin"
            subprocess.run(
                [*compiler(), "-std=c++17", *native, *flags, *kind, "-ffp-contract=off"]
                + ["-include", str(HERE / "twin.h"), f"-I{kernels}", str(HERE / "twin.cpp"), "-o", str(made)],
                check=True,
            )
            os.replace(made, target)
    return target


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("B", "H", "L", "Dk", "Dv")]


class _Tokens(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


def _tokens(x: Tensor | None) -> _Tokens:
    if x is None:
        return _Tokens(None, 0, 0, 0)
    assert x.dim() == 3 or x.stride(3) == 1 or x.shape[3] <= 1, "the last dimension must be contiguous"
    return _Tokens(x.data_ptr(), *x.stride()[:3])


class TwinError(Exception):
    """What the twin has to say against the kernels."""


class Twin:
    """The operators of launchers.h.

    Args:
        library: what :func:`build` returns.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.twin_run.restype = ctypes.c_char_p
        self._library.twin_workspace_bytes.restype = ctypes.c_size_t

    def forward(self, rule: str, inputs: dict[str, Tensor | None], **how: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Out, the new state, and what else the operator keeps for the backward pass."""
        q, v, state = inputs["q"], inputs["v"], inputs["state"]
        sizes, dtype = (*q.shape, v.shape[3]), state_dtype(q.dtype)
        out, new_state = self._empty(v.shape, q.dtype), self._empty((*q.shape[:2], *sizes[3:]), dtype)
        chunks = (*q.shape[:2], q.shape[2] // CHUNK, *sizes[3:])
        kept = None if rule == "sum" else self._empty(v.shape if rule == "delta" else chunks, dtype)
        tokens = [x for name, x in inputs.items() if name != "state"]
        self._run(2 * ORDER.index(rule), sizes, q.dtype, tokens, [state], [out, new_state, kept], **how)
        return out, new_state, kept

    def backward(
        self,
        rule: str,
        inputs: dict[str, Tensor | None],
        kept: Tensor | None,
        gradients: tuple[Tensor | None, Tensor | None],
        **how: int,
    ) -> dict[str, Tensor]:
        """Gradients of all inputs by name; that of the state where there is one."""
        q, v, state = inputs["q"], inputs["v"], inputs["state"]
        tokens = {name: x for name, x in inputs.items() if name != "state"}
        found = {f"d_{name}": self._empty(x.shape, x.dtype) for name, x in tokens.items()}
        if state is not None:
            found["d_state"] = self._empty(state.shape, state.dtype)
        if rule == "delta":
            tokens["v"] = tokens.pop("beta")
            tokens["error"] = kept
        given = [state] if rule in ("sum", "delta") else [state, kept]
        results = [*found.values()] + ([] if state is not None else [None])
        arguments = [*tokens.values(), gradients[0]]
        sizes = (*q.shape, v.shape[3])
        self._run(2 * ORDER.index(rule) + 1, sizes, q.dtype, arguments, [*given, gradients[1]], results, **how)
        return found

    def results(
        self, rule: str, inputs: dict[str, Tensor | None], gradients: tuple[Tensor | None, Tensor | None], **how: int
    ) -> dict[str, Tensor]:
        """Outputs and all gradients, by name, as rule_cases.results has them."""
        out, new_state, kept = self.forward(rule, inputs, **how)
        return {"out": out, "state": new_state} | self.backward(rule, inputs, kept, gradients, **how)

    def workspace_bytes(self, operator: int, sizes: Sequence[int], dtype: torch.dtype) -> int:
        return self._library.twin_workspace_bytes(operator, ctypes.byref(_Sizes(*sizes)), TYPES[dtype])

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """NaN, with a guard on both sides."""
        numel = torch.Size(shape).numel()
        return torch.full((numel + 2 * GUARD,), float("nan"), dtype=dtype)[GUARD : GUARD + numel].view(shape)

    def _check_guards(self, x: Tensor) -> None:
        whole = torch.as_strided(x, (x.numel() + 2 * GUARD,), (1,), x.storage_offset() - GUARD)
        if not (whole[:GUARD].isnan().all() and whole[-GUARD:].isnan().all()):
            raise TwinError(f"an output of shape {tuple(x.shape)} was written beyond its ends")

    def _run(
        self,
        operator: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        tokens: list[Tensor | None],
        given: list[Tensor | None],
        outputs: list[Tensor | None],
        *,
        reverse: int = 0,
        multiprocessors: int = 132,
        shared_kib: int = 163,  # an A100's
    ) -> None:
        assert all(x is None or x.is_contiguous() for x in given)
        need = self.workspace_bytes(operator, sizes, dtype)
        workspace = self._empty((-(-need // 4),), torch.float32)
        arrays = [x if x is None else x.data_ptr() for x in (*given, *outputs)]
        error = self._library.twin_run(
            operator,
            ctypes.byref(_Sizes(*sizes)),
            TYPES[dtype],
            ctypes.c_void_p(workspace.data_ptr() if need else None),
            (_Tokens * len(tokens))(*map(_tokens, tokens)),
            (ctypes.c_void_p * len(arrays))(*arrays),
            reverse,
            multiprocessors,
            shared_kib,
        )
        if error is not None:
            raise TwinError(error.decode())
        for x in (workspace, *outputs):
            if x is not None:
                self._check_guards(x)
