"""fairseq's own commands with the plugin: the main job end to end on a small text, and its refusals."""

import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_server import PLUGIN, run
from pairwise import looped

from fairseq_fwp.models.presets import PRESETS_OF_MODELS

SIZE = ["--decoder-layers", "2", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "48"]
BATCH = ["--tokens-per-sample", "32", "--batch-size", "4", "--required-batch-size-multiple", "1"]
OPTIMIZATION = ["--optimizer", "adam", "--lr", "1e-3", "--log-format", "simple", "--log-interval", "1"]
ADAPTIVE = ["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"]


def train(data, save_dir, *args, arch="delta_lm_wt103", updates=6, size=SIZE, **kwargs):
    return run(
        "fairseq-train", data, "--task", "language_modeling", "--arch", arch, *size, *BATCH, *OPTIMIZATION,
        "--cpu", "--save-dir", save_dir, "--max-update", updates, *args, **kwargs,
    )  # fmt: skip


def losses(output):
    return re.findall(r"train_inner .* loss=([\d.]+).* num_updates=(\d+)", output)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A binarised text of 40 words: each split of another length, none a multiple of a block."""
    folder = tmp_path_factory.mktemp("text")
    chooser = random.Random(1)
    for split, lines in (("train", 90), ("valid", 17), ("test", 23)):
        text = (" ".join(f"w{chooser.randrange(40)}" for _ in range(chooser.randrange(3, 20))) for _ in range(lines))
        (folder / f"{split}.txt").write_text("\n".join(text) + "\n")
    preprocess = ["--only-source", "--destdir", folder / "bin", "--workers", "1"]
    for split in ("train", "valid", "test"):
        preprocess += [f"--{split}pref", folder / f"{split}.txt"]
    run("fairseq-preprocess", *preprocess)
    return folder / "bin"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a trained delta model and the log of its training."""
    folder = tmp_path_factory.mktemp("trained")
    flags = [*ADAPTIVE, "--log-file", "logs/train.log"]
    log = train(data, "checkpoints", *flags, cwd=folder, user_dir=os.path.relpath(PLUGIN, folder))
    assert "done training" in (folder / "logs" / "train.log").read_text()
    return folder / "checkpoints" / "checkpoint_last.pt", log


def count_tokens(data, split):
    text = (data.parent / f"{split}.txt").read_text().splitlines()
    return sum(len(line.split()) + 1 for line in text)


def test_training_learns_and_says_nothing_alarming(trained):
    _, log = trained
    first, *_, last = (float(loss) for loss, _ in losses(log))
    assert last < first
    assert "arning" not in log
    assert log.count("dropped cutoffs 20000,40000,200000") == 1
    (settings,) = re.findall(r"fairseq_cli.train \| (settings, others as by default: .*)", log)
    assert "model.decoder_layers=2," in settings and "optimization.lr=[0.001]," in settings and len(settings) < 1000
    assert re.findall(r"detected shared parameter: (.*)", log) == [
        "decoder.embed_tokens.weight <- decoder.adaptive_softmax.weight"
    ]


def test_resumed_training_goes_on_as_if_never_stopped(data, trained, tmp_path):
    _, log = trained
    first = train(data, tmp_path, *ADAPTIVE, updates=3)
    second = train(data, tmp_path, *ADAPTIVE, updates=6)
    assert "Loaded checkpoint" in second
    assert losses(first) + losses(second) == losses(log)
    finished = train(data, tmp_path, *ADAPTIVE, updates=6)
    assert finished.count("training is finished with --max-update 6, nothing is changed") == 1 and not losses(finished)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--context-window", "16"]], ids=["blocks", "window"])
def test_every_token_is_scored(data, trained, arguments):
    log = run(
        "fairseq-eval-lm", data, "--path", trained[0], "--gen-subset", "test", "--tokens-per-sample", 32,
        "--batch-size", 4, "--cpu", *arguments,
    )  # fmt: skip
    assert int(re.search(r"Evaluated ([\d,]+) tokens", log)[1].replace(",", "")) == count_tokens(data, "test")
    assert 2 < float(re.search(r"Perplexity: ([\d.]+)", log)[1]) < 60


@pytest.mark.slow
def test_the_installed_plugin_is_found_by_name_from_any_folder(data, trained, tmp_path):
    arguments = ["--path", trained[0], "--gen-subset", "test", "--tokens-per-sample", 32, "--cpu"]
    assert "Perplexity" in run("fairseq-eval-lm", data, *arguments, user_dir="fairseq_fwp", cwd=tmp_path)


