"""Compare the kernels of a library with the reference before their first use, and remember the rules that fail.

A compiler can be wrong, and kernels for a GPU are compiled on machines where the tests never ran. So outputs, new
states and all gradients of every rule are compared with the reference in float64 on small inputs, in a few seconds. If
the kernel of a rule fails, it is not used. The result is stored next to the library, by the name of the GPU; a new
library is checked again. One process of a folder checks at a time; the others wait for its result.

The check runs in another process, because an illegal access makes a GPU unusable for the process that made it, and a
kernel may never end.
"""

import contextlib
import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fairseq_fwp.outputs import unfinished

from .library import load_kernels, locked

# Not the CPU: tests cover it with common compilers, and a check costs a second for each new library.
CHECKED = ("cuda",)
# Greatest distance from the reference, relative to its norm; the tests' bounds are at most a sixth of it.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
# For the check of one rule, and for the imports before the first.
SECONDS = 100.0
Named = dict[str, Tensor]
Compared = tuple[Named, Named, torch.dtype]  # results of a kernel, those of its reference in float64, and the dtype
Faults = dict[str, str]  # the rule, or another operator: the fault of its kernel
Line = tuple[str, str | None]  # of a child: a rule, and what was found; None: its check begins
_faults: dict[str, Faults] = {}
_warned: set[str] = set()
_checking = threading.Lock()


class KernelCheck(Protocol):
    """A comparison of a kernel with its reference. The kernel has the name of its rule or operator."""

    @property
    def name(self) -> str: ...

    def compare(self, device: torch.device) -> Iterator[Compared]: ...


def warn_of_fault(
    rule: str, device: str, required: bool = False, instead: str = "the rule runs as a slow loop in Python"
) -> bool:
    """Warn once if a rule must not use its kernel, which is wrong, and return whether that is so.

    instead: what runs in its place. Raises RuntimeError instead if the kernel is required.
    """
    reason = find_faults(device).get(rule)
    message = f"the kernel of {rule} is not used on {device}, because it differs from the reference: {reason}"
    if reason and required:
        raise RuntimeError(f"{message}; use backend='reference', or build with another compiler")
    if reason and rule not in _warned:
        _warned.add(rule)
        warnings.warn(f"{message}; {instead}", RuntimeWarning, stacklevel=5)
    return bool(reason)


# As backend.require_kernel: a trace calls it, and treats the result as a constant.
warn_of_fault._dynamo_marked_constant = True  # type: ignore[attr-defined]


