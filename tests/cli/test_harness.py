"""fwp-harness: its scores are those of fwp-eval-lm, its texts those of fairseq, its tasks run by the harness itself."""

import errno
import json
import logging
import random
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlitedict
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from lm_eval.api.model import CachingLM
from lm_eval.loggers import EvaluationTracker, evaluation_tracker
from support.pairwise import looped
from support.refusals import refused
from support.scoring import evaluate
from support.small_text import SIZE, prepare_random_text, train_model

from fairseq_fwp.cli import harness
from fairseq_fwp.cli.harness_model import Harness, Numbers, Words, find_device
from fairseq_fwp.patches.words import Pieces

KINDS = ("gated_delta_lm_wt103", "fwp_xl_lm", "fwp_fwl_lm")
LEARNED = "softmax_lm_wt103"  # with learned positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, its data (binarised), and KIND/checkpoint_last.pt."""
    folder = tmp_path_factory.mktemp("harness")
    prepare_random_text(folder)
    for kind in (*KINDS, LEARNED):
        train_model(
            folder / "data", "--arch", kind, "--cpu", "--tokens-per-sample", 16, "--batch-size", 4, "--optimizer",
            "adam", "--lr", 0.003, "--max-update", 3, "--disable-validation", "--no-epoch-checkpoints", "--save-dir",
            folder / kind, "--log-format", "none", "--num-workers", 0, "--task", "fwp_language_modeling", *SIZE[:6],
            *(["--decoder-learned-pos"] if kind == LEARNED else []),
        )  # fmt: skip
    return folder


def load(folder, kind=KINDS[0], **given):
    return Harness(str(folder / kind / "checkpoint_last.pt"), str(folder / "data"), device="cpu", **given)


def asked(*requests):
    return [SimpleNamespace(args=request) for request in requests]


@looped("kind", KINDS)
def test_a_text_has_the_loss_of_fwp_eval_lm(folder, kind):
    """In blocks as in training, and in longer ones, of which a whole number is the text: the last has more context."""
    text = (folder / "test.txt").read_text()
    for given, flags in (({}, []), ({"max_length": 28}, ["--model-overrides", {"max_target_positions": 28}])):
        path = f"{kind}/checkpoint_last.pt"
        length = given.get("max_length", 16)
        found = evaluate(folder, "--context-window", 0, "--tokens-per-sample", length, *flags, path=path)
        (score,) = load(folder, kind, **given).loglikelihood_rolling(asked((text,)))
        assert -score == pytest.approx(found["loss"] * found["tokens"], rel=1e-5)


@looped("kind", [*KINDS])
def test_continuations_are_scored_after_their_contexts(folder, kind):
    """Whatever else is asked, in batches of any size; too long contexts lose their first words."""
    chooser = random.Random(1)
    texts = [[f"w{chooser.randrange(30)}" for _ in range(chooser.randrange(2, 25))] for _ in range(12)]
    cuts = [chooser.randrange(max(0, len(text) - 16), len(text)) for text in texts]
    pairs = [(" ".join(text[:cut]), " ".join(["", *text[cut:]])) for text, cut in zip(texts, cuts, strict=True)]
    lm = load(folder, kind)
    found = lm.loglikelihood(asked(*pairs))
    for one in (1, 3):
        assert load(folder, kind, batch_size=one).loglikelihood(asked(*pairs)) == found
    for text, cut, (score, greedy) in zip(texts, cuts, found, strict=True):
        tokens = torch.tensor([*([2] if cut == 0 else []), *map(lm.dictionary.index, text)])[-17:]
        with torch.no_grad():
            scores = lm.decoder.adaptive_softmax.get_log_prob(lm.decoder(tokens[None, :-1])[0], None)[0]
        scored, targets = scores[-(len(text) - cut) :], tokens[-(len(text) - cut) :]
        assert score == pytest.approx(scored.gather(1, targets[:, None]).sum().item(), rel=1e-5)
        assert greedy == bool((scored.argmax(1) == targets).all())
    best = lm.generate("w1 w2", [], 3, 0.0)
    ((_, greedy),) = lm.loglikelihood(asked(("w1 w2", f" {best}")))
    assert greedy


