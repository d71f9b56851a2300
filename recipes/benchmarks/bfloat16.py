"""What products in bfloat16 would bring to chunks, and what they would cost: `python bfloat16.py`.

The gated delta rule with a decay per key dimension, in chunks as in cuda_ext, in float64. The operands of some products
are rounded to bfloat16; sums, states, decays and the solution for the written values are not. Inputs are in bfloat16,
and so is out at the end. The kernel, which converts inputs to float32, is measured too. Rates of products are torch's,
in CPU time of one thread.
"""

import time
from functools import partial

import inputs
import torch
from family import KEY, PRODUCT
from inputs import FORWARD
from record import Goal, Record, publish
from timing import Contender, interleave

RULE, SHAPE, CHUNK = f"gated_delta, {KEY}", (1, 4, 1024, 64, 64), 16
READ, RETRIEVED, WRITTEN = "what queries read", "what keys retrieve", "what is written"
ROUNDED = {"none": (), READ: (READ,), RETRIEVED: (RETRIEVED,), WRITTEN: (WRITTEN,), "all": (READ, RETRIEVED, WRITTEN)}
ERROR, RATE = "error relative to the norm", "multiply-adds per second"


def rounded(x):
    return x.bfloat16().to(x.dtype)


def in_chunks(q, k, v, decay, beta, groups):
    """Return out and the last state, where the products of `groups` take rounded operands."""
    read, retrieved, written = (rounded if name in groups else lambda x: x for name in (READ, RETRIEVED, WRITTEN))
    state, outs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for first in range(0, q.shape[2], CHUNK):
        queries, keys, values, fades, rates = (
            x[:, :, first : first + CHUNK] for x in (q, k, v, decay, beta.unsqueeze(-1))
        )
        total = fades.cumprod(2)
        seen = keys.unsqueeze(2) * (total.unsqueeze(3) / total.unsqueeze(2))  # key s as token t sees it, for s <= t
        scores = (read(queries).unsqueeze(3) * read(seen)).sum(-1).tril()
        products = (retrieved(keys).unsqueeze(3) * retrieved(seen)).sum(-1).tril(-1)
        rest = values - retrieved(keys * total) @ retrieved(state)
        one = torch.eye(CHUNK, dtype=q.dtype)
        writes = torch.linalg.solve_triangular(one + rates * products, rates * rest, upper=False)
        outs.append(read(queries * total) @ read(state) + read(scores) @ read(writes))
        state = total[:, :, -1].unsqueeze(-1) * state + written(seen[:, :, -1]).mT @ written(writes)
    return torch.cat(outs, 2), state


def measure(record):
    drawn = {name: x.double() for name, x in inputs.draw(RULE, SHAPE, torch.bfloat16).items()}
    tensors = {name: x.bfloat16() for name, x in inputs.with_unit_keys(drawn).items()}
    exact = [x.double() for x in tensors.values()]
    out, state = in_chunks(*exact, ())
    for name, groups in ROUNDED.items():
        found = in_chunks(*exact, groups)
        record.add("out", FORWARD, name, [inputs.relative_error(rounded(found[0]), out)], ERROR)
        record.add("state", FORWARD, name, [inputs.relative_error(found[1], state)], ERROR)
    kernel = inputs.step(RULE, tensors, torch.zeros(*SHAPE[:2], *SHAPE[3:]))()
    for where, actual, right in zip(("out", "state"), kernel, (out, state), strict=True):
        record.add(where, FORWARD, "our kernel", [inputs.relative_error(actual, right)], ERROR)
    matrices = {name: torch.randn(PRODUCT, PRODUCT, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")}
    calls = {name: Contender(partial(torch.mm, x, x), clock=time.process_time) for name, x in matrices.items()}
    for name, seconds in interleave(calls, 7, "products", seconds=5).items():
        record.add("product", FORWARD, name, [PRODUCT**3 / min(seconds)], RATE)


def goals(record):
    rows = []
    for where in ("out", "state"):
        (bound,) = record.values(where, FORWARD, "our kernel", ERROR)
        for name in ROUNDED:
            (error,) = record.values(where, FORWARD, name, ERROR)
            goal = Goal(f"error of {where} over our kernel's, rounded: {name}", RULE, 1.05, at_most=True)
            rows.append(goal.row((error / bound,), f"{error:.1e}"))
    rates = [record.values("product", FORWARD, name, RATE)[0] for name in ("bfloat16", "float32")]
    return [
        *rows,
        Goal("a product's rate in bfloat16 over float32", f"{PRODUCT} x {PRODUCT}").row((rates[0] / rates[1],)),
    ]


def main():
    torch.set_num_threads(1)
    record = Record.begin()
    measure(record)
    publish("bfloat16", record, goals(record))


if __name__ == "__main__":
    main()
