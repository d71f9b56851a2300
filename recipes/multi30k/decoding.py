"""Measure how fast models translate: `python recipes/multi30k/decoding.py RUN MODEL...`; RUN is the folder of --out.

Prints CSV: CPU seconds of one thread for fairseq's beam search, with 5 beams, over sentences of the test set. Every
hypothesis has the same number of tokens, so the weights need no training. The models take turns.
"""

import sys
import time
from argparse import Namespace

import torch
from fairseq import checkpoint_utils

import fairseq_fwp.cli  # noqa: F401  (registers the models, and lets torch load what fairseq saves)

ROUNDS, BEAM, BATCH = 5, 5, 100
# Target tokens and sentences: as many as the references of the test set have, about, and long ones.
CASES = ((15, 1000), (200, 100))


def prepare(run, name):
    """Return a function (tokens, sentences) that translates so many sentences into so many tokens each."""
    path = f"{run}/{name}/checkpoint_last.pt"
    models, config, task = checkpoint_utils.load_model_ensemble_and_task([path], {"data": f"{run}/data/bin"})
    models[0].eval()
    models[0].prepare_for_inference_(config)
    task.load_dataset("test")
    data = task.dataset("test")
    ordered = [int(place) for place in data.ordered_indices()]  # by length, as fairseq-generate has them

    def translate(tokens, sentences):
        search = task.build_generator(models, Namespace(beam=BEAM, min_len=tokens, max_len_a=0, max_len_b=tokens))
        chosen = [place for place in ordered if place < sentences]
        for start in range(0, sentences, BATCH):
            sample = data.collater([data[place] for place in chosen[start : start + BATCH]])
            found = task.inference_step(search, models, sample)
            assert {len(hypotheses[0]["tokens"]) for hypotheses in found} == {tokens + 1}

    return translate


def main(run, *names):
    torch.set_num_threads(1)
    models = {name: prepare(run, name) for name in names}
    print("model,target tokens,sentences,round,seconds")
    for tokens, sentences in CASES:
        for turn in range(ROUNDS):
            for name, translate in models.items():
                start = time.process_time()
                translate(tokens, sentences)
                print(f"{name},{tokens},{sentences},{turn},{time.process_time() - start:.2f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
