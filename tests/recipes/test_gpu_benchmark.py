"""The benchmark of a GPU, as far as it goes without one: calls on a pretended GPU by a pretended clock, checks,
refusals, records, goals, floors, tables, pictures, peers."""

import csv
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from fairseq_fwp import ops

BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"
RATES = (4.3e12, 790e12)


@pytest.fixture(autouse=True)
def scripts(monkeypatch, tmp_path):
    """Make the benchmarks' files importable, and forget them and the peers after a test."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for path in BENCHMARKS.glob("*.py"):  # the driver has modules of the same names
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith((str(BENCHMARKS), str(tmp_path))):
            del sys.modules[name]


@pytest.fixture
def gpu(monkeypatch):
    """gpu.py with its contenders on the CPU, and calls that take a millisecond."""
    import gpu

    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "Clock", CallOnce)
    monkeypatch.setattr(gpu, "replay_of", lambda call: None)
    monkeypatch.setattr(gpu, "peak_bytes", lambda call: 7)
    monkeypatch.setattr(gpu.Session, "rates", lambda session: None)
    return gpu


@pytest.fixture
def report():
    import gpu_report

    return gpu_report


class CallOnce:
    """A stand-in for the clock: a call runs, and takes a millisecond."""

    def round(self, call):
        call()
        return 1e-3


def new_record():
    from record import Record

    return Record()


def new_session(gpu, seconds=60, part="ours", found=None):
    return gpu.Session(new_record(), time.monotonic() + seconds, found or gpu.contenders(part))


@pytest.fixture
def full(report):
    """Return a record in which every goal is just met."""
    found = new_record()
    for name, text in (("GPU", "NVIDIA H200"), ("driver", "580.1"), ("fla-core", "0.6.0")):
        found.note(name, text)
    for name, rate in zip(("copy", "product"), RATES, strict=True):
        found.add("machine", "", name, [rate * 0.9, rate], "per second")
    for _, where, stage, slower, faster, bound, kind in report.comparisons():
        kind = report.GRAPH if isinstance(kind, tuple) else kind
        for name, value in ((slower, (0.99 if kind == report.BYTES else 1.01) * (bound or 1)), (faster, 1.0)):
            if isinstance(found.values(where, stage, name, kind), str):
                found.add(where, stage, name, [1 / value if kind == report.SPEED else value * 1e-3] * 2, kind)
    for context in (report.CONTEXTS[0], report.CONTEXTS[-1]):
        for name in ("delta", "delta_lm_wt103"):
            if isinstance(found.values(report.context_of(context), report.STEP, name, report.GRAPH), str):
                found.add(report.context_of(context), report.STEP, name, [1e-3] * 2, report.GRAPH)
    return found


def verdicts(rows):
    """Return {(ratio, where): (met, note)} of the rows with a goal."""
    return {(row[0], row[1]): (row[5], row[6]) for row in rows if row[2] != "-"}


def test_goals_are_met_or_missed(report, full):
    found = verdicts(report.goals(full))
    assert len(found) == 16 and {met for met, _ in found.values()} == {"yes"}, found
    for row in full.rows:
        if row[:4] == [str(report.SHAPES[0]), report.TRAINING, "FLA delta", report.GRAPH]:
            row[5] *= 0.9
    missed = [key for key, (met, _) in verdicts(report.goals(full)).items() if met == "**no**"]
    assert missed == [("delta vs FLA, forward + backward", str(report.SHAPES[0]))]


def test_what_was_not_measured_says_why(report):
    empty = new_record()
    assert {met for met, _ in verdicts(report.goals(empty)).values()} == {"not measured"}
    shape = report.SHAPES[0]
    empty.add(shape, report.TRAINING, "delta", [1.0], report.GRAPH)
    empty.miss(shape, report.TRAINING, "FLA delta", "fla-core is not installed")
    found = verdicts(report.goals(empty))["delta vs FLA, forward + backward", str(shape)]
    assert found == ("not measured", f"FLA delta at {shape}: fla-core is not installed")
    assert "no rates" in report.provenance(empty)
    assert "fla-core is not installed" in "".join(report.paragraphs(empty))


def test_times_are_compared_like_with_like(report, full):
    """A peer that cannot be captured is compared as called from Python."""
    place = str(report.SHAPES[0]), report.TRAINING
    full.rows = [row for row in full.rows if row[:4] != [*place, "FLA delta", report.GRAPH]]
    for name, seconds in (("FLA delta", 4.0), ("delta", 1.0)):
        full.add(*place, name, [seconds] * 2, report.CALLED)
    found = verdicts(report.goals(full))["delta vs FLA, forward + backward", str(report.SHAPES[0])]
    assert found == ("yes", report.CALLED)


def test_tables_and_pictures_come_from_the_csv_alone(report, full, monkeypatch, tmp_path):
    import record
    from pictures import draw

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for n in report.SWEEP:
        full.add(f"{n} tokens", report.TRAINING, "delta", [1e-3], report.GRAPH)
    record.write_csv("gpu", record.Record.HEADER, full.rows)
    again = record.Record.read("gpu")
    assert report.paragraphs(again) == report.paragraphs(full) and report.goals(again) == report.goals(full)
    assert report.provenance(again) == report.provenance(full)
    assert report.provenance(full).startswith("GPU NVIDIA H200, driver 580.1, fla-core 0.6.0, copy 4.30 TB/s")
    text = "".join(report.paragraphs(full))
    assert f"| {report.SHAPES[0]} | forward + backward | FLA delta | 3030.0 |" in text
    draw(tmp_path / "gpu.png", full, report.goals(full), report.PANELS)
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("index", "bytes_us", "flops_us"), [(0, 16.5, 3.2), (1, 29, 11), (2, 173, 136), (3, 345, 381)], ids=str
)
def test_floors_are_those_of_the_arithmetic(report, index, bytes_us, flops_us):
    """The floor of the delta rule's training step in bfloat16 at 4.3 TB/s and 790 TFLOP/s, computed by hand."""
    shape = report.SHAPES[index]
    moved = report.bytes_moved("delta", shape, report.TRAINING, 2) / RATES[0]
    assert moved * 1e6 == pytest.approx(bytes_us, rel=0.04)
    assert report.chunk_flops(shape) / RATES[1] * 1e6 == pytest.approx(flops_us, rel=0.04)
    floor = report.floor("delta", shape, report.TRAINING, RATES)
    assert floor == pytest.approx(max(bytes_us, flops_us) / 1e6, rel=0.04)
    assert report.floor("sum float32", shape, report.FORWARD, RATES) > report.floor("sum", shape, report.FORWARD, RATES)
    # A step: its state twice, and two numbers of bfloat16 for each of q, k, v and out, and beta.
    assert report.bytes_moved("delta", (2, 3, 1000, 16, 8), report.STEP, 2) == 2 * 3 * (2 * 4 * 16 * 8 + 2 * 49)


