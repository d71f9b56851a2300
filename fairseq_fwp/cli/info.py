"""fwp-info: versions, devices, kernels, and the tables of rules, maps, architectures and flags."""

import argparse
import dataclasses
import importlib.metadata
import platform
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_fwp.cli import make_parser, one_sentence

if TYPE_CHECKING:
    from fairseq_fwp.patches.options import Settings

PACKAGES = ("fairseq_fwp", "fairseq-fixed", "fairseq", "torch", "numpy", "omegaconf", "hydra-core")
TESTED_TORCH = (2, 15)  # the newest; docs/fairseq_on_current_python.md has the table


def parser() -> argparse.ArgumentParser:
    command = make_parser(__doc__)
    add = command.add_argument
    add("--build", action="store_true", help="build the kernels that can be built here first")
    add("--user-dir", metavar="FOLDER", help="a plug-in of yours, whose rules and maps are listed too")
    flags = "print only the flags of this architecture with their values; without ARCH the page docs/flags.md"
    add("--flags", metavar="ARCH", nargs="?", const="", help=flags)
    hydra = "print only a configuration for fairseq-hydra-train with this architecture of a language model"
    add("--hydra", metavar="ARCH", help=hydra)
    return command


def main(argv: list[str] | None = None) -> None:
    """Print the report, or what --flags or --hydra ask for. Exit status 2 for an unknown architecture."""
    command = parser()
    args = command.parse_args(argv)
    from fairseq_fwp.cli.loading import import_plugin

    try:
        import_plugin(args.user_dir)
        text = select(args)
    except ValueError as error:
        command.error(str(error))
    with one_sentence("fwp-info"):
        print(text.encode(errors="backslashreplace").decode())  # names of files and variables may be any bytes


def select(args: argparse.Namespace) -> str:
    """Return what is asked for. Raises ValueError for an unknown architecture."""
    from fairseq.models import ARCH_MODEL_INV_REGISTRY

    from fairseq_fwp.cli.flags import MODELS, flags_of, page

    if args.hydra:
        return hydra_yaml(args.hydra)
    if not args.flags:
        return report(args.build) if args.flags is None else page()
    architectures = [arch for model in MODELS for arch in ARCH_MODEL_INV_REGISTRY[model]]
    if args.flags not in architectures:
        nearest = ", ".join(get_close_matches(args.flags, architectures, 5, 0) or architectures)
        raise ValueError(f"--flags must be an architecture, got {args.flags!r}: nearest are {nearest}")
    return flags_of(args.flags)


def report(build: bool) -> str:
    """Versions, devices, kernels and tables as text."""
    import torch

    from fairseq_fwp.cli.flags import first_line
    from fairseq_fwp.models.attentions import ATTENTIONS
    from fairseq_fwp.models.presets import PRESETS_OF_MODELS
    from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
    from fairseq_fwp.modules.update_rules import UPDATE_RULES, find_rule

    devices = [f"cpu: {platform.machine()}, threads: {torch.get_num_threads()}"]
    for index in range(torch.cuda.device_count()):
        devices.append(f"cuda:{index}: {torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}")
    rules: dict[str, object] = {name: find_rule(name).operation for name in UPDATE_RULES}
    rules |= {name: kind.module for name, kind in ATTENTIONS.items() if kind.module.named_as_rule}
    architectures = []
    for model, presets in PRESETS_OF_MODELS.items():
        architectures.append(f"{model:28} the model without a preset")
        for name, preset in presets.items():
            architectures.append(f"{name:28} {', '.join(f'{key}={value}' for key, value in preset.items())}")
    sections = {
        "versions": versions(),
        "devices": devices,
        "kernels": kernels(build),
        "update rules (--decoder-update-rule)": [f"{name:13} {first_line(kind)}" for name, kind in rules.items()],
        "feature maps (--decoder-feature-map)": [f"{name:10} {first_line(of)}" for name, of in FEATURE_MAPS.items()],
        "architectures (--arch)": architectures,
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())


def versions() -> list[str]:
    """One line for Python and for each installed package that matters."""
    import torch

    lines = [f"{'python':14} {platform.python_version()}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name:14} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if (version := tuple(map(int, torch.__version__.split(".")[:2]))) > TESTED_TORCH:
        tested = ".".join(map(str, TESTED_TORCH))
        lines.append(f"torch {'.'.join(map(str, version))} is newer than {tested}, the newest that was tested")
    return lines


def kernels(build: bool) -> list[str]:
    """Say for each device whether its kernels are built, else why not, and which rules must not use them."""
    from fairseq_fwp.ops.kernels import DEVICES, kernel_status, load_kernels, self_check

    for device in DEVICES if build else ():
        if load_kernels(device).built and device in self_check.CHECKED:
            self_check.find_faults(device)
    lines = []
    for device, status in kernel_status().items():
        state = f"built, {status.path}" if status.built else f"not built: {status.reason}"
        lines.append(f"{device}: {state}" + (f"; {status.cure}" if status.cure else ""))
        for name, faults in self_check.read_faults(Path(status.path)).items() if status.path else ():
            verdict = "and not used for some rules" if faults else "all rules agree"
            lines.append(f"{device}: checked on {name}, {verdict}")
            lines += [f"{device}: not used for {rule}: {reason}" for rule, reason in faults.items()]
    return lines


def hydra_yaml(arch: str) -> str:
    """A preset for fairseq-hydra-train, which knows no architectures. Raises ValueError for one without a dataclass."""
    import yaml
    from fairseq.models import MODEL_DATACLASS_REGISTRY

    import fairseq_fwp
    from fairseq_fwp.models.presets import PRESETS_OF_MODELS
    from fairseq_fwp.patches.options import word

    configurable = [name for name in PRESETS_OF_MODELS if name in MODEL_DATACLASS_REGISTRY]
    models = {preset: name for name in configurable for preset in PRESETS_OF_MODELS[name]}
    if arch not in models:
        others = f"train others with fairseq-train; language models are {', '.join(sorted(models))}"
        raise ValueError(f"--hydra must be a language model for fairseq-hydra-train, got {arch!r}: {others}")
    defaults: Settings = {
        option.name: option.default
        for option in dataclasses.fields(MODEL_DATACLASS_REGISTRY[models[arch]])
        if not option.name.startswith("_") and not str(option.default).startswith("${")
    }
    settings = {**defaults, **PRESETS_OF_MODELS[models[arch]][arch]}
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
        "model": {"_name": models[arch], **{key: word(value) for key, value in settings.items()}},
        "distributed_training": {"ddp_backend": "legacy_ddp"},  # adaptive_loss takes no other
        "criterion": {"_name": "adaptive_loss"},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
    }
    return header + yaml.safe_dump(config, sort_keys=False).rstrip()


if __name__ == "__main__":
    main()
