"""fwp-export: write a model as an ONNX graph, for programs without PyTorch and fairseq.

    fwp-export data-bin/corpus --path checkpoint_best.pt --out exported
    python recipes/onnx/generate.py exported "the memory"

The folder gets model.onnx, which reads tokens after a state; model.json, the names and sizes of its state; and the
dictionary, dict.txt. Of a translation model it also gets source.onnx, which reads the source, and source.txt, its
dictionary. --quantize int8 stores matrices in 8 bits, by ONNX Runtime's own tool. Before the folder is
written, the graph's log-probabilities are compared with the model's. Needs `pip install ".[onnx]"`.
"""

import argparse
import json
import logging
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_fwp.cli import make_parser, one_sentence, start_logging
from fairseq_fwp.cli.arguments import output_folder

if TYPE_CHECKING:
    import numpy as np
    from fairseq.tasks import FairseqTask
    from torch import Tensor

    from fairseq_fwp.checkpoints.export.onnx import Entry, Graphs
    from fairseq_fwp.models.fwp_lm import FwpLanguageModel
    from fairseq_fwp.models.fwp_transformer import FwpTransformerModel

TOLERANCE = 1e-3  # of log-probabilities in float32; differences are about 1e-5
# Operators on matrices. ONNX Runtime's tool takes also ONNX's Attention, for another operator of that name.
MATRICES = ["Gather", "MatMul", "Transpose"]
PIECE = 64  # tokens that a program should pass in one call, as the result has a row of the vocabulary for each


