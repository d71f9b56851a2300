"""The language model in a checkpoint of fairseq, on a data folder, with settings overridden on request."""

import dataclasses
import os
import pickle
import textwrap
from argparse import Namespace
from enum import EnumMeta
from typing import Any, Union, get_args, get_origin

import torch
from fairseq import checkpoint_utils, tasks
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, FairseqLanguageModel
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def load_model(path: str, data: str, overrides: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Load the model of a checkpoint, its task on the data folder, and the configuration of both.

    Raises ValueError or OSError where that is impossible; the message says what to do.
    """
    state = load_state(path)
    cfg, state["args"] = state["cfg"], None  # checkpoints of an earlier fairseq have both
    overwrite_args_by_name(cfg, {**read_overrides(path, cfg, overrides), "data": data})
    if saved := getattr(state["model"], "saved", None):
        state["model"].saved = saved._replace(overridden=bool(overrides))
    check_kind(path, cfg)
    task = setup_task(cfg, data)
    if len(task.target_dictionary) != len(task.source_dictionary):
        raise ValueError(
            f"{path} must score every word, got a model trained with --output-dictionary-size: train without this flag"
        )
    try:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], task=task, state=state)
    except RuntimeError as error:
        mismatch = str(error).strip().splitlines()[-1].strip()
        raise ValueError(
            f"{path} does not fit its settings or {data}, a dictionary of {len(task.source_dictionary):,} words "
            f"({textwrap.shorten(mismatch, 200)}): pass the data folder that it was trained on"
        ) from error
    return model, task, cfg


def setup_task(cfg: Any, data: str) -> Any:
    """The task on a data folder. Raises ValueError or OSError for one without a dictionary that can be read."""
    if not data:
        raise ValueError(
            "the data folder must be named, got an empty name: give the folder that the model was trained on"
        )
    if not os.path.exists(os.path.join(data, "dict.txt")):
        raise ValueError(f"the data folder {data} must hold dict.txt: give the folder that the model was trained on")
    try:
        return tasks.setup_task(cfg.task, from_checkpoint=True)
    except (ValueError, OSError):
        raise
    except Exception as error:  # fairseq raises it for another encoding or a repeated word
        raise ValueError(f"the dictionary in {data} cannot be read: {' '.join(str(error).split())}") from error


def read_overrides(path: str, cfg: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides in the types of their settings.

    Raises ValueError for a name that is not a setting of the checkpoint, and for a value of another type.
    """
    unknown = overrides.keys() - option_names(cfg)
    if unknown:
        spelling = ": write names with _ in place of -" if any("-" in name for name in unknown) else ""
        raise ValueError(
            f"--model-overrides must name settings of the model in {path}, got {', '.join(sorted(unknown))}{spelling}"
        )
    read = dict(overrides)
    model = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(architecture(cfg)))
    task = tasks.TASK_DATACLASS_REGISTRY.get(cfg.task._name)
    groups = (group.type for group in dataclasses.fields(FairseqConfig))
    for group in filter(dataclasses.is_dataclass, (*groups, model, task)):
        settings = OmegaConf.structured(group)
        for name in overrides.keys() & settings.keys():
            try:
                settings[name] = overrides[name]
            except OmegaConfBaseException:
                expected = describe(group.__dataclass_fields__[name].type)
                raise ValueError(f"--model-overrides: {name} must be {expected}, got {overrides[name]!r}") from None
            read[name] = settings[name]
    return read


def describe(annotation: Any) -> str:
    """The values that a setting of this type takes."""
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    if isinstance(annotation, EnumMeta):
        return "one of " + ", ".join(annotation.__members__)
    if get_origin(annotation) is Union:
        return " or ".join(map(describe, get_args(annotation)))
    return names.get(annotation, str(annotation))


def architecture(cfg: Any) -> str:
    """The name of the model's architecture."""
    return getattr(cfg.model, "arch", None) or cfg.model._name


def check_kind(path: str, cfg: Any) -> None:
    """Check that the model is a language model and that it and its task are registered; raise ValueError otherwise."""
    arch, task = architecture(cfg), cfg.task._name
    if arch not in ARCH_MODEL_REGISTRY or task not in tasks.TASK_REGISTRY:
        raise ValueError(
            f"{path} needs the model {arch!r} and the task {task!r}: give the plugin that has them as --user-dir"
        )
    if not issubclass(ARCH_MODEL_REGISTRY[arch], FairseqLanguageModel):
        raise ValueError(f"the model in {path} must be a language model, got {arch!r}")
    # Our task reads this token only once, before the text.
    if task != "fwp_language_modeling" and getattr(cfg.task, "add_bos_token", False):
        raise ValueError(
            f"{path} must be trained without --add-bos-token or with --task fwp_language_modeling, got a model of the "
            f"task {task} with this flag: fairseq-eval-lm can evaluate it"
        )


def load_state(path: str) -> dict[str, Any]:
    """Load a checkpoint of fairseq, with its settings as "cfg". Raises ValueError or OSError for any other file."""
    if not os.path.isfile(path):
        raise ValueError(f"there is no checkpoint {path}" + (": it is a folder" if os.path.isdir(path) else ""))
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(path)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(str(error).strip().splitlines()[0]) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be a checkpoint of fairseq, got another file") from error
    weights, cfg = state.get("model"), state.get("cfg") or {}
    tensors = isinstance(weights, dict) and all(isinstance(weight, torch.Tensor) for weight in weights.values())
    if not tensors or not {"model", "task"} <= cfg.keys():
        raise ValueError(f"{path} must be a checkpoint of fairseq, got a file without a model or without its settings")
    return state


def option_names(settings: Any) -> set[str]:
    """The names of all settings of a configuration at any depth, without the names of groups."""
    if isinstance(settings, DictConfig):
        settings = OmegaConf.to_container(settings)
    if isinstance(settings, Namespace):
        settings = vars(settings)
    names: set[str] = set()
    for name, value in settings.items():
        names |= option_names(value) if isinstance(value, dict | Namespace) else {name}
    return names
