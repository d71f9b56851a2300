"""The benchmarks: peers that compute the right thing, honest rows, and no numbers after a failed test."""

import importlib
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from fairseq_fwp import ops

BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a file of recipes/benchmarks, and undoes what importing it does to the environment."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for path in BENCHMARKS.glob("*.py"):  # the driver has modules of these names too
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    known = set(sys.modules)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def example(L, Dk=6, Dv=5):
    generator = torch.Generator().manual_seed(0)
    q, k, v, beta = (torch.randn(2, 3, L, d, generator=generator, dtype=torch.float64) for d in (Dk, Dk, Dv, 1))
    return [x.requires_grad_() for x in (q.softmax(-1), k.softmax(-1), v, beta.squeeze(-1).sigmoid())]


@pytest.mark.parametrize("inverse", ["solve", "doubling"])
@pytest.mark.parametrize("L, chunk", [(1, 16), (40, 64), (50, 16), (64, 32)])
def test_chunkwise_peer_equals_the_reference(load, L, chunk, inverse):
    check_peer(partial(load("peers").delta_chunkwise, chunk=chunk, inverse=inverse), L)


def test_loop_peer_equals_the_reference(load):
    check_peer(load("peers").delta_loop, 20)


def check_peer(peer, L):
    tensors = example(L)
    expected, actual = ops.delta_rule(*tensors, backend="reference")[0], peer(*tensors)
    torch.testing.assert_close(actual, expected)
    gradients = (torch.autograd.grad(out.square().sum(), tensors) for out in (actual, expected))
    torch.testing.assert_close(*gradients)


def test_step_peers_equal_the_reference(load):
    q, k, v, beta = (x.detach() for x in example(1))
    state = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    expected = ops.delta_rule(q, k, v, beta, state, backend="reference")
    for step in load("peers").STEPS.values():
        torch.testing.assert_close(step(q, k, v, beta, state.clone()), expected)


def test_a_goal_needs_both_the_median_and_the_minima(load):
    report = load("report")
    goal = report.Goal("speed", "small", 5)
    assert report.goal_row(goal, (6.0, 5.5))[5] == "yes"
    assert report.goal_row(goal, (6.0, 4.9))[5] == "**no**"
    assert report.goal_row(goal._replace(at_most=True), (6.0, 4.9))[5] == "**no**"
    assert report.goal_row(goal, "not installed")[3:] == ["not available"] * 2 + ["not measured", "not installed"]


def test_contenders_take_turns(load):
    report, calls = load("report"), []
    contenders = {name: report.Contender(partial(calls.append, name)) for name in "ab"}
    contenders["missing"] = report.Contender(None)
    times = report.interleave(contenders, 3, "test", at_least=0)
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}
    assert "".join(calls) == "aabb" + "aabb" * 3
    assert report.fastest(times, ["missing"]) is None


def test_rounds_go_on_for_the_given_time(load):
    report = load("report")

    def rounds(pause, **options):
        contenders = {"a": report.Contender(partial(time.sleep, pause))}
        return len(report.interleave(contenders, 3, "test", at_least=0, **options)["a"])

    assert rounds(0.002, seconds=0.1) > 3
    assert rounds(0.03, seconds=0.05) == rounds(0.002) == 3
    assert report.interleave({"missing": report.Contender(None)}, 3, "test", seconds=3600) == {}


def test_a_peer_that_is_missing_has_its_rows(load):
    operators = load("operators")
    found = operators.forms() | {"sum, fast-transformers": ("no compiler", "", None)}
    times = {name: [1.0, 2.0] for name in found if not isinstance(found[name][0], str)}
    times |= {f"{name}, 2 threads": [0.5, 1.0] for name in ("sum", "delta")}
    times |= {name: [1.0, 2.0] for name in operators.pairs_of_products()}
    rows = operators.shape_rows("1k", dict.fromkeys(operators.PASSES, times), found)
    assert [row[0] for row in rows if row[-1] == "no compiler"] == [
        "sum vs fast-transformers, forward",
        "sum vs fast-transformers, forward + backward",
    ]
    assert next(row for row in rows if row[0].startswith("two threads over one, delta"))[3:6] == ["2.00", "2.00", "yes"]
    assert next(row for row in rows if row[0] == "two threads over one, products of their own")[3:6] == [
        "1.00",
        "1.00",
        "-",
    ]
    everywhere = dict.fromkeys(operators.SHAPES, dict.fromkeys(operators.PASSES, times))
    assert not {row[0] for row in operators.contender_rows(everywhere)}.intersection(operators.PAIRS)


