"""The options of attention, described once, for flags, warnings, checks of checkpoints and docs/flags.md.

An option is one field, under the heading of its class. The tables in `attentions` say which argument of an attention, a
map or a normalisation it becomes. Metadata `same_function`: see patches/options.py.
"""

from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_fwp.modules.attention.hybrid import MIXES
from fairseq_fwp.modules.attention.read_out import OUTPUT_GATES
from fairseq_fwp.modules.feature_maps import DRAWS
from fairseq_fwp.ops.checks import renaming
from fairseq_fwp.ops.kernels.backend import BACKENDS
from fairseq_fwp.patches.options import flag, option


@dataclass
class MemoryOptions(FairseqDataclass):
    """The memory, also of the retrieval task: maps, normalisations and backend."""

    dpfp_nu: int = option(
        1, "capacity nu of the dpfp map, from 1 to 2 * key dimension - 1; it has 2 * key dimension * nu features"
    )
    favor_features: Optional[int] = option(  # noqa: UP045  (fairseq's parser reads no other form)
        None,
        "number m of random vectors of the favor map, at least 1; it has 2 m features; none: half the key dimension",
    )
    favor_redraw: int = option(
        1, "number of training mini-batches after which the favor map draws new vectors; 0: never", same_function=True
    )
    favor_softmax_scale: bool = option(
        False, "scale keys and queries of the favor map so that it estimates exp(q . k / sqrt(d)) (Choromanski 2021)"
    )
    favor_relu: bool = option(
        False, "ReLU in place of the favor map's exponentials (Choromanski 2021): m features, none: the key dimension"
    )
    relu_features: Optional[int] = option(  # noqa: UP045
        None, "number of features of the learned relu map, at least 1; none: the key dimension"
    )
    sum_normalization: bool = option(False, "divide mapped keys and queries by their sums (Schlag 2021, Eq. 29)")
    attention_normalization: bool = option(
        False,
        "divide the output by z . q, and the value that delta and fwm retrieve by z . k (Schlag 2021, Eqs. 26-28)",
    )
    norm_read_out: bool = option(False, "apply layer normalisation to the output of each head")
    fwp_backend: ChoiceEnum([*BACKENDS]) = option(  # type: ignore[valid-type]
        "auto",
        "kernel: C++ and CUDA operators; fla: Triton kernels of fla-core, in half precision on CUDA; reference: their "
        "definition in PyTorch; auto: kernels where they can be built",
        same_function=True,
    )


@dataclass
class RuleOptions(FairseqDataclass):
    """The memory of a layer: its rule, map and sizes."""

    # Plain strings: `add_choices` reads the choices from the tables later, so that plug-ins can add some.
    decoder_update_rule: str = option(
        "delta", "how a token writes into the fast weights; softmax: attention to all past tokens"
    )
    decoder_feature_map: str = option("elu", "feature map of keys and queries")
    decoder_key_dim: Optional[int] = option(  # noqa: UP045
        None, "size of a head's keys and queries before the map, at least 1; none: embedding dimension / heads"
    )
    decoder_value_dim: Optional[int] = option(  # noqa: UP045
        None, "size of a head's values, at least 1; none: embedding dimension / heads"
    )
    decoder_value_heads: Optional[int] = option(  # noqa: UP045
        None,
        "heads of values and gates, a multiple of --decoder-attention-heads: several in a row share queries and keys; "
        "none: that number",
    )
    attention_normalization_read_out_only: bool = option(
        False, "with --attention-normalization: divide only the output, as the paper's public code does by default"
    )
    negative_eigenvalues: bool = option(
        False, "let the rate beta of the delta rules go up to 2 instead of 1, for keys of length one (Grazzi 2025)"
    )


