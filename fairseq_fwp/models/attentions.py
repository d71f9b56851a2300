"""The attentions of models: for each its class, and the option that each argument of its constructor gets.

A new attention is an entry of `ATTENTIONS`. A new option is a field of `attention_options`, an argument, and the line
here that joins the two, so that grep for either finds the other. Building, warnings of flags without effect, the names
of flags in errors and docs/flags.md read these tables; a test holds them against the constructors.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar, cast

from fairseq.dataclass import FairseqDataclass
from torch import nn

from fairseq_fwp.models.attention_options import AttentionOptions, MemoryOptions, naming_flags
from fairseq_fwp.modules.attention import (
    SOFTMAX,
    DeltaRnn,
    FastWeightAttention,
    Hybrid,
    LinearAttention,
    Mlstm,
    RecurrentDelta,
    RelativeAttention,
    SoftmaxAttention,
    Srwm,
    TimeMix,
)
from fairseq_fwp.modules.attention.base import AnyAttention, Heads, head_size
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, Division, SumNormalization
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS, FeatureMap
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.ops.checks import check, look_up
from fairseq_fwp.patches.options import setting, word

Module = TypeVar("Module", bound=nn.Module)
Part = TypeVar("Part")
Table = Mapping[str, str]  # the name of the option of each argument


@dataclass(frozen=True)
class Configurable(Generic[Module]):
    """A class of attention, or of memory, and where the arguments of its constructor come from.

    module: the class; options: the name of the option of each argument; an option that a model lacks leaves the
    argument at its default; computed: arguments that the model computes. Every attention also gets those of `SIZES`.
    """

    module: type[Module]
    options: Table = field(default_factory=dict)
    computed: tuple[str, ...] = ()

    def takes(self, argument: str) -> bool:
        """Return whether it has an argument of that name."""
        return argument in self.options or argument in self.computed


def alike(*names: str) -> Table:
    """Return the table of arguments that are named as their options."""
    return {name: name for name in names}


SIZES = {"embed_dim": "decoder_embed_dim", "num_heads": "decoder_attention_heads"}

ATTENTIONS: dict[str, Configurable[Heads]] = {
    "fast_weight": Configurable(
        FastWeightAttention,
        {
            "feature_map": "decoder_feature_map",
            "update_rule": "decoder_update_rule",
            "key_dim": "decoder_key_dim",
            "value_dim": "decoder_value_dim",
            "value_heads": "decoder_value_heads",
            "conv_size": "decoder_conv_size",
            "bias": "attention_bias",
            "backend": "fwp_backend",
            **alike("sum_normalization", "attention_normalization", "l2_normalization", "l2_normalization_epsilon"),
            **alike("scale_queries", "scale_read_out", "norm_read_out", "rms_norm", "norm_epsilon"),
            **alike("output_gate", "output_gate_rank", "negative_eigenvalues", "decay_lower_bound"),
        },
    ),
    "linear": Configurable(LinearAttention, {"bias": "attention_bias"}, ("feature_map", "source_dim", "division")),
    SOFTMAX: Configurable(
        SoftmaxAttention,
        {
            "dropout": "attention_dropout",
            "bias": "attention_bias",
            "softmax_heads": "attention_softmax_heads",
            "kv_heads": "attention_kv_heads",
            "head_dim": "attention_head_dim",
            "qk_norm": "attention_qk_norm",
            "norm_epsilon": "norm_epsilon",
            "qkv_bias": "attention_qkv_bias",
            "rope_theta": "attention_rope_theta",
            "rope_scaling": "attention_rope_scaling",
            "window": "attention_window",
        },
    ),
    "relative": Configurable(RelativeAttention, {"dropout": "attention_dropout"}, ("positions", "window")),
    "delta_rnn": Configurable(
        DeltaRnn,
        {
            "feature_map": "decoder_feature_map",
            "key_dim": "decoder_key_dim",
            "backend": "fwp_backend",
            **alike("sum_normalization", "l2_normalization", "scale_read_out", "negative_eigenvalues"),
        },
    ),
    "hybrid": Configurable(
        Hybrid,
        {
            "dropout": "attention_dropout",
            "window": "attention_window",
            "rope_theta": "attention_rope_theta",
            "mix": "hybrid_mix",
            "backend": "fwp_backend",
            **alike("negative_eigenvalues", "norm_epsilon"),
        },
    ),
    "mlstm": Configurable(
        Mlstm,
        {
            "key_dim": "decoder_key_dim",
            "value_dim": "decoder_value_dim",
            "norm_epsilon": "norm_epsilon",
            "backend": "fwp_backend",
        },
    ),
    "recurrent_delta": Configurable(RecurrentDelta, {"scale_read_out": "scale_read_out", "backend": "fwp_backend"}),
    "srwm": Configurable(
        Srwm,
        {
            "softmax_input": "srwm_softmax_input",
            "rate_mean": "srwm_rate_mean",
            "query_scale": "srwm_query_scale",
            "backend": "fwp_backend",
        },
    ),
    "time_mix": Configurable(
        TimeMix,
        {
            "backend": "fwp_backend",
            **alike("decay_rank", "rate_rank", "value_rank", "norm_epsilon", "l2_normalization_epsilon"),
            **alike("output_gate_rank"),  # of its own gate, which every layer has
        },
        ("depth",),
    ),
}

# The options of maps; a map without an entry has none.
MAPS: dict[str, Table] = {
    "favor": {
        "features": "favor_features",
        "draw": "favor_draw",
        "offset": "favor_offset",
        "redraw": "favor_redraw",
        "softmax_scale": "favor_softmax_scale",
        "relu": "favor_relu",
    },
    "dpfp": {"nu": "dpfp_nu"},
    "relu": {"features": "relu_features"},
}

# The normalisations by their arguments in attentions, and the options of their own arguments. Of two options for one
# argument the last counts that is not None.
EPSILONS = {"normalization_epsilon": "epsilon", "add_normalization_epsilon": "add_epsilon"}
NORMALIZATIONS: dict[str, tuple[type[Division], dict[str, str]]] = {
    "sum_normalization": (SumNormalization, {**EPSILONS, "sum_normalization_epsilon": "epsilon"}),
    "attention_normalization": (
        AttentionNormalization,
        {**EPSILONS, "attention_normalization_read_out_only": "read_out_only"},
    ),
    "division": (Division, EPSILONS),  # of linear attention
}

# Other parts of a model use these too, so they always have an effect.
SHARED = {"rms_norm", "norm_epsilon"}
# No warning says that these have no effect: they choose the attention, or who computes it.
ALWAYS_USED = {"decoder_update_rule", "update_rule", "fwp_backend"}


def attention_name(cfg: AttentionOptions) -> str:
    """Return the name in ATTENTIONS that the options select; some, such as softmax, are given as an update rule."""
    rule = cfg.decoder_update_rule
    return rule if rule in rule_choices() and rule not in UPDATE_RULES else "fast_weight"


def rule_choices() -> list[str]:
    """Return the choices of --decoder-update-rule: the rules, and attentions without a rule."""
    return [*(name for name, kind in ATTENTIONS.items() if kind.module.named_as_rule), *UPDATE_RULES]


def construct(
    make: Callable[..., Part], cfg: FairseqDataclass, table: Table, *leading: object, **parts: object
) -> Part:
    """Return make(*leading, ...) with the arguments of a table, in place of which `parts` count; errors name flags.

    cfg: the model's options; an option that it lacks leaves the argument at its default.
    """
    of_model = {option.name for option in fields(cfg)}
    values = {argument: word(getattr(cfg, name)) for argument, name in table.items() if name in of_model}
    with naming_flags({**table, **SIZES}):
        return make(*leading, **{**values, **parts})


def make_attention(
    cfg: AttentionOptions, embed_dim: int, num_heads: int, name: str | None = None, depth: float = 0.0
) -> AnyAttention:
    """Return the causal attention of the configuration. Raises ValueError that names the flag for an invalid one.

    name: of ATTENTIONS, None = the one that the options select; depth: share of the layers below it, 0 = the first.
    """
    kind = ATTENTIONS[name or attention_name(cfg)]
    parts: dict[str, object] = {"depth": depth} if kind.takes("depth") else {}
    if kind.takes("feature_map"):
        with naming_flags({**kind.options, **SIZES}):
            key_dim = head_size(embed_dim, num_heads, cfg.decoder_key_dim)
        parts |= {"key_dim": key_dim, "feature_map": build_map(cfg, cfg.decoder_feature_map, key_dim)}
        parts |= build_normalizations(cfg, kind)
        check(
            cfg.attention_normalization or not cfg.attention_normalization_read_out_only,
            "--attention-normalization must be on with --attention-normalization-read-out-only, got off",
        )
    return cast(AnyAttention, construct(kind.module, cfg, kind.options, embed_dim, num_heads, **parts))


def build_map(cfg: MemoryOptions, name: str, key_dim: int, besides: str = "") -> FeatureMap:
    """Return the map of that name for keys of key_dim. Raises ValueError for an unknown name.

    besides: the words in the error for choices that are not in the table.
    """
    make = look_up("feature map", name, FEATURE_MAPS, besides)
    return construct(make, cfg, MAPS.get(name, {}), key_dim)


def build_normalizations(cfg: MemoryOptions, kind: Configurable[Module]) -> dict[str, Division | None]:
    """Return the normalisations of a kind of attention, by the names of their arguments; None means off."""
    switches = {name: getattr(cfg, name) for name in NORMALIZATIONS if name in kind.options}
    return {name: build_division(cfg, name) if on else None for name, on in switches.items()}


def build_division(cfg: MemoryOptions, name: str = "division") -> Division:
    """Return the normalisation of that name."""
    make, arguments = NORMALIZATIONS[name]
    table = {argument: option for option, argument in arguments.items() if setting(cfg, option, None) is not None}
    return construct(make, cfg, table)


def used_options(cfg: MemoryOptions, kind: Configurable[Module], feature_map: str) -> set[str]:
    """Return the options that an attention of this kind with this map uses."""
    used = {*kind.options.values()}
    if kind.takes("feature_map"):
        used.update(MAPS.get(feature_map, {}).values())
    for name, (_, arguments) in NORMALIZATIONS.items():
        if name in kind.computed or (name in kind.options and getattr(cfg, name)):
            used.update(arguments)
    # None for a checkpoint whose plug-in is not loaded.
    rule = UPDATE_RULES.get(getattr(cfg, kind.options["update_rule"])) if kind.takes("update_rule") else None
    if rule and not (rule.normalizer and rule.normalizer.retrieved):
        used.discard("attention_normalization_read_out_only")  # it only normalises its output in any case
    return used


def unused_options(cfg: MemoryOptions, used: Iterable[set[str]]) -> list[str]:
    """Return the options of attention that are not at their defaults and that no attention uses."""
    effective = ALWAYS_USED.union(*used)
    others = (x for x in fields(cfg) if is_of_attention(x.name) and x.name not in effective)
    return [option.name for option in others if getattr(cfg, option.name) != option.default]


def is_of_attention(name: str) -> bool:
    """Return whether the option of that name is only an argument of attentions, maps or normalisations."""
    tables = (*(kind.options for kind in ATTENTIONS.values()), *MAPS.values())
    of_arguments = any(name in table.values() for table in tables)
    return name not in SHARED and (of_arguments or any(name in of_it for _, of_it in NORMALIZATIONS.values()))
