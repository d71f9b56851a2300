import pytest
import yaml
from pairwise import looped

from fairseq_fwp.cli import info
from fairseq_fwp.models.presets import PRESETS_OF_MODELS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

ARCHS = [(model, arch) for model, presets in PRESETS_OF_MODELS.items() for arch in presets]


def test_the_report_names_everything(capsys):
    assert info.main([]) == 0
    report = capsys.readouterr().out
    for name in (
        "python",
        "torch",
        "fairseq",
        "cpu",
        "cuda",
        *UPDATE_RULES,
        *FEATURE_MAPS,
        *PRESETS_OF_MODELS,
        *(arch for _, arch in ARCHS),
    ):
        assert f"\n  {name}" in report


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
    assert f"fairseq-hydra-train has no '{arch}': it trains language models" in capsys.readouterr().err
