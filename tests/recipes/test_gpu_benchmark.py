"""The benchmark of a GPU, as far as it goes without one: refusals, records, goals, floors, tables, pictures, peers."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from fairseq_fwp import ops

BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"
RATES = (4.3e12, 790e12)


@pytest.fixture(autouse=True)
def scripts(monkeypatch, tmp_path):
    """The benchmarks' files can be imported, and are forgotten again, as are the peers of a test."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for path in BENCHMARKS.glob("*.py"):  # the driver has modules of these names too
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith((str(BENCHMARKS), str(tmp_path))):
            del sys.modules[name]


@pytest.fixture
def gpu(monkeypatch):
    """gpu.py, made to check its contenders on the CPU, with calls that take a millisecond."""
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
    """In place of the clock: a call is made, and takes a millisecond."""

    def round(self, call):
        call()
        return 1e-3


def new_record():
    from record import Record

    return Record()


@pytest.fixture
def full(report):
    """A record in which every goal is met by a little."""
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
    """{(ratio, where): (met, note)} of the rows that have a goal."""
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
    """A peer that no graph can hold is compared as Python calls both."""
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
    """Of the delta rule's training step in bfloat16 at 4.3 TB/s and 790 TFLOP/s, worked out by hand."""
    shape = report.SHAPES[index]
    moved = report.bytes_moved("delta", shape, report.TRAINING, 2) / RATES[0]
    assert moved * 1e6 == pytest.approx(bytes_us, rel=0.04)
    assert report.chunk_flops(shape) / RATES[1] * 1e6 == pytest.approx(flops_us, rel=0.04)
    floor = report.floor("delta", shape, report.TRAINING, RATES)
    assert floor == pytest.approx(max(bytes_us, flops_us) / 1e6, rel=0.04)
    assert report.floor("sum float32", shape, report.FORWARD, RATES) > report.floor("sum", shape, report.FORWARD, RATES)
    # A step: its state twice, and two numbers of bfloat16 for each of q, k, v and out, and beta.
    assert report.bytes_moved("delta", (2, 3, 1000, 16, 8), report.STEP, 2) == 2 * 3 * (2 * 4 * 16 * 8 + 2 * 49)


# ---- the peers, stood in for by the reference in their layout


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

    found = gpu.contenders()
    module(monkeypatch, "fla.ops.delta_rule", chunk_delta_rule=chunk_delta_rule)
    assert gpu.usable("FLA delta", found["FLA delta"], (1, 2, 20, 8, 8))
    module(monkeypatch, "fla.ops.linear_attn", chunk_linear_attn=chunk_linear_attn)
    assert gpu.usable("FLA sum", found["FLA sum"], (1, 2, 20, 8, 8))


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
    found = gpu.contenders(delta_peer=tmp_path, decay_peer=tmp_path)
    for name in ("published delta", "published decay"):
        assert gpu.usable(name, found[name], (1, 3, 20, 8, 6))
    assert (os.getcwd(), sys.path) == before


def test_a_peer_that_cannot_be_measured_says_why(gpu, monkeypatch, tmp_path):
    from gpu_peers import Missing

    monkeypatch.setitem(sys.modules, "fla", None)
    shape = (1, 1, 4, 8, 8)
    (tmp_path / "t2fw").mkdir()
    (tmp_path / "t2fw" / "functional_lfw.py").write_text("raise RuntimeError('nvcc\\nis old')")
    found = gpu.contenders(delta_peer=tmp_path / "nowhere", decay_peer=tmp_path)
    for name, reason in (
        ("FLA delta", "fla-core is not installed"),
        ("published delta", "FWP_DELTA_PEER=.*nowhere is no folder"),
        ("published decay", "nvcc$"),
    ):
        with pytest.raises(Missing, match=reason):
            gpu.usable(name, found[name], shape)
    with pytest.raises(Missing, match="no checkout of it is named by FWP_DECAY_PEER"):
        gpu.usable("published decay", gpu.contenders()["published decay"], shape)


