"""Count the calls that give a GPU work: of each update of fairseq's trainer, or of each decoded token.

    FAKE_GPU_LOG=FILE python -O count_launches.py update|token ARCH [FLAG ...]       prints a line of numbers

Values mean nothing on the fake GPU: -O leaves out assertions about them, and what depends on them is set here.
"""

import os
import sys
from pathlib import Path

import models
import torch
from fairseq.trainer import Trainer

from fairseq_fwp.modules.adaptive_softmax import AdaptiveSoftmax

WORDS, ROWS, LENGTH = 267_744, 96, 256  # as in the ledger's "One GPU"
BEAM, PREFIX, CALLS = 5, 20, 6
LOG = Path(os.environ["FAKE_GPU_LOG"])


def launches():
    return len(LOG.read_bytes().splitlines()) if LOG.exists() else 0


def build(arch, *flags):
    built = models.build(WORDS, "--arch", arch, "--tokens-per-sample", LENGTH, "--bf16", "--no-save", *flags)
    built.cfg.common.tpu = False  # fairseq sets it with --bf16
    built.model.decoder.reads_padding = False
    return built


def updates(arch, *flags):
    """Return a function that makes an update. The rows of the softmax's clusters are those of the sample."""
    built, sample = build(arch, *flags), models.sample(WORDS, ROWS, LENGTH)
    find = AdaptiveSoftmax._rows_of_clusters
    softmax = built.model.decoder.adaptive_softmax
    counts = {index: len(rows) for index, rows in find(softmax, sample["target"].flatten())}
    AdaptiveSoftmax._rows_of_clusters = lambda *given: [
        (index, rows.new_empty(counts[index])) for index, rows in find(*given)
    ]
    torch.isfinite = lambda x: torch.ones((), dtype=torch.bool)  # of the norm of the gradients
    trainer = Trainer(*built)
    trainer.save_checkpoint, trainer.cuda_env = (lambda *_, **__: None), None
    trainer._reduce_and_log_stats = lambda *_: {}
    trainer.begin_epoch(1)
    return lambda: trainer.train_step([sample])


def tokens(arch, *flags):
    """Return a function that decodes a token, in the order of a beam."""
    model = build(arch, *flags).model.eval().to("cuda", torch.bfloat16)
    prefix = models.sample(WORDS, BEAM, LENGTH)["net_input"]["src_tokens"].to("cuda")
    rows, state, ends = torch.arange(BEAM, device="cuda"), {}, iter(range(PREFIX + 1, LENGTH))

    @torch.no_grad()
    def decode():
        model.decoder.reorder_incremental_state(state, rows)
        out = model.decoder(prefix[:, : next(ends)], incremental_state=state)
        model.get_normalized_probs(out, log_probs=True)

    with torch.no_grad():
        model.decoder(prefix[:, :PREFIX], incremental_state=state)
    return decode


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    call, counts = {"update": updates, "token": tokens}[what](*given), []
    for _ in range(CALLS):
        before = launches()
        call()
        counts.append(launches() - before)
    print(*counts)
