"""Every option of attention, described once, for flags, warnings, checks of checkpoints and docs/flags.md.

An option is one field: its default, its help text, and its metadata:

    of: the part that has the argument: "attention" (causal), "linear" (of translation), a normalisation, or the name
        of a feature map. With "all" there is never a warning that it has no effect;
    argument: the name of that argument, by default the name of the option;
    same_function: whether trained weights compute the same function with every value.

An attention uses the options that its constructor has arguments for, and those of the map and the normalisations
chosen. A new option is a field here and an argument there.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from enum import Enum
from inspect import signature
from typing import Any, NamedTuple, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_fwp.modules.attention import ATTENTIONS, SOFTMAX
from fairseq_fwp.modules.attention.base import check_heads, check_key_dim
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, SumNormalization
from fairseq_fwp.modules.feature_maps import DRAWS, FEATURE_MAPS, FeatureMap
from fairseq_fwp.modules.layers import look_up
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.options import option

DIVISIONS = ("sum_normalization", "attention_normalization", "division")


@dataclass
class MemoryOptions(FairseqDataclass):
    """Feature maps, normalisations and backend, of attention and of the memory of the retrieval task."""

    dpfp_nu: int = option(
        1,
        "capacity nu of the dpfp map, from 1 to 2 * key dimension - 1; it has 2 * key dimension * nu features",
        argument="nu",
        of="dpfp",
    )
    favor_features: Optional[int] = option(  # noqa: UP045  (fairseq's parser reads no other form)
        None,
        "number m of random vectors of the favor map, at least 1; it has 2 m features; none: half the key dimension",
        argument="num_features",
        of="favor",
    )
    favor_draw: ChoiceEnum(list(DRAWS)) = option(  # type: ignore[valid-type]
        "orthogonal",
        "how the favor map draws its vectors: orthogonal, gaussian (independent), or authors (as the papers' "
        "public code)",
        argument="draw",
        of="favor",
    )
    favor_offset: float = option(
        0.0,
        "number added to the exponentials of the favor map, at least 0: 0 in the papers, 1e-4 in their public code",
        argument="offset",
        of="favor",
    )
    favor_redraw: int = option(
        1,
        "number of training mini-batches after which the favor map draws new vectors; 0: never",
        argument="redraw",
        of="favor",
        same_function=True,
    )
    favor_softmax_scale: bool = option(
        False,
        "scale keys and queries of the favor map so that it estimates exp(q . k / sqrt(d)) (Choromanski 2021)",
        argument="softmax_scale",
        of="favor",
    )
    relu_features: Optional[int] = option(  # noqa: UP045
        None,
        "number of features of the learned relu map, at least 1; none: the key dimension",
        argument="num_features",
        of="relu",
    )
    sum_normalization: bool = option(
        False, "divide mapped keys and queries by their sums (Schlag 2021, Eq. 29)", of="attention"
    )
    attention_normalization: bool = option(
        False,
        "divide the output by z . q, and the value that delta and fwm retrieve by z . k (Schlag 2021, Eqs. 26-28)",
        of="attention",
    )
    norm_read_out: bool = option(
        False, "apply layer normalisation to the output of each head", argument="norm_output", of="attention"
    )
    fwp_backend: ChoiceEnum(["auto", "kernel", "fla", "reference"]) = option(  # type: ignore[valid-type]
        "auto",
        "kernel: C++ and CUDA operators; fla: Triton kernels of fla-core, in half precision on CUDA; reference: their "
        "definition in PyTorch; auto: kernels where they can be built",
        argument="backend",
        of=("attention", "all"),
        same_function=True,
    )


@dataclass
class AttentionOptions(MemoryOptions):
    """Causal attention, and in translation the linear attentions around it."""

    # Plain strings: `add_choices` reads the choices from the tables later, so that plug-ins can add some.
    decoder_update_rule: str = option(
        "delta",
        "how a token writes into the fast weights; softmax: attention to all past tokens",
        argument="update_rule",
        of=("attention", "all"),
    )
    decoder_feature_map: str = option("elu", "feature map of keys and queries", argument="feature_map", of="attention")
    decoder_key_dim: Optional[int] = option(  # noqa: UP045
        None,
        "size of a head's keys and queries before the map, at least 1; none: embedding dimension / heads",
        argument="key_dim",
        of="attention",
    )
    attention_normalization_read_out_only: bool = option(
        False,
        "with --attention-normalization: divide only the output, as the paper's public code does by default",
        argument="output_only",
        of="attention_normalization",
    )
    normalization_epsilon: Optional[float] = option(  # noqa: UP045
        None,
        "smallest divisor of both normalisations, above 0; none: 1e-6, or 1e-24 for features of the favor map",
        argument="epsilon",
        of=DIVISIONS,
    )
    add_normalization_epsilon: bool = option(
        False,
        "add the epsilon to every divisor, as public code does, instead of using it as the smallest divisor",
        argument="add_epsilon",
        of=DIVISIONS,
    )
    sum_normalization_epsilon: Optional[float] = option(  # noqa: UP045
        None,
        "another epsilon for --sum-normalization, above 0; none: --normalization-epsilon",
        argument="epsilon",
        of="sum_normalization",
    )
    scale_read_out: bool = option(
        False,
        "multiply the output by 1 / sqrt(head dimension), as the CUDA layers of the papers' public code do",
        argument="scale_output",
        of="attention",
    )
    l2_normalization: bool = option(
        False, "divide mapped keys and queries by their lengths, as modern delta networks do", of="attention"
    )
    negative_eigenvalues: bool = option(
        False,
        "let the rate beta of the delta rules go up to 2 instead of 1, for keys of length one (Grazzi 2025)",
        of="attention",
    )
    attention_bias: bool = option(
        False,
        "add biases to the projections of attention, as fairseq and GPT-2 have them, and to gates without one",
        argument="bias",
        of=("attention", "linear"),
    )


# The arguments of every attention, and the options of a decoder that set them.
SIZES = {"embed_dim": "decoder_embed_dim", "num_heads": "decoder_attention_heads"}
NORMALIZATIONS = {"sum_normalization": SumNormalization, "attention_normalization": AttentionNormalization}


def attention_name(cfg: Any) -> str:
    """Return the name in ATTENTIONS that the options select; some, such as softmax, are given as an update rule."""
    rule = cfg.decoder_update_rule
    if rule == SOFTMAX:
        return softmax_name(cfg)
    return rule if rule in rule_choices() and rule not in UPDATE_RULES else "fast_weight"


def softmax_name(cfg: Any) -> str:
    """Return the name in ATTENTIONS of softmax: over all past tokens, or within a window if the options have one."""
    return SOFTMAX if getattr(cfg, "attention_window", None) is None else "local"


def rule_choices() -> list[str]:
    """Return the choices of --decoder-update-rule: the rules, and attentions without a rule."""
    return [*(name for name, attention in ATTENTIONS.items() if attention.named_as_rule), *UPDATE_RULES]


def add_choices(parser: Any, options: type, choices: Mapping[str, Iterable[str]]) -> None:
    """Add options whose choices are the current entries of tables; fairseq's parser then does not add them again."""
    for field in fields(options):
        if field.name in choices:
            parser.add_argument(flag(field.name), choices=list(choices[field.name]), help=field.metadata["help"])


