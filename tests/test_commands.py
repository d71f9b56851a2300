"""fairseq's own commands with the plugin: jobs are trained, resumed, scored, generate, or are refused."""

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise as successive
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from support import jobs
from support.command_server import PLUGIN, run
from support.jobs import ADAPTIVE, BLOCKS, SIZE, STREAMS, check_same_bits, losses, train, validations
from support.pairwise import looped

from fairseq_fwp.evaluation import Protocol, Text, evaluate
from fairseq_fwp.models.presets import PRESETS_OF_MODELS

DELTA = [*BLOCKS, "--arch", "delta_lm_wt103", *SIZE]
XL = ["--arch", "xl_lm_wt103_large", *SIZE, "--decoder-attention-heads", 4, "--adaptive-softmax-cutoff", "15,30"]
XL += ["--mem-len", 8, "--half-loss"]
LAYER = ["--arch", "fwl_xl_lm_wt103", *XL[2:]]
CROSS_ENTROPY = ["--criterion", "cross_entropy"]
LOG = ["--log-format", "simple", "--log-interval", 1]
# Trained 10 updates, which is more than an epoch, and resumed after `stop` of them.
RESUMED = {
    "blocks": (DELTA, 5),
    "streams": ([*STREAMS, "--arch", "delta_lm_wt103", *SIZE, "--reset-state-after", "w3", "--update-freq", 2], 3),
    "FAVOR+ and averages": ([*BLOCKS, "--arch", "delta_favor_lm_wt103", *SIZE, "--store-ema", "--ema-decay", 0.9], 5),
    "shards": ([*STREAMS, "--arch", "delta_lm_wt103", *SIZE, "--batch-size", 24], 7),  # in the second shard
    "sentences": ([*DELTA, "--arch", "softmax_lm_wt103", "--sample-break-mode", "eos", *CROSS_ENTROPY], 5),
    "sentences, additive": ([*DELTA, "--arch", "sum_lm_wt103", "--sum-normalization", "--sample-break-mode", "eos"], 5),
    "window": ([*DELTA, "--arch", "softmax_lm_wt103", "--attention-window", 8, *CROSS_ENTROPY], 5),
    "Transformer-XL": ([*STREAMS, *XL], 5),
    "fast weight layer": ([*STREAMS, *LAYER], 3),
    "translation": ([*jobs.TRANSLATION, *LOG], 3),
    "translation by fairseq's own model": ([*jobs.TRANSLATION, "--arch", "transformer", *LOG], 3),
    "fairseq's own language model": ([*BLOCKS, "--arch", "transformer_lm", *SIZE, *CROSS_ENTROPY], 5),
}
FAST = ("blocks", "streams", "translation by fairseq's own model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return jobs.binarise_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return jobs.binarise_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The checkpoint of a trained delta model and the log of its training."""
    folder = tmp_path_factory.mktemp("trained")
    own = {"cwd": folder, "user_dir": os.path.relpath(PLUGIN, folder)}
    log = train(data, "checkpoints", *DELTA, "--log-file", "logs/train.log", **own)
    assert "done training" in (folder / "logs" / "train.log").read_text()
    return folder / "checkpoints" / "checkpoint_last.pt", log


def numbers(found):
    return [float(loss) for loss, _ in found]


def test_training_learns_and_says_nothing_alarming(trained):
    _, log = trained
    first, *_, last = numbers(losses(log))
    assert last < first
    assert "arning" not in log
    assert log.count("dropped cutoffs 20000,40000,200000") == 1
    (shared,) = re.findall(r"detected shared parameter: (.*)", log)
    assert shared == "decoder.embed_tokens.weight <- decoder.adaptive_softmax.weight"


@pytest.mark.parametrize("job", [pytest.param(job, marks=() if job in FAST else pytest.mark.slow) for job in RESUMED])
def test_resumed_training_goes_on_bit_for_bit(request, tmp_path, job):
    """In mid-epoch, with dropout, random features, averages, a carried state and the order of the samples."""
    flags, stop = RESUMED[job]
    text = request.getfixturevalue("pairs" if "translation" in job else "data")
    text = jobs.shards(text, tmp_path / "shard") if job == "shards" else text
    whole = train(text, tmp_path / "whole", *flags, "--save-interval-updates", stop, updates=10)
    assert "own" in job or ("Warning" if "translation" in job else "arning") not in whole
    assert len(losses(whole)) == 10
    (tmp_path / "parts").mkdir()
    (saved,) = (tmp_path / "whole").glob(f"checkpoint_*_{stop}.pt")
    shutil.copy(saved, tmp_path / "parts" / "checkpoint_last.pt")
    rest = train(text, tmp_path / "parts", *flags, "--save-interval-updates", stop, updates=10)
    assert "Loaded checkpoint" in rest and losses(rest) == losses(whole)[stop:]
    assert validations(rest) == validations(whole)[-len(validations(rest)) :]
    check_same_bits(tmp_path / "whole", tmp_path / "parts")
    finished = train(text, tmp_path / "parts", *flags, updates=10)
    assert finished.count("training is finished with --max-update 10, nothing is changed") == 1 and not losses(finished)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [DELTA, [*STREAMS, "--arch", "delta_lm_wt103", *SIZE]], ids=["blocks", "streams"])
