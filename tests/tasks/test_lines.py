"""Separate lines: what a model reads and predicts of each, in training, evaluation, generation and Python."""

import json
import math
import runpy
import shutil
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from fairseq import options
from fairseq.data import data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm as fairseq_eval_lm
from support.command_server import run
from support.pairwise import looped
from support.refusals import refused
from support.small_text import SIZE, train_model, write_dictionary, write_split

import fairseq_fwp
from fairseq_fwp.cli import eval_lm, export
from fairseq_fwp.modules.decoding import END, STARTS, WORD
from fairseq_fwp.tasks.lines import FwpLinesConfig, FwpLinesTask

WORDS, LONGEST = 40, 11


@pytest.fixture
def make_task(tmp_path):
    """A function make_task(lines, **flags) -> a task that has loaded them as train."""

    def make(lines, **flags):
        write_dictionary(tmp_path / "data", WORDS)
        write_split(tmp_path / "data" / "train", lines, WORDS)
        defaults = {option.name: option.default for option in fields(FwpLinesConfig)}
        flags = {"data": str(tmp_path / "data"), "dataset_impl": None, **flags}
        task = FwpLinesTask.setup_task(Namespace(**{**defaults, **flags}))
        task.load_dataset("train")
        return task

    return make


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


@pytest.fixture(scope="module", params=STARTS)
def trained(tmp_path_factory, request):
    """Folder with data, and checkpoint_last.pt of a model with learned positions that was trained on lines."""
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
    return request.param, folder


def expected_scores(start, model, dataset):
    """Return the log-probabilities of a text's lines, one line after the other."""
    scores = []
    for line in (dataset[index].long() for index in range(len(dataset))):
        tokens = line if start == WORD else torch.cat([torch.tensor([model.dictionary.eos()]), line])
        log_probs, _ = model(tokens[:-1].unsqueeze(0)) if len(tokens) > 1 else (torch.zeros(1, 0, 1), None)
        scores.append(log_probs[0].gather(1, tokens[1:].unsqueeze(1)).flatten())
    return torch.cat(scores).double()


@torch.no_grad()
def test_a_model_is_evaluated_as_it_was_trained(trained):
    """By both commands, and by the other start where it is named."""
    start, folder = trained
    model = fairseq_fwp.load(folder / "checkpoint_last.pt")
    task = FwpLinesTask.setup_task(
        Namespace(data=str(folder), tokens_per_sample=16, add_bos_token=False, line_start=start)
    )
    dataset = data_utils.load_indexed_dataset(str(folder / "test"), task.dictionary)
    arguments = [str(folder), "--path", str(folder / "checkpoint_last.pt"), "--cpu", "--json", str(folder / "j.json")]
    for other in (start, *STARTS):
        expected = expected_scores(other, model, dataset)
        flags = [] if other == start else ["--line-start", other]
        eval_lm.main([*arguments, "--scores", str(folder / "scores.tsv"), *flags])
        rows = [line.split("\t") for line in (folder / "scores.tsv").read_text().splitlines()[1:]]
        scores = torch.tensor([float(row[2]) for row in rows], dtype=torch.float64)
        torch.testing.assert_close(scores, expected, rtol=0, atol=2e-5)
        result = json.loads((folder / "j.json").read_text())
        assert result["tokens"] == len(expected) and result["protocol"].startswith("each line by itself, ")
    parser = options.get_eval_lm_parser()
    flags = [
        *arguments[:-2],
        "--task",
        "fwp_lines",
        "--line-start",
        start,
        "--gen-subset",
        "test",
        "--batch-size",
        "3",
        "--log-format",
        "none",
        "--num-workers",
        "0",
    ]
    bits = fairseq_eval_lm.main(convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=flags)))
    loss = -float(expected_scores(start, model, dataset).mean())
    assert bits["loss"] == pytest.approx(loss / 0.6931471805599453, rel=1e-5)


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
    _, folder = trained
    refused(eval_lm.main, folder, "--path", folder / "checkpoint_last.pt", "--cpu", *flags, says=says)


