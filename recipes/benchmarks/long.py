"""Cost of long sequences for whole models: delta_lm_wt103 and fairseq's transformer_lm (run.sh does it).

A training step (loss and backward) at growing lengths, and decoding token by token with a growing context. Every
measurement has a process of its own, so that its peak memory is its own.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from report import Goal, goal_row, memory, publish, ratios, say
from training import OURS, THREADS, VOCABULARY, command, prepare

MODELS = ("delta_lm_wt103", "transformer_lm")
LENGTHS = (1024, 4096, 16384)
CONTEXTS = (256, 1024, 4096)
STEPS_TIMED = 32
REPETITIONS = 2
SECONDS_ALLOWED = 120
SHARE_OF_MEMORY = 0.8


def build(model, data, length):
    """The task, the model and the criterion as fairseq-train builds them for this command."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    flags = [str(word) for word in command(model, data, length)[1:]]
    parser_flags = flags if "--user-dir" in flags else [*flags, *OURS]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), parser_flags))
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    return task.build_model(cfg.model), task.build_criterion(cfg.criterion)


def random_tokens(length):
    return torch.randint(4, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(2))


def limit_memory():
    """A failed allocation here is an answer; a machine that runs out of memory is not."""
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    allowed = int(int(available.split()[1]) * 1024 * SHARE_OF_MEMORY)
    ceiling = memory("VmSize") + allowed
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
    return allowed


def training_step(model, criterion, length):
    tokens = random_tokens(length + 1)
    net_input = {"src_tokens": tokens[:, :-1], "src_lengths": torch.tensor([length])}
    sample = {
        "id": torch.tensor([0]),
        "net_input": net_input,
        "target": tokens[:, 1:],
        "ntokens": length,
        "nsentences": 1,
    }
    model.zero_grad()
    criterion(model, sample)[0].backward()


def measure_step(name, data, length):
    """Seconds of a step, and its peak memory beyond the model with its gradients."""
    model, criterion = build(name, data, length)
    model.train()
    allowed = limit_memory()
    training_step(model, criterion, 64)
    before, seconds = memory("VmRSS"), []
    try:
        for _ in range(2):
            start = time.perf_counter()
            training_step(model, criterion, length)
            seconds.append(time.perf_counter() - start)
    except (RuntimeError, MemoryError) as error:
        if "allocate memory" not in str(error):
            raise
        return {"stopped": f"needs more than {allowed / 2**30:.0f} GB"}
    return {"seconds": min(seconds), "bytes": memory("VmHWM") - before}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


def measure_decoding(name, data, _):
    """{context: seconds a token and bytes of the decoding state} with a context growing token by token."""
    model, _ = build(name, data, CONTEXTS[-1])
    model.eval()
    tokens, state, seconds, found = random_tokens(CONTEXTS[-1]), {}, [], {}
    with torch.no_grad():
        for length in range(1, CONTEXTS[-1] + 1):
            start = time.perf_counter()
            model.get_normalized_probs(model.decoder(tokens[:, :length], incremental_state=state), log_probs=True)
            seconds.append(time.perf_counter() - start)
            if length in CONTEXTS:
                size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(state))
                found[length] = {"seconds": median(seconds[-STEPS_TIMED:]), "bytes": size}
    return found


MEASURES = {"step": measure_step, "decode": measure_decoding}


