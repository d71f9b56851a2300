"""What gpu.py publishes, made of its records alone: goals, floors and tables. None of it needs a GPU.

Shapes (B, H, L, Dk, Dv). A floor is the time in which the least work could be done at this machine's own rates, which
the same run measures: each input read once and each result written once a pass, at the speed of a copy of the device's
memory; for the delta rule's training step also the products of its chunkwise form, at the speed of a matrix product.
"""

from statistics import median

from report import Goal, goal_row, ratios, table

FORWARD, TRAINING, STEP = "forward", "forward + backward", "decoding step"
SHAPES = ((96, 8, 256, 16, 16), (56, 8, 384, 32, 32), (8, 16, 4096, 64, 64), (1, 16, 32768, 128, 128))
TOKENS, SWEPT_HEADS, SWEPT_SIZE = 65536, 16, 64
SWEEP = (256, 1024, 4096, 16384, 65536)
CONTEXTS = (1, 1024, 16384, 65536)
STEP_SHAPE = (32, 16, 1, 64, 64)
# Device time of a captured graph, without the gaps between launches; of calls as Python makes them; peak memory.
GRAPH, EAGER, BYTES, SPEED, MISSED = "graph seconds", "seconds", "bytes", "words per second", "not measured"
# Numbers a token and head of each rule's inputs.
INPUTS = {
    "sum": lambda d, e: 2 * d + e,
    "gated": lambda d, e: 2 * d + e + 1,
    "delta": lambda d, e: 2 * d + e + 1,
    "decay": lambda d, e: 3 * d + 2 * e,
}


class Record:
    """Measurements in the order in which they were made: the rows of results/gpu.csv."""

    HEADER = ("where", "stage", "contender", "what", "round", "value")

    def __init__(self, rows=()):
        self.rows = [list(row) for row in rows]

    def add(self, where, stage, contender, what, values):
        """Figures of one contender, one a round; `where` is a shape or any text."""
        self.rows += [[str(where), stage, contender, what, i, value] for i, value in enumerate(values)]

    def note(self, name, text):
        self.add("machine", "", name, "text", [text])

    def miss(self, where, stage, contender, reason):
        self.add(where, stage, contender, MISSED, [reason])

    def values(self, where, stage, contender, what):
        """Figures by round, or the reason why there are none."""
        key = [str(where), stage, contender]
        found = [float(row[5]) for row in self.rows if row[:4] == [*key, what]]
        reasons = [row[5] for row in self.rows if row[:4] == [*key, MISSED]]
        return found or (f"{contender}: {reasons[0]}" if reasons else f"{contender}: not reached")

    def notes(self):
        return {row[2]: row[5] for row in self.rows if row[0] == "machine" and row[3] == "text"}

    def contenders(self, where, stage):
        return list(dict.fromkeys(row[2] for row in self.rows if row[:2] == [str(where), stage]))


def compare(record, goal, stage, slower, faster, what=None):
    """A row of ratios of two contenders at goal.where, in the same kind of time: of graphs, where both have one."""
    note = ""
    for kind in [what] if what else [GRAPH, EAGER]:
        figures = [record.values(goal.where, stage, name, kind) for name in (slower, faster)]
        if not any(isinstance(figure, str) for figure in figures):
            if kind == EAGER:
                note = "as called: with the time of Python"
            return goal_row(goal, ratios(*figures), note)
    return goal_row(goal, next(figure for figure in figures if isinstance(figure, str)))


def operator_goals(record):
    rows = []
    for shape, bound in zip(SHAPES, (3, 3, 2.5, 2), strict=True):
        goal = Goal(f"delta vs FLA, {TRAINING}", str(shape), bound)
        rows.append(compare(record, goal, TRAINING, "FLA delta", "delta"))
    for shape in SHAPES:
        goal = Goal(f"decay vs the published kernel, {TRAINING}", str(shape), 5)
        rows.append(compare(record, goal, TRAINING, "published decay", "decay float32"))
        goal = Goal(f"memory of decay over the published kernel's, {TRAINING}", str(shape), 0.1, at_most=True)
        rows.append(compare(record, goal, TRAINING, "decay float32", "published decay", BYTES))
    for what, slower, faster in (
        ("delta vs the published kernel", "published delta", "delta float32"),
        ("delta vs flash attention", "flash attention", "delta"),
        ("sum vs FLA", "FLA sum", "sum"),
    ):
        for shape in SHAPES:
            rows.append(compare(record, Goal(f"{what}, {TRAINING}", str(shape)), TRAINING, slower, faster))
    for shape in SHAPES:
        rows.append(compare(record, Goal(f"delta vs FLA, {FORWARD}", str(shape)), FORWARD, "FLA delta", "delta"))
        goal = Goal(f"memory of FLA over delta's, {TRAINING}", str(shape))
        rows.append(compare(record, goal, TRAINING, "FLA delta", "delta", BYTES))
    return rows


