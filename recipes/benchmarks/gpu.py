"""Speed and memory on one NVIDIA GPU: `python gpu.py build`, then `python gpu.py measure` (gpu.sh does it).

What matters most is measured first, and what --seconds leaves no time for is published as not measured. Times are CUDA
events around one call, after the second-level cache has been overwritten: the median of the calls of a round, in rounds
in which all contenders take turns. A contender is timed as Python calls it and, where it can be captured, as a replayed
graph, which leaves out the time of Python and of the launches. bfloat16 unless a name says float32.
"""

import argparse
import os
import subprocess
import time
from functools import partial
from statistics import median
from typing import NamedTuple

import gpu_models
import gpu_peers
import gpu_report
import inputs
import torch
from gpu_report import CALLED, CONTEXTS, GRAPH, OURS, SHAPES, STEP_SHAPE, SWEEP, context_of, swept
from inputs import FORWARD, STEP, TRAINING
from record import BYTES, Record, commit, publish, say, write_csv

from fairseq_fwp.kernels import load_kernels

DEVICE = "cuda"
UNFINISHED = "gpu_unfinished"  # results/gpu_unfinished.csv: what a run that was killed had measured
ROUNDS = 5
SECONDS_A_ROUND = 0.02
CALLS = (3, 100)  # of a contender in a round: at least, at most
# Greatest relative error against the float64 reference, of out and of each gradient.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}


class Contender(NamedTuple):
    """`build()` returns the function, or raises gpu_peers.Missing; it takes the inputs of `form`.

    exact: whether it must agree with that form. tokens_first: whether it takes (B, L, H, D).
    """

    form: str
    build: object
    exact: bool = True
    dtype: torch.dtype = torch.bfloat16
    tokens_first: bool = False
    ours: bool = False

    def swap(self, x):
        return x.transpose(1, 2) if self.tokens_first else x

    def inputs(self, shape):
        """Its inputs in its own layout."""
        drawn = inputs.draw(self.form, shape, self.dtype, DEVICE).values()
        return [self.swap(x).contiguous().requires_grad_() for x in drawn]


def contenders(delta_peer=None, decay_peer=None):
    """{name: Contender}, ours first."""
    found = {rule: Contender(rule, partial(inputs.call, rule), ours=True) for rule in OURS}
    for rule in ("delta", "decay"):
        found[f"{rule} float32"] = found[rule]._replace(dtype=torch.float32)
    found["FLA delta"] = Contender("delta", gpu_peers.fla_delta, tokens_first=True)
    found["FLA sum"] = Contender("sum", gpu_peers.fla_sum, tokens_first=True)
    found["flash attention"] = Contender("sum", lambda: gpu_peers.flash_attention, exact=False)
    for rule, build, folder in (
        ("delta", gpu_peers.published_delta, delta_peer),
        ("decay", gpu_peers.published_decay, decay_peer),
    ):
        found[f"published {rule}"] = Contender(rule, partial(build, folder), dtype=torch.float32)
    return found


def ends(x):
    """The first and last two of all heads, as those of one sequence: (B, H, ...) -> (1, 4 or fewer, ...)."""
    heads = x.flatten(0, 1)
    return heads[[i for i in range(len(heads)) if i < 2 or i >= len(heads) - 2]].unsqueeze(0)


def usable(name, contender, shape):
    """The function, checked. A peer that fails is Missing; if ours does, nothing at all is reported."""
    try:
        function = contender.build()
        if contender.exact:
            how = {"heads": ends, "swap": contender.swap}
            found = inputs.errors(function, contender.form, shape, contender.dtype, DEVICE, **how)
            for of, error in found.items():
                if not error <= TOLERANCE[contender.dtype]:
                    raise gpu_peers.Missing(f"its {of} differs from the float64 reference by {error:.1e}")
    except gpu_peers.Missing as error:
        if contender.ours:
            raise SystemExit(f"{name} at {shape}: {error}. Nothing is reported.") from error
        raise
    except Exception as error:
        if contender.ours:
            raise
        raise gpu_peers.Missing(f"it fails: {gpu_peers.first_line(error)}") from error
    return function