def run(args: Namespace) -> None:
    """Export as the arguments say, and print what was written."""
    from fairseq_fwp.checkpoints.convert.checkpoint import new_folder
    from fairseq_fwp.checkpoints.export.onnx import OPSET, to_onnx, translation_to_onnx
    from fairseq_fwp.models.fwp_transformer import FwpTransformerModel
    from fairseq_fwp.modules.decoding import Beginning
    from fairseq_fwp.patches.options import setting

    if args.out.exists():
        raise ValueError(f"--out must be a new folder, got {args.out}, which exists: give another name, or remove it")
    codes = args.bpe_codes.read_bytes() if args.bpe_codes else None
    model, task = load(args.path, args.data)
    dictionary = task.target_dictionary
    settings = setting(task, "cfg", None) or setting(task, "args", None)
    line_start, add_bos_token = (setting(settings, name, None) for name in ("line_start", "add_bos_token"))
    beginning = Beginning.of(dictionary, line_start, add_bos_token)
    try:
        graphs = translation_to_onnx(model) if isinstance(model, FwpTransformerModel) else to_onnx(model.decoder)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{args.path} has a part without a form in ONNX: {reason}") from error
    with new_folder(args.out) as folder:
        graphs.step.save(str(folder / "model.onnx"))
        description = {
            "opset": OPSET,
            "words": len(dictionary),
            "eos": dictionary.eos(),
            "pad": dictionary.pad(),
            "unk": dictionary.unk(),
            "begin": beginning.tokens,
            "lines": beginning.of_lines,
            "tokens_per_call": PIECE if graphs.many else 1,
            "most_tokens": most_tokens(model),
            "memory": [entry._asdict() for entry in graphs.memory],
            "state": [entry._asdict() for entry in graphs.state],
        }
        (folder / "model.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        dictionary.save(str(folder / "dict.txt"))
        if graphs.source is not None:
            graphs.source.save(str(folder / "source.onnx"))
            task.source_dictionary.save(str(folder / "source.txt"))
        if codes is not None:
            (folder / "codes").write_bytes(codes)
        difference = compare(model, folder, graphs)
        if not difference < TOLERANCE:
            raise ValueError(f"the graph must give the model's log-probabilities, got a difference of {difference:.1e}")
        differences = f"log-probabilities differ by {difference:.1e}"
        if args.quantize:
            for path in sorted(folder.glob("*.onnx")):
                quantize(path)
            differences += f", in 8 bits by {compare(model, folder, graphs):.1e}"
    pieces = f"{PIECE} tokens or fewer" if graphs.many else "one token"
    size = sum(file.stat().st_size for file in args.out.glob("*.onnx*")) / 1e6
    print(f"wrote {args.out}: {size:.1f} MB, a call reads {pieces}; {differences}")


def load(path: str, data: str) -> "tuple[FwpLanguageModel | FwpTransformerModel, FairseqTask]":
    """Return the model of a checkpoint, in evaluation mode, and its task. Raises ValueError for one without a form."""
    from fairseq import tasks
    from fairseq.dataclass.utils import overwrite_args_by_name
    from fairseq.models import ARCH_MODEL_REGISTRY

    from fairseq_fwp.checkpoints.pretrained import read
    from fairseq_fwp.cli import loading
    from fairseq_fwp.models.fwp_lm import FwpLanguageModel
    from fairseq_fwp.models.fwp_transformer import FwpTransformerModel
    from fairseq_fwp.ops.checks import check

    checkpoint = read(path)
    if ARCH_MODEL_REGISTRY.get(checkpoint.arch) is FwpTransformerModel:
        overwrite_args_by_name(checkpoint.cfg, {"data": data})
        task = tasks.setup_task(checkpoint.cfg.task, from_checkpoint=True)
        model = checkpoint.build(task)
        usual = not model.decoder.cfg.no_cross_attention and not model.decoder.cross_self_attention
        without = "without --no-cross-attention and --cross-self-attention"
        check(usual, f"{path} must be trained {without}: it has no other form in ONNX")
    else:
        model, task = loading.load_model(checkpoint, data)
        got = f"{type(model).__name__}: its states have no form in ONNX"
        check(isinstance(model, FwpLanguageModel), f"{path} must be an fwp_lm or fwp_transformer, got {got}")
    return model.float().eval(), task


def most_tokens(model: "FwpLanguageModel | FwpTransformerModel") -> int | None:
    """Return how many tokens a text may have, None if it has no end: learned positions are rows of a table."""
    from fairseq.modules import LearnedPositionalEmbedding

    from fairseq_fwp.modules.positions import LearnedPositions

    positions = model.decoder.embed_positions
    if isinstance(positions, LearnedPositionalEmbedding):  # of a translation
        return int(positions.max_positions)
    return positions.table.num_embeddings if isinstance(positions, LearnedPositions) else None


def compare(model: "FwpLanguageModel | FwpTransformerModel", folder: Path, graphs: "Graphs") -> float:
    """Return the greatest difference of log-probabilities, over calls that continue from each other's states."""
    import onnxruntime
    import torch

    draw = torch.Generator().manual_seed(1)
    words, memories = len(model.decoder.dictionary), {}
    tokens = torch.randint(model.decoder.padding_idx + 1, words, (3, 12), generator=draw)
    with torch.no_grad():
        if graphs.source is not None:
            source = torch.randint(4, len(model.encoder.dictionary), (3, 9), generator=draw)
            expected = model.get_normalized_probs(model(source, None, tokens), log_probs=True)
            session = onnxruntime.InferenceSession(folder / "source.onnx", providers=["CPUExecutionProvider"])
            outputs = session.run(None, {"tokens": source.numpy()})
            memories = dict(zip((entry.name for entry in graphs.memory), outputs, strict=True))
        else:
            features, _ = model.decoder.step(tokens, None, 0)
            expected = model.decoder.adaptive_softmax.get_log_prob(features, None)
    pieces = tokens.split([7, 1, 3, 1] if graphs.many else 1, dim=1)
    log_probs = read_pieces(folder, graphs.state, pieces, memories)
    # Of a word that the model cannot predict, both are minus infinity.
    return float((log_probs - expected).masked_fill(log_probs == expected, 0).abs().max())


def read_pieces(
    folder: Path, entries: "list[Entry]", pieces: "Sequence[Tensor]", memory: "dict[str, np.ndarray] | None" = None
) -> "Tensor":
    """Return the log-probabilities (B, L, V) of the graph in a folder, for pieces (B, ...) of L tokens in all.

    memory: of a translation's source.
    """
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    rows = len(pieces[0])
    state = [torch.zeros(rows, *entry.start[1:], dtype=getattr(torch, entry.dtype)).numpy() for entry in entries]
    of_pieces: list[Tensor] = []
    for piece in pieces:
        inputs = dict(zip((entry.name for entry in entries), state, strict=True))
        log_probs, *state = session.run(None, {"tokens": piece.numpy(), **inputs, **(memory or {})})
        of_pieces.append(torch.from_numpy(log_probs))
    return torch.cat(of_pieces, 1)


def quantize(path: Path) -> None:
    """Replace a graph by one whose matrices have 8 bits."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    smaller = path.with_name("smaller.onnx")
    logging.disable(logging.WARNING)  # a line for every tensor that stays as it is, and advice for other graphs
    quantize_dynamic(path, smaller, MATRICES, weight_type=QuantType.QInt8)
    logging.disable(logging.NOTSET)
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    smaller.rename(path)


def parser() -> argparse.ArgumentParser:
    command = make_parser(__doc__)
    add = command.add_argument
    add("data", help="folder that fairseq-preprocess has written, with the dictionaries of the training")
    add("--path", required=True, help="the checkpoint of a language model or of a translation model")
    add("--out", required=True, type=output_folder, metavar="FOLDER", help="new folder for the graph")
    add("--bpe-codes", type=Path, metavar="FILE", help="codes of subword-nmt, for the folder")
    add("--quantize", choices=["int8"], help="store matrices in 8 bits")
    return command


def main(arguments: Sequence[str] | None = None) -> None:
    start_logging()
    for name in ("onnx_ir", "onnxscript", "torch.onnx"):  # each of their passes tells what it does
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)  # of torch, about itself
    args = parser().parse_args(arguments)
    with one_sentence("fwp-export"):
        try:
            run(args)
        except ImportError as error:
            raise ValueError(f'the package {error.name} must be installed: pip install ".[onnx]"') from error
