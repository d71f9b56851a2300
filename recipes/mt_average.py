"""The mean of the last checkpoints of a training: `python recipes/mt_average.py FOLDER COUNT OUT.pt`.

FOLDER holds what --save-interval-updates left, checkpoint_EPOCH_UPDATE.pt. Parameters are averaged in float64; whole
numbers, such as the counts of FAVOR+'s draws, are those of the last checkpoint.
"""

import re
import sys
from pathlib import Path

import fairseq  # noqa: F401
import torch

import fairseq_fwp.cli  # noqa: F401  (with fairseq before it, the package lets torch load what fairseq saves)


def last_checkpoints(folder: Path, count: int) -> list[Path]:
    """The newest ones, the last one last; ValueError where there are fewer."""
    found = {
        int(name[1]): path
        for path in folder.glob("*.pt")
        if (name := re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name))
    }
    if not 1 <= count <= len(found):
        raise ValueError(f"{folder} has {len(found)} checkpoints of an update: give a number from 1 to that.")
    return [found[update] for update in sorted(found)[-count:]]


def average(paths: list[Path]) -> dict[str, object]:
    """The last checkpoint with the mean of all as its model."""
    sums: dict[str, torch.Tensor] = {}
    for path in paths:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for name, value in checkpoint["model"].items():
            sums[name] = value.double() + sums.get(name, 0) if value.is_floating_point() else value
    for name, value in checkpoint["model"].items():
        checkpoint["model"][name] = (sums[name] / len(paths)).to(value.dtype) if value.is_floating_point() else value
    return checkpoint


if __name__ == "__main__":
    if len(sys.argv) != 4 or not sys.argv[2].isdigit():
        sys.exit("usage: python recipes/mt_average.py FOLDER COUNT OUT.pt")
    try:
        chosen = last_checkpoints(Path(sys.argv[1]), int(sys.argv[2]))
    except ValueError as error:
        sys.exit(f"mt_average.py: {error}")
    torch.save(average(chosen), f"{sys.argv[3]}.unfinished")
    Path(f"{sys.argv[3]}.unfinished").replace(sys.argv[3])
    print(f"the mean of {', '.join(path.name for path in chosen)}")