# ---- stand-ins for the peers: the reference in their layout


def module(monkeypatch, name, **content):
    for i in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:i])
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    sys.modules[name].__dict__.update(content)


def swapped(x):
    return x.transpose(1, 2)


def test_fla_is_called_in_its_own_layout(gpu, monkeypatch):
    def chunk_delta_rule(q, k, v, beta, scale):
        return swapped(scale * ops.delta_rule(*map(swapped, (q, k, v, beta)), backend="reference")[0]), None

    def chunk_linear_attn(q, k, v, scale, normalize):
        assert not normalize
        return swapped(scale * ops.sum_rule(*map(swapped, (q, k, v)), backend="reference")[0]), None

    found = gpu.contenders("peers")
    module(monkeypatch, "fla.ops.delta_rule", chunk_delta_rule=chunk_delta_rule)
    assert gpu.usable(found["FLA delta"], (1, 2, 20, 8, 8))
    module(monkeypatch, "fla.ops.linear_attn", chunk_linear_attn=chunk_linear_attn)
    assert gpu.usable(found["FLA sum"], (1, 2, 20, 8, 8))


DELTA = """
import os
from fairseq_fwp import ops
assert os.path.exists("utils/fast_fast_weight/__init__.py")  # the published one compiles by this path
def fast_weight_memory(q, k, v, beta, state):
    return ops.delta_rule(q, k, v, beta.squeeze(-1), state, backend="reference")[0]
"""
DECAY = """
from fairseq_fwp import ops
class LFWFunction:
    @staticmethod
    def apply(value, value_decay, q, k, key_decay, state):
        one_head = (x.unsqueeze(1) for x in (q, k, value, key_decay, value_decay))
        return [x.squeeze(1) for x in ops.decay_rule(*one_head, state.mT.unsqueeze(1), backend="reference")]
"""