@dataclass
class LayerOptions(FairseqDataclass):
    """The layer around the memory: convolution, lengths, gates and biases, as modern models have them."""

    decoder_conv_size: int = option(
        0,
        "tokens that a causal convolution of each channel of queries, keys and values sees before the map, values "
        "through SiLU after it; 0: no convolution",
    )
    l2_normalization: bool = option(
        False, "divide mapped keys and queries by their lengths, as modern delta networks do"
    )
    scale_queries: bool = option(
        False, "multiply mapped and normalised queries by 1 / sqrt(number of features), as softmax attention does"
    )
    hybrid_mix: ChoiceEnum([*MIXES]) = option(  # type: ignore[valid-type]
        "channel", "how hybrid mixes fast weights and softmax: a gate a channel, two gates a head, or their sum"
    )
    srwm_softmax_input: bool = option(False, "let srwm read a softmax of each head's input, as public code can")
    srwm_rate_mean: float = option(-1.0, "mean of srwm's first columns of rates; public: -1", same_function=True)
    srwm_query_scale: float = option(1.0, "scale of srwm's first columns of queries; public: 1", same_function=True)
    output_gate: ChoiceEnum([*OUTPUT_GATES]) = option(  # type: ignore[valid-type]
        "none", "function of a projection of the input by which the output is multiplied before its own projection"
    )
    output_gate_rank: Optional[int] = option(  # noqa: UP045
        None,
        "rank of the projection of --output-gate, with a bias, at least 1; none: full, without bias; of time_mix "
        "without bias; none: about 5 sqrt(D), in multiples of 32",
    )
    decay_lower_bound: Optional[float] = option(  # noqa: UP045
        None,
        "lower bound of the logarithm of a decay of gated_delta, kda and gdn2, below 0, such as -5 (safe gate); none: "
        "no bound",
    )
    attention_bias: bool = option(
        False, "add biases to the projections of attention, as fairseq and GPT-2 have them, and to gates without one"
    )


@dataclass
class TimeMixOptions(FairseqDataclass):
    """RWKV-7's time mixing, the attention `time_mix`."""

    decay_rank: Optional[int] = option(  # noqa: UP045
        None, "rank of the projection of time_mix's decays, at least 1; none: about 2.5 sqrt(D), in multiples of 32"
    )
    rate_rank: Optional[int] = option(  # noqa: UP045
        None, "rank of the projection of time_mix's learning rates, at least 1; none: as for --decay-rank"
    )
    value_rank: Optional[int] = option(  # noqa: UP045
        None,
        "rank of the projection that mixes the first layer's values into those of time_mix, at least 1; none: about "
        "1.7 sqrt(D), in multiples of 32",
    )


@dataclass
class PublicMapOptions(FairseqDataclass):
    """Only to load public code's weights: the favor map."""

    favor_draw: ChoiceEnum(list(DRAWS)) = option(  # type: ignore[valid-type]
        "orthogonal",
        "how the favor map draws its vectors: orthogonal, gaussian (independent), or authors (as the papers' "
        "public code)",
    )
    favor_offset: float = option(
        0.0, "number added to the exponentials of the favor map, at least 0: 0 in the papers, 1e-4 in their public code"
    )


@dataclass
class PublicCodeOptions(FairseqDataclass):
    """Only to load public code's weights: epsilons and scale of attention."""

    normalization_epsilon: Optional[float] = option(  # noqa: UP045
        None, "smallest divisor of both normalisations, above 0; none: 1e-6, or 1e-24 for features of the favor map"
    )
    add_normalization_epsilon: bool = option(
        False, "add the epsilon to every divisor, as public code does, instead of using it as the smallest divisor"
    )
    sum_normalization_epsilon: Optional[float] = option(  # noqa: UP045
        None, "another epsilon for --sum-normalization, above 0; none: --normalization-epsilon"
    )
    l2_normalization_epsilon: float = option(
        0.0, "number that --l2-normalization adds to the squares of lengths, at least 0: 1e-6 in public code"
    )
    scale_read_out: bool = option(
        False, "multiply the output by 1 / sqrt(head dimension), as the CUDA layers of the papers' public code do"
    )


@dataclass
class AttentionOptions(PublicCodeOptions, PublicMapOptions, TimeMixOptions, LayerOptions, RuleOptions, MemoryOptions):
    """Causal attention, and in translation the linear attentions around it."""


def add_choices(parser: ArgumentParser, options: type, choices: Mapping[str, Iterable[str]]) -> None:
    """Add options whose choices are the current entries of tables; fairseq's parser then does not add them again."""
    for field in fields(options):
        if field.name in choices:
            parser.add_argument(flag(field.name), choices=list(choices[field.name]), help=field.metadata["help"])


def naming_flags(names: Mapping[str, str]) -> AbstractContextManager[None]:
    """Replace the `arguments` that an error names by flags. names: options by argument."""
    return renaming({argument: flag(name) for argument, name in names.items()})
