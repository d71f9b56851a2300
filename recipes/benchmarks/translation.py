"""Cost of translation with linear attention, compared with softmax attention of the same size.

fairseq's own beam search over targets of growing length, and over sources of growing length; and training steps. Every
generation has a separate process, so that peak memory is not shared.
"""

import time

import models
import torch
from fairseq.sequence_generator import SequenceGenerator
from pictures import Curves
from record import BYTES, SECONDS, SPEED, Goal, compare, say
from timing import Contender, alone, interleave, memory

# The models of recipes/multi30k: names there, architecture and its flags. softmax is fairseq's own attention.
MODELS = {
    "sum": ("sum_mt_wmt14_en_de",),
    "favor": ("sum_favor_mt_wmt14_en_de", "--favor-features", 64),
    "dpfp": ("sum_dpfp_mt_wmt14_en_de", "--dpfp-nu", 2),
    "delta_dpfp": ("delta_dpfp_mt_wmt14_en_de", "--dpfp-nu", 2),
    "softmax": ("softmax_mt_wmt14_en_de",),
}
GENERATE = ("sum", "delta_dpfp", "softmax")
SIZE = {"layers": 3, "embed_dim": 128, "ffn_embed_dim": 256, "attention_heads": 4, "normalize_before": True}
VOCABULARY = 4000
LENGTHS = (64, 256, 1024, 4096)
SHORT = 32  # tokens of a side that does not grow
BEAM = 4
REPETITIONS = 2
BATCH = (100, 15)  # sentences and tokens of a training step: about what --max-tokens 1500 gives on Multi30k
WHERE_TRAINED = "{} sentences of {} tokens".format(*BATCH)
ROUNDS = 5
SECONDS_ALLOWED = 300
# For measurements of memory, freed memory goes back to the system at once, in small pieces too. Otherwise an unknown
# part of the warm-up's memory would be used again and not counted. This slows a step by up to a third.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TOP_PAD_": "0", "MALLOC_TRIM_THRESHOLD_": "0"}
# Growth of time and memory from the shortest target to the longest.
FLAT = 1.2


def build(name):
    arch, *flags = MODELS[name]
    sizes = {f"{side}_{size}": value for side in ("encoder", "decoder") for size, value in SIZE.items()}
    longest = max(LENGTHS) + 8
    sizes |= {"share_all_embeddings": True, "max_source_positions": longest, "max_target_positions": longest}
    flags += models.flags_of(sizes)
    return models.build(VOCABULARY, "--arch", arch, *flags, task="translation", criterion="cross_entropy")


def random_tokens(*shape):
    return torch.randint(4, VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


def measure_alone(name, source_length, target_length):
    """Return seconds, and bytes beyond the model, of one sentence of given lengths."""
    built, target_length = build(name), int(target_length)

    def translate(source_length, length):
        limits = {"min_len": length, "max_len_b": length, "max_len": length + 1}
        generator = SequenceGenerator([built.model], built.task.target_dictionary, beam_size=BEAM, **limits)
        net_input = {"src_tokens": random_tokens(1, source_length), "src_lengths": torch.tensor([source_length])}
        return generator.generate([built.model], {"id": torch.tensor([0]), "net_input": net_input})

    translate(8, 8)
    before, start = memory("VmRSS"), time.perf_counter()
    (hypotheses,) = translate(int(source_length), target_length)
    seconds = time.perf_counter() - start
    if {len(hypothesis["tokens"]) for hypothesis in hypotheses} != {target_length + 1}:
        raise SystemExit(
            f"{name} must write {target_length} tokens and an end, got another length: nothing is measured"
        )
    return {SECONDS: seconds, BYTES: memory("VmHWM") - before}


def time_and_memory(*arguments):
    """Return the seconds of one process and the bytes of another, each with a suitable allocator."""
    timed = alone("translation", *arguments, limit=SECONDS_ALLOWED)
    if "stopped" in timed:
        return timed
    return {**alone("translation", *arguments, limit=SECONDS_ALLOWED, **GIVE_BACK), SECONDS: timed[SECONDS]}


def training_step(name):
    """Return a function that does one step forward and backward."""
    model = build(name).model.train()
    source, target = random_tokens(*BATCH), random_tokens(*BATCH)

    def step():
        model.zero_grad()
        scores = model(source, None, target)[0].log_softmax(-1)
        (-scores.gather(2, target.unsqueeze(-1)).sum()).backward()

    return step


def place(side, length="{}"):
    return f"{side} of {length} tokens"


def measure(record):
    """Measure the models in turn."""
    steps = {name: Contender(training_step(name)) for name in MODELS}
    for name, seconds in interleave(steps, ROUNDS, "training steps", at_least=0).items():
        record.add(WHERE_TRAINED, "training", name, [BATCH[0] * BATCH[1] / second for second in seconds], SPEED)
    for repetition in range(REPETITIONS):
        for side in ("target", "source"):
            for length in LENGTHS:
                for name in GENERATE:
                    say(f"repetition {repetition + 1} of {REPETITIONS}: {place(side, length)}, {name}")
                    lengths = (SHORT, length) if side == "target" else (length, SHORT)
                    record.take(place(side, length), "generation", name, time_and_memory(name, *lengths))


def goals(record):
    rows = []
    first, last = LENGTHS[0], LENGTHS[-1]
    for what, label, times in ((SECONDS, "time per token", first / last), (BYTES, "peak memory", 1)):
        for name in GENERATE:
            bound = None if name == "softmax" else FLAT
            goal = Goal(f"{name}, growth of {label}", f"target {first} -> {last} tokens", bound, at_most=True)
            ends = ((place("target", length), "generation", name) for length in (last, first))
            rows.append(compare(record, goal, *ends, what, times))
    for side in ("target", "source"):
        for what, label in ((SECONDS, "time"), (BYTES, "peak memory")):
            for where in (place(side, length) for length in LENGTHS):
                goal = Goal(f"softmax over delta_dpfp, {label}", where)
                pair = ((where, "generation", name) for name in ("softmax", "delta_dpfp"))
                rows.append(compare(record, goal, *pair, what))
    for name in MODELS:
        if name != "softmax":
            goal = Goal(f"training, tokens per second, {name} over softmax", WHERE_TRAINED)
            rows.append(compare(record, goal, *((WHERE_TRAINED, "training", x) for x in ("softmax", name)), SPEED))
    return rows


def paragraphs(record):
    speeds = {name: max(record.values(WHERE_TRAINED, "training", name, SPEED)) for name in MODELS}
    return [
        f"One thread, one sentence, beam {BEAM}, {REPETITIONS} repetitions, time and memory each in a process of its "
        f"own; the other side has {SHORT} tokens. Peak memory is beyond the model.\n",
        f"Training, target tokens per second of a step without the optimizer, {ROUNDS} rounds, the best: "
        f"{', '.join(f'{name} {speed:,.0f}' for name, speed in speeds.items())}.\n",
    ]


def per_token(side):
    return lambda value, n: 1000 * value / (n if side == "target" else SHORT)


PANELS = [
    Curves(place(side), "generation", unit=unit, what=what, scale=scale, log=True)
    for side in ("target", "source")
    for what, unit, scale in (
        (SECONDS, "milliseconds per target token", per_token(side)),
        (BYTES, "peak memory (MB)", None),
    )
]
