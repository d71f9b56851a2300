"""What follows the memory of a layer: normalisation of each head, a scale, and a gate of the token.

Shapes: B batch, L tokens, D embed_dim, H heads of values, Dv size of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.layer_norm import RmsNorm
from fairseq_fwp.ops.checks import check
from fairseq_fwp.ops.rows import Opening

OUTPUT_GATES: dict[str, Opening | None] = {"none": None, "silu": F.silu, "sigmoid": torch.sigmoid}


def gate_projection(opening: Opening | None, embed_dim: int, values: int, rank: int | None) -> nn.Module | None:
    """Return the projection (..., D) -> (..., values) of a gate with this function, None without one.

    rank: of two factors, of which the second has a bias; None = full rank, without bias. Raises ValueError below 1.
    """
    check(rank is None or rank >= 1, f"`output_gate_rank` must be at least 1, got {rank}")
    if opening is None:
        return None
    if rank is None:
        return nn.Linear(embed_dim, values, bias=False)
    return nn.Sequential(nn.Linear(embed_dim, rank, bias=False), nn.Linear(rank, values))


def read_out(
    out: Tensor, dtype: torch.dtype, scale: float, norm: nn.Module | None, opening: Opening | None, gate: Tensor | None
) -> Tensor:
    """Return (B, L, H Dv) in dtype of a memory's output (B, H, L, Dv), before the projection of the layer.

    scale: a factor; norm: of a head, None = none; opening: the function of the gate; gate (B, L, H Dv): its projection,
    None = no gate.
    """
    if isinstance(norm, RmsNorm) and scale == 1 and gate is not None and opening is not None:
        by_head = gate.unflatten(-1, (out.shape[1], -1))
        return norm(out.to(dtype).transpose(1, 2), by_head, opening).flatten(2)
    if norm is not None:
        out = norm(out.to(dtype))
    if scale != 1:
        out = out * scale
    out = out.transpose(1, 2).flatten(2).to(dtype)
    return out if gate is None or opening is None else out * opening(gate)
