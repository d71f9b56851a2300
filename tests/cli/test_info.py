import re

import torch
import yaml
from support.pairwise import looped
from support.refusals import refused

from fairseq_fwp.cli import flags, info
from fairseq_fwp.models.presets import PRESETS_OF_MODELS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.ops import kernels
from fairseq_fwp.ops.kernels import library, self_check
from fairseq_fwp.patches.options import flag

ARCHS = [(model, arch) for model, presets in PRESETS_OF_MODELS.items() for arch in presets]


def test_the_report_names_everything(capsys):
    """Each section has its own names: those of rules are the beginnings of architectures."""
    info.main([])
    sections = re.split(r"^(?=\w)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    named = ((re.match(r"\w+( \w+)?", part)[0], re.findall(r"^  (\S+)", part, re.MULTILINE)) for part in sections)
    found = dict(named)
    assert list(found) == ["versions", "devices", "kernels", "update rules", "feature maps", "architectures"]
    assert {"python", "torch"} <= {*found["versions"]} and {"fairseq", "fairseq-fixed"} & {*found["versions"]}
    assert {"cpu:", "cuda:"} == {*found["kernels"]}
    assert {*UPDATE_RULES} <= {*found["update rules"]} and {*FEATURE_MAPS} == {*found["feature maps"]}
    assert {*PRESETS_OF_MODELS, *(arch for _, arch in ARCHS)} <= {*found["architectures"]}


def test_rules_whose_kernels_are_wrong_are_named(monkeypatch):
    faults = {}
    monkeypatch.setattr(kernels, "kernel_status", lambda: {"cpu": kernels.KernelStatus(True, "kernels.so")})
    monkeypatch.setattr(kernels, "load_kernels", lambda device: kernels.KernelStatus(device == "cpu"))
    monkeypatch.setattr(self_check, "CHECKED", ("cpu",))
    monkeypatch.setattr(self_check, "find_faults", lambda device: faults.update(cpu={"delta_rule": "q is off by 1"}))
    monkeypatch.setattr(self_check, "read_faults", lambda path: faults)
    assert info.kernels(build=False) == ["cpu: built, kernels.so"]
    checked = "cpu: checked on cpu, and not used for some rules"
    assert info.kernels(build=True)[1:] == [checked, "cpu: not used for delta_rule: q is off by 1"]


def test_names_that_are_no_text_are_printed(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "\udcff")
    monkeypatch.setattr(library, "_statuses", {})
    info.main([])
    assert "there is no C++ compiler (\\udcff is" in capsys.readouterr().out


def test_a_newer_torch_than_the_tested_one_is_named(monkeypatch):
    lines = []
    for version in ("2.9.1", "2.15.1+cu130", "2.16.0a0+git1", "3.0.0"):
        monkeypatch.setattr(torch, "__version__", version)
        lines.append(info.versions()[-1])
    assert not [line for line in lines[:2] if "tested" in line]
    assert lines[2] == "torch 2.16 is newer than 2.15, the newest that was tested" and "torch 3.0 " in lines[3]


@looped("name, arch", [pair for pair in ARCHS if pair[0] != "fwp_transformer"])
def test_a_hydra_configuration_holds_the_preset(capsys, name, arch):
    info.main(["--hydra", arch])
    model = yaml.safe_load(capsys.readouterr().out)["model"]
    assert model["_name"] == name
    assert PRESETS_OF_MODELS[name][arch].items() <= model.items()


REFUSALS = [
    ("--hydra", "nonsense", "must be a language model for fairseq-hydra-train.* got 'nonsense': train"),
    ("--hydra", "sum_mt_wmt14_en_de", "must be a language model for .* got 'sum_mt_wmt14_en_de': train"),
    ("--flags", "delta_wt103", "--flags must be an architecture, got 'delta_wt103': nearest are delta_lm_wt103, "),
]


@looped("asks, arch, says", REFUSALS)
def test_refusals(asks, arch, says):
    refused(info.main, asks, arch, says=says)


@looped("arch", [arch for _, arch in ARCHS] + ["delta_dpfp2_retrieval"])
def test_flags_of_an_architecture_have_its_values(capsys, monkeypatch, arch):
    monkeypatch.setenv("COLUMNS", "500")
    info.main(["--flags", arch])
    said = capsys.readouterr().out
    for name, value in flags.differences(arch).items():
        shown = "on" if value is True else value
        row = rf"^  {flag(name)} {shown}\s.*\[{flags.ARCH_MODEL_NAME_REGISTRY[arch]}:"
        assert re.search(row, said, re.M | re.S), name


def test_flags_without_an_architecture_are_the_page(capsys):
    info.main(["--flags"])
    assert capsys.readouterr().out == flags.page() + "\n"
