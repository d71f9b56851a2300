"""The check of kernels before their first use, with a CPU kernel made wrong on purpose."""

import json
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from support.isolated import PREAMBLE
from support.pairwise import looped
from support.subjects import sample_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_fwp import kernel_checks, ops
from fairseq_fwp.ops.kernels import load_kernels, self_check
from fairseq_fwp.ops.kernels.library import locked

CPU = torch.device("cpu")
DELTA = ops.delta_rule
CHECK_APART = self_check._check_apart
FAULT = "the gradient of q in float64 is off by 1"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library in a new folder, whose kernels are not checked yet."""
    assert load_kernels("cpu").built
    path = tmp_path / "kernels.so"
    path.write_bytes(b"code")
    monkeypatch.setattr(self_check, "CHECKED", ("cpu",))
    monkeypatch.setattr(kernel_checks, "SIZES", ({"B": 1, "H": 2, "Hk": 1, "L": 35, "N": 2, "Dk": 4, "Dv": 5},))
    monkeypatch.setattr(kernel_checks, "WITH_SEGMENTS", ())
    monkeypatch.setattr(self_check, "load_kernels", lambda device: ops.KernelStatus(True, str(path)))
    monkeypatch.setattr(self_check, "_check_apart", check_here)
    forget(monkeypatch)
    return path


def check_here(device):
    """Check all rules in this process, whose kernels a test can make wrong."""
    found = {each.name: self_check.find_fault(each, torch.device(device)) for each in kernel_checks.RULE_CHECKS}
    return {name: reason for name, reason in found.items() if reason}


def forget(monkeypatch):
    """Forget results, as in a new process."""
    monkeypatch.setattr(self_check, "_faults", {})
    monkeypatch.setattr(self_check, "_warned", set())


@pytest.fixture
def wrong(monkeypatch):
    """Make only the gradient of the delta rule's kernel wrong."""
    right = DELTA.run_operator
    monkeypatch.setattr(DELTA, "run_operator", lambda q, *rest, **named: right(q + (q - q.detach()), *rest, **named))


def call(rule=ops.delta_rule, **options):
    return rule(**sample_inputs("delta", (1, 1, 3, 4, 4)), **options)


def test_kernels_are_right(monkeypatch):
    only = "from fairseq_fwp import kernel_checks\nkernel_checks.WITH_SEGMENTS = ()\n"  # a CPU has no segments
    monkeypatch.setattr(self_check, "CHILD", only + self_check.CHILD)
    assert self_check._check_apart("cpu") == {}


def test_rules_with_segments_are_checked_with_long_sequences(wrong, monkeypatch):
    assert set(kernel_checks.WITH_SEGMENTS) <= {each.name for each in kernel_checks.RULE_CHECKS}
    monkeypatch.setattr(kernel_checks, "SIZES", ())
    monkeypatch.setattr(kernel_checks, "LONG", ({"B": 1, "H": 1, "Hk": 1, "L": 35, "N": 2, "Dk": 4, "Dv": 5},))
    assert "gradient of q in bfloat16" in self_check.find_fault(kernel_checks.RuleCheck(DELTA), CPU)


PREPARED = f"""{PREAMBLE}
import os, signal
from fairseq_fwp import kernel_checks
from fairseq_fwp.ops.kernels import load_kernels, self_check
kernel_checks.SIZES = (dict(B=1, H=1, Hk=1, L=35, N=2, Dk=4, Dv=5),)
kernel_checks.WITH_SEGMENTS = ()
"""
SMALL = f"{PREPARED}self_check.check_in_child(kernel_checks.RULE_CHECKS)"
BROKEN = f"""{PREPARED}
ended = []
def find_fault(check, device):
    if check.name == "gla_rule" or ended:
        ended.append(check)
        raise RuntimeError("an illegal memory access\\nand more")
    if check.name == "decay_rule":
        os.kill(os.getpid(), signal.SIGABRT)
    return "off" if check.name == "rwkv7_rule" else ""
self_check.find_fault = find_fault
self_check.check_in_child(kernel_checks.RULE_CHECKS)
"""


def test_a_rule_that_breaks_its_process_is_the_only_one_to_blame(monkeypatch):
    """After an illegal access nothing works in a process, so the other rules are checked in others."""
    monkeypatch.setattr(self_check, "CHILD", BROKEN)
    expected = {"gla_rule": "an illegal memory access", "decay_rule": "its check was ended by signal 6"}
    assert self_check._check_apart("cpu") == expected | {"rwkv7_rule": "off"}