def test_two_processes_are_one_with_all_batches(data, tmp_path, flags):
    """Interrupted or not, their results are equal to the last bit, and close to those of one process."""
    flags, streams = [*flags, "--dropout", 0, "--batch-size", 4], flags[1] != "language_modeling"
    whole = train(data, tmp_path / "whole", *flags, updates=8, processes=2)
    parts = [train(data, tmp_path / "parts", *flags, updates=updates, processes=2) for updates in (3, 8)]
    assert [loss for part in parts for loss in losses(part)] == losses(whole)
    check_same_bits(tmp_path / "whole", tmp_path / "parts")
    together = ["--batch-size", 8] if streams else ["--update-freq", 2]
    alone = train(data, tmp_path / "alone", *flags, *together, updates=8)
    assert numbers(losses(whole)) == pytest.approx(numbers(losses(alone)), abs=2e-3)


@pytest.mark.slow
def test_half_precision_learns_as_float32_does(data, tmp_path):
    """On a CPU --amp is float32 to the last bit, and torch says so; --fp16 ends before anything is written."""
    expected = losses(train(data, tmp_path / "float32", *DELTA, "--dropout", 0, updates=4))
    assert len(expected) == 4
    for precision in ("bf16", "memory-efficient-bf16", "memory-efficient-fp16", "amp"):
        log = train(data, tmp_path / precision, *DELTA, "--dropout", 0, f"--{precision}", updates=4)
        found = losses(log)
        assert numbers(found) == pytest.approx(numbers(expected), rel=0.05), precision
        dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "fp16" in precision else torch.float32
        saved = jobs.last(tmp_path / precision)["model"].values()  # in float32, as fairseq writes all weights
        assert all(torch.equal(x, x.to(dtype).float()) for x in saved if x.is_floating_point()), precision
    if not torch.cuda.is_available():
        assert found == expected and "GradScaler is enabled, but CUDA is not available" in log
        train(data, tmp_path / "fp16", *DELTA, "--fp16", status=1)
        assert not list((tmp_path / "fp16").glob("*.pt"))


def scored(data, checkpoint, *flags, split="test", size=32):
    """Return the loss (base 2) that fairseq-eval-lm finds; it is ours, of every token."""
    flags = ["--gen-subset", split, "--tokens-per-sample", size, "--batch-size", 4, "--cpu", *flags]
    log = run("fairseq-eval-lm", data, "--path", checkpoint, *flags)
    assert int(re.search(r"Evaluated ([\d,]+) tokens", log)[1].replace(",", "")) == jobs.count_tokens(data, split)
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", log)[1])


