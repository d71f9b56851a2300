"""Every YAML of every recipe: fairseq's and this package's parsers accept it, and it agrees with the papers."""

import re
from dataclasses import fields
from itertools import pairwise

import evaluation
import made_up
import pytest
import torch
import yaml
from fairseq import options
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from flags import read_flags, read_yaml, value_of
from grids import problems, retrieval
from model import runs

from fairseq_fwp.checkpoints.linearize.initialisation import INITIALISATIONS
from fairseq_fwp.cli import convert, eval_lm
from fairseq_fwp.models.fwp_lm import FwpLanguageModelConfig
from fairseq_fwp.models.fwp_xl_lm import FwpXlLanguageModelConfig
from fairseq_fwp.modules.update_rules import UPDATE_RULES

RECIPES = made_up.RECIPES
GRIDS = ("associative_retrieval", "sequence_problems")
CONFS = sorted(
    path
    for path in RECIPES.glob("*/conf/**/*.yaml")
    if path.name != "common.yaml" and path.relative_to(RECIPES).parts[0] not in GRIDS
)
PRESETS = [path for path in CONFS if path.parent.name in ("grid", "carried") or "wikitext103" in str(path.parents[1])]


def parse(flags):
    parser = options.get_training_parser()
    task = [] if "--task" in flags else ["--task", "language_modeling"]  # the settings of the conversion
    plugin = ["--user-dir", str(made_up.ROOT / "fairseq_fwp")]
    return options.parse_args_and_arch(parser, input_args=["DATA", *plugin, *task, *flags])


def recipe_of(conf):
    return RECIPES / conf.relative_to(RECIPES).parts[0]


def name_of(conf):
    return str(conf.relative_to(recipe_of(conf) / "conf").with_suffix(""))


def test_confs_are_what_fairseq_accepts_and_say_their_task():
    assert len(CONFS) > 80
    for conf in CONFS:
        flags = read_flags(conf)
        assert parse(flags).arch == value_of(flags, "--arch"), conf
        assert "--task" in flags or recipe_of(conf).name in ("decay_finetune", "recurrent"), conf  # fwp-convert says it


def test_rows_add_to_their_preset_what_neither_that_nor_the_included_file_says():
    for conf in PRESETS:
        row = yaml.load(conf.read_text(), Loader=yaml.BaseLoader)
        arch, include = row.pop("arch"), row.pop("include")
        common = ["--arch", arch, *read_flags(conf.parent / include)]
        config = FwpXlLanguageModelConfig if ARCH_MODEL_NAME_REGISTRY[arch] == "fwp_xl_lm" else FwpLanguageModelConfig
        defaults = {field.name: field.default for field in fields(config)}  # of an architecture without a preset
        settings, preset = (defaults | vars(parse(flags)) for flags in (read_flags(conf), common))
        changed = {name for name in settings if settings[name] != preset[name]}
        assert {name.replace("-", "_") for name in row} == changed - {"batch_size_valid"}, conf  # that is --batch-size


@pytest.mark.parametrize("group", ["grid", "carried"])
def test_rows_of_the_papers_tables_are_those_of_confs_and_all_different(group):
    rows = runs(RECIPES / "peps" / f"{group}.yaml")
    confs = sorted((RECIPES / "peps" / "conf" / group).glob("*.yaml"))
    assert sorted(rows) == [conf.stem for conf in confs if conf.stem != "common"]
    flags = [tuple(read_flags(conf)) for conf in confs]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize("recipe", ["quickstart", "peps"])
def test_models_of_a_comparison_differ_in_their_architecture_only(recipe):
    rest = {}
    for name in ("delta", "sum", "softmax"):
        flags = read_flags(RECIPES / recipe / "conf" / f"{name}.yaml")
        at = flags.index("--arch")
        assert flags[at + 1] == f"{name}_lm_wt103"
        rest[name] = flags[:at] + flags[at + 2 :]
    assert rest["delta"] == rest["sum"] == rest["softmax"]


# How they are evaluated.

EVALUATED = [conf for conf in CONFS if (recipe_of(conf) / "evaluation.yaml").exists() and "wt103" not in conf.parts]


def asked(conf, value="1"):
    """Return the commands of fwp-eval-lm, one for each way of evaluation."""
    ways = evaluation.read_ways(recipe_of(conf) / "evaluation.yaml", name_of(conf))
    words = [way.flags.replace("@", given).split() for way in ways for given in way.values or (value,)]
    return [eval_lm.parser().parse_args(["DATA", "--path", "x.pt", *flags]) for flags in words]


def test_ways_of_evaluation_are_flags_and_settings_that_exist():
    for conf in EVALUATED:
        settings = vars(parse(read_flags(conf)))
        known = settings.keys() | FWL | {field.name for field in fields(FwpXlLanguageModelConfig)}
        for args in asked(conf):
            if recipe_of(conf).name in ("wikitext103", "enwik8"):
                assert args.carry_state == bool(settings.get("carry_state")), conf
            assert (args.model_overrides or {}).keys() <= known, conf


FWL = {f"fwl_{name}" for name in ("fast_weights", "divide_gradients_by", "decay", "step_size", "gradients_at")}


def test_state_sizes_of_table_4_are_the_papers():
    conf = RECIPES / "wikitext103" / "conf" / "carried" / "xl.yaml"
    sizes = []
    for args in asked(conf):
        segment = args.tokens_per_sample or 384
        sizes.append(round(2 * (args.model_overrides["mem_len"] + segment) * 256 * 16 / 1e6, 2))
    assert sizes == [0.13, 1.05, 2.10, 6.29]
    assert all(f"({size:.2f} M" in conf.read_text() for size in sizes)


