"""Every YAML of every recipe is what fairseq's own parser accepts."""

from pathlib import Path

import pytest
from fairseq import options
from flags import read_flags

ROOT = Path(__file__).parents[2]
CONFS = sorted(path for path in ROOT.glob("recipes/*/conf/*.yaml") if path.name != "common.yaml")


@pytest.mark.parametrize("conf", CONFS, ids=lambda path: f"{path.parent.parent.name}/{path.stem}")
def test_conf_is_what_fairseq_accepts(conf):
    flags = read_flags(conf)
    parser = options.get_training_parser()
    arguments = ["DATA", "--user-dir", str(ROOT / "fairseq_fwp"), "--task", "language_modeling", *flags]
    parsed = options.parse_args_and_arch(parser, input_args=arguments)
    assert parsed.arch == flags[flags.index("--arch") + 1]


@pytest.mark.parametrize("recipe", ["quickstart", "peps"])
def test_models_of_a_comparison_differ_in_their_architecture_only(recipe):
    rest = {}
    for name in ("delta", "sum", "softmax"):
        flags = read_flags(ROOT / "recipes" / recipe / "conf" / f"{name}.yaml")
        at = flags.index("--arch")
        assert flags[at + 1] == f"{name}_lm_wt103"
        rest[name] = flags[:at] + flags[at + 2 :]
    assert rest["delta"] == rest["sum"] == rest["softmax"]


def test_values_are_passed_on_as_written(tmp_path):
    (tmp_path / "common.yaml").write_text("lr: 1e-3\nno-save: true\n")
    conf = tmp_path / "a.yaml"
    conf.write_text("include: common.yaml\nadam-betas: (0.9, 0.98)\n")
    assert read_flags(conf) == ["--lr", "1e-3", "--no-save", "--adam-betas", "(0.9, 0.98)"]


@pytest.mark.parametrize("text", ["", "- a\n", "a: [1\n", "a: {b: 1}\n", "a:\n", "a: false\n", "include: no.yaml\n"])
def test_what_is_not_flat_is_refused(tmp_path, text):
    conf = tmp_path / "a.yaml"
    conf.write_text(text)
    with pytest.raises(ValueError, match=r"\.yaml"):
        read_flags(conf)