class Clock:
    """Seconds of a call on the device, from a cold second-level cache."""

    def __init__(self):
        # More than any GPU's cache holds.
        self.cache = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)

    def times(self, call, count):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            self.cache.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    def round(self, call):
        """The median of as many calls as take about SECONDS_A_ROUND."""
        estimate = median(self.times(call, 2))
        count = min(max(int(SECONDS_A_ROUND / max(estimate, 1e-6)), CALLS[0]), CALLS[1])
        return median(self.times(call, count))


def replay_of(call):
    """A graph of the call to replay, or None where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def peak_bytes(call):
    """Peak memory of one call beyond what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def call_of(stage, function, chosen):
    """What is timed: the function without gradients, or with the gradients of its inputs."""

    def forward():
        with torch.no_grad():
            return function(*chosen)

    if stage == FORWARD:
        return forward
    return partial(inputs.training_step, function, chosen, torch.randn_like(forward()))


class Session:
    """One run: its record, its clock and its deadline."""

    def __init__(self, record, seconds, found):
        self.record, self.found, self.deadline = record, found, time.monotonic() + seconds
        self.clock = Clock()

    def in_time(self, where, stage, names):
        """Whether the deadline is still ahead; the record says what is left out."""
        left = self.deadline - time.monotonic()
        if left > 0:
            say(f"{left:4.0f} s left: {stage}, {where}: {', '.join(names)}")
            return True
        for name in names:
            self.record.miss(where, stage, name, "no time was left for it")
        return False

    def take_turns(self, where, stage, calls):
        """Times every call, as it is and as a graph, in as many rounds each, one at least, for they are compared."""
        kinds = {}
        for name, call in calls.items():
            if not self.in_time(where, stage, [name]):
                continue
            for _ in range(3):
                call()
            kinds[name, CALLED] = call
            replay = replay_of(call)
            if replay:
                kinds[name, GRAPH] = replay
            else:
                say(f"{name} cannot be captured as a graph at {where}, {stage}: its time is as called")
        for i in range(ROUNDS):
            if i and time.monotonic() > self.deadline:
                break
            for (name, what), call in kinds.items():
                self.record.add(where, stage, name, [self.clock.round(call)], what)

    def operators(self, shape, stage, names, where=None):
        """The contenders that are usable at a shape; the record says why the others are not."""
        where = where or shape
        calls = {}
        for name in names:
            if not self.in_time(where, stage, [name]):
                continue
            contender = self.found[name]
            try:
                function = usable(name, contender, shape)
                call = call_of(stage, function, contender.inputs(shape))
                call()
                self.record.add(where, stage, name, [peak_bytes(call)], BYTES)
                calls[name] = call
            except gpu_peers.Missing as error:
                self.record.miss(where, stage, name, str(error))
            except torch.cuda.OutOfMemoryError:
                self.record.miss(where, stage, name, "it needs more memory than this GPU has")
            except RuntimeError as error:
                if contender.ours:
                    raise
                self.record.miss(where, stage, name, f"it fails: {gpu_peers.first_line(error)}")
        self.take_turns(where, stage, calls)
        del calls
        torch.cuda.empty_cache()

    def rates(self):
        """The speed of a copy and of a matrix product, which floors follow from."""
        source = torch.randn(1 << 30, device=DEVICE)
        target = torch.empty_like(source)
        matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
        for name, call, work in (
            ("copy", partial(target.copy_, source), 2 * source.nbytes),
            ("product", partial(torch.mm, matrix, matrix), 2 * 8192**3),
        ):
            call()
            self.record.add("machine", "", name, [work / self.clock.round(call) for _ in range(ROUNDS)], "per second")

    def sweep(self):
        for length in SWEEP:
            names = ["delta", "sum", "FLA delta", "flash attention"]
            self.operators(swept(length), TRAINING, names, f"{length} tokens")

    @torch.no_grad()
    def steps(self, where, shape, context, rules):
        """One token more, (B, H, 1, Dk, Dv), from a state: of each rule, and attention over a cache of the context."""
        names = [*rules, "attention"]
        if not self.in_time(where, STEP, names):
            return
        B, H, _, Dk, Dv = shape
        draw = partial(inputs.draw, dtype=torch.bfloat16, device=DEVICE)
        calls = {}
        for rule in rules:
            written = inputs.step(rule, draw(rule, (1, H, context, Dk, Dv)), None)()[1]
            calls[rule] = inputs.step(rule, draw(rule, shape), written.expand(B, -1, -1, -1).contiguous())
        token, read = draw("sum", shape), draw("sum", (1, H, context, Dk, Dv))
        cache = [x.expand(B, -1, -1, -1).contiguous() for x in (read["k"], read["v"])]
        calls["attention"] = partial(torch.nn.functional.scaled_dot_product_attention, token["q"], *cache)
        for name, call in calls.items():
            call()
            self.record.add(where, STEP, name, [peak_bytes(call)], BYTES)
        self.take_turns(where, STEP, calls)

    def decoding(self):
        for context in CONTEXTS:
            self.steps(context_of(context), STEP_SHAPE, context, ["delta"])

    def models(self):
        gpu_models.measure(self.record, self.in_time)

    def foreign(self, names):
        """Kernels that may take the GPU with them when they fail."""
        for shape in SHAPES:
            try:
                self.operators(shape, TRAINING, names)
            except RuntimeError as error:
                for name in names:
                    self.record.miss(shape, TRAINING, name, f"the GPU failed: {gpu_peers.first_line(error)}")
                return


