"""The flags of this package as text: docs/flags.md, and those of one architecture for a terminal."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from inspect import get_annotations
from types import FunctionType
from typing import TypeAlias

from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY, FairseqCriterion
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    BaseFairseqModel,
)
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, FairseqTask

from fairseq_fwp.models.attentions import ATTENTIONS, MAPS, NORMALIZATIONS, SHARED, Configurable
from fairseq_fwp.models.fast_weight_layer.model import LAYER_OPTIONS
from fairseq_fwp.models.fwp_transformer import FastWeightOptions, FwpTransformerModel
from fairseq_fwp.models.presets import PRESETS_OF_MODELS
from fairseq_fwp.modules.attention.base import Heads
from fairseq_fwp.patches.options import Settings, flag, word
from fairseq_fwp.tasks.synthetic.memory import FastWeightMemory
from fairseq_fwp.tasks.synthetic.model import MEMORY

HEAD = """# Flags

The flags that fairseq_fwp adds to `fairseq-train`. A flag that several models have stands once. `fwp-info` lists the
architectures, and `fwp-info --flags ARCH` prints the flags of one with their values. This page is written from the
code, by `fwp-info --flags > docs/flags.md`.

- *value*: the choices, or the type; a switch takes no value.
- *used by*: the attentions, feature maps and other flags that use the flag. A training warns where it has no effect.
- *same function*: trained weights compute the same with every value. A training that starts from a checkpoint warns of
  other flags that differ from the checkpoint's."""

# The options of each model, in the order of the page. Those of fwp_transformer come besides fairseq's own.
MODELS: dict[str, type] = {
    name: MODEL_DATACLASS_REGISTRY.get(name, FastWeightOptions)
    for name in (*PRESETS_OF_MODELS, "fwp_associative_retrieval")
}
Flagged: TypeAlias = BaseFairseqModel | FairseqTask | FairseqCriterion  # what has flags of its own
# The attentions of a model; a language model without an entry has all of ATTENTIONS but these two.
OTHERS = ("linear", "relative")
KINDS: dict[str, Mapping[str, Configurable[Heads] | Configurable[FastWeightMemory]]] = {
    "fwp_xl_lm": {name: ATTENTIONS[name] for name in ("softmax", "relative")},
    "fwp_transformer": {name: ATTENTIONS[name] for name in ("fast_weight", "linear")},
    "fwp_associative_retrieval": {"fast_weight": MEMORY},
}


def page() -> str:
    """Return docs/flags.md."""
    lines = [HEAD]
    for owner, models in owners(MODELS).items():
        heading, _, more = first_line(owner).partition(". ")
        lines += _head(heading.rstrip("."), f"Flags of {', '.join(models)}. {more}".rstrip(), "used by")
        for field, cells in _described(owner, MODEL_REGISTRY[models[0]]):
            same = ["*same function*"] if field.metadata.get("same_function") else []
            lines.append(_row(*cells, ", ".join(dict.fromkeys([*users(field.name, models), *same]))))
    for kind, registry, options in (
        ("task", TASK_REGISTRY, TASK_DATACLASS_REGISTRY),
        ("criterion", CRITERION_REGISTRY, CRITERION_DATACLASS_REGISTRY),
    ):
        for name, owner in options.items():
            if owner.__module__.startswith("fairseq_fwp."):
                lines += _head(f"Flags of the {kind} {name}", first_line(owner))
                lines += (_row(*cells) for _, cells in _described(owner, registry[name]))
    return "\n".join(lines)


def flags_of(arch: str) -> str:
    """Return the flags of an architecture for a terminal: their values, and the model's defaults that differ."""
    model = ARCH_MODEL_NAME_REGISTRY[arch]
    changed, usual = differences(arch), defaults(model)
    groups = {first_line(owner): own(owner) for owner in owners({model: MODELS[model]})}
    texts = {field.name: field.metadata["help"] for group in groups.values() for field in group}
    names = {title: [field.name for field in group] for title, group in groups.items()}
    names["Flags of fairseq that this architecture sets."] = [name for name in changed if name not in texts]
    lines = [f"--arch {arch}, an architecture of {model}. Its flags and their values:"]
    for title, group in names.items():
        lines += ["", title] if group else []
        for name in group:
            differs = f" [{model}: {as_text(usual[name])}]" if name in changed else ""
            value = f"{flag(name)} {as_text(changed.get(name, usual[name]))}"
            lines.append(f"  {value:38} {texts.get(name, '')}{differs}")
    return "\n".join(lines)


