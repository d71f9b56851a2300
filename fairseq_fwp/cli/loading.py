"""Read and write the files of a command, in the order of its steps: plug-in, model, text, results."""

import dataclasses
import os
import sys
import textwrap
from argparse import Namespace
from pathlib import Path

import torch
from fairseq import tasks, utils
from fairseq.data import data_utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, FairseqLanguageModel
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import fairseq_fwp
from fairseq_fwp.checkpoints.pretrained.checkpoint import Checkpoint
from fairseq_fwp.evaluation import Text
from fairseq_fwp.modules.decoding import WORD
from fairseq_fwp.patches.options import Settings, setting
from fairseq_fwp.tasks import text as texts
from fairseq_fwp.tasks.lines import LINES, Lines


def refuse_inputs(data: str, checkpoint: str, outputs: dict[str, Path | None]) -> None:
    """Raise ValueError if an output, by its flag, is the checkpoint, or a dictionary or text in the data folder."""
    folders = {Path(folder).resolve() for folder in utils.split_paths(data)}
    for flag, path in outputs.items():
        output = (path or Path()).resolve()
        is_data = output.name.startswith("dict.") or output.suffix in (".bin", ".idx")
        if path and (output == Path(checkpoint).resolve() or (output.parent in folders and is_data)):
            raise ValueError(f"{flag} must be another file than those that are read, got {path}: give another name")


def import_plugin(folder: str | None) -> None:
    """Import the --user-dir, unless it is this package. Raises ValueError where there is no such folder."""
    if folder is None or Path(folder).resolve() == Path(fairseq_fwp.__file__).resolve().parent:
        return
    if not os.path.isdir(folder) and os.path.exists(folder):
        raise ValueError(f"--user-dir must be the folder of a plug-in, got the file {folder}")
    try:
        utils.import_user_module(Namespace(user_dir=folder))
    except FileNotFoundError as error:
        raise ValueError(f"--user-dir must be the folder of a plug-in, got {error}, which does not exist") from error


def load_model(
    checkpoint: Checkpoint, data: str, overrides: Settings | None = None
) -> tuple[FairseqLanguageModel, FairseqTask]:
    """Return the language model of a checkpoint and its task, or raise ValueError or OSError.

    overrides: settings in place of the checkpoint's, which are written into its configuration.
    """
    path, cfg = checkpoint.path, checkpoint.cfg
    replaced = {**read_overrides(path, cfg, overrides or {}), "data": data}
    if overrides:
        checkpoint.mark_overridden()
    overwrite_args_by_name(cfg, replaced)
    check_kind(path, cfg)
    task = setup_task(cfg, data)
    if len(task.target_dictionary) != len(task.source_dictionary):
        raise ValueError(f"{path} must score every word, got training with --output-dictionary-size: train without it")
    try:
        return checkpoint.build(task), task
    except RuntimeError as error:
        mismatch = textwrap.shorten(str(error).strip().splitlines()[-1], 200)
        words = f"{data}, a dictionary of {len(task.source_dictionary):,} words"
        raise ValueError(
            f"{path} does not fit its settings or {words} ({mismatch}): pass the data folder that it was trained on"
        ) from error


def read_overrides(path: str, cfg: FairseqConfig, overrides: Settings) -> Settings:
    """Return the overrides in the types of their settings. Raises ValueError for unknown names and other types."""
    if unknown := sorted(overrides.keys() - option_names(cfg)):
        spelling = ": write names with _ in place of -" if any("-" in name for name in unknown) else ""
        names = ", ".join(unknown) + spelling
        raise ValueError(f"--model-overrides must name settings of the model in {path}, got {names}")
    read = dict(overrides)
    model = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(architecture(cfg)))
    task = tasks.TASK_DATACLASS_REGISTRY.get(cfg.task._name)
    groups = (group.type for group in dataclasses.fields(FairseqConfig))
    for group in filter(dataclasses.is_dataclass, (*groups, model, task)):
        settings = OmegaConf.structured(group)
        for name in overrides.keys() & settings.keys():
            try:
                settings[name] = overrides[name]
            except OmegaConfBaseException as error:
                got = f"{overrides[name]!r}: {str(error).splitlines()[0]}"
                raise ValueError(f"--model-overrides: {name} must have the type of this setting, got {got}") from None
            read[name] = settings[name]
    return read


