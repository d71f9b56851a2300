"""Feature maps: each is an nn.Module from (..., head_dim) to (..., feature_dim), applied to each token separately.

`FEATURE_MAPS[name](head_dim, **arguments)` builds one, a `FeatureMap`. A new map is one class here and one line of the
table. All take vectors of any floating dtype, and all but the identity return features in float32 (float64 stays).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check
from fairseq_fwp.ops.operator import is_transformed


class FeatureMap(nn.Module):
    """A module from (..., head_dim) to (..., feature_dim) that maps each vector by itself.

    feature_dim: the size of its output;
    positive: whether features are never negative, which division by a sum of features, and so a normalisation, needs;
    epsilon: the lower bound of such a sum; scale: a factor of its input vectors, applied first; offset: see `Favor`.

    A map that learns has `initialize()`, which draws its initial values.
    """

    positive = False
    epsilon: float = 1e-6
    scale: float = 1.0
    offset: float = 0.0

    def __init__(self, feature_dim: int = 0) -> None:
        super().__init__()
        self.feature_dim = feature_dim

    def resample(self) -> None:
        """Draw random features again, for each mini-batch in training, never in evaluation. By default do nothing."""


def resample(model: nn.Module) -> None:
    """Draw the random features of all maps of a model again."""
    for module in model.modules():
        if isinstance(module, FeatureMap):
            module.resample()


class EluPlusOne(FeatureMap):
    """The map phi(x) = ELU(x) + 1 > 0, that is x + 1 for x > 0 and exp(x) otherwise.

    Katharopoulos et al. 2020, arXiv 2006.16236, Eq. 7; Schlag et al. 2021, arXiv 2102.11174, Eq. 30.
    """

    positive = True

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        # Literally, ELU(x) + 1 loses all digits if exp(x) is below the rounding error of 1.
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp()) if is_transformed() else _EluPlusOne.apply(x)


class _EluPlusOne(torch.autograd.Function):
    """The map with its own backward pass, which torch.func does not take: autograd's takes several times as long."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        features = x.clamp(max=0).exp_().add_(x.clamp(min=0))
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # The derivative is phi(x) itself where phi(x) < 1, and 1 elsewhere.
        return grad * ctx.saved_tensors[0].clamp(max=1)


class Dpfp(FeatureMap):
    """The map phi_(i nu)(x) = r([x; -x])_i r([x; -x])_(i - nu) with r(a) = max(a, 0), for shifts 1 to nu.

    Schlag et al. 2021, arXiv 2102.11174, Eq. 37, in the order of its Listing 1 (App. C). It has 2 head_dim nu features.
    A vector with no two positive neighbours maps to zero.

    Raises ValueError if nu is not in 1 ... 2 head_dim - 1, where every shift pairs different elements.
    """

    positive = True

    def __init__(self, head_dim: int, nu: int = 1) -> None:
        super().__init__()
        most = 2 * head_dim - 1
        check(1 <= nu <= most, f"`nu` must be from 1 to 2 * key dimension - 1 = {most}, got {nu}")
        self.nu = nu
        self.feature_dim = 2 * head_dim * nu

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        x = torch.cat([x, -x], dim=-1).relu()
        return torch.cat([x * x.roll(shift, dims=-1) for shift in range(1, self.nu + 1)], dim=-1)


# torch's CPU generator only uses these bits of its seed.
SEED_RANGE = 2**32


