"""Read state dicts, and write what fairseq's commands take: a checkpoint, its dictionaries and its flags."""

import os
import pickle
import shutil
from argparse import Namespace
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_fwp.convert.source import Conversion
from fairseq_fwp.patches.checkpoints import KEY, fingerprints

# The seed of FAVOR+'s draws, if they do not come with the weights: repeated conversions give the same model.
SEED = 1

CHECKPOINT, DICTIONARY, FLAGS = "checkpoint.pt", "dict.txt", "flags.txt"


def load(path: Path, export: str) -> Any:
    """Load what torch.save wrote into a file.

    Raises ValueError unless it holds plain data; `export` tells the user what to do.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    except pickle.UnpicklingError as error:
        if "global" not in str(error).lower():
            raise ValueError(f"{path} must be a complete checkpoint, got a truncated or different file") from error
        raise ValueError(
            f"{path} holds pickled objects, which could run any code, next to its weights: {export}"
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError, OSError) as error:
        raise ValueError(f"{path} must be a complete checkpoint, got a truncated or different file") from error


def load_tensors(path: Path, export: str) -> dict[str, Tensor]:
    """Return the state dict in a file. Raises ValueError for anything else."""
    loaded = load(path, export)
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{path} must be a state dict of named tensors, got other objects: {export}")
    return loaded


def write(conversion: Conversion, out: Path) -> None:
    """Write checkpoint.pt, flags.txt and dict.txt (of translation dict.LANGUAGE.txt) into `out`, or nothing.

    Raises ValueError if the folder exists and is not empty, or if the weights do not fit the model of the flags.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        found = "holds files" if out.is_dir() else "is a file"
        raise ValueError(f"--out must be a new or empty folder, got {out}, which {found}")
    flags, task = command_line(conversion), make_task(conversion)
    cfg = configure(flags, out)
    model = build(conversion, cfg.model, task)
    unfinished = out.with_name(f".{out.name}-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        torch.save(checkpoint(cfg, model, task), unfinished / CHECKPOINT)
        for name, words in vocabularies(conversion).items():
            make_dictionary(words).save(str(unfinished / name))
        (unfinished / FLAGS).write_text(" ".join(flags) + "\n", encoding="utf-8")
        os.replace(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check(conversion: Conversion) -> None:
    """Check that the weights fit the model of the flags, built on the meta device; raise ValueError otherwise."""
    with torch.device("meta"):
        model = build_empty(conversion)
    check_fit(model, conversion.weights)


def build_empty(conversion: Conversion) -> Any:
    """The model of the flags with its initial weights."""
    cfg = configure(command_line(conversion), Path())
    return ARCH_MODEL_REGISTRY[conversion.arch].build_model(cfg.model, make_task(conversion))


def vocabularies(conversion: Conversion) -> dict[str, list[str]]:
    """The words of each dictionary, by the name of its file; the source's first."""
    if isinstance(conversion.words, dict):
        return {f"dict.{language}.txt": words for language, words in conversion.words.items()}
    return {DICTIONARY: conversion.words}


def make_task(conversion: Conversion) -> Namespace:
    """Return the dictionaries as a task for the constructor of a model."""
    source, *_, target = map(make_dictionary, [*vocabularies(conversion).values()] * 2)
    return Namespace(source_dictionary=source, target_dictionary=target)


def make_dictionary(words: list[str]) -> Dictionary:
    """fairseq's dictionary of these words. Their counts are unknown and set to 1."""
    dictionary = Dictionary()
    for word in words:
        dictionary.add_symbol(word)
    return dictionary


def configure(flags: list[str], data: Path) -> Any:
    """Return the configuration that `fairseq-train` builds from the flags and a data folder.

    Raises ValueError where it refuses them.
    """
    parser = options.get_training_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"fairseq-train refuses the settings of the checkpoint: {message}")

    parser.error = refuse  # instead of printing the usage and ending the process
    args = options.parse_args_and_arch(parser, [str(data.absolute()), *flags])
    return convert_namespace_to_omegaconf(args)


def build(conversion: Conversion, cfg: Any, task: Namespace) -> nn.Module:
    """Build the model of a configuration with the weights, in their dtype. Raises ValueError if they do not fit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = ARCH_MODEL_REGISTRY[conversion.arch].build_model(cfg, task)
    fill(model, conversion.weights)
    return model


def command_line(conversion: Conversion) -> list[str]:
    """The flags of `fairseq-train` that make this model."""
    languages = [*conversion.words] if isinstance(conversion.words, dict) else []
    # Among fairseq's criteria for words, only this one never needs the logits of all words at once. It needs the
    # backend legacy_ddp.
    task, criterion = ["language_modeling"], ["adaptive_loss", "--ddp-backend", "legacy_ddp"]
    if languages:
        task = ["translation", "--source-lang", languages[0], "--target-lang", languages[-1]]
        criterion = ["cross_entropy"]  # without options: another criterion would not know them
    found = ["--task", *task, "--arch", conversion.arch]
    for name, value in conversion.flags.items():
        if value is not None and value is not False:
            found += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return [*found, "--criterion", *criterion]


def check_fit(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Check that the weights fit the model.

    Raises ValueError naming weights that are missing, too many, of another shape or integers.
    """
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    # A parameter that modules share has several names: one of them is enough.
    given = {id(parameters[name]) for name in weights.keys() & parameters.keys()}
    faults = [
        *(f"{name} is missing" for name, parameter in model.named_parameters() if id(parameter) not in given),
        *(f"{name} is not a weight of this model" for name in weights.keys() - parameters.keys() - buffers.keys()),
        *(
            f"{name} must be {tuple(known.shape)}, got {tuple(weight.shape)}"
            for name, weight in weights.items()
            if (known := parameters.get(name, buffers.get(name))) is not None and known.shape != weight.shape
        ),
        *(
            f"{name} must be floating-point, got {weights[name].dtype}"
            for name in weights.keys() & parameters.keys()
            if not weights[name].is_floating_point()
        ),
    ]
    if faults:
        raise ValueError(f"the weights do not fit the model that the options describe: {'; '.join(sorted(faults))}")


def fill(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy the weights into the parameters and buffers; the model takes the widest of their dtypes.

    Raises ValueError for weights that do not fit.
    """
    check_fit(model, weights)
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    model.to(reduce(torch.promote_types, {weights[name].dtype for name in weights.keys() & parameters.keys()}))
    with torch.no_grad():
        for name in weights.keys() & parameters.keys():
            parameters[name].copy_(weights[name])
    # A shared parameter now has the same value under all its names. Loading also masks absent words.
    model.load_state_dict({**model.state_dict(), **{name: weights[name] for name in weights.keys() & buffers.keys()}})


def checkpoint(cfg: Any, model: nn.Module, task: Namespace) -> dict[str, Any]:
    """Return the checkpoint that fairseq would save before the first update."""
    known = {KEY: fingerprints(task)}
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "criterion": None,
        "optimizer_history": [{"optimizer_name": None, "lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": known,
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, **known},
        "last_optimizer_state": None,
    }
