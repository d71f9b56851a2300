"""The recipes of WikiText-103 and enwik8, on small files of the same layout; no network is there."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import lm_counts
import pytest
from enwik8 import bytes as enwik8
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from flags import read_flags
from wikitext103 import attention_lengths

from fairseq_fwp.cli import eval_lm
from fairseq_fwp.models.fwp_xl_lm import FwpXlLanguageModelConfig

ROOT = Path(__file__).parents[2]
CONFS = sorted(
    path
    for recipe in ("wikitext103", "enwik8")
    for path in ROOT.glob(f"recipes/{recipe}/conf/**/*.yaml")
    if path.name != "common.yaml"
)
SMALL = ["--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"]
SMALL += ["--decoder-attention-heads", "2", "--batch-size", "2", "--max-update", "3"]


@pytest.fixture
def recipes(tmp_path):
    """A copy of the recipes that runs in the environment of the tests."""
    copy = tmp_path / "recipes"
    shutil.copytree(ROOT / "recipes", copy, ignore=shutil.ignore_patterns("results", "__pycache__"))
    run_aloud = """run() { printf '+%s\\n' "$(printf ' %q' "$@")" >&2; "$@"; }"""
    (copy / "env.sh").write_text(f"root={str(ROOT)!r}\n{run_aloud}\n")
    return copy


@pytest.fixture
def wikitext(tmp_path):
    """A folder like that of wikitext-103-v1.zip: 20 different words, one of them <unk>, and line ends."""
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    line = " = A title = \n \n the <unk> memory is a matrix that every token reads and writes once @-@ or twice . \n"
    for split, lines in (("train", 60), ("valid", 9), ("test", 8)):
        (folder / f"wiki.{split}.tokens").write_text(line * lines)
    return folder


def run(script, *arguments, tools=None, **environment):
    path = ":".join([*([str(tools)] if tools else []), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(script), *map(str, arguments)]
    environment = os.environ | {"PATH": path} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def protocols(recipe, name):
    """The flags of fwp-eval-lm that run.sh evaluates a row with."""
    script = ROOT / "recipes" / recipe / "run.sh"
    command = 'eval "$(sed -n "/^protocols()/,/^}/p" "$1")"; protocols "$2"'
    bash = ["bash", "-c", command, "bash", script, name]
    lines = subprocess.run(bash, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split("\t")[1].split() for line in lines]


@pytest.mark.parametrize("conf", CONFS, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_protocols_are_flags_and_settings_that_exist(conf):
    recipe, _, *name = conf.relative_to(ROOT / "recipes").with_suffix("").parts
    flags = read_flags(conf)
    found = protocols(recipe, "/".join(name))
    assert found
    for protocol in found:
        args = eval_lm.parser().parse_args(["DATA", "--path", "x.pt", *protocol])
        assert args.carry_state == ("--carry-state" in flags)
        if args.model_overrides:
            assert ARCH_MODEL_NAME_REGISTRY[flags[flags.index("--arch") + 1]] == "fwp_xl_lm"
            assert args.model_overrides.keys() <= {field.name for field in fields(FwpXlLanguageModelConfig)}


def test_state_sizes_of_table_4_are_the_papers():
    (conf,) = (path for path in CONFS if path.stem == "xl")
    sizes = []
    for protocol in protocols("wikitext103", "carried/xl"):
        args = eval_lm.parser().parse_args(["DATA", "--path", "x.pt", *protocol])
        segment = args.tokens_per_sample or 384
        sizes.append(round(2 * (args.model_overrides["mem_len"] + segment) * 256 * 16 / 1e6, 2))
    assert sizes == [0.13, 1.05, 2.10, 6.29]
    assert all(f"({size:.2f} M" in conf.read_text() for size in sizes)


def test_the_attention_length_is_the_shortest_of_the_best_validation_perplexity(tmp_path):
    """To the two digits that the paper prints; the test set is read at that length."""
    perplexities = {
        "valid": {"init": 27.02, "attention 120": 28.1, "attention 500": 26.7712, "attention 1000": 26.7698},
        "test": {"init": 28.02, "attention 120": 28.3, "attention 500": 27.9, "attention 1000": 27.1},
    }
    for split, found in perplexities.items():
        for label, perplexity in found.items():
            (tmp_path / f"{split} {label}.json").write_text(json.dumps({"perplexity": perplexity}))
    assert attention_lengths.table(tmp_path)[2:] == [
        "| valid | 27.02 | 26.77 | 500 |",
        "| test | 28.02 | 27.90 | 500 |",
    ]


def test_attention_lengths_of_table_6():
    """A row is read as it was trained, then at lengths that include the paper's, and at none without a position."""
    for name, first, paper in (
        ("recurrent_shaw", ["--carry-state"], {256, 460, 500, 640}),
        ("relative", ["--stride", "1"], {120, 260}),
        ("layerwise_half", ["--stride", "1"], {120}),
    ):
        found = protocols("wikitext103", f"ablation/{name}")
        assert found[0] == first
        swept = [eval_lm.parser().parse_args(["DATA", "--path", "x.pt", *flags]) for flags in found[1:]]
        lengths = [args.model_overrides["mem_len"] if args.carry_state else args.tokens_per_sample for args in swept]
        assert paper <= set(lengths) and lengths == sorted(lengths)
        assert all(args.model_overrides.get("same_length", False) == args.carry_state for args in swept)
        assert name != "layerwise_half" or max(lengths) <= 128


