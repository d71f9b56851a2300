"""The model `fwp_associative_retrieval`, its architectures, and the criterions of all generated problems.

The model writes key-value pairs into a memory, then retrieves the values of keys.

Schlag, Irie & Schmidhuber 2021, arXiv 2102.11174, Sec. 6.1. Shapes: B batch, L writes, Q queries, S keys and as many
values, E embed_dim, d key_dim. Values are one-hot vectors v of size S, keys learned embeddings e of size E, and

    k = W_K [e(k); v]        q = W_Q e(q)        gates = W_G [e(k); v]

Details missing in the paper are as in its public code (ischlag/fast-weight-transformers): E, the initial values, and
biases of W_K and W_Q, which its equations do not have.
"""

import math
from argparse import ArgumentParser
from dataclasses import dataclass
from typing import Optional, cast

from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.models import BaseFairseqModel, register_model
from fairseq.tasks import FairseqTask
from torch import Tensor, nn
from torch.nn import functional

from fairseq_fwp.models.attention_options import MemoryOptions, PublicMapOptions, add_choices
from fairseq_fwp.models.attentions import (
    Configurable,
    build_map,
    build_normalizations,
    construct,
    unused_options,
    used_options,
)
from fairseq_fwp.models.language_model import warn_of_unused
from fairseq_fwp.models.presets import register
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.modules.decoding import Sample
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS, resample
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings, flag, option, read_options
from fairseq_fwp.tasks.synthetic.memory import FastWeightMemory, SoftmaxMemory

# E for each of the S keys and S values, from the public code; the paper does not give it.
EMBED_DIM_PER_SYMBOL = 1.1
# Digits of the loss that are logged and compared: 0.001 counts as solved, and smaller losses must still differ.
DIGITS = 9


@dataclass
class FwpAssociativeRetrievalConfig(PublicMapOptions, MemoryOptions):
    """Memory of the retrieval task. Defaults: the sum rule with ELU+1 and no normalisation."""

    # Plain strings: `add_args` reads the choices from the tables later, so that plug-ins can add some.
    update_rule: str = option("sum", "how a key-value pair is written; softmax: attention to all pairs")
    feature_map: str = option("elu", "feature map of keys and queries")
    key_dim: int = option(64, "size of keys and queries before the map, at least 1")
    embed_dim: Optional[int] = option(None, "size of a key's embedding, at least 1; none: 2.2 * --num-keys")  # noqa: UP045