# A context, a continuation, and the words of each that are read and scored.
BORDERS = {
    ("w1 w2", "."): ("w1", "w2."),
    ("w1 w2", "0 w3"): ("w1", "w20 w3"),
    ("w1 new", "er"): ("w1", "newer"),  # neither is in the dictionary
    ("w1 ", "w2"): ("w1", "w2"),
    ("w", "5"): ("</s>", "w5"),
    ("", "w5"): ("</s>", "w5"),
    ("w1", "\n"): ("w1", "</s>"),
    ("w1\n", "w2"): ("w1", "</s> w2"),
}


@looped("given, expected", [*BORDERS.items()])
def test_a_token_over_the_border_is_of_the_continuation(folder, given, expected):
    lm, asked_for = load(folder), [*map(str.split, expected)]
    before, scored = ([lm.dictionary.index(word) for word in words] for words in asked_for)
    assert lm.loglikelihood(asked(given)) == lm._loglikelihood_tokens([(given, before, scored)])


def test_nothing_is_not_scored(folder):
    """Its log-probability would be 0, the best of all choices."""
    lm = load(folder)
    for context, continuation in product(("", "w1", "w1 w2 "), ("", " ")):
        with pytest.raises(ValueError, match=f"must have at least one token, got none in '{continuation}' after"):
            lm.loglikelihood(asked(("w1", " w2"), (context, continuation)))
    with pytest.raises(ValueError, match="a text to score must have at least one token, got none in ' '"):
        lm.loglikelihood_rolling(asked((" ",)))


@looped("kind", KINDS)
def test_texts_are_those_of_fairseq(folder, kind):
    path = str(folder / kind / "checkpoint_last.pt")
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], {"data": str(folder / "data")})
    generator = SequenceGenerator([model.eval()], task.source_dictionary, beam_size=1, max_len_a=0, max_len_b=13)
    lm, texts = load(folder, kind), []
    encode = lm.tok_encode
    lm.tok_encode = lambda context: encode(context)[:1] + encode(context)  # fairseq's prefix has its first token twice
    for word in range(8):
        start = torch.tensor([encode(f"w{word}")])
        given = {"net_input": {"src_tokens": start, "src_lengths": torch.tensor([1])}}
        ((best,),) = generator.generate([model], given, prefix_tokens=start)
        expected = [lm.dictionary[token] for token in best["tokens"].tolist()[1:] if token != 2]
        texts += lm.generate_until(asked((f"w{word}", {"until": [], "max_gen_toks": len(expected)})))
        assert texts[-1].split() == expected
    longest = max(texts, key=len)
    stop = longest.split()[-1]
    (shorter,) = lm.generate_until(asked((f"w{texts.index(longest)}", {"until": [stop]})))
    assert shorter == longest.partition(stop)[0]


def test_sampling_follows_the_temperature_and_the_seed(folder):
    def sample(seed, temperature):
        torch.manual_seed(seed)
        given = {"until": ["no"], "max_gen_toks": 12, "do_sample": True, "temperature": temperature}
        return load(folder).generate_until(asked(("w1", given)))

    assert sample(1, 1.0) == sample(1, 1.0) != sample(2, 1.0)
    assert sample(1, 1e-3) == sample(2, 1e-3)
    for other in ({"top_p": 0.9}, {"do_sample": True, "temperature": -1.0}):
        with pytest.raises(ValueError, match=f"generation must be by do_sample and .*, got {[*other][-1]}"):
            load(folder).generate_until(asked(("w1", {"until": [], **other})))
    for most in (0, -2):  # whose texts would all be empty, and answers wrong
        with pytest.raises(ValueError, match=f"max_gen_toks must be a whole number above 0, got {most}"):
            load(folder).generate_until(asked(("w1", {"until": [], "max_gen_toks": most})))


GREEDY = [
    {"do_sample": False},
    {"do_sample": False, "temperature": 0.0},
    {"do_sample": False, "temperature": 1},
    {"temperature": 0.0},
    {"do_sample": False, "num_beams": 1},
]


