"""Positions counted from the end of a sample, as in Schlag et al. 2021's public code; and no last normalisation."""

import pytest
import torch
from pairwise import looped

from fairseq_fwp.modules.positions import VaswaniPositions, sinusoids

from .conftest import log_probs, random_tokens

LENGTH = 6


@pytest.fixture
def model(build_model):
    return build_model("delta_lm_wt103", positions_from_end=True, tokens_per_sample=LENGTH)


def test_the_positions_of_the_paper():
    positions = VaswaniPositions(4, LENGTH)
    expected = torch.tensor([[[3, 0.03, 3, 0.03], [0, 0, 1, 1]]], dtype=torch.float64)
    expected[0, 0] = torch.cat([expected[0, 0, :2].sin(), expected[0, 0, 2:].cos()])
    torch.testing.assert_close(positions(torch.tensor([[0, 3]])), expected)
    torch.testing.assert_close(positions(torch.tensor([[2, 5, 8]]), decoding=True), expected[:, [0, 1, 0]])


def test_the_last_token_stands_at_position_zero(model):
    seen = []
    model.decoder.embed_positions.register_forward_hook(lambda module, args, rows: seen.append(rows))
    model(random_tokens(2, 4))
    padded = random_tokens(2, 5)
    padded[0, 3:] = padded[1, :1] = model.decoder.padding_idx
    model(padded)
    expected = sinusoids(torch.arange(3, -1, -1, dtype=torch.float64), seen[0].shape[2])
    assert all(torch.equal(row, expected) for row in (*seen[0], seen[1][1, 1:]))
    assert torch.equal(seen[1][0, :3], expected[1:])


@looped("side", ["left", "right"])
def test_padding_changes_no_score(model, side):
    tokens = random_tokens(2, 5)
    pad = tokens.new_full((2, 3), model.decoder.padding_idx)
    scores = log_probs(model, torch.cat([pad, tokens] if side == "left" else [tokens, pad], 1))
    torch.testing.assert_close(scores[:, 3:] if side == "left" else scores[:, :5], log_probs(model, tokens))


def test_decoding_takes_one_sample_after_the_other(model):
    """The tokens of one sample are scored as that sample, and so are the next ones with the carried state."""
    tokens, state, read = random_tokens(2, 2 * LENGTH), {}, None
    steps = [log_probs(model, tokens[:, : t + 1], incremental_state=state) for t in range(2 * LENGTH)]
    for start in (0, LENGTH):
        part = tokens[:, start : start + LENGTH]
        expected = log_probs(model, part, state=read)
        torch.testing.assert_close(torch.cat(steps[start : start + LENGTH], 1), expected)
        read = model(part, state=read)[1]["state"]
    assert (log_probs(model, tokens)[:, :LENGTH] - torch.cat(steps[:LENGTH], 1)).abs().max() > 1e-3


def test_no_positions_are_not_counted(build_model):
    with pytest.raises(ValueError, match="must be off with --no-token-positional-embeddings"):
        build_model("delta_lm_wt103", positions_from_end=True, no_token_positional_embeddings=True)


def test_no_normalisation_after_the_last_block(build_model):
    flags = {"decoder_normalize_before": True}
    model, bare = build_model("sum_lm_wt103", **flags), build_model("sum_lm_wt103", **flags, no_decoder_final_norm=True)
    bare.load_state_dict({key: value for key, value in model.state_dict().items() if "decoder.layer_norm" not in key})
    tokens = random_tokens(2, 5)
    torch.testing.assert_close(model.decoder.layer_norm(bare(tokens)[0]), model(tokens)[0])
