"""fairseq's commands for translation with the plugin: training by BLEU, generation, standard input."""

import random
import re

import pytest
import torch
from cli.test_eval_lm import train_model
from command_server import run
from fairseq import options
from fairseq_cli import generate

SIZE = [f"--{side}-{size}" for side in ("encoder", "decoder") for size in ("layers", "embed-dim", "ffn-embed-dim")]
SIZE = [word for flag, value in zip(SIZE, (2, 16, 24) * 2, strict=True) for word in (flag, str(value))]
SIZE += ["--encoder-attention-heads", "2", "--decoder-attention-heads", "2", "--share-all-embeddings"]
TRAINING = ["--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1", "--optimizer", "adam"]
TRAINING += ["--lr", "0.01", "--max-tokens", "200", "--cpu"]
BLEU = ["--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 9}', "--best-checkpoint-metric", "bleu"]
SENTENCES = {"train": 60, "valid": 11, "test": 13}  # no multiples of 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Invented pairs of sentences of different lengths, binarised, and a model that was chosen by BLEU."""
    folder, chooser = tmp_path_factory.mktemp("translation"), random.Random(1)
    for split, count in SENTENCES.items():
        for language in ("en", "de"):
            lengths = [chooser.randrange(1, 12) for _ in range(count)]
            lines = (" ".join(f"{language}{chooser.randrange(20)}" for _ in range(length)) for length in lengths)
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    prefixes = [word for split in SENTENCES for word in (f"--{split}pref", folder / split)]
    run(
        "fairseq-preprocess", "--source-lang", "en", "--target-lang", "de", "--joined-dictionary", *prefixes,
        "--destdir", folder / "bin", "--workers", "1",
    )  # fmt: skip
    log = train(folder, "checkpoints", 4)
    assert re.search(r"\| valid .* \| bleu \d", log) and "Warning" not in log
    return folder


def train(folder, name, updates):
    return run(
        "fairseq-train", folder / "bin", "--task", "translation", "--arch", "delta_favor_mt_wmt14_en_de", *SIZE,
        *TRAINING, *BLEU, "--maximize-best-checkpoint-metric", "--max-update", updates, "--save-dir", folder / name,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_by_bit(folder):
    """Dropout, the order of the sentences, the draws of FAVOR+ and the optimiser, from the middle of an epoch."""
    train(folder, "stopped", 3)
    train(folder, "stopped", 4)
    whole, resumed = (
        torch.load(folder / name / "checkpoint_last.pt", weights_only=False) for name in ("checkpoints", "stopped")
    )
    assert resumed["optimizer_history"][-1]["num_updates"] == 4
    assert all(torch.equal(value, resumed["model"][name]) for name, value in whole["model"].items())


def hypotheses(output):
    """The number of its sentence for each hypothesis printed."""
    return sorted(int(number) for number in re.findall(r"^H-(\d+)\t", output, re.MULTILINE))


@pytest.mark.parametrize(
    "options", [["--beam", "3", "--lenpen", "0.6", "--nbest", "2"], ["--beam", "4", "--diverse-beam-groups", "2"]]
)
def test_every_sentence_is_translated(folder, options):
    """The checkpoint was chosen by BLEU, so it holds numbers of numpy.

    Without the plugin, groups of beams fail in batches that are not at the beginning of the data set.
    """
    output = run(
        "fairseq-generate", folder / "bin", "--task", "translation", "--cpu", "--max-tokens", "60", "--max-len-b", "12",
        "--path", folder / "checkpoints" / "checkpoint_best.pt", *options,
    )  # fmt: skip
    copies = 2 if "--nbest" in options else 1
    assert hypotheses(output) == sorted(copies * list(range(SENTENCES["test"])))
    assert f"Translated {SENTENCES['test']} sentences" in output


@pytest.mark.slow
def test_alignments(folder):
    """Of each word of each translation to a word of the source, with an attention that keeps no word of it."""
    output = run(
        "fairseq-generate", folder / "bin", "--task", "translation", "--cpu", "--max-tokens", "60", "--max-len-b", "12",
        "--path", folder / "checkpoints" / "checkpoint_best.pt", "--beam", "2", "--print-alignment",
    )  # fmt: skip
    sources, words, alignments = (
        dict(re.findall(rf"^{kind}-(\d+)\t(?:-?[\d.]+\t)?(.*)$", output, re.MULTILINE)) for kind in "SHA"
    )
    assert len(alignments) == SENTENCES["test"]
    for number, alignment in alignments.items():
        pairs = [tuple(map(int, pair.split("-"))) for pair in alignment.split()]
        assert [target for _, target in pairs] == list(range(len(words[number].split())))
        assert all(0 <= place < len(sources[number].split()) for place, _ in pairs)


@pytest.mark.slow
def test_sentences_from_standard_input(folder):
    output = run(
        "fairseq-interactive", folder / "bin", "--task", "translation", "--source-lang", "en", "--target-lang", "de",
        "--path", folder / "checkpoints" / "checkpoint_last.pt", "--buffer-size", "3", "--sampling", "--beam", "2",
        "--nbest", "2", "--max-len-b", "12", "--cpu", stdin="en1 en2 en3\nen4\nen5 en6 en7 en8 en9\n",
    )  # fmt: skip
    assert hypotheses(output) == [0, 0, 1, 1, 2, 2]


ARCH = ["--arch", "delta_favor_mt_wmt14_en_de", *SIZE]
INCOMPATIBLE = {
    "--finetune-from-model": {
        "attention": (["--cross-feature-map", "softmax"], "--cross-feature-map favor", "--cross-feature-map softmax"),
        "layers": (["--encoder-layers", "3"], "--encoder-layers 2", "--encoder-layers 3"),
    },
    "--restore-file": {
        "biases": (["--attention-bias"], "no --attention-bias", "--attention-bias"),
        "rule": (["--decoder-update-rule", "decay"], "--decoder-update-rule delta", "--decoder-update-rule decay"),
    },
}


def go_on(folder, save_dir, *flags):
    """A training of one more mini-batch in this process."""
    train_model(
        folder / "bin", "--task", "translation", *ARCH, *TRAINING, "--max-update", 5, "--save-dir", save_dir,
        "--disable-validation", "--no-save", "--log-format", "none", "--num-workers", 0, *flags,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("option, case", [(option, case) for option, cases in INCOMPATIBLE.items() for case in cases])
def test_flags_that_a_checkpoint_does_not_fit_are_named(folder, tmp_path, option, case):
    """With all others that change what weights compute, in one sentence, where fairseq has the names of all weights."""
    path = folder / "checkpoints" / "checkpoint_last.pt"
    flags, theirs, ours = INCOMPATIBLE[option][case]
    theirs, ours = rf"(--[^.]*, )?{theirs}(,[^.]*)?", rf"(--[^.]*, )?{ours}(,[^.]*)?"
    with pytest.raises(
        ValueError, match=rf"^{path} holds a model with {theirs}, but this model has {ours}, which"
    ) as error:
        go_on(folder, tmp_path, option, path, "--dropout", 0.5, "--activation-fn", "gelu", *flags)
    assert "\n" not in str(error.value) and error.value.__cause__ is None and error.value.__suppress_context__


@pytest.mark.slow
@pytest.mark.parametrize("way", ["--finetune-from-model", "--restore-file", "resumed"])
def test_weights_that_compute_something_else_are_told_of(folder, tmp_path, caplog, way):
    """Once, by the flags that make them, when the training has taken them; with the same flags nothing is said."""
    path = folder / "checkpoints" / "checkpoint_last.pt"
    save_dir, flags = (path.parent, []) if way == "resumed" else (tmp_path, [way, path])
    go_on(folder, save_dir, *flags, "--dropout", 0.5)
    assert not [record for record in caplog.records if "was trained with" in record.message]
    go_on(folder, save_dir, *flags, "--activation-fn", "gelu", "--favor-offset", 0.1)
    (told,) = [record for record in caplog.records if "was trained with" in record.message]
    assert told.levelname == "WARNING" and told.message == (
        f"{path} was trained with --activation-fn relu, --favor-offset 0.0, but is loaded with "
        "--activation-fn gelu, --favor-offset 0.1: its weights now compute another function; if you do not "
        "want this, give the flags of its training"
    )


@pytest.mark.parametrize("name, value", [("cross_feature_map", "softmax"), ("encoder_layers", 3)])
def test_overrides_that_weights_do_not_fit_are_named(folder, name, value):
    path, trained = folder / "checkpoints" / "checkpoint_best.pt", {"cross_feature_map": "favor", "encoder_layers": 2}
    overrides = {name: value, "dropout": 0.5}
    arguments = [str(folder / "bin"), "--path", str(path), "--cpu", "--model-overrides", str(overrides)]
    flag = f"--{name.replace('_', '-')}"
    sentence = f"holds a model with {flag} {trained[name]}, but --model-overrides asks for {flag} {value}, which"
    with pytest.raises(ValueError, match=f"^{path} {sentence}") as error:
        generate.main(options.parse_args_and_arch(options.get_generation_parser(), input_args=arguments))
    assert error.value.__cause__ is None and error.value.__suppress_context__
