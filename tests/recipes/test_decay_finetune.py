"""The recipe of converted models: its rows, its table, raw text in GPT-2's tokens, and all of it on tiny models."""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from decay_finetune import bpe, rows
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from flags import read_flags
from safetensors.torch import save_file

from fairseq_fwp.cli import convert

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "decay_finetune"
CORPORA = ("peps", "wikitext103", "gpt2")


@pytest.mark.parametrize("corpus", CORPORA)
def test_rows_are_what_the_commands_take(corpus):
    """Each has a target of its own; the samples are as long in evaluation as in fine-tuning."""
    found = rows.read_corpus(RECIPE / "rows.yaml", corpus)
    targets = {}
    for row in found["rows"]:
        made = convert.parser()
        flags = rows.target(found, row["run"]).split()
        args = made.parse_args(["x.pt", "--source", "fwp-lm", "--out", "y", *flags])
        targets[row["run"]] = convert.read_target(made, args)
        assert row["paper"].keys() <= set(found["measures"])
    assert len(set(targets.values())) == len(targets)
    assert [name for name, target in targets.items() if target is None] == [
        name for name in targets if name == "softmax"
    ]
    for measure in found["measures"]:
        split, given = measure.split()
        assert split in ("valid", "test") and 0 <= int(given) < found["tokens"]
    flags = read_flags(RECIPE / "conf" / corpus / "finetune.yaml")
    if "--tokens-per-sample" in flags:
        assert flags[flags.index("--tokens-per-sample") + 1] == str(found["tokens"])
    with pytest.raises(ValueError, match="there is no row x"):
        rows.target(found, "x")
    with pytest.raises(ValueError, match="has no corpus pile"):
        rows.read_corpus(RECIPE / "rows.yaml", "pile")


def test_a_tenth_of_the_updates():
    source, finetune = (read_flags(RECIPE / "conf" / "peps" / f"{name}.yaml") for name in ("source", "finetune"))
    updates = [int(flags[flags.index("--max-update") + 1]) for flags in (source, finetune)]
    assert updates[0] == 10 * updates[1]


def measured(folder, measure, perplexity, state=8):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{measure}.json").write_text(json.dumps({"perplexity": perplexity, "state_size": state}))


def test_table(tmp_path):
    corpus = {
        "measures": ["valid 0", "test 0"],
        "source": {},
        "rows": [
            {"run": "softmax", "row": "softmax", "paper": {"valid 0": 14.5}},
            {"run": "decay", "row": "decay", "target": "x", "paper": {"valid 0": 14.6}},
            {"run": "delta", "row": "delta", "target": "y", "paper": {"valid 0": "diverged"}},
            {"run": "sum", "row": "sum", "target": "z", "paper": {"valid 0": 20}},
            {"run": "ours", "row": "ours", "target": "y", "paper": {}},
        ],
    }
    for measure, perplexity in (("valid 0", 10.0), ("test 0", 11.0)):
        measured(tmp_path / "softmax" / "converted", measure, perplexity, 1000)
        measured(tmp_path / "softmax", measure, perplexity - 1)
        measured(tmp_path / "decay", measure, perplexity * 1.25)
    measured(tmp_path / "decay" / "converted", "valid 0", 4e9)
    measured(tmp_path / "delta" / "converted", "valid 0", float("inf"))
    (tmp_path / "delta" / "diverged").write_text("at update 3\n")
    (tmp_path / "delta" / "train.log").write_text('num. shared model params: 9\n | {"num_updates": "3"}\n')
    (tmp_path / "sum").mkdir()
    (tmp_path / "sum" / "train.log").write_text("+ fairseq-train that has just begun\n")
    lines = [line.strip("| ").split(" | ") for line in rows.table(corpus, tmp_path)]
    assert lines[0][:6] == ["row", "state", "converted, valid 0", "valid 0", "test 0", "of the source"]
    assert lines[2:] == [
        ["source", "1,000", "-", "10.00", "11.00", "-", "-", "-", "-", "-"],
        ["softmax", "1,000", "10.00", "9.00", "10.00", "111.1%", "100.0%", "14.50", "100.0%", "-"],
        ["decay", "8", "4.0e+09", "12.50", "13.75", "80.0%", "72.0%", "14.60", "99.3%", "-"],
        ["delta", "8", "inf", "diverged", "diverged", "-", "-", "diverged", "-", "3"],
        ["sum", "-", "not run", "not run", "not run", "-", "-", "20.00", "72.5%", "-"],
        ["ours", "-", "not run", "not run", "not run", "-", "-", "-", "-", "-"],
    ]