PRINTS = f"""
import json, os, subprocess, sys, time
def say(*line):
    os.write(1, {self_check.MARK} + json.dumps(line).encode() + b"\\n")
"""
HANGS = f"""{PRINTS}
for name in ("sum_rule", "gla_rule", "delta_rule")[int(sys.argv[2]):]:
    say(name, None)
    while name == "gla_rule":
        print(flush=True)
    say(name, "")
say("all", "")
"""


def test_a_rule_whose_check_never_ends_is_the_only_one_to_blame(monkeypatch):
    monkeypatch.setattr(self_check, "CHILD", HANGS)
    monkeypatch.setattr(self_check, "SECONDS", 3)
    assert self_check._check_apart("cpu") == {"gla_rule": "its check did not end within 3 seconds"}
    monkeypatch.setattr(self_check, "CHILD", "import time; time.sleep(99)")
    with pytest.raises(RuntimeError, match="it did not begin within 3 seconds"):
        self_check._check_apart("cpu")


# What others print before, between and after our own lines, do at the end, or leave running
FOREIGN = [
    "sys.stderr.write('[W1128 12:00:00 Warning: a warning of C++ (function operator())\\n')",
    """print('["sum_rule", "wrong"]', '["all", ""]', '[]', '[1, 2, 3]', 'null', '{', sep='\\n', flush=True)""",
    "os.write(2, bytes(range(256)) + b'\\n\\0\\xff\\x1e')",
    "os.write(1, b'no end of a line')",
    "sys.stdout.write('a long line' * 1_000_000); sys.stdout.flush()",
    "import atexit; atexit.register(os._exit, 3)",
    "import atexit; atexit.register(os.kill, os.getpid(), 9)",
    "subprocess.Popen(['sleep', '99'])",
    "subprocess.Popen(['sleep', '10'], start_new_session=True)",
]


@looped("foreign", FOREIGN)
def test_what_others_print_is_no_result(monkeypatch, foreign):
    child = f"{PRINTS}say('sum_rule', None)\n{foreign}\nsay('sum_rule', 'off')\n{foreign}\nsay('all', '')\n{foreign}"
    monkeypatch.setattr(self_check, "CHILD", child)
    start = time.monotonic()
    assert self_check._check_apart("cpu") == {"sum_rule": "off"}
    assert time.monotonic() - start < 9


def test_a_child_s_own_children_are_killed_with_it(monkeypatch, tmp_path):
    starts = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '99']).pid))"
    monkeypatch.setattr(self_check, "CHILD", f"{PRINTS}say('sum_rule', None)\n{starts}\ntime.sleep(99)")
    monkeypatch.setattr(self_check, "SECONDS", 2)
    deadline = time.monotonic() + 20
    *_, status = self_check._run_child([sys.executable, "-c", self_check.CHILD])
    started = Path("/proc", (tmp_path / "pid").read_text())
    while started.exists() and "sleep" in (started / "cmdline").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert status is None and time.monotonic() < deadline


def test_processes_wait_for_the_one_that_checks(library, monkeypatch):
    """Each holds the lock of the library's folder while it checks; the next one reads what was found."""
    monkeypatch.setattr(self_check, "_check_apart", lambda device: {"sum_rule": "wrong"})
    found = {"library": self_check._digest(library), "faults": {"cpu": {"gla_rule": "wrong"}}}
    with ThreadPoolExecutor() as pool:
        with locked(library.parent) as alone:
            waiting = pool.submit(self_check.find_faults, "cpu")
            assert alone and wait([waiting], timeout=0.2).not_done
            library.with_name("checked.json").write_text(json.dumps(found))
        assert waiting.result(9) == {"gla_rule": "wrong"}


CHILDREN = [
    ("raise SystemExit('no device')", "no device"),
    ("import torch; raise torch.cuda.OutOfMemoryError('too little')", "OutOfMemoryError: too little"),
    ("", "no output"),
    ("import os; os.write(2, b'no \\xff device'); raise SystemExit(1)", "no \ufffd device"),
]


@looped("child, reason", CHILDREN)
def test_a_check_that_cannot_run_blames_no_rule(library, monkeypatch, child, reason):
    forget(monkeypatch)
    monkeypatch.setattr(self_check, "_check_apart", CHECK_APART)
    monkeypatch.setattr(self_check, "CHILD", child)
    with pytest.warns(RuntimeWarning, match=f"used on cpu without a check, .* could not make: .*{reason}"):
        call()
    assert self_check.read_faults(library) == {}


