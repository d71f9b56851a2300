"""Train one model with fairseq-train: an interrupted training is resumed, a finished one is not repeated."""

import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

from commands import RecipeError, check_same, show, write
from log import read_training
from progress import Progress
from sizes import describe

ROOT = Path(__file__).resolve().parents[2]
# Otherwise glibc gives the freed memory of an update on a CPU back to the system, and the next update fetches it again,
# page by page. torch asks for large pages.
MEMORY = {"MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_MMAP_MAX_": "0", "THP_MEM_ALLOC_ENABLE": "1"}
PLUGIN = ["--user-dir", str(ROOT / "fairseq_fwp")]


def train(folder: Path, data: Path, flags: list[str]) -> None:
    """Train a model on the output of fairseq-preprocess into `folder`.

    The folder gets settings.txt (the flags), train.log and checkpoints. At the end it gets `trained`, or `diverged`
    with the place of a non-finite gradient. Raises RecipeError if training fails in another way.
    """
    name = folder.name if not folder.name.startswith("seed_") else f"{folder.parent.name}, {folder.name}"
    trained, diverged, settings = folder / "trained", folder / "diverged", folder / "settings.txt"
    if (folder / "checkpoint_last.pt").exists() or diverged.exists() or trained.exists():
        check_same(settings, shlex.join(flags))
    if diverged.exists():
        print(f"{name} diverged before: {diverged.read_text(encoding='utf-8').strip()}.")
        return
    log = folder / "train.log"
    if trained.exists():
        print(f"{name} is trained already: {folder / 'checkpoint_best.pt'}, train.log.")
        return
    command = [str(data), *(() if "--user-dir" in flags else PLUGIN), *flags]
    print(f"{name}: {describe(command)}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    write(settings, shlex.join(flags) + "\n")
    saving = [
        "--save-dir", str(folder), "--no-epoch-checkpoints", "--keep-interval-updates", "1", "--log-format", "json"
    ]  # fmt: skip
    # Flags of the command line come last, and so override others.
    if fairseq_train([command[0], *saving, *command[1:]], log, name):
        trained.touch()
        print(f"{name} is trained: {folder / 'checkpoint_best.pt'}, train.log.")
    elif where := divergence(log):
        write(diverged, where + "\n")  # a result: the other models are trained
        print(f"{name} diverged: {where}.")
    else:
        raise RecipeError(f"the training of {name} failed: see {log}.")


def divergence(log: Path) -> str:
    try:
        return read_training(log).divergence
    except RecipeError:  # it ended before its model was built
        return ""


def fairseq_train(flags: list[str], log: Path, label: str) -> bool:
    """Run fairseq-train, with $LAUNCH (torchrun, srun, ...) before it if set; append to its log; return its success."""
    command = ["fairseq-train", *flags]
    if launch := os.environ.get("LAUNCH"):
        command = [*shlex.split(launch), shutil.which("fairseq-train") or "fairseq-train", *flags]
    show(command)
    progress = Progress(label)
    with log.open("a", encoding="utf-8") as file:
        file.write("+ " + shlex.join(command) + "\n")
        file.flush()
        process = subprocess.Popen(
            command,
            env={**MEMORY, **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                progress.read(line)
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    progress.end()
    return code == 0
