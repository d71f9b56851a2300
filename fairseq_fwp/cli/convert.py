"""fwp-convert: make a checkpoint of this plugin from another one, with the same probabilities or another attention.

    fwp-convert --source schlag-lm state_dict.pt --vocabulary words.txt --out converted --attn_type 24 --n_head 8 ...
    fwp-convert --source fairseq-lm adaptive_lm_wiki103.v2/model.pt --out converted
    fwp-convert --source gpt2 FOLDER --out recurrent --decoder-update-rule decay --state-size 32 ...
    fwp-convert --source llama FOLDER --out hybrid --decoder-update-rule gated_delta --keep-softmax-layers 0,8 ...
    fwp-convert --source fla FOLDER --out converted
    fwp-convert --source fwp-lm checkpoints/checkpoint_best.pt --vocabulary converted/dict.txt --to fla --out FOLDER

CHECKPOINT and FILE depend on the source:

    schlag-lm, transformer-xl  a state dict of the papers' public code; or model.npz, the variables of Transformer-XL's
                TensorFlow code, as the command in docs/checkpoints.md exports them. The options of the training are
                read from the log.txt next to it; those given here win, under their names in the training script.
                FILE: the vocabulary in the order of training, one word a line (there: corpus.vocab.idx2sym)
    fairseq-lm  a checkpoint of fairseq's transformer_lm; FILE: its dict.txt or data folder, if it is not next to it
    fwp-lm      a checkpoint of this plugin, or a folder of --to safetensors; FILE: as for fairseq-lm
    gpt2        a folder with config.json, and model.safetensors or pytorch_model.bin; FILE: names of the tokens, one a
                line, if the folder has no vocab.txt. --line-start: its texts are lines; see docs/conversion.md
    llama       the same of a Llama, Mistral, Qwen2 or Qwen3, and the same FILE and options
    fla         the same of flash-linear-attention's DeltaNet, Gated DeltaNet, Kimi Delta Attention or RWKV-7
    fairseq-mt  a translation model of fairseq's transformer, or of this plugin with softmax; FILE: the folder with
                both dict.LANGUAGE.txt

--out is a folder for checkpoint.pt, dict.txt (for fairseq-preprocess --srcdict) and flags.txt. The latter has the
flags that fairseq-train --restore-file or --finetune-from-model needs. With --to safetensors it gets config.json,
model.safetensors and dict.txt, which fairseq_fwp.load reads; with --to fla the first two, as flash-linear-attention and
transformers read them.

With flags of a new attention, such as --decoder-update-rule, the model is linearised too: see fwp-linearize.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import fairseq_fwp  # noqa: F401  (registers the models)
from fairseq_fwp.checkpoints.convert import SOURCES, TARGETS
from fairseq_fwp.checkpoints.convert.checkpoint import check_weights
from fairseq_fwp.checkpoints.convert.conversion import Options
from fairseq_fwp.checkpoints.linearize import linearize
from fairseq_fwp.cli import make_parser, one_sentence, start_logging
from fairseq_fwp.cli.linearize import add_attention_flags, import_named_plugin, read_attention, report

OPTIONS = {name: option for source in SOURCES.values() for name, option in source.options.items()}


def parser() -> argparse.ArgumentParser:
    """The arguments of the command; a plug-in that adds rules and maps must be imported before."""
    command = make_parser(__doc__)
    add = command.add_argument
    add("--user-dir", metavar="DIR", help="a plug-in that adds rules and maps")
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="state dict, checkpoint or folder to convert")
    add("--source", required=True, choices=list(SOURCES), help="the code that wrote the checkpoint")
    add("--to", default="fairseq", choices=list(TARGETS), help="the code that reads the results (default: fairseq)")
    words = "a vocabulary of one word a line, a dict.txt, or a folder of dictionaries"
    add("--vocabulary", type=Path, metavar="FILE", help=words)
    add("--out", required=True, type=Path, metavar="DIR", help="a new folder for the results")
    group = command.add_argument_group("options of the source")
    for name, (kind, text, metavar) in OPTIONS.items():
        if kind is bool:  # None if it is not given
            group.add_argument(f"--{name}", action="store_true", default=None, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    add_attention_flags(command)
    return command


def main(arguments: Sequence[str] | None = None) -> None:
    start_logging()
    import_named_plugin("fwp-convert", arguments)
    command = parser()
    args = command.parse_args(arguments)
    source = SOURCES[args.source]
    named = {name: getattr(args, name.replace("-", "_")) for name in OPTIONS}
    options = {name.replace("-", "_"): value for name, value in named.items() if value is not None}
    for name, value in named.items():
        if value is not None and name not in source.options:
            command.error(f"--{name} cannot be used with --source {args.source}: leave it out")
    attention = read_attention(source.arch, command, args)
    with one_sentence("fwp-convert"):
        tensors, saved = source.read(args.checkpoint)
        words = source.words(args.checkpoint, args.vocabulary)
        conversion = source.convert(tensors, words, Options({**saved, **options}))
        if attention is not None:
            check_weights(conversion)
            conversion = linearize(conversion, *attention)
        TARGETS[args.to](conversion, args.out)
        report(conversion, args.out, args.to)


if __name__ == "__main__":
    main()
