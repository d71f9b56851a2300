"""Every YAML of every recipe is what fairseq's own parser accepts."""

from dataclasses import fields
from pathlib import Path

import lm_grid
import lm_state
import pytest
import yaml
from fairseq import options
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from flags import read_flags

from fairseq_fwp.models.fwp_lm import FwpLanguageModelConfig
from fairseq_fwp.models.fwp_xl_lm import FwpXlLanguageModelConfig

ROOT = Path(__file__).parents[2]
# Lists of such files, which test_associative_grid.py and test_sequence_problems.py parse.
GRIDS = [ROOT / "recipes" / name / "conf" for name in ("associative_retrieval", "sequence_problems")]
CONFS = sorted(
    path for path in ROOT.glob("recipes/*/conf/**/*.yaml") if path.name != "common.yaml" and path.parent not in GRIDS
)
GRID = ROOT / "recipes" / "peps" / "conf" / "grid"
GRID_ROWS = sorted(path for path in CONFS if path.parent == GRID)


CORPORA = sorted(
    path for path in CONFS if path.relative_to(ROOT / "recipes").parts[0] in ("wikitext103", "enwik8")
) + sorted(path for path in CONFS if path.parent.name == "carried" and "peps" in path.parts)


def parse(flags):
    parser = options.get_training_parser()
    task = [] if "--task" in flags else ["--task", "language_modeling"]
    arguments = ["DATA", "--user-dir", str(ROOT / "fairseq_fwp"), *task, *flags]
    return options.parse_args_and_arch(parser, input_args=arguments)


@pytest.mark.parametrize("conf", CONFS, ids=lambda path: str(path.relative_to(ROOT / "recipes").with_suffix("")))
def test_conf_is_what_fairseq_accepts(conf):
    flags = read_flags(conf)
    assert parse(flags).arch == flags[flags.index("--arch") + 1]


@pytest.mark.parametrize("conf", GRID_ROWS + CORPORA, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_row_adds_to_its_preset_what_neither_that_nor_the_included_file_says(conf):
    row = yaml.load(conf.read_text(), Loader=yaml.BaseLoader)
    arch, include = row.pop("arch"), row.pop("include")
    common = ["--arch", arch, *read_flags(conf.parent / include)]
    config = FwpXlLanguageModelConfig if ARCH_MODEL_NAME_REGISTRY[arch] == "fwp_xl_lm" else FwpLanguageModelConfig
    defaults = {field.name: field.default for field in fields(config)}  # of an architecture without a preset
    settings, preset = (defaults | vars(parse(flags)) for flags in (read_flags(conf), common))
    changed = {name for name in settings if settings[name] != preset[name]}
    assert {name.replace("-", "_") for name in row} == changed - {"batch_size_valid"}  # which is --batch-size


def test_rows_of_table_4_in_small_are_those_of_its_confs():
    rows = lm_state.read_rows(GRID.parents[1] / "carried.yaml")
    confs = [f"carried/{path.stem}" for path in CORPORA if "peps" in path.parts]
    assert sorted(lm_state.names(rows)) == confs


@pytest.mark.parametrize("conf", CORPORA, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_header_names_the_paper_and_the_status(conf):
    header = conf.read_text().partition("\narch:")[0].splitlines()
    assert all(line.startswith("# ") for line in header)
    text = " ".join(header)
    assert ("Schlag et al. 2021" in text or "Dai et al. 2019" in text) and "Status: " in text


def test_rows_of_the_grid_are_those_of_its_tables_and_all_different():
    runs = lm_grid.names(lm_grid.read_grid(GRID.parents[1] / "grid.yaml"))
    assert sorted(runs) == [f"grid/{conf.stem}" for conf in GRID_ROWS]
    rows = [tuple(sorted(vars(parse(read_flags(conf))).items(), key=str)) for conf in GRID_ROWS]
    assert all(str(row) != str(other) for i, row in enumerate(rows) for other in rows[:i])


def test_the_ledger_of_the_grid_shows_the_numbers_of_its_file():
    results = lm_grid.read_csv(GRID.parents[1] / "results" / "grid.csv")
    lines = lm_grid.markdown(lm_grid.read_tables(results, lm_grid.read_grid(GRID.parents[1] / "grid.yaml")))
    assert "\n".join(lines).strip() in (GRID.parents[1] / "RESULTS.md").read_text()


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
