"""Every token is a target once, in the order of its stream, with any streams, processes and workers."""

import itertools

import numpy as np
import torch
from fairseq.data import TokenBlockDataset, iterators
from support.pairwise import looped, pairwise

from fairseq_fwp.tasks.streams import trained_age
from fairseq_fwp.tasks.text import document_starts


def batches(task, split="train", update_freq=1, epochs=1, **options):
    """Yield the batches of one process as fairseq-train groups them, epoch after epoch."""
    iterator = task.get_batch_iterator(task.dataset(split), **{"data_buffer_size": 3, **options})
    for _ in range(epochs):
        for group in iterators.GroupedIterator(iterator.next_epoch_itr(shuffle=True), update_freq):
            yield from group


SIZES = [(1, 3), (5, 1), (5, 4), (7, 16), (64, 2), (1000, 2)]
STREAMS = pairwise(separator=[None, "</s>", "w7", "blank-line"], shards=[1, 2, 4], size=SIZES)


@looped("separator, shards, size", [tuple(case.values()) for case in STREAMS])
def test_every_token_is_a_target_once(make_task, random_lines, separator, shards, size):
    lines, (length, batch_size) = random_lines(60), size
    task = make_task({"train": lines}, tokens_per_sample=length, carry_state=True, reset_state_after=separator)
    options = {"max_sentences": batch_size, "num_shards": shards, "update_freq": 3}
    seen, counts = {}, []
    for shard in range(shards):
        of_process = list(batches(task, shard_id=shard, disable_iterator_cache=True, **options))
        counts.append(len(of_process))
        for batch in of_process:
            rows = [*filter(None, (row[row.ne(task.dictionary.pad())].tolist() for row in batch["target"]))]
            assert batch["ntokens"] == sum(map(len, rows)) and max(map(len, rows), default=0) <= length
            for index, row in zip(batch["id"].tolist(), rows, strict=False):
                assert index not in seen
                seen[index] = row
    assert [token for index in sorted(seen) for token in seen[index]] == [token for line in lines for token in line]
    # fairseq repeats batches for a process that has fewer than another.
    assert len(set(counts)) == 1


def test_the_age_of_a_training_is_that_of_its_longest_stream(make_task, random_lines):
    """Before and after the end of an epoch; that of a segment where none is carried, and unknown with documents."""
    for flags, ages in (({"carry_state": True}, [8, None]), ({}, [4, 4])):
        task = make_task({"train": random_lines(50)}, tokens_per_sample=4, **flags)
        iterator = task.get_batch_iterator(task.dataset("train"), max_sentences=3, max_tokens=99, num_shards=2)
        itr = iterator.next_epoch_itr()
        next(itr), next(itr)
        assert trained_age(iterator.state_dict()) == ages[0]
        _ = [*itr]
        assert trained_age(iterator.state_dict()) == (ages[1] or 4 * len(iterator))
        saved = iterator.state_dict()
    saved["settings"] |= {"--reset-state-after": "</s>"}
    assert trained_age(saved) is None and trained_age({"epoch": 1, "iterations_in_epoch": 3}) is None


