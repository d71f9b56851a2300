"""Messages of fairseq that its users cannot act on."""

import dataclasses
import logging
import os
import sys
import warnings
from operator import attrgetter
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fairseq_fwp.options import plain
from fairseq_fwp.patches.patch import patch

COMMANDS = ("train", "validate", "eval_lm", "generate", "interactive")

# Warnings of fairseq's own imports and calls, which users of this plugin cannot act on.
KNOWN_WARNINGS = (
    (r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental", UserWarning),
    (r"In 'config': Usage of deprecated keyword in package header", UserWarning),
    (r"\s*'config' is validated against ConfigStore schema with the same name", UserWarning),
    (r"\s*The strict flag in the compose API is deprecated", UserWarning),
    (r"\s*The version_base parameter is not specified", UserWarning),
    (r"`torch\.cuda\.amp\.(custom_fwd|custom_bwd|autocast|GradScaler)\(.*\)` is deprecated", FutureWarning),
    (r"'pin_memory' argument is set as true but no accelerator is found", UserWarning),
)


@patch("warnings.filters", since="torch 2.4, hydra 1.1")
def silence_known_warnings() -> None:
    """Hide warnings of fairseq's own imports and calls at each start, and that a speech task lacks tensorboardX."""
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    for message, category in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)


@patch("fairseq.trainer._catalog_shared_params")
def name_shared_weights(find_shared: Any, module: Any, *args: Any) -> Any:
    """Leave out biases that layers do not have: fairseq's trainer logs each of them as one shared parameter."""
    found = find_shared(module, *args)
    return found and [names for names in found if attrgetter(names[0])(module) is not None]


@patch("logging.root.level")
def hide_debugging() -> None:
    """Undo the level DEBUG of the root logger, which a model of fairseq sets when it is imported."""
    if "fairseq_cli" in sys.modules and logging.root.level == logging.DEBUG:
        logging.root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())


@patch("logging.getLogger")
def shorten_settings() -> None:
    """Print the settings that differ from the defaults: fairseq's commands print all of them, 6,000 characters."""
    for command in COMMANDS:
        logging.getLogger(f"fairseq_cli.{command}").addFilter(_keep_settings_given)


def _keep_settings_given(record: logging.LogRecord) -> bool:
    if isinstance(record.msg, DictConfig):
        given = settings_given(record.msg)
        record.msg = "settings, others as by default: %s"
        record.args = (", ".join(f"{name}={value}" for name, value in given.items()),)
    return True


def settings_given(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings that differ from fairseq's defaults, by "group.name"; "group" is the group's `_name`.

    For a part without known defaults, such as a model without a dataclass: all settings that no other group has.
    """
    from fairseq.dataclass.configs import FairseqConfig

    known = {part.name for part in dataclasses.fields(FairseqConfig)} - {"_name"}
    groups = {group: plain(settings) for group, settings in cfg.items() if settings and group in known}
    given: dict[str, Any] = {}
    for group, settings in groups.items():
        kind = _dataclass(group, settings.get("_name"))
        if kind is None:
            defaults = {name: value for other in groups if other != group for name, value in groups[other].items()}
        else:
            defaults = OmegaConf.to_container(OmegaConf.structured(kind), enum_to_str=True)
        if settings.get("_name"):
            given[group] = settings["_name"]
        for name in settings.keys() - {"_name"}:
            value, default = settings[name], defaults.get(name)
            if isinstance(default, str) and default.startswith("${"):  # the default of another group
                default = OmegaConf.select(cfg, default[2:-1])
            if name not in defaults or value != default:
                given[f"{group}.{name}"] = value
    return dict(sorted(given.items()))


def _dataclass(group: str, name: str | None) -> Any:
    """Return the dataclass of a group of settings, or of its part `name`; None if it has none."""
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    kind = FairseqConfig.__dataclass_fields__[group].type
    if dataclasses.is_dataclass(kind):
        return kind
    if group == "model":
        return MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name, name))
    parts = TASK_DATACLASS_REGISTRY if group == "task" else REGISTRIES.get(group, {}).get("dataclass_registry", {})
    return parts.get(name)
