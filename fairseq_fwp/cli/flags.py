"""The flags of this package as text: docs/flags.md, and those of one architecture for a terminal."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from enum import Enum
from inspect import get_annotations, signature
from typing import Any

from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
)
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

from fairseq_fwp.fast_weight_layer import FastWeightLayer
from fairseq_fwp.models.attention_options import CAUSAL, LINEAR, NORMALIZATIONS, by_argument, flag, is_of_attention
from fairseq_fwp.models.fwp_transformer import FastWeightOptions, FwpTransformerModel
from fairseq_fwp.models.presets import PRESETS_OF_MODELS
from fairseq_fwp.modules.attention import ATTENTIONS, LinearAttention
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.options import Settings

HEAD = """# Flags

The flags that fairseq_fwp adds to `fairseq-train`. A flag that several models have stands once. `fwp-info` lists the
architectures, and `fwp-info --flags ARCH` prints the flags of one with their values. This page is written from the
code, by `fwp-info --flags > docs/flags.md`.

- *value*: the choices, or the type; a switch takes no value.
- *used by*: the attentions, feature maps and other flags that use the flag. A training warns where it has no effect.
- *same function*: trained weights compute the same with every value. A training that starts from a checkpoint warns of
  other flags that differ from the checkpoint's."""

# The options of each model, in the order of the page. Those of fwp_transformer come besides fairseq's own.
MODELS: dict[str, type[Any]] = {
    name: MODEL_DATACLASS_REGISTRY.get(name, FastWeightOptions)
    for name in (*PRESETS_OF_MODELS, "fwp_associative_retrieval")
}
# The causal attentions of a model; a language model without an entry has all of ATTENTIONS but those in OTHERS.
CAUSAL_ATTENTIONS = {
    "fwp_xl_lm": ("softmax", "relative"),
    "fwp_transformer": ("fast_weight",),
    "fwp_associative_retrieval": ("fast_weight",),
}
OTHERS = ("linear", "relative")


def page() -> str:
    """Return docs/flags.md."""
    lines = [HEAD]
    for owner, models in owners(MODELS).items():
        lines += _head(f"Flags of {', '.join(models)}", owner, "used by")
        for field, cells in _described(owner, MODEL_REGISTRY[models[0]]):
            same = ["*same function*"] if field.metadata.get("same_function") else []
            lines.append(_row(*cells, ", ".join(dict.fromkeys([*users(field.name, models), *same]))))
    for kind, registry, options in (
        ("task", TASK_REGISTRY, TASK_DATACLASS_REGISTRY),
        ("criterion", CRITERION_REGISTRY, CRITERION_DATACLASS_REGISTRY),
    ):
        for name, owner in options.items():
            if owner.__module__.startswith("fairseq_fwp."):
                lines += _head(f"Flags of the {kind} {name}", owner)
                lines += (_row(*cells) for _, cells in _described(owner, registry[name]))
    return "\n".join(lines)


def flags_of(arch: str) -> str:
    """Return the flags of an architecture for a terminal: their values, and the model's defaults that differ."""
    model = ARCH_MODEL_NAME_REGISTRY[arch]
    changed, known = differences(arch), defaults(model)
    groups = {first_line(owner): own(owner) for owner in owners({model: MODELS[model]})}
    texts = {field.name: field.metadata["help"] for group in groups.values() for field in group}
    names = {title: [field.name for field in group] for title, group in groups.items()}
    names["Flags of fairseq that this architecture sets."] = [name for name in changed if name not in texts]
    lines = [f"--arch {arch}, an architecture of {model}. Its flags and their values:"]
    for title, group in names.items():
        lines += ["", title] if group else []
        for name in group:
            differs = f" [{model}: {plain(known[name])}]" if name in changed else ""
            value = f"{flag(name)} {plain(changed.get(name, known[name]))}"
            lines.append(f"  {value:38} {texts.get(name, '')}{differs}")
    return "\n".join(lines)


def owners(kinds: Mapping[str, type]) -> dict[type, list[str]]:
    """Return the classes that describe flags, and the names under which each is used; base classes come first."""
    found: dict[type, list[str]] = {}
    for name, options in kinds.items():
        for owner in reversed(options.__mro__):
            if own(owner):
                found.setdefault(owner, []).append(name)
    return found


def own(owner: type[Any]) -> list[Field]:
    """Return the options that a class adds to its bases. Fields without a help text are fairseq's."""
    added = get_annotations(owner)
    known = fields(owner) if hasattr(owner, "__dataclass_fields__") else ()
    return [field for field in known if field.name in added and "help" in field.metadata]


def defaults(model: str) -> Settings:
    """Return the default values of a model's options; of a translation model fairseq's options too."""
    return FwpTransformerModel.complete({}) if MODELS[model] is FastWeightOptions else vars(MODELS[model]())


def differences(arch: str) -> Settings:
    """Return the options in which an architecture differs from the defaults of its model."""
    preset, known = Namespace(), defaults(ARCH_MODEL_NAME_REGISTRY[arch])
    ARCH_CONFIG_REGISTRY[arch](preset)
    return {name: value for name, value in vars(preset).items() if value != known[name]}


def users(name: str, models: list[str]) -> Iterator[str]:
    """Yield what uses an option: attentions whose constructors have the argument, maps, and other flags."""

    def takes(kind: Any, *prefixes: str) -> bool:
        arguments = by_argument(MODELS[models[0]], *prefixes)
        return any(arguments.get(argument) == name for argument in signature(kind).parameters)

    if is_of_attention(name):
        causal = {kind for model in models for kind in CAUSAL_ATTENTIONS.get(model, ATTENTIONS.keys() - OTHERS)}
        yield from (kind for kind in ATTENTIONS if kind in causal and takes(ATTENTIONS[kind], *CAUSAL))
        if takes(LinearAttention, *LINEAR):
            yield "linear"
    for normalization, (_, arguments) in NORMALIZATIONS.items():
        if name in arguments:
            yield "linear" if normalization == "division" else f"`{flag(normalization)}`"
    yield from (f"map {kind}" for kind in FEATURE_MAPS if name.startswith(f"{kind}_"))
    if takes(FastWeightLayer, "fwl_"):
        yield "fast weight layer"


def plain(value: Any) -> str:
    """Return a value as the help texts say it."""
    named = {None: "none", False: "off", True: "on", "": "''"}
    value = value.value if isinstance(value, Enum) else value
    return named[value] if value is None or value == "" or isinstance(value, bool) else str(value)


def first_line(documented: Any) -> str:
    """Return the first line of a docstring, "" without one."""
    return next(iter((documented.__doc__ or "").strip().splitlines()), "")


def _head(title: str, owner: type, *columns: str) -> list[str]:
    names = ("flag", "value", "default", "meaning", *columns)
    return [f"\n## {title}", "", first_line(owner), "", _row(*names), _row(*["---"] * len(names))]


def _described(owner: type, kind: Any) -> Iterator[tuple[Field, list[str]]]:
    """Yield each option of a model, task or criterion with its flag, value, default and help text."""
    parser = ArgumentParser(add_help=False)
    kind.add_args(parser)
    actions = {action.dest: action for action in parser._actions}
    for field in own(owner):
        action = actions[field.name]
        name = next(iter(action.option_strings), action.dest)
        value = "text" if action.type in (None, str) else getattr(action.type, "__name__", "text")
        if action.nargs == 0:
            value = "switch"
        elif action.choices:
            value = ", ".join(f"`{choice}`" for choice in action.choices)
        yield field, [f"`{name}`", value, plain(field.default), field.metadata["help"].replace("<", "\\<")]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
