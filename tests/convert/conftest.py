"""Vectors of the public code, see vectors/README.md, and the results of `fwp-convert` for them."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from fairseq_fwp.cli.convert import main
from fairseq_fwp.convert import SOURCES, files
from fairseq_fwp.convert.files import Options
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
    known = MODEL_DATACLASS_REGISTRY[conversion.arch]
    cfg = OmegaConf.merge(
        OmegaConf.structured(known), {"max_target_positions": None, "add_bos_token": False, **conversion.flags}
    )
    task = files.make_task(conversion)
    return files.build(conversion, cfg, task).double().eval(), task.target_dictionary, conversion


class Converter:
    """A function convert(vector, **options) -> the folder written by the command; options override the vector's.

    save: the content of the file instead of the state dict; bytes are written unchanged; None: no file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dict, self.words, self.out = folder / "state_dict.pt", folder / "words.txt", folder / "out"

    def arguments(self, vector: Vector, words=WORDS, cutoffs="12,20", save=..., **options) -> list[str]:
        """Write the files and return the arguments of the command."""
        if isinstance(save, bytes):
            self.state_dict.write_bytes(save)
        elif save is None:
            self.state_dict.unlink(missing_ok=True)
        else:
            torch.save(vector.tensors if save is ... else save, self.state_dict)
        self.words.write_text("\n".join(words) + "\n")
        given = {"cutoffs": cutoffs, **vector.options, **options}
        flags = [
            part
            for name, value in given.items()
            if value is not None and value is not False
            for part in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
        ]
        files = [str(self.state_dict), "--vocabulary", str(self.words), "--out", str(self.out)]
        return ["--source", vector.source, *files, *flags]

    def __call__(self, *vector, **options) -> Path:
        silence_known_warnings()  # as importing the package does, before pytest sets its filters
        main(self.arguments(*vector, **options))
        return self.out


@pytest.fixture
def convert(tmp_path):
    return Converter(tmp_path)


def load(folder: Path):
    """Return the model in float64, in evaluation, and its dictionary."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "checkpoint.pt")], arg_overrides={"data": str(folder)}
    )
    return model.double().eval(), task.dictionary


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
