"""fwp-export: write a language model as an ONNX graph, for programs without PyTorch and fairseq.

    fwp-export data-bin/corpus --path checkpoint_best.pt --out exported
    python recipes/onnx/generate.py exported "the memory"

The folder gets model.onnx, which reads tokens after a state; model.json, the names and sizes of its state; and the
dictionary, dict.txt. --quantize int8 stores matrices in 8 bits, by ONNX Runtime's own tool. Before the folder is
written, the graph's log-probabilities are compared with the model's. Needs `pip install ".[onnx]"`.
"""

import argparse
import json
import logging
import shutil
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fairseq_fwp  # noqa: F401  (registers the models)
from fairseq_fwp.cli import loading, make_parser, start_logging
from fairseq_fwp.convert.files import new_folder
from fairseq_fwp.interop.onnx import OPSET, Entry, to_onnx
from fairseq_fwp.models.fwp_lm import FwpLanguageModel

TOLERANCE = 1e-3  # of log-probabilities in float32; differences are about 1e-5
PIECE = 64  # tokens that a program should pass in one call, as the result has a row of the vocabulary for each


def run(args: Namespace) -> None:
    """Export as the arguments say, and print what was written."""
    if args.out.exists():
        raise ValueError(f"--out must be a new folder, got {args.out}, which exists: give another name, or remove it")
    model, task, _ = loading.load_model(args.path, args.data, {})
    if not isinstance(model, FwpLanguageModel):
        raise ValueError(f"{args.path} must be an fwp_lm, got {type(model).__name__}: its states have no form in ONNX")
    if windows := [layer.window for layer in model.decoder.attentions if getattr(layer, "window", None)]:
        asked = "its keys and values have no form in ONNX"
        raise ValueError(f"{args.path} must be trained without --attention-window, got {windows[0]}: {asked}")
    dictionary = task.source_dictionary
    try:
        program, entries, many = to_onnx(model.float().eval().decoder)
    except RuntimeError as error:
        raise ValueError(
            f"{args.path} has a part without a form in ONNX: {str(error).strip().splitlines()[0]}"
        ) from error
    with new_folder(args.out) as folder:
        program.save(str(folder / "model.onnx"))
        description = {
            "opset": OPSET,
            "words": len(dictionary),
            "eos": dictionary.eos(),
            "pad": dictionary.pad(),
            "unk": dictionary.unk(),
            "tokens_per_call": PIECE if many else 1,
            "state": [entry._asdict() for entry in entries],
        }
        (folder / "model.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        dictionary.save(str(folder / "dict.txt"))
        if args.bpe_codes:
            shutil.copy(args.bpe_codes, folder / "codes")
        difference = compare(model, folder, entries, many, len(dictionary))
        if not difference < TOLERANCE:
            raise ValueError(f"the graph must give the model's log-probabilities, got a difference of {difference:.1e}")
        if args.quantize:
            quantize(folder / "model.onnx")
    pieces = f"{PIECE} tokens or fewer" if many else "one token, as its rule has no operator for several"
    size = sum(file.stat().st_size for file in args.out.glob("model.onnx*")) / 1e6
    print(f"wrote {args.out}: {size:.1f} MB, a call reads {pieces}; log-probabilities differ by {difference:.1e}")


def compare(model: Any, folder: Path, entries: list[Entry], many: bool, words: int) -> float:
    """Return the greatest difference of log-probabilities, over calls that continue from each other's states."""
    tokens = torch.randint(model.decoder.padding_idx + 1, words, (3, 12), generator=torch.Generator().manual_seed(1))
    found = read_pieces(folder, entries, tokens.split([7, 1, 3, 1] if many else 1, dim=1))
    with torch.no_grad():
        features, _ = model.decoder.step(tokens, None, 0)
        expected = model.decoder.adaptive_softmax.get_log_prob(features, None)
    return float((found - expected).abs().max())


def read_pieces(folder: Path, entries: list[Entry], pieces: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities (B, L, V) of the graph in a folder, for pieces (B, ...) of L tokens in all."""
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    rows = len(pieces[0])
    state = [torch.zeros(rows, *entry.start[1:], dtype=getattr(torch, entry.dtype)).numpy() for entry in entries]
    found: list[Tensor] = []
    for piece in pieces:
        given = dict(zip((entry.name for entry in entries), state, strict=True))
        log_probs, *state = session.run(None, {"tokens": piece.numpy(), **given})
        found.append(torch.from_numpy(log_probs))
    return torch.cat(found, 1)


def quantize(path: Path) -> None:
    """Replace a graph by one whose matrices have 8 bits."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    smaller = path.with_name("smaller.onnx")
    logging.disable(logging.WARNING)  # a line for every tensor that stays as it is, and advice for other graphs
    quantize_dynamic(path, smaller, weight_type=QuantType.QInt8)
    logging.disable(logging.NOTSET)
    for file in path.parent.glob("model.onnx*"):
        file.unlink()
    smaller.rename(path)


def parser() -> argparse.ArgumentParser:
    made = make_parser(__doc__)
    add = made.add_argument
    add("data", help="folder that fairseq-preprocess has written, with the dictionary of the training")
    add("--path", required=True, help="the checkpoint of a language model")
    add("--out", required=True, type=loading.output_folder, metavar="FOLDER", help="new folder for the graph")
    add("--bpe-codes", type=Path, metavar="FILE", help="codes of subword-nmt, for the folder")
    add("--quantize", choices=["int8"], help="store matrices in 8 bits")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    start_logging()
    for name in ("onnx_ir", "onnxscript", "torch.onnx"):  # each of their passes tells what it does
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)  # of torch, about itself
    args = parser().parse_args(arguments)
    try:
        run(args)
    except ImportError as error:
        sys.exit(f'fwp-export: the package {error.name} must be installed: pip install ".[onnx]"')
    except (ValueError, OSError) as error:
        sys.exit(f"fwp-export: {' '.join(str(error).split())}")
