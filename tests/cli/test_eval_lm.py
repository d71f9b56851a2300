"""fwp-eval-lm: comparison with fairseq's own evaluation, its output and files, and its refusals."""

import math
import random
import re
import shutil
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from support.command_server import PLUGIN, run
from support.pairwise import looped
from support.refusals import refused
from support.scoring import evaluate, fairseqs_bits
from support.small_models import make_dictionary
from support.small_text import preprocess, train_model, write_lines, write_split

from fairseq_fwp.cli import eval_lm, loading
from fairseq_fwp.patches.messages import silence_known_warnings

SIZE = 32  # of the blocks of the checkpoint's training


def test_characters_are_the_tokens_or_the_number_of_the_flag():
    letters, words = Dictionary(), make_dictionary(20)
    for symbol in "abc_":
        letters.add_symbol(symbol)
    letters.finalize(padding_factor=8)
    assert eval_lm.count_characters(letters, 7, None) == eval_lm.count_characters(letters, 7, 7) == 7
    with pytest.raises(ValueError, match="--characters must be 7, because every token is a character, got 13"):
        eval_lm.count_characters(letters, 7, 13)
    assert eval_lm.count_characters(words, 7, None) is None
    assert eval_lm.count_characters(words, 7, 30) == 30


def test_a_state_to_be_forgotten_at_documents_is_not_carried_over_them():
    """As the model was trained."""
    model = SimpleNamespace(max_positions=lambda: 8, decoder=SimpleNamespace(carries_state=True))
    task, flags = Namespace(reset_state_after="</s>"), ["data", "--path", "x", "--carry-state"]
    for other in ([], ["--reset-after", "blank-line"]):
        with pytest.raises(ValueError, match="pass --reset-after </s>"):
            eval_lm.read_protocol(eval_lm.parser().parse_args(flags + other), model, task)
    eval_lm.read_protocol(eval_lm.parser().parse_args([*flags, "--reset-after", "</s>"]), model, task)


@looped("of_task, limit, window", [(8, 32, 8), (32, 8, 8), (None, 8, 8)])
def test_a_window_is_as_long_as_in_training_and_no_longer_than_the_model_reads(of_task, limit, window):
    model = SimpleNamespace(max_positions=lambda: limit, decoder=SimpleNamespace(carries_state=False))
    args = eval_lm.parser().parse_args(["data", "--path", "x"])
    assert eval_lm.read_protocol(args, model, Namespace(tokens_per_sample=of_task)).window == window


# The last is that of a checkpoint from before the flag.
@looped("of_task, first", [({"add_bos_token": True}, "<s>"), ({"add_bos_token": False}, "</s>"), ({}, "</s>")])
def test_the_text_begins_with_the_token_of_the_training(of_task, first):
    dictionary, read = make_dictionary(20), []
    model = SimpleNamespace(max_positions=lambda: 8, decoder=SimpleNamespace(carries_state=False))
    cfg = SimpleNamespace(task=Namespace(tokens_per_sample=8, **of_task))

    def load_text(task, data, split, first, *reading):
        read.append(dictionary[first])
        raise ValueError("that is all")

    with pytest.MonkeyPatch.context() as patch:
        task = SimpleNamespace(source_dictionary=dictionary)
        patch.setattr("fairseq_fwp.checkpoints.pretrained.read", lambda path: SimpleNamespace(cfg=cfg))
        patch.setattr(loading, "load_model", lambda *given: (model, task))
        patch.setattr(loading, "load_text", load_text)
        with pytest.raises(ValueError, match="that is all"):
            eval_lm.run(eval_lm.parser().parse_args(["data", "--path", "x"]))
    assert read == [first]


# From here on with a checkpoint and binarised text.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with text/{train,test}.txt, data (binarised), data2 (other dictionary), delta.pt, softmax.pt."""
    folder = tmp_path_factory.mktemp("eval_lm")
    chooser = random.Random(1)
    (folder / "text").mkdir()
    for split, lines, words in (("train", 40, 40), ("test", 12, 40), ("other", 9, 9)):
        write_lines(folder / "text" / f"{split}.txt", lines, words, chooser)
    for name, train in (("data", "train"), ("data2", "other")):
        preprocess(folder / "text" / f"{train}.txt", folder / "text" / "test.txt", folder / name)
    for rule in ("delta", "softmax"):
        train_model(
            folder / "data", "--task", "language_modeling", "--arch", f"{rule}_lm_wt103", "--cpu",
            "--decoder-layers", 2, "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 48,
            "--tokens-per-sample", SIZE, "--adaptive-softmax-cutoff", "15,30", "--batch-size", 4,
            "--optimizer", "adam", "--lr", 0.01, "--max-update", 4, "--disable-validation", "--no-epoch-checkpoints",
            "--save-dir", folder / rule, "--log-format", "none", "--num-workers", 0,
        )  # fmt: skip
        (folder / rule / "checkpoint_last.pt").rename(folder / f"{rule}.pt")
    return folder