def test_validation_agrees_with_eval_lm_and_leaves_out_no_batch(data, trained):
    score = run(
        "fairseq-eval-lm", data, "--path", trained[0], "--gen-subset", "test", "--tokens-per-sample", 32, "--cpu"
    )
    # without --required-batch-size-multiple 1, with which fairseq drops the last batch
    valid = run(
        "fairseq-validate", data, "--path", trained[0], "--valid-subset", "test", "--cpu", "--batch-size", 3,
        "--task", "language_modeling", "--log-format", "simple",
    )  # fmt: skip
    expected = float(re.search(r"Loss \(base 2\): ([\d.]+)", score)[1])
    assert float(re.search(r"loss ([\d.]+)", valid)[1]) == pytest.approx(expected, abs=1e-3)


def test_generation(data, trained):
    common = [data, "--task", "language_modeling", "--path", trained[0], "--cpu", "--max-len-b", 40, "--beam", 2]
    text = run("fairseq-interactive", *common, "--sampling", "--nbest", 2, stdin="w1 w2 w3\n")
    assert "DEBUG" not in text and "generation.nbest=2" in text
    generated = re.search(r"^H-0\t\S+\t(.*)$", text, re.M)[1].split()
    assert generated[:3] == ["w1", "w2", "w3"] and len(generated) > 3
    out = run("fairseq-generate", *common, "--gen-subset", "test", "--sample-break-mode", "eos", "--batch-size", 5)
    lines = (data.parent / "test.txt").read_text().splitlines()
    assert len(re.findall(r"^H-", out, re.M)) == len(lines)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sum_lm_wt103", "softmax_lm_wt103"])
def test_other_architectures_with_cross_entropy_and_line_breaks(data, tmp_path, arch):
    log = train(data, tmp_path, "--sample-break-mode", "eos", "--sum-normalization", arch=arch, updates=2)
    assert len(losses(log)) == 2 and "arning" not in log


@pytest.mark.slow
def test_the_draws_of_favor_go_on_in_a_resumed_run(data, tmp_path):
    arguments = {"arch": "delta_favor_lm_wt103"}
    whole = train(data, tmp_path / "whole", *ADAPTIVE, updates=4, **arguments)
    halves = [train(data, tmp_path / "halves", *ADAPTIVE, updates=updates, **arguments) for updates in (2, 4)]
    assert losses(halves[0]) + losses(halves[1]) == losses(whole)
    path = tmp_path / "halves" / "checkpoint_last.pt"
    score = ["fairseq-eval-lm", data, "--path", path, "--tokens-per-sample", 32, "--cpu"]
    perplexities = {re.search(r"Perplexity: ([\d.]+)", run(*score))[1] for _ in range(2)}
    assert len(perplexities) == 1


@pytest.mark.slow
def test_transformer_xl_is_trained_resumed_and_evaluated_with_another_memory(data, tmp_path):
    """The largest preset, scaled down: adaptive input and softmax, untied biases, all dropouts."""
    flags = ["--adaptive-softmax-cutoff", "15,30", "--decoder-attention-heads", 4, "--mem-len", 8, "--half-loss"]
    flags += ["--save-interval-updates", 2]
    whole = train(data, tmp_path, *ADAPTIVE, *flags, arch="xl_lm_wt103_large", updates=4)
    halfway = ["--restore-file", tmp_path / "checkpoint_1_2.pt"]
    resumed = train(data, tmp_path / "2", *ADAPTIVE, *flags, *halfway, arch="xl_lm_wt103_large", updates=4)
    assert "arning" not in whole and losses(resumed) == losses(whole)[2:]
    checkpoint = ["--path", tmp_path / "checkpoint_last.pt", "--cpu"]
    score = ["fairseq-eval-lm", data, *checkpoint, "--gen-subset", "test", "--tokens-per-sample", 32]
    log = run(*score, "--model-overrides", "{'mem_len': 5, 'same_length': True, 'clamp_len': 3}")
    assert int(re.search(r"Evaluated ([\d,]+) tokens", log)[1].replace(",", "")) == count_tokens(data, "test")
    log = run(*score, "--model-overrides", "{'mem_len': 0, 'same_length': True}", status=1)
    assert "--mem-len must be at least 1 with --same-length, got 0" in log.splitlines()[-1]
    text = run(
        "fairseq-interactive", data, *checkpoint, "--task", "language_modeling", "--beam", 2, "--max-len-b", 70,
        "--min-len", 60, stdin="w1 w2\n",
    )  # fmt: skip
    assert len(re.search(r"^H-0\t\S+\t(.*)$", text, re.M)[1].split()) > 40  # longer than a segment


