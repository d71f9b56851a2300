"""Transformer-XL's public TensorFlow code (kimiyoung/transformer-xl, tf/): its variables under their PyTorch names.

The published weights are checkpoints of this code. They are read from an .npz of their variables, without TensorFlow.
"""

import re
import zlib
from pathlib import Path
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch
from torch import Tensor

from fairseq_fwp.checkpoints.convert.conversion import Tensors
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.data import check_file
from fairseq_fwp.patches.options import Settings

EXPORT = (
    'make one where TensorFlow is installed with: python -c "import numpy, tensorflow as tf; c = '
    "tf.train.load_checkpoint('model.ckpt-0'); numpy.savez('model.npz', **{n: c.get_tensor(n) for n in "
    "c.get_variable_to_shape_map() if n.startswith('transformer/') and '/Adam' not in n})\""
)

# u and v: (H, d), or (layers, H, d) with --untie_r.
BIASES = ("transformer/r_w_bias", "transformer/r_r_bias")

NAMES = {
    r"transformer/(r_._bias)": r"\1",
    r"transformer/layer_(\d+)/rel_attn/(qkv|r|o)/kernel": r"layers.\1.dec_attn.\2_net.weight",
    r"transformer/layer_(\d+)/rel_attn/LayerNorm/gamma": r"layers.\1.dec_attn.layer_norm.weight",
    r"transformer/layer_(\d+)/rel_attn/LayerNorm/beta": r"layers.\1.dec_attn.layer_norm.bias",
    r"transformer/layer_(\d+)/ff/layer_1/kernel": r"layers.\1.pos_ff.CoreNet.0.weight",
    r"transformer/layer_(\d+)/ff/layer_1/bias": r"layers.\1.pos_ff.CoreNet.0.bias",
    r"transformer/layer_(\d+)/ff/layer_2/kernel": r"layers.\1.pos_ff.CoreNet.3.weight",
    r"transformer/layer_(\d+)/ff/layer_2/bias": r"layers.\1.pos_ff.CoreNet.3.bias",
    r"transformer/layer_(\d+)/ff/LayerNorm/gamma": r"layers.\1.pos_ff.layer_norm.weight",
    r"transformer/layer_(\d+)/ff/LayerNorm/beta": r"layers.\1.pos_ff.layer_norm.bias",
    r"transformer/adaptive_embed/lookup_table": "word_emb.emb_layers.0.weight",
    r"transformer/adaptive_embed/cutoff_(\d+)/lookup_table": r"word_emb.emb_layers.\1.weight",
    r"transformer/adaptive_embed/cutoff_(\d+)/proj_W": r"word_emb.emb_projs.\1",
    r"transformer/adaptive_softmax/cutoff_(\d+)/proj": r"crit.out_projs.\1",
    r"transformer/adaptive_softmax/cutoff_(\d+)/b": r"crit.out_layers.\1.bias",
    r"transformer/adaptive_softmax/bias": "crit.out_layers.0.bias",
    r"transformer/adaptive_softmax/cutoff_0/cluster_W": "crit.cluster_weight",
    r"transformer/adaptive_softmax/cutoff_0/cluster_b": "crit.cluster_bias",
}

# Ends of names: weights (in, out) there and (out, in) here; and all variables of two dimensions.
TRANSPOSED = ("/kernel", "/proj_W", "/proj")
MATRICES = (*TRANSPOSED, "/lookup_table", "/cluster_W")

# What the optimizer saves next to the weights.
OPTIMIZER = re.compile(r"(.*/)?(Adam(_\d+)?|beta[12]_power(_\d+)?|global_step)")


def read(path: Path) -> dict[str, Tensor]:
    """Return the state dict that the PyTorch code would have, with biases of words split by cluster.

    The output shares the tables of the input, and its projections but the first. Raises ValueError for any other file,
    and for a model that cannot be represented.
    """
    variables = read_variables(path)
    if "transformer/adaptive_embed/proj_W" in variables:
        raise ValueError("--d_embed must equal --d_model to be converted: others have projections of input and output")
    turned = {name: tensor.t() if name.endswith(TRANSPOSED) else tensor for name, tensor in variables.items()}
    tensors = Tensors(Tensors(turned).rename(NAMES))
    projections = [name for name in tensors if name.startswith("word_emb.emb_projs.")]
    same_dim = not projections or "word_emb.emb_projs.0" in tensors
    check(same_dim, "--proj_same_dim must be True to be converted, got False: here first clusters have projections")
    tables = tensors.numbered("word_emb.emb_layers.{}.weight")
    for index, name in enumerate(tables):
        tensors[f"crit.out_layers.{index}.weight"] = tensors[name]
    for index in range(1, len(projections)):  # with --proj_share_all_but_first
        tensors.setdefault(f"crit.out_projs.{index}", tensors[f"word_emb.emb_projs.{index}"])
    words = sum(len(tensors[name]) for name in tables)
    biases = sum(len(tensors[name]) for name in tensors.numbered("crit.out_layers.{}.bias"))
    check(words == biases, f"every word must have a bias, got {words} words and {biases} biases: {path} is damaged")
    if "crit.out_layers.1.bias" in tensors:
        # The first column belongs to the second cluster here, and to the last one in the PyTorch code.
        for name in ("crit.cluster_weight", "crit.cluster_bias"):
            tensors[name] = tensors[name].flip(0)
    # The TensorFlow code does not save these frequencies.
    d_model = len(tensors["layers.0.dec_attn.o_net.weight"])
    tensors["pos_emb.inv_freq"] = 10000 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    return tensors


def read_variables(path: Path) -> dict[str, Tensor]:
    """The variables by name, without the optimizer's. Raises ValueError for a damaged or different file."""
    check_file(path)
    if path.is_file() and not is_zipfile(path):
        raise ValueError(f"{path} must be a complete .npz, got a truncated or different file; {EXPORT}")
    try:
        with np.load(path, allow_pickle=False) as file:
            code = "a checkpoint of Transformer-XL's TensorFlow code"
            check(BIASES[0] in file, f"{path} must be {code}, got one without {BIASES[0]}: {EXPORT}")
            return {name: read_variable(file, name) for name in file.files if not OPTIMIZER.fullmatch(name)}
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    except (BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} must be a complete .npz, got a damaged file ({error}); {EXPORT}") from error


def read_variable(file: np.lib.npyio.NpzFile, name: str) -> Tensor:
    """A variable of the file. Raises ValueError that names a variable without numbers or of wrong dimensions."""
    try:
        tensor = torch.from_numpy(file[name])
    except (TypeError, ValueError, MemoryError) as error:
        raise ValueError(f"{name} must be an array of numbers, got none ({error}): {EXPORT}") from error
    dimensions = "2 or 3" if name in BIASES else "2" if name.endswith(MATRICES) else "1"
    fits, shape = str(tensor.dim()) in dimensions and tensor.numel(), tuple(tensor.shape)
    check(fits, f"{name} must have {dimensions} dimensions, each of size 1 or more, got the shape {shape}")
    return tensor


def notes(flags: Settings) -> list[str]:
    """Return the differences from the TensorFlow code, for comparisons of losses: docs/checkpoints.md."""
    remarks = [
        "the TensorFlow code begins a text with a memory of zeros, which tokens attend to: first losses differ",
        "layer normalisation adds 1e-12 to the variance there, and 1e-5 here: losses differ by about 1e-5",
    ]
    if flags["same_length"]:
        length = flags["mem_len"]
        remarks.append(f"--mem-len is {length} for --mem_len {length - 1}, which does not count the token itself there")
    return remarks