def read_faults(library: Path) -> dict[str, Faults]:
    """Return the stored faults of a library, by the name of the device."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(library.with_name("checked.json").read_text(encoding="utf-8"))
        if stored["library"] == _digest(library):
            return dict(stored["faults"])
    return {}


def find_faults(device: str) -> Faults:
    """Return the faults on a device: load the library, and check it if that was not done yet."""
    with _checking:
        return _faults[device] if device in _faults else _load_and_check(device)


def _load_and_check(device: str) -> Faults:
    status = load_kernels(device.partition(":")[0])
    if status.path is None:
        return {}
    library, name = Path(status.path), torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    faults_by_device = read_faults(library)
    if name not in faults_by_device:
        with locked(library.parent):
            faults_by_device = read_faults(library)
            if name not in faults_by_device:  # no other process has checked it while this one waited
                try:
                    faults_by_device[name] = _check_apart(device)
                except (OSError, RuntimeError) as error:
                    message = f"the kernels are used on {device} without a check, which another process could not make"
                    warnings.warn(f"{message}: {error}", RuntimeWarning, stacklevel=7)
                    return {}
                _write_faults(library, faults_by_device)
    return _faults.setdefault(device, faults_by_device[name])


def _write_faults(library: Path, faults: dict[str, Faults]) -> None:
    # If it cannot be written, each process checks.
    with contextlib.suppress(OSError), unfinished(library.with_name("checked.json")) as file:
        file.write_text(json.dumps({"library": _digest(library), "faults": faults}, indent=1), encoding="utf-8")


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


# The program that checks every kernel. It lies above this room, because it knows what calls them.
CHILD = "from fairseq_fwp import kernel_checks; kernel_checks.main()"
ALL = "all"  # a child's line after the last rule
MARK = b"\x1efairseq_fwp self-check\x1e"  # before a child's own lines: PyTorch and others print what they like


def _check_apart(device: str) -> Faults:
    """Return the faults on a device, found by child processes; raise RuntimeError if they cannot run the check.

    A child writes a line for each rule that it begins to check, and one when it has checked it. After an error it ends,
    and if a line does not come within SECONDS it is killed; then another child checks the other rules.
    """
    faults: Faults = {}
    begun = 0
    while True:
        lines, other, status = _run_child([sys.executable, "-c", CHILD, device, str(begun)])
        ended = lines[-1:] == [(ALL, "")]  # whatever happens to the child after that
        if status is None and not lines:
            raise RuntimeError(f"it did not begin within {SECONDS:g} seconds")
        if not lines or ((status or 0) > 0 and not ended):
            raise RuntimeError(other or "no output")
        faults |= {name: reason for name, reason in lines if reason}
        begun += sum(reason is None for _, reason in lines)
        if ended:
            return faults
        if status is None:
            faults[lines[-1][0]] = f"its check did not end within {SECONDS:g} seconds"
        elif status < 0:
            faults[lines[-1][0]] = f"its check was ended by signal {-status}"


def _run_child(command: list[str]) -> tuple[list[Line], str, int | None]:
    """Return a child's own lines, the last other one, and its status: None if it was killed after SECONDS without one.

    Processes that it has started are killed with it. They are not waited for, though they may hold its pipe open.
    """
    own_lines: list[Line] = []
    other, status = "", None
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as child:
        try:
            deadline = time.monotonic() + SECONDS
            for line in _lines_of(child):
                text, mark, own = line.partition(MARK)
                other = text.decode(errors="replace").strip()[:500] or other
                if mark:
                    name, reason = json.loads(own)
                    own_lines.append((name, reason))
                    deadline = time.monotonic() + SECONDS
                elif time.monotonic() > deadline:
                    break
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(max(0, deadline - time.monotonic()))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return own_lines, other, status


def _lines_of(child: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield the lines that a child prints until it ends, and empty ones while it prints none."""
    assert child.stdout
    pipe, unread = child.stdout.fileno(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            ended = child.poll() is not None
            ready = selector.select(0.1)
            printed = os.read(pipe, 1 << 16) if ready else b""
            if not printed and (ready or ended):  # the pipe is closed, or only open in another process
                yield bytes(unread)
                return
            unread += printed
            *lines, unread = unread.split(b"\n") if b"\n" in printed else (b"", unread)
            yield from map(bytes, lines)


def check_in_child(checks: Sequence[KernelCheck]) -> None:
    """Run the checks from a number on, and print each result."""
    _, device, begun = sys.argv
    _faults[device] = {}  # what is checked here is used
    torch.zeros(1, device=device)  # without this, the first rule would be blamed for a device that does not work
    for check in checks[int(begun) :]:
        _print(check.name, None)
        try:
            _print(check.name, find_fault(check, torch.device(device)))
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # after which a GPU may not work
            _print(check.name, str(error).partition("\n")[0])
            return
    _print(ALL, "")


def _print(name: str, reason: str | None) -> None:
    os.write(1, MARK + json.dumps([name, reason]).encode() + b"\n")  # at once, whatever sys.stdout is


def find_fault(check: KernelCheck, device: torch.device) -> str:
    """Return where a kernel differs from its reference, or an empty string."""
    for results, truth, dtype in check.compare(device):
        for name, x in results.items():
            distance = float((x - truth[name]).norm() / truth[name].norm())
            if not distance <= LIMITS[dtype]:
                return f"{name} in {str(dtype).removeprefix('torch.')} is off by {distance:.1e}"
    return ""
