"""Building, caching and loading the compiled kernels: at first use, never at import.

A library lies in ``<cache>/fwp_<device>_<key>/``, so a change of sources, flags, PyTorch, CUDA or machine builds
another one.
``torch.utils.cpp_extension`` gives the include and library paths, but its ``load`` is not called: the lock file of a
killed build makes it wait for ever, and it needs ninja even where there is nothing to build. The lock here dies with
its process, and a library appears whole, under its final name, or not at all.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .build_error import BuildError
from .compiler import build_key, check_compiler, compile_library

logger = logging.getLogger(__name__)

DEVICES = ("cpu", "cuda")
LIBRARY = "kernels.so"
DIGEST_BYTES = hashlib.sha256().digest_size
_statuses: dict[str, "KernelStatus"] = {}
_loading = threading.Lock()


@dataclass(frozen=True)
class KernelStatus:
    """Whether the kernels of a device are built and where, or why not and what helps."""

    built: bool
    path: str | None = None
    reason: str = ""
    cure: str = ""


def kernel_status() -> dict[str, KernelStatus]:
    """Status of the kernels by device type. Builds nothing."""
    return {device_type: _statuses.get(device_type) or _status_on_disk(device_type) for device_type in DEVICES}


def load_kernels(device_type: str) -> KernelStatus:
    """Load the kernels of a device into this process, building them where no cache holds them.

    Never raises: a failure is remembered in the status, and not tried again in this process.
    """
    status = _statuses.get(device_type)
    if status is None:
        with _loading:
            status = _statuses.get(device_type)
            if status is None:
                status = _statuses[device_type] = _load_or_build(device_type)
    return status


def _load_or_build(device_type: str) -> KernelStatus:
    status = KernelStatus(False)
    try:
        for folder in _folders(device_type):
            try:
                return KernelStatus(True, str(_library_in(folder, device_type)))
            except OSError as error:
                logger.info("no kernels can be built in %s: %s", folder, error)
                cure = "set FWP_CACHE_DIR to a folder that can be written"
                status = KernelStatus(False, reason=str(error), cure=cure)
    except BuildError as error:
        status = KernelStatus(False, reason=str(error), cure=error.cure)
    return status


def _library_in(folder: Path, device_type: str) -> Path:
    """Path of the library, once it is loaded: from the folder, or built into it."""
    path = folder / LIBRARY
    if not _load(device_type, path):
        with _lock(folder) as locked:
            # Another process may have built it while this one waited for the lock.
            if not _load(device_type, path):
                if locked:
                    _remove_leftovers(folder)
                _build(device_type, path)
                _load(device_type, path)
    return path


def _status_on_disk(device_type: str) -> KernelStatus:
    try:
        for folder in _folders(device_type):
            if (folder / LIBRARY).exists():
                return KernelStatus(True, str(folder / LIBRARY))
        check_compiler(device_type)
    except BuildError as error:
        return KernelStatus(False, reason=str(error), cure=error.cure)
    return KernelStatus(False, reason="not built yet", cure="they are built at first use")


def _folders(device_type: str) -> Iterator[Path]:
    """Where the library may lie: the cache, or a temporary folder of this user where the cache cannot be written.

    Raises BuildError where no library can be for this device.
    """
    if device_type not in DEVICES:
        raise BuildError(f"this version has no kernels for {device_type}", "use the CPU")
    name = f"fwp_{device_type}_{build_key(device_type)}"
    root = os.environ.get("FWP_CACHE_DIR") or os.environ.get("TORCH_EXTENSIONS_DIR")
    yield Path(root or Path.home() / ".cache" / "fairseq_fwp").expanduser().absolute() / name
    temporary = Path(tempfile.gettempdir()).absolute() / f"fairseq_fwp_{os.getuid()}"
    with contextlib.suppress(OSError):
        temporary.mkdir(mode=0o700, exist_ok=True)
        # Whoever can write there decides what code runs here.
        if temporary.stat().st_uid == os.getuid() and not temporary.stat().st_mode & 0o022:
            yield temporary / name


def _load(device_type: str, path: Path) -> bool:
    """Load a library if it is there and whole; one that a crash or a full disk has cut short counts as not there."""
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
        cure = "delete its folder"
        if device_type == "cuda" and "undefined symbol" in reason:
            # A newer release of the toolkit calls what the libraries that PyTorch brings do not have yet.
            cure = f"install the toolkit of CUDA {torch.version.cuda}"
        raise BuildError(f"{path} cannot be loaded: {reason}", cure) from error
    return True


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Hold a lock on a folder, made if need be. The system frees it when its holder dies.

    Yields whether it is held: some file systems have no locks. There others may build too, which costs time only, for
    libraries are moved into place whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        except OSError as error:
            logger.info("%s cannot be locked: %s", folder, error)
            locked = False
        yield locked


def _remove_leftovers(folder: Path) -> None:
    """What builds that were killed have left. Only who holds the lock knows that no other build is under way."""
    for leftover in folder.glob("build-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _build(device_type: str, path: Path) -> None:
    logger.info("building the %s kernels in %s, once: this takes a minute or two", device_type, path.parent)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        library = Path(folder) / path.name
        compile_library(device_type, library)
        digest = hashlib.sha256(library.read_bytes()).digest()
        with open(library, "ab") as file:
            file.write(digest)
        os.replace(library, path)
    logger.info("built the %s kernels in %.0f s", device_type, time.monotonic() - start)