# Conversion.


@pytest.fixture
def ablations():
    """Add the rules of the plug-in to the tables during a test."""
    import runpy

    saved = [(table, dict(table)) for table in (UPDATE_RULES, INITIALISATIONS)]
    yield runpy.run_path(str(RECIPES / "decay_finetune" / "mao_ablations" / "__init__.py"))
    for table, before in saved:
        table.clear()
        table.update(before)


@pytest.mark.parametrize("corpus", ["peps", "wikitext103", "gpt2"])
def test_rows_of_a_conversion_are_what_the_commands_take(corpus, ablations):
    """Targets differ; samples are as long in evaluation as in fine-tuning, and batches as large as stated."""
    folder = RECIPES / "decay_finetune"
    found = read_yaml(folder / "rows.yaml", plain=False)[corpus]
    targets = {}
    stages = found.get("stages", [])
    for row in found["rows"] + stages:
        assert "from" not in row or row["from"] in {other["run"] for other in stages}
        parser = convert.parser()
        args = parser.parse_args(["x.pt", "--source", "fwp-lm", "--out", "y", *row.get("target", "").split()])
        targets[row["run"]] = convert.read_attention("fwp_lm", parser, args)
        assert row["paper"].keys() <= set(found["measures"])
    kept = {"softmax", *(row["run"] for row in stages if "from" in row)}
    assert {name for name, target in targets.items() if target is None} <= kept
    of_tables = [targets[row["run"]] for row in found["rows"]]
    assert len(set(map(str, of_tables))) == len(of_tables)
    for measure in found["measures"]:
        split, context = measure.split()
        assert split in ("valid", "test") and 0 <= int(context) < found.get("tokens", 1024)
    flags = read_flags(folder / "conf" / corpus / "finetune.yaml")
    assert value_of(flags, "--tokens-per-sample", str(found.get("tokens"))) == str(found.get("tokens"))
    given = dict(pairwise(flags))  # fairseq makes batches multiples of 8 by default: 24 of 26
    assert int(given["--batch-size"]) % int(given.get("--required-batch-size-multiple", 8)) == 0


def test_ablations_are_the_equations(ablations):
    """Each rule agrees with its equation, from a state; without a sigmoid, gates may be outside (0, 1)."""
    q, k = torch.randn(2, 1, 2, 7, 3, dtype=torch.float64).unbind()
    v = torch.randn(1, 2, 7, 5, dtype=torch.float64)
    f, z = 2 * torch.randn_like(k), 2 * torch.randn_like(v)
    total = gated = plain = torch.zeros(1, 2, 3, 5, dtype=torch.float64)
    keys, found = torch.zeros(1, 2, 3, dtype=torch.float64), []
    for q_t, k_t, v_t, f_t, z_t in zip(*(x.unbind(2) for x in (q, k, v, f, z)), strict=True):
        write, kept = k_t.unsqueeze(-1) * v_t.unsqueeze(-2), f_t.unsqueeze(-1) * z_t.unsqueeze(-2)
        total, keys = total + write, keys + k_t
        gated, plain = kept * gated + (1 - kept) * write, kept * plain + write
        read = [(q_t.unsqueeze(-2) @ weights).squeeze(-2) for weights in (total, gated, plain)]
        found.append([read[0] / (q_t * keys).sum(-1, keepdim=True), *read[1:]])
    names = {"divided_sum": (), "decay_gated_write": (f, z), "decay_no_sigmoid": (f, z)}
    for (name, gates), expected in zip(names.items(), zip(*found, strict=True), strict=True):
        tensors, operator = (q, k, v, *gates), UPDATE_RULES[name].operation
        first, state = operator(*(x[:, :, :3] for x in tensors), None)
        rest, _ = operator(*(x[:, :, 3:] for x in tensors), state)
        torch.testing.assert_close(torch.cat([first, rest], 2), torch.stack(expected, 2))
    gate = UPDATE_RULES["decay_no_sigmoid"].gates[0]
    assert gate.activation(v).equal(v) and gate.bias(100).aminmax().max < 1


# Grids.


@pytest.mark.parametrize("kind, name", [(retrieval, "associative_retrieval"), (problems, "sequence_problems")])
def test_trainings_of_grids_are_valid_commands(tmp_path, kind, name):
    """fairseq's parser accepts them, one for all seeds and sizes."""
    for conf in (RECIPES / name / "conf").glob("*.yaml"):
        if conf.name != "common.yaml":
            words = ["--recipe", str(RECIPES / name), "--", "plan", "--conf", str(conf), "--out", str(tmp_path)]
            models = {re.sub(r",(seed|num-keys)=\d+|_\d+$", "", one.name): one for one in kind(words).trainings}
            for model in models.values():
                args = options.parse_args_and_arch(options.get_training_parser(), model.command[1:])
                asked = {"problem": model.about["problem"].partition(",")[0]} if kind is problems else model.about
                for flag in {"arch", "num-keys", "problem"} & asked.keys():
                    assert str(getattr(args, flag.replace("-", "_"))) == asked[flag]


def test_common_settings_of_retrieval_are_the_papers():
    common = read_yaml(RECIPES / "associative_retrieval" / "conf" / "common.yaml")
    assert (common["optimizer"], common["lr"], common["batch-size"]) == ("adam", "1e-3", "32")