@torch.no_grad()
def test_what_it_writes_follows_a_prompt(trained):
    """fairseq-interactive and Python write the same most probable words; lines of other lengths do not change them."""
    start, folder = trained
    prompts = ["w3 w5 w1", "w7", "w2 w2"]
    written = run(
        "fairseq-interactive", folder, "--task", "fwp_lines", "--line-start", start, "--cpu",
        "--path", folder / "checkpoint_last.pt", "--beam", 1, "--max-len-b", 9, "--buffer-size", 3, "--batch-size", 3,
        "--tokens-per-sample", 16, stdin="\n".join(prompts) + "\n",
    )  # fmt: skip
    texts = [line.split("\t")[2] for line in written.splitlines() if line.startswith("H-")]
    model = fairseq_fwp.load(folder / "checkpoint_last.pt")
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = model.encode(prompt)
        assert (tokens[0, 0] == model.dictionary.eos()) == (start == END)
        following = model.decode(model.generate(tokens, 9 - len(prompt.split()))[0])
        assert text == f"{prompt} {following}".strip()


def test_lines_of_a_text_are_generated_whole(trained):
    """By fairseq-generate, which has no </s> in front of them; fairseq-eval-lm gives lines no words of other lines."""
    start, folder = trained
    task = ["--task", "fwp_lines", "--line-start", start, "--path", folder / "checkpoint_last.pt", "--cpu"]
    task += ["--gen-subset", "test", "--tokens-per-sample", 16]
    written = run("fairseq-generate", folder, *task, "--beam", 1, "--max-len-b", 15, "--batch-size", 4)
    lines = [line.split("\t") for line in written.splitlines() if line[:2] in ("S-", "H-")]
    sources = {line[0][2:]: line[1] for line in lines if line[0][0] == "S" and len(line) > 1}
    hypotheses = {line[0][2:]: line[2] for line in lines if line[0][0] == "H"}
    assert len(sources) > 30 and sources.keys() <= hypotheses.keys()
    if start == WORD:
        assert all(hypotheses[number].startswith(source) for number, source in sources.items())
    refusal = run("fairseq-eval-lm", folder, *task, "--context-window", 4, status=1)
    assert "--context-window must be 0 with the task fwp_lines, got 4" in refusal


def hypotheses_of(written):
    """Return the words of each hypothesis and their scores (base 2), by the number of the line."""
    rows = [line.split("\t") for line in written.splitlines() if line[:2] in ("H-", "P-")]
    words = {row[0][2:]: row[2].split() for row in rows if row[0][0] == "H"}
    return {row[0][2:]: (words[row[0][2:]], [*map(float, row[1].split())]) for row in rows if row[0][0] == "P"}


@torch.no_grad()
def test_the_first_words_of_lines_are_continued_and_lines_are_scored(trained):
    """By fairseq-generate: --prefix-size counts from the line's first word, and a line of fewer words ends there."""
    start, folder = trained
    model = fairseq_fwp.load(folder / "checkpoint_last.pt")
    dataset = data_utils.load_indexed_dataset(str(folder / "test"), model.dictionary)
    lines = [line for line in (dataset[n] for n in range(len(dataset))) if start == END or len(line) > 1]
    task = ["--task", "fwp_lines", "--line-start", start, "--path", folder / "checkpoint_last.pt", "--cpu"]
    task += ["--gen-subset", "test", "--tokens-per-sample", 16, "--max-len-b", 15, "--batch-size", 4]
    for size, beams in ((1, 3), (2, 1), (5, 2), (20, 1)):
        written_last = run("fairseq-generate", folder, *task, "--prefix-size", size, "--beam", beams)
        written = hypotheses_of(written_last)
        assert len(written) == len(lines)
        for number, line in enumerate(lines):
            words = model.dictionary.string(line).split()
            given = words[: min(size, len(words))]
            found = written[str(number)][0]
            assert found[: len(given)] == given and (size <= len(words) or found == words)
        assert size < 20 or "BLEU4 = 100.00" in written_last
    scored = hypotheses_of(run("fairseq-generate", folder, *task, "--score-reference"))
    assert len(scored) == len(lines)
    for number, line in enumerate(lines):
        found, scores = scored[str(number)]
        tokens = line if start == WORD else torch.cat([torch.tensor([model.dictionary.eos()]), line])
        log_probs = model(tokens[:-1].unsqueeze(0))[0][0].gather(1, tokens[1:].unsqueeze(1)).flatten()
        expected = [0.0] * (start == WORD) + (log_probs / math.log(2)).tolist()
        assert found == model.dictionary.string(line).split() and scores == pytest.approx(expected, abs=1e-3)
    refusal = run("fairseq-interactive", folder, *task[:-2], "--score-reference", stdin="w1 w2\n", status=1)
    assert refusal.splitlines()[-1].endswith("fairseq-interactive has no reference: leave out --score-reference")


