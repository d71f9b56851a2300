"""Folders with config.json, and weights as safetensors: those of this package, and of Hugging Face's transformers.

The weights are in model.safetensors, or in the files that model.safetensors.index.json names.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairseq_fwp.options import Settings

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def read(path: Path, name: str, sizes: Sequence[str]) -> tuple[dict[str, Tensor], Settings]:
    """Return the weights and config.json of a model. Raises ValueError where either is missing or damaged.

    name: of the model, for errors; sizes: settings that it must have.
    """
    if not path.is_dir():
        actual = "a file" if path.exists() else "nothing"
        raise ValueError(f"{path} must be a folder with {CONFIG} and {WEIGHTS} of {name}, got {actual}")
    config, files, places = read_config(path, name, sizes), {WEIGHTS}, dict[str, str]()
    if (path / INDEX).exists():
        names = read_json(path / INDEX).get("weight_map")
        places = names if isinstance(names, dict) else {}
        files = {*places.values()}
        if not files or not all(isinstance(file, str) for file in files):
            raise ValueError(f"{path / INDEX} must have a weight_map, which names a file for every weight")
        if outside := sorted(file for file in files if Path(file).name != file):
            raise ValueError(f"the weight_map in {path / INDEX} must name files of its own folder, got {outside[0]!r}")
    elif not (path / WEIGHTS).exists():
        raise ValueError(f"{path} must hold {WEIGHTS} or {INDEX}: save weights of another format as safetensors first")
    tensors: dict[str, Tensor] = {}
    for file in sorted(files):
        try:
            loaded = load_file(path / file)
        except OSError as error:
            raise ValueError(f"the weights {path / file} cannot be read: {error.strerror or error}") from error
        except SafetensorError as error:
            whole = "a complete safetensors file, got a truncated or different file"
            raise ValueError(f"{path / file} must be {whole}: {error}") from error
        # A weight in two files is that of the index.
        tensors |= {name: x for name, x in loaded.items() if places.get(name, file) == file}
    return tensors, config


def read_config(path: Path, name: str, sizes: Sequence[str], defaults: Settings | None = None) -> Settings:
    """Return the settings in config.json, and defaults. Raises ValueError if sizes are missing or disagree."""
    config = {**(defaults or {}), **read_json(path / CONFIG)}
    if missing := [size for size in sizes if type(config.get(size)) is not int]:
        raise ValueError(f"{path / CONFIG} must be the configuration of a {name}, got one without {', '.join(missing)}")
    eos, words = config.get("eos_token_id"), config["vocab_size"]
    if eos is not None and not (type(eos) is int and 0 <= eos < words):
        got = f"the list {eos}: keep the one that ends a text" if isinstance(eos, list) else repr(eos)
        raise ValueError(
            f"eos_token_id in {path / CONFIG} must be one number in [0, {words}), the vocabulary, got {got}"
        )
    return config


def read_json(path: Path) -> Settings:
    """The object in a file. Raises ValueError for any other file."""
    try:
        content: Settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content
