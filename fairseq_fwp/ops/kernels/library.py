"""Cache and load the compiled kernels, built at first use, never at import.

A library lies in ``<cache>/fwp_<device>_<key>/``, so a change of sources, flags, PyTorch, CUDA or machine builds
another one. The lock ends with its process. (The lock of ``cpp_extension`` outlives a killed build, and then later
builds wait forever.) A library appears complete under its final name, or not at all. Loading it needs no compiler.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .build import LIBRARY, build_key, check_tools, compile_library
from .error import BuildError

logger = logging.getLogger(__name__)

WRITABLE = "set FWP_CACHE_DIR to a folder that can be written"

DEVICES = ("cpu", "cuda")
DIGEST_BYTES = hashlib.sha256().digest_size
_statuses: dict[str, "KernelStatus"] = {}
_loading = threading.Lock()


@dataclass(frozen=True)
class KernelStatus:
    """The state of the kernels of a device: whether and where they are built, or why not and what to do."""

    built: bool
    path: str | None = None
    reason: str = ""
    cure: str = ""


def kernel_status() -> dict[str, KernelStatus]:
    """Return the status of the kernels by device type. Builds nothing."""
    return {device: _statuses.get(device) or _status(device, build=False) for device in DEVICES}


def load_kernels(device_type: str) -> KernelStatus:
    """Load the kernels of a device into this process, building them where no cache holds them.

    Never raises: a failure is remembered in the status, and not tried again in this process.
    """
    with _loading:
        if device_type not in _statuses:
            _statuses[device_type] = _status(device_type, build=True)
    return _statuses[device_type]


def _status(device_type: str, build: bool) -> KernelStatus:
    reason, cure = "not built yet", "they are built at first use"
    try:
        for folder in _folders(device_type):
            try:
                if build:
                    _load_or_build(folder, device_type)
                if (folder / LIBRARY).exists():
                    return KernelStatus(True, str(folder / LIBRARY))
            except OSError as error:
                logger.info("no kernels can be built in %s: %s", folder, error)
                reason, cure = str(error), WRITABLE
        check_tools(device_type)
    except BuildError as error:
        reason, cure = str(error), error.cure
    except (OSError, ValueError) as error:  # unreadable sources, or strange settings
        reason, cure = str(error), "cuda_ext/README.md says what a build needs"
    return KernelStatus(False, reason=reason, cure=cure)


def _load_or_build(folder: Path, device_type: str) -> None:
    if _load(folder / LIBRARY):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder) as alone:
        # Another process may have built it while this one waited for the lock.
        if not _load(folder / LIBRARY):
            # Remove leftovers of killed builds: the holder of the lock knows that no other build is running.
            for leftover in folder.glob("build-*") if alone else ():
                shutil.rmtree(leftover, ignore_errors=True)
            _build(folder, device_type)
            _load(folder / LIBRARY)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a library's folder; yield False where it has none, as in some file systems."""
    import fcntl  # Windows has no such module

    with contextlib.ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context(open(folder / "lock", "w")), fcntl.LOCK_EX)
            alone = True
        except OSError as error:  # Working twice there only costs time.
            logger.info("%s cannot be locked: %s", folder, error)
            alone = False
        yield alone


def _build(folder: Path, device_type: str) -> None:
    minutes = {"cpu": "a minute or two", "cuda": "5 to 10 minutes"}[device_type]
    logger.info("building the %s kernels in %s, once: this takes %s", device_type, folder, minutes)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as workspace:
        library = compile_library(device_type, Path(workspace))
        digest = hashlib.sha256(library.read_bytes()).digest()
        with open(library, "ab") as file:
            file.write(digest)
        os.replace(library, folder / LIBRARY)
    logger.info("built the %s kernels in %.0f s", device_type, time.monotonic() - start)


def _load(path: Path) -> bool:
    """Load a library if it exists and is complete; one truncated by a crash or a full disk counts as missing."""
    if not path.exists():
        return False
    content = path.read_bytes()
    if hashlib.sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
        logger.info("%s is damaged and will be built again", path)
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        reason = str(error.__cause__ or error)
        # A newer toolkit calls functions that PyTorch's libraries do not have yet.
        newer = "undefined symbol: cuda" in reason
        cure = f"install the toolkit of CUDA {torch.version.cuda}" if newer else "delete its folder"
        raise BuildError(f"{path} cannot be loaded: {reason}", cure) from error
    return True


def _folders(device_type: str) -> Iterator[Path]:
    """Yield the folders of the library: the cache, then a temporary folder if the cache cannot be written.

    Raises BuildError for a device or a system without kernels.
    """
    if device_type not in DEVICES:
        raise BuildError(f"this version has no kernels for {device_type}", "use the CPU")
    if sys.platform == "win32":
        raise BuildError("this version has no kernels for Windows", "use Linux, which may be in WSL")
    name = f"fwp_{device_type}_{build_key(device_type)}"
    found, reasons = False, []
    for find in (_cache, _temporary):
        try:
            folder = find() / name
        except OSError as error:
            reasons.append(str(error))
        else:
            found = True
            yield folder
    if not found:
        raise BuildError(f"there is no folder for the kernels: {', '.join(reasons)}", WRITABLE)


def _cache() -> Path:
    """Return the folder for the libraries of this user. Raises OSError without a home, or without a current folder."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    root = os.environ.get("FWP_CACHE_DIR") or os.environ.get("TORCH_EXTENSIONS_DIR") or caches / "fairseq_fwp"
    try:
        return Path(root).expanduser().absolute()
    except RuntimeError:
        raise FileNotFoundError(f"there is no home folder for {root}") from None


def _temporary() -> Path:
    """Return a temporary folder of this user. Raises OSError if there is none, or if others can write there."""
    temporary = Path(tempfile.gettempdir()).absolute() / f"fairseq_fwp_{os.getuid()}"
    temporary.mkdir(mode=0o700, exist_ok=True)
    # Code in that folder runs here.
    if temporary.stat().st_uid != os.getuid() or temporary.stat().st_mode & 0o022:
        raise PermissionError(f"{temporary} can be written by other users")
    return temporary