@torch.no_grad()
def test_a_hub_model_reads_a_line_as_in_training(trained):
    _, folder = trained
    model = fairseq_fwp.load(folder / "checkpoint_last.pt")
    hub = type(model.model).from_pretrained(str(folder), "checkpoint_last.pt", str(folder))
    text = "w3 w5 w1 w9"
    (tokens,) = model.encode(text)
    log_probs = model(tokens[:-1].unsqueeze(0))[0][0].gather(1, tokens[1:].unsqueeze(1)).flatten()
    found = hub.score(text)
    assert found["positional_scores"].tolist()[-len(log_probs) :] == pytest.approx(log_probs.tolist(), abs=1e-5)
    assert model.dictionary.string(found["tokens"]) == text
    with pytest.raises(ValueError, match="must have its end last, got words after it: score each line by itself"):
        hub.score("w1 w3 </s> w2 w5")
    following = model.decode(model.generate(model.encode("w3 w5"), 7)[0])
    assert hub.sample("w3 w5", beam=1, max_len_b=9) == f"w3 w5 {following}".strip()
    given = {"prefix_tokens": torch.tensor([[*map(model.dictionary.index, ("w3", "w5"))]])}
    ((same,),) = hub.generate([hub.encode("w7")], beam=1, max_len_b=9, inference_step_args=given)
    assert model.dictionary.string(same["tokens"]) == f"w3 w5 {following}".strip()


def test_another_task_is_named(trained, caplog):
    """fairseq's commands take the task that they are given: one that begins otherwise is a warning."""
    start, folder = trained
    task = ["--path", folder / "checkpoint_last.pt", "--cpu", "--gen-subset", "test", "--tokens-per-sample", 11]
    own = ["--task", "fwp_lines", "--line-start"]
    said = "was trained with --line-start " + start + ", but reads the text with "
    for flags, got in (
        ([], "no --line-start"), ([*own, WORD if start == END else END], "--line-start"), ([*own, start], None),
    ):  # fmt: skip
        written = run("fairseq-eval-lm", folder, *task, *flags)
        assert (said + (got or "") in written) == (got is not None)


def asked(*requests):
    return [Namespace(args=request) for request in requests]


@torch.no_grad()
def test_the_harness_reads_lines_as_in_training(trained):
    """It scores each line of a text and of a context by itself, and does not score a first word that is only read."""
    harness = pytest.importorskip("fairseq_fwp.cli.harness_model")
    start, folder = trained
    lm = harness.Harness(str(folder / "checkpoint_last.pt"), str(folder), device="cpu")
    model = fairseq_fwp.load(folder / "checkpoint_last.pt")
    dataset = data_utils.load_indexed_dataset(str(folder / "test"), model.dictionary)
    text = "".join(model.dictionary.string(dataset[n]) + "\n" for n in range(len(dataset)))
    (score,) = lm.loglikelihood_rolling(asked((text,)))
    assert score == pytest.approx(float(expected_scores(start, model, dataset).sum()), rel=1e-5)

    def expected(words, scored):
        tokens = model.encode(words)[0]
        log_probs = model(tokens[:-1].unsqueeze(0))[0][0].gather(1, tokens[1:].unsqueeze(1)).flatten()
        return float(log_probs[len(log_probs) - min(scored, len(log_probs)) :].sum())

    for (context, continuation), lines in {
        ("", "w3 w5"): [("w3 w5", 2)],
        ("w3", " w5 w1"): [("w3 w5 w1", 2)],
        ("w3", " w5\nw1"): [("w3 w5 </s>", 2), ("w1", 1)],
        ("w7 w7\nw3", " w5"): [("w3 w5", 1)],
        ("w7 w7\nw3 w4", " w5 </s> w6 w2".replace(" </s> ", "\n")): [("w3 w4 w5 </s>", 2), ("w6 w2", 2)],
    }.items():
        ((found, _),) = lm.loglikelihood(asked((context, continuation)))
        assert found == pytest.approx(sum(expected(*line) for line in lines), abs=1e-5)
    for context in ("w3 w5", "w7\nw3 w5"):
        following = model.decode(model.generate(model.encode("w3 w5"), 5)[0])
        assert lm.generate_until(asked((context, {"until": [], "max_gen_toks": 5}))) == [following]
    if start == WORD:
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
    start, folder = trained
    export.main([str(folder), "--path", str(folder / "checkpoint_last.pt"), "--out", str(folder / "exported")])
    program = runpy.run_path(str(Path(__file__).parents[2] / "recipes/onnx/generate.py"))
    ours, model = program["Model"](folder / "exported"), fairseq_fwp.load(folder / "checkpoint_last.pt")
    assert (ours.about["begin"], ours.about["lines"]) == ([2] * (start == END), True)
    dataset = data_utils.load_indexed_dataset(str(folder / "test"), model.dictionary)
    lines = [model.dictionary.string(dataset[n]) for n in range(len(dataset))]
    (folder / "test.txt").write_text("".join(f"{line}\n" for line in lines))
    expected = float((-expected_scores(start, model, dataset)).mean().exp())
    assert program["score"](ours, folder / "test.txt") == pytest.approx(expected, rel=1e-4)
    for text in ("w3 w5", "w7"):
        assert ours.encode(text).tolist() == model.encode(text).tolist()
        found = [*program["sample"](ours, *ours.begin(text), 9, 1, 1.0, 1)]
        assert ours.decode(found) == model.decode(model.generate(model.encode(text), 9)[0])
    flags = ["--task", "fwp_lines", "--line-start", start, "--cpu", "--path", folder / "checkpoint_last.pt"]
    flags += ["--beam", 3, "--max-len-b", 12, "--tokens-per-sample", 16]
    written = run("fairseq-interactive", folder, *flags, stdin="w3 w5\n")
    (best,) = [line.split("\t") for line in written.splitlines() if line.startswith("H-")]
    score, tokens = program["beam_search"](ours, *ours.begin("w3 w5"), 10, 3)[0]
    assert f"w3 w5 {ours.decode(tokens)}".strip() == best[2]
    assert score / math.log(2) == pytest.approx(float(best[1]), abs=1e-4)
    if start == WORD:
        with pytest.raises(ValueError, match="a text must have a word, with which the model begins, got ''"):
            ours.encode("")