def test_wikitext_is_counted_and_another_text_needs_to_be_meant(recipes, wikitext, tmp_path):
    script, out = recipes / "wikitext103" / "run.sh", tmp_path / "an out"
    arguments = ["prepare", "--data", wikitext, "--out", out]
    refused = run(script, *arguments)
    assert refused.returncode == 1 and not (out / "data").exists()
    assert "valid 216 in place of 217,646" in refused.stderr and "--any-text" in refused.stderr
    counts = lm_counts.check(out / "data.unfinished" / "bin", {"vocabulary": 21})
    assert counts == {"train": 1440, "valid": 216, "test": 192, "vocabulary": 21}
    (out / "data.unfinished" / "bin" / "valid.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"valid\.txt holds no text"):
        lm_counts.check(out / "data.unfinished" / "bin", {})
    meant = run(script, *arguments, "--any-text")
    assert meant.returncode == 0, meant.stderr
    assert (out / "data" / "bin" / "train.bin").exists() and not (out / "data.unfinished").exists()
    other = run(script, *arguments)
    assert other.returncode == 1 and "another --out" in other.stderr
    (wikitext / "wiki.test.tokens").unlink()
    missing = run(script, "prepare", "--data", wikitext, "--out", tmp_path / "new")
    assert missing.returncode == 1 and "neither wiki.test.tokens nor test.txt" in missing.stderr


def row(script, conf, data, out):
    """Trains a row, small, and evaluates it as it says; the results of the test set by their labels."""
    common = ["--conf", conf, "--out", out]
    trained = run(script, "train", *common, "--data", data, "--any-text", *SMALL)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    evaluated = run(script, "eval", *common)
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    again = [run(script, "train", *common, *SMALL), run(script, "eval", *common)]
    assert all(one.returncode == 0 and "fairseq-train" not in one.stderr for one in again)
    assert "fwp-eval-lm" not in again[1].stderr
    assert "is trained already" in again[0].stdout and "Next: bash" in again[0].stdout
    assert "is evaluated already" in again[1].stdout
    (folder,) = {path.parent for path in out.rglob("checkpoint_best.pt")}
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("test*.json")}


