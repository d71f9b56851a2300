"""fwp-add-layer: put a fast weight layer on a trained language model, which it does not change until it learns.

    fwp-add-layer data-bin/corpus --path checkpoint_best.pt --out start.pt
    fairseq-train data-bin/corpus --arch fwp_fwl_lm --fwl-map-inputs --finetune-from-model start.pt ...

The layer is the identity, in a basis where its gradient steps are those of K-FAC (see models/fast_weight_layer).
The basis comes from features and gradients of the training text, which is read as in training. Without this command
--finetune-from-model starts with the identity too, but in the basis of the features.
"""

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from fairseq_fwp.cli import make_parser, one_sentence, start_logging, write_whole
from fairseq_fwp.cli.arguments import output_file, positive


def run(args: Namespace) -> None:
    """Add the layer as the arguments say, and print what was written."""
    import torch
    from omegaconf import OmegaConf

    from fairseq_fwp.checkpoints.pretrained import read
    from fairseq_fwp.cli import loading
    from fairseq_fwp.models.fast_weight_layer.initialization import read_moments
    from fairseq_fwp.models.fast_weight_layer.model import add_layer
    from fairseq_fwp.patches.options import setting

    if args.out.exists():
        raise ValueError(f"--out must be a new file, got {args.out}, which exists: give another name, or remove it")
    checkpoint = read(args.path)
    base, task = loading.load_model(checkpoint, args.data)
    cfg = checkpoint.cfg
    model, settings = add_layer(base, cfg.model, loading.architecture(cfg), task, args.fwl_hidden_dim)
    text = loading.load_text(task, args.data, "train", task.source_dictionary.eos())
    carry = bool(setting(cfg.task, "carry_state", False))
    model.decoder.fast_weight_layer.whiten(*read_moments(model, text.tokens, args.tokens, carry))
    original = read(args.path)  # its settings still name the data of the training
    settings_of_all = OmegaConf.to_container(OmegaConf.merge(original.cfg, {"model": settings}), enum_to_str=True)
    state = original.saved | {"cfg": settings_of_all, "model": model.state_dict(), "last_optimizer_state": None}

    def save(path: Path) -> None:
        with path.open("wb") as file:  # of a path, PyTorch's error lacks the system's reason
            torch.save(state, file)

    write_whole(args.out, save)
    size = f"--fwl-hidden-dim {args.fwl_hidden_dim} " if args.fwl_hidden_dim else ""
    flags = f"--arch fwp_fwl_lm --fwl-base {settings.fwl_base} {size}--fwl-map-inputs"
    print(f"wrote {args.out}: {args.path} with a fast weight layer, for {flags} and the flags of its sizes")


def parser() -> argparse.ArgumentParser:
    command = make_parser(__doc__)
    add = command.add_argument
    add("data", help="folder that fairseq-preprocess has written, with the dictionary of the training")
    add("--path", required=True, help="the checkpoint of a language model")
    add("--out", required=True, type=output_file, metavar="FILE", help="file for --finetune-from-model")
    add("--fwl-hidden-dim", type=positive, metavar="F", help="hidden units of the layer (4 D)")
    add("--tokens", type=positive, default=100_000, metavar="N", help="training tokens to read (100,000)")
    return command


def main(arguments: Sequence[str] | None = None) -> None:
    start_logging()
    args = parser().parse_args(arguments)
    with one_sentence("fwp-add-layer"):
        run(args)


if __name__ == "__main__":
    main()