def stages(session):
    """Everything, in the order of importance. Foreign kernels come last."""
    main = [name for name in session.found if "float32" not in name and "published" not in name]
    yield session.rates
    for shape in SHAPES:
        yield partial(session.operators, shape, TRAINING, main)
    yield session.models
    yield session.decoding
    yield session.sweep
    for shape in SHAPES:
        yield partial(session.operators, shape, FORWARD, main)
    for B, H, L, *sizes in SHAPES:
        yield partial(session.steps, (B, H, L, *sizes), (B, H, 1, *sizes), L, OURS)
    yield partial(session.foreign, [name for name in session.found if name not in main])


def run(session, save):
    """All stages; `save()` after each keeps what is measured, whatever becomes of the next."""
    for stage in stages(session):
        stage()
        save()


def describe(record):
    """Device, driver and versions, for the head of the report."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    about = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": commit(), "GPU": torch.cuda.get_device_name(0)}
    for name, text in (about | {"driver": driver} | gpu_peers.versions()).items():
        record.note(name, text)


def arguments(argv=None):
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["build", "measure"])
    parser.add_argument("--seconds", type=float, default=400, help="time for measuring; what is left out says so")
    for rule, what in (("delta", "lmtool-fwp/src"), ("decay", "T2FW")):
        variable = f"FWP_{rule.upper()}_PEER"
        peer = f"folder {what} with the published {rule} kernel (default: ${variable}), see gpu_peers.py"
        parser.add_argument(f"--{rule}-peer", metavar="FOLDER", default=os.environ.get(variable), help=peer)
    return parser.parse_args(argv)


def require_kernels():
    """Builds or loads our kernels, or ends the program with the reason."""
    if not torch.cuda.is_available():
        raise SystemExit(f"no CUDA device: PyTorch {torch.__version__} sees no NVIDIA GPU; run.sh measures on the CPU.")
    status = load_kernels("cuda")
    if not status.built:
        raise SystemExit(f"no CUDA kernels: {status.reason}; {status.cure}.")


def main(argv=None):
    args = arguments(argv)
    require_kernels()
    if args.part == "build":
        return
    found, record = contenders(args.delta_peer, args.decay_peer), Record()
    describe(record)
    save = partial(write_csv, UNFINISHED, Record.HEADER, record.rows)
    correct = True
    try:
        run(Session(record, args.seconds, found), save)
    except SystemExit:  # a kernel of ours gives wrong results
        correct = False
        raise
    except BaseException as error:
        record.note("ended early:", gpu_peers.first_line(error))
        raise
    finally:
        if correct:
            how = {"head": gpu_report.provenance(record), "script": "gpu.sh", "panels": gpu_report.PANELS}
            publish("gpu", record, gpu_report.goals(record), *gpu_report.paragraphs(record), **how)
        save().unlink()


if __name__ == "__main__":
    main()
