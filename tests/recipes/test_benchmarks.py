"""The benchmarks: peers give correct results, rows are complete, and a failed test stops them.

The benchmark of a GPU runs on the CPU at tiny sizes.
"""

import contextlib
import importlib
import multiprocessing
import os
import runpy
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from made_up import RECIPES, ROOT
from support import subjects

from fairseq_fwp import ops
from fairseq_fwp.modules.update_rules import UPDATE_RULES

BENCHMARKS = RECIPES / "benchmarks"
PYTHONPATH = os.pathsep.join(map(str, (ROOT, BENCHMARKS, ROOT / "tests")))  # as gpu.sh sets it
SHAPE, TRAINING, SDPA = "(1, 2, 24, 8, 8)", "forward + backward", "scaled_dot_product_attention"


@contextlib.contextmanager
def importing():
    """Give a function that imports a file of recipes/benchmarks, and forget these files afterwards."""
    names = [path.stem for path in BENCHMARKS.glob("*.py")]  # the driver has modules of the same names
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module
        torch.set_num_threads(threads)
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture
def load():
    with importing() as load:
        yield load


def example(L, Dk=6, Dv=5):
    generator = torch.Generator().manual_seed(0)
    q, k, v, beta = (torch.randn(2, 3, L, d, generator=generator, dtype=torch.float64) for d in (Dk, Dk, Dv, 1))
    return [x.requires_grad_() for x in (q.softmax(-1), k.softmax(-1), v, beta.squeeze(-1).sigmoid())]


@pytest.mark.parametrize("L, chunk", [(1, 16), (40, 64), (50, 16), (64, 32)])
def test_peers_equal_the_reference(load, L, chunk):
    peers, tensors = load("peers"), example(L)
    expected = ops.delta_rule(*tensors, backend="reference")[0]
    gradients = torch.autograd.grad(expected.square().sum(), tensors)
    for peer in (peers.delta_loop, partial(peers.delta_chunkwise, chunk=chunk)):
        actual = peer(*tensors)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual.square().sum(), tensors), gradients)
    token, state = [x[:, :, :1].detach() for x in tensors], torch.randn(2, 3, 6, 5, dtype=torch.float64)
    expected = ops.delta_rule(*token, state, backend="reference")
    torch.testing.assert_close(peers.step_in_place(*(x.contiguous() for x in token), state.clone()), expected)


def test_a_wrong_contender_ends_everything(load):
    inputs = load("inputs")
    inputs.check("ours", inputs.call("delta"), "delta", (1, 2, 20, 8, 8), whole=True)
    with pytest.raises(SystemExit, match=r"^out of it at .* differs from the reference by 1.*: nothing is reported.$"):
        inputs.check("it", lambda *x: 1.1 * ops.delta_rule(*x)[0], "delta", (1, 2, 20, 8, 8))
    without = partial(lambda q, k, v, beta: ops.delta_rule(q, k.detach() + 0 * k, v, beta)[0])
    with pytest.raises(SystemExit, match="k of it at"):
        inputs.check("it", without, "delta", (1, 2, 9, 8, 8))


def test_every_rule_of_a_layer_is_measured(load):
    rules = load("rules")
    assert set(rules.RULES) == set(UPDATE_RULES) - {"gdn2"}
    for rule, form in rules.RULES.items():
        assert UPDATE_RULES[rule].operation.name == f"{load('inputs').FORMS[form][0]}_rule"
        rules.prepare(rule, 3)()


def test_a_goal_needs_both_the_median_and_the_minima(load):
    goal = load("record").Goal("speed", "small", 5)
    assert goal.row((6.0, 5.5))[5] == "yes" and goal.row((6.0, 4.9))[5] == "**no**"
    assert goal._replace(at_most=True).row((6.0, 4.9))[5] == "**no**"
    assert goal.row((6.0,))[3:6] == ["6.00", "-", "yes"]
    assert goal.row("not installed")[3:] == ["not available"] * 2 + ["not measured", "not installed"]


def test_what_is_compared(load):
    """It compares times or speeds, of the first kind that both have, or gives the reason why one is missing."""
    record = load("record")
    found, goal = record.Record(), record.Goal("a", "b")
    for name, seconds, speed in (("slow", [4.0, 6.0], 10.0), ("fast", [1.0, 3.0], 30.0)):
        found.add("here", "training", name, seconds)
        found.add("here", "training", name, [speed], record.SPEED)
    found.miss("there", "training", "slow", "needs more than 9 GB")
    keys = [("here", "training", name) for name in ("slow", "fast")]
    assert record.compare(found, goal, *keys)[3:5] == ["3.00", "4.00"]
    assert record.compare(found, goal, *keys, times=0.5)[3:5] == ["1.50", "2.00"]
    assert record.compare(found, goal, *keys, record.SPEED)[3:] == ["3.00", "-", "-", ""]
    assert record.compare(found, goal, *keys, ("seconds of a graph", record.SECONDS))[6] == record.SECONDS
    row = record.compare(found, goal, ("there", "training", "slow"), keys[1])
    assert row[5:] == ["not measured", "slow at there: needs more than 9 GB"]
    assert record.fastest(found, "here", "training", ["none", "slow", "fast"]) == "fast"
    smallest = {(row[2], row[3]): row[5] for row in found.smallest()}
    assert smallest["slow", "seconds"] == 4.0 and smallest["slow", "not measured"] == "needs more than 9 GB"


