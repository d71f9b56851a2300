"""The one reader of the checkpoints of fairseq-train: `read(path)` gives settings and weights, and builds the model."""

import logging
import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import inf
from pathlib import Path
from typing import TypeVar

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_fwp.checkpoints.pretrained.folder import is_stored, unpickle
from fairseq_fwp.models.language_model import TrainedModel
from fairseq_fwp.ops.arguments import DTYPES
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.checkpoints import REMEDY, TRUST
from fairseq_fwp.patches.hooks import KEY, remember_options, take_fingerprints
from fairseq_fwp.patches.options import Settings

Model = TypeVar("Model", bound=nn.Module)
SLACK = 2**20  # numbers that a small model may have besides its weights, such as random features
# fairseq saves these next to the weights: version numbers, and empty tensors that carry a dtype.
MARKS = re.compile(r"(en|de)coder\.((adaptive_softmax\.)?version|.*\b_float_tensor)")
MASKS = re.compile(r".*\badaptive_softmax\.bias")  # minus infinity: a word that the model never predicts
SEED = 1  # of everything that is drawn: repeated conversions give the same model
WITH_CODE = "holds pickled objects, which could run any code, next to its weights"
EXPORT = (
    "export what is needed with: python -c \"import torch; s = torch.load('model.pt', 'cpu', weights_only=False); "
    "torch.save({name: s.get(name) for name in ('args', 'cfg', 'model')}, 'exported.pt')\""
)


@dataclass
class Checkpoint:
    """What fairseq-train saved of a training.

    path: its file; saved: all that the file holds, by fairseq's names;
    settings: those of the model and of its task that are not None, by name, as they were saved; `arch` is always there.
    """

    path: str
    saved: Settings
    settings: Settings

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights of the model, by name."""
        weights: dict[str, Tensor] = self.saved["model"]
        return weights

    @property
    def arch(self) -> str:
        """The name of the model's architecture, such as that of a preset."""
        return str(self.settings["arch"])

    @property
    def model_name(self) -> str:
        """The name of the model that the architecture is a preset of, or its own."""
        return str(ARCH_MODEL_NAME_REGISTRY.get(self.arch, self.arch))

    def check_model(self, models: Sequence[str]) -> None:
        """Raise ValueError unless the model is one of these."""
        expected, remedy = " or ".join(models), "fwp-convert --help lists the --source of other models"
        known = self.model_name in models
        check(known, f"the architecture in {self.path} must be {expected}, got {self.arch!r}: {remedy}")

    @property
    def options(self) -> Settings:
        """The settings, and under `KEY` the fingerprints of the training's dictionaries, {} if they are unknown."""
        of_task = self.saved.get("task_state")
        return {**self.settings, KEY: take_fingerprints(dict(of_task)) if isinstance(of_task, dict) else {}}

    @cached_property
    def cfg(self) -> FairseqConfig:
        """The settings of the whole training, as the installed fairseq names them.

        Raises ValueError for a checkpoint that lacks what fairseq saves next to a model.
        """
        saved, expected = self.saved, f"{self.path} must be a checkpoint of fairseq, got"
        try:
            if saved.get("cfg") is not None:
                saved["cfg"] = OmegaConf.create(saved["cfg"], flags={"allow_objects": True})
            checkpoint_utils._upgrade_state_dict(saved)
        except KeyError as error:
            raise ValueError(f"{expected} a file without {error}: {REMEDY}") from error
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{expected} another file") from error
        saved["args"] = None  # checkpoints of an earlier fairseq have both, and it would read these again
        cfg: FairseqConfig = saved["cfg"]
        check({"model", "task"} <= cfg.keys(), f"{expected} a file without the settings of its task")
        remember_options(saved, cfg, self.path)
        return cfg

    def mark_overridden(self) -> None:
        """Say that other options than those of the training are wanted: the model then does not warn of them."""
        remember_options(self.saved, self.cfg, self.path, overridden=True)

    def build(self, task: FairseqTask) -> BaseFairseqModel:
        """Return the model with its weights, for the dictionaries of a task of fairseq.

        Raises ValueError or RuntimeError if the weights do not fit the settings or the dictionaries.
        """
        self.saved["cfg"] = cfg = self.cfg
        if issubclass(ARCH_MODEL_REGISTRY.get(self.model_name, object), TrainedModel):
            sketch(lambda: task.build_model(cfg.model, from_checkpoint=True), self.weights, self.settings)
        else:  # not all of fairseq's models can be built without memory
            check_counts(self.weights, self.settings)
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([self.path], task=task, state=self.saved)
        return model


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint of fairseq-train. Raises ValueError for any other file, and for one that cannot be read."""
    content = unpickle(Path(path), "checkpoint", f"{WITH_CODE}: {EXPORT}, or set {TRUST}=1 if you trust its source")
    saved: Settings = content if isinstance(content, dict) else {}
    weights, settings = saved.get("model"), saved_settings(saved)
    expected = f"{path} must be a checkpoint of fairseq, got"
    check(isinstance(weights, dict), f"{expected} a file without a model")
    check(all(map(is_stored, saved["model"].values())), f"{expected} a model with objects that are not tensors")
    if settings is None:
        raise ValueError(f"{expected} a file without the settings of its model")
    settings = {name: value for name, value in settings.items() if value is not None}
    return Checkpoint(str(path), saved, {**settings, "arch": str(settings.get("arch") or settings.get("_name"))})


def saved_settings(saved: Settings) -> Settings | None:
    """Return the settings of model and task: `args` of old versions, else `cfg`; None: there are none."""
    args, cfg = saved.get("args"), saved.get("cfg")
    if isinstance(args, Namespace):
        return vars(args)
    if not isinstance(cfg, dict) or not isinstance(of_model := cfg.get("model"), dict | Namespace):
        return args if isinstance(args, dict) else None
    of_task = cfg.get("task") or {}
    if not isinstance(of_task, dict | Namespace):
        return None
    groups = (vars(group) if isinstance(group, Namespace) else group for group in (of_task, of_model))
    return {name: value for group in groups for name, value in group.items()}


def build_filled(build: Callable[[], Model], weights: Mapping[str, Tensor], settings: Settings) -> Model:
    """Return the model that `build` makes of settings, with these weights. Raises ValueError if they do not fit."""
    sketch(build, weights, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = build()
    fill(model, weights)
    return model


def sketch(build: Callable[[], Model], weights: Mapping[str, Tensor], settings: Settings) -> Model:
    """Return the model on the meta device, which needs no memory.

    Raises ValueError for a model of far more numbers than its weights have.
    """
    check_counts(weights, settings)
    before = logging.root.manager.disable
    logging.disable()  # it warns when it is built once more
    try:
        with torch.device("meta"):
            model = build()
    except (OverflowError, RuntimeError, TypeError) as error:  # of sizes that no tensor can have
        fault = str(error).splitlines()[0]
        raise ValueError(f"the model that the options describe cannot be built: {fault}") from error
    finally:
        logging.disable(before)
    there = sum(x.numel() for x in weights.values())
    needed = sum(x.numel() for x in {*model.parameters(), *model.buffers()})
    numbers = f"a model of the {there:,} numbers of the weights, got one of {needed:,}"
    check(needed <= 2 * there + SLACK, f"the options must describe {numbers}")
    return model


def check_counts(weights: Mapping[str, Tensor], settings: Settings) -> None:
    """Raise ValueError for settings with which a model takes any time to build, or any memory to run."""
    there = sum(x.numel() for x in weights.values())
    limits = {"_layers": len(weights), "_features": there + SLACK, "_window": there + SLACK}
    for name, value in settings.items():
        most = next((most for end, most in limits.items() if name.endswith(end)), inf)
        if isinstance(value, int) and value > most:
            raise ValueError(f"{name} in the settings must be at most {most:,} with these weights, got {value:,}")


def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a model these weights, in the widest of their dtypes. Raises ValueError if they do not fit."""
    check_fit(model, weights)
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    model.to(reduce(torch.promote_types, {weights[name].dtype for name in weights.keys() & parameters.keys()}))
    with torch.no_grad():
        for name in weights.keys() & parameters.keys():
            parameters[name].copy_(weights[name])
    # A shared parameter now has the same value under all its names. Loading also masks absent words.
    model.load_state_dict({**model.state_dict(), **{name: weights[name] for name in weights.keys() & buffers.keys()}})