class Favor(FeatureMap):
    """The map phi(x) = exp(-|x|^2 / 2) / sqrt(2 m) [exp(R x); exp(-R x)]; the mean of phi(q) . phi(k) is exp(q . k).

    Choromanski et al. 2021, arXiv 2009.14794, as in Schlag et al. 2021, arXiv 2102.11174, Eqs. 31 and 32.

    features: m, by default half of head_dim (rounded up): feature_dim = 2 m is that of ELU+1 (Schlag, Table 2);
    draw: a key of `DRAWS`, the distribution of R;
    offset: added to the exponentials; 0 in both papers and 1e-4 in Schlag's public code;
    redraw: every redraw-th call of `resample` draws R again, 0 = never;
    softmax_scale: multiply x by d^(-1/4), as in Choromanski's paper, to estimate exp(q . k / sqrt(d));
    relu: the map ReLU(R x) / sqrt(m), by default with head_dim features m, which Choromanski et al. compare with it. It
    does not estimate exp(q . k).

    No maximum over a sequence is subtracted: that would look into the future and differ from decoding token by token.
    The exponent r . x - |x|^2 / 2 never exceeds |r|^2 / 2, about d / 2, which float32 can represent for d up to about
    100. Attention normalisation is exact while the product of two features is above 1e-24: for vectors up to a length
    of about 7. Longer vectors have smaller outputs. Beyond about 15 most features are zero, and so are their gradients.

    R is float32 even in half-precision models (float64 in float64 models), and is not saved: seed and draws, the number
    of draws so far, determine it. They stay on the CPU, where R is drawn, so an average of checkpoints has a valid
    draw. The seed comes from torch's default generator at construction, which later draws neither read nor change. So
    workers that build the same model draw the same matrices, and a resumed run continues the sequence. A state dict
    that contains a projection, as in a converted model, is loaded and saved with it until the next draw.

    Raises ValueError if features is not positive, draw is unknown, offset is not in [0, infinity), or redraw is
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
        features: int | None = None,
        draw: str = "orthogonal",
        offset: float = 0.0,
        redraw: int = 1,
        softmax_scale: bool = False,
        relu: bool = False,
    ) -> None:
        super().__init__()
        default = head_dim if relu else (head_dim + 1) // 2
        num_features = default if features is None else features
        check(num_features >= 1, f"`features` must be at least 1, got {num_features}")
        check(draw in DRAWS, f"`draw` must be one of {', '.join(DRAWS)}, got {draw!r}")
        check(0 <= offset < math.inf, f"`offset` must be a number of at least 0, got {offset}")
        check(redraw >= 0, f"`redraw` must be a number of mini-batches, or 0 for never, got {redraw}")
        self.feature_dim = num_features if relu else 2 * num_features
        self.epsilon = FeatureMap.epsilon if relu else self.epsilon
        self.relu = relu
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
            products = F.linear(x, vectors if self.relu else torch.cat([vectors, -vectors]))
        if self.relu:
            features = products.relu() * self.feature_dim**-0.5
        else:
            log_scale = (x.square().sum(-1, keepdim=True) * self.scale**2 + math.log(self.feature_dim)) / 2
            features = (products - log_scale).exp_()
        return features + self.offset * self.feature_dim**-0.5 if self.offset else features

    def resample(self) -> None:
        """Draw R again if `redraw` says so, on the CPU: the matrix does not depend on the model's device."""
        # A new tensor: a saved state needs its count.
        self.draws = self.draws + 1
        if self.redraw and int(self.draws - 1) % self.redraw == 0:
            self.given = False
            self._draw()

    def _draw(self) -> None:
        """Set R for the current number of draws."""
        number = -(-int(self.draws) // self.redraw) if self.redraw else 1
        generator = torch.Generator().manual_seed((int(self.seed) + number) % SEED_RANGE)
        num_features, head_dim = self.projection.shape
        # In place, where a CUDA graph reads it; backward passes need only products of it.
        self.projection.copy_(DRAWS[self.draw](num_features, head_dim, generator))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        projection = state_dict.pop(f"{prefix}projection", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.given = projection is not None
        if projection is None:
            self._draw()
            return
        shape, own = tuple(projection.shape), tuple(self.projection.shape)
        check(
            shape == own,
            f"{prefix}projection must be {own}, got {shape}, because the checkpoint has {shape[0]} random vectors of "
            f"size {shape[-1]}: build the map with this `features` and key dimension",
        )
        self.projection.copy_(projection)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.given:
            destination[f"{prefix}projection"] = self.projection.clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        projection, seed, draws = self.projection, self.seed, self.draws
        super()._apply(fn, recurse)
        self.seed, self.draws = seed, draws
        if self.projection.dtype.itemsize < 4:
            self.projection = projection.to(self.projection.device, torch.float32)
        return self


def gaussian_draw(num_features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Draw independent rows from N(0, I): unbiased, Eq. 32 as printed."""
    return torch.randn(num_features, head_dim, generator=generator, device="cpu", dtype=torch.float64)


def authors_draw(num_features: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Draw as the public code of Schlag et al. 2021 does: biased, for reproductions.

    The axes are exchanged: columns, not rows, are orthogonal, in blocks of num_features. The signs of the QR
    decomposition are not corrected. So rows are not Gaussian. With head_dim 16, num_features 8 and |q| = |k| = 0.6 the
    estimate is 1% too small on average over directions, and 3% along some.
    """
    return orthogonal_draw(head_dim, num_features, generator, haar=False).T


def orthogonal_draw(rows: int, columns: int, generator: torch.Generator, haar: bool = True) -> Tensor:
    """Draw rows from N(0, I), orthogonal in blocks of `columns`: unbiased if they are Haar, with a smaller variance.

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


DRAWS: dict[str, Callable[..., Tensor]] = {
    "orthogonal": orthogonal_draw,
    "gaussian": gaussian_draw,
    "authors": authors_draw,
}


class LearnedRelu(FeatureMap):
    """The map phi(x) = ReLU(W x + b) with W (features, head_dim) and b learned; features: by default head_dim.

    Kasai et al. 2021, arXiv 2103.13076, Sec. 2.2 (T2R); the baseline of Mao 2022, arXiv 2210.04243. One W and b serve
    the queries and keys of all heads of a layer: a map sees one vector at a time, not which head it belongs to. They
    start as PyTorch's linear layers do, uniform within 1 / sqrt(head_dim).

    A vector on the negative side of every row of W maps to zero. Raises ValueError if features is not positive.
    """

    positive = True

    def __init__(self, head_dim: int, features: int | None = None) -> None:
        super().__init__(head_dim if features is None else features)
        check(self.feature_dim >= 1, f"`features` must be at least 1, got {self.feature_dim}")
        self.linear = nn.Linear(head_dim, self.feature_dim)

    def initialize(self) -> None:
        """Draw W and b again."""
        self.linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self.linear.weight.to(x.dtype), self.linear.bias.to(x.dtype)).relu()


class Identity(FeatureMap):
    """The map phi(x) = x, as in Schlag et al. 2021, Sec. 3.1 (attention without softmax) and in Mao 2022."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Tanh(FeatureMap):
    """The map phi(x) = tanh(x), element by element: a baseline of Schlag et al. 2021, arXiv 2102.11174, Sec. 6.1.2.

    Schlag, Munkhdalai & Schmidhuber 2021, arXiv 2011.07831, have it in the rule fwm.
    """

    def forward(self, x: Tensor) -> Tensor:
        return at_least_float32(x).tanh()


class Silu(FeatureMap):
    """The map phi(x) = x sigmoid(x), element by element: Yang et al. 2024, arXiv 2406.06484, Sec. 3.3 (DeltaNet)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(at_least_float32(x))


FEATURE_MAPS: dict[str, Callable[..., FeatureMap]] = {
    "elu": EluPlusOne,
    "favor": Favor,
    "dpfp": Dpfp,
    "relu": LearnedRelu,
    "identity": Identity,
    "tanh": Tanh,
    "silu": Silu,
}


# By class: a subclass may compute something else.
KERNEL_NAMES: dict[type[FeatureMap], str] = {
    EluPlusOne: "elu",
    Favor: "favor",
    Dpfp: "dpfp",
    Identity: "identity",
    Tanh: "tanh",
    Silu: "silu",
}


def kernel_name(feature_map: FeatureMap) -> str | None:
    """Return the name of a map in kernels, None if they do not know it."""
    name = KERNEL_NAMES.get(type(feature_map))
    return "favor_relu" if isinstance(feature_map, Favor) and name and feature_map.relu else name