def test_contenders_take_turns_for_the_given_time(load):
    timing, calls = load("timing"), []
    contenders = {name: timing.Contender(partial(calls.append, name)) for name in "ab"}
    times = timing.interleave(contenders, 3, "test", at_least=0)
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}
    assert "".join(calls) == "aaabbb" * 4  # two warm-up calls each

    def rounds(pause, **options):
        contenders = {"a": timing.Contender(partial(time.sleep, pause))}
        return len(timing.interleave(contenders, 3, "test", at_least=0, **options)["a"])

    assert rounds(0.002, seconds=0.1) > 3 and rounds(0.03, seconds=0.05) == rounds(0.002) == 3
    assert timing.interleave({}, 3, "test", seconds=3600) == {}


@pytest.mark.parametrize("part", ["operators", "family", "rules", "training", "generation"])
def test_files_and_goals_of_a_run(load, monkeypatch, tmp_path, capsys, part):
    """Every part has its goals, table and picture, from the committed times."""
    record, module = load("record"), load(part)
    found, ratios = record.Record.read(record.RESULTS / f"{part}.csv"), module.goals
    if part == "rules":  # one may be newer than the last run on the machine of the benchmarks
        measured = {name: form for name, form in module.RULES.items() if any(row[2] == name for row in found.rows)}
        monkeypatch.setattr(module, "RULES", measured)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    load("pictures").draw(tmp_path / f"{part}.png", found, ratios(found), module.PANELS)
    record.publish(part, found, ratios(found))
    assert (tmp_path / f"{part}.png").stat().st_size > 5_000 and "goals met; 0 not measured" in capsys.readouterr().out
    assert record.Record.read(tmp_path / f"{part}.csv").rows == [list(map(str, row)) for row in found.smallest()]
    committed = (BENCHMARKS / "results" / f"{part}_goals.csv").read_text().splitlines()
    assert len((tmp_path / f"{part}_goals.csv").read_text().splitlines()) == len(committed)


def test_nothing_is_measured_after_a_failed_test(load, monkeypatch):
    run, ran = load("run"), []
    monkeypatch.setattr(run, "run", lambda *command, **environment: ran.append(command) or 1)
    with pytest.raises(SystemExit, match="the tests of the operators failed, so nothing is measured"):
        run.main(["training"])
    ((_, _, pytest_, *tests),) = ran
    assert pytest_ == "pytest" and all(Path(path).exists() for path in tests[:2])
    with pytest.raises(SystemExit, match=r"the part must be one of operators family .*, got 'operator'"):
        run.main(["operator"])


def test_generation_with_a_cache_in_place_is_softmax_attention(load, monkeypatch):
    """Every model generates from a state of any length; one token's log-probabilities are measured."""
    generation = load("generation")
    monkeypatch.setattr(generation, "VOCABULARY", 20)
    generation.check()
    for name in generation.NAMES:
        model = generation.build(name)
        assert generation.prepare(generation.MODEL, name, model, 2, 3)().shape == (2, 1, 20)
        of_layers = generation.prepare(generation.LAYERS, name, model, 2, 3)()
        assert [x.shape for x in of_layers] == 16 * [(2, 1, 128)]
    monkeypatch.setattr(generation.InPlaceAttention, "forward", lambda self, x, state, mask=None: (x, state))
    with pytest.raises(ValueError, match="must give the output of the copied cache, got another"):
        generation.check()


# One GPU.


