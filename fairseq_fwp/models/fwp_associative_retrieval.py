"""The model `fwp_associative_retrieval`: writes key-value pairs into a memory, then retrieves the values of keys.

Schlag, Irie & Schmidhuber 2021, arXiv 2102.11174, Sec. 6.1. Shapes: B batch, L writes, Q queries, S keys and as many
values, E embed_dim, d key_dim. Values are one-hot vectors v of size S, keys learned embeddings e of size E, and

    k = W_K [e(k); v]        q = W_Q e(q)        gates = W_G [e(k); v]

What the paper leaves open is as in its public code (ischlag/fast-weight-transformers): E, the initial values, and the
biases of W_K and W_Q, which its equations do not have.
"""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from torch import Tensor, nn
from torch.nn import functional

from fairseq_fwp._options import option
from fairseq_fwp.models.fwp_lm import MAP_FLAGS, build_map
from fairseq_fwp.models.language_model import warn_of_unused
from fairseq_fwp.modules.associative_memory import FastWeightMemory, SoftmaxMemory
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.feature_maps.favor import DRAWS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

# E for each of the S keys and S values: the public code's; the paper does not say.
EMBED_DIM_PER_SYMBOL = 1.1


@dataclass
class FwpAssociativeRetrievalConfig(FairseqDataclass):
    """Defaults: the sum rule with ELU+1 and no normalisation; the paper's models are in retrieval_presets.py."""

    # Plain strings: `add_args` offers what the tables hold by then, entries from outside this package included.
    update_rule: str = option("sum", "how a pair is written; softmax: attention over all pairs")
    feature_map: str = option("elu", "map of keys and queries (not used by softmax)")
    key_dim: int = option(64, "size of keys and queries before the map")
    embed_dim: Optional[int] = option(None, "size of a key's embedding; none: 2.2 of the keys")  # noqa: UP045
    dpfp_nu: int = option(1, "capacity of the dpfp map: 2 * key dimension * nu features")
    favor_features: Optional[int] = option(  # noqa: UP045
        None, "random vectors m of the favor map: 2 m features; none: key dimension / 2"
    )
    favor_draw: ChoiceEnum(list(DRAWS)) = option(  # type: ignore[valid-type]
        "orthogonal", "how the favor map draws its vectors"
    )
    favor_offset: float = option(0.0, "added to the exponentials of the favor map")
    favor_redraw: int = option(1, "in training the favor map draws anew every so many mini-batches; 0: never")
    favor_softmax_scale: bool = option(False, "the favor map estimates exp(q . k / sqrt(d)) (Choromanski 2021)")
    relu_features: Optional[int] = option(  # noqa: UP045
        None, "features of the learned relu map; none: key dimension"
    )
    sum_normalization: bool = option(False, "divide mapped keys and queries by their sums (Schlag 2021, Eq. 29)")
    attention_normalization: bool = option(
        False, "divide the read-out by z . q, and what the delta rule retrieves by z . k (Schlag 2021, Eqs. 26-28)"
    )
    norm_read_out: bool = option(False, "layer normalisation of the read-out, as the public code has it for fwm")
    fwp_backend: ChoiceEnum(["auto", "kernel", "reference"]) = option(  # type: ignore[valid-type]
        "auto", "C++ and CUDA operators, the PyTorch loop that defines them, or kernels where they can be built"
    )


