"""Perplexity of a language model by the protocols that papers report; every token is scored once.

    from fairseq_fwp.evaluation import Protocol, Text, evaluate

    text = Text.after(dictionary.eos(), tokens)            # tokens (N,) int64, the first read after the end of a line
    sliding = evaluate(model, text, Protocol(window=8, context=7))
    carried = evaluate(model, text, Protocol(window=8, carry_state=True))
    print(sliding.perplexity, carried.perplexity, carried.log_probs)

`Protocol(window, context)` reads windows of `window` tokens and scores all but the first `context` of each.
`carry_state` reads the text once. `dynamic=DynamicRule(lr)` is dynamic evaluation. Its RMS rules need the training
text: `evaluate(model, text, protocol, train)`.

A model is a `Model` of modules/decoding.py: any of fairseq's. To carry a state, its decoder is a `StreamingDecoder`.
"""

from fairseq_fwp.evaluation.dynamic import DynamicRule
from fairseq_fwp.evaluation.protocol import Protocol, Scores, evaluate, gather_statistics
from fairseq_fwp.evaluation.windows import Text

__all__ = ["DynamicRule", "Protocol", "Scores", "Text", "evaluate", "gather_statistics"]