def test_speed_comes_from_the_updates_after_the_warm_up(load):
    training = load("training")
    log = "\n".join(f'x | INFO | train_inner | {{"epoch": 1, "wps": "{100 * i}"}}' for i in range(training.UPDATES))
    assert training.words_per_second(log) == 100 * (training.WARM_UP + training.UPDATES - 1) / 2
    with pytest.raises(SystemExit, match="nothing is reported"):
        training.words_per_second(log[: len(log) // 2])


def test_what_was_stopped_says_where_and_why(load):
    long = load("long")
    results = {("step", "a", 1): [{"stopped": "needs more than 9 GB"}], ("step", "b", 1): [{"seconds": 1, "bytes": 1}]}
    row = long.compare(results, load("report").Goal("a", "b"), *results, "seconds")
    assert row[5:] == ["not measured", "a at 1: needs more than 9 GB"]


def test_translation_is_measured_as_long_as_asked_for(load):
    translation = load("translation")
    found = translation.generate("sum", source_length=5, target_length=12)
    assert found["seconds"] > 0 and found["bytes"] >= 0
    steps = {name: translation.training_step(name) for name in translation.MODELS}
    assert list(steps) == ["sum", "favor", "dpfp", "delta_dpfp", "softmax"]
    results = {
        (side, name, length): [{"seconds": length * (1 + repetition), "bytes": 10} for repetition in range(2)]
        for side in ("target", "source")
        for name in translation.GENERATE
        for length in translation.LENGTHS
    }
    results["target", "softmax", 4096] = [{"stopped": "takes more than 200 s"}] * 2
    rows = translation.goal_rows(results, {name: [1.0, 2.0] for name in translation.MODELS})
    by_name = {(row[0], row[1]): row[3:6] for row in rows}
    assert by_name["sum, growth of time per token", "target 64 -> 4096 tokens"] == ["1.00", "1.00", "yes"]
    assert by_name["softmax, growth of time per token", "target 64 -> 4096 tokens"][2] == "not measured"
    assert by_name["softmax over delta_dpfp, time", "source of 4096 tokens"][0] == "1.00"


def test_results_go_between_their_marks(load, monkeypatch, tmp_path):
    report = load("report")
    monkeypatch.setattr(report, "HERE", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    (tmp_path / "RESULTS.md").write_text((BENCHMARKS / "RESULTS.md").read_text())
    goals = [report.goal_row(report.Goal("speed", "small", 5), (6.0, 5.5))]
    for speed in ("run one", "run two"):
        report.publish("training", ["speed"], [[speed]], goals, speed)
    ledger = (tmp_path / "RESULTS.md").read_text()
    assert ledger.count("1 of 1 goals met") == 1 and "run two" in ledger and "run one" not in ledger
    assert all(
        f"<!-- {part}: end -->" in ledger
        for part in ("operators", "rules", "training", "long", "generation", "eval_lm", "translation", "fwl")
    )


def test_nothing_is_measured_after_a_failed_test(tmp_path):
    recipe = tmp_path / "recipes" / "benchmarks"
    recipe.mkdir(parents=True)
    (recipe / "run.sh").write_text((BENCHMARKS / "run.sh").read_text())
    (recipe.parent / "env.sh").write_text(f'root={tmp_path}\nrun() {{ "$@"; }}\n')
    (recipe / "training.py").write_text("print('measured')")
    (tmp_path / "tests" / "ops").mkdir(parents=True)
    (tmp_path / "tests" / "ops" / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    answer = subprocess.run(["bash", recipe / "run.sh", "training"], cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr.endswith("the tests of the operators failed, so nothing is measured.\n")
    assert "measured" not in answer.stdout


def test_an_unknown_part_is_refused():
    answer = subprocess.run(["bash", BENCHMARKS / "run.sh", "operator"], capture_output=True, text=True)
    assert answer.returncode == 1
    assert (
        answer.stderr
        == "run.sh: there is no part 'operator': choose from operators family rules training long generation eval_lm "
        "translation fwl.\n"
    )


def test_generation_with_a_cache_in_place_is_softmax_attention(load, monkeypatch):
    """And every model generates from a state of any length; what is measured is one token's log-probabilities."""
    generation = load("generation")
    monkeypatch.setattr(generation, "VOCABULARY", 20)
    cpu = torch.device("cpu")
    generation.check(cpu)
    for name in generation.NAMES:
        model = generation.build(name, cpu)
        assert generation.prepare("model", name, model, 2, 3)().shape == (2, 1, 20)
        of_layers = generation.prepare("layers", name, model, 2, 3)()
        assert [x.shape for x in of_layers] == 16 * [(2, 1, 128)]
    monkeypatch.setattr(generation.InPlaceAttention, "forward", lambda self, x, state, mask=None: (x, state))
    with pytest.raises(ValueError, match="computes something else"):
        generation.check(cpu)


def test_rows_of_generation(load):
    generation = load("generation")
    speed = {"decay": 1, "delta": 2, "softmax": 10, "softmax, cache in place": 5}
    cases = list(product(speed, generation.SEQUENCES, generation.CONTEXTS))
    seconds = {(what, *case): [speed[case[0]] * 1.0] * 2 for what in generation.WHERE for case in cases}
    used = {case: speed[case[0]] * case[2] for case in cases}
    rows = {row[0]: row for row in generation.goal_rows("cpu", seconds, used)}
    assert {row[1].split(", ")[1] for row in generation.goal_rows("cpu", seconds, used)} == {"1 at once", "8 at once"}
    assert rows["time of a token, softmax vs decay, whole model"][2:6] == [">= 5", "10.00", "10.00", "yes"]
    assert rows["time of a token, softmax vs decay, attention layers alone"][5] == "**no**"
    assert rows["decay, growth of peak memory, whole model"][3:6] == ["1.00", "-", "yes"]  # less than a page or two
    assert rows["decay, growth of the time of a token, whole model"][5] == "yes"
