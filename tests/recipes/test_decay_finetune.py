"""The recipe of converted models: its rows, its table, raw text in GPT-2's tokens, and all of it on tiny models."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from decay_finetune import bpe, rows
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from flags import read_flags
from safetensors.torch import save_file

from fairseq_fwp.cli import convert
from fairseq_fwp.convert.swap import INITIALISATIONS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "decay_finetune"
CORPORA = ("peps", "wikitext103", "gpt2")


@pytest.fixture
def ablations():
    """The plug-in's names, with its rules in the tables for as long as a test runs."""
    saved = [(table, dict(table)) for table in (UPDATE_RULES, INITIALISATIONS)]
    yield runpy.run_path(str(RECIPE / "mao_ablations" / "__init__.py"))
    for table, before in saved:
        table.clear()
        table.update(before)


@pytest.mark.parametrize("corpus", CORPORA)
def test_rows_are_what_the_commands_take(corpus, ablations):
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
        assert split in ("valid", "test") and 0 <= int(given) < found.get("tokens", 1024)
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


@pytest.mark.parametrize("corpus", CORPORA)
def test_batches_are_as_large_as_they_say(corpus):
    """fairseq makes them multiples of 8, unless it is told otherwise: 24 of 26."""
    flags = read_flags(RECIPE / "conf" / corpus / "finetune.yaml")
    given = dict(pairwise(flags))
    assert int(given["--batch-size"]) % int(given.get("--required-batch-size-multiple", 8)) == 0


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
        measured(tmp_path / "decay", measure, perplexity * 1.25 + (0.012345 if measure == "valid 0" else 0))
    measured(tmp_path / "decay" / "converted", "valid 0", 4e9)
    (tmp_path / "decay" / "trained").touch()
    (tmp_path / "decay" / "train.log").write_text('num. shared model params: 9\n | {"num_updates": "4000"}\n')
    measured(tmp_path / "delta" / "converted", "valid 0", float("inf"))
    (tmp_path / "delta" / "diverged").write_text("at update 3\n")
    (tmp_path / "delta" / "train.log").write_text('num. shared model params: 9\n | {"num_updates": "3"}\n')
    (tmp_path / "sum").mkdir()
    (tmp_path / "sum" / "train.log").write_text("+ fairseq-train that has just begun\n")
    conf = tmp_path / "rows.yaml"
    conf.write_text(yaml.dump({"here": corpus}))

    def write_table():
        """Its cells; the numbers pass through the file that is beside it."""
        results = run_command(sys.executable, RECIPE / "rows.py", "csv", conf, "here", tmp_path).stdout
        (tmp_path / "results.csv").write_text(results)
        made = run_command(sys.executable, RECIPE / "rows.py", "table", conf, "here", tmp_path / "results.csv")
        return results.splitlines(), [line.strip("| ").split(" | ") for line in made.stdout.splitlines()]

    results, lines = write_table()
    assert results[0] == 'run,state,updates,hours,"converted, valid 0",valid 0,test 0'
    assert results[3:5] == ["decay,8,4000,0.0,4000000000.0,12.512345,13.75", "delta,8,3,0.0,inf,diverged,diverged"]
    assert lines[0][:6] == ["row", "state", "converted, valid 0", "valid 0", "test 0", "of the source"]
    assert lines[2:] == [
        ["source", "1,000", "-", "10.00", "11.00", "-", "-", "-", "-", "-"],
        ["softmax", "1,000", "10.00", "9.00", "10.00", "111.1%", "100.0%", "14.50", "100.0%", "-"],
        ["decay", "8", "4.0e+09", "12.51", "13.75", "79.9%", "71.9%", "14.60", "99.3%", "4,000"],
        ["delta", "8", "inf", "diverged", "diverged", "-", "-", "diverged", "-", "3"],
        ["sum", "-", "not run", "not run", "not run", "-", "-", "20.00", "72.5%", "-"],
        ["ours", "-", "not run", "not run", "not run", "-", "-", "-", "-", "-"],
    ]
    # Where rows are converted from softmax after its fine-tuning, they are held against that, as the paper's are.
    conf.write_text(yaml.dump({"here": {**corpus, "start": "softmax"}}))
    _, lines = write_table()
    assert lines[0][5:7] == ["of the source", "paper valid 0"] and lines[2][0] == "before fine-tuning"
    assert lines[4][5:8] == ["71.9%", "14.60", "99.3%"]


