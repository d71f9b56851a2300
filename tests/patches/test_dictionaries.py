"""A dictionary with other words, but the same size as in training, is refused before it does harm."""

import logging
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq.data import Dictionary
from fairseq.data.dictionary import TruncatedDictionary
from fairseq.hub_utils import GeneratorHubInterface
from support.small_text import train_model, training, write_text

from fairseq_fwp.cli import eval_lm
from fairseq_fwp.patches import checkpoints

SIZE = r"\(40 words, \w{12}\)"
SENTENCE = rf"data must have the target dictionary of the model's training {SIZE}, got another {SIZE}"
MORE = rf"data must have the target dictionary of the model's training {SIZE}, got another \(48 words, \w{{12}}\)"


class Trained:
    """A text, and a checkpoint of two updates on it."""

    def __init__(self, folder):
        self.folder, self.data, self.path = folder, folder / "data", folder / "save" / "checkpoint_last.pt"

    def train(self, updates, *flags, out="save"):
        flags = ["--log-format", "none", "--num-workers", 0, "--max-update", updates, *flags]
        train_model(*training(self.data, self.folder / out, "samples", *flags))

    def evaluate(self, out="save"):
        path = str(self.folder / out / "checkpoint_last.pt")
        checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides={"data": str(self.data)})

    def rewrite(self, change):
        """Change the lines of the dictionary."""
        lines = (self.data / "dict.txt").read_text().splitlines()
        (self.data / "dict.txt").write_text("\n".join(change(lines)) + "\n")

    def reverse(self):
        self.rewrite(lambda lines: lines[::-1])

    def edit(self, change):
        """Change the parts of the checkpoint in which fingerprints are."""
        state = torch.load(self.path)
        for place in ("task_state", "extra_state"):
            change(state[place])
        torch.save(state, self.path)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    trained = Trained(tmp_path_factory.mktemp("begun"))
    write_text(trained.data)
    trained.train(2)
    return trained


@pytest.fixture
def trained(begun, tmp_path):
    return Trained(Path(shutil.copytree(begun.folder, tmp_path / "copy")))


def test_other_words_are_refused(trained):
    """Fingerprints had another name in earlier versions; before that, there were none, and such checkpoints load."""
    trained.evaluate()
    trained.reverse()
    for earlier in (False, True):
        if earlier:
            trained.edit(lambda place: place.update(dictionaries=place.pop(checkpoints.KEY)))
        saved = {path: path.read_bytes() for path in trained.path.parent.iterdir()}
        expected = rf"^\S+checkpoint_last.pt cannot be resumed: \S+{SENTENCE}: pass .*--srcdict[^\n]*$"
        with pytest.raises(ValueError, match=expected):
            trained.train(4)
        with pytest.raises(ValueError, match=SENTENCE):
            trained.evaluate()
        with pytest.raises(SystemExit, match=rf"^fwp-eval-lm: \S+{SENTENCE}"):
            eval_lm.main([str(trained.data), "--path", str(trained.path), "--gen-subset", "valid", "--cpu"])
        assert {path: path.read_bytes() for path in trained.path.parent.iterdir()} == saved
    trained.edit(lambda place: place.pop("dictionaries"))
    trained.evaluate()
    trained.train(4)


def test_a_training_does_not_start_with_more_words(trained):
    """fairseq says that the architectures differ."""
    trained.rewrite(lambda lines: [*lines, *(f"more{number} 1" for number in range(8))])
    with pytest.raises(ValueError, match=rf"_last.pt cannot be resumed: \S+{MORE}: pass .*--srcdict.*, or .*-dir$"):
        trained.train(4)
    with pytest.raises(ValueError, match=rf"_last.pt cannot be loaded: \S+{MORE}: pass .*--srcdict"):
        trained.train(2, "--finetune-from-model", trained.path, out="tuned")


def test_the_same_words_counted_again_are_the_same(trained):
    trained.rewrite(lambda lines: [f"{line.split()[0]} 7" for line in lines])
    trained.evaluate()
    trained.train(4)
    assert torch.load(trained.path)["optimizer_history"][-1]["num_updates"] == 4


def test_a_new_training_may_have_other_words_and_says_so(trained, caplog):
    """From then on, the new words are those of the model."""
    trained.reverse()
    with caplog.at_level(logging.WARNING):
        trained.train(2, "--finetune-from-model", trained.path, out="tuned")
    assert "of the model's training" in caplog.text
    trained.evaluate("tuned")