@pytest.mark.slow
def test_local_attention_trains(data, tmp_path):
    log = train(data, tmp_path, *ADAPTIVE, "--attention-window", 8, arch="softmax_lm_wt103", updates=2)
    assert len(losses(log)) == 2 and "arning" not in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", [arch for model, presets in PRESETS_OF_MODELS.items() for arch in presets if model != "fwp_transformer"]
)
def test_every_language_model_trains_is_scored_and_generates(data, tmp_path, arch):
    train(data, tmp_path, *ADAPTIVE, "--decoder-attention-heads", 8, arch=arch, updates=2)
    checkpoint = ["--path", tmp_path / "checkpoint_last.pt", "--cpu"]
    log = run("fairseq-eval-lm", data, *checkpoint, "--gen-subset", "test", "--tokens-per-sample", 32)
    assert int(re.search(r"Evaluated ([\d,]+) tokens", log)[1].replace(",", "")) == count_tokens(data, "test")
    log = run(
        "fairseq-interactive", data, *checkpoint, "--task", "language_modeling", "--beam", 2, "--max-len-b", 20,
        stdin="w1 w2\n",
    )  # fmt: skip
    assert re.search(r"^H-0\t", log, re.M)


@pytest.mark.slow
def test_a_model_of_flags_alone_with_a_parted_vocabulary(data, tmp_path):
    """Training's validation loss, by clusters, is the loss that evaluation finds in the full distribution."""
    flags = ["--adaptive-softmax-cutoff", "15,30", "--decoder-normalize-before", "--no-epoch-checkpoints"]
    log = train(data, tmp_path, *ADAPTIVE, *flags, arch="fwp_lm", updates=4)
    score = run(
        "fairseq-eval-lm", data, "--path", tmp_path / "checkpoint_last.pt", "--gen-subset", "valid",
        "--tokens-per-sample", 32, "--cpu",
    )  # fmt: skip
    expected = float(re.search(r"Loss \(base 2\): ([\d.]+)", score)[1])
    assert float(re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", log)[-1]) == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_bfloat16(data, tmp_path):
    assert len(losses(train(data, tmp_path, "--bf16", updates=2))) == 2


@pytest.mark.slow
def test_hydra_with_the_yaml_of_a_preset(data, tmp_path):
    info = Path(sys.executable).with_name("fwp-info")
    command = [info] if info.exists() else [sys.executable, "-m", "fairseq_fwp.cli.info"]
    yaml = subprocess.run(
        [*command, "--hydra", "delta_lm_wt103"], check=True, capture_output=True, text=True, cwd=PLUGIN.parent
    ).stdout
    (tmp_path / "delta.yaml").write_text(yaml)
    overrides = {
        "task.data": data, "task.tokens_per_sample": 32, "dataset.batch_size": 4,
        "model.decoder_layers": 2, "optimization.max_update": 2, "common.cpu": "true", "hydra.job.chdir": "false",
        "checkpoint.save_dir": tmp_path / "checkpoints", "hydra.run.dir": tmp_path / "logs",
    }  # fmt: skip
    program = Path(sys.executable).with_name("fairseq-hydra-train")
    result = subprocess.run(
        [program, "--config-dir", tmp_path, "--config-name", "delta"] + [f"{k}={v}" for k, v in overrides.items()],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    import torch

    checkpoint = torch.load(tmp_path / "checkpoints" / "checkpoint_last.pt")
    model = checkpoint["cfg"]["model"]
    assert (model["_name"], model["sum_normalization"], model["decoder_layers"]) == ("fwp_lm", True, 2)


@pytest.mark.slow
def test_two_processes_train_and_resume(data, tmp_path):
    """One process with twice the batch takes the same steps."""
    alone = train(data, tmp_path / "alone", *ADAPTIVE, "--update-freq", 2, "--dropout", 0, updates=4)
    for updates in (2, 4):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [
                    Path(sys.executable).with_name("fairseq-train"), data, "--user-dir", PLUGIN,
                    "--task", "language_modeling", "--arch", "delta_lm_wt103", *SIZE, *BATCH, *OPTIMIZATION, *ADAPTIVE,
                    "--cpu", "--dropout", "0", "--save-dir", tmp_path / "two", "--max-update", str(updates),
                    "--distributed-world-size", "2", "--distributed-backend", "gloo", "--distributed-no-spawn",
                    "--distributed-init-method", f"tcp://localhost:{port}", "--distributed-rank", str(rank),
                    "--device-id", "0",
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        logs = [rank.communicate(timeout=300)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], logs
    expected = [float(loss) for loss, _ in losses(alone)]
    assert [float(loss) for loss, _ in losses(logs[0])] == pytest.approx(expected[2:], abs=2e-3)


REFUSALS = {
    "unknown rule": (["--decoder-update-rule", "hebb"], r"invalid choice: 'hebb' \(choose from"),
    "unknown map": (["--decoder-feature-map", "cosine"], r"invalid choice: 'cosine' \(choose from"),
    "heads": (
        ["--decoder-attention-heads", "5"],
        r"--decoder-embed-dim must be divisible by --decoder-attention-heads, got 32 and 5",
    ),
    "nu": (["--decoder-feature-map", "dpfp", "--dpfp-nu", "8"], r"--dpfp-nu must be from 1 to .* = 7, got 8"),
    "key": (["--decoder-key-dim", "0"], r"--decoder-key-dim must be at least 1, got 0"),
    "favor": (["--decoder-feature-map", "favor", "--favor-features", "0"], r"--favor-features must be at least 1, got"),
    "memory": (["--arch", "fwp_xl_lm", "--decoder-positions", "absolute"], r"--mem-len must be 0 .*, got 256"),
    "normalisation": (["--decoder-feature-map", "identity"], r"must not be negative .*, got those of Identity"),
}  # fmt: skip


@pytest.mark.slow
@looped("case", REFUSALS)
def test_bad_settings_are_refused_before_anything_is_written(data, tmp_path, case):
    arguments, sentence = REFUSALS[case]
    log = train(data, tmp_path / "save", *arguments, status=1)
    assert re.search(sentence, log.strip().splitlines()[-1])
    assert not list(tmp_path.rglob("*.pt"))


def test_an_empty_data_folder_is_named(tmp_path):
    log = train(tmp_path, tmp_path / "save", status=1)
    assert re.search(rf"No such file or directory: '{tmp_path}/dict.txt'", log)


@pytest.mark.slow
def test_the_guides_export_runs(data, trained, tmp_path):
    code = re.search(r"```python\n(.*?)```", (PLUGIN.parent / "docs" / "export.md").read_text(), re.DOTALL)[1]
    code = code.replace("checkpoints/delta/checkpoint_best.pt", str(trained[0])).replace('"DATA"', repr(str(data)))
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"start.pt2", "step.pt2"}


@pytest.mark.slow
def test_a_checkpoint_cut_in_half_is_named(data, trained, tmp_path):
    broken = tmp_path / "checkpoint_last.pt"
    shutil.copy(trained[0], broken)
    os.truncate(broken, broken.stat().st_size // 2)
    before = broken.read_bytes()
    for log in (
        run("fairseq-eval-lm", data, "--path", broken, "--tokens-per-sample", 32, "--cpu", status=1),
        train(data, tmp_path, status=1),
    ):
        assert re.search(r"checkpoint_last.pt must be a complete checkpoint", log.splitlines()[-1])
    assert broken.read_bytes() == before


@pytest.mark.slow
def test_text_longer_than_the_model_is_refused(data, trained):
    log = run("fairseq-eval-lm", data, "--path", trained[0], "--cpu", "--gen-subset", "test", status=1)
    assert "must have at most 32 tokens" in log.splitlines()[-1]
    assert "Evaluated" not in log
    longer = ["--model-overrides", "{'max_target_positions': 1024}"]
    log = run("fairseq-eval-lm", data, "--path", trained[0], "--cpu", "--gen-subset", "test", *longer)
    assert f"Evaluated {count_tokens(data, 'test')} tokens" in log.replace(",", "")


def test_the_kernel_backend_without_a_compiler(data, tmp_path):
    arguments = ["--fwp-backend", "kernel"]
    log = train(
        data, tmp_path / "save", *arguments, status=1, FWP_CACHE_DIR=str(tmp_path / "cache"), CXX="/nonexistent/c++"
    )
    # Not the last line: the threads that read the data may say how they were ended.
    assert re.search(r"^RuntimeError: .*compiler", log, re.M)