def owners(kinds: Mapping[str, type]) -> dict[type, list[str]]:
    """Return the classes that describe flags, and the names under which each is used; base classes come first."""
    models: dict[type, list[str]] = {}
    for name, options in kinds.items():
        for owner in reversed(options.__mro__):
            if own(owner):
                models.setdefault(owner, []).append(name)
    return models


def own(owner: type) -> list[Field]:
    """Return the options that a class adds to its bases. Fields without a help text are fairseq's."""
    added = get_annotations(owner)
    described = fields(owner) if is_dataclass(owner) else ()
    return [field for field in described if field.name in added and "help" in field.metadata]


def defaults(model: str) -> Settings:
    """Return the default values of a model's options; of a translation model fairseq's options too."""
    return FwpTransformerModel.complete({}) if MODELS[model] is FastWeightOptions else vars(MODELS[model]())


def differences(arch: str) -> Settings:
    """Return the options in which an architecture differs from the defaults of its model."""
    preset, usual = Namespace(), defaults(ARCH_MODEL_NAME_REGISTRY[arch])
    ARCH_CONFIG_REGISTRY[arch](preset)
    return {name: value for name, value in vars(preset).items() if value != usual[name]}


def users(name: str, models: list[str]) -> list[str]:
    """Return what uses an option: attentions with an argument for it, maps, other flags, and the fast weight layer."""
    if name in SHARED:
        return []
    language_model = {kind: ATTENTIONS[kind] for kind in ATTENTIONS.keys() - OTHERS}
    pairs = [pair for model in models for pair in KINDS.get(model, language_model).items()]
    attentions = {kind for kind, of_kind in pairs if name in of_kind.options.values()}
    normalizations = [switch for switch, (_, arguments) in NORMALIZATIONS.items() if name in arguments]
    return [
        *(kind for kind in ATTENTIONS if kind in attentions),
        *("linear" if switch == "division" else f"`{flag(switch)}`" for switch in normalizations),
        *(f"map {feature_map}" for feature_map, table in MAPS.items() if name in table.values()),
        *(["fast weight layer"] if name in LAYER_OPTIONS.values() else []),
    ]


def as_text(value: object) -> str:
    """Return a value as the help texts say it."""
    named: dict[object, str] = {None: "none", False: "off", True: "on", "": "''"}
    value = word(value)
    return named[value] if value is None or value == "" or isinstance(value, bool) else str(value)


def first_line(documented: object) -> str:
    """Return the first line of a docstring, "" without one."""
    return next(iter((documented.__doc__ or "").strip().splitlines()), "")


def _head(title: str, text: str, *columns: str) -> list[str]:
    names = ("flag", "value", "default", "meaning", *columns)
    return [f"\n## {title}", "", text, "", _row(*names), _row(*["---"] * len(names))]


def _described(owner: type, kind: type[Flagged]) -> Iterator[tuple[Field, list[str]]]:
    """Yield each option of a model, task or criterion with its flag, value, default and help text."""
    parser = ArgumentParser(add_help=False)
    kind.add_args(parser)
    actions = {action.dest: action for action in parser._actions}
    for field in own(owner):
        action = actions[field.name]
        name = next(iter(action.option_strings), action.dest)
        value = (
            "text" if action.type is str or not isinstance(action.type, type | FunctionType) else action.type.__name__
        )
        if action.nargs == 0:
            value = "switch"
        elif action.choices:
            value = ", ".join(f"`{choice}`" for choice in action.choices)
        yield field, [f"`{name}`", value, as_text(field.default), field.metadata["help"].replace("<", "\\<")]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