def probabilities(data, checkpoint, protocol, line=None):
    """Return those of the tokens of the test text, or of a line, by the package's own evaluation."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    lines = data_utils.load_indexed_dataset(str(data / "test"), task.dictionary)
    lines = lines if line is None else [task.dictionary.encode_line(line, add_if_not_exist=False)]
    text = Text.after(task.dictionary.eos(), torch.cat([*lines]).long())
    return evaluate(model.eval(), text, protocol).log_probs.exp()


def evaluated(data, checkpoint, size=32):
    return -float(probabilities(data, checkpoint, Protocol(size)).log2().mean())


def test_every_token_is_scored_and_validated(data, trained):
    """fairseq-eval-lm, fairseq-validate and the package's evaluation agree."""
    found = scored(data, trained[0])
    assert found == pytest.approx(evaluated(data, trained[0]), abs=1e-3)
    # without --required-batch-size-multiple 1, with which fairseq drops the last batch
    flags = ["--task", "language_modeling", "--valid-subset", "test", "--batch-size", 3, "--log-format", "simple"]
    valid = run("fairseq-validate", data, "--path", trained[0], "--cpu", *flags)
    assert float(re.search(r"loss ([\d.]+)", valid)[1]) == pytest.approx(found, abs=1e-3)


@pytest.mark.slow
def test_other_ways_to_score(data, trained, tmp_path):
    """With the plugin by its name, from any folder; by clusters in training's own validation."""
    flags = ["--path", trained[0], "--gen-subset", "test", "--tokens-per-sample", 32, "--cpu"]
    assert "Perplexity" in run("fairseq-eval-lm", data, *flags, user_dir="fairseq_fwp", cwd=tmp_path)
    flags = ["--adaptive-softmax-cutoff", "15,30", "--decoder-normalize-before", "--arch", "fwp_lm", *SIZE]
    log = train(data, tmp_path, *BLOCKS, *flags, updates=4)
    loss = scored(data, tmp_path / "checkpoint_last.pt", split="valid")
    assert float(validations(log)[-1]) == pytest.approx(loss, abs=2e-3)


@pytest.mark.slow
def test_an_ensemble_generates_by_the_mean_of_probabilities(data, trained, tmp_path):
    """Of models with states of constant and of growing size. fairseq-eval-lm takes one model only."""
    train(data, tmp_path, *BLOCKS, *SIZE, "--arch", "softmax_lm_wt103", updates=2)
    paths = trained[0], tmp_path / "checkpoint_last.pt"
    flags = ["--task", "language_modeling", "--beam", 2, "--max-len-b", 20, "--path", ":".join(map(str, paths))]
    log = run("fairseq-interactive", data, *flags, "--cpu", stdin="w1 w2\n")
    ((_, words),) = jobs.hypotheses(log)
    assert words[:2] == ["w1", "w2"] and len(words) > 2
    found = torch.tensor([*map(float, re.search(r"^P-0\t(.*)$", log, re.MULTILINE)[1].split())])
    expected = torch.stack([probabilities(data, path, Protocol(32), " ".join(words)) for path in paths]).mean(0)
    torch.testing.assert_close(found, expected.log2().float(), rtol=0, atol=1e-3)


@pytest.mark.slow
def test_streams_are_validated_with_their_state_and_scored_in_segments(data, tmp_path):
    """fairseq-validate takes the task's settings from the checkpoint and repeats the validation of the training."""
    log = train(data, tmp_path, *RESUMED["streams"][0])
    path = tmp_path / "checkpoint_last.pt"
    flags = ["--task", "fwp_language_modeling", "--path", path, "--batch-size", 8, "--cpu", "--log-format", "simple"]
    assert re.search(r"valid .*\| loss ([\d.]+)", run("fairseq-validate", data, *flags))[1] == validations(log)[-1]
    found = scored(data, path, "--task", "fwp_language_modeling", size=8)
    assert found == pytest.approx(evaluated(data, path, size=8), abs=1e-3)


