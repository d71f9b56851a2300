"""CPU time of a training step and of a decoded token where a token waits for the last output: `python sequential.py`.

The paper's small model (16 layers, D = 128, 8 heads), 10,000 words, next to the delta rule's. A step is 2 sequences of
256 tokens, forward and backward without the optimizer; a token is read from a state, with its scores. One thread,
float32, the least CPU time of all rounds, in ms; results/sequential.csv.
"""

import csv
import time
from functools import partial
from pathlib import Path

import torch
from models import build, draw_words, sample
from timing import Contender, interleave

ATTENTIONS = ("delta", "recurrent_delta", "delta_rnn", "srwm")
WORDS, SEQUENCES, LENGTH, ROUNDS = 10_000, 2, 256, 7


def step(built, batch):
    built.model.zero_grad()
    built.criterion(built.model, batch)[0].backward()


@torch.no_grad()
def decode(decoder, token, state):
    """Score the words after a token that is read from a state."""
    features, _ = decoder.extract_features(token, state)
    return decoder.adaptive_softmax.get_log_prob(features, None)


def contenders(name):
    built = build(WORDS, "--arch", f"{name}_lm_wt103", "--dropout", 0)
    training = partial(step, built, sample(WORDS, SEQUENCES, LENGTH))
    model = build(WORDS, "--arch", f"{name}_lm_wt103", "--dropout", 0).model.eval()
    with torch.no_grad():
        _, state = model.decoder.extract_features(draw_words(WORDS, 64).unsqueeze(0))
    token = partial(decode, model.decoder, draw_words(WORDS, 1).unsqueeze(0), state)
    return {
        (name, "training step"): Contender(training, clock=time.process_time),
        (name, "decoded token"): Contender(token, clock=time.process_time),
    }


def main():
    torch.set_num_threads(1)
    calls = {key: call for name in ATTENTIONS for key, call in contenders(name).items()}
    least = {key: 1e3 * min(times) for key, times in interleave(calls, ROUNDS, "sequential").items()}
    path = Path(__file__).with_name("results") / "sequential.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["attention", "what", "ms", "delta's time is 1"])
        for (name, what), ms in least.items():
            rows.writerow([name, what, f"{ms:.3f}", f"{ms / least['delta', what]:.3f}"])
    print(path.read_text())


if __name__ == "__main__":
    main()
