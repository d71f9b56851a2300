"""Write a conversion as fairseq's checkpoint, dictionaries and flags, and build its model."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, BaseFairseqModel
from omegaconf import OmegaConf
from safetensors import SafetensorError

from fairseq_fwp.checkpoints.convert.conversion import Conversion
from fairseq_fwp.checkpoints.pretrained.checkpoint import build_filled, check_fit, sketch
from fairseq_fwp.checkpoints.pretrained.dictionary import DICTIONARY, make_dictionary
from fairseq_fwp.outputs import system_reason, unfinished
from fairseq_fwp.patches.hooks import KEY, fingerprints
from fairseq_fwp.patches.options import flag
from fairseq_fwp.tasks.lines import LINES

CHECKPOINT, FLAGS = "checkpoint.pt", "flags.txt"


def write(conversion: Conversion, out: Path) -> None:
    """Write checkpoint.pt, flags.txt and dict.txt (of translation dict.LANGUAGE.txt) into `out`, or nothing.

    The checkpoint is what fairseq would save before the first update. Raises ValueError if the folder exists and is not
    empty, or if the weights do not fit the model of the flags.
    """
    check_new(out)
    flags, of_words = command_line(conversion), {KEY: fingerprints(make_task(conversion))}
    saved = {
        "args": None,
        "cfg": OmegaConf.to_container(fairseq_config(flags, out), resolve=True, enum_to_str=True),
        "model": build_converted(conversion).state_dict(),
        "criterion": None,
        "optimizer_history": [{"optimizer_name": None, "lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": of_words,
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, **of_words},
        "last_optimizer_state": None,
    }
    with new_folder(out) as folder:
        with (folder / CHECKPOINT).open("wb") as file:  # of a path, PyTorch's error lacks the system's reason
            torch.save(saved, file)
        for name, dictionary in dictionaries(conversion).items():
            dictionary.save(str(folder / name))
        (folder / FLAGS).write_text(" ".join(flags) + "\n", encoding="utf-8")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder that becomes `out`, or what this links to, when the block ends without an error.

    Raises ValueError if `out` holds files, and OSError that names it if it cannot be written.
    """
    check_new(out)
    whole = out.resolve()
    try:
        whole.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(whole) as folder:
            folder.mkdir()
            yield folder
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's writer raises the second
        check_new(out)  # another command may have made it in the meantime
        raise OSError(f"--out {out} could not be written ({system_reason(error)})") from error


def check_new(out: Path) -> None:
    """Raise ValueError unless the folder is new or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        reason = "holds files" if out.is_dir() else "is a file"
        raise ValueError(f"--out must be a new or empty folder, got {out}, which {reason}")


def command_line(conversion: Conversion) -> list[str]:
    """Return the flags of `fairseq-train` that make this model."""
    # Among fairseq's criteria for words, only this one never needs the logits of all words at once. It needs the
    # backend legacy_ddp.
    task, criterion = ["language_modeling"], ["adaptive_loss", "--ddp-backend", "legacy_ddp"]
    if conversion.line_start is not None:
        task = [LINES, "--line-start", conversion.line_start]
    if isinstance(conversion.words, dict):
        source, *_, target = [*conversion.words] * 2
        task = ["translation", "--source-lang", source, "--target-lang", target]
        criterion = ["cross_entropy"]  # without options: another criterion would not know them
    flags = ["--task", *task, "--arch", conversion.arch]
    for name, value in conversion.flags.items():
        if value is not None and value is not False:
            flags += [flag(name)] + ([] if value is True else [str(value)])
    return [*flags, "--criterion", *criterion]


def parse(flags: list[str], data: Path) -> Namespace:
    """Return what `fairseq-train` reads in flags. Raises ValueError where it refuses them."""
    parser = options.get_training_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"fairseq-train refuses the settings of the checkpoint: {message}")

    parser.error = refuse  # instead of printing the usage and ending the process
    args: Namespace = options.parse_args_and_arch(parser, [str(data.absolute()), *flags])
    return args


def fairseq_config(flags: list[str], data: Path) -> FairseqConfig:
    """Return the configuration that `fairseq-train` builds from flags, in half a second, most of it Hydra's."""
    return convert_namespace_to_omegaconf(parse(flags, data))


def dictionaries(conversion: Conversion) -> dict[str, Dictionary]:
    """Return fairseq's dictionaries by the names of their files, the source's first; counts are unknown, set to 1."""
    words = conversion.words
    if isinstance(words, dict):
        return {f"dict.{language}.txt": make_dictionary(of_language) for language, of_language in words.items()}
    return {DICTIONARY: make_dictionary(words)}


def make_task(conversion: Conversion) -> Namespace:
    """Return the dictionaries as a task for the constructor of a model."""
    source, *_, target = [*dictionaries(conversion).values()] * 2
    return Namespace(source_dictionary=source, target_dictionary=target)


def build_empty(conversion: Conversion) -> BaseFairseqModel:
    """Return the model of the flags with its initial weights."""
    args, config = parse(command_line(conversion), Path()), MODEL_DATACLASS_REGISTRY.get(conversion.arch)
    cfg = OmegaConf.structured(config.from_namespace(args)) if config else args
    return ARCH_MODEL_REGISTRY[conversion.arch].build_model(cfg, make_task(conversion))


def build_converted(conversion: Conversion) -> BaseFairseqModel:
    """Return the model with the weights, in the widest of their dtypes. Raises ValueError if they do not fit."""
    return build_filled(partial(build_empty, conversion), conversion.weights, conversion.flags)


def check_weights(conversion: Conversion) -> None:
    """Check that the weights fit the model of the flags, built on the meta device; raise ValueError otherwise."""
    check_fit(sketch(partial(build_empty, conversion), conversion.weights, conversion.flags), conversion.weights)