def test_generation_goes_on_from_a_prompt_and_covers_a_split(data, trained):
    common = [data, "--task", "language_modeling", "--path", trained[0], "--cpu", "--max-len-b", 40, "--beam", 2]
    text = run("fairseq-interactive", *common, "--sampling", "--nbest", 2, stdin="w1 w2 w3\n")
    assert "DEBUG" not in text and "'nbest': 2" in text
    (_, generated), _ = jobs.hypotheses(text)
    assert generated[:3] == ["w1", "w2", "w3"] and len(generated) > 3
    out = run("fairseq-generate", *common, "--gen-subset", "test", "--sample-break-mode", "eos", "--batch-size", 5)
    assert len(jobs.hypotheses(out)) == len((data.parent / "test.txt").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", [arch for model, presets in PRESETS_OF_MODELS.items() for arch in presets if model != "fwp_transformer"]
)
def test_every_language_model_trains_is_scored_and_generates(data, tmp_path, arch):
    train(data, tmp_path, *BLOCKS, *SIZE, "--decoder-attention-heads", 8, "--arch", arch, updates=2)
    path = tmp_path / "checkpoint_last.pt"
    assert scored(data, path) == pytest.approx(evaluated(data, path), abs=1e-3)
    flags = ["--task", "language_modeling", "--beam", 2, "--max-len-b", 20, "--path", path, "--cpu"]
    assert len(jobs.hypotheses(run("fairseq-interactive", data, *flags, stdin="w1 w2\n"))) == 1


@pytest.mark.slow
def test_transformer_xl_is_evaluated_with_another_memory(data, tmp_path):
    train(data, tmp_path, *BLOCKS, *XL, updates=4)
    path = tmp_path / "checkpoint_last.pt"
    assert scored(data, path, "--model-overrides", "{'mem_len': 5, 'same_length': True, 'clamp_len': 3}") > 0
    wrong = ["--path", path, "--cpu", "--model-overrides", "{'mem_len': 0, 'same_length': True}"]
    log = run("fairseq-eval-lm", data, *wrong, status=1)
    assert "--mem-len must be at least 1 with --same-length, got 0" in log.splitlines()[-1]
    flags = ["--task", "language_modeling", "--path", path, "--cpu", "--beam", 2, "--max-len-b", 70, "--min-len", 60]
    ((_, words),) = jobs.hypotheses(run("fairseq-interactive", data, *flags, stdin="w1 w2\n"))
    assert len(words) > 40  # longer than a segment


@pytest.mark.slow
def test_hydra_with_the_yaml_of_a_preset(data, tmp_path):
    yaml = run("fwp-info", "--hydra", "delta_lm_wt103")
    (tmp_path / "delta.yaml").write_text(yaml)
    overrides = {
        "task.data": data, "task.tokens_per_sample": 32, "dataset.batch_size": 4,
        "model.decoder_layers": 2, "optimization.max_update": 2, "common.cpu": "true", "hydra.job.chdir": "false",
        "checkpoint.save_dir": tmp_path / "checkpoints", "hydra.run.dir": tmp_path / "logs",
    }  # fmt: skip
    program = Path(sys.executable).with_name("fairseq-hydra-train")
    command = [program, "--config-dir", tmp_path, "--config-name", "delta", *(f"{k}={v}" for k, v in overrides.items())]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    model = jobs.last(tmp_path / "checkpoints")["cfg"]["model"]
    assert (model["_name"], model["sum_normalization"], model["decoder_layers"]) == ("fwp_lm", True, 2)


# Refused: the last line names what must change, and nothing is written.
REFUSALS = [
    (["--decoder-update-rule", "hebb"], r"invalid choice: 'hebb' \(choose from"),
    (["--decoder-attention-heads", "5"], r"--decoder-embed-dim must be divisible by --decoder-attention-heads, got 32"),
    (["--decoder-feature-map", "identity"], r"must not be negative .*, got those of Identity"),
    (["--criterion", "fwp_distillation", "--teacher", "none.pt"], "--teacher must be a checkpoint"),
]


@pytest.mark.slow
@looped("flags, sentence", REFUSALS)
def test_bad_settings_are_refused_before_anything_is_written(data, tmp_path, flags, sentence):
    log = train(data, tmp_path / "save", *DELTA, *flags, status=1)
    assert re.search(sentence, log.strip().splitlines()[-1])
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.slow
def test_text_longer_than_the_model_is_refused(data, trained):
    log = run("fairseq-eval-lm", data, "--path", trained[0], "--cpu", "--gen-subset", "test", status=1)
    assert "must have at most 32 tokens" in log.splitlines()[-1]
    assert "Evaluated" not in log
    scored(data, trained[0], "--model-overrides", "{'max_target_positions': 1024}", size=1024)


# Conversion in three stages.

