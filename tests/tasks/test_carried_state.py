"""The carried state: successive segments are one long text, without other influences."""

import copy
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import OmegaConf
from support.pairwise import looped
from support.small_models import SMALL, configure

from fairseq_fwp.modules.update_rules import UPDATE_RULES

OPTIMIZER = SimpleNamespace(backward=torch.Tensor.backward, step=lambda: None)  # what a task asks of fairseq's
SETTINGS = {**SMALL, "dropout": 0.0, "fwp_backend": "reference"}


@pytest.fixture
def setup(make_task, random_lines):
    """A function setup(task_flags, **model_flags) -> a task with carried states over 2 texts, and a float64 model."""

    def build(flags=None, texts=None, **model_flags):
        texts = texts or {"train": random_lines(30), "valid": random_lines(20)}
        task = make_task(texts, **{"tokens_per_sample": 4, "carry_state": True, **(flags or {})})
        config = configure("fwp_lm", **{**SETTINGS, "tokens_per_sample": task.args.tokens_per_sample, **model_flags})
        model = task.build_model(OmegaConf.merge(config, {"_name": "fwp_lm"})).double()
        for split in texts:  # fairseq loads texts after building the model
            task.load_dataset(split)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "layer_norm" not in name:
                    parameter.normal_(std=0.3)  # the small initial weights would hide differences
        return task, model

    return build


def batches(task, split="train", count=3, **options):
    iterator = task.get_batch_iterator(task.dataset(split), max_sentences=count, disable_iterator_cache=True, **options)
    return list(iterator.next_epoch_itr())


class Scores:
    """A criterion that keeps the log-probability of every target, by stream."""

    def __init__(self):
        self.streams = {}

    def __call__(self, model, sample):
        scores = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
        scores = scores.gather(2, sample["target"].unsqueeze(2)).squeeze(2)
        for row, stream in enumerate(sample["streams"]):
            self.streams.setdefault(stream, []).append(scores[row][sample["target"][row].ne(1)].detach())
        return scores.sum(), sample["ntokens"], {}

    def all(self):
        return [torch.cat(self.streams[stream]) for stream in sorted(self.streams)]


def train(task, model, samples, criterion):
    """Return the results of fairseq's training step on each sample, with gradients."""
    results = []
    for sample in samples:
        results.append(task.train_step(sample, model, criterion, OPTIMIZER, update_num=0))
        task.optimizer_step(OPTIMIZER, model, update_num=0)
    return results


def long_forward(model, blocks, state=None):
    """Return log-probabilities of the targets of consecutive blocks, read in one piece."""
    source, target = (torch.cat([block[key] for block in blocks]) for key in ("source", "target"))
    scores = model.get_normalized_probs(model(source.unsqueeze(0), state=state), log_probs=True)[0]
    return scores.gather(1, target.unsqueeze(1)).squeeze(1)


