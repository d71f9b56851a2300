"""Vectors of the public code, see vectors/README.md, and the results of `fwp-convert` for them."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from safetensors.torch import save_file
from support.refusals import refused

from fairseq_fwp.checkpoints.convert import SOURCES, checkpoint
from fairseq_fwp.checkpoints.convert.conversion import Options
from fairseq_fwp.cli.convert import main
from fairseq_fwp.patches.messages import silence_known_warnings

VECTORS = Path(__file__).parent / "vectors"
# The end of a line first, as in the public vocabularies, and unknown words among frequent words.
WORDS = ["<eos>", *(f"w{number}" for number in range(1, 6)), "<unk>", *(f"w{number}" for number in range(7, 31))]


class Vector(NamedTuple):
    """tensors: a state dict; options: of the training; tokens (T + 1, B); segments: their lengths; losses (T, B).

    carried: the losses (T, B) with the state carried from segment to segment, if any.
    """

    source: str
    tensors: dict[str, torch.Tensor]
    options: dict
    tokens: torch.Tensor
    segments: list[int]
    losses: torch.Tensor
    carried: torch.Tensor | None


def read_vector(name: str) -> Vector:
    with np.load(VECTORS / f"{name}.npz") as file:
        about, flat = json.loads(str(file["about"])), torch.from_numpy(file["weights"])
        tensors: dict[str, torch.Tensor] = {}
        for key, shape in about["names"].items():
            if isinstance(shape, str):  # tied: the same tensor under two names
                tensors[key] = tensors[shape]
                continue
            size = int(np.prod(shape))
            tensors[key], flat = flat[:size].reshape(shape).clone(), flat[size:]
        assert len(flat) == 0
        numbers = {key: torch.from_numpy(file[key]) for key in ("tokens", "losses", "carried") if key in file}
        return Vector(
            name.split("/")[0],
            tensors,
            about["options"],
            numbers["tokens"].long(),
            file["segments"].tolist(),
            numbers["losses"],
            numbers.get("carried"),
        )


def build(vector: Vector, words=WORDS, **options):
    """Return the converted model in float64, in evaluation, its dictionary and the conversion, without files."""
    options = Options({"cutoffs": "12,20", **vector.options, **options})
    conversion = SOURCES[vector.source].convert(vector.tensors, words, options)
    dictionary = checkpoint.make_task(conversion).target_dictionary
    return checkpoint.build_converted(conversion).double().eval(), dictionary, conversion


class Command:
    """`fwp-convert` from a file or folder into the folder `out`: what it writes, and what it refuses."""

    def __init__(self, source: str, path: Path, out: Path) -> None:
        self.source, self.path, self.out = source, path, out

    def arguments(self, *more: object) -> list[str]:
        return [*map(str, ["--source", self.source, self.path, "--out", self.out, *more])]

    def write(self, *more: object, **options: object) -> Path:
        """Return the new folder; an earlier one is removed."""
        silence_known_warnings()  # as importing the package does, before pytest sets its filters
        shutil.rmtree(self.out, ignore_errors=True)
        main(self.arguments(*more, **options))
        return self.out

    def convert(self, *more: object, **options: object):
        """Return the model in float64, in evaluation, and its dictionary."""
        return load(self.write(*more, **options))

    def refuses(self, says: str, *more: object, **options: object) -> None:
        refused(main, *self.arguments(*more, **options), says=says, out=self.out)


class Folder(Command):
    """The same for a folder of transformers."""

    def __init__(self, source: str, path: Path) -> None:
        super().__init__(source, path / source, path / "out")
        self.path.mkdir()

    def save(self, config: dict, tensors: dict[str, torch.Tensor]) -> None:
        (self.path / "config.json").write_text(json.dumps(config))
        save_file(tensors, self.path / "model.safetensors")

    def save_parts(self, tensors: dict[str, torch.Tensor], whole: str = "model.safetensors") -> None:
        """Write weights into two files, with the index of a file that would have all."""
        names, ending = sorted(tensors), Path(whole).suffix
        parts = {f"part{n}{ending}": names[n::2] for n in range(2)}
        for file, of_file in parts.items():
            some = {name: tensors[name].clone() for name in of_file}
            (save_file if ending == ".safetensors" else torch.save)(some, self.path / file)
        index = {"weight_map": {name: file for file, of_file in parts.items() for name in of_file}}
        (self.path / f"{whole}.index.json").write_text(json.dumps(index))


class Converter(Command):
    """The same for a vector: options override its own.

    save: the content of the file instead of the state dict; bytes are written unchanged; None: no file.
    """

    def __init__(self, folder: Path, name: str = "state_dict.pt") -> None:
        super().__init__("", folder / name, folder / "out")

    def arguments(self, vector: Vector, words=WORDS, cutoffs="12,20", save=..., **options) -> list[str]:
        """Write the files and return the arguments of the command."""
        if isinstance(save, bytes):
            self.path.write_bytes(save)
        elif save is None:
            self.path.unlink(missing_ok=True)
        else:
            torch.save(vector.tensors if save is ... else save, self.path)
        (self.path.parent / "words.txt").write_text("\n".join(words) + "\n")
        flags = ["--vocabulary", self.path.parent / "words.txt"]
        for name, value in {"cutoffs": cutoffs, **vector.options, **options}.items():
            flags += [] if value is None or value is False else [f"--{name}", *[value] * (value is not True)]
        self.source = vector.source
        return super().arguments(*flags)


@pytest.fixture
def convert(tmp_path):
    return Converter(tmp_path)


def without(name):
    """Return a change of tensors: those whose names have `name` are left out."""
    return lambda tensors: {key: x for key, x in tensors.items() if name not in key}


def ones(name, *shape, dtype=torch.float32, fill=1.0):
    """Return a change of tensors: one more, or another one."""
    return lambda tensors: {**tensors, name: torch.full(shape, fill, dtype=dtype)}


def load(folder: Path):
    """Return the model in float64, in evaluation, and its dictionary."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "checkpoint.pt")], arg_overrides={"data": str(folder)}
    )
    return model.double().eval(), task.target_dictionary


@torch.no_grad()
def score(model, dictionary, tokens, segments, carry, words=WORDS):
    """Return losses (T, B) of tokens (T + 1, B), numbered as in `words`, segment by segment."""
    ours = torch.tensor([dictionary.index("</s>" if word == "<eos>" else word) for word in words])[
        tokens
    ].T.contiguous()
    losses, start, state = [], 0, None
    for length in segments:
        output = model.decoder(ours[:, start : start + length], state=state if carry else None)
        state = output[1]["state"].detach()
        log_probs = model.get_normalized_probs(output, log_probs=True)
        losses.append(-log_probs.gather(2, ours[:, start + 1 : start + length + 1, None]).squeeze(2))
        start += length
    return torch.cat(losses, dim=1).T
