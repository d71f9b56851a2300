"""A run that begins in a later epoch reads the same batches as an uninterrupted run."""

import itertools

import numpy as np
import pytest
from fairseq.data import FairseqDataset
from fairseq.tasks import FairseqTask

import fairseq_fwp  # noqa: F401  (patches fairseq)

SEED = 5


class Shuffled(FairseqDataset):
    """A data set of numbers in random order, as samples of the stock tasks."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return index

    def num_tokens(self, index):
        return 1

    def size(self, index):
        return 1

    def ordered_indices(self):
        return np.random.permutation(len(self))

    def collater(self, samples):
        return samples


def iterator(epoch, iterations=0):
    """Return the iterator as fairseq's trainer gets it, at the start or from a checkpoint."""
    found = FairseqTask(None).get_batch_iterator(Shuffled(), max_sentences=3, seed=SEED, epoch=epoch)
    if epoch > 1 or iterations:
        found.load_state_dict({"version": 2, "epoch": epoch, "iterations_in_epoch": iterations, "shuffle": True})
    return found


@pytest.mark.parametrize("epoch", [1, 2, 3])
@pytest.mark.parametrize("iterations", [0, 3, 7])
def test_the_rest_of_an_epoch_and_the_next(epoch, iterations):
    whole = iterator(1)
    epochs = [list(whole.next_epoch_itr()) for _ in range(4)]
    assert all(sorted(itertools.chain(*batches)) == list(range(23)) for batches in epochs) and epochs[0] != epochs[1]
    resumed = iterator(epoch, iterations)
    assert list(resumed.next_epoch_itr()) == epochs[epoch - 1][iterations:]
    assert list(resumed.next_epoch_itr()) == epochs[epoch]