def save_vocabulary(folder, names=("vocab.json", "merges.txt"), merges=("t h", "th e")):
    """A byte-level vocabulary: GPT-2's names of the bytes, the merges, and the end of a text."""
    words = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges), bpe.MARK]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / names[1]).write_text("\n".join(["#version: 0.2", *merges, ""]))
    return words


@pytest.mark.parametrize("names", bpe.NAMES)
def test_raw_text_becomes_tokens_a_document_a_line(tmp_path, names):
    words = save_vocabulary(tmp_path / "vocabulary", names)
    text, out = tmp_path / "text.txt", tmp_path / "out.txt"
    text.write_text(f"the cat\n\n  sat é\n{bpe.MARK}\nthe end", encoding="utf-8")
    assert bpe.encode(tmp_path / "vocabulary", text, out) == len(out.read_text().split())
    lines = [[words[int(number)] for number in line.split()] for line in out.read_text().splitlines()]
    assert [line[0] for line in lines] == ["the", "the"]
    symbols = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    decoded = [bytes(symbols[symbol] for word in line for symbol in word).decode() for line in lines]
    assert decoded == ["the cat\n\n  sat é", "the end"]
    with pytest.raises(ValueError, match=r"has neither vocab\.json with merges\.txt nor encoder\.json with vocab\.bpe"):
        bpe.encode(tmp_path, text, out)
    text.write_text("")
    out.unlink()
    with pytest.raises(ValueError, match="holds no text"):
        bpe.encode(tmp_path / "vocabulary", text, out)
    assert not list(tmp_path.glob("out*"))


def test_a_vocabulary_of_another_model_is_refused(tmp_path):
    """In place of tokens that the model does not know, which would be read as unknown words."""
    save_vocabulary(tmp_path)
    text, out = tmp_path / "text.txt", tmp_path / "out.txt"
    text.write_text("the cat\n")
    (tmp_path / "config.json").write_text('{"vocab_size": 258}')
    with pytest.raises(ValueError, match=r"vocab\.json has tokens up to number 258, and the model of .* 258 words"):
        bpe.encode(tmp_path, text, out)
    (tmp_path / "config.json").write_text('{"vocab_size": 259}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\nc a\n")
    with pytest.raises(ValueError, match=r"the merges in .* make 'ca', which its vocabulary lacks"):
        bpe.encode(tmp_path, text, out)
    (tmp_path / "vocab.json").write_text('{"a": 1')
    with pytest.raises(ValueError, match=r"vocab\.json or merges\.txt is no vocabulary of GPT-2"):
        bpe.encode(tmp_path, text, out)
    assert not list(tmp_path.glob("out*"))


def run_command(*command, **options):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    return subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, **options)


def run(script, *arguments):
    return run_command("bash", script, *arguments)