@torch.no_grad()
def test_a_start_of_lines_is_read_by_every_command(trained, tmp_path):
    """A model of --add-bos-token reads <s>, and not </s>, before each line."""
    pytest.importorskip("onnxruntime")
    harness = pytest.importorskip("fairseq_fwp.cli.harness_model")
    start, folder = trained
    if start == WORD:
        return
    saved, path = torch.load(folder / "checkpoint_last.pt", weights_only=False), folder / "start.pt"
    saved["cfg"]["task"]["add_bos_token"] = saved["cfg"]["model"]["add_bos_token"] = True
    torch.save(saved, path)
    model = fairseq_fwp.load(path)
    tokens = model.encode("w3 w5 </s>")
    assert tokens[0, 0] == model.dictionary.bos() and tokens[0, -1] == model.dictionary.eos()
    expected = float(model(tokens[:, :-1])[0][0].gather(1, tokens[0, 1:].unsqueeze(1)).sum())
    (score,) = harness.Harness(str(path), str(folder), device="cpu").loglikelihood_rolling(asked(("w3 w5\n",)))
    export.main([str(folder), "--path", str(path), "--out", str(tmp_path / "exported")])
    program = runpy.run_path(str(Path(__file__).parents[2] / "recipes/onnx/generate.py"))
    (tmp_path / "text").write_text("w3 w5\n")
    perplexity = program["score"](program["Model"](tmp_path / "exported"), tmp_path / "text")
    (data := tmp_path / "data").mkdir()
    shutil.copy(folder / "dict.txt", data)
    write_split(data / "test", [tokens[0, 1:].tolist()], WORDS)
    eval_lm.main([str(data), "--path", str(path), "--cpu", "--json", str(tmp_path / "j.json")])
    loss = json.loads((tmp_path / "j.json").read_text())["loss"]
    assert (score, -3 * math.log(perplexity), -3 * loss) == pytest.approx([expected] * 3, abs=1e-4)


def test_a_line_without_a_word_cannot_be_continued_from_its_first_word(trained):
    start, folder = trained
    if start == WORD:
        task = FwpLinesTask.setup_task(
            Namespace(data=str(folder), tokens_per_sample=9, add_bos_token=False, line_start=WORD)
        )
        sample = {"net_input": {"src_tokens": torch.tensor([[2, 5], [2, 1]]), "src_lengths": torch.tensor([2, 1])}}
        with pytest.raises(ValueError, match="a line must begin with a word, got none"):
            task.inference_step(None, [], sample)