def test_published_kernels_are_called_in_their_own_layout(gpu, tmp_path):
    before = os.getcwd(), list(sys.path)
    for path, text in (("utils/fast_fast_weight/__init__.py", DELTA), ("t2fw/functional_lfw.py", DECAY)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    found = gpu.contenders("peers", tmp_path, tmp_path)
    for name in ("published delta", "published decay"):
        assert gpu.usable(found[name], (1, 3, 20, 8, 6))
    assert (os.getcwd(), sys.path) == before


def test_a_peer_that_cannot_be_measured_says_why(gpu, monkeypatch, tmp_path):
    from gpu_peers import Missing

    monkeypatch.setitem(sys.modules, "fla", None)
    shape = (1, 1, 4, 8, 8)
    (tmp_path / "t2fw").mkdir()
    (tmp_path / "t2fw" / "functional_lfw.py").write_text("raise RuntimeError('nvcc\\nis old')")
    found = gpu.contenders("peers", tmp_path / "nowhere", tmp_path)
    for name, reason in (
        ("FLA delta", "fla-core is not installed"),
        ("published delta", "FWP_DELTA_PEER must be a folder, got .*nowhere"),
        ("published decay", "nvcc$"),
    ):
        with pytest.raises(Missing, match=reason):
            gpu.usable(found[name], shape)
    with pytest.raises(Missing, match="FWP_DECAY_PEER must be the folder of its checkout, got none"):
        gpu.usable(gpu.contenders("peers")["published decay"], shape)


@pytest.mark.parametrize("head", [0, 5])
def test_a_wrong_peer_is_not_measured_and_a_wrong_kernel_is_marked(gpu, report, head):
    """A peer may be wrong at the first or last head: it gets the whole shape."""
    from gpu_peers import Missing

    def wrong(*x):
        out = ops.delta_rule(*x)[0]
        assert out.shape == (2, 3, 20, 8)
        return out * torch.ones(6).index_fill(0, torch.tensor([head]), 1.5).view(2, 3, 1, 1)

    contender = gpu.Contender("delta", lambda: wrong)
    with pytest.raises(Missing, match="its out differs from the float64 reference by 2"):
        gpu.usable(contender, (2, 3, 20, 8, 8))
    shape, session = (2, 3, 20, 8, 8), new_session(gpu, found={"delta": contender._replace(ours=True)})
    session.operators(shape, report.TRAINING, ["delta"])
    assert session.record.values(shape, report.TRAINING, "delta", report.CALLED) == [1e-3] * gpu.ROUNDS
    assert report.refusal(passed(session.record)).startswith(f"delta at {shape} is wrong in ours: its out differs")


@pytest.mark.parametrize("name", ["sum", "gated", "delta", "decay", "delta float32", "decay float32"])
def test_our_own_contenders_pass_their_check(gpu, name):
    assert gpu.usable(gpu.contenders("ours")[name], (3, 2, 300, 8, 8))[1] == ""


def passed(record):
    """Return our record, with passed checks, as publishing reads it."""
    for name, text in (("laws", "passed: 649 passed"), ("memcheck", "passed: 0 errors"), ("GPU", "a GPU")):
        record.note(name, text)
    return {"ours": record}


# ---- a call


def test_without_time_nothing_is_measured_and_all_of_it_is_named(gpu, report):
    from record import MISSED

    records = []
    for part in report.PARTS:
        session = new_session(gpu, -1, part)
        for stage in gpu.stages(session, part):
            stage()
        assert {row[3] for row in session.record.rows} == {MISSED}
        records.append(session.record)
    rows = report.goals(report.merge(records))
    assert all(row[6].endswith("no time was left for it") for row in rows if row[2] != "-"), rows


def test_who_fails_while_measured_is_left_out(gpu, report):
    def failing(*x):
        raise RuntimeError("No available kernel.\nAborting")

    def too_large(*x):
        raise torch.cuda.OutOfMemoryError("4 TB")

    peers = {name: gpu.Contender("sum", lambda f=f: f, exact=False) for name, f in (("a", failing), ("b", too_large))}
    ours = {"sum": gpu.contenders("ours")["sum"], "ours fails": peers["a"]._replace(ours=True)}
    session, shape = new_session(gpu, found=peers | ours), (1, 2, 9, 8, 8)
    for stage in (report.TRAINING, report.FORWARD):
        session.operators(shape, stage, [*peers, *ours])
        reasons = [session.record.values(shape, stage, name, report.CALLED) for name in (*peers, "ours fails")]
        assert reasons[0].endswith("it fails: No available kernel.") and reasons[2].endswith(reasons[0][5:])
        assert reasons[1].endswith("it needs more memory than this GPU has")
        assert session.record.values(shape, stage, "sum", report.BYTES) == [7]


def test_a_decoding_step_of_every_rule(gpu, report, monkeypatch):
    found = {}
    monkeypatch.setattr(gpu.Session, "take_turns", lambda _, where, stage, calls: found.update(calls))
    session = new_session(gpu)
    session.steps("here", (2, 2, 1, 8, 8), 9, report.OURS)
    assert list(found) == [*report.OURS, "attention"]
    for rule in report.OURS:
        out, state = found[rule]()
        assert out.shape == (2, 2, 1, 8) and out.dtype == torch.bfloat16 and state.abs().sum() > 0
        assert session.record.values("here", report.STEP, rule, report.BYTES) == [7]


RUN_SHAPES = ((2, 2, 16, 8, 8), (1, 2, 32, 8, 8), (1, 1, 40, 8, 8), (1, 1, 8, 8, 8))


@pytest.fixture
def small_run(gpu, report, monkeypatch, tmp_path):
    """gpu.py on a simulated GPU, at small sizes, with passing checks and no models; results are in tmp_path."""
    import gpu_checks
    import gpu_models
    import record

    small = {"SHAPES": RUN_SHAPES, "SWEEP": (16, 32), "CONTEXTS": (1, 8), "STEP_SHAPE": (2, 2, 1, 8, 8)}
    for where in (gpu, report):
        for name, value in small.items():
            monkeypatch.setattr(where, name, value)
    monkeypatch.setattr(report, "TOKENS", 64)
    monkeypatch.setattr(gpu_models, "measure", lambda record, in_time: record.miss("here", "training", "a model", "-"))
    monkeypatch.setattr(gpu_checks, "sanitize", lambda tool, folder, seconds: "passed: 0 errors")
    monkeypatch.setattr(gpu_checks, "laws", lambda folder, seconds: "passed: 649 passed")
    monkeypatch.setattr(gpu_checks, "limited", lambda command, seconds, log: 0)
    monkeypatch.setattr(gpu, "require_kernels", lambda: "cache/fwp_cuda_key/kernels.so")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(record, "HERE", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    (tmp_path / "RESULTS.md").write_text((BENCHMARKS / "RESULTS.md").read_text())
    return tmp_path


def call(gpu, part, folder):
    gpu.main([part, "--out", str(folder / "out")])
    return rows_of(folder, part)


def rows_of(folder, part):
    with open(folder / "out" / f"gpu_{part}.csv", newline="") as file:
        return list(csv.reader(file))[1:]


def published(gpu, folder):
    gpu.main(["publish", "--out", str(folder / "out")])
    return (folder / "RESULTS.md").read_text()


def test_three_calls_at_small_sizes(gpu, report, small_run, monkeypatch, capsys):
    """From the first check to RESULTS.md. Next to peers, our second measurement counts."""
    alarms = []
    monkeypatch.setattr(gpu.signal, "alarm", alarms.append)
    monkeypatch.setitem(sys.modules, "fla", None)
    ours, peers, _ = (call(gpu, part, small_run) for part in gpu.PARTS)
    assert "| delta |" in capsys.readouterr().out and alarms == [490 + gpu.GRACE, 0] * 3
    ledger = published(gpu, small_run)
    assert "GPU a GPU, kernels fwp_cuda_key" in ledger and "![gpu](results/gpu.png)" in ledger
    assert "laws passed: 649 passed" in ledger and "racecheck passed: 0 errors" in ledger
    for name in ("delta", "decay float32", "flash attention"):
        assert f"| {RUN_SHAPES[0]} | forward + backward | {name} |" in ledger
    assert "| decoding step, growth of the time per token of delta | 1 -> 8 tokens | <= 1.1 | 1.00 | 1.00 |" in ledger
    for rows in (ours, peers):
        assert len([row for row in rows if row[0] == "16 tokens" and row[2:4] == ["delta", gpu.CALLED]]) == gpu.ROUNDS
    merged = (small_run / "results" / "gpu.csv").read_text().splitlines()
    assert len([row for row in merged if row.startswith("16 tokens,") and ",delta,seconds as" in row]) == gpu.ROUNDS
    assert next(row[5] for row in peers if row[2:4] == ["FLA delta", "not measured"]) == "fla-core is not installed"
    steps, swept = [f"context {n}" for n in report.CONTEXTS], [f"{n} tokens" for n in report.SWEEP]
    order = [*map(str, RUN_SHAPES), *steps, *swept]
    assert list(dict.fromkeys(row[0] for row in ours if row[1])) == order
    assert {row[2] for row in ours if row[1]} == {*gpu.OURS, "delta float32", "decay float32", "attention"}
    assert "gated" not in {row[2] for row in peers} and "published decay" in {row[2] for row in peers}


def test_a_call_that_fails_has_written_what_it_had(gpu, small_run, monkeypatch):
    found = []

    def fail(session):
        found.extend(rows_of(small_run, "ours"))  # also after a killed call
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(gpu.Session, "decoding", fail)
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        call(gpu, "ours", small_run)
    assert {row[0] for row in found if row[2:4] == ["delta", gpu.CALLED]} == {*map(str, RUN_SHAPES)}
    ledger = published(gpu, small_run)
    assert "ended early: the GPU is gone" in ledger and f"| {RUN_SHAPES[0]} | forward + backward | delta |" in ledger
    assert "not reached" in ledger


def test_what_fails_a_check_is_measured_and_marked_and_not_published(gpu, small_run, monkeypatch):
    import gpu_checks

    monkeypatch.setattr(gpu_checks, "laws", lambda folder, seconds: "failed: 1 failed, 648 passed")
    rows = call(gpu, "ours", small_run)
    assert ["machine", "", "laws", "text", "0", "failed: 1 failed, 648 passed"] in rows
    assert [row for row in rows if row[:4] == [str(RUN_SHAPES[3]), gpu.TRAINING, "delta", gpu.CALLED]]
    before = (small_run / "RESULTS.md").read_text()
    with pytest.raises(SystemExit, match="nothing is published: the tests on the GPU must pass, got 'failed: 1 failed"):
        published(gpu, small_run)
    assert (small_run / "RESULTS.md").read_text() == before and not list((small_run / "results").glob("*"))


@pytest.mark.parametrize(
    ("check", "said", "refusal"),
    [
        ("laws", "not finished in 200 s", "the tests on the GPU must pass, got 'not finished in 200 s'"),
        ("memcheck", "failed: 3 errors", "compute-sanitizer's memcheck must pass, got 'failed: 3 errors'"),
        ("memcheck", "not run: there is no compute-sanitizer", ""),
    ],
)
def test_what_is_published_has_passed(report, check, said, refusal):
    found = passed(new_record())
    assert report.refusal(found) == ""
    found["ours"].note(check, said)
    assert report.refusal(found) == refusal


def test_results_of_two_machines_are_not_published_together(gpu, report, small_run):
    with pytest.raises(SystemExit, match=r"gpu_ours\.csv is not there"):
        published(gpu, small_run)
    found = passed(new_record()) | {"models": new_record()}
    found["models"].note("GPU", "another GPU")
    assert report.refusal(found) == "GPU must be the same in all calls, got another GPU in models"


def test_a_later_call_replaces_what_it_measured_in_full(report):
    from record import Record

    rows = [["here", "forward", name, "seconds", 0, 1.0] for name in ("a", "b", "c")]
    later = [["here", "forward", "a", "seconds", 0, 2.0], ["here", "forward", "b", "bytes", 0, 3.0]]
    later += [["here", "forward", "b", "not measured", 0, "no time"], ["here", "forward", "d", "not measured", 0, "-"]]
    found = report.merge([Record(rows), Record(later)]).rows
    assert [row[2:] for row in found] == [
        ["a", "seconds", 0, 2.0], ["b", "seconds", 0, 1.0], ["c", "seconds", 0, 1.0], ["d", "not measured", 0, "-"]
    ]  # fmt: skip


def test_first_calls_of_peers_have_processes_and_a_limit_of_their_own(gpu, small_run, monkeypatch):
    import gpu_checks

    asked = []

    def limited(command, seconds, log):
        name, shape = (command[command.index(flag) + 1] for flag in ("--peer", "--shape"))
        asked.append((name, shape, seconds))
        Path(log).write_text("a warning\nfla-core is not installed\n")
        return None if (name, shape) == ("FLA sum", 0) else int(name == "FLA delta")

    monkeypatch.setattr(gpu_checks, "limited", limited)
    monkeypatch.setattr(gpu, "SHAPES", [(1, 2, 9, 8, 8), (1, 1, 9, 16, 16)])
    monkeypatch.setattr(gpu.os, "environ", dict(os.environ))
    session = new_session(gpu, 100, "peers")
    session.warm([], 100)
    peers = ("FLA delta", "FLA sum", "published delta", "published decay")
    assert sorted(job[:2] for job in asked) == sorted((name, i) for name in peers for i in range(2))
    assert all(40 < seconds <= 50 for *_, seconds in asked) and gpu.os.environ["FLA_CACHE_RESULTS"] == "0"
    missing = "fla-core is not installed"
    assert session.cold == {
        ("FLA delta", (8, 8)): missing,
        ("FLA delta", (16, 16)): missing,
        ("FLA sum", (8, 8)): "its first call took too long",
    }
    session.operators((1, 2, 9, 8, 8), gpu.TRAINING, ["delta", "FLA sum"])
    found = session.record.values((1, 2, 9, 8, 8), gpu.TRAINING, "FLA sum", gpu.CALLED)
    assert found.endswith(": its first call took too long")


def test_a_first_call_that_fails_says_why_in_its_last_line(tmp_path):
    import gpu_checks

    command = [sys.executable, BENCHMARKS / "gpu.py", "warm", "--decay-peer", tmp_path / "no", "--shape", 0]
    assert gpu_checks.limited([*command, "--peer", "published decay"], 100, tmp_path / "log") == 1
    assert gpu_checks.last_line(tmp_path / "log") == f"FWP_DECAY_PEER must be a folder, got {tmp_path}/no"


def test_time_is_up_between_contenders_and_rounds(gpu, report, monkeypatch):
    """Each round takes 10 s of a simulated clock: two of each contender start in 35 s."""
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    class TenSeconds(CallOnce):
        def round(self, call):
            now[0] += 10
            return 10.0

    monkeypatch.setattr(gpu, "Clock", TenSeconds)
    session, shape = new_session(gpu, 35), (1, 2, 9, 8, 8)
    session.operators(shape, report.TRAINING, ["sum", "delta"])
    for name in ("sum", "delta"):
        assert session.record.values(shape, report.TRAINING, name, report.CALLED) == [10.0, 10.0]
    session.operators(shape, report.FORWARD, ["sum"])
    assert session.record.values(shape, report.FORWARD, "sum", report.CALLED).endswith("no time was left for it")


def test_models_are_trained_and_decode(report, monkeypatch):
    import gpu_models

    tiny = ("--cpu", "--decoder-layers", "1", "--adaptive-softmax-cutoff", "500")
    for name, value in {
        "VOCABULARY": 1000, "ROUNDS": 2, "UPDATES_A_ROUND": 1, "STEPS_A_ROUND": 1, "WARM_UP": 1, "CONTEXTS": (1, 8),
        "DECODED": ("delta_lm_wt103",), "PLAN": {"here": (2, 16, ["delta_lm_wt103", "no_such_lm"])}, "FLAGS": tiny,
    }.items():  # fmt: skip
        monkeypatch.setattr(gpu_models, name, value)
    monkeypatch.setattr(gpu_models, "synchronize", lambda: None)
    found = new_record()
    gpu_models.measure(found, lambda *_: True)
    assert len(found.values("here", "training", "delta_lm_wt103", report.SPEED)) == 2
    assert isinstance(found.values("here", "training", "no_such_lm", report.SPEED), str)
    for context in (1, 8):
        assert len(found.values(f"context {context}", report.STEP, "delta_lm_wt103", report.CALLED)) == 2


# ---- the checks


@pytest.mark.parametrize(("left", "shares"), [(100, [10, 10, 40]), (15, [10, 10, 15])])
def test_checks_have_shares_of_the_time(gpu, monkeypatch, tmp_path, left, shares):
    import gpu_checks

    asked = []
    monkeypatch.setattr(gpu.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(gpu_checks, "sanitize", lambda tool, folder, seconds: asked.append(seconds))
    monkeypatch.setattr(gpu_checks, "laws", lambda folder, seconds: asked.append(seconds))
    new_session(gpu, left).check(tmp_path, 100)
    assert asked == shares


def test_a_command_ends_in_time_with_its_children(tmp_path):
    import gpu_checks

    child = tmp_path / "child"
    script = f"sleep 60 & echo $! > {child}; echo begun; wait"
    assert gpu_checks.limited(["sh", "-c", script], 0.5, tmp_path / "log") is None
    assert gpu_checks.last_line(tmp_path / "log") == "begun"
    for _ in range(100):
        state = Path(f"/proc/{child.read_text().strip()}/stat")
        if not state.exists() or ") Z " in state.read_text():
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the child runs on")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo == ok ==", "passed: ok"),
        ("echo 1 error; exit 1", "failed: 1 error"),
        ("echo no device; exit 5", "ended with status 5: no device"),
        ("sleep 9", "not finished in 0 s"),
    ],
)
def test_verdicts(tmp_path, script, said):
    import gpu_checks

    assert gpu_checks.verdict(["sh", "-c", script], 0.4, tmp_path / "log") == said


