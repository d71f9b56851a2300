"""The report of gpu.py, made only from its record, without a GPU: goals, floors and tables.

Shapes (B, H, L, Dk, Dv). A floor is the time of the least work at this machine's rates, which the same run measures. In
each pass, every input is read once and every result is written once, at the speed of a copy of the device's memory. For
the delta rule's training step the floor also has the products of its chunkwise form, at the speed of a matrix product.
"""

from statistics import median

from gpu_checks import FAILED, LAWS, PASSED, TOOLS
from inputs import FORWARD, STEP, TRAINING
from pictures import Bars, Curves
from record import BYTES, MISSED, SPEED, Goal, Record, compare, table

PARTS = ("ours", "peers", "models")  # the calls; `peers` measures some of ours again, next to the peers
WRONG = "wrong"  # kind of a row: an error in the results of one of ours, which is measured even so

SHAPES = ((96, 8, 256, 16, 16), (56, 8, 384, 32, 32), (8, 16, 4096, 64, 64), (1, 16, 32768, 128, 128))
TOKENS, SWEPT_HEADS, SWEPT_SIZE = 65536, 16, 64
SWEEP = (256, 1024, 4096, 16384, 65536)
CONTEXTS = (1, 1024, 16384, 65536)
STEP_SHAPE = (32, 16, 1, 64, 64)
# Device time of a captured graph, without the gaps between launches; of calls as Python makes them.
GRAPH, CALLED = "seconds of a graph", "seconds as called"
SMALL, MEDIUM = "96 x 256 tokens", "56 x 384 tokens"
# Numbers a token and head of each rule's inputs.
OURS = {
    "sum": lambda d, e: 2 * d + e,
    "gated": lambda d, e: 2 * d + e + 1,
    "delta": lambda d, e: 2 * d + e + 1,
    "decay": lambda d, e: 3 * d + 2 * e,
}


def read_parts(folder):
    """Return {part: record} of the calls that have results."""
    return {part: Record.read(f"gpu_{part}", folder) for part in PARTS if (folder / f"gpu_{part}.csv").exists()}


def refusal(found):
    """Return the reason why the results must not be published, or ""."""
    if "ours" not in found:
        return "gpu_ours.csv is not there: run gpu.sh ours first"
    notes = found["ours"].notes()
    laws = notes.get(LAWS, "not reached")
    if not laws.startswith(PASSED):
        return f"the tests on the GPU must pass, got '{laws}'"
    for tool in TOOLS:
        if notes.get(tool, "").startswith(FAILED):
            return f"compute-sanitizer's {tool} must pass, got '{notes[tool]}'"
    for part, record in found.items():
        for about in ("GPU", "kernels"):
            if record.notes().get(about) != notes.get(about):
                return f"{about} must be the same in all calls, got {record.notes().get(about)} in {part}"
        for where, _, name, what, _, said in record.rows:
            if what == WRONG:
                return f"{name} at {where} is wrong in {part}: {said}"
    return ""


def merge(records):
    """Return one record of several. Of two measurements the later one counts, so that a ratio is of one call."""
    found = {}
    for record in records:
        rows = {}
        for row in record.rows:
            rows.setdefault(tuple(row[:3]), []).append(row)
        for key, measured in rows.items():
            if key not in found or all(row[3] != MISSED for row in measured):
                found[key] = measured
    return Record(row for measured in found.values() for row in measured)


