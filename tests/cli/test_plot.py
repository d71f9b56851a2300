"""fwp-plot on logs of the form that fairseq writes."""

import csv
import json
import sys

import pytest

from fairseq_fwp.cli import plot


def lines(*updates, seconds=36, best=50.0):
    """A log line of training and one of validation for each number of updates."""
    for update in updates:
        train = {"ppl": f"{best + 900 / update:.2f}", "num_updates": str(update), "wall": str(update * seconds)}
        valid = {"epoch": 1, "valid_ppl": f"{best + 1000 / update:.2f}", "valid_num_updates": str(update)}
        yield f"2026-01-01 00:00:00 | INFO | train_inner | {json.dumps(train)}\n"
        yield f"2026-01-01 00:00:00 | INFO | valid | {json.dumps(valid)}\n"


@pytest.fixture
def logs(tmp_path):
    for name, best in (("delta", 40.0), ("sum", 60.0)):
        (tmp_path / name).mkdir()
        noise = "2026 | INFO | fairseq_cli.train | {'common': {'seed': 1}}\n5\n[1]\n{broken\n"
        (tmp_path / name / "train.log").write_text(noise + "".join(lines(100, 200, 300, best=best)))
    return tmp_path


@pytest.mark.parametrize("flags", [[], ["--x", "hours", "--train"]])
def test_picture_and_tables(logs, flags):
    out = logs / "a curve.png"
    plot.main([f"Delta rule={logs}/delta/train.log", f"{logs}/sum/train.log", "--out", str(out), *flags])
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    rows = list(csv.DictReader((logs / "a curve.csv").open()))
    assert [row["run"] for row in rows] == ["Delta rule"] * 3 + ["sum"] * 3
    last = {"run": "sum", "update": "300", "hours": "3.0000", "train_ppl": "63.0", "valid_ppl": "63.33"}
    assert rows[-1] == last
    assert (logs / "a curve.md").read_text().splitlines()[-1] == "| sum | 63.33 | 300 | 300 | 3.00 |"
    assert not list(logs.glob("*.tmp*"))


def test_what_a_resumed_run_did_again_counts_once(logs):
    log = logs / "delta" / "train.log"
    log.write_text("".join([*lines(100, 200, 300, best=1.0), *lines(150, 250, best=2.0)]))
    assert list(plot.read_log("delta", log).valid) == [100, 150, 250]


def test_the_best_is_the_lowest_not_the_last(logs):
    log = logs / "delta" / "train.log"
    log.write_text("".join([*lines(100, best=1.0), *lines(200, best=900.0)]))
    assert plot.read_log("delta", log).best == 100


@pytest.mark.parametrize("text", [None, "", "Traceback\n", '{"num_updates": "5", "ppl": "3"}\n'])
def test_logs_without_validation_are_refused(logs, text, capsys):
    log = logs / "bad.log"
    if text is not None:
        log.write_text(text)
    with pytest.raises(SystemExit, match=r"fwp-plot: the log .*bad\.log"):
        plot.main([str(log), "--out", str(logs / "curves.png")])
    assert not list(logs.glob("curves*"))


@pytest.mark.parametrize("out", ["curves.pdf", "none/curves.png"])
def test_a_bad_out_is_refused(logs, out):
    with pytest.raises(SystemExit, match="--out must be a"):
        plot.main([f"{logs}/sum/train.log", "--out", str(logs / out)])


def test_without_matplotlib_the_extra_is_named(logs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"fairseq_fwp\[plots\]"):
        plot.main([f"{logs}/sum/train.log", "--out", str(logs / "curves.png")])
    assert not list(logs.glob("curves*"))
