import pytest
import yaml

from fairseq_fwp.cli import info
from fairseq_fwp.models.presets import PRESETS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES


def test_the_report_names_everything(capsys):
    assert info.main([]) == 0
    report = capsys.readouterr().out
    for name in ("python", "torch", "fairseq", "cpu", "cuda", *UPDATE_RULES, *FEATURE_MAPS, *PRESETS):
        assert f"\n  {name}" in report


@pytest.mark.parametrize("arch", PRESETS)
def test_a_hydra_configuration_holds_the_preset(capsys, arch):
    info.main(["--hydra", arch])
    model = yaml.safe_load(capsys.readouterr().out)["model"]
    assert model["_name"] == "fwp_lm"
    assert PRESETS[arch].items() <= model.items()


def test_an_unknown_architecture_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        info.main(["--hydra", "nonsense"])
    assert stopped.value.code == 2
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