def growth(record, goal, stage, name, first, last):
    """A row of the growth of a decoding step from the first context to the last."""
    for kind in (GRAPH, EAGER):
        figures = [record.values(where, stage, name, kind) for where in (last, first)]
        if not any(isinstance(figure, str) for figure in figures):
            return goal_row(goal, ratios(*figures))
    return goal_row(goal, next(figure for figure in figures if isinstance(figure, str)))


def decoding_goals(record):
    first, last = (f"context {n}" for n in (CONTEXTS[0], CONTEXTS[-1]))
    where, rows = f"{CONTEXTS[0]} -> {CONTEXTS[-1]} tokens", []
    for name, bound in (("delta", 1.1), ("delta_lm_wt103", 1.1), ("softmax_lm_wt103", None)):
        goal = Goal(f"{STEP}, growth of the time per token of {name}", where, bound, at_most=True)
        rows.append(growth(record, goal, STEP, name, first, last))
    for n in CONTEXTS[1:]:
        goal = Goal(f"{STEP}, delta vs attention over the context", f"context {n}")
        rows.append(compare(record, goal, STEP, "attention", "delta"))
    return rows


def speed_row(record, goal, ours, peer):
    speeds = [record.values(goal.where, "training", name, SPEED) for name in (ours, peer)]
    missing = [speed for speed in speeds if isinstance(speed, str)]
    if missing:
        return goal_row(goal, missing[0])
    mine, theirs = ([1 / speed for speed in figures] for figures in speeds)
    return goal_row(goal, ratios(theirs, mine))


def model_goals(record):
    small, medium = "96 x 256 tokens", "56 x 384 tokens"
    plan = [
        ("delta_lm_wt103", "softmax_lm_wt103", small, 1.9),
        ("delta_lm_wt103", "sum_lm_wt103", small, 0.95),
        ("delta_lm_wt103", "xl_lm_wt103", small, None),
        ("delta_lm_wt103_medium", "softmax_lm_wt103_medium", medium, None),
        ("delta_lm_wt103_medium", "sum_lm_wt103_medium", medium, None),
        ("delta_lm_wt103_medium", "xl_lm_wt103_medium", medium, None),
    ]
    return [
        speed_row(record, Goal(f"words per second, {ours} vs {peer}", where, bound), ours, peer)
        for ours, peer, where, bound in plan
    ]


def goals(record):
    return operator_goals(record) + model_goals(record) + decoding_goals(record)


def bytes_moved(rule, shape, stage, size):
    """Bytes that cannot be avoided, at `size` bytes a number: inputs and results, once a pass. A step: of one token."""
    B, H, L, Dk, Dv = shape
    inputs = INPUTS[rule](Dk, Dv)
    forward = inputs + Dv
    if stage == STEP:  # its state, in float32, is read and written
        return B * H * (forward * size + 2 * 4 * Dk * Dv)
    # Backward reads the inputs and the gradient of out, and writes a gradient for each input.
    numbers = forward if stage == FORWARD else forward + 2 * inputs + Dv
    return B * H * L * numbers * size


def chunk_flops(shape):
    """Of the delta rule's training step in chunks of C tokens: 30 C d + 20 d^2 a token, C = d up to 64."""
    B, H, L, d, _ = shape
    return B * H * L * (30 * min(d, 64) * d + 20 * d * d)


def floor(rule, shape, stage, dtype, rates):
    """Seconds, from (bytes a second of a copy, flops a second of a product)."""
    copy, product = rates
    seconds = bytes_moved(rule, shape, stage, 2 if dtype == "bfloat16" else 4) / copy
    return max(seconds, chunk_flops(shape) / product) if (rule, stage) == ("delta", TRAINING) else seconds


