"""What the language models have in common."""

import pytest
from fairseq.sequence_generator import SequenceGenerator

from .conftest import random_tokens


@pytest.mark.parametrize("arch", ["delta_lm_wt103", "softmax_lm_wt103", "xl_lm_wt103_medium"])
def test_generation_is_not_bound_to_the_length_of_training_samples(build_model, arch):
    model, prompt = build_model(arch, tokens_per_sample=4), random_tokens(1, 3)
    generator = SequenceGenerator([model], model.decoder.dictionary, beam_size=2, min_len=20, max_len_b=20)
    ((best, _),) = generator.generate([model], {"net_input": {"src_tokens": prompt}}, prefix_tokens=prompt)
    assert len(best["tokens"]) == 21  # and the end of the line
