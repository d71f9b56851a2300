"""Every option of attention, described once, for flags, warnings, checks of checkpoints and docs/flags.md.

An option is one field. Its name says what uses it: the argument of that name.

    attention: the argument `key_dim` is --key-dim or --decoder-key-dim, `dropout` is --attention-dropout, and `backend`
        --fwp-backend: see CAUSAL;
    feature map: options begin with the map's name: `features` of the map favor is --favor-features;
    normalisation: see NORMALIZATIONS.

A new option is a field here and an argument there. Metadata `same_function`: see options.py.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum
from inspect import signature
from typing import Optional, TypeVar, cast

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_fwp.checks import check, look_up
from fairseq_fwp.modules.attention import ATTENTIONS, SOFTMAX
from fairseq_fwp.modules.attention.base import Attention, head_size
from fairseq_fwp.modules.attention.fast_weight import OUTPUT_GATES
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, Division, SumNormalization
from fairseq_fwp.modules.feature_maps import DRAWS, FEATURE_MAPS, FeatureMap
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.options import option


@dataclass
class MemoryOptions(FairseqDataclass):
    """Feature maps, normalisations and backend, of attention and of the memory of the retrieval task."""

    dpfp_nu: int = option(
        1, "capacity nu of the dpfp map, from 1 to 2 * key dimension - 1; it has 2 * key dimension * nu features"
    )
    favor_features: Optional[int] = option(  # noqa: UP045  (fairseq's parser reads no other form)
        None,
        "number m of random vectors of the favor map, at least 1; it has 2 m features; none: half the key dimension",
    )
    favor_draw: ChoiceEnum(list(DRAWS)) = option(  # type: ignore[valid-type]
        "orthogonal",
        "how the favor map draws its vectors: orthogonal, gaussian (independent), or authors (as the papers' "
        "public code)",
    )
    favor_offset: float = option(
        0.0, "number added to the exponentials of the favor map, at least 0: 0 in the papers, 1e-4 in their public code"
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
    fwp_backend: ChoiceEnum(["auto", "kernel", "fla", "reference"]) = option(  # type: ignore[valid-type]
        "auto",
        "kernel: C++ and CUDA operators; fla: Triton kernels of fla-core, in half precision on CUDA; reference: their "
        "definition in PyTorch; auto: kernels where they can be built",
        same_function=True,
    )


@dataclass
class AttentionOptions(MemoryOptions):
    """Causal attention, and in translation the linear attentions around it."""

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
    decoder_conv_size: int = option(
        0,
        "tokens that a causal convolution of each channel of queries, keys and values sees before the map, values "
        "through SiLU after it; 0: no convolution",
    )
    attention_normalization_read_out_only: bool = option(
        False, "with --attention-normalization: divide only the output, as the paper's public code does by default"
    )
    normalization_epsilon: Optional[float] = option(  # noqa: UP045
        None, "smallest divisor of both normalisations, above 0; none: 1e-6, or 1e-24 for features of the favor map"
    )
    add_normalization_epsilon: bool = option(
        False, "add the epsilon to every divisor, as public code does, instead of using it as the smallest divisor"
    )
    sum_normalization_epsilon: Optional[float] = option(  # noqa: UP045
        None, "another epsilon for --sum-normalization, above 0; none: --normalization-epsilon"
    )
    scale_read_out: bool = option(
        False, "multiply the output by 1 / sqrt(head dimension), as the CUDA layers of the papers' public code do"
    )
    l2_normalization: bool = option(
        False, "divide mapped keys and queries by their lengths, as modern delta networks do"
    )
    l2_normalization_epsilon: float = option(
        0.0, "number that --l2-normalization adds to the squares of lengths, at least 0: 1e-6 in public code"
    )
    scale_queries: bool = option(
        False, "multiply mapped and normalised queries by 1 / sqrt(number of features), as softmax attention does"
    )
    output_gate: ChoiceEnum([*OUTPUT_GATES]) = option(  # type: ignore[valid-type]
        "none", "function of a projection of the input by which the output is multiplied before its own projection"
    )
    output_gate_rank: Optional[int] = option(  # noqa: UP045
        None,
        "rank of the projection of --output-gate, with a bias, at least 1; none: full, without bias; of time_mix "
        "without bias; none: about 5 sqrt(D), in multiples of 32",
    )
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
    decay_lower_bound: Optional[float] = option(  # noqa: UP045
        None,
        "lower bound of the logarithm of a decay of gated_delta, kda and gdn2, below 0, such as -5 (safe gate); none: "
        "no bound",
    )
    negative_eigenvalues: bool = option(
        False, "let the rate beta of the delta rules go up to 2 instead of 1, for keys of length one (Grazzi 2025)"
    )
    attention_bias: bool = option(
        False, "add biases to the projections of attention, as fairseq and GPT-2 have them, and to gates without one"
    )


Part = TypeVar("Part")

# Words before the name of a causal attention's argument in that of its option; the last option counts.
CAUSAL = ("", "fwp_", "decoder_", "attention_", "attention_normalization_")
LINEAR = ("attention_",)  # the same for the linear attentions of translation
SIZES = {"embed_dim": "decoder_embed_dim", "num_heads": "decoder_attention_heads"}

EPSILONS = {"normalization_epsilon": "epsilon", "add_normalization_epsilon": "add_epsilon"}
# The options of each normalisation, and their arguments; of two for one argument the last counts that is not None.
NORMALIZATIONS: dict[str, tuple[type[Division], dict[str, str]]] = {
    "sum_normalization": (SumNormalization, {**EPSILONS, "sum_normalization_epsilon": "epsilon"}),
    "attention_normalization": (
        AttentionNormalization,
        {**EPSILONS, "attention_normalization_read_out_only": "read_out_only"},
    ),
    "division": (Division, EPSILONS),  # of linear attention
}
OF_ATTENTION = {"update_rule", "feature_map", *(field.name for field in fields(AttentionOptions) if field.metadata)}
# No warning says that these have no effect: they choose the attention, or who computes it.
ALWAYS_USED = {"decoder_update_rule", "update_rule", "fwp_backend"}


def attention_name(cfg: AttentionOptions) -> str:
    """Return the name in ATTENTIONS that the options select; some, such as softmax, are given as an update rule."""
    rule = cfg.decoder_update_rule
    if rule == SOFTMAX:
        return softmax_name(cfg)
    return rule if rule in rule_choices() and rule not in UPDATE_RULES else "fast_weight"


def softmax_name(cfg: AttentionOptions) -> str:
    """Return the name in ATTENTIONS of softmax: over all past tokens, or within a window if the options have one."""
    return SOFTMAX if getattr(cfg, "attention_window", None) is None else "local"


def rule_choices() -> list[str]:
    """Return the choices of --decoder-update-rule: the rules, and attentions without a rule."""
    return [*(name for name, attention in ATTENTIONS.items() if attention.named_as_rule), *UPDATE_RULES]


def add_choices(parser: ArgumentParser, options: type, choices: Mapping[str, Iterable[str]]) -> None:
    """Add options whose choices are the current entries of tables; fairseq's parser then does not add them again."""
    for field in fields(options):
        if field.name in choices:
            parser.add_argument(flag(field.name), choices=list(choices[field.name]), help=field.metadata["help"])


