"""fwp-convert: make a checkpoint of this plugin from another one, with the same probabilities or another attention.

    fwp-convert --source schlag-lm state_dict.pt --vocabulary words.txt --out converted --attn_type 24 --n_head 8 ...
    fwp-convert --source fairseq-lm adaptive_lm_wiki103.v2/model.pt --out converted
    fwp-convert --source gpt2 FOLDER --out recurrent --decoder-update-rule decay --state-size 32
    fwp-convert --source fairseq-mt transformer.pt --vocabulary DATA --out linear --encoder-feature-map elu ...
    fwp-convert --source fla FOLDER --out converted
    fwp-convert --source fwp-lm checkpoints/checkpoint_best.pt --vocabulary converted/dict.txt --to fla --out FOLDER

CHECKPOINT and FILE depend on the source:

    schlag-lm, transformer-xl  a state dict of the papers' public code; or model.npz, the variables of Transformer-XL's
                TensorFlow code, as the command in docs/checkpoints.md exports them. The options of the training are
                read from the log.txt next to it; those given here win, under their names in the training script.
                FILE: the vocabulary in the order of training, one word a line (there: corpus.vocab.idx2sym)
    fairseq-lm  a checkpoint of fairseq's transformer_lm; FILE: its dict.txt or data folder, if it is not next to it
    fwp-lm      a checkpoint of this plugin, or a folder of --to safetensors; FILE: as for fairseq-lm
    gpt2        a folder with config.json and model.safetensors
    fla         the same of flash-linear-attention's DeltaNet, Gated DeltaNet, Kimi Delta Attention or RWKV-7
    fairseq-mt  a translation model of fairseq's transformer, or of this plugin with softmax; FILE: the folder with
                both dict.LANGUAGE.txt

--out is a folder for checkpoint.pt, dict.txt (for fairseq-preprocess --srcdict) and flags.txt. The latter has the
flags that fairseq-train --restore-file or --finetune-from-model needs. With --to safetensors it gets config.json,
model.safetensors and dict.txt, which fairseq_fwp.load reads; with --to fla the first two, as flash-linear-attention and
transformers read them.

With --decoder-update-rule another attention replaces softmax, initialised as in Mao 2022; in translation each of the
three attentions that is named. It needs fine-tuning, or distillation from the old one (fwp_distillation). Its flags are
those of fairseq-train; for translation see fwp-convert --source fairseq-mt --help. Unless they are given, it has the
identity as feature map, no normalisation and as many heads as the source.
"""

import argparse
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path

from fairseq.models import ARCH_MODEL_REGISTRY

import fairseq_fwp  # noqa: F401  (registers the models)
from fairseq_fwp.cli import make_parser, one_sentence, start_logging
from fairseq_fwp.cli.loading import import_plugin
from fairseq_fwp.convert import SOURCES, TARGETS
from fairseq_fwp.convert.checkpoint import CHECKPOINT, FLAGS, check, dictionaries
from fairseq_fwp.convert.conversion import Conversion, Options
from fairseq_fwp.convert.folder import CONFIG, WEIGHTS
from fairseq_fwp.convert.linearize import ATTENTION_OPTIONS, METHOD, Method, check_options, linearize
from fairseq_fwp.convert.vocabulary import DICTIONARY
from fairseq_fwp.options import Settings

OPTIONS = {name: option for source in SOURCES.values() for name, option in source.options.items()}
# The arguments that are neither such options of a training script nor of the new attention.
OWN = ("checkpoint", "source", "to", "vocabulary", "out", "user_dir")


def parser(source: str = "fwp-lm") -> argparse.ArgumentParser:
    """The arguments of the command, of the training script of every source, and of the model of one source."""
    made = make_parser(__doc__)
    add = made.add_argument
    add("--user-dir", metavar="DIR", help="a plug-in that adds rules and maps")
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="state dict, checkpoint or folder to convert")
    add("--source", required=True, choices=list(SOURCES), help="the code that wrote the checkpoint")
    add("--to", default="fairseq", choices=list(TARGETS), help="the code that reads the results (default: fairseq)")
    words = "a vocabulary of one word a line, a dict.txt, or a folder of dictionaries"
    add("--vocabulary", type=Path, metavar="FILE", help=words)
    add("--out", required=True, type=Path, metavar="DIR", help="a new folder for the results")
    for title, options in (
        ("how another attention replaces softmax (Mao 2022)", METHOD),
        ("options of the training script", OPTIONS),
    ):
        group = made.add_argument_group(title)
        for name, (kind, text, metavar) in options.items():
            if kind is bool:  # None if it is not given
                group.add_argument(f"--{name}", action="store_true", default=None, help=text)
            else:
                group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    arch = SOURCES.get(source, SOURCES["fwp-lm"]).arch
    attention = made.add_argument_group(f"the new attention: flags of {arch}", argument_default=SUPPRESS)
    ARCH_MODEL_REGISTRY[arch].add_args(attention)
    for action in attention._group_actions:
        if action.dest not in ATTENTION_OPTIONS[arch]:  # linearize.check_options refuses these
            action.help = SUPPRESS
    return made


def read_attention(made: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[Settings, Method] | None:
    """Return the options of the new attention and how it is made, None = softmax stays. Exits where they conflict."""
    given = {name: value for name, value in vars(args).items() if name not in (*OWN, *OPTIONS, *Method._fields)}
    method = Method(*(getattr(args, name) for name in Method._fields))
    if not given and method == Method():
        return None
    try:
        check_options(SOURCES[args.source].arch, given, method)
    except ValueError as error:
        made.error(str(error))
    return given, method


def main(arguments: Sequence[str] | None = None) -> None:
    start_logging()
    # These two say which others there are: a plug-in adds rules and maps, and a source has a model.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--user-dir", "--source"):
        first.add_argument(flag)
    known, _ = first.parse_known_args(arguments)
    try:
        import_plugin(known.user_dir)
    except ValueError as error:
        sys.exit(f"fwp-convert: {error}")
    made = parser(known.source)
    args = made.parse_args(arguments)
    source = SOURCES[args.source]
    given = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    for name in given.keys() - source.options.keys():
        made.error(f"--{name} cannot be used with --source {args.source}: leave it out")
    attention = read_attention(made, args)
    with one_sentence("fwp-convert"):
        tensors, saved = source.read(args.checkpoint)
        words = source.words(args.checkpoint, args.vocabulary)
        conversion = source.convert(tensors, words, Options({**saved, **given}))
        if attention is not None:
            check(conversion)
            conversion = linearize(conversion, *attention)
        TARGETS[args.to](conversion, args.out)
        report(args, conversion)


def report(args: argparse.Namespace, conversion: Conversion) -> None:
    """Print what was written."""
    if args.to == "fairseq":
        files = ", ".join([str(args.out / CHECKPOINT), *dictionaries(conversion)])
        print(f"wrote {files} and {FLAGS}: {(args.out / FLAGS).read_text().strip()}")
    elif args.to == "safetensors":
        print(f"wrote {args.out / CONFIG}, {WEIGHTS} and {DICTIONARY}; fairseq_fwp.load reads the folder")
    else:
        print(f"wrote {args.out / CONFIG} and {WEIGHTS}; the tokenizer's files are those of the source")
    for note in conversion.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