@looped("settings", GREEDY)
def test_the_most_probable_tokens_by_any_name(folder, settings):
    """As tasks of lm_eval ask for them."""
    lm = load(folder)
    asks = asked(("w1", {"until": ["no"], "max_gen_toks": 5, **settings}))
    assert lm.generate_until(asks) == [lm.generate("w1", ["no"], 5, 0.0)]


def test_a_context_leaves_learned_positions_for_new_tokens(folder):
    lm, words = load(folder, LEARNED), [f"w{word}" for word in range(20)]

    def write(words, most):
        return lm.generate_until(asked((" ".join(words), {"until": ["no"], "max_gen_toks": most})))

    for most in (1, 5, 15):
        assert write(words, most) == write(words[-(16 - most) :], most)
    with pytest.raises(ValueError, match=r"must be fewer than the 16 learned positions, got up to 16: .*max_gen_toks"):
        write(words, 16)
    with pytest.raises(ValueError, match="max_length must be at most 16, the learned positions, got 17"):
        load(folder, LEARNED, max_length=17)


def test_lines_and_split_words_come_back(folder, tmp_path):
    dictionary = Dictionary()
    for word in ("a@@", "b", "c"):
        dictionary.add_symbol(word)
    (tmp_path / "codes").write_text("#version: 0.2\nb c</w>\n")
    words = Words(Pieces(dictionary, tmp_path / "codes"))
    tokens = [token for token, _ in words.pieces("ab c\n\nc b")]
    assert [dictionary[token] for token in tokens] == ["a@@", "b", "c", "</s>", "</s>", "c", "b"]
    assert words.decode(tokens) == "ab c\n\nc b"
    # As subword-nmt and fairseq read a file: only an end of a line ends one, and only blanks separate words to split.
    found = words.pieces("b\x85c\r\nb\rc")
    assert [dictionary[token] for token, _ in found] == ["<unk>", "<unk>", "c", "</s>", "b", "</s>", "c"]


def test_the_tokens_of_a_tokenizer_are_the_words_of_the_dictionary(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "end": 1, "cat": 2, "[UNK]": 3}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))  # with settings that a text must not be read by
    dictionary = Dictionary()
    for word in ("3", "2", "0"):  # 1 is </s>
        dictionary.add_symbol(word)
    text = Numbers(dictionary, tmp_path)
    tokens = [token for token, _ in text.pieces("the cat end the")]
    assert [dictionary[token] for token in tokens] == ["0", "2", "</s>", "0"]
    unknown = [text.pieces(word)[0] for word in ("dog", "dogs")]
    assert unknown[0] != unknown[1] and unknown[0][0] == unknown[1][0]
    assert text.decode(tokens) == "the cat end the"
    with pytest.raises(ValueError, match="must have the numbers of the 4 tokens"):
        Numbers(Dictionary(), tmp_path)
    with pytest.raises(ValueError, match="which does not exist"):
        Numbers(dictionary, tmp_path / "other")


def test_a_cache_has_the_answers_of_one_model(folder, tmp_path):
    """The harness's own keys are the requests: another model, or another context, would get the same answers."""
    cached = CachingLM(load(folder), str(tmp_path / "one"))
    requests = asked(("w1", " w2"), ("w1 w2", " w3"))
    found = cached.loglikelihood(requests)
    again = load(folder)
    again._loglikelihood_tokens = None
    assert CachingLM(again, str(tmp_path / "one")).loglikelihood(requests) == found
    for kind, given in ((KINDS[1], {}), (KINDS[0], {"max_length": 12})):
        with pytest.raises(ValueError, match=r"--use_cache must be a new path or .*one, whose answers are of another"):
            CachingLM(load(folder, kind, **given), str(tmp_path / "one"))
    with sqlitedict.SqliteDict(str(tmp_path / "unnamed"), autocommit=True) as cache:
        cache["key"] = -1.0
    with pytest.raises(ValueError, match="--use_cache must be"):
        CachingLM(load(folder), str(tmp_path / "unnamed"))


TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_target: "{target}"
output_type: {kind}
"""


@pytest.mark.slow
def test_the_harness_runs_its_tasks(folder, tmp_path, monkeypatch, capsys):
    """One of each kind, on a file of its own."""
    rows = [{"context": "w1 w2", "answer": "w3", "choices": ["w3", "w4"]} for _ in range(3)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    kinds = {
        "choose": ("multiple_choice", "0", "doc_to_choice: '{{choices}}'\n"),
        "write": ("generate_until", " {{answer}}", "generation_kwargs: {until: ['w1'], max_gen_toks: 4}\n"),
        "read": ("loglikelihood_rolling", "{{context}}", "metric_list: [{metric: bits_per_byte}]\n"),
    }
    for name, (kind, target, rest) in kinds.items():
        task = TASK.format(name=name, file=tmp_path / "rows.json", target=target, kind=kind) + rest
        (tmp_path / f"{name}.yaml").write_text(task)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    words = ["fwp-harness", "run", "--model", "fwp", "--tasks", ",".join(kinds), "--include_path", str(tmp_path)]
    words += ["--model_args", f"path={folder / KINDS[0] / 'checkpoint_last.pt'},dictionary={folder / 'data'}"]
    monkeypatch.setattr(sys, "argv", words)
    harness.main()
    table = capsys.readouterr().out
    assert all(name in table for name in ("acc", "exact_match", "bits_per_byte"))


@looped("level", ["INFO", "ERROR"])
@looped("place, name", [(Path, "write_text"), (evaluation_tracker, "open")])
def test_results_that_are_not_saved_are_an_error(tmp_path, monkeypatch, place, name, level):
    """Of all tasks together, and of samples; the harness itself only warns, unless it is to be silent."""

    def evaluate():
        tracker = EvaluationTracker(str(tmp_path))
        tracker.save_results_aggregated({})
        tracker.save_results_samples("task", [])
        print("the table")

    def fill(*_, **how):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logging.getLogger("lm_eval"), "level", getattr(logging, level))
    monkeypatch.setattr(harness, "cli_evaluate", evaluate)
    harness.main()
    with monkeypatch.context() as patch:
        patch.setattr(place, name, fill, raising=False)
        refused(lambda arguments: harness.main(), says="output_path could not be saved .No space left on device.: free")


def test_refusals(folder, monkeypatch):
    path, data = str(folder / KINDS[0] / "checkpoint_last.pt"), str(folder / "data")
    (folder / "tokenizer.json").write_text("{}")
    made = {"batch_size": 1, "device": "cpu"}  # as the harness's command calls it
    for given, says in (
        ({"dictionary": data}, "--model_args must be the arguments of Harness, path at"),
        ({"path": path, "device": "cpu"}, "but for batch_size and device, which are flags"),
        ({"path": path, "other": 1}, "unexpected keyword argument 'other'"),
        ({"path": path}, "dict.txt"),
        ({"path": path, "dictionary": data, "tokenizer": data}, "tokenizer.json, which does not exist"),
        ({"path": path, "dictionary": data, "tokenizer": str(folder)}, "must be a tokenizer.json, got"),
        ({"path": path, "tokenizer": data, "bpe_codes": "x"}, "must be left out with bpe_codes"),
    ):
        monkeypatch.setattr(harness, "cli_evaluate", lambda given=given: Harness.create_from_arg_obj(given, made))
        refused(lambda arguments: harness.main(), says=says)
    for says, call in {
        "batch_size must be a whole number above 0, got auto": lambda: load(folder, batch_size="auto"),
        "max_length must be a whole number above 0, got -1.0": lambda: load(folder, max_length=-1.0),
        "max_length must be a whole number above 0, got 0": lambda: load(folder, max_length=0),
        "device must be cpu or cuda, got 'gpu'": lambda: find_device("gpu"),
        "--apply_chat_template must be left out": lambda: load(folder).tokenizer_name,
        "a text must not have the word <pad>": lambda: load(folder).tok_encode("w1 <pad>"),
        "at most max_length = 16 tokens, got 20": lambda: load(folder).loglikelihood(asked(("w1", " w2" * 20))),
    }.items():
        with pytest.raises(ValueError, match=says):
            call()
