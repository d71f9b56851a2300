"""fwp-linearize: replace softmax attention in a trained model by another attention, before more training.

    fwp-linearize checkpoints/checkpoint_best.pt --vocabulary DATA --out recurrent \\
      --decoder-update-rule decay --state-size 32
    fwp-linearize translation/checkpoint_best.pt --vocabulary DATA --out linear --encoder-feature-map elu ...

CHECKPOINT is a language model of this package, or a folder of `fwp-convert --to safetensors`; or a translation model of
fairseq's transformer or of this package. FILE: its dict.txt or the folder of its data, if they are not next to it.

With --decoder-update-rule another attention replaces softmax, initialised as in Mao 2022; in translation each of the
three attentions that is named. It needs fine-tuning, or distillation from the old one (fwp_distillation). Its flags are
those of fairseq-train. Unless they are given, it has the identity as feature map, no normalisation and as many heads as
the source. --out is as for fwp-convert. `fwp-convert --source SOURCE` takes the same flags, for other code's models.
"""

import argparse
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq.models import ARCH_MODEL_REGISTRY
from torch import Tensor

import fairseq_fwp  # noqa: F401  (registers the models)
from fairseq_fwp.checkpoints.convert import SOURCES
from fairseq_fwp.checkpoints.convert.checkpoint import CHECKPOINT, FLAGS, check_weights, dictionaries, write
from fairseq_fwp.checkpoints.convert.conversion import Conversion, Options, Source
from fairseq_fwp.checkpoints.convert.fairseq import LANGUAGES, TRANSLATION_MODELS
from fairseq_fwp.checkpoints.linearize import linearize
from fairseq_fwp.checkpoints.linearize.options import ATTENTION_OPTIONS, METHOD, Method, check_options
from fairseq_fwp.checkpoints.pretrained import OURS, read
from fairseq_fwp.checkpoints.pretrained.dictionary import DICTIONARY
from fairseq_fwp.checkpoints.pretrained.folder import CONFIG, WEIGHTS
from fairseq_fwp.cli import make_parser, one_sentence, start_logging
from fairseq_fwp.cli.loading import import_plugin
from fairseq_fwp.patches.options import Settings, flag


def parser() -> argparse.ArgumentParser:
    """The arguments of the command; a plug-in that adds rules and maps must be imported before."""
    command = make_parser(__doc__)
    add = command.add_argument
    add("--user-dir", metavar="DIR", help="a plug-in that adds rules and maps")
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint or folder of the trained model")
    add("--vocabulary", type=Path, metavar="FILE", help="dict.txt, or a folder of dictionaries")
    add("--out", required=True, type=Path, metavar="DIR", help="a new folder for the results")
    for name in LANGUAGES:
        add(flag(name), metavar="LANG", help="of translation, where the checkpoint does not say it")
    add_attention_flags(command)
    return command


def add_attention_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags of the new attention, of all models whose attention can be replaced, and of how it is made."""
    group = command.add_argument_group("how another attention replaces softmax (Mao 2022)")
    for name, (kind, text, metavar) in METHOD.items():
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    group = command.add_argument_group("the new attention: flags of fairseq-train")
    added = set()
    for arch, options in ATTENTION_OPTIONS.items():
        of_model = argparse.ArgumentParser(argument_default=SUPPRESS, add_help=False)  # only what is given is read
        ARCH_MODEL_REGISTRY[arch].add_args(of_model)
        for action in of_model._actions:
            if action.dest in options and action.dest not in added:
                added.add(action.dest)
                group._add_action(action)


def read_attention(
    arch: str, command: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[Settings, Method] | None:
    """Return the options of the new attention and how it is made, None = none are given. Exits where they conflict."""
    of_attention = {name for options in ATTENTION_OPTIONS.values() for name in options}
    options = {name: value for name, value in vars(args).items() if name in of_attention}
    method = Method(*(getattr(args, name) for name in Method._fields))
    if not options and method == Method():
        return None
    try:
        check_options(arch, options, method)
    except ValueError as error:
        command.error(str(error))
    return options, method


def read_source(path: Path) -> tuple[Source, Mapping[str, Tensor], Settings]:
    """Return what a trained model is read as, its weights and its settings. Raises ValueError for another model."""
    language_model, translation = SOURCES["fwp-lm"], SOURCES["fairseq-mt"]
    if path.is_dir():
        return language_model, *language_model.read(path)
    checkpoint = read(path)
    checkpoint.check_model([*OURS, *TRANSLATION_MODELS])
    source = translation if checkpoint.model_name in TRANSLATION_MODELS else language_model
    return source, checkpoint.weights, checkpoint.options


def import_named_plugin(command: str, arguments: Sequence[str] | None) -> None:
    """Import the --user-dir among the arguments, which says what other arguments there are. Exits if it cannot."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--user-dir")
    with one_sentence(command):
        import_plugin(first.parse_known_args(arguments)[0].user_dir)


def report(conversion: Conversion, out: Path, to: str = "fairseq") -> None:
    """Print what was written, for whom of `TARGETS`."""
    if to == "fairseq":
        files = ", ".join([str(out / CHECKPOINT), *dictionaries(conversion)])
        print(f"wrote {files} and {FLAGS}: {(out / FLAGS).read_text().strip()}")
    elif to == "safetensors":
        print(f"wrote {out / CONFIG}, {WEIGHTS} and {DICTIONARY}; fairseq_fwp.load reads the folder")
    else:
        print(f"wrote {out / CONFIG} and {WEIGHTS}; the tokenizer's files are those of the source")
    for note in conversion.notes:
        print(f"note: {note}")


def main(arguments: Sequence[str] | None = None) -> None:
    start_logging()
    import_named_plugin("fwp-linearize", arguments)
    command = parser()
    args = command.parse_args(arguments)
    with one_sentence("fwp-linearize"):
        source, tensors, settings = read_source(args.checkpoint)
        attention = read_attention(source.arch, command, args)
        if attention is None:
            raise ValueError("flags of the new attention must be given, such as --decoder-update-rule, got none")
        languages = {name: value for name in LANGUAGES if (value := getattr(args, name)) is not None}
        words = source.words(args.checkpoint, args.vocabulary)
        conversion = source.convert(tensors, words, Options({**settings, **languages}))
        check_weights(conversion)
        conversion = linearize(conversion, *attention)
        write(conversion, args.out)
        report(conversion, args.out)


if __name__ == "__main__":
    main()
