"""fwp-plot on logs of the form that fairseq writes, and of DPFP."""

import csv
import json
import sys

import numpy as np
import pytest
from mpl_toolkits.mplot3d import Axes3D
from pairwise import looped

from fairseq_fwp.cli import plot


def lines(*updates, seconds=36, best=50.0):
    """Return a log line of training and one of validation for each number of updates."""
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
def test_picture_and_tables(logs, flags, capsys):
    out = logs / "a curve.png"
    plot.main([f"Delta rule={logs}/delta/train.log", f"{logs}/sum/train.log", "--out", str(out), *flags])
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    assert capsys.readouterr().out == f"wrote {out}, a curve.csv and a curve.md\n"
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


def test_a_run_that_diverged_is_drawn_up_to_there(logs):
    log = logs / "delta" / "train.log"
    damaged = (
        '{"valid_ppl": "7", "valid_num_updates": "nan"}\n| valid on \'valid\' subset | ppl 1.2.3 | num_updates 5\n'
    )
    log.write_text("".join([*lines(100, best=1.0), *lines(200, best=float("nan")), damaged]))
    plot.main([f"{logs}/delta", "--out", str(logs / "curves.png")])
    assert (logs / "curves.md").read_text().splitlines()[-1] == "| delta | 11.00 | 100 | 200 | 2.00 |"


NAN = '{"valid_ppl": "nan", "valid_num_updates": "9"}\n'


@looped("text", [None, "", "Traceback\n", '{"num_updates": "5", "ppl": "3"}\n', NAN])
def test_logs_without_validation_are_refused(logs, text, capsys):
    log = logs / "bad.log"
    if text is not None:
        log.write_text(text)
    with pytest.raises(SystemExit, match=r"fwp-plot: the log .*bad\.log"):
        plot.main([str(log), "--out", str(logs / "curves.png")])
    assert not list(logs.glob("curves*"))


def test_a_file_that_is_not_of_a_picture_is_kept(logs):
    (logs / "notes.md").write_text("mine")
    with pytest.raises(SystemExit, match=r"--out must have another name, because .*notes\.md exists"):
        plot.main([f"{logs}/sum/train.log", "--out", str(logs / "notes.png")])
    assert (logs / "notes.md").read_text() == "mine" and not (logs / "notes.png").exists()
    for _ in range(2):  # its own files are replaced
        plot.main([f"{logs}/sum/train.log", "--out", str(logs / "curves.png")])


def test_a_bad_out_is_refused(logs):
    with pytest.raises(SystemExit, match=r"\.png, \.svg, \.pdf file in a folder that exists"):
        plot.main([f"{logs}/sum/train.log", "--out", str(logs / "none" / "curves.png")])


# As printed by fairseq-train: an epoch of 9 updates, a line of training at 10, and another epoch.
CONFIG = (
    "2026-11-23 01:02:50 | INFO | fairseq_cli.train | {'checkpoint': {'best_checkpoint_metric': 'loss'}, "
    "'criterion': {'_name': 'adaptive_loss', 'sentence_avg': False}}\n"
)
PRINTED = {
    "json": """\
2026-11-23 01:02:56 | INFO | valid | {"epoch": 1, "valid_loss": "9.198", "valid_ppl": "587.41", \
"valid_num_updates": "9"}
2026-11-23 01:02:56 | INFO | train | {"epoch": 1, "train_loss": "9.65", "train_ppl": "803.33", \
"train_num_updates": "9", "train_wall": "4"}
2026-11-23 01:02:56 | INFO | train_inner | {"epoch": 2, "loss": "9.591", "ppl": "771.25", \
"num_updates": "10", "wall": "4"}
2026-11-23 01:02:57 | INFO | valid | {"epoch": 2, "valid_loss": "9.201", "valid_ppl": "588.59", \
"valid_num_updates": "18"}
""",
    "simple": """\
2026-11-23 01:03:15 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 9.198 | ppl 587.41 | num_updates 9
2026-11-23 01:03:15 | INFO | valid | epoch 001 | valid on 'other' subset | loss 1.0 | ppl 2.0 | num_updates 9
2026-11-23 01:03:15 | INFO | train | epoch 001 | loss 9.65 | ppl 803.33 | num_updates 9 | lr 0.001 | wall 5
2026-11-23 01:03:15 | INFO | train_inner | epoch 002:      1 / 9 loss=9.591, ppl=771.25, num_updates=10, wall=5
2026-11-23 01:03:16 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 9.201 | ppl 588.59 | num_updates 18
""",
    # Progress bars of a terminal, which overwrite each other.
    "tqdm": """\
epoch 001 | valid on 'valid' subset:  50%|#####     | 1/2 [00:00<00:00,  9.87it/s]\r\
2026-11-23 01:03:36 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 9.198 | ppl 587.41 | num_updates 9
epoch 002:  11%|#   | 1/9 [00:00<00:00, 12.7it/s, loss=9.591, ppl=771.25, num_updates=10, wall=4]\r\
2026-11-23 01:03:36 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 9.201 | ppl 588.59 | num_updates 18
""",
    "none": """\
2026-11-23 01:03:57 | INFO | fairseq.checkpoint_utils | Saved checkpoint ck/checkpoint1.pt \
(epoch 1 @ 9 updates, score 9.198) (writing took 0.08 seconds)
2026-11-23 01:03:58 | INFO | fairseq.checkpoint_utils | Saved checkpoint ck/checkpoint2.pt \
(epoch 2 @ 18 updates, score 9.201) (writing took 0.06 seconds)
""",
}


