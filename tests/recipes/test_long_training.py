"""The comparison at ten times the quick start's updates: its learning rates, and its table."""

import csv
import json

import long_training
import pytest


def write_run(folder, model, perplexities, results=()):
    """What run.sh leaves of a training with these validations, and of its evaluations."""
    folder = folder / "long" / model
    folder.mkdir(parents=True)
    lines = ["2026-01-01 00:00:00 | INFO | fairseq_cli.train | num. shared model params: 1,234 (num. trained: 1,234)"]
    for i, perplexity in enumerate(perplexities, 1):
        entry = json.dumps({"valid_ppl": str(perplexity), "valid_num_updates": str(1000 * i)})
        lines.append(f"2026-01-01 0{i}:00:00 | INFO | valid | {entry}")
    (folder / "train.log").write_text("\n".join(lines) + "\n")
    (folder / "trained").touch()
    for split, bits in results:
        text = f"num. model params: 1,234\nEvaluated 10 tokens in 1s\nLoss (base 2): {bits}, Perplexity: 0\n"
        (folder / f"{split}.ppl.log").write_text(text)


@pytest.fixture
def out(tmp_path):
    for rate, perplexities in (("0.0015", [30, 20.5]), ("0.003", [9, 21]), ("0.006", [31, 20.25])):
        write_run(tmp_path / "rates" / f"delta-{rate}", "delta", perplexities)
    for seed, bits in ((1, 3), (2, 4)):
        write_run(tmp_path / "seeds" / f"delta-{seed}", "delta", [40, 30], [("valid", bits), ("test", bits + 1)])
    return tmp_path


def test_the_best_validation_chooses_the_rate(out):
    assert long_training.best_rate(out, "delta") == "0.003"


def test_seeds_need_the_rates(out, monkeypatch):
    monkeypatch.setattr("sys.argv", ["long_training.py", "seeds", "--out", str(out), "--models", "delta", "sum"])
    with pytest.raises(SystemExit, match=r"sum was not trained at the rate 0\.0015: run the stage rates first"):
        long_training.main()


def test_a_table_has_mean_and_deviation_of_the_seeds(out, capsys):
    long_training.table(out, list(long_training.MODELS))
    assert capsys.readouterr().out.splitlines()[2:] == ["| delta | 0.003 | 2 | 12.00 ± 5.66 | 24.00 ± 11.31 |"]
    with (out / "long.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["lr"] for row in rows] == ["0.0015", "0.003", "0.006", "0.003", "0.003"]
    assert rows[-1]["seed"] == "2" and rows[-1]["test_ppl"] == "32.0000" and rows[0]["test_ppl"] == ""


def test_nothing_to_show_is_said(tmp_path):
    with pytest.raises(SystemExit, match="begin with the stage rates"):
        long_training.table(tmp_path, list(long_training.MODELS))
