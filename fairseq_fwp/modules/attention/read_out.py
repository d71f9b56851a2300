"""What follows the memory of a layer: normalisation of each head, a scale, and a gate of the token.

Shapes: B batch, L tokens, D embed_dim, H heads of values, Dv size of a value.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.layer_norm import RmsNorm
from fairseq_fwp.ops.checks import check, look_up
from fairseq_fwp.ops.rows import Opening

OUTPUT_GATES: dict[str, Opening | None] = {"none": None, "silu": F.silu, "sigmoid": torch.sigmoid}


@dataclass(frozen=True)
class ReadOut:
    """The output of a layer's memory, before its projection. The layer has the parameters, and gives them.

    scale: by which the output is multiplied; output_gate: a key of `OUTPUT_GATES`.
    Raises ValueError for an unknown gate.
    """

    scale: float = 1.0
    output_gate: str = "none"

    def __post_init__(self) -> None:
        look_up("`output_gate`", self.output_gate, OUTPUT_GATES)

    def projection(self, embed_dim: int, values: int, rank: int | None) -> nn.Module | None:
        """Return the projection (..., D) -> (..., values) of the gate, None without one.

        rank: of two factors, of which the second has a bias; None = full rank, without bias.
        """
        check(rank is None or rank >= 1, f"`output_gate_rank` must be at least 1, got {rank}")
        if OUTPUT_GATES[self.output_gate] is None:
            return None
        if rank is None:
            return nn.Linear(embed_dim, values, bias=False)
        return nn.Sequential(nn.Linear(embed_dim, rank, bias=False), nn.Linear(rank, values))

    def __call__(self, out: Tensor, dtype: torch.dtype, norm: nn.Module | None, gate: Tensor | None) -> Tensor:
        """Return (B, L, H Dv) in dtype of the output (B, H, L, Dv).

        norm: of a head, None = none; gate (B, L, H Dv): the projection, None = no gate.
        """
        opening = OUTPUT_GATES[self.output_gate]
        if isinstance(norm, RmsNorm) and self.scale == 1 and gate is not None and opening is not None:
            by_head = gate.unflatten(-1, (out.shape[1], -1))
            return norm(out.to(dtype).transpose(1, 2), by_head, opening).flatten(2)
        if norm is not None:
            out = norm(out.to(dtype))
        if self.scale != 1:
            out = out * self.scale
        out = out.transpose(1, 2).flatten(2).to(dtype)
        return out if gate is None or opening is None else out * opening(gate)