def test_settings_are_read_as_the_package_prints_them(tmp_path):
    log = tmp_path / "train.log"
    settings = "checkpoint.best_checkpoint_metric={}, criterion={}, dataset.batch_size=4\n"
    log.write_text(settings.format("loss", "adaptive_loss") + PRINTED["none"])
    assert round(plot.read_log("", log).valid[9]) == 587
    log.write_text(settings.format("loss", "label_smoothed_cross_entropy") + PRINTED["none"])
    with pytest.raises(ValueError, match="must hold a validation ppl"):  # smoothing adds to the loss
        plot.read_log("", log)
    log.write_text(settings.format("bleu", "label_smoothed_cross_entropy") + PRINTED["none"])
    assert plot.read_log("", log, "bleu").valid == {9: 9.198, 18: 9.201}


@looped("form", PRINTED)
def test_every_log_format_of_fairseq_is_read_from_its_folder(tmp_path, form):
    (tmp_path / "hydra_train.log").write_text(CONFIG + PRINTED[form])
    plot.main([str(tmp_path), "--out", str(tmp_path / "curves.svg"), "--train"])
    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    valid = {int(row["update"]): round(float(row["valid_ppl"])) for row in rows if row["valid_ppl"]}
    train = {int(row["update"]): float(row["train_ppl"]) for row in rows if row["train_ppl"]}
    assert valid.keys() == {9, 18} and abs(valid[9] - 587) < 2 and abs(valid[18] - 589) < 2
    assert train == ({} if form == "none" else {10: 771.25})
    assert (tmp_path / "curves.svg").read_bytes().startswith(b"<?xml")
    assert plot.read_log("", tmp_path / "hydra_train.log", "loss").valid == {9: 9.198, 18: 9.201}


def test_training_without_lines_of_updates_is_that_of_epochs(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("".join(line for line in PRINTED["simple"].splitlines(True) if "train_inner" not in line))
    assert plot.read_log("", log).train == {9: 803.33}


@looped("form", ["json", "simple"])
def test_a_log_file_has_the_messages_alone(tmp_path, form):
    """With `--log-file` lines lack the time, the level and the name of the logger."""
    log = tmp_path / "train.log"
    log.write_text("".join(line.split(" | ", 3)[-1] for line in (CONFIG + PRINTED[form]).splitlines(True)))
    run = plot.read_log("", log)
    assert list(run.valid) == [9, 18] and run.train == {10: 771.25}


def test_the_best_bleu_is_the_highest(tmp_path):
    log = tmp_path / "train.log"
    text = "2026 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 5 | bleu {} | num_updates {}\n"
    log.write_text(text.format(30.5, 100) + text.format(31.25, 200) + text.format(29, 300))
    plot.main([str(log), "--y", "bleu", "--out", str(tmp_path / "bleu.png")])
    assert (tmp_path / "bleu.md").read_text().splitlines()[-1] == f"| {tmp_path.name} | 31.25 | 200 | 300 | 0.00 |"
    with pytest.raises(SystemExit, match="must hold a validation ppl"):
        plot.main([str(log), "--out", str(tmp_path / "ppl.png")])


def test_folders_and_labels_that_do_not_name_one_run_are_refused(logs):
    with pytest.raises(SystemExit, match=r"must hold a train\.log or one other \.log file, got 0: name the log"):
        plot.main([str(logs), "--out", str(logs / "curves.png")])
    with pytest.raises(SystemExit, match="a label of its own, got sum, sum: give LABEL=LOG"):
        plot.main([f"{logs}/sum", f"{logs}/sum/train.log", "--out", str(logs / "curves.png")])


def test_without_matplotlib_the_extra_is_named(logs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"fairseq_fwp\[plots\]"):
        plot.main([f"{logs}/sum/train.log", "--out", str(logs / "curves.png")])
    assert not list(logs.glob("curves*"))


def test_each_surface_is_one_feature_in_one_quadrant(tmp_path, monkeypatch, capsys):
    """Figure 1 of Schlag et al. 2021."""
    surfaces = {}
    draw = Axes3D.plot_surface

    def record(axes, x, y, z, **look):
        surfaces[look["label"]] = (x, y, z)
        return draw(axes, x, y, z, **look)

    monkeypatch.setattr(Axes3D, "plot_surface", record)
    monkeypatch.chdir(tmp_path)
    plot.main(["--dpfp"])
    assert [path.name for path in tmp_path.iterdir()] == ["dpfp.png"] and capsys.readouterr().out == "wrote dpfp.png\n"
    assert (tmp_path / "dpfp.png").read_bytes().startswith(b"\x89PNG")
    assert len(surfaces) == 4
    for label, (x, y, z) in surfaces.items():
        # Eqs. 33-36: r(+-k1) r(+-k2).
        inside = (-x if "-k₁" in label else x) * (-y if "-k₂" in label else y)
        inside = np.where((x > 0) == ("-k₁" not in label), inside, 0)
        shown = np.isfinite(z)
        assert np.array_equal(shown, inside > 0) and np.allclose(z[shown], inside[shown])


@looped("arguments", [[], ["--dpfp", "train.log"], ["--dpfp", "--train"]])
def test_logs_or_dpfp(arguments, capsys):
    with pytest.raises(SystemExit):
        plot.main(arguments)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("fwp-plot: error: ") and "logs of training" in said