@looped("workers", [0, 2])
@looped("shards", [1, 3])
def test_streams_are_contiguous(make_task, random_lines, workers, shards):
    """A stream's inputs are its targets one token earlier, from one segment to the next, in every epoch."""
    lines = random_lines(50)
    task = make_task({"train": lines}, tokens_per_sample=4)
    text = [token for line in lines for token in line]
    read = []
    for shard in range(shards):
        inputs, outputs = {}, {}
        options = {"max_sentences": 3, "num_shards": shards, "shard_id": shard, "disable_iterator_cache": True}
        epochs = list(batches(task, num_workers=workers, epochs=2, **options))
        for number, batch in enumerate(epochs):
            segment = number % (len(epochs) // 2)
            assert (batch["segment"], batch["last"]) == (segment, segment == len(epochs) // 2 - 1)
            for row, stream in enumerate(batch["streams"]):
                kept = batch["target"][row].ne(task.dictionary.pad())
                inputs.setdefault(stream, []).extend(batch["net_input"]["src_tokens"][row][kept].tolist())
                outputs.setdefault(stream, []).extend(batch["target"][row][kept].tolist())
                assert batch["fresh"][row] == (segment == 0)
        for stream in inputs:
            half = len(outputs[stream]) // 2
            assert outputs[stream][:half] == outputs[stream][half:]
            assert inputs[stream][1:half] == outputs[stream][: half - 1]
            before = len(read) - 1
            read += outputs[stream][:half]
            assert inputs[stream][0] == (text[before] if before >= 0 else task.dictionary.eos())
    assert read == text


@looped("length", [1, 6, 17, 500])
def test_blocks_are_those_of_fairseqs_language_modeling(make_task, random_lines, length):
    lines = random_lines(40)
    task = make_task({"train": lines}, tokens_per_sample=length)
    ours, sizes = task.dataset("train"), np.array([len(line) for line in lines])
    theirs = TokenBlockDataset(
        [torch.tensor(line) for line in lines], sizes, length, pad=1, eos=2, break_mode="none", include_targets=True
    )
    assert len(ours) == len(theirs)
    for mine, (source, target, _) in zip(ours, theirs, strict=True):
        assert torch.equal(mine["source"], source) and torch.equal(mine["target"], target)


@looped(
    "lines, flags, sources",
    [
        ([[4, 5, 6], [7, 8]], {"tokens_per_sample": 3}, [[2, 4, 5], [6, 7]]),
        ([[4, 5, 2]], {}, [[2, 4, 5]]),
        ([[4, 5, 2]], {"add_bos_token": True}, [[0, 4, 5]]),
    ],
)
def test_a_text_starts_with_the_symbol_asked_for_and_goes_on_over_its_lines(make_task, lines, flags, sources):
    """fairseq reads </s> at the start of every line, even if the text has none there."""
    task = make_task({"train": lines}, **flags)
    assert [block["source"].tolist() for block in task.dataset("train")] == sources


LINES = [[4, 5, 9, 2], [6, 2], [2], [9, 7, 2], [8, 8]]
DOCUMENTS = [
    ("</s>", LINES, LINES),
    ("w5", LINES, [[4, 5, 9], [2, 6, 2, 2, 9], [7, 2, 8, 8]]),
    ("blank-line", LINES, [[4, 5, 9, 2, 6, 2, 2], [9, 7, 2, 8, 8]]),
    ("w3", [[5, 2], [2], [6, 7, 8, 2], [2], [2], [8, 7, 2]], [[5, 2, 2, 6, 7], [8, 2, 2, 2, 8, 7], [2]]),
    ("blank-line", [[5, 2], [2], [6, 7, 8, 2], [2], [2], [8, 7, 2]], [[5, 2, 2], [6, 7, 8, 2, 2], [2], [8, 7, 2]]),
    ("blank-line", [[2], [5, 2]], [[2], [5, 2]]),
]


@looped("separator, lines, documents", DOCUMENTS)
def test_documents_begin_after_the_separator(make_task, separator, lines, documents):
    task = make_task({"train": lines}, tokens_per_sample=3, carry_state=True, reset_state_after=separator)
    blocks, found = task.dataset("train"), []
    for block, starts in zip(blocks, blocks.starts_document, strict=True):
        if starts:
            found.append([])
        found[-1] += block["target"].tolist()
    assert found == documents
    starts = [0, *itertools.accumulate(map(len, documents))][:-1]
    assert document_starts(blocks.text, task.dictionary, separator).tolist() == starts


def test_a_process_whose_streams_have_ended_has_nothing_to_learn(make_task):
    """Two tokens for four processes: two of them get a batch without targets."""
    task = make_task({"train": [[4, 5]]}, tokens_per_sample=1)
    options = {"max_sentences": 1, "num_shards": 4, "disable_iterator_cache": True}
    found = [list(batches(task, shard_id=shard, **options)) for shard in range(4)]
    assert [len(of_process) for of_process in found] == [1, 1, 1, 1]
    empty = [batch for (batch,) in found if "segment" not in batch]
    assert len(empty) == 2
    for batch in empty:
        assert batch["ntokens"] == 0 and batch["target"].tolist() == [[1]]
        assert batch["net_input"]["src_tokens"].tolist() == [[2]]


LIMITS = [({"max_sentences": 7}, 7), ({"max_tokens": 23}, 4), ({"max_sentences": 3, "max_tokens": 12}, 2)]


@looped("limits, streams", LIMITS)
def test_number_of_streams(make_task, random_lines, limits, streams):
    """They differ by at most one segment."""
    task = make_task({"train": random_lines(50)}, tokens_per_sample=5)
    rows = [len(batch["streams"]) for batch in batches(task, **limits)]
    assert set(rows[:-1]) == {streams} and 1 <= rows[-1] <= streams


@looped("streams, warned", [(4, False), (5, True), (9, True)])
def test_streams_too_short_to_carry_a_state_are_named(make_task, caplog, streams, warned):
    caplog.clear()
    task = make_task({"train": [[4] * 25]}, tokens_per_sample=5, carry_state=True)
    next(batches(task, max_sentences=streams))
    assert ("no state is carried" in caplog.text) == warned
