"""Separate lines: what a model reads and predicts of each, in training, evaluation, generation and Python."""

import math
import re
import runpy
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq.data import data_utils
from support.command_server import run
from support.jobs import hypotheses
from support.pairwise import looped
from support.refusals import refused
from support.scoring import evaluate, fairseqs_bits
from support.small_text import SIZE, train_model, write_dictionary, write_split

import fairseq_fwp
from fairseq_fwp.cli import eval_lm, export
from fairseq_fwp.modules.decoding import END, STARTS, WORD
from fairseq_fwp.tasks.lines import FwpLinesConfig, FwpLinesTask

WORDS, LONGEST = 40, 11
PROGRAM = str(Path(__file__).parents[2] / "recipes/onnx/generate.py")  # without PyTorch


@pytest.fixture
def make_task(load_task):
    """A function make_task(lines, **flags) -> a task that has loaded them as train."""
    return lambda lines, **flags: load_task(FwpLinesTask, FwpLinesConfig, {"train": lines}, **flags)


def batches(task, epoch=1, **flags):
    iterator = task.get_batch_iterator(task.dataset("train"), max_tokens=30, epoch=epoch, **flags)
    return [*iterator.next_epoch_itr(shuffle=True)]


@looped("start", STARTS)
def test_every_line_is_a_sample(make_task, random_lines, start):
    """Its targets are all its tokens, or all but the first word; each line is read once in an epoch, in any order."""
    lines = random_lines(60)
    task = make_task(lines, line_start=start)
    pad = task.dictionary.pad()
    read = []
    for batch in batches(task):
        inputs, targets = batch["net_input"]["src_tokens"], batch["target"]
        assert inputs.shape == targets.shape and inputs.numel() <= 30
        for source, target in zip(inputs, targets, strict=True):
            source, target = source[source != pad].tolist(), target[target != pad].tolist()
            assert source[1:] == target[:-1] and target[-1] == task.dictionary.eos()
            assert start == WORD or source[0] == task.dictionary.eos()
            read.append(target if start == END else [source[0], *target])
    expected = lines if start == END else [line for line in lines if len(line) > 1]
    assert sorted(read) == sorted(expected)
    order = [batch["id"].tolist() for batch in batches(task)]
    assert order != [batch["id"].tolist() for batch in batches(task, epoch=2)]


def test_the_first_symbol_may_be_that_of_a_start(make_task, random_lines):
    task = make_task(random_lines(5), add_bos_token=True)
    assert all(batch["net_input"]["src_tokens"][:, 0].eq(task.dictionary.bos()).all() for batch in batches(task))
    with pytest.raises(ValueError, match="--line-start must be end with --add-bos-token, got word"):
        make_task(random_lines(5), add_bos_token=True, line_start=WORD)


def test_lines_that_are_refused(make_task):
    """By their number, and not left out in silence as fairseq does."""
    with pytest.raises(ValueError, match=r"at most 3 tokens \(--tokens-per-sample\), got 4 in line 3: give a larger"):
        make_task([[5, 2], [2], [5, 6, 7, 8, 2]], line_start=WORD, tokens_per_sample=3)
    assert len(make_task([[5, 2], [2], [5, 6, 7, 8, 2]], line_start=WORD, tokens_per_sample=4).dataset("train")) == 2
    with pytest.raises(ValueError, match=r"train\.bin must hold a line of words, got none"):
        make_task([[2], [2]], line_start=WORD)
    with pytest.raises(ValueError, match="--tokens-per-sample must be at least 1, got 0"):
        make_task([[5, 2]], tokens_per_sample=0)


class Trained:
    """A model with learned positions that was trained on lines, the folder of its data, and the lines to test it on."""

    def __init__(self, start, folder):
        self.start, self.folder, self.path = start, folder, folder / "checkpoint_last.pt"
        self.flags = ["--task", "fwp_lines", "--line-start", start, "--path", self.path, "--cpu"]
        self.model = fairseq_fwp.load(self.path)
        dataset = data_utils.load_indexed_dataset(str(folder / "test"), self.model.dictionary)
        self.lines = [dataset[index].long() for index in range(len(dataset))]

    def scores(self, line, start=None):
        """Return the log-probabilities of what is predicted of a line."""
        begin = [self.model.dictionary.eos()] * ((start or self.start) == END)
        return scores_of(self.model, torch.cat([line.new_tensor(begin), line]))

    def of_all_lines(self, start=None):
        return torch.cat([self.scores(line, start) for line in self.lines]).double()

    def words(self, line):
        return self.model.dictionary.string(line)

    def following(self, prompt, length):
        """Return the most probable words after a prompt, up to so many tokens with it."""
        return self.model.decode(self.model.generate(self.model.encode(prompt), length - len(prompt.split()))[0])


