"""Cost of translation with linear attention, against softmax attention of the same size (run.sh does it).

fairseq's own beam search over targets of growing length, and over sources of growing length; and training steps. Every
generation has a process of its own, so that its peak memory is its own.
"""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace

import torch
from report import Contender, Goal, goal_row, interleave, memory, publish, ratios, say

# The models of recipes/multi30k: names there, architecture and its flags. softmax is fairseq's own attention.
MODELS = {
    "sum": ("sum_mt_wmt14_en_de", {}),
    "favor": ("sum_favor_mt_wmt14_en_de", {"favor_features": 64}),
    "dpfp": ("sum_dpfp_mt_wmt14_en_de", {"dpfp_nu": 2}),
    "delta_dpfp": ("delta_dpfp_mt_wmt14_en_de", {"dpfp_nu": 2}),
    "softmax": ("softmax_mt_wmt14_en_de", {}),
}
GENERATE = ("sum", "delta_dpfp", "softmax")
SIZE = {"layers": 3, "embed_dim": 128, "ffn_embed_dim": 256, "attention_heads": 4, "normalize_before": True}
VOCABULARY = 4000
LENGTHS = (64, 256, 1024, 4096)
SHORT = 32  # tokens of a side that does not grow
BEAM = 4
REPETITIONS = 2
BATCH = (100, 15)  # sentences and tokens of a training step: about what --max-tokens 1500 gives on Multi30k
ROUNDS = 5
SECONDS_ALLOWED = 300
# Where memory is measured, freed memory goes back to the system at once, small pieces too: what the warm-up has freed
# would else be used again without being counted, and how much that is is chance. It slows a step by up to a third.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TOP_PAD_": "0", "MALLOC_TRIM_THRESHOLD_": "0"}
# Growth of time and memory from the shortest target to the longest.
FLAT = 1.2


def build(name):
    """The task's dictionary and the model as fairseq builds it."""
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    import fairseq_fwp.models  # noqa: F401  (registers the architectures)

    arch, flags = MODELS[name]
    dictionary = Dictionary()
    for word in range(VOCABULARY - len(dictionary)):
        dictionary.add_symbol(f"w{word}")
    sizes = {f"{side}_{size}": value for side in ("encoder", "decoder") for size, value in SIZE.items()}
    longest = max(LENGTHS) + 8
    args = Namespace(
        share_all_embeddings=True, max_source_positions=longest, max_target_positions=longest, **sizes, **flags
    )
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(1)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return dictionary, ARCH_MODEL_REGISTRY[arch].build_model(args, task)


def random_tokens(*shape):
    return torch.randint(4, VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


def generate(name, source_length, target_length):
    """Seconds and bytes beyond the model of one sentence, as long as asked for."""
    from fairseq.sequence_generator import SequenceGenerator

    dictionary, model = build(name)
    generator = {
        length: SequenceGenerator(
            [model], dictionary, beam_size=BEAM, min_len=length, max_len_b=length, max_len=length + 1
        )
        for length in (8, target_length)
    }

    def translate(source_length, target_length):
        source = random_tokens(1, source_length)
        net_input = {"src_tokens": source, "src_lengths": torch.tensor([source_length])}
        return generator[target_length].generate([model], {"id": torch.tensor([0]), "net_input": net_input})

    translate(8, 8)
    before, start = memory("VmRSS"), time.perf_counter()
    (hypotheses,) = translate(source_length, target_length)
    seconds = time.perf_counter() - start
    if {len(hypothesis["tokens"]) for hypothesis in hypotheses} != {target_length + 1}:
        raise SystemExit(f"{name} was to write {target_length} tokens and an end, and did not")
    return {"seconds": seconds, "bytes": memory("VmHWM") - before}


def in_own_process(*arguments, **settings):
    """The result of one generation (model, tokens of the source, of the target), or {"stopped": why}."""
    environment = os.environ | settings | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *map(str, arguments)]
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS_ALLOWED)
    except subprocess.TimeoutExpired:
        return {"stopped": f"takes more than {SECONDS_ALLOWED} s"}
    if answer.returncode:
        raise SystemExit(f"generating with {arguments[0]} failed: {answer.stderr.strip().splitlines()[-1]}")
    return json.loads(answer.stdout.splitlines()[-1])


