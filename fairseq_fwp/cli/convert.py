"""fwp-convert: make a checkpoint of this plugin from another one, with the same probabilities or another attention.

    fwp-convert --source schlag-lm state_dict.pt --vocabulary words.txt --out converted --attn_type 24 --n_head 8 ...
    fwp-convert --source fairseq-lm adaptive_lm_wiki103.v2/model.pt --out converted
    fwp-convert --source gpt2 FOLDER --out recurrent --decoder-update-rule decay --state-size 32
    fwp-convert --source fairseq-mt transformer.pt --vocabulary DATA --out linear --encoder-feature-map elu ...

CHECKPOINT and FILE depend on the source:

    schlag-lm, transformer-xl  a state dict of the papers' public code; or model.npz, the variables of Transformer-XL's
                TensorFlow code, as the command in docs/checkpoints.md exports them. The options of the training are
                read from the log.txt next to it; those given here win, under their names in the training script.
                FILE: the vocabulary in the order of training, one word a line (there: corpus.vocab.idx2sym)
    fairseq-lm  a checkpoint of fairseq's transformer_lm; FILE: its dict.txt, if it is not next to it
    fwp-lm      a checkpoint of this plugin; FILE: as for fairseq-lm
    gpt2        a folder with config.json and model.safetensors
    fairseq-mt  a translation model of fairseq's transformer, or of this plugin with softmax; FILE: the folder with
                both dict.LANGUAGE.txt

--out is a folder for checkpoint.pt, dict.txt (for fairseq-preprocess --srcdict) and flags.txt. The latter has the
flags that fairseq-train --restore-file or --finetune-from-model needs.

With --decoder-update-rule another attention replaces softmax, initialised as in Mao 2022; in translation each of the
three attentions that is named. It needs fine-tuning, or distillation from the old one (fwp_distillation).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fairseq_fwp  # noqa: F401  (registers the models)
from fairseq_fwp.cli import start_logging
from fairseq_fwp.cli.loading import import_plugin
from fairseq_fwp.convert import SOURCES
from fairseq_fwp.convert.checkpoint import CHECKPOINT, FLAGS, check, vocabularies, write
from fairseq_fwp.convert.source import Options
from fairseq_fwp.convert.swap import Target, swap
from fairseq_fwp.convert.swap_translation import swap_translation
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

# How attention is converted, by model; other models are converted as language models.
SWAPS = {"fwp_transformer": swap_translation}
TRANSLATION = "fairseq-mt"

# The arguments that are not options of the training script.
OWN = ("checkpoint", "source", "vocabulary", "out", "user_dir", *Target._fields)


def plugin_parser() -> argparse.ArgumentParser:
    """The option that is read first: a plug-in adds rules and maps to choose from."""
    made = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    made.add_argument("--user-dir", metavar="DIR", help="a plug-in that adds rules and maps")
    return made


def parser() -> argparse.ArgumentParser:
    """The options of the command, and of the training script of every source."""
    summary, text = (__doc__ or "").split("\n", 1)
    made = argparse.ArgumentParser(
        prog="fwp-convert",
        description=summary.removeprefix("fwp-convert: "),
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[plugin_parser()],
    )
    made.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="state dict, checkpoint or folder to convert")
    made.add_argument("--source", required=True, choices=list(SOURCES), help="the code that wrote the checkpoint")
    made.add_argument(
        "--vocabulary",
        type=Path,
        metavar="FILE",
        help="a vocabulary of one word a line, a dict.txt, or a folder of dictionaries",
    )
    made.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder for the results")
    add_target(made.add_argument_group("attention that replaces softmax (Mao 2022)"))
    training = made.add_argument_group("options of the training script")
    for name, option in {
        name: option for source in SOURCES.values() for name, option in source.options.items()
    }.items():
        if option.type is bool:
            training.add_argument(f"--{name}", action="store_true", default=None, help=option.help)
        else:
            training.add_argument(f"--{name}", type=option.type, metavar="X", help=option.help)
    return made


def add_target(group: Any) -> None:
    """Add the fields of `Target` under their names in fairseq-train."""
    rules = [SOFTMAX, *UPDATE_RULES]
    group.add_argument(
        "--decoder-update-rule",
        dest="update_rule",
        choices=rules,
        help="update rule of causal attention; softmax: local attention, with --attention-window",
    )
    group.add_argument(
        "--decoder-feature-map",
        dest="feature_map",
        choices=list(FEATURE_MAPS),
        help="feature map of causal attention; default: identity",
    )
    for place, attention in (("encoder", "the encoder's attention"), ("cross", "attention to the source")):
        group.add_argument(
            f"--{place}-feature-map",
            choices=[SOFTMAX, *FEATURE_MAPS],
            help=f"for translation: feature map of {attention}; default: softmax stays",
        )
    group.add_argument(
        "--state-size", type=int, metavar="M", help="number of features of a head's keys; default: that of the map"
    )
    group.add_argument(
        "--sum-normalization",
        action="store_true",
        default=None,
        help="divide mapped keys and queries by their sums; recommended for delta with a map",
    )
    group.add_argument(
        "--attention-normalization",
        action="store_true",
        default=None,
        help="divide the output, and the value that delta retrieves",
    )
    group.add_argument(
        "--attention-normalization-read-out-only",
        dest="read_out_only",
        action="store_true",
        default=None,
        help="with --attention-normalization: divide only the output, as Mao 2022 does",
    )
    group.add_argument(
        "--attention-window",
        dest="window",
        type=int,
        metavar="W",
        help="with softmax: number of tokens that a token sees, itself included",
    )
    group.add_argument(
        "--decay-spans",
        type=int,
        metavar="T",
        help="with decay: start with memories of 1 to T tokens; default: uniform gates, as in Mao 2022",
    )
    group.add_argument(
        "--keep-softmax-layers",
        metavar="LAYERS",
        help="layers that keep softmax, numbered from 0, such as 0,3; kl:N: the N whose conversion costs most",
    )
    group.add_argument(
        "--kl-text",
        type=Path,
        metavar="FILE",
        help="with kl:N: text on which the cost is measured, in dictionary words",
    )
    group.add_argument(
        "--decoder-attention-heads", dest="heads", type=int, metavar="H", help="number of heads; default: the source's"
    )


def read_target(made: argparse.ArgumentParser, args: argparse.Namespace) -> Target | None:
    """Return the new attention, None = softmax stays. Exits with a usage message for contradictory arguments."""
    given = {name: value for name in Target._fields if (value := getattr(args, name)) is not None}
    if not given:
        return None
    of_translation = given.keys() & {"encoder_feature_map", "cross_feature_map"}
    if args.source == TRANSLATION:
        places = of_translation | (given.keys() & {"update_rule"})
        if all(given[name] == SOFTMAX for name in places):
            made.error(
                "one of --encoder-feature-map, --cross-feature-map and --decoder-update-rule must be other than "
                "softmax, got none: name one, or leave out all options of a new attention"
            )
        return Target(**{name: value for name, value in given.items() if value != SOFTMAX})
    if of_translation:
        made.error(f"--encoder-feature-map and --cross-feature-map need --source {TRANSLATION}")
    if "update_rule" not in given:
        made.error("--decoder-update-rule must be given with options of a new attention, such as --state-size")
    if given["update_rule"] == SOFTMAX and given.keys() != {"update_rule", "window"}:
        made.error(
            "--decoder-update-rule softmax must be given with --attention-window and no other option of the new "
            "attention: to keep softmax as it is, leave out all of them"
        )
    return Target(**given)


def main(arguments: Sequence[str] | None = None) -> None:
    start_logging()
    try:
        import_plugin(plugin_parser().parse_known_args(arguments)[0].user_dir)
    except ValueError as error:
        sys.exit(f"fwp-convert: {error}")
    made = parser()
    args = made.parse_args(arguments)
    source = SOURCES[args.source]
    given = {name: value for name, value in vars(args).items() if value is not None and name not in OWN}
    for name in given.keys() - source.options.keys():
        made.error(f"--{name} cannot be used with --source {args.source}: leave it out")
    target = read_target(made, args)
    try:
        tensors, saved = source.read(args.checkpoint)
        words = source.words(args.checkpoint, args.vocabulary)
        conversion = source.convert(tensors, words, Options({**saved, **given}))
        if target is not None:
            check(conversion)
            conversion = SWAPS.get(conversion.arch, swap)(conversion, target)
        write(conversion, args.out)
    except (ValueError, OSError) as error:
        sys.exit(f"fwp-convert: {' '.join(str(error).split())}")
    files = ", ".join([str(args.out / CHECKPOINT), *vocabularies(conversion)])
    print(f"wrote {files} and {FLAGS}: {(args.out / FLAGS).read_text().strip()}")
    for note in conversion.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