@pytest.mark.parametrize("head", [0, 5])
def test_a_wrong_peer_is_not_measured_and_a_wrong_kernel_ends_everything(gpu, head):
    """Wrong at the first or the last head of the whole shape, which is given to the peer."""
    from gpu_peers import Missing

    def wrong(*x):
        out = ops.delta_rule(*x)[0]
        assert out.shape == (2, 3, 20, 8)
        return out * torch.ones(6).index_fill(0, torch.tensor([head]), 1.5).view(2, 3, 1, 1)

    contender = gpu.Contender("delta", lambda: wrong)
    with pytest.raises(Missing, match="its out differs from the float64 reference by 2"):
        gpu.usable("a peer", contender, (2, 3, 20, 8, 8))
    with pytest.raises(SystemExit, match="Nothing is reported"):
        gpu.usable("ours", contender._replace(ours=True), (2, 3, 20, 8, 8))


@pytest.mark.parametrize("name", ["sum", "gated", "delta", "decay", "delta float32", "decay float32"])
def test_our_own_contenders_pass_their_check(gpu, name):
    assert gpu.usable(name, gpu.contenders()[name], (3, 2, 300, 8, 8))


# ---- a run


def test_without_time_nothing_is_measured_and_all_of_it_is_named(gpu, report):
    from record import MISSED

    session = gpu.Session(new_record(), -1, gpu.contenders())
    gpu.run(session, lambda: None)
    assert {row[3] for row in session.record.rows} == {MISSED}
    rows = report.goals(session.record)
    assert all(row[6].endswith("no time was left for it") for row in rows if row[2] != "-"), rows


def test_who_fails_while_measured_is_left_out_unless_it_is_ours(gpu, report):
    def failing(*x):
        raise RuntimeError("No available kernel.\nAborting")

    def too_large(*x):
        raise torch.cuda.OutOfMemoryError("4 TB")

    peers = {name: gpu.Contender("sum", lambda f=f: f, exact=False) for name, f in (("a", failing), ("b", too_large))}
    session, shape = gpu.Session(new_record(), 60, peers | {"sum": gpu.contenders()["sum"]}), (1, 2, 9, 8, 8)
    for stage in (report.TRAINING, report.FORWARD):
        session.operators(shape, stage, [*peers, "sum"])
        reasons = [session.record.values(shape, stage, name, report.CALLED) for name in peers]
        assert reasons[0].endswith("it fails: No available kernel.")
        assert reasons[1].endswith("it needs more memory than this GPU has")
        assert session.record.values(shape, stage, "sum", report.BYTES) == [7]
    session.found["a"] = peers["a"]._replace(ours=True)
    with pytest.raises(RuntimeError, match="No available kernel"):
        session.operators(shape, report.TRAINING, ["a"])


def test_a_decoding_step_of_every_rule(gpu, report, monkeypatch):
    found = {}
    monkeypatch.setattr(gpu.Session, "take_turns", lambda _, where, stage, calls: found.update(calls))
    session = gpu.Session(new_record(), 60, gpu.contenders())
    session.steps("here", (2, 2, 1, 8, 8), 9, report.OURS)
    assert list(found) == [*report.OURS, "attention"]
    for rule in report.OURS:
        out, state = found[rule]()
        assert out.shape == (2, 2, 1, 8) and out.dtype == torch.bfloat16 and state.abs().sum() > 0
        assert session.record.values("here", report.STEP, rule, report.BYTES) == [7]


RUN_SHAPES = ((2, 2, 16, 8, 8), (1, 2, 32, 8, 8), (1, 1, 40, 8, 8), (1, 1, 8, 8, 8))


