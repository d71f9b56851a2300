"""FAVOR+: positive random features whose products estimate the softmax kernel, the feature map of the Performer.

Shapes: d head_dim, m num_features, R (m, d) the random feature vectors, one a row.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap
from fairseq_fwp.modules.precision import at_least_float32

# torch's CPU generator only uses these bits of its seed.
SEED_RANGE = 2**32


class Favor(FeatureMap):
    """The map phi(x) = exp(-|x|^2 / 2) / sqrt(2 m) [exp(R x); exp(-R x)]; the mean of phi(q) . phi(k) is exp(q . k).

    Choromanski et al. 2021, arXiv 2009.14794, as in Schlag et al. 2021, arXiv 2102.11174, Eqs. 31 and 32. By default
    there is no factor d^(-1/4) on q and k as in Choromanski's paper: projections can learn it.

    num_features: m, by default half of head_dim (rounded up): feature_dim = 2 m is that of ELU+1 (Schlag, Table 2);
    draw: a key of `DRAWS`, the distribution of R;
    offset: added to the exponentials; 0 in both papers and 1e-4 in Schlag's public code;
    redraw: every redraw-th call of `resample` draws R again, 0 = never;
    softmax_scale: multiply x by d^(-1/4), as in Choromanski's paper, to estimate exp(q . k / sqrt(d)).

    Maps (..., d) of any floating dtype to (..., 2 m) in float32 (float64 stays), >= 0. No maximum over a sequence is
    subtracted: that would look into the future and differ from decoding token by token. The exponent r . x - |x|^2 / 2
    = |r|^2 / 2 - |x - r|^2 / 2 never exceeds |r|^2 / 2, about d / 2. float32 can represent its exponential for every x
    if d is at most about 100, and otherwise for every x that is not close to a row of R. Attention normalisation is
    exact while the product of two features is above 1e-24: for vectors up to a length of about 7. Longer vectors have
    smaller outputs. A feature and its gradient are zero if the exponent is below -103, as for most x longer than about
    15. A vector with only such features neither writes nor reads (the normalisations' lower bounds keep it zero).

    Buffers: the projection R is float32 even in half-precision models (float64 in float64 models), and is not saved. It
    is determined by redraw, seed and draws (the number of draws so far for redraw = 1). seed and draws stay on the CPU,
    where R is drawn, even when a state is loaded: so an average of checkpoints has a valid draw. The seed comes from
    torch's default generator at construction; a draw neither reads nor changes that generator. So workers that build
    the same model from one seed draw the same matrices, and a resumed run continues the sequence. A state dict that
    contains a projection, as in a converted model, is loaded and saved with it until the next draw.

    Raises ValueError if num_features is not positive, draw is unknown, offset is not in [0, infinity), or redraw is
    negative.
    """

    positive = True
    # Features have the factor exp(-|x|^2 / 2), so their sums are often below a larger bound.
    epsilon = 1e-24
    projection: Tensor
    seed: Tensor
    draws: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        draw: str = "orthogonal",
        offset: float = 0.0,
        redraw: int = 1,
        softmax_scale: bool = False,
    ) -> None:
        super().__init__()
        num_features = (head_dim + 1) // 2 if num_features is None else num_features
        if num_features < 1:
            raise ValueError(f"`num_features` must be at least 1, got {num_features}")
        if draw not in DRAWS:
            raise ValueError(f"`draw` must be one of {', '.join(DRAWS)}, got {draw!r}")
        if not 0 <= offset < math.inf:
            raise ValueError(f"`offset` must be a number of at least 0, got {offset}")
        if redraw < 0:
            raise ValueError(f"`redraw` must be a number of mini-batches, or 0 for never, got {redraw}")
        self.feature_dim = 2 * num_features
        self.draw = draw
        self.offset = offset
        self.redraw = redraw
        self.scale = head_dim**-0.25 if softmax_scale else 1.0
        self.given = False
        # Not saved: the other buffers determine it, and an average of several checkpoints would shrink it.
        self.register_buffer("projection", torch.empty(num_features, head_dim, dtype=torch.float32), persistent=False)
        self.register_buffer("seed", torch.randint(SEED_RANGE, (), device="cpu"))
        self.register_buffer("draws", torch.ones((), dtype=torch.int64, device="cpu"))
        self._draw()

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        with torch.autocast(x.device.type, enabled=False):
            vectors = self.projection.to(x.dtype) * self.scale
            products = functional.linear(x, torch.cat([vectors, -vectors]))
        log_scale = (x.square().sum(-1, keepdim=True) * self.scale**2 + math.log(self.feature_dim)) / 2
        features = (products - log_scale).exp_()
        return features + self.offset * self.feature_dim**-0.5 if self.offset else features

    def resample(self) -> None:
        """Draw R again if `redraw` says so, on the CPU: the matrix does not depend on the model's device."""
        # New tensors: a later backward pass needs the old matrix, and a saved state its count.
        self.draws = self.draws + 1
        if self.redraw and int(self.draws - 1) % self.redraw == 0:
            self.given = False
            self._draw()

    def _draw(self) -> None:
        """Set R for the current number of draws."""
        number = -(-int(self.draws) // self.redraw) if self.redraw else 1
        generator = torch.Generator().manual_seed((int(self.seed) + number) % SEED_RANGE)
        num_features, head_dim = self.projection.shape
        self.projection = DRAWS[self.draw](num_features, head_dim, generator).to(self.projection)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        projection = state_dict.pop(f"{prefix}projection", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.given = projection is not None
        if projection is None:
            self._draw()
        elif projection.shape != self.projection.shape:
            given = tuple(projection.shape)
            raise ValueError(
                f"{prefix}projection must be {tuple(self.projection.shape)}, got {given}, because the checkpoint "
                f"has {given[0]} random vectors of size {given[-1]}: build the map with this "
                "`num_features` and key dimension"
            )
        else:
            self.projection = projection.to(self.projection)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.given:
            destination[f"{prefix}projection"] = self.projection.detach()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        projection, seed, draws = self.projection, self.seed, self.draws
        super()._apply(fn, recurse)
        self.seed, self.draws = seed, draws
        if self.projection.dtype.itemsize < 4:
            self.projection = projection.to(self.projection.device, torch.float32)
        return self

    def extra_repr(self) -> str:
        return f"num_features={self.feature_dim // 2}, draw={self.draw!r}, redraw={self.redraw}, scale={self.scale}"


def gaussian_draw(num_features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Draw independent rows from N(0, I): unbiased, Eq. 32 as printed."""
    return torch.randn(num_features, head_dim, generator=generator, device="cpu", dtype=torch.float64)


def orthogonal_draw(num_features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Draw rows from N(0, I), orthogonal in blocks of head_dim: unbiased, with a smaller variance."""
    return _orthogonal_blocks(num_features, head_dim, generator, haar=True)


def authors_draw(num_features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Draw as the public code of Schlag et al. 2021 does: biased, for reproductions.

    The axes are exchanged: columns, not rows, are orthogonal, in blocks of num_features. The signs of the QR
    decomposition are not corrected. So rows are not Gaussian. With head_dim 16, num_features 8 and |q| = |k| = 0.6 the
    estimate is 1% too small on average over directions, and 3% along some.
    """
    return _orthogonal_blocks(head_dim, num_features, generator, haar=False).T


def _orthogonal_blocks(rows: int, columns: int, generator: torch.Generator, haar: bool) -> Tensor:
    """Return (rows, columns) with rows orthogonal in blocks of `columns`, as long as independent Gaussian vectors.

    In float64: after rounding to float32, results of all linear algebra libraries agree.
    """
    options: dict[str, Any] = {"generator": generator, "device": "cpu", "dtype": torch.float64}
    blocks = []
    for start in range(0, rows, columns):
        gaussian = torch.randn(columns, min(columns, rows - start), **options)
        q, r = torch.linalg.qr(gaussian)
        # Only with a positive diagonal of r is the decomposition unique, and q uniform over orthogonal matrices.
        blocks.append((q * torch.ones_like(r.diagonal()).copysign(r.diagonal()) if haar else q).T)
    lengths = torch.randn(rows, columns, **options).norm(dim=-1, keepdim=True)
    return torch.cat(blocks) * lengths


DRAWS = {"orthogonal": orthogonal_draw, "gaussian": gaussian_draw, "authors": authors_draw}