def check_fit(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError naming weights that are missing, too many, not finite, or of another shape or dtype."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {**parameters, **dict(model.named_buffers())}
    # A parameter that modules share has several names: one of them is enough.
    present = {id(parameters[name]) for name in weights.keys() & parameters.keys()}
    needed = [name for name, parameter in model.named_parameters() if id(parameter) not in present]
    buffers = model.state_dict().keys() - parameters.keys() - weights.keys()
    needed += [name for name in buffers if not MARKS.fullmatch(name)]
    faults = [f"{name} is missing" for name in needed]
    for name, weight in weights.items():
        if name not in tensors:
            faults.append(f"{name} is not a weight of this model")
        elif tensors[name].shape != weight.shape:
            faults.append(f"{name} must be {tuple(tensors[name].shape)}, got {tuple(weight.shape)}")
        elif tensors[name].is_floating_point() and weight.dtype not in DTYPES:
            faults.append(f"{name} must be floating-point of 16 bits or more, got {weight.dtype}")
        elif not tensors[name].is_floating_point() and weight.dtype != tensors[name].dtype:
            faults.append(f"{name} must be {tensors[name].dtype}, got {weight.dtype}")
        elif not is_finite(weight.clamp(min=0) if MASKS.fullmatch(name) else weight):
            faults.append(f"{name} must have finite numbers, got NaN or infinity")
    check(not faults, f"the weights do not fit the model that the options describe: {'; '.join(sorted(faults))}")


def is_finite(x: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite, without a second tensor of its size."""
    return not x.numel() or all(bool(extreme.isfinite()) for extreme in x.aminmax())