def swept(length):
    return (TOKENS // length, SWEPT_HEADS, length, SWEPT_SIZE, SWEPT_SIZE)


def context_of(length):
    return f"context {length}"


def comparisons():
    """Yield (what, where, stage, slower, faster, bound, kind) of each comparison; memory has an upper bound."""
    graph = (GRAPH, CALLED)
    for shape, bound in zip(SHAPES, (3, 3, 2.5, 2), strict=True):
        yield f"delta vs FLA, {TRAINING}", shape, TRAINING, "FLA delta", "delta", bound, graph
    for shape in SHAPES:
        published = f"decay vs the published kernel, {TRAINING}"
        yield published, shape, TRAINING, "published decay", "decay float32", 5, graph
        memory = f"memory of decay over the published kernel's, {TRAINING}"
        yield memory, shape, TRAINING, "decay float32", "published decay", 0.1, BYTES
    for what, slower, faster in (
        ("delta vs the published kernel", "published delta", "delta float32"),
        ("delta vs flash attention", "flash attention", "delta"),
        ("sum vs FLA", "FLA sum", "sum"),
    ):
        for shape in SHAPES:
            yield f"{what}, {TRAINING}", shape, TRAINING, slower, faster, None, graph
    for shape in SHAPES:
        yield f"delta vs FLA, {FORWARD}", shape, FORWARD, "FLA delta", "delta", None, graph
        yield f"memory of FLA over delta's, {TRAINING}", shape, TRAINING, "FLA delta", "delta", None, BYTES
    for where, size, bounds in ((SMALL, "", (1.9, 0.95, None)), (MEDIUM, "_medium", (None, None, None))):
        for rule, bound in zip(("softmax", "sum", "xl"), bounds, strict=True):
            ours, peer = f"delta_lm_wt103{size}", f"{rule}_lm_wt103{size}"
            yield f"{SPEED}, {ours} vs {peer}", where, "training", peer, ours, bound, SPEED
    for n in CONTEXTS[1:]:
        yield f"{STEP}, delta vs attention over the context", context_of(n), STEP, "attention", "delta", None, graph


def goals(record):
    rows = []
    for what, where, stage, slower, faster, bound, kind in comparisons():
        goal = Goal(what, str(where), bound, at_most=kind == BYTES)
        rows.append(compare(record, goal, (where, stage, slower), (where, stage, faster), kind))
    first, last = context_of(CONTEXTS[0]), context_of(CONTEXTS[-1])
    for name, bound in (("delta", 1.1), ("delta_lm_wt103", 1.1), ("softmax_lm_wt103", None)):
        what, where = f"{STEP}, growth of the time per token of {name}", f"{CONTEXTS[0]} -> {CONTEXTS[-1]} tokens"
        goal = Goal(what, where, bound, at_most=True)
        rows.append(compare(record, goal, (last, STEP, name), (first, STEP, name), (GRAPH, CALLED)))
    return rows


def bytes_moved(rule, shape, stage, size):
    """Return the least bytes, at `size` bytes a number: inputs and results, once a pass. A step is of one token."""
    B, H, L, Dk, Dv = shape
    inputs = OURS[rule](Dk, Dv)
    forward = inputs + Dv
    if stage == STEP:  # its state, in float32, is read and written
        return B * H * (forward * size + 2 * 4 * Dk * Dv)
    # Backward reads the inputs and the gradient of out, and writes a gradient for each input.
    numbers = forward if stage == FORWARD else forward + 2 * inputs + Dv
    return B * H * L * numbers * size


def chunk_flops(shape):
    """Return the operations of delta's training step in chunks of C tokens: 30 C d + 20 d^2 a token, C = d up to 64."""
    B, H, L, d, _ = shape
    return B * H * L * (30 * min(d, 64) * d + 20 * d * d)


def floor(name, shape, stage, rates):
    """Return the floor in seconds of one of ours; rates: (bytes a second of a copy, flops a second of a product)."""
    copy, product = rates
    rule = name.split()[0]
    seconds = bytes_moved(rule, shape, stage, 4 if "float32" in name else 2) / copy
    return max(seconds, chunk_flops(shape) / product) if (rule, stage) == ("delta", TRAINING) else seconds


def machine_rates(record):
    """Return (bytes a second of a copy, flops a second of a matrix product), None if they were not measured."""
    found = [record.values("machine", "", name, "per second") for name in ("copy", "product")]
    return None if any(isinstance(figure, str) for figure in found) else tuple(max(figure) for figure in found)


def cell(values, scale, digits=1):
    return MISSED if isinstance(values, str) else f"{median(values) * scale:.{digits}f}"


def best_time(record, where, stage, name):
    """Return the times of its graph, or of plain calls if it has none."""
    device = record.values(where, stage, name, GRAPH)
    return record.values(where, stage, name, CALLED) if isinstance(device, str) else device


def operator_row(record, shape, stage, name):
    device, called, memory = (record.values(shape, stage, name, what) for what in (GRAPH, CALLED, BYTES))
    rates, taken = machine_rates(record), best_time(record, shape, stage, name)
    least = floor(name, shape, stage, rates) if rates and name.split()[0] in OURS else None
    share = ["-", "-"]
    if least:
        share = [f"{least * 1e6:.1f}", MISSED if isinstance(taken, str) else f"{median(taken) / least:.1f}"]
    note = called.partition(": ")[2] if isinstance(called, str) else ""
    return [shape, stage, name, cell(device, 1e6), cell(called, 1e6), *share, cell(memory, 1e-6), note]


def places(record, stage, wanted):
    """Return the names that were measured at the places."""
    return list(dict.fromkeys(name for where in wanted for name in record.names(where, stage)))


def paragraphs(record):
    """Return the tables under the goals."""
    header = ["shape", "pass", "contender", "us", "us as called", "floor us", "times the floor", "MB", "note"]
    operators = [
        operator_row(record, shape, stage, name)
        for shape in SHAPES
        for stage in (TRAINING, FORWARD, STEP)
        for name in record.names(shape, stage)
    ]
    contexts, lengths = [context_of(n) for n in CONTEXTS], [f"{n} tokens" for n in SWEEP]
    growing = [
        [name, *(cell(best_time(record, where, TRAINING, name), 1e9 / TOKENS, 2) for where in lengths)]
        for name in places(record, TRAINING, lengths)
    ]
    steps = [
        [name, *(cell(best_time(record, where, STEP, name), 1e6) for where in contexts)]
        for name in places(record, STEP, contexts)
    ]
    trained = []
    for where in (SMALL, MEDIUM):
        for name in record.names(where, "training"):
            speed, memory = (record.values(where, "training", name, what) for what in (SPEED, BYTES))
            note = speed.partition(": ")[2] if isinstance(speed, str) else ""
            trained.append([name, where, cell(speed, 1, 0), cell(memory, 1e-6, 0), note])
    return [
        "Operators: microseconds of device time (of a captured graph) and as called from Python, the least time at "
        "this machine's rates, and peak memory beyond the inputs; a decoding step comes after the shape's tokens:\n",
        table(header, operators),
        f"{TRAINING} in bfloat16 at growing length, {TOKENS} tokens in all, {SWEPT_HEADS} heads of {SWEPT_SIZE}:\n",
        table(["ns per token", *(f"L = {n}" for n in SWEEP)], growing),
        f"One decoding step after a context; operators at {STEP_SHAPE}, models with one sequence:\n",
        table(["us per token", *contexts], steps),
        "Whole models, an update of fairseq's trainer (forward, backward, optimizer), bfloat16:\n",
        table(["architecture", "update", SPEED, "MB", "note"], trained),
    ]


def provenance(record):
    """Return a line with device, driver, versions and the rates of the floors."""
    rates = machine_rates(record)
    measured = f"copy {rates[0] / 1e12:.2f} TB/s, bf16 product {rates[1] / 1e12:.0f} TFLOP/s" if rates else "no rates"
    return ", ".join([*(f"{name} {text}" for name, text in record.notes().items()), measured]) + "."


PANELS = [
    Bars("Ours against others", "ratio", lambda row: row[2] != "-"),
    Curves("{} tokens", TRAINING, "nanoseconds per token", GRAPH, lambda value, _: value * 1e9 / TOKENS, log=True),
    Curves("context {}", STEP, "microseconds per token", GRAPH, lambda value, _: value * 1e6, log=True),
]
