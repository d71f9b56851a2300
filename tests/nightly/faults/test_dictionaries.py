"""A dictionary with other words, but the same size as in training, is refused before it does harm."""

import logging
from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary
from fairseq.data.dictionary import TruncatedDictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train as fairseq_train
from small_text import write_text
from test_damaged_files import training

from fairseq_fwp.cli import eval_lm
from fairseq_fwp.patches import checkpoints


def train(data, save_dir, *flags):
    arguments = training(data, save_dir, "samples", "--log-format", "none", "--num-workers", 0, *flags)
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=[*map(str, arguments)])
    fairseq_train.main(convert_namespace_to_omegaconf(args))


def rewrite(data, change):
    """Change the lines of a dictionary."""
    lines = (data / "dict.txt").read_text().splitlines()
    (data / "dict.txt").write_text("\n".join(change(lines)) + "\n")


def reverse(lines):
    return lines[::-1]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return write_text(folder)


@pytest.fixture
def save_dir(data, tmp_path):
    """A folder with a checkpoint after two updates."""
    train(data, tmp_path / "save", "--max-update", 2)
    return tmp_path / "save"


def load_to_evaluate(save_dir, data):
    path = str(save_dir / "checkpoint_last.pt")
    return checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides={"data": str(data)})


SIZE = r"\(40 words, \w{12}\)"
SENTENCE = rf"data must have the target dictionary of the model's training {SIZE}, got another {SIZE}"


def test_a_training_does_not_go_on_with_other_words(data, save_dir):
    saved = {path: path.read_bytes() for path in save_dir.iterdir()}
    rewrite(data, reverse)
    expected = rf"^\S+checkpoint_last.pt cannot be resumed: \S+{SENTENCE}: pass .*--srcdict"
    with pytest.raises(ValueError, match=expected) as error:
        train(data, save_dir, "--max-update", 4)
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in save_dir.iterdir()} == saved


@pytest.mark.parametrize("flag", ["--save-dir", "--finetune-from-model"])
def test_a_training_does_not_start_with_more_words(data, save_dir, tmp_path, flag):
    """fairseq says that the architectures differ."""
    rewrite(data, lambda lines: [*lines, *(f"more{number} 1" for number in range(8))])
    sentence = rf"model's training {SIZE}, got another \(48 words, \w{{12}}\): pass .*--srcdict"
    if flag == "--save-dir":
        with pytest.raises(ValueError, match=rf"_last.pt cannot be resumed: .*{sentence}.*, or .*--save-dir$"):
            train(data, save_dir, "--max-update", 4)
    else:
        with pytest.raises(ValueError, match=rf"_last.pt cannot be loaded: .*{sentence}"):
            train(data, tmp_path / "tuned", flag, save_dir / "checkpoint_last.pt", "--max-update", 2)


def test_nothing_is_evaluated_with_other_words(data, save_dir):
    load_to_evaluate(save_dir, data)
    rewrite(data, reverse)
    with pytest.raises(ValueError, match=SENTENCE):
        load_to_evaluate(save_dir, data)
    with pytest.raises(SystemExit, match=rf"^fwp-eval-lm: \S+{SENTENCE}"):
        eval_lm.main([str(data), "--path", str(save_dir / "checkpoint_last.pt"), "--gen-subset", "valid", "--cpu"])


def test_the_same_words_counted_anew_are_the_same(data, save_dir):
    rewrite(data, lambda lines: [f"{line.split()[0]} 7" for line in lines])
    load_to_evaluate(save_dir, data)
    train(data, save_dir, "--max-update", 4)
    assert torch.load(save_dir / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 4


def test_a_new_training_may_have_other_words_and_says_so(data, save_dir, tmp_path, caplog):
    """From then on, the new words are those of the model."""
    rewrite(data, reverse)
    flags = ["--finetune-from-model", save_dir / "checkpoint_last.pt", "--max-update", 2]
    with caplog.at_level(logging.WARNING):
        train(data, tmp_path / "tuned", *flags)
    assert "of the model's training" in caplog.text
    load_to_evaluate(tmp_path / "tuned", data)


def test_checkpoints_that_say_nothing_of_a_dictionary_are_loaded(data, save_dir):
    path = save_dir / "checkpoint_last.pt"
    state = torch.load(path)
    for place in ("task_state", "extra_state"):
        assert state[place].pop(checkpoints.KEY).keys() == {"source_dictionary", "target_dictionary"}
    torch.save(state, path)
    rewrite(data, reverse)
    load_to_evaluate(save_dir, data)
    train(data, save_dir, "--max-update", 4)


def test_fingerprints_where_earlier_versions_saved_them(data, save_dir):
    path = save_dir / "checkpoint_last.pt"
    state = torch.load(path)
    for place in ("task_state", "extra_state"):
        state[place]["dictionaries"] = state[place].pop(checkpoints.KEY)
    torch.save(state, path)
    load_to_evaluate(save_dir, data)
    rewrite(data, reverse)
    with pytest.raises(ValueError, match=SENTENCE):
        load_to_evaluate(save_dir, data)
    with pytest.raises(ValueError, match=f"cannot be resumed: .*{SENTENCE}"):
        train(data, save_dir, "--max-update", 4)


def dictionary(*words):
    made = Dictionary()
    for word in words:
        made.add_symbol(word)
    return made


def test_what_a_fingerprint_tells_apart():
    def prints(source, target):
        return checkpoints.fingerprints(Namespace(source_dictionary=source, target_dictionary=target))

    plain = prints(dictionary("a", "b"), dictionary("a", "b"))
    assert plain["source_dictionary"] == plain["target_dictionary"]
    others = [dictionary("b", "a"), dictionary("a"), dictionary("a", "b", "c"), dictionary("ab"), dictionary("a", "B")]
    found = {prints(other, other)["source_dictionary"] for other in [*others, dictionary("a", "b")]}
    assert len(found) == len(others) + 1
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
    assert checkpoints.difference(evaluated, saved).startswith(
        "folder must have the dictionary of en of the model's training (5 words, "
    )


def test_a_task_without_a_dictionary_has_no_fingerprint():
    config = tasks.TASK_DATACLASS_REGISTRY["fwp_associative_retrieval"](seed=1, update_freq=[1])
    task = tasks.TASK_REGISTRY["fwp_associative_retrieval"].setup_task(config)
    assert checkpoints.fingerprints(task) == {} and checkpoints.difference(task, {"source_dictionary": "x"}) == ""