def bits_of_blocks(folder, path, context, data="data"):
    """Return the loss (base 2) of fairseq-eval-lm."""
    return fairseqs_bits(folder / data, folder / path, "--tokens-per-sample", SIZE, "--context-window", context)


@looped("path, context", [("delta.pt", SIZE - 1), ("softmax.pt", 20), ("delta.pt", 0)])
def test_it_agrees_with_fairseq(folder, path, context):
    found = evaluate(folder, "--context-window", context, path=path)
    assert found["loss_base_2"] == pytest.approx(bits_of_blocks(folder, path, context), rel=1e-6)


def test_reserved_symbols_are_scored_as_what_they_are(folder):
    """Not so padding, which is refused."""
    text = folder / "text" / "reserved.txt"
    text.write_text("w1 <s> w2 </s> w3 <unk> w4\n" * 9)
    preprocess(folder / "text" / "train.txt", text, folder / "reserved")
    found = evaluate(folder, "--context-window", 10, data="reserved")
    assert found["loss_base_2"] == pytest.approx(bits_of_blocks(folder, "delta.pt", 10, "reserved"), rel=1e-6)
    assert found["tokens"] == 72


def test_padding_in_a_text_is_refused(damaged):
    """In both commands, and in fairseq-preprocess with the plugin."""
    with pytest.raises(ValueError, match=r"words in \S+test.bin must not be <pad>, .*, got 1 of them: remove"):
        bits_of_blocks(damaged, "delta.pt", 0, "padded")
    text = damaged / "text" / "padded.txt"
    text.write_text("w1 <pad> w2\n")
    with pytest.raises(ValueError, match=r"words of a text must not be <pad>, .*, got it in 'w1 <pad> w2"):
        preprocess(damaged / "text" / "train.txt", text, damaged / "none")


def test_an_impossible_token_is_named(damaged):
    """In both commands: fwp-eval-lm's refusal is one of those below. What it refuses for its first token is scored."""
    with pytest.raises(ValueError, match="probabilities must be above 0, got 0 for the token '</s>': the model"):
        bits_of_blocks(damaged, "impossible.pt", 0)
    assert 0 < bits_of_blocks(damaged, "bos.pt", 0) < 10


def test_the_default_is_the_sliding_window(folder):
    whole = evaluate(folder)
    assert whole["loss"] == evaluate(folder, "--stride", 1, "--tokens-per-sample", SIZE)["loss"]
    assert whole["loss"] == pytest.approx(evaluate(folder, "--batch-size", 1)["loss"], rel=1e-6)
    assert evaluate(folder, "--stride", 8)["loss"] == evaluate(folder, "--context-window", SIZE - 8)["loss"]


def test_the_report_and_the_files_say_the_same(folder, capsys):
    scores = folder / "scores.tsv"
    found = evaluate(folder, "--scores", scores, "--characters", 1000)
    words = (folder / "text" / "test.txt").read_text().replace("\n", " </s> ").split()
    heading, *rows = [line.split("\t") for line in scores.read_text().splitlines()]
    assert heading == ["position", "token", "log_prob"]
    assert [(int(row[0]), row[1]) for row in rows] == list(enumerate(words))
    nats = -sum(float(row[2]) for row in rows)
    assert found["tokens"] == len(words)
    assert found["loss"] == pytest.approx(nats / len(words), rel=1e-6)
    assert found["bits_per_character"] == pytest.approx(nats / math.log(2) / 1000, rel=1e-6)
    assert found["state_size"] == 2 * 8 * 4 * 4
    report = capsys.readouterr().out
    for line in (
        rf"num\. model params: {found['parameters']:,}",
        r"state size: 256 numbers",
        rf"Evaluated {len(words)} tokens in",
        rf"Loss \(base e\): {found['loss']:.4f}",
        rf"Loss \(base 2\): {found['loss_base_2']:.4f}, Perplexity: {math.exp(found['loss']):.2f}",
        rf"Bits per character: {found['bits_per_character']:.4f}",
    ):
        assert re.search(line, report)
    assert not list(folder.glob("*.tmp"))