@register_model("fwp_associative_retrieval", dataclass=FwpAssociativeRetrievalConfig)
class FwpAssociativeRetrieval(BaseFairseqModel):
    """A memory between learned projections; num_keys: S, embed_dim: E, key_dim: d."""

    def __init__(self, memory: FastWeightMemory | SoftmaxMemory, num_keys: int, embed_dim: int, key_dim: int) -> None:
        super().__init__()
        self.memory = memory
        self.embedding = nn.Embedding(num_keys, embed_dim)  # N(0, 1)
        self.query_proj = nn.Linear(embed_dim, key_dim)
        self.key_proj = nn.Linear(embed_dim + num_keys, key_dim)
        for projection in (self.query_proj, self.key_proj):
            memory.initialize(projection.weight)
        self.gate_projs = memory.gate_projections(embed_dim + num_keys)

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """The flags of the configuration, with the rules and maps that the tables hold now as choices."""
        for name, choices in (("update_rule", [*MEMORIES, *UPDATE_RULES]), ("feature_map", FEATURE_MAPS)):
            option = FwpAssociativeRetrievalConfig.__dataclass_fields__[name]
            parser.add_argument(f"--{name.replace('_', '-')}", choices=list(choices), help=option.metadata["help"])
        super().add_args(parser)  # which leaves alone what is there already

    @classmethod
    def build_model(cls, cfg: FwpAssociativeRetrievalConfig, task: Any) -> "FwpAssociativeRetrieval":
        """Raises ValueError where the configuration cannot be built; task.num_keys is S."""
        for flag in ("key_dim", "embed_dim"):
            value = getattr(cfg, flag)
            if value is not None and value < 1:
                raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {value}")
        warn_of_unused(unused_flags(cfg))
        num_keys = task.num_keys
        embed_dim = int(2 * num_keys * EMBED_DIM_PER_SYMBOL) if cfg.embed_dim is None else cfg.embed_dim
        memory = MEMORIES.get(cfg.update_rule, build_fast_weights)(cfg, num_keys)
        return cls(memory, num_keys, embed_dim, cfg.key_dim)

    def forward(self, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        """What is retrieved: keys, values (B, L) and queries (B, Q), indices below S, -> (B, Q, S)."""
        if self.training:
            self.memory.resample()
        q = functional.embedding(queries, self.query_proj(self.embedding.weight))
        k = self._project(self.key_proj, keys, values)
        gates = [self._project(projection, keys, values) for projection in self.gate_projs.values()]
        return self.memory(q, k, values, gates)

    def _project(self, projection: Any, keys: Tensor, values: Tensor) -> Tensor:
        """W [e(k); v] (B, L, out), from one table of all keys and one of all values."""
        by_key, by_value = projection.weight.split([self.embedding.embedding_dim, self.embedding.num_embeddings], 1)
        by_key = functional.linear(self.embedding.weight, by_key, projection.bias)
        return functional.embedding(keys, by_key) + functional.embedding(values, by_value.T)


def unused_flags(cfg: FwpAssociativeRetrievalConfig) -> list[str]:
    """The options that the memory of this configuration does not look at, where they are not at their defaults."""
    others = (flags.values() for name, flags in MAP_FLAGS.items() if name != cfg.feature_map)
    unused = UNUSED.get(cfg.update_rule, tuple(flag for flags in others for flag in flags))
    default = FwpAssociativeRetrievalConfig()
    return [flag for flag in unused if getattr(cfg, flag) != getattr(default, flag)]


def build_softmax(cfg: FwpAssociativeRetrievalConfig, num_values: int) -> SoftmaxMemory:
    """Attention over all pairs."""
    return SoftmaxMemory(num_values)


def build_fast_weights(cfg: FwpAssociativeRetrievalConfig, num_values: int) -> FastWeightMemory:
    """Feature map x update rule x normalisations."""
    return FastWeightMemory(
        build_map(cfg.feature_map, cfg.key_dim, cfg),
        cfg.update_rule,
        num_values,
        sum_normalization=cfg.sum_normalization,
        attention_normalization=cfg.attention_normalization,
        norm_read_out=cfg.norm_read_out,
        backend=str(cfg.fwp_backend),
    )


# What is no update rule, and the options that it does not look at.
MEMORIES = {"softmax": build_softmax}
UNUSED = {
    "softmax": (
        *("feature_map", "sum_normalization", "attention_normalization", "norm_read_out"),
        *(flag for flags in MAP_FLAGS.values() for flag in flags.values()),
    )
}