STAGES = {
    "attention": ["--criterion", "fwp_distillation", "--distillation", "attention", "--lr", "0.02"],
    "distribution": ["--criterion", "fwp_distillation", "--teacher-weight", "0.9", "--lr", "0.005"],
    "words": ADAPTIVE,
}


@pytest.mark.slow
def test_three_stages_each_stopped_and_resumed_and_in_half_precision(data, tmp_path):
    softmax = [*BLOCKS, *SIZE, "--lr", 0.01, "--arch", "softmax_lm_wt103"]
    train(data, tmp_path / "teacher", *softmax, updates=40)
    teacher, folder = tmp_path / "teacher" / "checkpoint_last.pt", tmp_path / "converted"
    delta = ["--decoder-update-rule", "delta", "--decoder-feature-map", "elu", "--sum-normalization"]
    run("fwp-convert", teacher, "--source", "fwp-lm", "--vocabulary", data / "dict.txt", "--out", folder, *delta)
    start, flags = folder / "checkpoint.pt", (folder / "flags.txt").read_text().split()
    flags += [*BLOCKS[2:], "--validate-interval-updates", 1]

    def learn(name, stage, updates, *more):
        own = [*STAGES[stage], "--ddp-backend", "legacy_ddp", "--finetune-from-model", start, *more]
        own += ["--teacher", teacher] if stage != "words" else []
        return train(data, tmp_path / name, *flags, *own, updates=updates)

    for stage in STAGES:
        whole = learn(stage, stage, 6)
        parts = [learn(f"{stage} in parts", stage, n) for n in (3, 6)]
        assert len(losses(whole)) == 6
        assert [loss for part in parts for loss in losses(part)] == losses(whole)
        if stage != "words":  # the words of this text are random
            first, *_, last = map(float, validations(whole))
            assert last < first
            half = numbers(losses(learn(f"{stage} in half precision", stage, 3, "--bf16")))
            assert half == pytest.approx(numbers(losses(whole)[:3]), rel=0.05)
        assert "arning" not in whole
        before, start = start, tmp_path / stage / "checkpoint_last.pt"
        saved, old = (torch.load(path, weights_only=False) for path in (start, before))
        assert saved["model"].keys() == old["model"].keys() and not saved.get("criterion")
        moved = {name for name, x in saved["model"].items() if not torch.equal(x, old["model"][name])}
        assert moved and (stage != "attention" or all(".self_attn." in name for name in moved))
    assert "ppl" in whole


# Translation.