MEMORY = Configurable(
    FastWeightMemory,
    {
        "feature_map": "feature_map",
        "update_rule": "update_rule",
        "sum_normalization": "sum_normalization",
        "attention_normalization": "attention_normalization",
        "norm_read_out": "norm_read_out",
        "backend": "fwp_backend",
    },
    ("num_values",),
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
    def add_args(cls, parser: ArgumentParser) -> None:
        """Add the flags of the configuration; their choices are the current rules and maps of the tables."""
        choices = {"update_rule": [SOFTMAX, *UPDATE_RULES], "feature_map": FEATURE_MAPS}
        add_choices(parser, FwpAssociativeRetrievalConfig, choices)
        super().add_args(parser)  # it skips flags that exist already

    @classmethod
    def build_model(cls, cfg: FwpAssociativeRetrievalConfig, task: FairseqTask) -> "FwpAssociativeRetrieval":
        """Build the model; task.num_keys is S. Raises ValueError for a configuration that cannot be built."""
        for name in ("key_dim", "embed_dim"):
            value = getattr(cfg, name)
            check(value is None or value >= 1, f"{flag(name)} must be at least 1, got {value}")
        embed_dim = int(2 * task.num_keys * EMBED_DIM_PER_SYMBOL) if cfg.embed_dim is None else cfg.embed_dim
        cfg = read_options(FwpAssociativeRetrievalConfig, cfg)
        if cfg.update_rule == SOFTMAX:
            without_map = ["feature_map"] if cfg.feature_map != FwpAssociativeRetrievalConfig.feature_map else []
            warn_of_unused(unused_options(cfg, []) + without_map)
            return cls(SoftmaxMemory(task.num_keys), task.num_keys, embed_dim, cfg.key_dim)
        parts: dict[str, object] = {**build_normalizations(cfg, MEMORY), "num_values": task.num_keys}
        parts["feature_map"] = build_map(cfg, cfg.feature_map, cfg.key_dim)
        memory = construct(MEMORY.module, cfg, MEMORY.options, **parts)
        warn_of_unused(unused_options(cfg, [used_options(cfg, MEMORY, cfg.feature_map)]))
        return cls(memory, task.num_keys, embed_dim, cfg.key_dim)

    def forward(self, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        """Return the retrieved values (B, Q, S) for keys and values (B, L) and queries (B, Q), all indices below S."""
        if self.training:
            resample(self)
        q = functional.embedding(queries, self.query_proj(self.embedding.weight))
        k = self._project(self.key_proj, keys, values)
        projections = cast(dict[str, nn.Linear], self.gate_projs)
        gates = {name: self._project(linear, keys, values) for name, linear in projections.items()}
        return self.memory(q, k, values, gates)

    def _project(self, projection: nn.Linear, keys: Tensor, values: Tensor) -> Tensor:
        """Return W [e(k); v] (B, L, out), from one table of all keys and one of all values."""
        by_key, by_value = projection.weight.split([self.embedding.embedding_dim, self.embedding.num_embeddings], 1)
        by_key = functional.linear(self.embedding.weight, by_key, projection.bias)
        return functional.embedding(keys, by_key) + functional.embedding(values, by_value.T)


# Figures 2 to 5 of Sec. 6.1 and App. D, all with keys of size 64. Rules that do not retrieve a value before they write
# normalise the output. delta normalises the mapped keys and queries. fwm, the paper's "Schlag (2021)", only has the
# layer normalisation of its public code. The rules gated and decay of Mao 2022, arXiv 2210.04243, are normalised as
# sum, and later rules as delta.
SUM = {"update_rule": "sum", "attention_normalization": True}
GATED = {"update_rule": "gated", "attention_normalization": True}
DECAY = {"update_rule": "decay", "attention_normalization": True}
DELTA = {"update_rule": "delta", "sum_normalization": True}
FWM = {"update_rule": "fwm", "norm_read_out": True}
FAVOR = {"feature_map": "favor"}
DPFP = {"feature_map": "dpfp"}

RETRIEVAL_PRESETS: dict[str, Settings] = {
    "softmax_retrieval": {"update_rule": SOFTMAX},
    "sum_retrieval": SUM,
    "sum_favor64_retrieval": {**SUM, **FAVOR, "favor_features": 64},
    "sum_favor128_retrieval": {**SUM, **FAVOR, "favor_features": 128},
    "sum_favor512_retrieval": {**SUM, **FAVOR, "favor_features": 512},
    "sum_dpfp1_retrieval": {**SUM, **DPFP, "dpfp_nu": 1},
    "sum_dpfp2_retrieval": {**SUM, **DPFP, "dpfp_nu": 2},
    "sum_dpfp3_retrieval": {**SUM, **DPFP, "dpfp_nu": 3},
    "sum_tanh_retrieval": {"update_rule": "sum", "feature_map": "tanh"},
    "sum_relu_retrieval": {**SUM, "feature_map": "relu"},
    "delta_retrieval": DELTA,
    "delta_favor64_retrieval": {**DELTA, **FAVOR, "favor_features": 64},
    "delta_favor128_retrieval": {**DELTA, **FAVOR, "favor_features": 128},
    "delta_dpfp1_retrieval": {**DELTA, **DPFP, "dpfp_nu": 1},
    "delta_dpfp2_retrieval": {**DELTA, **DPFP, "dpfp_nu": 2},
    "gated_dpfp1_retrieval": {**GATED, **DPFP, "dpfp_nu": 1},
    "decay_dpfp1_retrieval": {**DECAY, **DPFP, "dpfp_nu": 1},
    "gla_dpfp1_retrieval": {**DELTA, **DPFP, "dpfp_nu": 1, "update_rule": "gla"},
    "gated_delta_dpfp1_retrieval": {**DELTA, **DPFP, "dpfp_nu": 1, "update_rule": "gated_delta"},
    "kda_dpfp1_retrieval": {**DELTA, **DPFP, "dpfp_nu": 1, "update_rule": "kda"},
    "rwkv7_dpfp1_retrieval": {**DELTA, **DPFP, "dpfp_nu": 1, "update_rule": "rwkv7"},
    "fwm_tanh_retrieval": {**FWM, "feature_map": "tanh"},
    "fwm_dpfp1_retrieval": {**FWM, **DPFP, "dpfp_nu": 1},
}

for _name, _preset in RETRIEVAL_PRESETS.items():
    register(_name, _preset, "fwp_associative_retrieval")


@register_criterion("fwp_squared_error")
class SquaredErrorCriterion(FairseqCriterion):
    """The mean over queries of 1/2 sum_j (v*_j - v_j)^2, with v* the one-hot vector of the target.

    A sample has net_input, the inputs of the model, and target (B, Q). A target is the index of the value that each
    query should retrieve, or -1 for a query that is not asked.
    """

    def forward(self, model: BaseFairseqModel, sample: Sample, reduce: bool = True) -> tuple[Tensor, int, Settings]:
        """Return the sum over queries, their number, and what is logged."""
        target = sample["target"]
        retrieved = model(**sample["net_input"])
        losses = squared_errors(retrieved, target.clamp(min=0)).masked_fill(target < 0, 0)
        queries = int((target >= 0).sum())
        loss = losses.sum() if reduce else losses
        log = {"loss": losses.sum().data, "ntokens": queries, "nsentences": len(target), "sample_size": queries}
        return loss, queries, log

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[Settings]) -> None:
        """Log the mean loss over all processes."""
        total = sum(float(log.get("loss", 0)) for log in logging_outputs)
        queries = sum(int(log.get("sample_size", 0)) for log in logging_outputs)
        metrics.log_scalar("loss", total / queries, queries, round=DIGITS)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


@register_criterion("fwp_answers")
class AnswersCriterion(FairseqCriterion):
    """The mean cross-entropy of the answers of a language model, logged in bits.

    A sample has net_input, and target (B, L): answers, or padding where nothing is asked.
    """

    def forward(self, model: BaseFairseqModel, sample: Sample, reduce: bool = True) -> tuple[Tensor, int, Settings]:
        """Return the sum over answers, their number, and what is logged."""
        target, pad = sample["target"], self.padding_idx
        log_probs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
        losses = functional.nll_loss(log_probs.transpose(1, 2), target, ignore_index=pad, reduction="none")
        wrong, answers = (log_probs.argmax(-1) != target) & (target != pad), int((target != pad).sum())
        log = {"loss": losses.sum().data, "wrong": wrong.sum(), "whole": (~wrong).all(1).sum()}
        log |= {"ntokens": answers, "nsentences": len(target), "sample_size": answers}
        return losses.sum() if reduce else losses, answers, log

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[Settings]) -> None:
        """Log the mean loss, and shares in %: `accuracy` of right answers, `whole` of sequences with no wrong one."""
        names = ("loss", "wrong", "whole", "sample_size", "nsentences")
        sums = (sum(float(log.get(name, 0)) for log in logging_outputs) for name in names)
        loss, wrong, whole, answers, sequences = sums
        metrics.log_scalar("loss", loss / answers / math.log(2), answers, round=3)
        metrics.log_scalar("accuracy", 100 * (1 - wrong / answers), answers, round=3)
        metrics.log_scalar("whole", 100 * whole / sequences, sequences, round=3)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def squared_errors(retrieved: Tensor, target: Tensor) -> Tensor:
    """Return 1/2 |onehot(target) - retrieved|^2: retrieved (B, Q, S), target (B, Q) -> (B, Q)."""
    index = target.unsqueeze(-1)
    error = retrieved.scatter_add(-1, index, retrieved.new_full((1,), -1).expand_as(index))
    return error.square().sum(-1) / 2
