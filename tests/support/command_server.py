"""Run commands in forks of a process that has imported everything: they begin at once, not after ten seconds.

The process reads one command a line, a JSON object as `Commands.start` writes it. It answers with the number of the
process that runs the command. When that has ended, it answers with an exit status, or the negative number of a signal.
"""

import atexit
import functools
import gc
import io
import json
import os
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "fairseq_fwp"


class Commands:
    """A server, and the one command that it runs at a time."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._answer() == "ready"

    def start(
        self,
        program: str | Path,
        *arguments: object,
        log: Path,
        die_at: str = "",
        file_size: int | None = None,
        processes: int = 1,
        user_dir: Path | str | None = PLUGIN,
        folder: Path | None = None,
        stdin: str = "",
        environment: dict[str, str] | None = None,
    ) -> int:
        """Start a command and return its process number. Output is appended to `log`, of other ranks to `log`.RANK.

        program: the name of an installed one, or a folder with __main__.py; user_dir: of fairseq's programs, if any;
        die_at: the place where the command kills itself, see `_die_at`; file_size: greatest size of a file in bytes;
        processes: the number of processes that train together; folder: the one that it runs in.
        """
        words = [str(word) for word in (program, *arguments)]
        words += ["--user-dir", str(user_dir)] if user_dir and words[0].startswith("fairseq-") else []
        order = {"arguments": words, "log": str(log), "die_at": die_at, "folder": folder and str(folder)}
        order |= {"file_size": file_size, "processes": processes, "stdin": stdin, "environment": environment or {}}
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return int(self._answer())

    def wait(self) -> int:
        """Return the exit status of the command, or the negative number of the signal that ended it."""
        return int(self._answer())

    def run(self, program: str, *arguments: object, **options: object) -> int:
        """Start a command and wait for its end."""
        self.start(program, *arguments, **options)  # type: ignore[arg-type]
        return self.wait()

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()

    def _answer(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()


@functools.cache
def shared() -> Commands:
    """Return the server of this process of pytest."""
    server = Commands()
    atexit.register(server.close)
    return server


def run(
    program: str | Path,
    *arguments: object,
    user_dir: Path | str = PLUGIN,
    cwd: Path | None = None,
    status: int = 0,
    stdin: str = "",
    processes: int = 1,
    **environment: str,
) -> str:
    """Return the output of a command, both streams together; fail unless it exits with a status of that kind.

    Of several processes it is that of the first.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        options = {"user_dir": user_dir, "folder": cwd, "stdin": stdin, "processes": processes}
        options |= {"environment": environment}
        found = shared().run(program, *arguments, log=Path(log.name), **options)
        said = log.read()
    assert (found == 0) == (status == 0), said
    return said


def _die_at(place: str, folder: str) -> None:
    """Make this process kill itself at a place.

    "event 7": before the 7th change of a file below `folder`. "save 2": while it writes a checkpoint for the second
    time. "copy 1": while it copies a checkpoint for the first time.
    """
    import torch

    kind, number = place.split()
    left = int(number)

    def due() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple) -> None:
        changes = event in ("os.rename", "os.remove") or (event == "open" and str(arguments[1]).startswith("w"))
        if changes and folder in str(arguments[0]) and due():
            die()

    def half_saved(obj: object, file: object) -> None:
        written = file.tell()  # type: ignore[attr-defined]
        save(obj, file)
        if not isinstance(file, io.BytesIO) and due():
            os.ftruncate(file.fileno(), (written + file.tell()) // 2)  # type: ignore[attr-defined]
            die()

    def half_copied(source: str, target: str, **options: object) -> str:
        copied = copy(source, target, **options)
        if due():
            os.truncate(target, os.path.getsize(target) // 2)
            die()
        return copied

    save, copy = torch.save, shutil.copyfile
    if kind == "event":
        sys.addaudithook(audit)
    elif kind == "save":
        torch.save = half_saved
    else:
        shutil.copyfile = half_copied  # type: ignore[assignment]


def _train_together(order: dict) -> None:
    """Fork a process for every rank, and exit with the worst status of them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"tcp://localhost:{free.getsockname()[1]}"
    flags = ["--distributed-world-size", str(order["processes"]), "--distributed-backend", "gloo", "--device-id", "0"]
    flags += ["--distributed-no-spawn", "--distributed-init-method", address, "--distributed-rank"]
    children = []
    for rank in range(order["processes"]):
        child = os.fork()
        if child == 0:
            log = order["log"] + (f".{rank}" if rank else "")
            own = {"arguments": [*order["arguments"], *flags, str(rank)], "log": log, "processes": 1}
            _run(order | own)
        children.append(child)
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children))


def _obey(order: dict) -> None:
    """Run a command in this process."""
    if order["processes"] > 1:
        _train_together(order)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    with tempfile.TemporaryFile() as given:
        given.write(order["stdin"].encode())
        given.seek(0)
        os.dup2(given.fileno(), 0)
    sys.stdin = os.fdopen(0)
    os.environ.update(order["environment"])
    os.chdir(order["folder"] or ".")
    arguments = order["arguments"]
    if order["file_size"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_size"], order["file_size"]))
    if order["die_at"]:
        _die_at(order["die_at"], arguments[arguments.index("--save-dir") + 1])
    sys.argv = arguments
    if os.path.isdir(arguments[0]):
        runpy.run_path(arguments[0], run_name="__main__")
        sys.exit()
    (program,) = entry_points(group="console_scripts", name=arguments[0])
    sys.exit(program.load()())


def _run(order: dict) -> NoReturn:
    """Run a command in this process, and exit as Python does."""
    status = 0
    try:
        _obey(order)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    os._exit(status)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # modules log while they are imported
    # Training first, because it sets the form of the log.
    for name in ("fairseq_cli.train", "fairseq_cli.eval_lm", "fairseq_cli.generate", "fairseq_fwp"):
        import_module(name)
    gc.freeze()  # or every command would look through all that is imported, and copy it
    print("ready", file=answers)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answers.close()
            _run(json.loads(line))
        print(child, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers)


if __name__ == "__main__":
    _serve()