@pytest.mark.parametrize("name", ["peps", "peps_earlier_source"])
def test_the_ledger_shows_the_numbers_of_its_files(name):
    ledger = (RECIPE / "RESULTS.md").read_text().splitlines()
    results = rows.read_csv(RECIPE / "results" / f"{name}.csv")
    lines = rows.table(rows.read_corpus(RECIPE / "rows.yaml", "peps"), results)
    assert len(results) > 5 and {line for line in lines if "not run" not in line} <= set(ledger)


def test_a_sample_is_as_long_as_the_source_allows(tmp_path):
    folder = tmp_path / "softmax" / "converted"
    folder.mkdir(parents=True)
    (folder / "flags.txt").write_text("--arch fwp_lm --tokens-per-sample 128 --attention-bias\n")
    assert [rows.tokens(rows.read_corpus(RECIPE / "rows.yaml", corpus), tmp_path) for corpus in CORPORA] == [
        512,
        512,
        128,
    ]


def test_each_paper_scores_its_own_checkpoint():
    """Mao 2022: App. B the end of the training, on WikiText-103; App. A the best validation, on the Pile."""
    found = [rows.read_corpus(RECIPE / "rows.yaml", corpus)["checkpoint"] for corpus in CORPORA]
    assert found == ["best", "last", "best"]


def test_ablations_are_the_equations(ablations):
    """Each against the loop over its equation, from a state on; gates beyond (0, 1) where there is no sigmoid."""
    q, k = torch.randn(2, 1, 2, 7, 3, dtype=torch.float64).unbind()
    v = torch.randn(1, 2, 7, 5, dtype=torch.float64)
    f, z = 2 * torch.randn_like(k), 2 * torch.randn_like(v)
    memory = total = torch.zeros(1, 2, 3, 5, dtype=torch.float64)
    divided, gated, plain = [], [], []
    keys = torch.zeros(1, 2, 3, dtype=torch.float64)
    grown = torch.zeros_like(memory)
    for q_t, k_t, v_t, f_t, z_t in zip(*(x.unbind(2) for x in (q, k, v, f, z)), strict=True):
        write, kept = k_t.unsqueeze(-1) * v_t.unsqueeze(-2), f_t.unsqueeze(-1) * z_t.unsqueeze(-2)
        total, keys = total + write, keys + k_t
        memory, grown = kept * memory + (1 - kept) * write, kept * grown + write
        read = [(q_t.unsqueeze(-2) @ weights).squeeze(-2) for weights in (total, memory, grown)]
        divided.append(read[0] / (q_t * keys).sum(-1, keepdim=True))
        gated.append(read[1])
        plain.append(read[2])
    for name, gates, expected in (
        ("divided_sum", (), divided), ("decay_gated_write", (f, z), gated), ("decay_no_sigmoid", (f, z), plain)
    ):  # fmt: skip
        operator, state, found = UPDATE_RULES[name].operator, None, []
        for part in (slice(0, 3), slice(3, 7)):
            out, state = operator(*(x[:, :, part] for x in (q, k, v, *gates)), state)
            found.append(out)
        torch.testing.assert_close(torch.cat(found, 2), torch.stack(expected, 2))
    gate = UPDATE_RULES["decay_no_sigmoid"].gates[0]
    assert gate.activation(v).equal(v) and gate.bias(100).aminmax().max < 1


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
    small = {"decoder-layers": 1, "decoder-embed-dim": 16, "decoder-ffn-embed-dim": 16}
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
        (["all", "--source-updates", "0"], "--source-updates must be a whole number of at least 1, got '0'"),
        (["all", "--corpus", "gpt2", "--source-updates", "4"], "--source-updates is of --corpus peps"),
        (["eval", "--rows", "softmax", "nosuch"], "there is no row nosuch: they are softmax local_w32 decay_m4"),
        (["all", "--lines", "0"], "--lines must be a whole number of at least 1"),
        (["all", "--max-updates", "x"], "fairseq-train refuses the flags: unrecognized arguments: --max-updates x."),
    ],
)
def test_wrong_arguments_are_explained(recipe, tmp_path, arguments, sentence):
    result = run(recipe, *arguments, "--out", tmp_path / "out")
    assert result.returncode == 1 and sentence in result.stderr