def test_laws_and_sanitizer_are_asked_for_what_they_can(monkeypatch, tmp_path):
    import gpu_checks

    asked = []
    monkeypatch.setattr(gpu_checks, "verdict", lambda command, _, log, *failed: asked.append([*map(str, command), log]))
    gpu_checks.laws(tmp_path, 5)
    assert asked[0][1:3] == ["-m", "pytest"] and "cuda" in asked[0]
    assert f"--junitxml={tmp_path}/gpu_laws.xml" in asked[0] and asked[0][-1] == tmp_path / "gpu_laws.txt"
    monkeypatch.setattr(gpu_checks.shutil, "which", lambda name, path="": "/there/compute-sanitizer")
    gpu_checks.sanitize("racecheck", tmp_path, 5)
    assert asked[1][:3] == ["/there/compute-sanitizer", "--tool", "racecheck"]
    assert asked[1][-2:] == [str(BENCHMARKS / "gpu_checks.py"), tmp_path / "gpu_racecheck.txt"]
    monkeypatch.setattr(gpu_checks.shutil, "which", lambda name, path="": None)
    assert gpu_checks.sanitize("racecheck", tmp_path, 5) == "not run: there is no compute-sanitizer"


def test_the_cases_of_the_sanitizer_run(capsys):
    import gpu_checks

    gpu_checks.run_cases("cpu")
    assert len(capsys.readouterr().out.splitlines()) == len(gpu_checks.CASES) >= 10


