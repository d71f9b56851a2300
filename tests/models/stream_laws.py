"""Laws of every model that reads a stream in segments, each from the state after earlier ones."""

import torch
from fairseq.sequence_generator import SequenceGenerator

from .conftest import log_probs, random_tokens


def by_segments(model, tokens, lengths, state=None):
    """Return log-probabilities of segments read one after the other, and the last state."""
    scores = []
    for segment in tokens.split(lengths, 1):
        out = model(segment, state=state)
        scores.append(model.get_normalized_probs(out, log_probs=True))
        state = out[1]["state"].detach()
    return torch.cat(scores, 1), state


def check_decoding(model, pieces, carried):
    """Decoding in any pieces, from a state or not, over ends of segments of 4 tokens, equals reading by segments."""
    tokens = random_tokens(2, sum(pieces))
    state = by_segments(model, random_tokens(2, 8), 4)[1] if carried else None
    expected, _ = by_segments(model, tokens, 4, state)
    kept, end, scores = {}, 0, []
    for piece in pieces:
        end += piece
        scores.append(log_probs(model, tokens[:, :end], incremental_state=kept, state=state))
    assert [score.shape[1] for score in scores] == pieces
    torch.testing.assert_close(torch.cat(scores, 1), expected)


def check_beam_search(model, beam):
    """Scores equal those of reading by segments of 4 tokens, with prompts of two lengths in the batch."""
    dictionary, prompts = model.decoder.dictionary, random_tokens(2, 3)
    prompts[1, 2] = dictionary.pad()
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam, max_len_b=11, normalize_scores=False, eos=dictionary.eos()
    )
    sample = {"net_input": {"src_tokens": prompts, "src_lengths": torch.tensor([3, 2])}}
    for prompt, hypotheses in zip(prompts, generator.generate([model], sample, prefix_tokens=prompts), strict=True):
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            assert tokens[: prompt.ne(dictionary.pad()).sum()].tolist() == prompt[prompt.ne(dictionary.pad())].tolist()
            inputs = torch.cat([tokens.new_tensor([dictionary.eos()]), tokens[:-1]]).unsqueeze(0)
            rescored = by_segments(model, inputs, 4)[0][0].gather(1, tokens.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(hypothesis["positional_scores"].double(), rescored, rtol=1e-5, atol=1e-5)


def check_padding(model):
    """Padding on the left, on the right and between tokens changes no score of this segment or the next."""
    rows = [random_tokens(1, n) for n in (6, 4, 5, 2)]
    batch = torch.full((4, 9), model.decoder.padding_idx)
    places = [torch.arange(9)[3:], torch.arange(4), torch.tensor([0, 1, 4, 5, 8]), torch.tensor([7, 8])]
    for row, (place, tokens) in enumerate(zip(places, rows, strict=True)):
        batch[row, place] = tokens[0]
    more = random_tokens(4, 3)
    scores, state = by_segments(model, batch, 9)
    after, _ = by_segments(model, more, 3, state)
    for row, (place, tokens) in enumerate(zip(places, rows, strict=True)):
        expected, alone = by_segments(model, tokens, tokens.shape[1])
        torch.testing.assert_close(scores[row, place], expected[0])
        torch.testing.assert_close(after[row], by_segments(model, more[row : row + 1], 3, alone)[0][0])


def check_rows_of_states(model):
    """After reordering, each row continues from its own past; after a reset, from an empty one."""
    tokens, order = random_tokens(3, 9), torch.tensor([1, 0, 1])
    _, state = by_segments(model, tokens[:, :5], 5)
    expected, _ = by_segments(model, tokens[order], [5, 4])
    torch.testing.assert_close(log_probs(model, tokens[order][:, 5:], state=state.reorder(order)), expected[:, 5:])
    scores = log_probs(model, tokens[:, 5:], state=state.reset(torch.tensor([False, True, False])))
    torch.testing.assert_close(
        scores[::2], log_probs(model, tokens[::2, 5:], state=state.reorder(torch.tensor([0, 2])))
    )
    torch.testing.assert_close(scores[1:2], log_probs(model, tokens[1:2, 5:]))
