"""Folders with config.json and weights: those of this package, and of Hugging Face's transformers.

The weights are in model.safetensors or pytorch_model.bin, or in the files that FILE.index.json names.
"""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.checkpoints import TENSORS_ONLY, NotStoredError, check_stored
from fairseq_fwp.patches.data import check_file
from fairseq_fwp.patches.options import Settings

CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
MOST_JSON = 2**25  # bytes of config.json or an index


def read(path: Path, name: str, sizes: Sequence[str], by_index: bool = False) -> tuple[dict[str, Tensor], Settings]:
    """Return the weights and config.json of a model. Raises ValueError where either is missing or damaged.

    name: of the model, for errors; sizes: settings that it must have; by_index: a weight in two files is that of the
    index, else it is an error, because transformers reads all of each file. Of a folder with both kinds of weights,
    model.safetensors is read.
    """
    actual = "a file" if path.exists() else "nothing"
    check(path.is_dir(), f"{path} must be a folder with {CONFIG} and {WEIGHTS} of {name}, got {actual}")
    config = read_config(path, name, sizes)
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    files = files_of_weights(path)
    if (named := config.get("transformers_weights")) not in (None, *files):
        own = f"transformers_weights in {path / CONFIG} must be left out or name {next(iter(files))}"
        raise ValueError(f"{own}, got {named!r}: only the usual files are read")
    for file, names in files.items():
        loaded = (load_pickled if Path(file).suffix == ".bin" else load_safetensors)(path / file)
        if by_index and names is not None:
            loaded = {weight: x for weight, x in loaded.items() if weight in names}
        if twice := sorted(loaded.keys() & tensors.keys()):
            raise ValueError(f"{path} must hold {twice[0]} once, got it in {places[twice[0]]} and in {file}")
        tensors |= loaded
        places |= dict.fromkeys(loaded, file)
    most = max([len(tensors), *(size for x in tensors.values() for size in x.shape)])
    for size in sizes:
        expected = f"at most {most:,}, the greatest size of the weights"
        check(config[size] <= most, f"{size} in {path / CONFIG} must be {expected}, got {config[size]:,}")
    return tensors, config


def files_of_weights(path: Path) -> dict[str, set[str] | None]:
    """Return the files with weights in a folder, in order, and the weights that are read of each, None: all.

    Raises ValueError without any, and for an index that names no file of the folder for a weight.
    """
    for whole in (WEIGHTS, PICKLED):
        index = path / f"{whole}.index.json"
        if index.exists():
            places = read_json(index).get("weight_map")
            if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
                raise ValueError(f"{index} must have a weight_map, which names a file for every weight")
            files = sorted({*places.values()})
            own = f"the weight_map in {index} must name files of its own folder"
            for file in files:
                check(Path(file).name == file, f"{own}, got {file!r}")
            if (path / whole).exists() and files != [whole]:
                other = next(file for file in files if file != whole)
                both = f"got both {whole} and {index.name}, which names {other}"
                raise ValueError(f"{path} must hold its weights once, {both}: remove what is not the model")
            return {file: {name for name, place in places.items() if place == file} for file in files}
        if (path / whole).exists():
            return {whole: None}
    raise ValueError(f"{path} must hold {WEIGHTS} or {PICKLED}, whole or in the files of an index, got neither")


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file of safetensors. Raises ValueError if it cannot be read."""
    check_file(path)
    try:
        return load_file(path)
    except OSError as error:
        raise ValueError(f"the weights {path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        whole = "a complete safetensors file, got a truncated or different file"
        raise ValueError(f"{path} must be {whole}: {error}") from error


def load_pickled(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file of torch.save, without running code in it. Raises ValueError for any other file."""
    code = f"must hold tensors only, got other objects, which could run any code: ask its author for {WEIGHTS}"
    loaded = unpickle(path, "file of torch.save", code, weights_only=True)
    if not isinstance(loaded, dict) or not all(isinstance(name, str) and is_stored(x) for name, x in loaded.items()):
        raise ValueError(f"{path} {TENSORS_ONLY}")
    return loaded


def unpickle(path: Path, kind: str, code: str, weights_only: bool | None = None) -> object:
    """Load what torch.save wrote. Raises ValueError unless it holds plain data; kind: of the file, for errors.

    code: what is said, after the path, of a file with objects that could run code.
    """
    check_file(path)
    try:
        check_stored(path)
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    except NotStoredError:
        raise
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ValueError(f"the {kind} {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle may raise anything
        if isinstance(error, pickle.UnpicklingError) and "global" in str(error).lower():
            raise ValueError(f"{path} {code}") from error
        raise ValueError(f"{path} must be a complete {kind}, got a truncated or different file") from error


def is_stored(x: object) -> bool:
    """Return whether an object is a tensor with a number for every place."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta


def read_config(path: Path, name: str, sizes: Sequence[str]) -> Settings:
    """Return the settings in config.json. Raises ValueError if sizes are missing."""
    config = read_json(path / CONFIG)
    if missing := [size for size in sizes if type(config.get(size)) is not int]:
        raise ValueError(f"{path / CONFIG} must be the configuration of a {name}, got one without {', '.join(missing)}")
    return config


def read_json(path: Path) -> Settings:
    """The object in a file. Raises ValueError for any other file."""
    check_file(path, MOST_JSON)
    try:
        content: Settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    check(isinstance(content, dict), f"{path} must hold a JSON object")
    return content