def in_own_process(what, name, data, length):
    """The result of one measurement, or {"stopped": why}."""
    # Freed memory goes back at once, so that what is resident is what is in use.
    environment = os.environ | {"OMP_NUM_THREADS": THREADS, "MALLOC_MMAP_THRESHOLD_": "65536"}
    try:
        answer = subprocess.run(
            [sys.executable, __file__, what, name, data, str(length)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_ALLOWED,
        )
    except subprocess.TimeoutExpired:
        return {"stopped": f"takes more than {SECONDS_ALLOWED} s"}
    if answer.returncode:
        raise SystemExit(f"measuring {what} of {name} at {length} failed: {answer.stderr.strip().splitlines()[-1]}")
    return json.loads(answer.stdout.splitlines()[-1])


def measure(data):
    """{(what, model, length): results of the repetitions}, the models in turn."""
    results = {}
    for repetition in range(REPETITIONS):
        for name in MODELS:
            say(f"repetition {repetition + 1} of {REPETITIONS}: decoding, {name}")
            found = in_own_process("decode", name, data, CONTEXTS[-1])
            for context in CONTEXTS:
                result = found if "stopped" in found else found[str(context)]
                results.setdefault(("decode", name, context), []).append(result)
        for length in LENGTHS:
            for name in MODELS:
                say(f"repetition {repetition + 1} of {REPETITIONS}: training step, {name}, {length} tokens")
                results.setdefault(("step", name, length), []).append(in_own_process("step", name, data, length))
    return results


def values(results, key, field):
    """The figures of all repetitions, or the reason why one of them has none."""
    reasons = [result["stopped"] for result in results[key] if "stopped" in result]
    return reasons[0] if reasons else [result[field] for result in results[key]]


def compare(results, goal, slower, faster, field, divide=1):
    """A row of ratios of two measurements; `divide` turns a growth of the whole into a growth per token."""
    figures = [values(results, key, field) for key in (slower, faster)]
    for key, figure in zip((slower, faster), figures, strict=True):
        if isinstance(figure, str):
            return goal_row(goal, f"{key[1]} at {key[2]}: {figure}")
    return goal_row(goal, tuple(ratio / divide for ratio in ratios(*figures)))


def goal_rows(results):
    delta, transformer = MODELS
    rows = []
    for field, label in (("seconds", "time"), ("bytes", "peak memory")):
        for name, bound in ((delta, 1.5), (transformer, None)):
            grown, where = LENGTHS[-1] // LENGTHS[0], f"{LENGTHS[0]} -> {LENGTHS[-1]} tokens"
            goal = Goal(f"{name}, training step, growth of {label} per token", where, bound, at_most=True)
            rows.append(compare(results, goal, ("step", name, LENGTHS[-1]), ("step", name, LENGTHS[0]), field, grown))
    for field, label in (("seconds", "time per token"), ("bytes", "decoding state")):
        for name, bound in ((delta, 1.2 if field == "seconds" else 1), (transformer, None)):
            goal = Goal(
                f"{name}, decoding, growth of {label}",
                f"context {CONTEXTS[0]} -> {CONTEXTS[-1]}",
                bound,
                True,
            )
            rows.append(compare(results, goal, ("decode", name, CONTEXTS[-1]), ("decode", name, CONTEXTS[0]), field))
    for what, lengths in (("step", LENGTHS), ("decode", CONTEXTS)):
        for field, label in (("seconds", "time"), ("bytes", "memory")):
            for length in lengths:
                stage = "training step" if what == "step" else "decoding"
                goal = Goal(f"{transformer} over {delta}, {stage}, {label}", f"{length} tokens")
                rows.append(compare(results, goal, (what, transformer, length), (what, delta, length), field))
    return rows


def main():
    with tempfile.TemporaryDirectory() as folder:
        results = measure(str(prepare(Path(folder))))
    fields = ("seconds", "bytes", "stopped")
    publish(
        "long",
        ["what", "model", "tokens", "repetition", *fields],
        [
            [*key, i, *(result.get(field, "") for field in fields)]
            for key, found in results.items()
            for i, result in enumerate(found)
        ],
        goal_rows(results),
        f"{THREADS} threads, one sequence, {REPETITIONS} repetitions, every measurement in a process of its own. "
        "Peak memory is beyond the model and its gradients. A quadratic cost would grow "
        f"{LENGTHS[-1] // LENGTHS[0]}-fold per token from the shortest to the longest.\n",
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(MEASURES[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        main()
