"""The model `fwp_associative_retrieval`: writes key-value pairs into a memory, then retrieves the values of keys.

Schlag, Irie & Schmidhuber 2021, arXiv 2102.11174, Sec. 6.1. Shapes: B batch, L writes, Q queries, S keys and as many
values, E embed_dim, d key_dim. Values are one-hot vectors v of size S, keys learned embeddings e of size E, and

    k = W_K [e(k); v]        q = W_Q e(q)        gates = W_G [e(k); v]

Details missing in the paper are as in its public code (ischlag/fast-weight-transformers): E, the initial values, and
biases of W_K and W_Q, which its equations do not have.
"""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.models import BaseFairseqModel, register_model
from torch import Tensor, nn
from torch.nn import functional

from fairseq_fwp.models.attention_options import (
    CAUSAL,
    MemoryOptions,
    add_choices,
    build_map,
    build_normalizations,
    by_argument,
    construct,
    unused_options,
    used_options,
)
from fairseq_fwp.models.language_model import warn_of_unused
from fairseq_fwp.modules.associative_memory import FastWeightMemory, SoftmaxMemory
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.options import option

# E for each of the S keys and S values, from the public code; the paper does not give it.
EMBED_DIM_PER_SYMBOL = 1.1


@dataclass
class FwpAssociativeRetrievalConfig(MemoryOptions):
    """Memory of the retrieval task. Defaults: the sum rule with ELU+1 and no normalisation."""

    # Plain strings: `add_args` reads the choices from the tables later, so that plug-ins can add some.
    update_rule: str = option("sum", "how a key-value pair is written; softmax: attention to all pairs")
    feature_map: str = option("elu", "feature map of keys and queries")
    key_dim: int = option(64, "size of keys and queries before the map, at least 1")
    embed_dim: Optional[int] = option(None, "size of a key's embedding, at least 1; none: 2.2 * --num-keys")  # noqa: UP045


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
        """Add the flags of the configuration; their choices are the current rules and maps of the tables."""
        choices = {"update_rule": [SOFTMAX, *UPDATE_RULES], "feature_map": FEATURE_MAPS}
        add_choices(parser, FwpAssociativeRetrievalConfig, choices)
        super().add_args(parser)  # it skips flags that exist already

    @classmethod
    def build_model(cls, cfg: FwpAssociativeRetrievalConfig, task: Any) -> "FwpAssociativeRetrieval":
        """Build the model; task.num_keys is S. Raises ValueError for a configuration that cannot be built."""
        for name in ("key_dim", "embed_dim"):
            value = getattr(cfg, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        num_keys = task.num_keys
        embed_dim = int(2 * num_keys * EMBED_DIM_PER_SYMBOL) if cfg.embed_dim is None else cfg.embed_dim
        memory = build_memory(cfg, num_keys)
        options = FwpAssociativeRetrievalConfig
        warn_of_unused(unused_options(options, cfg, [used_options(options, cfg, type(memory), cfg.feature_map)]))
        return cls(memory, num_keys, embed_dim, cfg.key_dim)

    def forward(self, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        """Return the retrieved values (B, Q, S) for keys and values (B, L) and queries (B, Q), all indices below S."""
        if self.training:
            self.memory.resample()
        q = functional.embedding(queries, self.query_proj(self.embedding.weight))
        k = self._project(self.key_proj, keys, values)
        gates = [self._project(projection, keys, values) for projection in self.gate_projs.values()]
        return self.memory(q, k, values, gates)

    def _project(self, projection: Any, keys: Tensor, values: Tensor) -> Tensor:
        """Return W [e(k); v] (B, L, out), from one table of all keys and one of all values."""
        by_key, by_value = projection.weight.split([self.embedding.embedding_dim, self.embedding.num_embeddings], 1)
        by_key = functional.linear(self.embedding.weight, by_key, projection.bias)
        return functional.embedding(keys, by_key) + functional.embedding(values, by_value.T)


def build_memory(cfg: FwpAssociativeRetrievalConfig, num_values: int) -> FastWeightMemory | SoftmaxMemory:
    """Return softmax attention over all pairs, or a memory of feature map x update rule x normalisations."""
    options = FwpAssociativeRetrievalConfig
    if cfg.update_rule == SOFTMAX:
        return SoftmaxMemory(num_values)
    feature_map = build_map(options, cfg, cfg.feature_map, cfg.key_dim)
    names, normalizations = by_argument(options, *CAUSAL), build_normalizations(cfg)
    return construct(FastWeightMemory, cfg, names, feature_map=feature_map, num_values=num_values, **normalizations)
