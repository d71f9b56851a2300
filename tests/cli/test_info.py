import re

import pytest
import yaml
from pairwise import looped

from fairseq_fwp.cli import flags, info
from fairseq_fwp.models.attention_options import flag
from fairseq_fwp.models.presets import PRESETS_OF_MODELS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

ARCHS = [(model, arch) for model, presets in PRESETS_OF_MODELS.items() for arch in presets]


def test_the_report_names_everything(capsys):
    """Each section has its own names: those of rules are the beginnings of architectures."""
    assert info.main([]) == 0
    sections = re.split(r"^(?=\w)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    found = {
        re.match(r"\w+( \w+)?", section)[0]: re.findall(r"^  (\S+)", section, re.MULTILINE) for section in sections
    }
    assert list(found) == ["versions", "devices", "kernels", "update rules", "feature maps", "architectures"]
    assert {"python", "torch"} <= {*found["versions"]} and {"fairseq", "fairseq-fixed"} & {*found["versions"]}
    assert {"cpu:", "cuda:"} == {*found["kernels"]}
    assert {*UPDATE_RULES} <= {*found["update rules"]} and {*FEATURE_MAPS} == {*found["feature maps"]}
    assert {*PRESETS_OF_MODELS, *(arch for _, arch in ARCHS)} <= {*found["architectures"]}


@looped("name, arch", [pair for pair in ARCHS if pair[0] != "fwp_transformer"])
def test_a_hydra_configuration_holds_the_preset(capsys, name, arch):
    info.main(["--hydra", arch])
    model = yaml.safe_load(capsys.readouterr().out)["model"]
    assert model["_name"] == name
    assert PRESETS_OF_MODELS[name][arch].items() <= model.items()


@pytest.mark.parametrize("arch", ["nonsense", "sum_mt_wmt14_en_de"])
def test_an_architecture_that_hydra_cannot_have_is_refused(capsys, arch):
    with pytest.raises(SystemExit) as stopped:
        info.main(["--hydra", arch])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "must be a language model for fairseq-hydra-train" in said and f"got '{arch}': train" in said


@looped("arch", [arch for _, arch in ARCHS] + ["delta_dpfp2_retrieval"])
def test_flags_of_an_architecture_have_its_values(capsys, monkeypatch, arch):
    monkeypatch.setenv("COLUMNS", "500")
    assert info.main(["--flags", arch]) == 0
    said = capsys.readouterr().out
    for name, value in flags.differences(arch).items():
        shown = "on" if value is True else value
        assert re.search(rf"^  {flag(name)} {shown}\s.*\[{flags.ARCH_MODEL_NAME_REGISTRY[arch]}:", said, re.M | re.S), (
            name
        )


def test_flags_without_an_architecture_are_the_page(capsys):
    info.main(["--flags"])
    assert capsys.readouterr().out == flags.page() + "\n"


def test_flags_of_an_unknown_architecture_name_the_nearest(capsys):
    with pytest.raises(SystemExit) as stopped:
        info.main(["--flags", "delta_wt103"])
    assert stopped.value.code == 2
    assert "--flags must be an architecture, got 'delta_wt103': nearest are delta_lm_wt103, " in capsys.readouterr().err