@pytest.fixture
def recipe(tmp_path):
    """A copy of the recipe that runs in the environment of the tests, with a tiny source and few updates."""
    copy = tmp_path / "recipes"
    shutil.copytree(ROOT / "recipes", copy, ignore=shutil.ignore_patterns("results", "__pycache__"))
    (copy / "env.sh").write_text(f'root={str(ROOT)!r}\nrun() {{ echo "+ $*" >&2; "$@"; }}\n')
    script = copy / "decay_finetune" / "run.sh"
    # `merges` is no option: the text is as small as the source.
    script.write_text(script.read_text().replace("merges=8000", "merges=30"))
    source = copy / "decay_finetune" / "conf" / "peps" / "source.yaml"
    small = {"decoder-layers": 1, "decoder-embed-dim": 16, "decoder-ffn-embed-dim": 16, "max-update": 4}
    small |= {"adaptive-input-cutoff": 8, "adaptive-softmax-cutoff": 8}  # of some thirty words
    lines = [line for line in source.read_text().splitlines() if line.split(":")[0] not in small]
    source.write_text("\n".join([*lines, *(f"{name}: {value}" for name, value in small.items()), ""]))
    return script


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tune"], "there is no stage tune: it is prepare, train, eval or all"),
        (["all", "--corpus", "pile"], "there is no corpus pile"),
        (["all", "--corpus", "gpt2", "--data", "."], "give --model: what --corpus gpt2 starts from"),
        (["all", "--data", "/none"], "there is no folder /none: give --data"),
        (["train"], "run the stage prepare first"),
        (["all", "--save-dir", "x"], "--save-dir is set by the recipe"),
    ],
)
def test_wrong_arguments_are_explained(recipe, tmp_path, arguments, sentence):
    result = run(recipe, *arguments, "--out", tmp_path / "out")
    assert result.returncode == 1 and sentence in result.stderr


def make_text(folder, mark=""):
    folder.mkdir()
    line = "the memory is a matrix that every token reads and writes once or twice .\n"
    for split, lines in (("train", 100), ("valid", 9), ("test", 8)):
        (folder / f"{split}.txt").write_text(line * lines + mark + line)
    return folder


@pytest.mark.parametrize(
    ("found", "given", "same"),
    [
        (
            "--lr 1e-3 --min-lr 2e-05 --adam-betas \\(0.9\\,\\ 0.98\\)",
            "--lr 0.001 --min-lr 2e-5 --adam-betas \\(0.9\\,\\ 0.98\\)",
            True,
        ),
        ("--lr 1e-3", "--lr 1e-4", False),
        ("--lr 1e-3", "--lr 1e-3 --amp", False),
        ("--lr 1e-3 --amp", "--lr 1e-3", False),
        ("--arch a", "--arch b", False),
    ],
)
def test_settings_compare_numbers_by_their_value(tmp_path, found, given, same):
    (tmp_path / "settings.txt").write_text(f"{found} \n")
    command = 'root=$1; . "$1/recipes/lm_common.sh"; check_same "$2" "$3"'
    arguments = ["bash", "-c", command, "bash", str(ROOT), str(tmp_path / "settings.txt"), f"{given} "]
    result = subprocess.run(arguments, capture_output=True, text=True)
    assert result.returncode == (0 if same else 1) and ("another --out" in result.stderr) != same


FEW = ["--max-update", "2", "--warmup-updates", "1", "--batch-size", "1", "--cpu"]


@pytest.mark.slow
def test_peps_and_what_was_interrupted(recipe, tmp_path):
    data, out = make_text(tmp_path / "text"), tmp_path / "out"
    arguments = [
        "--data",
        data,
        "--out",
        out,
        "--rows",
        "softmax decay_m4 decay_m4_spans delta_relu_m4 local_w32",
        *FEW,
    ]
    result = run(recipe, "all", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    table = (out / "table.md").read_text()
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in table.splitlines()}
    # The source is what was converted, before it is tuned, and every row starts from it.
    assert cells["source"][2] == cells["softmax, fine-tuned as the others are"][1]
    assert cells["decay, m = 4"][-1].startswith("2") and cells["decay, m = 16"][1] == "not run"
    (out / "decay_m4" / "valid 0.json").unlink()
    shutil.rmtree(out / "local_w32")
    again = run(recipe, "all", *arguments)
    assert again.returncode == 0 and (out / "table.md").read_text() == table
    # What was missing was done, and nothing twice: the measure of one row, and another row with its three.
    commands = [line.split()[1] for line in again.stderr.splitlines() if line.startswith(("+ fairseq", "+ fwp"))]
    assert sorted(commands) == ["fwp-convert", *4 * ["fwp-eval-lm"]]
    assert {log.read_text().count("+ fairseq-train ") for log in out.glob("*/train.log")} == {1}
    other = run(recipe, "train", *arguments, "--lr", "1")
    assert other.returncode == 1 and "another --out" in other.stderr


