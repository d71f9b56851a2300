"""The benchmarks: peers give correct results, rows are complete, and a failed test stops them."""

import importlib
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from fairseq_fwp import ops
from fairseq_fwp.modules.update_rules import UPDATE_RULES

BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"
PARTS = ("operators", "family", "rules", "training", "long", "generation", "eval_lm", "translation", "fwl")


@pytest.fixture
def load(monkeypatch):
    """Import a file of recipes/benchmarks, and forget it afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for path in BENCHMARKS.glob("*.py"):  # the driver has modules of the same names
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in [path.stem for path in BENCHMARKS.glob("*.py")]:
        sys.modules.pop(name, None)


def example(L, Dk=6, Dv=5):
    generator = torch.Generator().manual_seed(0)
    q, k, v, beta = (torch.randn(2, 3, L, d, generator=generator, dtype=torch.float64) for d in (Dk, Dk, Dv, 1))
    return [x.requires_grad_() for x in (q.softmax(-1), k.softmax(-1), v, beta.squeeze(-1).sigmoid())]


@pytest.mark.parametrize("L, chunk", [(1, 16), (40, 64), (50, 16), (64, 32)])
def test_peers_equal_the_reference(load, L, chunk):
    peers, tensors = load("peers"), example(L)
    expected = ops.delta_rule(*tensors, backend="reference")[0]
    gradients = torch.autograd.grad(expected.square().sum(), tensors)
    for peer in (
        peers.delta_loop,
        *(partial(peers.delta_chunkwise, chunk=chunk, inverse=name) for name in ("solve", "doubling")),
    ):
        actual = peer(*tensors)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual.square().sum(), tensors), gradients)


def test_step_peers_equal_the_reference(load):
    q, k, v, beta = (x.detach() for x in example(1))
    state = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    expected = ops.delta_rule(q, k, v, beta, state, backend="reference")
    for step in load("peers").STEPS.values():
        torch.testing.assert_close(step(q, k, v, beta, state.clone()), expected)


def test_a_wrong_contender_ends_everything(load):
    inputs = load("inputs")
    inputs.check("ours", inputs.call("delta"), "delta", (1, 2, 20, 8, 8), whole=True)
    with pytest.raises(SystemExit, match=r"^out of it at .* differs from the reference by 1.*: nothing is reported.$"):
        inputs.check("it", lambda *x: 1.1 * ops.delta_rule(*x)[0], "delta", (1, 2, 20, 8, 8))
    with pytest.raises(SystemExit, match="k of it at"):
        inputs.check(
            "it", lambda q, k, v, beta: ops.delta_rule(q, k.detach() + 0 * k, v, beta)[0], "delta", (1, 2, 9, 8, 8)
        )


def test_every_rule_of_a_layer_is_measured(load):
    rules = load("rules")
    assert set(rules.RULES) == set(UPDATE_RULES)
    for rule, form in rules.RULES.items():
        assert UPDATE_RULES[rule].operator is getattr(ops, f"{load('inputs').FORMS[form][0]}_rule")
        rules.prepare(rule, 3)()


def test_a_goal_needs_both_the_median_and_the_minima(load):
    record = load("record")
    goal = record.Goal("speed", "small", 5)
    assert record.goal_row(goal, (6.0, 5.5))[5] == "yes"
    assert record.goal_row(goal, (6.0, 4.9))[5] == "**no**"
    assert record.goal_row(goal._replace(at_most=True), (6.0, 4.9))[5] == "**no**"
    assert record.goal_row(goal, (6.0,))[3:6] == ["6.00", "-", "yes"]
    assert record.goal_row(goal, "not installed")[3:] == ["not available"] * 2 + ["not measured", "not installed"]


def test_what_is_compared(load):
    """It compares times or speeds, of the first kind that both have, or gives the reason why one is missing."""
    record = load("record")
    found, goal = record.Record(), record.Goal("a", "b")
    found.add("here", "training", "slow", [4.0, 6.0])
    found.add("here", "training", "fast", [1.0, 3.0])
    found.add("here", "training", "slow", [10.0], record.SPEED)
    found.add("here", "training", "fast", [30.0], record.SPEED)
    found.miss("there", "training", "slow", "needs more than 9 GB")
    keys = [("here", "training", name) for name in ("slow", "fast")]
    assert record.compare(found, goal, *keys)[3:5] == ["3.00", "4.00"]
    assert record.compare(found, goal, *keys, times=0.5)[3:5] == ["1.50", "2.00"]
    assert record.compare(found, goal, *keys, record.SPEED)[3:] == ["3.00", "-", "-", ""]
    assert record.compare(found, goal, *keys, ("seconds of a graph", record.SECONDS))[6] == record.SECONDS
    row = record.compare(found, goal, ("there", "training", "slow"), keys[1])
    assert row[5:] == ["not measured", "slow at there: needs more than 9 GB"]
    assert record.fastest(found, "here", "training", ["none", "slow", "fast"]) == "fast"


def test_contenders_take_turns(load):
    timing, calls = load("timing"), []
    contenders = {name: timing.Contender(partial(calls.append, name)) for name in "ab"}
    times = timing.interleave(contenders, 3, "test", at_least=0)
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}
    assert "".join(calls) == "aabb" + "aabb" * 3


def test_rounds_go_on_for_the_given_time(load):
    timing = load("timing")

    def rounds(pause, **options):
        contenders = {"a": timing.Contender(partial(time.sleep, pause))}
        return len(timing.interleave(contenders, 3, "test", at_least=0, **options)["a"])

    assert rounds(0.002, seconds=0.1) > 3
    assert rounds(0.03, seconds=0.05) == rounds(0.002) == 3
    assert timing.interleave({}, 3, "test", seconds=3600) == {}


@pytest.mark.parametrize("part", PARTS)
def test_the_committed_goals_are_those_of_the_committed_numbers(load, part):
    """So are the tables of RESULTS.md; its other text may be of an earlier day."""
    record, module = load("record"), load(part)
    found = record.Record.read(part)
    text = (BENCHMARKS / "results" / f"{part}.md").read_text(encoding="utf-8")
    assert text in (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    rows = [line for line in record.table(record.GOAL_HEADER, module.goals(found)).splitlines() if "not m" not in line]
    missing = [row for row in rows if row not in text]
    # The committed speeds of this part have fewer digits than its goals were computed from.
    assert not missing or (part == "eval_lm" and len(missing) == 2), missing
    assert all(isinstance(paragraph, str) for paragraph in module.paragraphs(found))


def test_a_peer_that_is_missing_has_its_rows(load):
    record, operators = load("record"), load("operators")
    found = record.Record.read("operators")
    found.rows = [row for row in found.rows if row[2] != operators.FAST]
    for where in operators.SHAPES:
        for stage in operators.PASSES:
            found.miss(where, stage, operators.FAST, "no compiler")
    rows = operators.goals(found)
    assert len([row for row in rows if row[-1].endswith("no compiler")]) == 8
    assert len(rows) == len(operators.goals(record.Record.read("operators")))


def test_speed_comes_from_the_updates_after_the_warm_up(load):
    training = load("training")
    log = "\n".join(f'x | INFO | train_inner | {{"epoch": 1, "wps": "{100 * i}"}}' for i in range(training.UPDATES))
    assert training.words_per_second(log) == 100 * (training.WARM_UP + training.UPDATES - 1) / 2
    with pytest.raises(SystemExit, match="nothing is reported"):
        training.words_per_second(log[: len(log) // 2])


def test_translation_is_measured_as_long_as_asked_for(load):
    translation = load("translation")
    found = translation.measure_alone("sum", 5, 12)
    assert found["seconds"] > 0 and found["bytes"] >= 0
    for name in translation.MODELS:
        translation.training_step(name)


def test_long_sequences_are_measured_for_both_models(load, monkeypatch):
    long = load("long")
    monkeypatch.setattr(long, "VOCABULARY", 300)
    monkeypatch.setattr(sys.modules["training"], "VOCABULARY", 300)
    monkeypatch.setattr(long, "CONTEXTS", (2, 4))
    monkeypatch.setattr(long, "limit_memory", lambda: 0)
    flags = {name: [flag.replace("10000", "300") for flag in given] for name, given in long.FLAGS.items()}
    monkeypatch.setattr(long, "FLAGS", flags)
    for name in long.MODELS:
        assert set(long.measure_step(name, 9)) == {"seconds", "bytes"}
        found = long.measure_decoding(name, 4)
        assert found["2"]["bytes"] * (1 if name == long.DELTA else 2) == found["4"]["bytes"] > 0


def test_results_go_between_their_marks(load, monkeypatch, tmp_path):
    record = load("record")
    monkeypatch.setattr(record, "HERE", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    (tmp_path / "RESULTS.md").write_text((BENCHMARKS / "RESULTS.md").read_text())
    goals = [record.goal_row(record.Goal("delta vs sum", "small", 5), (6.0, 5.5))]
    panels = [load("pictures").Bars("speed", "ratio")]
    for speed in ("run one", "run two"):
        record.publish("training", record.Record(), goals, speed, head="a machine", panels=panels)
    ledger = (tmp_path / "RESULTS.md").read_text()
    assert ledger.count("1 of 1 goals met") == 1 and "run two" in ledger and "run one" not in ledger
    assert all(f"<!-- {part}: end -->" in ledger for part in PARTS)
    assert (tmp_path / "results" / "training.png").stat().st_size > 5_000


def test_nothing_is_measured_after_a_failed_test(tmp_path):
    recipe = tmp_path / "recipes" / "benchmarks"
    recipe.mkdir(parents=True)
    for name in ("run.py", "record.py", "timing.py"):
        (recipe / name).write_text((BENCHMARKS / name).read_text())
    (recipe / "training.py").write_text("print('measured')")
    (tmp_path / "tests" / "laws").mkdir(parents=True)
    (tmp_path / "tests" / "laws" / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    command = [sys.executable, recipe / "run.py", "training"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr.endswith("the tests of the operators failed, so nothing is measured.\n")
    assert "measured" not in answer.stdout


def test_an_unknown_part_is_refused():
    answer = subprocess.run([sys.executable, BENCHMARKS / "run.py", "operator"], capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr == f"run.sh: the part must be one of {' '.join(PARTS)}, got 'operator'.\n"


def test_generation_with_a_cache_in_place_is_softmax_attention(load, monkeypatch):
    """Every model generates from a state of any length; one token's log-probabilities are measured."""
    generation = load("generation")
    monkeypatch.setattr(generation, "VOCABULARY", 20)
    cpu = torch.device("cpu")
    generation.check(cpu)
    for name in generation.NAMES:
        model = generation.build(name, cpu)
        assert generation.prepare(generation.MODEL, name, model, 2, 3)().shape == (2, 1, 20)
        of_layers = generation.prepare(generation.LAYERS, name, model, 2, 3)()
        assert [x.shape for x in of_layers] == 16 * [(2, 1, 128)]
    monkeypatch.setattr(generation.InPlaceAttention, "forward", lambda self, x, state, mask=None: (x, state))
    with pytest.raises(ValueError, match="must give the output of the copied cache, got another"):
        generation.check(cpu)