# ---- the commands


def test_arguments(gpu, monkeypatch):
    monkeypatch.setenv("FWP_DELTA_PEER", "there")
    args = gpu.arguments(["peers", "--seconds", "30", "--decay-peer", "here"])
    assert (args.part, args.seconds, args.delta_peer, args.decay_peer) == ("peers", 30, "there", "here")


def test_refuses_without_a_gpu_and_keeps_what_is_there(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "gpu_ours.csv").write_text("an earlier one")
    with pytest.raises(SystemExit, match=r"^no CUDA device: PyTorch \S+ sees no NVIDIA GPU; run.sh measures on the"):
        gpu.main(["ours", "--out", str(tmp_path)])
    assert (tmp_path / "gpu_ours.csv").read_text() == "an earlier one"
    assert signal.alarm(0) == 0  # an alarm that is left would kill this process, some minutes later


def test_refuses_without_kernels(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "load_kernels", lambda device: ops.KernelStatus(False, reason="no nvcc", cure="get it"))
    with pytest.raises(SystemExit, match=r"^no CUDA kernels: no nvcc; get it\.$"):
        gpu.main(["models", "--out", str(tmp_path)])
    assert signal.alarm(0) == 0


def test_kernels_for_a_gpu_that_is_elsewhere(gpu, monkeypatch, capsys):
    def load(device):
        assert torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (9, 0)
        return ops.KernelStatus(True, "there")

    for name in ("is_available", "device_count", "get_device_capability", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))  # build() replaces it
    monkeypatch.setattr(gpu, "load_kernels", load)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    gpu.main(["build"])
    assert capsys.readouterr().out == "there\n"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(SystemExit, match=r"^TORCH_CUDA_ARCH_LIST must name the GPU to build for, .* got 'Hopper'\.$"):
        gpu.main(["build"])


