"""Transformer-XL's public TensorFlow code (kimiyoung/transformer-xl, tf/): its variables under their PyTorch names.

The published weights are checkpoints of this code. They are read from an .npz of their variables, without TensorFlow.
"""

import re
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch
from torch import Tensor

from fairseq_fwp.convert.source import Entry, convert_tensors

EXPORT = (
    'make one where TensorFlow is installed with: python -c "import numpy, tensorflow as tf; c = '
    "tf.train.load_checkpoint('model.ckpt-0'); numpy.savez('model.npz', **{n: c.get_tensor(n) for n in "
    "c.get_variable_to_shape_map() if n.startswith('transformer/') and '/Adam' not in n})\""
)

EMBEDDINGS, SOFTMAX = "transformer/adaptive_embed", "transformer/adaptive_softmax"

# u and v: (H, d), or (layers, H, d) with --untie_r.
BIASES = {"r_w_bias": "transformer/r_w_bias", "r_r_bias": "transformer/r_r_bias"}

# For every layer: their name -> PyTorch's name.
LAYER = {
    "rel_attn/qkv/kernel": "dec_attn.qkv_net.weight",
    "rel_attn/r/kernel": "dec_attn.r_net.weight",
    "rel_attn/o/kernel": "dec_attn.o_net.weight",
    "rel_attn/LayerNorm/gamma": "dec_attn.layer_norm.weight",
    "rel_attn/LayerNorm/beta": "dec_attn.layer_norm.bias",
    "ff/layer_1/kernel": "pos_ff.CoreNet.0.weight",
    "ff/layer_1/bias": "pos_ff.CoreNet.0.bias",
    "ff/layer_2/kernel": "pos_ff.CoreNet.3.weight",
    "ff/layer_2/bias": "pos_ff.CoreNet.3.bias",
    "ff/LayerNorm/gamma": "pos_ff.layer_norm.weight",
    "ff/LayerNorm/beta": "pos_ff.layer_norm.bias",
}

# Ends of names: weights (in, out) there and (out, in) here; and all variables of two dimensions.
TRANSPOSED = ("/kernel", "/proj_W", "/proj")
MATRICES = (*TRANSPOSED, "/lookup_table", "/cluster_W")

# What the optimizer saves next to the weights.
OPTIMIZER = re.compile(r"(.*/)?(Adam(_\d+)?|beta[12]_power(_\d+)?|global_step)")


def read(path: Path) -> dict[str, Tensor]:
    """The state dict that the PyTorch code would have, with biases of words split by cluster.

    Raises ValueError for any other file, and for a model that cannot be represented.
    """
    variables = read_variables(path)
    tensors = convert_tensors(table(variables), variables)
    words, biases = (
        sum(len(tensor) for name, tensor in tensors.items() if re.fullmatch(pattern, name))
        for pattern in (r"word_emb\.emb_layers\.\d+\.weight", r"crit\.out_layers\.\d+\.bias")
    )
    if words != biases:
        raise ValueError(f"every word must have a bias, got {words} words and {biases} biases: {path} is damaged")
    # The TensorFlow code does not save these frequencies.
    d_model = len(tensors["layers.0.dec_attn.o_net.weight"])
    tensors["pos_emb.inv_freq"] = 10000 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    return tensors


def read_variables(path: Path) -> dict[str, Tensor]:
    """The variables by name, without the optimizer's. Raises ValueError for a damaged or different file."""
    if path.is_file() and not is_zipfile(path):
        raise ValueError(f"{path} must be a complete .npz, got a truncated or different file; {EXPORT}")
    try:
        with np.load(path, allow_pickle=False) as file:
            if BIASES["r_w_bias"] not in file:
                raise ValueError(
                    f"{path} must be a checkpoint of Transformer-XL's TensorFlow code, got one without "
                    f"{BIASES['r_w_bias']}: {EXPORT}"
                )
            names = [name for name in file.files if not OPTIMIZER.fullmatch(name)]
            return {name: read_variable(file, name) for name in names}
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
    except (BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} must be a complete .npz, got a damaged file ({error}); {EXPORT}") from error