@pytest.fixture
def small_run(gpu, report, monkeypatch, tmp_path):
    """gpu.py without the GPU's own clock, graphs, memory and rates, at small sizes, with results in tmp_path."""
    import gpu_models
    import record

    small = {"SHAPES": RUN_SHAPES, "SWEEP": (16, 32), "CONTEXTS": (1, 8), "STEP_SHAPE": (2, 2, 1, 8, 8)}
    for where in (gpu, report):
        for name, value in small.items():
            monkeypatch.setattr(where, name, value)
    monkeypatch.setattr(report, "TOKENS", 64)
    monkeypatch.setattr(gpu_models, "measure", lambda record, in_time: None)
    monkeypatch.setattr(gpu, "require_kernels", lambda: None)
    monkeypatch.setattr(gpu, "describe", lambda record: record.note("GPU", "a GPU"))
    monkeypatch.setattr(record, "HERE", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    (tmp_path / "RESULTS.md").write_text((BENCHMARKS / "RESULTS.md").read_text())
    return tmp_path


def test_a_whole_run_at_small_sizes(gpu, small_run):
    """From the first check to the ledger."""
    gpu.main(["measure"])
    ledger = (small_run / "RESULTS.md").read_text()
    assert "a GPU, no rates.\n" in ledger and "![gpu](results/gpu.png)" in ledger
    for name in ("delta", "decay float32"):
        assert f"| {RUN_SHAPES[0]} | forward + backward | {name} |" in ledger
    assert "| decoding step, growth of the time per token of delta | 1 -> 8 tokens | <= 1.1 | 1.00 | 1.00 |" in ledger
    rows = [line.split(",") for line in (small_run / "results" / "gpu.csv").read_text().splitlines()]
    assert not (small_run / "results" / "gpu_unfinished.csv").exists()
    assert len([row for row in rows if row[0] == "16 tokens" and ",delta,seconds as" in ",".join(row)]) == gpu.ROUNDS


def test_a_run_that_fails_publishes_what_it_has(gpu, small_run, monkeypatch):
    saved = []

    def fail(session):
        saved.append((small_run / "results" / "gpu_unfinished.csv").read_text())
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(gpu.Session, "decoding", fail)
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        gpu.main(["measure"])
    ledger = (small_run / "RESULTS.md").read_text()
    assert "ended early: the GPU is gone" in ledger and f"| {RUN_SHAPES[0]} | forward + backward | delta |" in ledger
    assert "not reached" in ledger
    assert ",delta,seconds as called," in saved[0]  # for the case that nothing is left to publish it
    assert not (small_run / "results" / "gpu_unfinished.csv").exists()


def test_a_wrong_kernel_publishes_nothing(gpu, small_run, monkeypatch):
    before = (small_run / "RESULTS.md").read_text()
    monkeypatch.setattr(gpu, "TOLERANCE", dict.fromkeys(gpu.TOLERANCE, 0))
    with pytest.raises(SystemExit, match="Nothing is reported"):
        gpu.main(["measure"])
    assert (small_run / "RESULTS.md").read_text() == before and not list((small_run / "results").glob("*"))


def test_time_is_up_between_contenders_and_rounds(gpu, report, monkeypatch):
    """Each round takes 10 s of a clock that the test turns: two of each contender are begun in 35 s."""
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    class TenSeconds(CallOnce):
        def round(self, call):
            now[0] += 10
            return 10.0

    monkeypatch.setattr(gpu, "Clock", TenSeconds)
    session, shape = gpu.Session(new_record(), 35, gpu.contenders()), (1, 2, 9, 8, 8)
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


# ---- the commands


def test_arguments(gpu, monkeypatch):
    monkeypatch.setenv("FWP_DELTA_PEER", "there")
    args = gpu.arguments(["measure", "--seconds", "30", "--decay-peer", "here"])
    assert (args.part, args.seconds, args.delta_peer, args.decay_peer) == ("measure", 30, "there", "here")


def test_refuses_without_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for part in ("build", "measure"):
        with pytest.raises(
            SystemExit, match=r"^no CUDA device: PyTorch \S+ sees no NVIDIA GPU; run.sh measures on the"
        ):
            gpu.main([part])


def test_refuses_without_kernels(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "load_kernels", lambda device: ops.KernelStatus(False, reason="no nvcc", cure="get it"))
    with pytest.raises(SystemExit, match=r"^no CUDA kernels: no nvcc; get it\.$"):
        gpu.main(["build"])


@pytest.mark.parametrize(
    ("fails", "said"),
    [("gpu.py build", ""), ("-m pytest", "the tests on the GPU failed"), ("nothing", "")],
)
def test_the_script_measures_only_after_the_tests(tmp_path, fails, said):
    """A stand-in for Python notes what it is asked for, and fails where it is told to."""
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\ncase "$*" in *"{fails}"*) exit 1 ;; esac\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", BENCHMARKS / "gpu.sh", "--decay-peer", "x"],
        env={**os.environ, "PYTHON": str(stub)},
        capture_output=True,
        text=True,
    )
    calls = (tmp_path / "calls").read_text()
    assert (done.returncode == 0) == (fails == "nothing") and said in done.stderr
    assert ("measure" in calls) == (fails == "nothing")
    if fails == "nothing":
        assert "-k cuda" in calls and calls.endswith("--decay-peer x\n")
