"""fwp-convert: make a checkpoint of the papers' public code one of fairseq's, with the same probabilities.

    fwp-convert --source schlag-lm state_dict.pt --vocabulary words.txt --out converted --attn_type 24 --n_head 8 ...

CHECKPOINT is a state dict. The training's options are read from the log.txt beside it; those given here win, and are
written as the training script has them. FILE has the vocabulary in the order of training, one word a line (there:
corpus.vocab.idx2sym). --out is a folder for checkpoint.pt, dict.txt (for fairseq-preprocess --srcdict) and
flags.txt (what fairseq-train --restore-file or --finetune-from-model needs).
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import fairseq_fwp  # noqa: F401  (registers the models)
from fairseq_fwp.convert import SOURCES
from fairseq_fwp.convert.checkpoint import CHECKPOINT, DICTIONARY, FLAGS, load_tensors, write
from fairseq_fwp.convert.source import Options
from fairseq_fwp.convert.vocabulary import read_words


def parser() -> argparse.ArgumentParser:
    """The command's options, and of every source those of its training script."""
    summary, text = (__doc__ or "").split("\n", 1)
    made = argparse.ArgumentParser(
        prog="fwp-convert",
        description=summary.removeprefix("fwp-convert: "),
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a state dict")
    made.add_argument("--source", required=True, choices=list(SOURCES), help="whose code the checkpoint is of")
    made.add_argument("--vocabulary", required=True, type=Path, metavar="FILE", help="its words, one a line")
    made.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder for what is written")
    training = made.add_argument_group("options of the training script")
    for name, option in {
        name: option for source in SOURCES.values() for name, option in source.options.items()
    }.items():
        if option.type is bool:
            training.add_argument(f"--{name}", action="store_true", default=None, help=option.help)
        else:
            training.add_argument(f"--{name}", type=option.type, metavar="X", help=option.help)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    logging.getLogger("hydra").setLevel(logging.WARNING)  # fairseq turns on the debugging messages of everything
    made = parser()
    args = made.parse_args(arguments)
    source = SOURCES[args.source]
    given = {
        name: value
        for name, value in vars(args).items()
        if value is not None and name not in ("checkpoint", "source", "vocabulary", "out")
    }
    for name in given.keys() - source.options.keys():
        made.error(f"--{name} is no option of {args.source}")
    try:
        tensors = load_tensors(args.checkpoint, source.export)
        saved = source.read_saved(args.checkpoint.parent)
        conversion = source.convert(tensors, read_words(args.vocabulary), Options({**saved, **given}))
        write(conversion, args.out)
    except (ValueError, OSError) as error:
        sys.exit(f"fwp-convert: {error}")
    print(f"wrote {args.out / CHECKPOINT}, {DICTIONARY} and {FLAGS}: {(args.out / FLAGS).read_text().strip()}")
    for note in conversion.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