def option_names(settings: DictConfig | Namespace | Settings) -> set[str]:
    """The names of all settings of a configuration at any depth, without the names of groups."""
    settings = OmegaConf.to_container(settings) if isinstance(settings, DictConfig) else settings
    settings = vars(settings) if isinstance(settings, Namespace) else settings
    names: set[str] = set()
    for name, value in settings.items():
        names |= option_names(value) if isinstance(value, dict | Namespace) else {name}
    return names


def architecture(cfg: FairseqConfig) -> str:
    """The name of the model's architecture."""
    return setting(cfg.model, "arch", None) or cfg.model._name


def check_kind(path: str, cfg: FairseqConfig) -> None:
    """Check that the model is a language model and that it and its task are registered; raise ValueError otherwise."""
    arch, task = architecture(cfg), cfg.task._name
    if arch not in ARCH_MODEL_REGISTRY or task not in tasks.TASK_REGISTRY:
        remedy = "give the plugin that has them as --user-dir"
        raise ValueError(f"{path} needs the model {arch!r} and the task {task!r}: {remedy}")
    if not issubclass(ARCH_MODEL_REGISTRY[arch], FairseqLanguageModel):
        raise ValueError(f"the model in {path} must be a language model, got {arch!r}")
    # Our tasks read this token only once, before the text or before each line.
    if task not in ("fwp_language_modeling", LINES) and setting(cfg.task, "add_bos_token", False):
        expected = "without --add-bos-token or with --task fwp_language_modeling"
        actual = f"a model of the task {task} with this flag: fairseq-eval-lm can evaluate it"
        raise ValueError(f"{path} must be trained {expected}, got {actual}")


def setup_task(cfg: FairseqConfig, data: str) -> FairseqTask:
    """The task on a data folder. Raises ValueError or OSError for one without a dictionary that can be read."""
    if not data or not os.path.exists(os.path.join(data, "dict.txt")):
        raise ValueError(f"the data folder {data} must hold dict.txt: give the folder that the model was trained on")
    try:
        return tasks.setup_task(cfg.task, from_checkpoint=True)
    except (ValueError, OSError):
        raise
    except Exception as error:  # fairseq raises it for another encoding or a repeated word
        raise ValueError(f"the dictionary in {data} cannot be read: {' '.join(str(error).split())}") from error


def load_text(
    task: FairseqTask,
    data: str,
    subset: str,
    first: int,
    reset_after: str | None = None,
    line_start: str | None = None,
    longest: int = sys.maxsize,
) -> Text:
    """Return a subset of the text after the symbol `first`, by documents or lines. Raises ValueError without one.

    line_start: what is read before the rest of each line, one of STARTS; longest: tokens read of a line.
    """
    folder, dictionary = utils.split_paths(data)[0], task.source_dictionary
    dataset = data_utils.load_indexed_dataset(os.path.join(folder, subset), dictionary)
    if dataset is None:
        subsets = ", ".join(sorted({file.stem for file in Path(folder).glob("*.idx")})) or "other files"
        raise ValueError(f"the text {subset!r} must exist in {folder}, got only {subsets}")
    if line_start is not None:
        by_line = Lines(dataset, None if line_start == WORD else first, dictionary)
        if not len(by_line):
            raise ValueError(f"the text {subset!r} must have a line with words to predict, got none")
        if (most := int(by_line.sizes.max())) > longest:
            limit = f"at most {longest} tokens (--tokens-per-sample)"
            where = f"{most} in line {by_line.places[by_line.sizes.argmax()] + 1}"
            raise ValueError(f"lines of the text {subset!r} must have {limit}, got {where}")
        samples = [by_line[index] for index in range(len(by_line))]
        inputs, targets = (torch.cat([sample[name] for sample in samples]) for name in ("source", "target"))
        return Text(inputs, targets, (0, *by_line.sizes.cumsum()[:-1].tolist()))
    lines = texts.JoinedLines(dataset)
    tokens = lines.tokens(0, len(lines)).long()
    if reset_after is None:
        return Text.after(first, tokens)
    if reset_after != texts.BLANK_LINE and reset_after not in dictionary:
        raise ValueError(f"--reset-after must be a symbol of the dictionary or {texts.BLANK_LINE}, got {reset_after!r}")
    return Text.after(first, tokens, texts.document_starts(lines, dictionary, reset_after).tolist())