def arguments(options: type, cfg: Any, part: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments of `part` in the configuration, and the option that sets each.

    If two options set one argument, the later one counts, unless it is None.
    """
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for field in fields(options):
        if part in parts(field):
            argument = field.metadata.get("argument", field.name)
            value = getattr(cfg, field.name)
            if value is not None or argument not in values:
                values[argument] = str(value) if isinstance(value, Enum) else value
                names[argument] = field.name
    return values, names


def parts(field: Field) -> tuple[str, ...]:
    """Return the parts that have the argument of an option; () for options of other things."""
    of = field.metadata.get("of", ())
    return (of,) if isinstance(of, str) else of


def construct(kind: Any, options: type, cfg: Any, part: str, **given: Any) -> Any:
    """Return kind(...) with the given arguments and those from the options of `part`; errors name flags."""
    values, names = arguments(options, cfg, part)
    accepted = signature(kind).parameters
    others = {field.metadata.get("argument", field.name): field.name for field in fields(options) if parts(field)}
    with naming_flags({**SIZES, **others, **names}):
        return kind(**{name: value for name, value in {**values, **given}.items() if name in accepted})


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


def build_attention(options: type, cfg: Any, name: str | None = None) -> Any:
    """Return the causal attention of the configuration. Raises ValueError that names the flag for an invalid one.

    name: of ATTENTIONS, None = the one that the options select.
    """
    kind = ATTENTIONS[name or attention_name(cfg)]
    given = {"embed_dim": cfg.decoder_embed_dim, "num_heads": cfg.decoder_attention_heads}
    if "feature_map" in signature(kind).parameters:
        with naming_flags({**SIZES, "key_dim": "decoder_key_dim"}):
            check_heads(**given)
            key_dim = given["embed_dim"] // given["num_heads"] if cfg.decoder_key_dim is None else cfg.decoder_key_dim
            check_key_dim(key_dim)
        given |= {"key_dim": key_dim, "feature_map": build_map(options, cfg, cfg.decoder_feature_map, key_dim)}
        given |= build_normalizations(options, cfg)
    return construct(kind, options, cfg, "attention", **given)


def build_map(options: type, cfg: Any, name: str, key_dim: int, besides: str = "") -> FeatureMap:
    """Return the map of that name for keys of key_dim. Raises ValueError for an unknown name.

    besides: words for further choices in the error.
    """
    kind = look_up("feature map", name, FEATURE_MAPS, besides)
    values, names = arguments(options, cfg, name)
    with naming_flags(names):
        return kind(key_dim, **values)


def build_normalizations(options: type, cfg: Any) -> dict[str, Any]:
    """Return the two normalisations by the names of their arguments; None means off."""
    built = {
        name: construct(kind, options, cfg, name) if getattr(cfg, name) else None
        for name, kind in NORMALIZATIONS.items()
    }
    if built["attention_normalization"] is None and getattr(cfg, "attention_normalization_read_out_only", False):
        raise ValueError("--attention-normalization must be on with --attention-normalization-read-out-only, got off")
    return built


class Use(NamedTuple):
    """An attention of a model: the part whose options it takes, its class, map and rule."""

    part: str
    kind: Any
    feature_map: str
    update_rule: str = ""


def unused_options(options: type, cfg: Any, uses: Iterable[Use]) -> list[str]:
    """Return the options that are not at their defaults and that none of these attentions uses."""
    used = {field.name for field in fields(options) if "all" in parts(field)}
    for use in uses:
        used.update(_used_options(options, cfg, use))
    return [
        field.name
        for field in fields(options)
        if parts(field) and field.name not in used and getattr(cfg, field.name) != field.default
    ]


def _used_options(options: type, cfg: Any, use: Use) -> Iterator[str]:
    accepted = signature(use.kind).parameters
    rule = UPDATE_RULES.get(use.update_rule)  # None for a checkpoint whose plug-in is not loaded
    for field in fields(options):
        argument = field.metadata.get("argument", field.name)
        for part in parts(field):
            if part == use.part:
                looked_at = argument in accepted
            elif part in DIVISIONS:
                looked_at = part in accepted and getattr(cfg, part, True)
            else:
                looked_at = part == use.feature_map and "feature_map" in accepted
            if argument == "output_only" and rule and not (rule.retrieves or rule.normalizer):
                looked_at = False  # it only normalises its output in any case
            if looked_at:
                yield field.name