def machine_rates(record):
    """(bytes a second of a copy, flops a second of a matrix product), or None where they were not measured."""
    found = [record.values("machine", "", name, "per second") for name in ("copy", "product")]
    return None if any(isinstance(figure, str) for figure in found) else tuple(max(figure) for figure in found)


def cell(values, scale, digits=1):
    return MISSED if isinstance(values, str) else f"{median(values) * scale:.{digits}f}"


def operator_table(record, contenders):
    """Every figure of the operators; `contenders` gives {name: (rule or None, dtype)}."""
    rates, rows = machine_rates(record), []
    for shape in SHAPES:
        for stage in (TRAINING, FORWARD, STEP):
            for name in record.contenders(shape, stage):
                rule, dtype = contenders[name]
                device, called, memory = (record.values(shape, stage, name, what) for what in (GRAPH, EAGER, BYTES))
                row = [shape, stage, name, dtype, cell(device, 1e6), cell(called, 1e6), "-", "-", cell(memory, 1e-6)]
                if rule and rates:
                    least = floor(rule, shape, stage, dtype, rates)
                    row[6] = f"{least * 1e6:.1f}"
                    taken = called if isinstance(device, str) else device
                    row[7] = "-" if isinstance(taken, str) else f"{median(taken) / least:.1f}"
                if all(isinstance(figure, str) for figure in (device, called)):
                    row.append(called.partition(": ")[2])
                rows.append([*row, ""][:10])
    header = ["shape", "pass", "contender", "dtype", "us", "us as called", "floor us", "times the floor", "MB", "note"]
    return table(header, rows)


def sweep_table(record):
    names = list(dict.fromkeys(name for L in SWEEP for name in record.contenders(swept(L), TRAINING)))
    rows = [[name, *(cell(best_time(record, swept(L), name), 1e9 / TOKENS, 2) for L in SWEEP)] for name in names]
    return table(["ns per token", *(f"L = {L}" for L in SWEEP)], rows)


def best_time(record, where, name, stage=TRAINING):
    """Of its graph where it has one."""
    device = record.values(where, stage, name, GRAPH)
    return record.values(where, stage, name, EAGER) if isinstance(device, str) else device


def swept(length):
    return (TOKENS // length, SWEPT_HEADS, length, SWEPT_SIZE, SWEPT_SIZE)


def decoding_table(record):
    where = [f"context {n}" for n in CONTEXTS]
    names = list(dict.fromkeys(name for place in where for name in record.contenders(place, STEP)))
    rows = [[name, *(cell(best_time(record, place, name, STEP), 1e6) for place in where)] for name in names]
    return table(["us per token", *where], rows)


def model_table(record):
    places = list(dict.fromkeys(row[0] for row in record.rows if row[1] == "training"))
    rows = []
    for where in places:
        for name in record.contenders(where, "training"):
            speed, memory = (record.values(where, "training", name, what) for what in (SPEED, BYTES))
            note = speed.partition(": ")[2] if isinstance(speed, str) else ""
            rows.append([name, where, cell(speed, 1, 0), cell(memory, 1e-6, 0), note])
    return table(["architecture", "update", "words per second", "MB", "note"], rows)


def provenance(record):
    """One line to read the numbers by: device, driver, versions and the rates that the floors follow from."""
    rates = machine_rates(record)
    measured = f"copy {rates[0] / 1e12:.2f} TB/s, bf16 product {rates[1] / 1e12:.0f} TFLOP/s" if rates else "no rates"
    return ", ".join([*(f"{name} {text}".strip() for name, text in record.notes().items()), measured]) + ".\n"


def sections(record, contenders):
    """The paragraphs under the goals."""
    return [
        "Operators: microseconds of device time (of a captured graph) and as called from Python, the least time at "
        "this machine's rates, and peak memory beyond the inputs; a decoding step comes after the shape's tokens:\n",
        operator_table(record, contenders),
        f"{TRAINING} in bfloat16 at growing length, {TOKENS} tokens in all, {SWEPT_HEADS} heads of {SWEPT_SIZE}:\n",
        sweep_table(record),
        f"One decoding step after a context; operators at {STEP_SHAPE}, models with one sequence:\n",
        decoding_table(record),
        "Whole models, an update of fairseq's trainer (forward, backward, optimizer), bfloat16:\n",
        model_table(record),
    ]