@pytest.fixture
def script(tmp_path):
    """A function (arguments) -> (output of gpu.sh, calls); a stand-in for Python records calls and lacks modules."""
    stub = tmp_path / "python"
    stub.write_text(
        f"""#!/bin/sh
        case $1 in -c) echo $LACKS; exit $STATUS ;; esac
        echo "$@" >> "{tmp_path}/calls"
        """
    )
    stub.chmod(0o755)

    def run(*arguments, lacks="", status=3):
        environment = {**os.environ, "PYTHON": str(stub), "LACKS": lacks, "STATUS": str(status)}
        command = ["bash", BENCHMARKS / "gpu.sh", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_the_script_uses_a_python_that_has_all(script):
    done, calls = script("peers", "--decay-peer", "x", "--seconds", "9")
    assert done.returncode == 0 and calls == [f"{BENCHMARKS}/gpu.py peers --decay-peer x --seconds 9"]


def test_the_script_names_what_a_machine_with_cuda_lacks(script):
    done, calls = script("ours", lacks="fairseq bitarray")
    assert done.returncode == 1 and not calls
    assert done.stderr.endswith(
        "lacks fairseq, bitarray: name a folder that gpu.sh wheels has made with --wheels, or install it there.\n"
    )


def test_the_script_installs_from_a_folder_alone(script, tmp_path):
    (tmp_path / "wheels").mkdir()
    done, calls = script("ours", "--wheels", str(tmp_path / "wheels"))
    assert done.returncode == 1 and not calls and "--wheels must be a folder with wheels, got" in done.stderr
    (tmp_path / "wheels" / "a.whl").touch()
    done, (install, call) = script("ours", "--wheels", str(tmp_path / "wheels"), "--seconds", "9")
    assert done.returncode == 0 and call.endswith("gpu.py ours --seconds 9")
    assert "pip install" in install and "--no-index --no-deps" in install and install.endswith("/wheels/a.whl")
    assert not Path(install.split("--target ")[1].split()[0]).exists()
    done, calls = script("ours", "--wheels", str(tmp_path / "wheels"), lacks="omegaconf", status=0)
    assert done.returncode == 1 and "lacks omegaconf" in done.stderr and len(calls) == 3


def test_the_script_makes_the_folder_of_wheels(script, tmp_path):
    done, (download, build) = script("wheels", str(tmp_path / "new"))
    assert done.returncode == 0 and "--only-binary=:all: --python-version 3.12" in download
    assert "fairseq-fixed==0.12.3.1 hydra-core==1.3.2" in download and "antlr4-python3-runtime==4.9.3" in build
    done, calls = script("wheels", str(tmp_path))
    assert done.returncode == 1 and len(calls) == 2 and f"{tmp_path} must be new or empty" in done.stderr


def test_the_script_says_what_it_takes(script):
    done, _ = script("all")
    assert done.returncode == 1 and "must be wheels, ours, peers, models, publish or build, got 'all'" in done.stderr
    assert script("--help")[0].stdout.startswith("Speed and memory on one NVIDIA GPU, in three calls")