@pytest.mark.slow
def test_wikitext103(recipe, tmp_path):
    """From a checkpoint of fairseq's transformer_lm_wiki103, as small as it gets."""
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY
    from fairseq.models.transformer_lm import TransformerLanguageModel

    data, folder = make_text(tmp_path / "text"), tmp_path / "model"
    folder.mkdir()
    dictionary = Dictionary()
    for word in (data / "train.txt").read_text().split():
        dictionary.add_symbol(word)
    dictionary.save(str(folder / "dict.txt"))
    args = Namespace(arch="transformer_lm_wiki103", task="language_modeling", decoder_layers=1, decoder_embed_dim=16)
    vars(args).update(
        decoder_ffn_embed_dim=16, decoder_attention_heads=2, tokens_per_sample=512, max_target_positions=512
    )
    vars(args).update(adaptive_input_cutoff="6,9", adaptive_softmax_cutoff="6,9", add_bos_token=False)
    ARCH_CONFIG_REGISTRY[args.arch](args)
    namespace = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = TransformerLanguageModel.build_model(Namespace(**vars(args)), namespace)
    torch.save({"args": args, "model": model.state_dict()}, folder / "model.pt")
    arguments = ["--model", folder / "model.pt", "--data", data, "--out", tmp_path / "out", "--rows", "decay_m32", *FEW]
    result = run(recipe, "all", "--corpus", "wikitext103", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = [
        line for line in (tmp_path / "out" / "table.md").read_text().splitlines() if line.startswith("| decay, m = 32")
    ]
    assert "| 22.10 | 20.70 |" in row and "not run" not in row


@pytest.mark.slow
def test_gpt2(recipe, tmp_path):
    """From a folder as Hugging Face has it, with raw text."""
    from tests.convert import test_gpt2 as gpt2

    folder = tmp_path / "gpt2"
    words = save_vocabulary(folder)
    sizes = {"vocab_size": len(words), "eos_token_id": len(words) - 1, "n_positions": 1024}
    tensors = gpt2.make_tensors() | {
        "wte.weight": torch.randn(len(words), gpt2.DIM),
        "wpe.weight": torch.randn(1024, gpt2.DIM),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**gpt2.CONFIG, **sizes}))
    data = make_text(tmp_path / "text", f"{bpe.MARK}\n")
    arguments = ["--model", folder, "--data", data, "--out", tmp_path / "out", "--rows", "softmax decay_m4", *FEW]
    result = run(recipe, "all", "--corpus", "gpt2", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "decay, m = 4" in result.stdout
    # What is written generates, as the README has it: the folder of the conversion has the dictionary.
    tuned, vocabulary = tmp_path / "out" / "decay_m4", (folder / "vocab.json", folder / "merges.txt")
    said = run_command(
        "fairseq-interactive", tuned / "converted", "--user-dir", ROOT / "fairseq_fwp", "--task", "language_modeling",
        "--path", tuned / "checkpoint_best.pt", "--bpe", "gpt2", "--gpt2-encoder-json", vocabulary[0],
        "--gpt2-vocab-bpe", vocabulary[1], "--sampling", "--beam", 1, "--max-len-b", 12, "--cpu", input="the memory\n",
    )  # fmt: skip
    (text,) = [line.split("\t")[2] for line in said.stdout.splitlines() if line.startswith("D-0\t")]
    assert text.startswith("the memory") and len(text) > len("the memory")
