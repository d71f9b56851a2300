"""Every YAML of every recipe is what fairseq's own parser accepts."""

from dataclasses import fields
from pathlib import Path

import lm_grid
import pytest
import yaml
from fairseq import options
from flags import read_flags

from fairseq_fwp.models.fwp_lm import FwpLanguageModelConfig

ROOT = Path(__file__).parents[2]
CONFS = sorted(path for path in ROOT.glob("recipes/*/conf/**/*.yaml") if path.name != "common.yaml")
GRID = ROOT / "recipes" / "peps" / "conf" / "grid"
GRID_ROWS = sorted(path for path in CONFS if path.parent == GRID)


def parse(flags):
    parser = options.get_training_parser()
    arguments = ["DATA", "--user-dir", str(ROOT / "fairseq_fwp"), "--task", "language_modeling", *flags]
    return options.parse_args_and_arch(parser, input_args=arguments)


@pytest.mark.parametrize("conf", CONFS, ids=lambda path: str(path.relative_to(ROOT / "recipes").with_suffix("")))
def test_conf_is_what_fairseq_accepts(conf):
    flags = read_flags(conf)
    assert parse(flags).arch == flags[flags.index("--arch") + 1]


@pytest.mark.parametrize("conf", GRID_ROWS, ids=lambda path: path.stem)
def test_row_of_the_grid_adds_to_its_preset_what_the_preset_does_not_say(conf):
    row = yaml.load(conf.read_text(), Loader=yaml.BaseLoader)
    arch, include = row.pop("arch"), row.pop("include")
    assert include == "common.yaml"
    common = ["--arch", arch, *read_flags(GRID / include)]
    defaults = {field.name: field.default for field in fields(FwpLanguageModelConfig)}  # of --arch fwp_lm
    settings, preset = (defaults | vars(parse(flags)) for flags in (read_flags(conf), common))
    assert {name.replace("-", "_") for name in row} == {name for name in settings if settings[name] != preset[name]}


def test_rows_of_the_grid_are_those_of_its_tables_and_all_different():
    runs = lm_grid.names(lm_grid.read_grid(GRID.parents[1] / "grid.yaml"))
    assert sorted(runs) == [f"grid/{conf.stem}" for conf in GRID_ROWS]
    rows = [tuple(sorted(vars(parse(read_flags(conf))).items(), key=str)) for conf in GRID_ROWS]
    assert all(str(row) != str(other) for i, row in enumerate(rows) for other in rows[:i])


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