def pieces(task, split, streams, at_documents=False):
    """Return the blocks of each stream, split where documents reset the state: in blocks and between them."""
    blocks, found = task.dataset(split), []
    for stream in range(streams):
        first, end = (len(blocks) * index // streams for index in (stream, stream + 1))
        found.append([[]])
        for index in range(first, end):
            block = blocks[index]
            starts = []
            if at_documents and "first" in block:
                starts = block["first"].nonzero().flatten().tolist()
            elif at_documents and blocks.starts_document[index]:
                starts = [0]
            for start, stop in itertools.pairwise([0, *starts, len(block["source"])]):
                if start in starts:
                    found[-1].append([])
                found[-1][-1].append({key: block[key][start:stop] for key in ("source", "target")})
    return [[piece for piece in stream if sum(len(part["source"]) for part in piece)] for stream in found]


@looped("rule, separator", [*((rule, "w3") for rule in (*UPDATE_RULES, "hybrid")), ("delta", None), ("hybrid", None)])
def test_carried_segments_equal_one_long_forward(setup, rule, separator):
    """It holds in training and validation, with positions; documents anywhere in a stream start again.

    A softmax layer reads one document at a time: each begins a segment.
    """
    flags = {"softmax_layers": "1", "attention_window": 3}
    if rule != "hybrid":
        flags = {"decoder_update_rule": rule, "sum_normalization": True}
        if separator and UPDATE_RULES[rule].normalizer:
            flags["attention_normalization"] = True
            flags["attention_normalization_read_out_only"] = UPDATE_RULES[rule].normalizer.output_only
    task, model = setup({"reset_state_after": separator}, **flags)
    for split in ("train", "valid"):
        blocks, scores = task.dataset(split), Scores()
        assert (blocks.sizes[:-1] == 4).all() or rule == "hybrid"  # documents cut no segment
        if split == "train":
            train(task, model, batches(task), scores)
        else:
            for sample in batches(task, split):
                task.valid_step(sample, model, scores)
        streams = pieces(task, split, 3, separator is not None)
        for carried, stream in zip(scores.all(), streams, strict=True):
            torch.testing.assert_close(carried, torch.cat([long_forward(model, piece) for piece in stream]))


def test_gradients_end_with_the_segment(setup):
    """The gradient of a segment treats the state before it as a constant."""
    task, model = setup()
    samples = batches(task)
    train(task, model, samples[:2], CrossEntropyCriterion(task, False))
    model.zero_grad()
    state = None
    for sample in samples[:2]:
        state = model(sample["net_input"]["src_tokens"], state=state)[1]["state"].detach()
    expected = copy.deepcopy(model)
    net_input = {**samples[2]["net_input"], "state": state}
    CrossEntropyCriterion(task, False)(expected, {**samples[2], "net_input": net_input})[0].backward()
    train(task, model, samples[2:3], CrossEntropyCriterion(task, False))
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_validation_leaves_no_trace(setup):
    """Training and validation do not change each other by a bit. Every epoch starts without a state."""
    task, model = setup()
    criterion, samples = CrossEntropyCriterion(task, False), batches(task)
    alone = [result[0] for result in train(task, model, samples, criterion)]
    losses, validations = [], []
    for sample in samples:
        losses += [result[0] for result in train(task, model, [sample], criterion)]
        validations.append([task.valid_step(batch, model, criterion)[0] for batch in batches(task, "valid", 2)])
    assert all(torch.equal(mine, other) for mine, other in zip(losses, alone, strict=True))
    assert all(torch.equal(torch.stack(validations[0]), torch.stack(other)) for other in validations)


def test_validation_from_the_training_state_goes_on_with_its_streams(setup):
    """In turn where there are more, also after an epoch; training does not notice."""
    task, model = setup({"validate_from_training_state": True})
    criterion, samples = CrossEntropyCriterion(task, False), batches(task)
    with pytest.raises(ValueError, match="--validate-from-training-state needs the state of a training, got none"):
        task.valid_step(batches(task, "valid")[0], model, criterion)
    for done in (samples[:2], samples[2:]):
        train(task, model, done, criterion)
        before, scores = task.training_state.save(), Scores()
        for sample in batches(task, "valid", 7):
            task.valid_step(sample, model, scores)
        assert torch.equal(task.training_state.save(), before)
        _, streams, state = task.training_state._now
        blocks = task.dataset("valid")
        for stream, found in enumerate(scores.all()):
            first, end = (len(blocks) * index // 7 for index in (stream, stream + 1))
            of_stream = state.reorder(torch.tensor([stream % len(streams)]))
            own = [blocks[index] for index in range(first, end)]
            torch.testing.assert_close(found, long_forward(model, own, of_stream))


def test_states_far_older_than_in_training_are_named(setup, caplog):
    task, _ = setup()
    for streams, count in ((12, 0), (6, 0), (1, 1)):
        task.get_batch_iterator(task.dataset("train"), max_sentences=streams)
        task.dataset_to_epoch_iter.clear()
        assert caplog.text.count("states are scored after up to") == count
    said = r"after up to \d+ tokens, and none is older than \d+ in training: give a larger --batch"
    assert re.search(said, caplog.text)


def test_without_carry_state_each_segment_is_fairseqs(setup):
    """It is the loss of the stock task, for any number of streams."""
    task, model = setup({"carry_state": False})
    criterion = CrossEntropyCriterion(task, False)
    arguments = {"sample_break_mode": "none", "output_dictionary_size": -1, "shorten_method": "none", "seed": 1}
    arguments |= {"shorten_data_split_list": "", "use_plasma_view": False, "plasma_path": "", "pad_to_fixed_bsz": False}
    stock = LanguageModelingTask(copy.copy(task.args), task.dictionary)
    vars(stock.args).update(arguments, pad_to_fixed_length=False)
    stock.load_dataset("valid")
    itr = stock.get_batch_iterator(stock.dataset("valid"), max_sentences=4).next_epoch_itr(shuffle=False)
    expected = sum(float(stock.valid_step(sample, model, criterion)[0]) for sample in itr)
    for streams in (1, 3):
        losses = [task.valid_step(sample, model, criterion)[0] for sample in batches(task, "valid", streams)]
        assert sum(map(float, losses)) == pytest.approx(expected, rel=1e-12)


def test_an_update_that_is_tried_again_starts_where_it_started(setup):
    """--amp repeats the batches of an update after an overflow."""
    task, model = setup()
    criterion, samples = CrossEntropyCriterion(task, False), batches(task)
    expected = [result[0].detach() for result in train(task, model, samples, criterion)]

    def update(group):
        losses = [task.train_step(sample, model, criterion, OPTIMIZER, 0)[0].detach() for sample in group]
        task.optimizer_step(OPTIMIZER, model, 0)
        return losses

    for start in range(0, len(samples), 2):
        for _ in range(3 if start in (0, 4) else 1):
            assert update(samples[start : start + 2]) == expected[start : start + 2]


def test_after_running_out_of_memory_a_stream_goes_on_without_that_segment(setup):
    task, model = setup()
    samples, scores = batches(task, count=1), Scores()

    def exhausted(model, sample):
        model(**sample["net_input"])
        raise RuntimeError("out of memory")

    train(task, model, samples[:2], scores)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(task, model, samples[2:3], exhausted)
    train(task, model, samples[3:5], scores)
    blocks = [task.dataset("train")[index] for index in (0, 1, 3, 4)]
    torch.testing.assert_close(scores.all()[0], long_forward(model, blocks))
    assert not model._forward_hooks


@looped("criterion", [AdaptiveLoss, CrossEntropyCriterion])
def test_a_batch_without_targets_changes_nothing(setup, criterion):
    task, model = setup(adaptive_softmax_cutoff="10,30")
    criterion, samples = criterion(task, False), batches(task)
    expected = [result[0] for result in train(task, model, samples[:3], criterion)]
    empty = task.get_batch_iterator(task.dataset("train"), max_sentences=3, disable_iterator_cache=True).collate_fn([])
    train(task, model, samples[:2], criterion)
    model.zero_grad()
    ((loss, size, log),) = train(task, model, [empty], criterion)
    assert float(loss.detach()) == size == log["ntokens"] == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    assert torch.equal(train(task, model, samples[2:3], criterion)[0][0], expected[2])


def test_a_saved_state_goes_on_bit_for_bit(setup):
    flags = {"decoder_feature_map": "favor", "attention_normalization": True, "dropout": 0.1}
    task, untrained = setup({"reset_state_after": "w3"}, **flags)
    criterion, options = CrossEntropyCriterion(task, False), {"max_sentences": 3, "disable_iterator_cache": True}

    def losses(itr, model):
        found = []
        for sample in itr:
            torch.manual_seed(sample["segment"])  # as fairseq seeds each update
            found += [result[0] for result in train(task, model, [sample], criterion)]
        return found

    itr = task.get_batch_iterator(task.dataset("train"), **options).next_epoch_itr()
    expected = losses(itr, copy.deepcopy(untrained))
    for stop in (1, 5, len(expected) - 1):
        model = copy.deepcopy(untrained)  # its random features are in the checkpoint
        first = task.get_batch_iterator(task.dataset("train"), **options)
        itr = first.next_epoch_itr()
        found = losses((next(itr) for _ in range(stop)), model)
        first.collect_states(None)
        saved = copy.deepcopy(first.state_dict())
        task.training_state = type(task.training_state)()
        second = task.get_batch_iterator(task.dataset("train"), **options)
        second.load_state_dict(saved)
        assert torch.equal(task.training_state.save(), saved["states"][0])  # also before its first batch
        found += losses(second.next_epoch_itr(), model)
        assert [loss.item() for loss in found] == [loss.item() for loss in expected]


def test_nothing_is_carried_over_the_end_of_an_epoch(setup):
    task, model = setup()
    iterator = task.get_batch_iterator(task.dataset("train"), max_sentences=3)
    train(task, model, iterator.next_epoch_itr(), CrossEntropyCriterion(task, False))
    iterator.collect_states(None)
    saved = iterator.state_dict()
    assert saved["states"] is None and saved["iterations_in_epoch"] == 0
    # The memory of a validation is freed for training.
    for sample in batches(task, "valid"):
        task.valid_step(sample, model, CrossEntropyCriterion(task, False))
    train(task, model, batches(task)[:1], CrossEntropyCriterion(task, False))
    assert len(task.validation_state.save()) < 2000 < len(task.training_state.save())


CHANGES = {
    "streams": ({}, {"max_sentences": 2}, r"with --batch-size 3 \(now 2\)"),
    "processes": ({}, {"num_shards": 2}, r"with processes 1 \(now 2\)"),
    "segments": ({"tokens_per_sample": 5}, {}, r"with --tokens-per-sample 4 \(now 5\)"),
    "no state": ({"carry_state": False}, {}, r"with --carry-state True \(now False\)"),
    "documents": ({"reset_state_after": "</s>"}, {}, r"with --reset-state-after None \(now </s> within segments\)"),
}


@looped("case", CHANGES)
def test_other_streams_are_refused_in_mid_epoch(setup, random_lines, case):
    flags, options, sentence = CHANGES[case]
    texts = {"train": random_lines(30), "valid": [[2]]}
    task, model = setup(texts=texts)
    iterator = task.get_batch_iterator(task.dataset("train"), max_sentences=3)
    train(task, model, [next(iterator.next_epoch_itr())], CrossEntropyCriterion(task, False))
    iterator.collect_states(None)
    saved = iterator.state_dict()
    changed, _ = setup(flags, texts=texts)
    other = changed.get_batch_iterator(changed.dataset("train"), **{"max_sentences": 3, **options})
    with pytest.raises(RuntimeError, match=f"{sentence}: .* --reset-dataloader"):
        other.load_state_dict(saved)
    del saved["settings"]
    with pytest.raises(RuntimeError, match=r"in mid-epoch must be .*, got one of another task: "):
        iterator.load_state_dict(saved)
    other.load_state_dict({**saved, "epoch": 2, "iterations_in_epoch": 0})  # between epochs anything may change
    assert other.next_epoch_idx == 2


def test_models_without_a_state_of_constant_size_are_refused(setup):
    with pytest.raises(ValueError, match="a state of constant size, got FwpLanguageModel without one"):
        setup(decoder_update_rule="softmax")
    with pytest.raises(ValueError, match="with fast weights in every layer or with a memory, give softmax layers"):
        setup(softmax_layers="1")
    task, _ = setup({"carry_state": False}, decoder_update_rule="softmax")
    task.args.carry_state = True
    flags = {"_name": "transformer_lm", "tokens_per_sample": 4, "max_target_positions": 4, "add_bos_token": False}
    config = OmegaConf.merge(OmegaConf.structured(TransformerLanguageModelConfig), {**flags, "tpu": False})
    with pytest.raises(ValueError, match="a state of constant size, got TransformerLanguageModel without one"):
        task.build_model(config)


TEXT = {"train": [[4, 2]]}
NOT_IN_EVAL_LM = "fairseq-eval-lm cannot carry a state or use a context window"
REFUSED = [
    (lambda make: make(TEXT, tokens_per_sample=0), "--tokens-per-sample must be at least 1, got 0"),
    (lambda make: make(TEXT, reset_state_after="</s>"), "--carry-state must be on with --reset-state-after"),
    (lambda make: make(TEXT, validate_from_training_state=True), "must be on with --validate-from-training-state"),
    (lambda make: make(TEXT, carry_state=True, validate_from_training_state=True, reset_state_after="</s>"),
     "--reset-state-after must be left out with --validate-from-training-state, got '</s>'"),
    (lambda make: make(TEXT, carry_state=True, reset_state_after="<doc>"),
     "--reset-state-after must be a symbol of .*, got '<doc>'"),
    (lambda make: make({"train": [[]]}), r"the text \S+train.bin must have at least one token"),
    (lambda make: make(TEXT).load_dataset("valid"),
     r"valid.bin, the text 'valid', must exist: write it with fairseq-preprocess"),
    (lambda make: batches(make(TEXT), count=None), "--batch-size must be the number of streams"),
    *((lambda make, options=options: batches(make(TEXT), **{"count": None, **options}),
       f"must allow one stream of 1024 tokens .*, got {got}")
      for options, got in (({"count": 0}, "0 and None"), ({"max_tokens": 1023}, "None and 1023"))),
    (lambda make: batches(make(TEXT), count=1, max_positions=512),
     "--tokens-per-sample must be at most 512, as in training, got 1024"),
    (lambda make: make(TEXT, carry_state=True).eval_lm_dataloader([], batch_size=1), NOT_IN_EVAL_LM),
    (lambda make: make(TEXT).eval_lm_dataloader([], batch_size=1, context_window=8), NOT_IN_EVAL_LM),
]  # fmt: skip


@looped("attempt, sentence", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(make_task, attempt, sentence):
    with pytest.raises((ValueError, FileNotFoundError), match=sentence) as error:
        attempt(make_task)
    assert "\n" not in str(error.value)