def test_the_carried_state_gives_the_loss_of_one_piece(folder, caplog):
    whole = evaluate(folder, "--carry-state")
    assert whole["loss"] == pytest.approx(evaluate(folder, "--carry-state", "--tokens-per-sample", 7)["loss"], rel=1e-6)
    longer = "{'max_target_positions': 1000}"
    piece = evaluate(folder, "--model-overrides", longer, "--tokens-per-sample", 1000)
    assert whole["loss"] == pytest.approx(piece["loss"], rel=1e-6)
    assert "absolute positions grow to" in caplog.text


def test_the_age_of_a_state_is_chosen_and_said(folder, caplog):
    """A part of the text begins with the state after the training text; a state far older than in training is named."""
    whole = evaluate(folder, "--carry-state", "--warm-up", 200)
    assert whole["protocol"].endswith("over segments of 32 tokens, after the last 200 tokens of the training text")
    assert evaluate(folder, "--carry-state", "--warm-up", 200, "--streams", 3)["loss"] != whole["loss"]
    assert not re.search("states are scored", caplog.text)  # this training has not saved how far it read
    state = torch.load(folder / "delta.pt")
    settings = {"--reset-state-after": None, "--carry-state": True, "tokens of text": 10**6, "processes": 1}
    read = {"epoch": 1, "iterations_in_epoch": 3, "settings": settings | {"--batch-size": 2, "--tokens-per-sample": 32}}
    torch.save({**state, "extra_state": {"train_iterator": read}}, folder / "aged.pt")
    parts = [len((folder / "text" / "test.txt").read_text().replace("\n", " </s> ").split()) // 96 + 1]
    evaluate(folder, "--carry-state", "--warm-up", 96, "--streams", *parts, path="aged.pt")
    assert not re.search("states are scored", caplog.text)
    evaluate(folder, "--carry-state", "--warm-up", 200, "--streams", *parts, path="aged.pt")
    assert re.search(r"states are scored after up to 2\d\d tokens, and none is older than 96 in training", caplog.text)


def test_dynamic_evaluation_with_a_step_changes_the_loss(folder, caplog):
    """Without a step nothing changes; with one the result names it."""
    plain = evaluate(folder, "--context-window", 0)
    still = evaluate(folder, "--context-window", 0, "--dynamic", "sgd", "--dynamic-lr", 0)
    assert still["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    rule = ["--dynamic", "rms", "--dynamic-lr", 0.001, "--dynamic-statistics", 2]
    with caplog.at_level("INFO"):
        moved = evaluate(folder, "--context-window", 0, *rule, "--reset-after", "</s>")
    assert "gathered statistics of 2 windows of train" in caplog.text
    assert moved["loss"] != pytest.approx(plain["loss"], abs=1e-5) and math.isfinite(moved["loss"])
    assert moved["protocol"].endswith("dynamic evaluation (RMS, epsilon 1e-05, lr 0.001, decay 0), reset after </s>")
    with caplog.at_level("INFO"):
        rule = ["--dynamic", "rms-sum", "--dynamic-lr", 0, "--dynamic-statistics", 10**6]
        summed = evaluate(folder, "--context-window", 0, *rule)
    (windows,) = re.findall(r"RMS-sum of (\d+) windows", summed["protocol"])
    assert f"gathered statistics of {windows} windows" in caplog.text


def test_settings_are_read_in_their_types(folder):
    expected = evaluate(folder, "--tokens-per-sample", 10)
    assert evaluate(folder, "--model-overrides", "{'tokens_per_sample': '10'}")["loss"] == expected["loss"]


def test_a_checkpoint_of_an_earlier_fairseq(folder):
    """Its settings are a Namespace without groups."""
    state = torch.load(folder / "delta.pt")
    groups = {name: group for name, group in state["cfg"].items() if isinstance(group, dict)}
    names = {name: group["_name"] for name, group in groups.items() if "_name" in group}
    settings = {name: value for group in groups.values() for name, value in group.items() if name != "_name"}
    args = Namespace(**{**settings, **names, "arch": names["model"]})
    torch.save({**state, "args": args, "cfg": None}, folder / "earlier.pt")
    silence_known_warnings()  # as importing the package does, before pytest sets its filters
    longer = ["--model-overrides", "{'max_target_positions': 50}", "--tokens-per-sample", 50]
    assert evaluate(folder, *longer, path="earlier.pt")["loss"] == evaluate(folder, *longer)["loss"]


@pytest.mark.slow
def test_from_the_command_line(folder, tmp_path):
    flags = ["--path", folder / "delta.pt", "--cpu", "--user-dir", PLUGIN, "--log-interval", 1]
    said = run("fwp-eval-lm", folder / "data", *flags, cwd=tmp_path)
    assert "Perplexity: " in said.splitlines()[-1]
    assert re.search(r"test: .* tokens=\d+, ppl=", said)
    assert "arning" not in said


# checkpoint, data, further arguments
REFUSALS = {
    "a folder for a checkpoint": ([".", "data"], r"the checkpoint .* cannot be read: Is a directory"),
    "a list for weights": (["list.pt", "data"], r"list\.pt must be a checkpoint of fairseq, got .* a model"),
    "other settings": (["settings.pt", "data"], r"settings\.pt must be a checkpoint of fairseq, got .* the settings"),
    "impossible": (["impossible.pt", "data"], r"probabilities must be above 0, got 0 for the token '</s>': the model"),
    "padding": (["delta.pt", "padded"], r"words in \S+test.bin must not be <pad>, .*, got 1 of them: remove"),
    "translation": (["translation.pt", "data"], r"must be a language model, got 'transformer'"),
    "begins of samples": (["bos.pt", "data"], r"without --add-bos-token or with --task .*, got .* fairseq-eval-lm can"),
    "a plugin's": (["plugin.pt", "data"], r"needs the model 'my_lm' and the task .*: give the plugin"),
    "another dictionary": (["delta.pt", "data2"], r"data2 must have the .*, got another \(16 words, .*pass the data"),
    "a dictionary of bytes": (["delta.pt", "bytes"], r"the dictionary in .*bytes cannot be read: Incorrect encoding"),
    "no plug-in": (["delta.pt", "data", "--user-dir", "/none"], r"must be the folder of a plug-in, got /none"),
    "no dictionary": (["delta.pt", "text"], r"the data folder \S+ must hold dict\.txt"),
    "no such subset": (["delta.pt", "data", "--gen-subset", "valid"], r"'valid' must exist in .*, got .*test, train"),
    "no text": (["delta.pt", "empty"], r"the text .*empty.test.bin must have at least one token, got none: pre"),
    "too long": (["delta.pt", "data", "--tokens-per-sample", 33], r"--tokens-per-sample must be at most 32, .*--mod"),
    "wide stride": (["delta.pt", "data", "--stride", 33], "--stride must be at most 32, .* a window, got 33"),
    "all is context": (["delta.pt", "data", "--context-window", 32], r"--context-window .* from 0 to 31, got 32"),
    "no state": (["softmax.pt", "data", "--carry-state"], r"--carry-state must be off for FwpLanguageModel"),
    "no more text": (["delta.pt", "data", "--carry-state", "--warm-up", 99999],
                     r"--warm-up must be at most [\d,]+, the tokens of the text 'train', got 99,999"),
    "no separator": (["delta.pt", "data", "--reset-after", "none"], r"--reset-after must be a symbol of .*'none'"),
}  # fmt: skip
OVERRIDES = {
    "{'heads': 3}": r"must name settings of .*delta\.pt, got heads$",
    "{'mem-len': 3}": r"must name settings of .*, got mem-len: write names with _ in place of -$",
    "{'model': 3}": r"must name settings of .*delta\.pt, got model$",
    "{'max_target_positions': 'x'}": r"max_target_positions must .*, got 'x': .* could not be converted to Integer$",
    "{'seed': 1.5}": r"seed must .*, got 1\.5: .* could not be converted to Integer$",
    "{'dropout': None}": r"dropout must .*, got None: field 'dropout' is not Optional$",
    "{'sum_normalization': 'x'}": r"sum_normalization must .*, got 'x': .* is not a valid bool",
    "{'fwp_backend': 'gpu'}": r"fwp_backend must .*, got 'gpu': .* expected one of .auto, kernel, fla, reference.$",
    "{'decoder_update_rule': 'x'}": r"the update rule must be one of .*, got 'x'",
    "{'decoder_layers': 3}": r"holds .* --decoder-layers 2, but --model-overrides asks for --decoder-layers 3, which",
}
# fmt: off
MISUSES = [
    ("--carry-state --batch-size 2", "--batch-size must be left out with --carry-state"),
    ("--carry-state --stride 2", "not allowed with"),
    ("--warm-up 9", "--carry-state must be given with --warm-up"),
    ("--streams 2", "--carry-state must be given with --streams"),
    ("--carry-state --streams 2 --reset-after x", "--reset-after must be left out with --streams"),
    ("--scores none/scores.tsv", r"must be in a folder that exists, got none/scores\.tsv"),
    ("--scores .", r"must be a file, got the folder \."),
    ("--model-overrides [1", "must be a dictionary of settings"),
    ("--scores a --json a", "--json and --scores must be different files, got a for both"),
    ("--stride 0", "must be an integer above 0, got '0'"),
    ("--dynamic sgd", "--dynamic-lr, the step size, must be given with --dynamic"),
    ("--dynamic-lr 1", "--dynamic must be sgd, rms or rms-sum with --dynamic-lr, got none"),
    ("--dynamic-statistics 1", "--dynamic must be sgd, rms or rms-sum with --dynamic-statistics, got none"),
    ("--dynamic sgd --dynamic-lr 1 --dynamic-epsilon 1", "must be rms or rms-sum with --dynamic-epsilon, got sgd"),
    ("--dynamic-decay 1", "--dynamic must be sgd, rms or rms-sum with --dynamic-decay, got none"),
    ("--dynamic rms-sum --dynamic-lr 1", "--dynamic-statistics must be given with --dynamic rms-sum"),
    ("--dynamic sgd --dynamic-lr 1 --batch-size 2", "--batch-size must be left out with --dynamic"),
    ("--dynamic sgd --dynamic-lr -1", "must be a number of at least 0, got '-1'"),
    ("--dynamic sgd --dynamic-lr big", "must be a number of at least 0, got 'big'"),
]
# fmt: on


@pytest.fixture(scope="module")
def damaged(folder):
    """The folder with the files that REFUSALS names."""
    (folder / "bytes").mkdir()
    (folder / "bytes" / "dict.txt").write_bytes(b"\xff\xfe 1\n")
    for name, tokens in (("empty", []), ("padded", [5, 1, 6, 2])):
        (folder / name).mkdir()
        shutil.copy(folder / "data" / "dict.txt", folder / name)
        write_split(folder / name / "test", [tokens])

    def edited(name, edit):
        state = torch.load(folder / "delta.pt")
        edit(state)
        torch.save(state, folder / name)

    edited("impossible.pt", lambda state: state["model"]["decoder.adaptive_softmax.bias"][2].fill_(-math.inf))
    edited("translation.pt", lambda state: state["cfg"]["model"].update(_name="transformer"))
    edited("bos.pt", lambda state: state["cfg"]["task"].update(add_bos_token=True))
    edited("list.pt", lambda state: state.update(model=[1]))
    edited("settings.pt", lambda state: state.update(cfg={"a": 1}))
    edited("plugin.pt", lambda state: state["cfg"]["model"].update(_name="my_lm"))
    return folder


@looped("case", [*REFUSALS, *OVERRIDES])
def test_refusals(damaged, tmp_path, case):
    overridden = (["delta.pt", "data", "--model-overrides", case], OVERRIDES.get(case))
    (path, data, *arguments), says = REFUSALS.get(case, overridden)
    files = ["--json", tmp_path / "out" / "result.json", "--scores", tmp_path / "out" / "scores.tsv"]
    (tmp_path / "out").mkdir(exist_ok=True)
    refused(eval_lm.main, damaged / data, "--path", damaged / path, "--cpu", *files, *arguments, says=says)
    assert not list((tmp_path / "out").iterdir())


@looped("arguments, says", MISUSES)
def test_misuse_is_refused_at_once(arguments, says):
    refused(eval_lm.main, "data", "--path", "delta.pt", *arguments.split(), says=says)


@looped("flag", ["--json", "--scores"])
@looped("name", ["delta.pt", "data/dict.txt", "data/test.bin", "data/../delta.pt"])
def test_inputs_are_never_written(folder, flag, name):
    before = (folder / name).read_bytes()
    arguments = [folder / "data", "--path", folder / "delta.pt", "--cpu", flag, folder / name]
    refused(eval_lm.main, *arguments, says=rf"{flag} must be another file than those that are read, got .*{name}")
    assert (folder / name).read_bytes() == before