def time_and_memory(*arguments):
    """Seconds of one process and bytes of another: each with the allocator that suits it."""
    timed = in_own_process(*arguments)
    if "stopped" in timed:
        return timed
    return {**in_own_process(*arguments, **GIVE_BACK), "seconds": timed["seconds"]}


def training_step(name):
    """A function that does one step forward and backward."""
    _, model = build(name)
    model.train()
    source, target = random_tokens(*BATCH), random_tokens(*BATCH)

    def step():
        model.zero_grad()
        scores = model(source, None, target)[0].log_softmax(-1)
        (-scores.gather(2, target.unsqueeze(-1)).sum()).backward()

    return step


def measure():
    """{(side that grows, model, tokens): results of the repetitions}, the models in turn."""
    results = {}
    for repetition in range(REPETITIONS):
        for side in ("target", "source"):
            for length in LENGTHS:
                for name in GENERATE:
                    say(f"repetition {repetition + 1} of {REPETITIONS}: {side} of {length} tokens, {name}")
                    lengths = (SHORT, length) if side == "target" else (length, SHORT)
                    results.setdefault((side, name, length), []).append(time_and_memory(name, *lengths))
    return results


def growth(results, goal, name, field, side, divide=1):
    """A row of the growth from the shortest to the longest."""
    longest, shortest = ([found.get(field) for found in results[side, name, at]] for at in (LENGTHS[-1], LENGTHS[0]))
    if None in longest:
        return goal_row(goal, results[side, name, LENGTHS[-1]][0]["stopped"])
    return goal_row(goal, tuple(ratio / divide for ratio in ratios(longest, shortest)))


def compare(results, goal, name, other, field, side, length):
    """A row of the ratio of the other model to this one."""
    figures = [[found.get(field) for found in results[side, which, length]] for which in (other, name)]
    return goal_row(goal, "stopped" if None in figures[0] + figures[1] else ratios(*figures))


def goal_rows(results, times):
    rows = []
    grown, where = LENGTHS[-1] / LENGTHS[0], f"target {LENGTHS[0]} -> {LENGTHS[-1]} tokens"
    for field, label, divide in (("seconds", "time per token", grown), ("bytes", "peak memory", 1)):
        for name in GENERATE:
            goal = Goal(f"{name}, growth of {label}", where, None if name == "softmax" else FLAT, at_most=True)
            rows.append(growth(results, goal, name, field, "target", divide))
    for side in ("target", "source"):
        for field, label in (("seconds", "time"), ("bytes", "peak memory")):
            for length in LENGTHS:
                goal = Goal(f"softmax over delta_dpfp, {label}", f"{side} of {length} tokens")
                rows.append(compare(results, goal, "delta_dpfp", "softmax", field, side, length))
    for name in MODELS:
        if name != "softmax":
            goal = Goal(f"training, tokens per second, {name} over softmax", "{} sentences of {} tokens".format(*BATCH))
            rows.append(goal_row(goal, ratios(times["softmax"], times[name])))
    return rows


def main():
    steps = {name: Contender(training_step(name)) for name in MODELS}
    times = interleave(steps, ROUNDS, "training steps", at_least=0)
    results = measure()
    raw = [
        [side, name, length, i, *(found.get(field, "") for field in ("seconds", "bytes", "stopped"))]
        for (side, name, length), repetitions in results.items()
        for i, found in enumerate(repetitions)
    ]
    raw += [
        ["training", name, BATCH[0] * BATCH[1], i, seconds, "", ""]
        for name in times
        for i, seconds in enumerate(times[name])
    ]
    speeds = ", ".join(f"{name} {BATCH[0] * BATCH[1] / min(found):,.0f}" for name, found in times.items())
    publish(
        "translation",
        ["what", "model", "tokens", "repetition", "seconds", "bytes", "stopped"],
        raw,
        goal_rows(results, times),
        f"One thread, one sentence, beam {BEAM}, {REPETITIONS} repetitions, time and memory each in a process of its "
        f"own; the other side has {SHORT} tokens. Peak memory is beyond the model.\n",
        f"Training, target tokens per second of a step without the optimizer, {ROUNDS} rounds, the best: {speeds}.\n",
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(generate(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
