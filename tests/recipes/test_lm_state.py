"""Perplexity against the size of the state: the table and picture of recipes/peps/carried.yaml."""

import contextlib
import io
import json

import lm_state
import pytest
import yaml

ROWS = [
    {"run": "delta", "row": "Delta Network", "trained": "carried", "evaluated": "carried", "flags": "--carry-state",
     "state": 0.13, "valid": 27.8, "test": 29.4},
    {"run": "sum", "row": "Linear Transformer", "trained": "carried", "evaluated": "carried", "flags": "--carry-state",
     "state": 0.13, "valid": "> 260", "test": "> 260"},
    {"run": "xl", "row": "Transformer-XL", "trained": "carried", "evaluated": "memory 7 + 1", "flags": "--carry-state",
     "numbers": 8192, "state": 0.13, "valid": 65.7, "test": 65.5},
    {"run": "xl", "row": "Transformer-XL", "trained": "carried", "evaluated": "window", "flags": "--stride 8"},
]  # fmt: skip


@pytest.fixture
def out(tmp_path):
    """Delta has diverged, sum has not been run, Transformer-XL has been evaluated by one of two protocols."""
    for run in ("delta", "xl"):
        (tmp_path / "carried" / run).mkdir(parents=True)
        log = "2026-11-21 07:00:00 | INFO | fairseq_cli.train | num. shared model params: 1,234\n"
        log += '2026-11-21 07:00:36 | INFO | train_inner | {"num_updates": "50", "wall": "36"}\n'
        (tmp_path / "carried" / run / "train.log").write_text(log)
    (tmp_path / "carried" / "delta" / "diverged").write_text("gradient not finite after update 7\n")
    (tmp_path / "carried" / "xl" / "trained").touch()
    for split, ppl in (("valid", 80.0), ("test", 81.25)):
        result = {"perplexity": ppl, "state_size": 73728}
        (tmp_path / "carried" / "xl" / f"{split} memory 7 + 1.json").write_text(json.dumps(result))
    return tmp_path


def results(out):
    """The rows, through the file that has their numbers."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        lm_state.write_csv(out, ROWS)
    (out / "carried.csv").write_text(written.getvalue())
    return lm_state.read_results(out / "carried.csv", ROWS)


def test_table_hides_nothing(out):
    lines = lm_state.markdown(results(out))
    cells = [line.strip("| ").split(" | ") for line in lines[2:6]]
    assert [row[3:9] for row in cells] == [
        ["-", "diverged", "diverged", "0.13", "27.8", "29.4"],
        ["-", "not run", "not run", "0.13", "> 260", "> 260"],
        ["8,192", "80.0", "81.2", "0.13", "65.7", "65.5"],
        ["-", "not run", "not run", "-", "-", "-"],
    ]
    assert lines[-2:] == [
        "- delta diverged: gradient not finite after update 7",
        "- xl: 1,234 parameters, 50 updates, 0.010 hours",
    ]


def test_picture_is_drawn_before_and_after_the_runs(out, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", out):
        lm_state.draw(results(folder), tmp_path / "state.png")
        assert (tmp_path / "state.png").read_bytes().startswith(b"\x89PNG")


def test_runs_are_named_once_and_evaluated_by_each_protocol(tmp_path, capsys):
    rows = tmp_path / "rows.yaml"
    rows.write_text(yaml.safe_dump(ROWS))
    lm_state.main(["names", str(rows)])
    lm_state.main(["protocols", str(rows), "carried/xl"])
    assert capsys.readouterr().out.splitlines() == [
        "carried/delta carried/sum carried/xl",
        "memory 7 + 1\t--carry-state",
        "window\t--stride 8",
    ]
