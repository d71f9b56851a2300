"""fwp-plot on logs of the form that fairseq writes, and of DPFP; the style that all pictures share."""

import csv
import json
import sys

import numpy as np
import pytest
from mpl_toolkits.mplot3d import Axes3D
from support.pairwise import looped
from support.refusals import refused

from fairseq_fwp.cli import plot, plot_style


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


@looped("flags", [[], ["--x", "hours", "--train"]])
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


DAMAGED = '{"valid_ppl": "7", "valid_num_updates": "nan"}\n| valid on \'valid\' subset | ppl 1.2.3 | num_updates 5\n'
# Lines of a log, updates with a validation, the best of them. A resumed run did some again; another diverged.
LOGS = [
    ([*lines(100, 200, 300, best=1.0), *lines(150, 250, best=2.0)], [100, 150, 250], 250),
    ([*lines(100, best=1.0), *lines(200, best=900.0)], [100, 200], 100),
    ([*lines(100, best=1.0), *lines(200, best=float("nan")), DAMAGED], [100, 200], 100),
]


@looped("written, updates, best", LOGS)
def test_validations_count_once_and_the_lowest_is_the_best(tmp_path, written, updates, best):
    log = tmp_path / "train.log"
    log.write_text("".join(written))
    run = plot.read_log("delta", log)
    assert list(run.valid) == updates and run.best == best
    plot.main([str(log), "--out", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.md").read_text().splitlines()[-1].split(" | ")[2] == str(best)


NAN = '{"valid_ppl": "nan", "valid_num_updates": "9"}\n'
USAGE = "logs of training"
# Arguments after the folder's name for HERE, words of the sentence.
REFUSALS = [
    *(([f"HERE/bad{number}.log"], rf"the log .*bad{number}\.log") for number in range(5)),
    (["HERE/sum/train.log", "--out", "HERE/notes.png"], r"--out must have another name, because .*notes\.md exists"),
    (["HERE/sum/train.log", "--out", "HERE/no/a.png"], r"\.png, \.svg, \.pdf file in a folder that exists"),
    (["HERE/sum/train.log", "--out", "HERE/a.jpg"], r"must be a \.png, \.svg, \.pdf file in a folder that exists"),
    (["HERE/none"], r"must hold a train\.log or one other \.log file, got 0: name the log"),
    (["HERE/sum", "HERE/sum/train.log"], "a label of its own, got sum, sum: give LABEL=LOG"),
    ([], USAGE),
    (["--dpfp", "train.log"], USAGE),
    (["--dpfp", "--train"], USAGE),
    (["--dpfp", "--gain", "a.tsv", "b.tsv"], USAGE),
    (["--gain", "a.tsv", "b.tsv", "--y", "loss"], USAGE),
    (["--gain", "a.tsv", "b.tsv"], "--gain needs --dictionary"),
    (["HERE/sum", "--block", "8"], "--block need --gain"),
]


def test_refusals(logs, monkeypatch):
    """A file that is not of a picture is kept."""
    (logs / "notes.md").write_text("mine")
    (logs / "none").mkdir()
    for number, text in enumerate(["", "Traceback\n", '{"num_updates": "5", "ppl": "3"}\n', NAN], 1):
        (logs / f"bad{number}.log").write_text(text)
    monkeypatch.chdir(logs)
    before = {path: path.read_bytes() for path in logs.rglob("*.*")}
    for arguments, says in REFUSALS:
        refused(plot.main, *(word.replace("HERE", str(logs)) for word in arguments), says=says)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(plot.main, logs / "sum", says=r"fairseq_fwp\[plots\]")
    assert {path: path.read_bytes() for path in logs.rglob("*.*")} == before


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
    """With `--log-file` lines lack the time, the level and the name of the logger."""
    (tmp_path / "hydra_train.log").write_text(CONFIG + PRINTED[form])
    plot.main([str(tmp_path), "--out", str(tmp_path / "curves.svg"), "--train"])
    rows = list(csv.DictReader((tmp_path / "curves.csv").open()))
    valid = {int(row["update"]): round(float(row["valid_ppl"])) for row in rows if row["valid_ppl"]}
    train = {int(row["update"]): float(row["train_ppl"]) for row in rows if row["train_ppl"]}
    assert valid.keys() == {9, 18} and abs(valid[9] - 587) < 2 and abs(valid[18] - 589) < 2
    assert train == ({} if form == "none" else {10: 771.25})
    assert (tmp_path / "curves.svg").read_bytes().startswith(b"<?xml")
    assert plot.read_log("", tmp_path / "hydra_train.log", "loss").valid == {9: 9.198, 18: 9.201}
    if form in ("json", "simple"):
        messages = (line.split(" | ", 3)[-1] for line in (CONFIG + PRINTED[form]).splitlines(True))
        (tmp_path / "hydra_train.log").write_text("".join(messages))
        run = plot.read_log("", tmp_path / "hydra_train.log")
        assert list(run.valid) == [9, 18] and run.train == {10: 771.25}


def test_training_without_lines_of_updates_is_that_of_epochs(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("".join(line for line in PRINTED["simple"].splitlines(True) if "train_inner" not in line))
    assert plot.read_log("", log).train == {9: 803.33}


def test_the_best_bleu_is_the_highest(tmp_path):
    log = tmp_path / "train.log"
    text = "2026 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 5 | bleu {} | num_updates {}\n"
    log.write_text(text.format(30.5, 100) + text.format(31.25, 200) + text.format(29, 300))
    plot.main([str(log), "--y", "bleu", "--out", str(tmp_path / "bleu.png")])
    assert (tmp_path / "bleu.md").read_text().splitlines()[-1] == f"| {tmp_path.name} | 31.25 | 200 | 300 | 0.00 |"
    with pytest.raises(SystemExit, match="must hold a validation ppl"):
        plot.main([str(log), "--out", str(tmp_path / "ppl.png")])


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


def test_a_rule_has_its_colour_and_no_two_names_share_one():
    names = ["a run", "delta, DPFP", "Sum rule", "delta_lm_wt103", "softmax"]
    found = plot_style.colours(names)
    assert list(found) == names and len(set(found.values())) == 5
    assert [found[names[n]] for n in (1, 2, 4)] == [plot_style.COLOURS[rule] for rule in ("delta", "sum", "softmax")]


def test_a_picture_is_of_the_format_that_its_name_says(tmp_path):
    pyplot = plot_style.load_pyplot()
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        figure, axes = pyplot.subplots()
        axes.plot([1, 2], [1, 30])
        plot_style.use_log_scale(axes.yaxis)
        path = tmp_path / f"a curve{ending}"
        plot_style.save(figure, path)
        assert path.read_bytes().startswith(magic)
    assert len(list(tmp_path.iterdir())) == 3  # nothing unfinished
    shown = [text.get_text() for text in axes.get_yticklabels() if 1 <= text.get_position()[1] <= 30]
    assert shown == ["1", "2", "5", "10", "20"]