def by_argument(options: type, *prefixes: str) -> dict[str, str]:
    """Return the options that begin with a prefix, by the rest of their names; later prefixes count more."""
    names = [field.name for field in fields(options)]
    return {name.removeprefix(prefix): name for prefix in prefixes for name in names if name.startswith(prefix)}


def construct(
    kind: Callable[..., Part], cfg: object, options: Mapping[str, str], *first: object, **given: object
) -> Part:
    """Return kind(*first, ...) with the arguments that it takes, given or from options; errors name flags.

    options: names by argument.
    """
    accepted = signature(kind).parameters
    values = {argument: getattr(cfg, name) for argument, name in options.items() if argument in accepted}
    values = {argument: str(value) if isinstance(value, Enum) else value for argument, value in values.items()}
    with naming_flags(options):
        return kind(*first, **{name: value for name, value in {**values, **given}.items() if name in accepted})


@contextmanager
def naming_flags(names: Mapping[str, str]) -> Iterator[None]:
    """Replace the `arguments` that an error names by flags. names: options by argument."""
    try:
        yield
    except ValueError as error:
        message = re.sub(r"`(\w+)`", lambda found: flag(names[found[1]]) if found[1] in names else found[0], str(error))
        raise ValueError(message) from None


def flag(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"


def build_attention(options: type, cfg: AttentionOptions, name: str | None = None, depth: float = 0.0) -> Attention:
    """Return the causal attention of the configuration. Raises ValueError that names the flag for an invalid one.

    name: of ATTENTIONS, None = the one that the options select; depth: share of the layers below it, 0 = the first.
    """
    kind, names = ATTENTIONS[name or attention_name(cfg)], {**by_argument(options, *CAUSAL), **SIZES}
    given = {"embed_dim": cfg.decoder_embed_dim, "num_heads": cfg.decoder_attention_heads}
    if "feature_map" in signature(kind).parameters:
        with naming_flags(names):
            key_dim = head_size(**given, size=cfg.decoder_key_dim)
        given |= {"key_dim": key_dim, "feature_map": build_map(options, cfg, cfg.decoder_feature_map, key_dim)}
        given |= build_normalizations(cfg)
    return cast(Attention, construct(kind, cfg, names, **given, depth=depth))


def build_map(options: type, cfg: MemoryOptions, name: str, key_dim: int, besides: str = "") -> FeatureMap:
    """Return the map of that name for keys of key_dim. Raises ValueError for an unknown name.

    besides: words for further choices in the error.
    """
    kind = look_up("feature map", name, FEATURE_MAPS, besides)
    return construct(kind, cfg, by_argument(options, f"{name}_"), key_dim)


def build_normalizations(cfg: MemoryOptions) -> dict[str, Division | None]:
    """Return sum and attention normalisation by the names of their arguments; None means off."""
    names = ("sum_normalization", "attention_normalization")
    built = {name: build_division(cfg, name) if getattr(cfg, name) else None for name in names}
    without = built["attention_normalization"] is None and getattr(cfg, "attention_normalization_read_out_only", False)
    check(not without, "--attention-normalization must be on with --attention-normalization-read-out-only, got off")
    return built


def build_division(cfg: MemoryOptions, name: str = "division") -> Division:
    """Return the normalisation of that name."""
    kind, options = NORMALIZATIONS[name]
    given = {argument: option for option, argument in options.items() if getattr(cfg, option, None) is not None}
    return construct(kind, cfg, given)


def used_options(
    options: type,
    cfg: MemoryOptions,
    kind: Callable[..., object],
    feature_map: str,
    prefixes: tuple[str, ...] = CAUSAL,
) -> set[str]:
    """Return the options that an attention of this class with this map uses."""
    accepted, names = signature(kind).parameters, by_argument(options, *prefixes)
    used = {name for argument, name in names.items() if argument in accepted}
    if "feature_map" in accepted:
        used.update(by_argument(options, f"{feature_map}_").values())
    for normalization, (_, arguments) in NORMALIZATIONS.items():
        if normalization in accepted and getattr(cfg, normalization, True):
            used.update(arguments)
    # None for a checkpoint whose plug-in is not loaded.
    rule = UPDATE_RULES.get(getattr(cfg, names["update_rule"])) if "update_rule" in names else None
    if rule and not (rule.normaliser and rule.normaliser.retrieved):
        used.discard("attention_normalization_read_out_only")  # it only normalises its output in any case
    return used


def unused_options(options: type, cfg: MemoryOptions | Namespace, used: Iterable[set[str]]) -> list[str]:
    """Return the options of attention that are not at their defaults and that no attention uses."""
    known = ALWAYS_USED.union(*used)
    others = (field for field in fields(options) if is_of_attention(field.name) and field.name not in known)
    return [field.name for field in others if getattr(cfg, field.name) != field.default]


def is_of_attention(name: str) -> bool:
    """Return whether the option of that name is only an argument of attentions, maps or normalisations."""
    return name.startswith("attention_") or name in OF_ATTENTION
