"""`fwp-info`: versions, devices, kernels, and the tables of rules, maps, architectures and flags."""

import argparse
import dataclasses
import importlib.metadata
import platform
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import yaml
from fairseq.models import ARCH_MODEL_INV_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.utils import import_user_module

import fairseq_fwp
from fairseq_fwp.cli.flags import MODELS, first_line, flags_of, page
from fairseq_fwp.kernels import DEVICES, kernel_status, load_kernels, self_check
from fairseq_fwp.models.presets import PRESETS_OF_MODELS
from fairseq_fwp.modules.attention import ATTENTIONS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES, find_rule

PACKAGES = ("fairseq_fwp", "fairseq-fixed", "fairseq", "torch", "numpy", "omegaconf", "hydra-core")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="fwp-info", description=__doc__, allow_abbrev=False)
    made.add_argument("--build", action="store_true", help="build the kernels that can be built here first")
    made.add_argument("--user-dir", metavar="FOLDER", help="a plug-in of yours, whose rules and maps are listed too")
    made.add_argument(
        "--flags",
        metavar="ARCH",
        nargs="?",
        const="",
        help="print only the flags of this architecture with their values; without ARCH the page docs/flags.md",
    )
    made.add_argument(
        "--hydra",
        metavar="ARCH",
        type=_architecture_for_hydra,
        help="print only a configuration for fairseq-hydra-train with this architecture of a language model",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Print the report, or what --flags or --hydra ask for. Exit status 2 for an unknown architecture."""
    made = parser()
    args = made.parse_args(argv)
    try:
        import_user_module(args)
    except FileNotFoundError as error:
        made.error(f"--user-dir must be a folder, got {error}")
    if args.flags is not None:
        known = [arch for model in MODELS for arch in ARCH_MODEL_INV_REGISTRY[model]]
        if args.flags and args.flags not in known:
            nearest = get_close_matches(args.flags, known, 5, 0) or known
            made.error(f"--flags must be an architecture, got {args.flags!r}: nearest are {', '.join(nearest)}")
        print(flags_of(args.flags) if args.flags else page())
        return 0
    print(hydra_yaml(args.hydra) if args.hydra else report(args.build))
    return 0


def report(build: bool) -> str:
    """Versions, devices, kernels and tables as text."""
    sections = {
        "versions": versions(),
        "devices": devices(),
        "kernels": kernels(build),
        "update rules (--decoder-update-rule)": [
            *(f"{name:13} {first_line(find_rule(name).operator)}" for name in UPDATE_RULES),
            *(f"{name:13} {first_line(kind)}" for name, kind in ATTENTIONS.items() if kind.named_as_rule),
        ],
        "feature maps (--decoder-feature-map)": [
            f"{name:10} {first_line(feature_map)}" for name, feature_map in FEATURE_MAPS.items()
        ],
        "architectures (--arch)": [
            line
            for model, presets in PRESETS_OF_MODELS.items()
            for line in (
                f"{model:28} the model without a preset",
                *(f"{name:28} {_settings(preset)}" for name, preset in presets.items()),
            )
        ],
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())


def versions() -> list[str]:
    """One line for Python and for each installed package that matters."""
    lines = [f"{'python':14} {platform.python_version()}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name:14} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return lines


def devices() -> list[str]:
    """The CPU with torch's threads, and each GPU."""
    lines = [f"cpu: {platform.machine()}, threads: {torch.get_num_threads()}"]
    for index in range(torch.cuda.device_count()):
        lines.append(f"cuda:{index}: {torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}")
    return lines


def kernels(build: bool) -> list[str]:
    """Say for each device whether its kernels are built, else why not, and which rules must not use them."""
    if build:
        for device in DEVICES:
            if load_kernels(device).built and device in self_check.CHECKED:
                self_check.find_faults(device)
    lines = []
    for device, status in kernel_status().items():
        said = f"built, {status.path}" if status.built else f"not built: {status.reason}"
        lines.append(f"{device}: {said}" + (f"; {status.cure}" if status.cure else ""))
        for name, faults in self_check.read_faults(Path(status.path)).items() if status.path else ():
            lines.append(
                f"{device}: checked on {name}, {'and not used for some rules' if faults else 'all rules agree'}"
            )
            lines += [f"{device}: not used for {rule}: {reason}" for rule, reason in faults.items()]
    return lines


def _architecture_for_hydra(arch: str) -> str:
    """Return an architecture of fairseq-hydra-train, which builds only models of dataclasses: no translation models."""
    known = {
        name for model, presets in PRESETS_OF_MODELS.items() if model in MODEL_DATACLASS_REGISTRY for name in presets
    }
    if arch not in known:
        raise argparse.ArgumentTypeError(
            f"the architecture must be a language model for fairseq-hydra-train, got {arch!r}: train others with "
            f"fairseq-train; language models are {', '.join(sorted(known))}"
        )
    return arch


def hydra_yaml(arch: str) -> str:
    """A configuration for fairseq-hydra-train with the preset's values written out: it does not know architectures."""
    ((name, preset),) = ((model, presets[arch]) for model, presets in PRESETS_OF_MODELS.items() if arch in presets)
    defaults: dict[str, Any] = {
        option.name: option.default
        for option in dataclasses.fields(MODEL_DATACLASS_REGISTRY[name])
        if not option.name.startswith("_") and not str(option.default).startswith("${")
    }
    model = {"_name": name, **{key: _plain(value) for key, value in {**defaults, **preset}.items()}}
    header = (
        f"# {arch} for fairseq-hydra-train, written by: fwp-info --hydra {arch}\n"
        "# @package _global_\n"
        "# The model is the architecture's; the rest is a start. To be set on the command line, with absolute paths:\n"
        "# task.data=FOLDER dataset.batch_size=96 optimization.max_update=500000\n"
    )
    config = {
        "common": {"user_dir": str(Path(fairseq_fwp.__file__).parent)},
        "task": {"_name": "language_modeling", "data": "???", "tokens_per_sample": 256, "sample_break_mode": "none"},
        "dataset": {"batch_size": "???"},
        "optimization": {"lr": [0.00025], "max_update": "???"},
        "model": model,
        "distributed_training": {"ddp_backend": "legacy_ddp"},  # adaptive_loss takes no other
        "criterion": {"_name": "adaptive_loss"},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
    }
    return header + yaml.safe_dump(config, sort_keys=False).rstrip()


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _settings(preset: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in preset.items())


if __name__ == "__main__":
    sys.exit(main())
