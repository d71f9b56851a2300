"""fwp-add-layer: put a fast weight layer on a trained language model, which it does not change until it learns.

    fwp-add-layer data-bin/corpus --path checkpoint_best.pt --out start.pt
    fairseq-train data-bin/corpus --arch fwp_fwl_lm --fwl-map-inputs --finetune-from-model start.pt ...

The layer is the identity, in a basis where its steps down gradients are those of K-FAC (see
modules/fast_weight_layer.py), by features and gradients of the training text, which is read as in training. Without
this command --finetune-from-model starts with the identity too, but in the basis of the features.
"""

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

import fairseq_fwp  # noqa: F401  (registers the models)
from fairseq_fwp.cli import start_logging
from fairseq_fwp.cli.argument_types import output_file, positive
from fairseq_fwp.cli.checkpoint import architecture, load_model, load_state
from fairseq_fwp.cli.eval_lm import load_text, write_whole
from fairseq_fwp.models.fwp_fwl_lm import BASES, FwpFwlLanguageModel
from fairseq_fwp.models.language_model import fill_in_defaults

# What is read of the training text are the beginnings of so many equal parts of it.
STREAMS = 16


def add_layer(base: Any, cfg: Any, task: Any, hidden_dim: int | None) -> tuple[FwpFwlLanguageModel, Any]:
    """The model with a layer that is not fast yet, and its settings, from a base and its configuration.

    Raises ValueError for a model that the layer cannot be put on.
    """
    arch = architecture(cfg)
    names = [name for name, (_, model) in BASES.items() if type(base) is model]
    if not names:
        raise ValueError(f"the layer goes on {' or '.join(BASES)}, and this is {arch}")
    settings = OmegaConf.to_container(cfg.model) if OmegaConf.is_config(cfg.model) else vars(cfg.model)
    settings |= {
        "_name": "fwp_fwl_lm", "arch": "fwp_fwl_lm", "fwl_base": names[0], "fwl_fast_weights": "none",
        "fwl_map_inputs": True, "fwl_hidden_dim": hidden_dim,
    }  # fmt: skip
    completed = fill_in_defaults(OmegaConf.create(settings), FwpFwlLanguageModel.config())
    model = FwpFwlLanguageModel.build_model(completed, task)
    if model.decoder.last_norm is None:
        raise ValueError("the layer is the identity on normalised features alone: this model has no last normalisation")
    model.load_state_dict(base.state_dict())
    return model, completed


def read_moments(model: Any, tokens: Tensor, count: int, carry: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (D,) and covariance (D, D) of the features below the layer, and second moments of the loss's gradients.

    By `count` of the tokens (N,), in segments as long as in training, whose state is carried on if `carry`.
    """
    decoder = model.eval().decoder
    length = min(decoder.sample_length, len(tokens) // STREAMS)
    if length < 2:
        raise ValueError(f"a training text of {len(tokens):,} tokens is too short for {STREAMS} streams")
    streams = tokens[: len(tokens) // STREAMS * STREAMS].view(STREAMS, -1)
    read = max(length, min(count // STREAMS, streams.shape[1]) // length * length)
    features: list[Tensor] = []
    hook = decoder.fast_weight_layer.register_forward_pre_hook(lambda layer, inputs: features.append(inputs[0]))
    norm, softmax, state, gradients = decoder.fast_weight_layer.norm, decoder.adaptive_softmax, None, []
    for segment in streams[:, :read].split(length, 1):
        with torch.no_grad():
            state = decoder(segment, state=state if carry else None)[1]["state"]
        with torch.enable_grad():
            x = features[-1][:, :-1].detach().requires_grad_()
            y = norm(x)
            of_y = softmax.loss_gradient(y.detach(), segment[:, 1:])
            gradients.append(torch.autograd.grad(y, x, of_y)[0].flatten(0, 1))
    hook.remove()
    x, of_x = torch.cat(features, 1).flatten(0, 1).double(), torch.cat(gradients).double()
    return x.mean(0).float(), x.mT.cov(), of_x.mT @ of_x / len(of_x)


def run(args: Namespace) -> None:
    """Does what the arguments say, and prints what was written."""
    base, task, cfg = load_model(args.path, args.data, {})
    model, settings = add_layer(base, cfg, task, args.fwl_hidden_dim)
    text = load_text(task, args.data, "train", task.source_dictionary.eos())
    carry = bool(getattr(cfg.task, "carry_state", False))
    model.decoder.fast_weight_layer.whiten(*read_moments(model, text.tokens, args.tokens, carry))
    state = load_state(args.path)
    state["cfg"] = OmegaConf.to_container(OmegaConf.merge(state["cfg"], {"model": settings}), enum_to_str=True)
    state |= {"args": None, "model": model.state_dict(), "last_optimizer_state": None}
    write_whole(args.out, lambda file: torch.save(state, file))
    size = f"--fwl-hidden-dim {args.fwl_hidden_dim} " if args.fwl_hidden_dim else ""
    flags = f"--arch fwp_fwl_lm --fwl-base {settings.fwl_base} {size}--fwl-map-inputs"
    print(f"wrote {args.out}: {args.path} with a fast weight layer, for {flags} and the flags of its sizes")


def parser() -> argparse.ArgumentParser:
    summary, text = (__doc__ or "").split("\n", 1)
    made = argparse.ArgumentParser(
        prog="fwp-add-layer",
        description=summary.removeprefix("fwp-add-layer: "),
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("data", help="folder that fairseq-preprocess has written, with the dictionary of the training")
    made.add_argument("--path", required=True, help="the checkpoint of a language model")
    made.add_argument("--out", required=True, type=output_file, metavar="FILE", help="what --finetune-from-model takes")
    made.add_argument("--fwl-hidden-dim", type=positive, metavar="F", help="units of the layer (4 D)")
    made.add_argument("--tokens", type=positive, default=100_000, metavar="N", help="of the training text (100,000)")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    start_logging()
    args = parser().parse_args(arguments)
    try:
        run(args)
    except (ValueError, OSError) as error:
        sys.exit(f"fwp-add-layer: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