@pytest.fixture(scope="module")
def translated(pairs, tmp_path_factory):
    """The folder of a translation model that was chosen by BLEU, so that the checkpoint holds numbers of numpy."""
    folder = tmp_path_factory.mktemp("translated")
    bleu = ["--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 9}', "--best-checkpoint-metric", "bleu"]
    log = train(pairs, folder, *jobs.TRANSLATION, *bleu, "--maximize-best-checkpoint-metric", updates=4)
    assert re.search(r"\| valid .* \| bleu \d", log) and "Warning" not in log
    return folder


def generate(pairs, path, *flags):
    common = ["--task", "translation", "--cpu", "--max-tokens", "60", "--max-len-b", "12", "--path", path]
    output = run("fairseq-generate", pairs, *common, *flags)
    assert f"Translated {jobs.SENTENCES['test']} sentences" in output
    return output


def test_every_sentence_is_translated(pairs, translated):
    """Without the plugin, groups of beams fail in batches that are not at the beginning of the data set."""
    searches = (2, ["--beam", 3, "--lenpen", 0.6, "--nbest", 2]), (1, ["--beam", 4, "--diverse-beam-groups", 2])
    for copies, flags in searches:
        found = jobs.hypotheses(generate(pairs, translated / "checkpoint_best.pt", *flags))
        assert sorted(number for number, _ in found) == sorted(copies * list(range(jobs.SENTENCES["test"])))


@pytest.mark.slow
def test_searches_of_fairseq(pairs, translated, tmp_path):
    """Given prefixes, repeated words, an ensemble, a language model, and an average of checkpoints."""
    best, last = translated / "checkpoint_best.pt", translated / "checkpoint_last.pt"
    references = [line.split() for line in (pairs.parent / "test.de").read_text().splitlines()]
    for number, words in jobs.hypotheses(generate(pairs, best, "--prefix-size", 2)):
        assert words[:2] == references[number][:2]
    for _, words in jobs.hypotheses(generate(pairs, best, "--no-repeat-ngram-size", 2)):  # fairseq takes 1 as none
        assert len({*successive(words)}) == max(len(words) - 1, 0)
    plain = jobs.hypotheses(generate(pairs, last))
    assert jobs.hypotheses(generate(pairs, f"{last}:{last}")) == plain

    text = tmp_path / "text"
    text.mkdir()
    for folder in (text, pairs):  # fairseq takes the language model's dictionary from the data of the translation
        shutil.copy(pairs / "dict.de.txt", folder / "dict.txt")
    for split in ("train", "valid"):
        for suffix in ("bin", "idx"):
            shutil.copy(pairs / f"{split}.en-de.de.{suffix}", text / f"{split}.{suffix}")
    train(text, text, *DELTA)
    language_model = ["--lm-path", text / "checkpoint_last.pt", "--lm-weight"]
    assert jobs.hypotheses(generate(pairs, last, *language_model, 0)) == plain
    assert jobs.hypotheses(generate(pairs, last, *language_model, 5)) != plain

    checkpoints = [torch.load(path, weights_only=False) for path in (best, last)]
    weights = [checkpoint["model"] for checkpoint in checkpoints]
    checkpoints[0]["model"] = {
        name: (x + weights[1][name]) / 2 if x.is_floating_point() else (x + weights[1][name]) // 2
        for name, x in weights[0].items()
    }
    torch.save(checkpoints[0], tmp_path / "average.pt")
    assert len(jobs.hypotheses(generate(pairs, tmp_path / "average.pt"))) == jobs.SENTENCES["test"]


@pytest.mark.slow
def test_alignments_name_a_word_of_the_source_for_each_word(pairs, translated):
    """Of each word of each translation to a word of the source, with an attention that keeps no word of it."""
    output = generate(pairs, translated / "checkpoint_best.pt", "--beam", "2", "--print-alignment")
    sources, words, alignments = (
        dict(re.findall(rf"^{kind}-(\d+)\t(?:-?[\d.]+\t)?(.*)$", output, re.MULTILINE)) for kind in "SHA"
    )
    assert len(alignments) == jobs.SENTENCES["test"]
    for number, alignment in alignments.items():
        found = [tuple(map(int, pair.split("-"))) for pair in alignment.split()]
        assert [target for _, target in found] == list(range(len(words[number].split())))
        assert all(0 <= place < len(sources[number].split()) for place, _ in found)


@pytest.mark.slow
def test_sentences_from_standard_input(pairs, translated):
    flags = ["--task", "translation", "--source-lang", "en", "--target-lang", "de", "--buffer-size", 3, "--beam", 2]
    flags += ["--path", translated / "checkpoint_last.pt", "--max-len-b", 12, "--cpu", "--nbest", 2]
    given = "en1 en2 en3\nen4\nen5 en6 en7 en8 en9\n"
    for search in ([], ["--sampling"]):
        found = jobs.hypotheses(run("fairseq-interactive", pairs, *flags, *search, stdin=given))
        assert sorted(number for number, _ in found) == [0, 0, 1, 1, 2, 2]
    found = jobs.hypotheses(run("fairseq-interactive", pairs, *flags, "--constraints", stdin="en1 en2\tde3\n"))
    assert found and all("de3" in words for _, words in found)


@looped("name, theirs, ours", [("cross_feature_map", "favor", "softmax"), ("encoder_layers", 2, 3)])
def test_overrides_that_weights_do_not_fit_are_named(pairs, translated, name, theirs, ours):
    path, flag = translated / "checkpoint_best.pt", f"--{name.replace('_', '-')}"
    flags = ["--path", path, "--cpu", "--model-overrides", str({name: ours, "dropout": 0.5})]
    log = run("fairseq-generate", pairs, "--task", "translation", *flags, status=1)
    sentence = f"{path} holds a model with {flag} {theirs}, but --model-overrides asks for {flag} {ours}, which"
    assert sentence in log.splitlines()[-1] and "RuntimeError" not in log