def one_fault(device):
    return {"gla_rule": "is off"}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The results of all parts after a check that one rule has failed, and of three tests that pass."""
    folder = tmp_path_factory.mktemp("out")
    (folder / "test_laws.py").write_text("def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass\n")
    with importing() as load, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FWP_TINY", "cpu")
        patch.setenv("FWP_COMMIT", "a1b2c3d")
        gpu = load("gpu")
        patch.setattr(gpu, "TESTS", [folder / "test_laws.py"])
        patch.setattr(gpu, "FORKS", multiprocessing.get_context("fork"))  # which have these settings, and the imports
        importlib.import_module("fairseq.trainer")
        small = load("inputs").leaves("delta", (1, 1, 3, 4, 4))
        load("inputs").training_step(ops.delta_rule, small, [torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 4, 4)])
        patch.setenv("PYTHONPATH", PYTHONPATH)
        patch.setattr(gpu.self_check, "find_faults", one_fault)
        patch.setattr(subjects, "WITH_KERNEL", ["delta", "delta_product"])
        for part in ("check", "kernels", "measure", "models", "laws"):
            gpu.PARTS[part](folder / f"gpu_{part}.csv", 3600, time.monotonic() + 3600)
    return folder


@pytest.mark.slow
def test_every_part_of_a_gpu(load, out):
    record = load("record").Record.read(out / "gpu_measure.csv")
    assert record.notes()["faults"] == "gla_rule: is off"  # and everything else was measured
    assert min(record.values("machine", "", "copy", "per second")) > 0
    names = [f"{form}, kernel" for form in load("inputs").FORMS if form != "fwm"]
    places = [("(2, 2, 1, 8, 8)", "decoding step", x) for x in names] + [(SHAPE, TRAINING, "delta, kernel, float32")]
    places += [(SHAPE, stage, x) for stage in (TRAINING, "forward") for x in (*names, SDPA)]
    assert {len(record.values(*place, "seconds as called")) for place in places} == {2}
    for kind in ("error", "error of all tokens"):
        assert 1e-4 < record.values(SHAPE, TRAINING, "delta, kernel", kind)[0] < 1e-2
        assert record.values(SHAPE, TRAINING, "delta, kernel, float32", kind)[0] < 1e-6
    why = record.values(SHAPE, TRAINING, "delta, fla", "seconds as called")
    assert "its first call: " in why and "tensors must be on a CUDA device" in why
    record = load("record").Record.read(out / "gpu_models.csv")
    names = "delta_lm_wt103", "softmax_lm_wt103_medium", "delta_lm_wt103, float32"
    places = [("2 x 16 tokens", "update", name) for name in names]
    for place in places:
        speeds, seconds = (record.values(*place, what) for what in ("words per second", "seconds as called"))
        assert speeds == pytest.approx([32 / x for x in seconds])
        assert record.values(*place, "seconds of kernels")[0] > 0
    places += [(context, "decoding step", "softmax_lm_wt103") for context in ("context 1", "context 9")]
    assert {len(record.values(*place, "seconds as called")) for place in places} == {2}
    record = load("record").Record.read(out / "gpu_kernels.csv")
    for form in load("inputs").FORMS:
        if form != "fwm":
            (whole,) = record.values(SHAPE, TRAINING, f"{form}, kernel", "seconds of kernels")
            parts = [float(row[5]) for row in record.rows if row[2].startswith(f"{form}, kernel: ")]
            assert 0 < max(parts) <= sum(parts) <= whole * (1 + 1e-6)
    notes = load("record").Record.read(out / "gpu_laws.csv").notes()
    assert notes["laws"].startswith("passed: 3 passed") and notes["memcheck"] and notes["racecheck"]


@pytest.mark.slow
def test_publish(load, out, tmp_path, monkeypatch, capsys):
    """The table comes from the CSVs of all calls. A failed check, or calls of two versions, are refused."""
    monkeypatch.setenv("FWP_TINY", "cpu")
    monkeypatch.setattr(load("record"), "RESULTS", tmp_path)
    publish = load("gpu").publish_all
    for part, old, new, refused in (
        ("laws", "passed: ", "failed: ", "nothing is published: laws failed: "),
        ("models", "a1b2c3d", "another", r"commit must be the same in all calls, got \['a1b2c3d', 'another'\]"),
    ):
        shutil.copytree(out, tmp_path / part)
        path = tmp_path / part / f"gpu_{part}.csv"
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(SystemExit, match=refused):
            publish(path.with_name("gpu_publish.csv"))
    publish(out / "gpu_publish.csv")
    shown = capsys.readouterr().out
    assert "commit a1b2c3d" in shown and "laws passed: " in shown and "faults gla_rule: is off" in shown
    for name in ("delta, kernel", "delta, kernel, float32", SDPA):
        place = f"| {SHAPE} | {TRAINING} | {name} | "
        cells = shown.partition(place)[2].split(" | ")
        assert cells[1] == "-" and float(cells[2]) > 0  # there are no graphs on a CPU
    assert "8 cases right, 0 lines of others" in shown
    assert f"| delta, fla vs delta, kernel | {SHAPE} | - | not available" in shown


@pytest.mark.slow
def test_the_check_of_every_rule(load, out):
    """Each has an error and the bits of three runs, in every dtype; what is not right is named."""
    gpu, record = load("gpu"), load("record").Record.read(out / "gpu_check.csv")
    assert gpu.verdicts(record) == ["8 cases right, 0 lines of others"]
    assert record.notes()["faults"] == "gla_rule: is off"
    record.add("(1,)", "torch.float32", "delta", [2e-4], "error")
    record.add("(1,)", "torch.float32", "delta", ["d_k"], "text")
    record.add("(2,)", "torch.float64", "delta", ["nan"], "error")
    record.add("(2,)", "torch.float64", "delta", ["out"], "text")
    record.add("(1,)", "torch.float32", "delta", [2], "runs of the same bits")
    record.miss("all shapes", "all dtypes", "gla", "it did not end in time")
    assert gpu.verdicts(record) == [
        "8 cases right, 4 lines of others",
        "delta at (1,) in torch.float32: error 2.0e-04 of d_k",
        "delta at (2,) in torch.float64: error nan of out",
        "delta at (1,) in torch.float32: 2 runs of the same bits",
        "gla at all shapes in all dtypes: it did not end in time not measured",
    ]


def test_a_check_that_does_not_end_is_the_only_one_to_blame(load, monkeypatch, tmp_path):
    gpu = load("gpu")
    monkeypatch.setenv("FWP_TINY", "cpu")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setattr(gpu, "GRACE", 0)
    assert gpu.check_apart({"sum": tmp_path / "sum"}, time.monotonic()) == {"sum": "it did not end in time"}
    found = gpu.check_apart({"sum": tmp_path / "sum", "never": tmp_path / "never"}, time.monotonic() + 99)
    assert found == {"never": "KeyError: 'never'"}
    assert gpu.verdicts(load("record").Record.read(tmp_path / "sum")) == ["4 cases right, 0 lines of others"]


def test_a_lease_runs_all_parts_and_fails_if_one_does(load, monkeypatch, tmp_path, capsys):
    gpu = load("gpu")
    assert all((ROOT / path).exists() for path in gpu.TESTS[:3])
    assert [*gpu.LEASE] == ["1", "2", "3"] and {part for parts in gpu.LEASE.values() for part in parts} < {*gpu.PARTS}
    assert sum(map(sum, (parts.values() for parts in gpu.LEASE.values()))) <= 800 - 100  # and a start, and transfers
    commands = []
    monkeypatch.setattr(gpu.subprocess, "call", lambda command: commands.append(command) or len(commands) % 2)
    with pytest.raises(SystemExit) as ended:
        gpu.lease(tmp_path / "gpu_lease.csv", "1")
    assert ended.value.code == 1 and "check ended with status 1\nkernels ended with status 0" in capsys.readouterr().out
    assert [command[6] for command in commands] == ["check", "kernels"]


def test_without_time_all_is_named(load, monkeypatch, tmp_path):
    monkeypatch.setenv("FWP_TINY", "cpu")
    session = load("gpu").Session(tmp_path / "gpu_measure.csv", 0)
    session.operators(TRAINING, ["delta"], torch.bfloat16)
    assert "no time was left for it" in session.record.values(SHAPE, TRAINING, "delta, kernel")


def test_the_cases_of_the_sanitizer_run(load, monkeypatch, capsys):
    monkeypatch.setenv("FWP_TINY", "cpu")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "cases"])
    load("record")
    runpy.run_path(BENCHMARKS / "gpu.py", run_name="__main__")
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) >= 31 and "(1, 2, 2100, 128, 128)" in shown and "nan" not in shown


def test_jobs_end_in_time_and_say_why(load):
    gpu = load("gpu")
    assert gpu.run({"works": (int, "1")}, 60) == {}  # the server of processes is there
    jobs = {"hangs": (time.sleep, 99), "fails": (abs, "x"), "works": (int, "1")}
    found = {"hangs": "TimeoutError()", "fails": """TypeError("bad operand type for abs(): 'str'")"""}
    assert gpu.run(jobs, 5, 3) == found


@pytest.mark.parametrize("index, bytes_us, flops_us", [(0, 16.5, 3.2), (1, 29, 11), (2, 173, 136), (3, 345, 381)])
def test_floors_are_those_of_the_arithmetic(load, index, bytes_us, flops_us):
    """The delta rule's training step in bfloat16 at 4.3 TB/s and 790 TFLOP/s, and a decoding step, by hand."""
    gpu, place = load("gpu"), ("delta", TRAINING, load("gpu").SHAPES[index], 2)
    assert 1e6 * gpu.least_seconds(*place, 4.3e12, 1e99) == pytest.approx(bytes_us, rel=0.04)
    assert 1e6 * gpu.least_seconds(*place, 1e99, 790e12) == pytest.approx(flops_us, rel=0.04)
    # Its state twice, and two bytes for each number of q, k, v, out and beta.
    assert gpu.least_seconds("delta", "decoding step", (2, 3, 1, 16, 8), 2, 1, 1e99) == 6 * (8 * 16 * 8 + 2 * 49)