SPLITS = ("valid", "test")


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


def test_a_row_whose_validation_is_no_number_has_diverged(recipe, tmp_path):
    """fairseq ends such a training well, without a best checkpoint."""
    out, commands = tmp_path / "out", tmp_path / "commands"
    (out / "data" / "bin").mkdir(parents=True)
    (out / "softmax" / "converted").mkdir(parents=True)
    (out / "softmax" / "converted" / "flags.txt").write_text("--arch fwp_lm\n")
    commands.mkdir()
    said = "num. shared model params: 9", '2026-01-01 00:00:00 | INFO | {"valid_ppl": "nan", "valid_num_updates": "2"}'
    log = "\n".join([*said, "2026-01-01 00:00:00 | INFO | done training in 1.0 seconds"])
    for name, text in (("fairseq-train", f"echo '{log}'"), ("fwp-eval-lm", "exit 1")):
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    for stage in ("train", "eval"):
        command = ["bash", str(recipe), stage, "--data", str(tmp_path), "--out", str(out), "--rows", "softmax"]
        result = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    assert "softmax,,2,0.0,inf,diverged,diverged" in (out / "results.csv").read_text()


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
        "softmax decay_m4",
        *("decay_m4_spans", "delta_norm_m4", "divided_sum_m4", "local_w32"),
        "--source-updates",
        4,
        *FEW,
    ]
    result = run(recipe, "all", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "--max-update 4 " in (out / "source" / "settings.txt").read_text()
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
    arguments += ["--lines", 5]
    result = run(recipe, "all", "--corpus", "wikitext103", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = [
        line for line in (tmp_path / "out" / "table.md").read_text().splitlines() if line.startswith("| decay, m = 32")
    ]
    assert "| 22.10 | 20.70 |" in row and "not run" not in row
    assert [len((tmp_path / "out" / "data" / "bpe" / f"{name}.txt").read_text().splitlines()) for name in SPLITS] == [
        5,
        5,
    ]


@pytest.mark.slow
def test_gpt2(recipe, tmp_path):
    """From a folder as Hugging Face has it, with raw text."""
    from tests.convert import test_gpt2 as gpt2

    folder = tmp_path / "gpt2"
    words = save_vocabulary(folder)
    sizes = {"vocab_size": len(words), "eos_token_id": len(words) - 1, "n_positions": 128}
    tensors = gpt2.make_tensors() | {
        "wte.weight": torch.randn(len(words), gpt2.DIM),
        "wpe.weight": torch.randn(128, gpt2.DIM),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**gpt2.CONFIG, **sizes}))
    data = make_text(tmp_path / "text", f"{bpe.MARK}\n")
    arguments = ["--model", folder, "--data", data, "--out", tmp_path / "out", "--rows", "decay_m4", *FEW]
    result = run(recipe, "all", "--corpus", "gpt2", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "decay, m = 4" in result.stdout
    # GPT-2 is fine-tuned before it is converted, without dropout of weights that the converted model has not.
    (converted,) = [line for line in result.stderr.splitlines() if "--decoder-update-rule decay" in line]
    assert f"{tmp_path}/out/softmax/checkpoint_best.pt" in converted
    assert torch.load(tmp_path / "out" / "softmax" / "checkpoint_best.pt")["cfg"]["model"]["attention_dropout"] == 0
    # What is written generates, as the README has it: the folder of the conversion has the dictionary.
    tuned, vocabulary = tmp_path / "out" / "decay_m4", (folder / "vocab.json", folder / "merges.txt")
    said = run_command(
        "fairseq-interactive", tuned / "converted", "--user-dir", ROOT / "fairseq_fwp", "--task", "language_modeling",
        "--path", tuned / "checkpoint_best.pt", "--bpe", "gpt2", "--gpt2-encoder-json", vocabulary[0],
        "--gpt2-vocab-bpe", vocabulary[1], "--sampling", "--beam", 1, "--max-len-b", 12, "--cpu", input="the memory\n",
    )  # fmt: skip
    (text,) = [line.split("\t")[2] for line in said.stdout.splitlines() if line.startswith("D-0\t")]
    assert text.startswith("the memory") and len(text) > len("the memory")
