"""Every update rule at growing length: time per token and peak memory of forward + backward.

float32, one thread, 8 heads of 64 dimensions. A rule whose cost per token grows is not linear. Times are of as many
sequences as have 16,384 tokens in all: all lengths then move the same memory, and short ones do not fit into a cache.
(fwm, a loop in PyTorch, takes one sequence: many would take minutes.) A rule that keeps a state for every token needs
8 * 64 * 64 numbers a token, with which the memory of one sequence is compared.
"""

import inputs
from inputs import TRAINING
from pictures import Curves
from record import BYTES, Goal, compare, say
from timing import GIVE_BACK, Contender, alone, interleave, memory

from fairseq_fwp.modules.update_rules import UPDATE_RULES


def form_of(rule):
    """Return the form that layers with this rule use, by whether its decay has a number for each dimension of a key."""
    name = rule.operation.__name__.removesuffix("_rule")
    by_key = any(gate.name == "decay" and gate.size == "Dk" for gate in rule.gates)
    forms = [form for form, (function, _) in inputs.FORMS.items() if function == name]
    return forms[0] if len(forms) == 1 else next(form for form in forms if ("key dimension" in form) == by_key)


# gdn2 has rwkv7's kernel.
RULES = {name: form_of(rule) for name, rule in UPDATE_RULES.items() if name != "gdn2"}
HEADS, SIZE = 8, 64
LENGTHS = (256, 1024, 4096, 16384)
ROUNDS = 5
EVERY = "a state per token"


def prepare(rule, length, batch=1):
    form = RULES[rule]
    return inputs.training(inputs.call(form, "auto"), form, (batch, HEADS, length, SIZE, SIZE))


def measure_alone(rule, length):
    """Return the peak resident bytes beyond the inputs: out, all gradients, and all that is kept in between."""
    prepare(rule, 64)()  # loads the kernel
    call = prepare(rule, int(length))
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


def measure(record):
    for rule, form in RULES.items():
        say(f"checking {rule} against the float64 reference")
        inputs.check(rule, inputs.call(form, "auto"), form, (1, HEADS, LENGTHS[0], SIZE, SIZE))
    batches = {(rule, n): 1 if rule == "fwm" else LENGTHS[-1] // n for rule in RULES for n in LENGTHS}
    contenders = {case: Contender(prepare(*case, batch)) for case, batch in batches.items()}
    for (rule, n), seconds in interleave(contenders, ROUNDS, "every rule at every length").items():
        record.add(f"{n} tokens", TRAINING, rule, [second / batches[rule, n] for second in seconds])
    for n in LENGTHS:
        record.add(f"{n} tokens", TRAINING, EVERY, [n * HEADS * SIZE * SIZE * 4], BYTES)
        for rule in RULES:
            say(f"memory of {rule} at {n} tokens, in a process of its own")
            record.add(f"{n} tokens", TRAINING, rule, [alone("rules", rule, n, **GIVE_BACK)], BYTES)


def goals(record):
    short, long = (f"{n} tokens" for n in (LENGTHS[0], LENGTHS[-1]))
    rows = []
    for rule in RULES:
        goal = Goal(f"{rule}, growth of time per token", f"{LENGTHS[0]} -> {long}", 1.5, at_most=True)
        a_token = LENGTHS[0] / LENGTHS[-1]
        rows.append(compare(record, goal, (long, TRAINING, rule), (short, TRAINING, rule), times=a_token))
    for rule in RULES:
        goal = Goal(f"{rule}, peak memory over that of a state per token", long, 0.5, at_most=True)
        rows.append(compare(record, goal, (long, TRAINING, rule), (long, TRAINING, EVERY), BYTES))
    return rows


PANELS = [
    Curves("{} tokens", TRAINING, unit="microseconds per token", scale=lambda value, n: value * 1e6 / n, log=True),
    Curves("{} tokens", TRAINING, unit="peak memory beyond the inputs (MB)", what=BYTES, log=True),
]