def dictionary(*words):
    made = Dictionary()
    for word in words:
        made.add_symbol(word)
    return made


def test_words_that_come_again_are_saved_so(trained):
    """fairseq itself saves `<s>` twice without its mark, and then refuses the file."""
    trained.rewrite(lambda lines: ["<s> 9 #fairseq:overwrite", *lines[1:-1], f"{lines[1]} #fairseq:overwrite"])
    trained.train(2, out="again")
    trained.evaluate("again")
    words = Dictionary.load(str(trained.data / "dict.txt"))
    words.save(str(trained.folder / "saved.txt"))
    assert (trained.folder / "saved.txt").read_text() == (trained.data / "dict.txt").read_text()
    found = Dictionary.load(str(trained.folder / "saved.txt"))
    assert (found.symbols, found.count, found.indices) == (words.symbols, words.count, words.indices)


def test_typed_words_are_cut_by_codes_next_to_the_dictionary(tmp_path, caplog):
    """By `fairseq-interactive` and `from_pretrained`; without codes, the first line with other words is told of."""
    words, folder = dictionary("t@@", "he", "lo@@", "w"), tmp_path / "bin"
    for path in (folder, tmp_path / "bpe"):
        path.mkdir()
    for codes, line, found, warned in (
        (None, "the t@@ he low", "<unk> t@@ he <unk>", "lacks 2 of 4, such as 'the': they are read as <unk>. If it is"),
        ("bpe/codes", "the t@@ he low", "t@@ he t@@ he lo@@ w", ""),
        ("bin/codes", "the d", "t@@ he <unk>", "lacks 1 of 3, such as 'd': they are read as <unk>\n"),
    ):
        if codes:
            (tmp_path / codes).write_text("#version: 0.2\nh e</w>\nl o\n")
        task = Namespace(cfg=Namespace(data=f"{folder}:other"), source_dictionary=words)
        expected = words.encode_line(found, add_if_not_exist=False).tolist()
        caplog.clear()
        for _ in range(2):
            (typed,), lengths = tasks.FairseqTask.get_interactive_tokens_and_lengths(task, [line], str)
            given = GeneratorHubInterface.binarize(Namespace(task=task, src_dict=words), line)
            assert typed.tolist() == given.tolist() == expected and lengths == [len(expected)]
        assert warned in caplog.text and len(caplog.records) == bool(warned)


def test_what_a_fingerprint_tells_apart():
    def prints(source, target):
        return checkpoints.fingerprints(Namespace(source_dictionary=source, target_dictionary=target))

    plain = prints(dictionary("a", "b"), dictionary("a", "b"))
    assert plain["source_dictionary"] == plain["target_dictionary"]
    texts = [("a", "b"), ("b", "a"), ("a",), ("a", "b", "c"), ("ab",), ("a", "B")]
    assert len({prints(dictionary(*words), dictionary("a"))["source_dictionary"] for words in texts}) == len(texts)
    short = prints(dictionary("a", "b"), TruncatedDictionary(dictionary("a", "b"), 5))
    assert short["source_dictionary"] == plain["source_dictionary"] != short["target_dictionary"]


def test_each_language_is_compared_with_itself():
    """A multilingual task has the first dictionary on both sides in training, and its pair's in evaluation."""
    words = {"de": dictionary("a"), "en": dictionary("b")}
    trained = Namespace(dicts=words, source_dictionary=words["de"], target_dictionary=words["de"])
    evaluated = Namespace(dicts=words, target_dictionary=words["en"], cfg=Namespace(data="folder"))
    saved = checkpoints.fingerprints(trained)
    assert checkpoints.difference(evaluated, saved) == ""
    evaluated.dicts = words | {"en": dictionary("c")}
    sentence = "folder must have the dictionary of en of the model's training (5 words, "
    assert checkpoints.difference(evaluated, saved).startswith(sentence)


def test_a_task_without_a_dictionary_has_no_fingerprint():
    config = tasks.TASK_DATACLASS_REGISTRY["fwp_associative_retrieval"](seed=1, update_freq=[1])
    task = tasks.TASK_REGISTRY["fwp_associative_retrieval"].setup_task(config)
    assert checkpoints.fingerprints(task) == {} and checkpoints.difference(task, {"source_dictionary": "x"}) == ""