def scores_of(model, tokens):
    """Return the log-probabilities (L,) of the tokens (L + 1,) after the first."""
    if len(tokens) == 1:
        return torch.zeros(0)
    return model(tokens[:-1].unsqueeze(0))[0][0].gather(1, tokens[1:].unsqueeze(1)).flatten()


@pytest.fixture(scope="module", params=STARTS)
def trained(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(2)
    write_dictionary(folder, WORDS)
    for split in ("train", "valid", "test"):
        lengths = torch.randint(0, LONGEST, (40,)).tolist()
        write_split(folder / split, [[*torch.randint(4, WORDS, (length,)).tolist(), 2] for length in lengths], WORDS)
    train_model(
        folder, "--task", "fwp_lines", "--line-start", request.param, "--arch", "gated_delta_lm_wt103", *SIZE, "--cpu",
        "--decoder-learned-pos", "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp", "--optimizer", "adam",
        "--lr", 0.05, "--max-update", 20, "--batch-size", 4, "--num-workers", 0, "--log-format", "none",
        "--disable-validation", "--no-epoch-checkpoints", "--save-dir", folder,
    )  # fmt: skip
    return Trained(request.param, folder)


@torch.no_grad()
def test_a_model_is_evaluated_as_it_was_trained(trained):
    """By both commands, and by the other start where it is named."""
    folder = trained.folder
    for other in (None, *STARTS):
        expected, flags = trained.of_all_lines(other), ["--line-start", other] if other else []
        result = evaluate(folder, "--scores", folder / "scores.tsv", *flags, data=".", path="checkpoint_last.pt")
        rows = [line.split("\t") for line in (folder / "scores.tsv").read_text().splitlines()[1:]]
        scores = torch.tensor([float(row[2]) for row in rows], dtype=torch.float64)
        torch.testing.assert_close(scores, expected, rtol=0, atol=2e-5)
        assert result["tokens"] == len(expected) and result["protocol"].startswith("each line by itself, ")
    bits = fairseqs_bits(folder, trained.path, *trained.flags)
    assert bits == pytest.approx(-float(trained.of_all_lines().mean()) / math.log(2), rel=1e-5)


@looped(
    "flags, says",
    [
        (["--line-start", "word", "--carry-state"], "not allowed with argument"),
        (["--reset-after", "</s>"], "--reset-after must be left out where each line is read by itself$"),
        (["--dynamic", "sgd", "--dynamic-lr", "1"], "--dynamic must be left out .* would learn from one line only"),
        (["--tokens-per-sample", "3"], r"lines of the text 'test' must have at most 3 tokens .*, got \d+ in line \d+$"),
    ],
)
def test_protocols_that_are_refused(trained, flags, says):
    refused(eval_lm.main, trained.folder, "--path", trained.path, "--cpu", *flags, says=says)


@torch.no_grad()
def test_what_it_writes_follows_a_prompt(trained):
    """fairseq-interactive and Python write the same most probable words; lines of other lengths do not change them."""
    prompts = ["w3 w5 w1", "w7", "w2 w2"]
    flags = ["--beam", 1, "--max-len-b", 9, "--buffer-size", 3, "--batch-size", 3, "--tokens-per-sample", 16]
    written = run("fairseq-interactive", trained.folder, *trained.flags, *flags, stdin="\n".join(prompts) + "\n")
    for prompt, (_, words) in zip(prompts, hypotheses(written), strict=True):
        assert (trained.model.encode(prompt)[0, 0] == trained.model.dictionary.eos()) == (trained.start == END)
        assert " ".join(words) == f"{prompt} {trained.following(prompt, 9)}".strip()


def test_lines_of_a_text_are_generated_whole(trained):
    """By fairseq-generate, which has no </s> in front of them; fairseq-eval-lm gives lines no words of other lines."""
    task = [*trained.flags, "--gen-subset", "test", "--tokens-per-sample", 16]
    written = run("fairseq-generate", trained.folder, *task, "--beam", 1, "--max-len-b", 15, "--batch-size", 4)
    sources = {int(number): words.split() for number, words in re.findall(r"^S-(\d+)\t(.*)$", written, re.MULTILINE)}
    found = dict(hypotheses(written))
    assert len(sources) > 30 and sources.keys() <= found.keys()
    if trained.start == WORD:
        assert all(found[number][: len(source)] == source for number, source in sources.items())
    refusal = run("fairseq-eval-lm", trained.folder, *task, "--context-window", 4, status=1)
    assert "--context-window must be 0 with the task fwp_lines, got 4" in refusal


@torch.no_grad()
def test_the_first_words_of_lines_are_continued_and_lines_are_scored(trained):
    """By fairseq-generate: --prefix-size counts from the line's first word, and a line of fewer words ends there."""
    lines = [line for line in trained.lines if trained.start == END or len(line) > 1]
    task = [*trained.flags, "--gen-subset", "test", "--tokens-per-sample", 16, "--max-len-b", 15, "--batch-size", 4]
    for size, beams in ((1, 3), (2, 1), (5, 2), (20, 1)):
        written = run("fairseq-generate", trained.folder, *task, "--prefix-size", size, "--beam", beams)
        found = dict(hypotheses(written))
        assert len(found) == len(lines)
        for number, line in enumerate(lines):
            words = trained.words(line).split()
            assert found[number][: min(size, len(words))] == words[:size]
            assert size <= len(words) or found[number] == words
        assert size < 20 or "BLEU4 = 100.00" in written
    written = run("fairseq-generate", trained.folder, *task, "--score-reference")
    found, scored = dict(hypotheses(written)), dict(re.findall(r"^P-(\d+)\t(.*)$", written, re.MULTILINE))
    assert len(scored) == len(lines)
    for number, line in enumerate(lines):
        expected = [0.0] * (trained.start == WORD) + (trained.scores(line) / math.log(2)).tolist()
        assert [*map(float, scored[str(number)].split())] == pytest.approx(expected, abs=1e-3)
        assert found[number] == trained.words(line).split()
    refusal = run("fairseq-interactive", trained.folder, *task[:-2], "--score-reference", stdin="w1 w2\n", status=1)
    assert refusal.splitlines()[-1].endswith("fairseq-interactive has no reference: leave out --score-reference")


@torch.no_grad()
def test_a_hub_model_reads_a_line_as_in_training(trained):
    model, folder, text = trained.model, str(trained.folder), "w3 w5 w1 w9"
    hub = type(model.model).from_pretrained(folder, "checkpoint_last.pt", folder)
    log_probs = scores_of(model, model.encode(text)[0])
    found = hub.score(text)
    assert found["positional_scores"].tolist()[-len(log_probs) :] == pytest.approx(log_probs.tolist(), abs=1e-5)
    assert model.dictionary.string(found["tokens"]) == text
    with pytest.raises(ValueError, match="must have its end last, got words after it: score each line by itself"):
        hub.score("w1 w3 </s> w2 w5")
    line = f"w3 w5 {trained.following('w3 w5', 9)}".strip()
    assert hub.sample("w3 w5", beam=1, max_len_b=9) == line
    given = {"prefix_tokens": torch.tensor([[*map(model.dictionary.index, ("w3", "w5"))]])}
    ((same,),) = hub.generate([hub.encode("w7")], beam=1, max_len_b=9, inference_step_args=given)
    assert model.dictionary.string(same["tokens"]) == line


def test_another_task_is_named(trained, caplog):
    """fairseq's commands take the task that they are given: one that begins otherwise is a warning."""
    task = ["--path", trained.path, "--cpu", "--gen-subset", "test", "--tokens-per-sample", 11]
    said = f"was trained with --line-start {trained.start}, but reads the text with "
    other = ["--task", "fwp_lines", "--line-start", WORD if trained.start == END else END]
    for flags, got in (([], "no --line-start"), (other, "--line-start"), (trained.flags, None)):
        written = run("fairseq-eval-lm", trained.folder, *task, *flags)
        assert (said + (got or "") in written) == (got is not None)


def asked(*requests):
    return [Namespace(args=request) for request in requests]


@torch.no_grad()
def test_the_harness_reads_lines_as_in_training(trained):
    """It scores each line of a text and of a context by itself, and does not score a first word that is only read."""
    harness = pytest.importorskip("fairseq_fwp.cli.harness_model")
    lm = harness.Harness(str(trained.path), str(trained.folder), device="cpu")
    text = "".join(f"{trained.words(line)}\n" for line in trained.lines)
    (score,) = lm.loglikelihood_rolling(asked((text,)))
    assert score == pytest.approx(float(trained.of_all_lines().sum()), rel=1e-5)

    def expected(words, scored):
        return float(scores_of(trained.model, trained.model.encode(words)[0])[-scored:].sum())

    for (context, continuation), lines in {
        ("", "w3 w5"): [("w3 w5", 2)],
        ("w3", " w5 w1"): [("w3 w5 w1", 2)],
        ("w3", " w5\nw1"): [("w3 w5 </s>", 2), ("w1", 1)],
        ("w7 w7\nw3", " w5"): [("w3 w5", 1)],
        ("w7 w7\nw3 w4", " w5\nw6 w2"): [("w3 w4 w5 </s>", 2), ("w6 w2", 2)],
    }.items():
        ((found, _),) = lm.loglikelihood(asked((context, continuation)))
        assert found == pytest.approx(sum(expected(*line) for line in lines), abs=1e-5)
    for context in ("w3 w5", "w7\nw3 w5"):
        asks = asked((context, {"until": [], "max_gen_toks": 5}))
        assert lm.generate_until(asks) == [trained.following("w3 w5", 7)]
    if trained.start == WORD:
        for context, continuation in (("", "w3"), ("w3\n", "w5")):
            with pytest.raises(ValueError, match=r"got none in .*, as the model reads the first word of a line"):
                lm.loglikelihood(asked((context, continuation)))
        with pytest.raises(ValueError, match="at least one token, got none in 'w3', as the model reads the first"):
            lm.loglikelihood_rolling(asked(("w3",)))
        with pytest.raises(ValueError, match="a context must end with a line that has a word to begin with, got ''"):
            lm.generate_until(asked(("", {"until": [], "max_gen_toks": 5})))


@pytest.mark.slow
@torch.no_grad()
def test_exported_models_read_lines_as_in_training(trained):
    """In the program without PyTorch, and in the page's beginning; a text is scored line by line."""
    pytest.importorskip("onnxruntime")
    folder = trained.folder
    export.main([str(folder), "--path", str(trained.path), "--out", str(folder / "exported")])
    program = runpy.run_path(PROGRAM)
    ours = program["Model"](folder / "exported")
    assert (ours.about["begin"], ours.about["lines"]) == ([2] * (trained.start == END), True)
    (folder / "test.txt").write_text("".join(f"{trained.words(line)}\n" for line in trained.lines))
    expected = float((-trained.of_all_lines()).mean().exp())
    assert program["score"](ours, folder / "test.txt") == pytest.approx(expected, rel=1e-4)
    for text in ("w3 w5", "w7"):
        assert ours.encode(text).tolist() == trained.model.encode(text).tolist()
        found = [*program["sample"](ours, *ours.begin(text), 9, 1, 1.0, 1)]
        assert ours.decode(found) == trained.following(text, 9 + len(text.split()))
    flags = [*trained.flags, "--beam", 3, "--max-len-b", 12, "--tokens-per-sample", 16]
    written = run("fairseq-interactive", folder, *flags, stdin="w3 w5\n")
    (best,) = [line.split("\t") for line in written.splitlines() if line.startswith("H-")]
    score, tokens = program["beam_search"](ours, *ours.begin("w3 w5"), 10, 3)[0]
    assert f"w3 w5 {ours.decode(tokens)}".strip() == best[2]
    assert score / math.log(2) == pytest.approx(float(best[1]), abs=1e-4)
    if trained.start == WORD:
        with pytest.raises(ValueError, match="a text must have a word, with which the model begins, got ''"):
            ours.encode("")


@torch.no_grad()
def test_a_start_of_lines_is_read_by_every_command(trained, tmp_path):
    """A model of --add-bos-token reads <s>, and not </s>, before each line."""
    pytest.importorskip("onnxruntime")
    harness = pytest.importorskip("fairseq_fwp.cli.harness_model")
    if trained.start == WORD:
        return
    folder, path = trained.folder, trained.folder / "start.pt"
    saved = torch.load(trained.path, weights_only=False)
    saved["cfg"]["task"]["add_bos_token"] = saved["cfg"]["model"]["add_bos_token"] = True
    torch.save(saved, path)
    model = fairseq_fwp.load(path)
    tokens = model.encode("w3 w5 </s>")
    assert tokens[0, 0] == model.dictionary.bos() and tokens[0, -1] == model.dictionary.eos()
    expected = float(scores_of(model, tokens[0]).sum())
    (score,) = harness.Harness(str(path), str(folder), device="cpu").loglikelihood_rolling(asked(("w3 w5\n",)))
    export.main([str(folder), "--path", str(path), "--out", str(tmp_path / "exported")])
    program = runpy.run_path(PROGRAM)
    (tmp_path / "text").write_text("w3 w5\n")
    perplexity = program["score"](program["Model"](tmp_path / "exported"), tmp_path / "text")
    (data := tmp_path / "data").mkdir()
    shutil.copy(folder / "dict.txt", data)
    write_split(data / "test", [tokens[0, 1:].tolist()], WORDS)
    loss = evaluate(tmp_path, path=str(path))["loss"]
    assert (score, -3 * math.log(perplexity), -3 * loss) == pytest.approx([expected] * 3, abs=1e-4)


def test_a_line_without_a_word_cannot_be_continued_from_its_first_word(trained):
    if trained.start == WORD:
        args = {"data": str(trained.folder), "tokens_per_sample": 9, "add_bos_token": False, "line_start": WORD}
        task = FwpLinesTask.setup_task(Namespace(**args))
        sample = {"net_input": {"src_tokens": torch.tensor([[2, 5], [2, 1]]), "src_lengths": torch.tensor([2, 1])}}
        with pytest.raises(ValueError, match="a line must begin with a word, got none"):
            task.inference_step(None, [], sample)
