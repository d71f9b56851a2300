"""The mean of the last checkpoints of a training, saved with --save-interval-updates.

Parameters are averaged in float64; whole numbers, such as the counts of FAVOR+'s draws, are those of the last one.
"""

import re
from pathlib import Path

import fairseq  # noqa: F401
import torch
from commands import RecipeError, whole

import fairseq_fwp.cli  # noqa: F401  (with fairseq before it, the package lets torch load what fairseq saves)


def last_checkpoints(folder: Path, count: int) -> list[Path]:
    """Return the newest checkpoints, the last one last. Raises RecipeError if there are fewer."""
    named = ((path, re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name)) for path in folder.glob("*.pt"))
    found = {int(name[1]): path for path, name in named if name}
    if not 1 <= count <= len(found):
        raise RecipeError(
            f"the number of averaged checkpoints must be from 1 to {len(found)}, those of {folder}, got {count}."
        )
    return [found[update] for update in sorted(found)[-count:]]


def write(folder: Path, count: int, out: Path) -> None:
    """Write the last checkpoint with the mean of the last `count` as its model."""
    paths, sums = last_checkpoints(folder, count), {}
    for path in paths:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for name, value in checkpoint["model"].items():
            sums[name] = value.double() + sums.get(name, 0)
    for name, value in checkpoint["model"].items():
        if value.is_floating_point():
            checkpoint["model"][name] = (sums[name] / count).to(value.dtype)
    with whole(out) as work:
        torch.save(checkpoint, work)
    print(f"{out} is the mean of {', '.join(path.name for path in paths)}")