def test_a_row_of_wikitext_is_trained_and_evaluated_as_it_says(recipes, wikitext, tmp_path):
    results = row(recipes / "wikitext103" / "run.sh", "conf/xl/base.yaml", wikitext, tmp_path / "out")
    assert results.keys() == {"test 640 + 64"}
    # Flags add to the protocol, except those that are one; a device or a batch is not another result.
    script, folder = recipes / "wikitext103" / "run.sh", tmp_path / "out" / "xl" / "base"
    common = ["eval", "--conf", "conf/xl/base.yaml", "--out", tmp_path / "out", "--cpu", "--batch-size", "1"]
    same = run(script, *common)
    assert "is evaluated already" in same.stdout and "fwp-eval-lm" not in same.stderr, same.stderr
    more = run(script, *common, "--reset-after", "title")
    assert more.returncode == 0 and "replaces" not in more.stdout, more.stderr
    added = json.loads((folder / "test 640 + 64 reset-after title.json").read_text())
    assert added["state_size"] == 2 * (640 + 64) * 16
    own = run(script, *common[:-2], "--stride", "8")
    assert own.returncode == 0 and "--stride replaces the protocol of xl/base: --carry-state" in own.stdout, own.stderr
    assert json.loads((folder / "test stride 8.json").read_text())["tokens"] == 192
    (result,) = results.values()
    assert result["tokens"] == 192 and result["state_size"] == 2 * (640 + 64) * 16
    # What recipes/peps/carried.yaml relies on: of equal lengths, segments make no difference.
    losses = []
    for flags in (
        ["--tokens-per-sample", "1", "--model-overrides", "{'mem_len': 7}"],
        ["--model-overrides", "{'mem_len': 8, 'same_length': True}"],
    ):
        checkpoint = tmp_path / "out" / "xl" / "base" / "checkpoint_best.pt"
        arguments = [tmp_path / "out" / "data" / "bin", "--path", checkpoint, "--json", tmp_path / "result.json"]
        eval_lm.main([*map(str, arguments), "--carry-state", *flags])
        losses.append(json.loads((tmp_path / "result.json").read_text())["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] != pytest.approx(result["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["small/delta_favor16", "medium/delta_norm", "carried/sum_unnormalized", "carried/xl"])
def test_rows_of_every_table(recipes, wikitext, tmp_path, conf):
    results = row(recipes / "wikitext103" / "run.sh", f"conf/{conf}.yaml", wikitext, tmp_path / "out")
    labels = {"carried/xl": ["15 + 1", "64 + 64", "128 + 128", "384 + 384"], "carried/sum_unnormalized": ["carried"]}
    assert results.keys() == {f"test {label}" for label in labels.get(conf, ["window"])}


@pytest.mark.slow
def test_a_row_of_enwik8(recipes, tmp_path):
    (tmp_path / "enwik8").write_bytes(bytes(range(32, 120)) * 40 + b"\n")
    (result,) = row(recipes / "enwik8" / "run.sh", "conf/base.yaml", tmp_path, tmp_path / "out").values()
    assert result["characters"] == result["tokens"] == 177 and result["bits_per_character"] > 0


def test_enwik8_is_split_by_bytes_and_loses_none(tmp_path):
    data = bytes(range(256)) * 8
    (tmp_path / "enwik8").write_bytes(data)
    tokens = enwik8.write(tmp_path / "enwik8", tmp_path, None)
    back = {word: byte for byte, word in enumerate(enwik8.WORDS)}
    read = {}
    for split in ("train", "valid", "test"):
        lines = (tmp_path / f"{split}.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        read[split] = b"\n".join(bytes(back[word] for word in line.split()) for line in lines)
        assert tokens[split] == sum(len(line.split()) + 1 for line in lines)
    assert b"".join(read.values()) == data
    assert [len(part) for part in read.values()] == [1843, 102, 103]


def test_another_file_than_enwik8_is_refused(recipes, tmp_path):
    (tmp_path / "enwik8").write_bytes(b"text" * 1000)
    refused = run(recipes / "enwik8" / "run.sh", "prepare", "--data", tmp_path, "--out", tmp_path / "out")
    assert refused.returncode == 1 and "is not enwik8: its checksum differs" in refused.stderr
    assert not (tmp_path / "out" / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no stage ''"),
        (["tain"], "there is no stage 'tain'"),
        (["eval", "--out", "/nonexistent"], "run the stage prepare first"),
        (["prepare", "--any-text"], "give that too"),
        (["prepare", "--data", "/nonexistent"], "there is no folder /nonexistent"),
        (["train", "--save-dir", "x"], "set by the recipe"),
        (["train", "--conf", "nosuch"], "give --conf conf/NAME.yaml: there are "),
    ],
)
def test_wrong_arguments_are_explained(recipes, arguments, message):
    result = run(recipes / "wikitext103" / "run.sh", *arguments)
    assert result.returncode == 1 and message in result.stderr


def test_several_processes_are_started_by_what_launch_names(recipes, tmp_path):
    tools, out = tmp_path / "tools", tmp_path / "out"
    tools.mkdir()
    (out / "data").mkdir(parents=True)
    (tools / "torchrun").write_text('#!/bin/bash\necho "$@"; echo "| done training"\n')
    (tools / "torchrun").chmod(0o755)
    arguments = ["train", "--conf", "conf/small/delta.yaml", "--out", out, "--batch-size", "12"]
    launched = run(recipes / "wikitext103" / "run.sh", *arguments, tools=tools, LAUNCH="torchrun --nproc_per_node 8")
    assert launched.returncode == 0, launched.stderr
    words = shlex.split((out / "small" / "delta" / "train.log").read_text().split("\n")[0])
    assert words[:4] == ["+", "torchrun", "--nproc_per_node", "8"] and words[4].endswith("/fairseq-train")
    assert words[-2:] == ["--batch-size", "12"]
    unknown = run(recipes / "wikitext103" / "run.sh", *["train", "--conf", "conf/none.yaml", "--out", out])
    assert unknown.returncode == 1 and "small/delta.yaml" in unknown.stderr