MISTAKES = [
    (lambda out, state: (out * 1.001, state), "out in float64 is off by 1.0e-03"),
    (lambda out, state: (out, state * float("nan")), "the new state in float64 is off by nan"),
    (lambda out, state: (out.to(torch.bfloat16).to(out.dtype), state), "out in float64 is off by"),
    (lambda out, state: (out + (out - out.detach()), state), "the gradient of q in float64 is off by 1"),
]


@looped("change, reason", MISTAKES)
def test_what_is_wrong_is_found(change, reason):
    right = DELTA.run_operator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DELTA, "run_operator", lambda *x, **named: change(*right(*x, **named)))
        assert reason in self_check.find_fault(kernel_checks.RuleCheck(DELTA), CPU)


def test_a_rule_that_fails_runs_as_the_reference(library, wrong):
    with pytest.warns(RuntimeWarning, match=f"kernel of delta_rule is not used on cpu, because .*: {FAULT}") as said:
        found = call()
    assert len(said) == 1
    assert all(torch.equal(x, y) for x, y in zip(found, call(backend="reference"), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        ops.gated_rule(**sample_inputs("gated", (1, 1, 3, 4, 4)), backend="kernel")
    with pytest.raises(RuntimeError, match=rf"{FAULT}.*; use backend='reference', or build with another compiler"):
        call(backend="kernel")


def test_what_was_found_is_remembered_for_one_library(library, wrong, monkeypatch):
    assert list(self_check.find_faults("cpu")) == ["delta_rule"]
    checks = []
    monkeypatch.setattr(self_check, "_check_apart", lambda device: checks.append(device) or {})
    forget(monkeypatch)
    assert list(self_check.find_faults("cpu")) == ["delta_rule"] and not checks
    for content in (b"other code", b"code"):
        forget(monkeypatch)
        library.write_bytes(content)
        assert self_check.find_faults("cpu") == {}
    monkeypatch.setattr(kernel_checks, "WITH_SEGMENTS", ())
    monkeypatch.setattr(self_check, "load_kernels", lambda device: 1 / 0)
    assert self_check.find_faults("cpu") == {}  # remembered in this process, without reading the file
    left = {path.name for path in library.parent.iterdir()}
    assert checks == ["cpu"] * 2 and left == {"kernels.so", "checked.json", "lock"}


def test_a_note_that_is_damaged_or_cannot_be_written(library, monkeypatch):
    monkeypatch.setattr(self_check, "_check_apart", lambda device: {"sum_rule": "wrong"})
    note = library.with_name("checked.json")
    for damage in ("", "[]", '{"library": 1}'):
        forget(monkeypatch)
        note.write_text(damage)
        assert self_check.find_faults("cpu") == {"sum_rule": "wrong"}
        assert self_check.read_faults(library) == {"cpu": {"sum_rule": "wrong"}}
    forget(monkeypatch)
    note.unlink()
    note.mkdir()
    with pytest.warns(RuntimeWarning, match="sum_rule is not used on cpu"):
        assert self_check.warn_of_fault("sum_rule", "cpu")
    assert not self_check.warn_of_fault("gla_rule", "cpu")


def test_the_caller_s_modes_are_not_those_of_the_check(library, monkeypatch):
    monkeypatch.setattr(self_check, "_check_apart", CHECK_APART)
    monkeypatch.setattr(self_check, "CHILD", SMALL)
    with warnings.catch_warnings(), torch.inference_mode(), torch.autocast("cpu"), FakeTensorMode():
        warnings.simplefilter("error")
        assert self_check.find_faults("cpu") == {}
    assert self_check.read_faults(library) == {"cpu": {}}


def test_a_trace_takes_the_reference_too(library, wrong):
    inputs = sample_inputs("delta", (1, 1, 3, 4, 4))
    compiled = torch.compile(lambda: ops.delta_rule(**inputs), backend="eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match=FAULT):
        found = compiled()
    assert all(map(torch.equal, found, call(backend="reference")))


def test_a_rule_without_a_kernel_is_not_checked(library, monkeypatch):
    monkeypatch.setattr(self_check, "_check_apart", lambda device: 1 / 0)
    ops.fwm_rule(**sample_inputs("fwm", (1, 1, 3, 4, 4)))
