"""Conversion in three stages with fairseq-train: attention, distribution, words; each stopped in its middle as well."""

import re

import pytest
import torch
from command_server import run
from test_commands import ADAPTIVE, data, losses, train  # noqa: F401  (a fixture)

from tests.convert.test_gpt2 import WORDS, Folder, make_tensors

STAGES = {
    "attention": ["--criterion", "fwp_distillation", "--distillation", "attention", "--lr", "0.02"],
    "distribution": ["--criterion", "fwp_distillation", "--teacher-weight", "0.9", "--lr", "0.005"],
    "words": ADAPTIVE,
}


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("teacher")
    train(data, folder, *ADAPTIVE, "--lr", 0.01, arch="softmax_lm_wt103", updates=40)
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def converted(data, teacher, tmp_path_factory):  # noqa: F811
    """The checkpoint of a delta model with the projections of its teacher, and its flags."""
    folder = tmp_path_factory.mktemp("converted") / "delta"
    flags = ["--decoder-update-rule", "delta", "--decoder-feature-map", "elu", "--sum-normalization"]
    arguments = [teacher, "--source", "fwp-lm", "--vocabulary", data / "dict.txt", "--out", folder, *flags]
    run("fwp-convert", *arguments)
    return folder / "checkpoint.pt", (folder / "flags.txt").read_text().split()


def learn(data, start, flags, save_dir, stage, teacher, updates, *more):  # noqa: F811
    flags = [*flags, *STAGES[stage], "--ddp-backend", "legacy_ddp", "--finetune-from-model", start, *more]
    flags += ["--validate-interval-updates", 1]
    flags += ["--teacher", teacher] if stage != "words" else []
    return train(data, save_dir, *flags, arch="fwp_lm", size=(), updates=updates)


@pytest.mark.slow
def test_three_stages_each_stopped_and_resumed(data, teacher, converted, tmp_path):  # noqa: F811
    start, flags = converted
    for stage in STAGES:
        whole = learn(data, start, flags, tmp_path / stage, stage, teacher, 6)
        parts = [learn(data, start, flags, tmp_path / f"{stage} in parts", stage, teacher, n) for n in (3, 6)]
        assert len(losses(whole)) == 6
        assert [loss for part in parts for loss in losses(part)] == losses(whole)
        first, *_, last = map(float, re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", whole))
        assert (last < first or stage == "words") and "arning" not in whole  # the words of this text are random
        before, start = start, tmp_path / stage / "checkpoint_last.pt"
        saved, old = (torch.load(path, weights_only=False) for path in (start, before))
        assert saved["model"].keys() == old["model"].keys() and not saved.get("criterion")
        moved = {name for name, x in saved["model"].items() if not torch.equal(x, old["model"][name])}
        assert moved and (stage != "attention" or all(".self_attn." in name for name in moved))
    assert "ppl" in whole


@pytest.mark.slow
def test_half_precision_and_refusals(data, teacher, converted, tmp_path):  # noqa: F811
    start, flags = converted
    for stage in ("attention", "distribution"):
        log = learn(data, start, flags, tmp_path / stage, stage, teacher, 3, "--bf16")
        assert len(losses(log)) == 3
    said = run(
        "fairseq-train", data, "--task", "language_modeling", "--arch", "delta_lm_wt103", "--cpu",
        "--tokens-per-sample", 8, "--criterion", "fwp_distillation", "--ddp-backend", "legacy_ddp", "--optimizer",
        "adam", "--teacher", tmp_path / "none.pt", "--batch-size", 2, status=1,
    )  # fmt: skip
    assert "--teacher must be a checkpoint" in said.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
def test_gpt2_goes_through_all_stages(tmp_path, rule):
    """Its dictionary has words that the model gives no probability; its positions end."""
    random_weights = {name: weight / 4 for name, weight in make_tensors().items()}
    folder = Folder(tmp_path)
    folder.save(random_weights)
    folder.convert()
    teacher, words = folder.out / "checkpoint.pt", folder.out / "dict.txt"
    folder.out = tmp_path / rule
    folder.convert("--decoder-update-rule", rule, "--state-size", "4")
    preprocess = ["--only-source", "--srcdict", words, "--destdir", tmp_path / "bin", "--workers", "1"]
    for split in ("train", "valid"):
        lines = (" ".join(str(int(word)) for word in line) for line in torch.randint(WORDS - 1, (40, 9)))
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
        preprocess += [f"--{split}pref", tmp_path / f"{split}.txt"]
    run("fairseq-preprocess", *preprocess)
    start, flags = folder.out / "checkpoint.pt", (folder.out / "flags.txt").read_text().split()
    for stage in STAGES:
        log = learn(tmp_path / "bin", start, flags, tmp_path / stage, stage, teacher, 4)
        assert len(losses(log)) == 4 and "nan" not in log.replace("ppl nan", "")
        start = tmp_path / stage / "checkpoint_last.pt"
