"""Every update rule at growing length: time per token and peak memory of forward + backward (run.sh does it).

float32, one thread, 8 heads of 64 dimensions. A rule whose cost per token grows is no linear one: times are of as many
sequences as make 16,384 tokens in all, so that all lengths move the same memory, and short ones do not live in a cache
(fwm, a loop in PyTorch, takes one sequence: many would take minutes). A rule that keeps a state for every token needs
8 * 64 * 64 numbers a token, which is what the memory of one sequence is held against.
"""

import os
import subprocess
import sys
from functools import partial

import operators
import torch
from report import Contender, Goal, goal_row, interleave, memory, publish, say

from fairseq_fwp.modules.update_rules import UPDATE_RULES

HEADS, SIZE = 8, 64
LENGTHS = (256, 1024, 4096, 16384)
ROUNDS = 5


def inputs(rule, length, batch=1, dtype=torch.float32):
    """q, k, v and the gates, as a layer opens them."""
    torch.manual_seed(1)
    steps = (rule.steps,) if rule.steps > 1 else ()
    q, k, v = (torch.randn(batch, HEADS, length, *n, SIZE) for n in ((), steps, steps))
    found = [q.softmax(-1), k.softmax(-1), v]
    for gate in rule.gates:
        size = gate.size(SIZE, SIZE) if gate.size else 1
        # Sigmoids that keep most of the memory, as they do after some training.
        logits = torch.randn(batch, length, HEADS, size) + 4 * (gate.at_padding == 1)
        opened = (gate.learned(HEADS, size) if gate.learned else gate.activation)(logits).transpose(1, 2).detach()
        found.append(opened if gate.size else opened.squeeze(-1))
    return [x.to(dtype).requires_grad_() for x in found]


def prepare(rule, length, batch=1):
    """The call that is measured: forward and backward of a rule."""
    gradient = torch.randn(batch, HEADS, length, SIZE, generator=torch.Generator().manual_seed(2))
    form = operators.first(UPDATE_RULES[rule].operator, "auto")
    return partial(operators.training_step, form, inputs(UPDATE_RULES[rule], length, batch), gradient)


def check(name, rule):
    """Output and gradients against the float64 reference."""
    results = []
    for backend, dtype in (("reference", torch.float64), ("auto", torch.float32)):
        chosen = inputs(rule, LENGTHS[0], dtype=dtype)
        out = operators.first(rule.operator, backend)(*chosen)
        results.append([out, *torch.autograd.grad(out.square().sum(), chosen)])
    operators.compare(name, *results)


def print_memory(rule, length):
    """Peak resident bytes beyond the inputs: out, all gradients, and whatever is kept in between."""
    prepare(rule, 64)()  # loads the kernel
    call = prepare(rule, length)
    before = memory("VmRSS")
    call()
    print(memory("VmHWM") - before)


def measure_memory(rule, length):
    # Freed memory goes back at once, so that what is resident is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "memory", rule, str(length)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"the memory of {rule} could not be measured: {answer.stderr.strip().splitlines()[-1]}")
    return int(answer.stdout)


def main():
    for name, rule in UPDATE_RULES.items():
        say(f"checking {name} against the float64 reference")
        check(name, rule)
    batches = {(rule, n): 1 if rule == "fwm" else LENGTHS[-1] // n for rule in UPDATE_RULES for n in LENGTHS}
    contenders = {case: Contender(prepare(*case, batch)) for case, batch in batches.items()}
    times = interleave(contenders, ROUNDS, "every rule at every length")
    times = {case: [second / batches[case] for second in seconds] for case, seconds in times.items()}
    shortest, longest = LENGTHS[0], LENGTHS[-1]
    where, rows = f"{shortest} -> {longest} tokens", []
    for rule in UPDATE_RULES:
        short, long = ([t / n for t in times[rule, n]] for n in (shortest, longest))
        growth = sorted(b / a for a, b in zip(short, long, strict=True))[ROUNDS // 2], min(long) / min(short)
        rows.append(goal_row(Goal(f"{rule}, growth of time per token", where, 1.5, at_most=True), growth))
    raw = [
        ["seconds", rule, length, i, second]
        for (rule, length), seconds in times.items()
        for i, second in enumerate(seconds)
    ]
    for length in LENGTHS:
        every = length * HEADS * SIZE * SIZE * 4
        raw.append(["bytes", "a state per token", length, 0, every])
        for rule in UPDATE_RULES:
            say(f"memory of {rule} at {length} tokens, in a process of its own")
            used = measure_memory(rule, length)
            raw.append(["bytes", rule, length, 0, used])
            if length == longest:
                goal = Goal(
                    f"{rule}, peak memory over that of a state per token", f"{length} tokens", 0.5, at_most=True
                )
                rows.append(goal_row(goal, used / every))
    publish(
        "rules",
        ["what", "rule", "tokens", "round", "value"],
        raw,
        rows,
        f"One thread, {HEADS} heads of {SIZE}, float32, {LENGTHS[-1]:,} tokens in all (fwm: one sequence); each figure "
        "of memory of one sequence in a process of its own.\n",
    )


if __name__ == "__main__":
    try:
        print_memory(sys.argv[2], int(sys.argv[3])) if sys.argv[1:2] == ["memory"] else main()
    except RuntimeError as error:  # above all: no kernel could be built
        raise SystemExit(f"the rules cannot be measured: {error}") from error