def read_variable(file: np.lib.npyio.NpzFile, name: str) -> Tensor:
    """A variable of the file. Raises ValueError that names a variable without numbers or of wrong dimensions."""
    try:
        tensor = torch.from_numpy(file[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of numbers, got none ({error}): {EXPORT}") from error
    expected = (2, 3) if name in BIASES.values() else (2,) if name.endswith(MATRICES) else (1,)
    if tensor.dim() not in expected or not tensor.numel():
        dimensions = " or ".join(map(str, expected))
        raise ValueError(
            f"{name} must have {dimensions} dimensions, each of size 1 or more, got the shape "
            f"{tuple(tensor.shape)}: the file is not from Transformer-XL's TensorFlow code"
        )
    return tensor


def notes(flags: Mapping[str, Any]) -> list[str]:
    """Return the differences from the TensorFlow code, for comparisons of losses."""
    found = [
        "the TensorFlow code begins a text with a memory of zeros, which tokens attend to, and this model without a "
        "memory: losses of the first segments differ",
        "layer normalisation adds 1e-12 to the variance there, and 1e-5 here: losses differ by about 1e-5",
    ]
    if flags["same_length"]:
        found.append(
            f"--mem-len is {flags['mem_len']} for --mem_len {flags['mem_len'] - 1}: with --same_length the TensorFlow "
            "code does not count the token itself"
        )
    return found


def table(names: Collection[str]) -> list[Entry]:
    """The entries of the variables, by PyTorch's names. Raises ValueError for projections that do not exist here."""
    layers = [
        entry(f"layers.{index}.{ours}", f"transformer/layer_{index}/{theirs}")
        for index in range(max(count(names, r"transformer/layer_(\d+)/"), 1))
        for theirs, ours in LAYER.items()
    ]
    return [*layers, *(entry(ours, theirs) for ours, theirs in BIASES.items()), *embeddings(names)]


def embeddings(names: Collection[str]) -> list[Entry]:
    """The entries of words and clusters; without --div_val they share one table."""
    if f"{EMBEDDINGS}/proj_W" in names:
        raise ValueError(
            "--d_embed must equal --d_model to be converted: with another size input and output have a projection each"
        )
    clusters = [f"cutoff_{index}" for index in range(count(names, rf"{SOFTMAX}/cutoff_(\d+)/"))]
    biases = [f"{SOFTMAX}/{cluster}/b" for cluster in clusters] or [f"{SOFTMAX}/bias"]
    divided = count(names, rf"{EMBEDDINGS}/cutoff_(\d+)/") > 0
    folders = [f"{EMBEDDINGS}/{cluster}" for cluster in clusters] if divided else [EMBEDDINGS]
    tables = [f"{folder}/lookup_table" for folder in folders]
    entries = [entry(f"crit.out_layers.{index}.bias", name) for index, name in enumerate(biases)]
    for index, name in enumerate(tables):
        entries += [entry(f"{module}.{index}.weight", name) for module in ("word_emb.emb_layers", "crit.out_layers")]
    if clusters:
        # The first column belongs to the second cluster here, and to the last one in the PyTorch code.
        entries += [
            Entry(f"crit.cluster_{ours}", (f"{SOFTMAX}/cutoff_0/cluster_{theirs}",), lambda tensor: tensor.flip(0))
            for ours, theirs in (("weight", "W"), ("bias", "b"))
        ]
    if divided:
        entries += projections(names, clusters)
    return entries


def projections(names: Collection[str], clusters: list[str]) -> list[Entry]:
    """The entries of the clusters' projections; with --proj_share_all_but_first the output has its own first one."""
    entries = []
    for index, cluster in enumerate(clusters):
        of_input, of_output = f"{EMBEDDINGS}/{cluster}/proj_W", f"{SOFTMAX}/{cluster}/proj"
        if index == 0 and of_input not in names:
            raise ValueError(
                "--proj_same_dim must be True to be converted, got False: in this package the first cluster always has "
                "a projection"
            )
        shared = index > 0 and of_output not in names
        entries += [
            entry(f"word_emb.emb_projs.{index}", of_input),
            entry(f"crit.out_projs.{index}", of_input if shared else of_output),
        ]
    return entries


def entry(ours: str, theirs: str) -> Entry:
    """The entry of a variable, (in, out) there as (out, in) here."""
    return Entry(ours, (theirs,), Tensor.t) if theirs.endswith(TRANSPOSED) else Entry(ours, (theirs,))


def count(names: Collection[str], pattern: str) -> int:
    """Return the number of different values that the pattern's group has in the names."""
    return len({found[1] for name in names if (found := re.match(pattern, name))})
