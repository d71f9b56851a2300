"""No sample is dropped."""

import numpy as np
from fairseq.data import data_utils
from pairwise import looped


@looped("multiple", [1, 2, 8])
@looped("count", [0, 1, 7, 16, 60])
def test_every_index_is_in_one_batch(multiple, count):
    sizes = np.random.randint(1, 9, count)
    for arguments in ({"max_sentences": 8}, {"max_tokens": 50}):
        batches = data_utils.batch_by_size(
            np.arange(count), lambda index: sizes[index], required_batch_size_multiple=multiple, **arguments
        )
        assert [index for batch in batches for index in batch] == list(range(count))
