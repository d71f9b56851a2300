"""Speed and memory on one NVIDIA GPU in three calls, `python gpu.py ours`, `peers` and `models`; gpu.sh prepares them.

Each call writes gpu_PART.csv to --out, every number at once, so that nothing is lost if it is killed. The most
important numbers come first. Numbers for which --seconds leaves no time are noted. `publish` puts all three calls into
RESULTS.md, if ours passed its checks.

Times are CUDA events around one call, after the second-level cache was overwritten: the median of the calls of a round.
In a round all contenders take turns. A contender is timed as called from Python and, if it can be captured, as a
replayed graph, without the time of Python and of launches. bfloat16 unless a name says float32.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import gpu_checks
import gpu_models
import gpu_peers
import gpu_report
import inputs
import torch
from gpu_report import CALLED, CONTEXTS, GRAPH, OURS, PARTS, SHAPES, STEP_SHAPE, SWEEP, WRONG, context_of, swept
from inputs import FORWARD, STEP, TRAINING
from record import BYTES, RESULTS, Record, commit, publish, say

from fairseq_fwp.kernels import load_kernels

DEVICE = "cuda"
GRACE = 30  # seconds after the deadline at which the call is killed
# Shares of a call's time: each tool of compute-sanitizer, the tests, the peers' first calls.
SANITIZING, TESTING, WARMING = 0.1, 0.4, 0.5
ROUNDS = 5
SECONDS_A_ROUND = 0.02
CALLS = (3, 100)  # calls of a contender in a round: least, greatest number
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

    def layout(self, x):
        return x.transpose(1, 2) if self.tokens_first else x

    def inputs(self, shape):
        """Return its inputs in its own layout."""
        drawn = inputs.draw(self.form, shape, self.dtype, DEVICE).values()
        return [self.layout(x).contiguous().requires_grad_() for x in drawn]


def contenders(part, delta_peer=None, decay_peer=None):
    """Return {name: Contender} of a call, ours first: all of ours, or the peers and our forms of the same rules."""
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
    opposed = {(x.form, x.dtype) for x in found.values() if not x.ours}
    return {name: x for name, x in found.items() if (x.ours if part == "ours" else (x.form, x.dtype) in opposed)}


def ends(x):
    """Return the first and last two of all heads as one sequence: (B, H, ...) -> (1, 4 or fewer, ...)."""
    heads = x.flatten(0, 1)
    return heads[[i for i in range(len(heads)) if i < 2 or i >= len(heads) - 2]].unsqueeze(0)


def usable(contender, shape):
    """Return the function, and the error of its results or "". Raises gpu_peers.Missing for a wrong peer."""
    function, wrong = contender.build(), ""
    if contender.exact:
        how = {"heads": ends, "layout": contender.layout}
        for of, error in inputs.errors(function, contender.form, shape, contender.dtype, DEVICE, **how).items():
            if not error <= TOLERANCE[contender.dtype]:
                wrong = wrong or f"its {of} differs from the float64 reference by {error:.1e}"
    if wrong and not contender.ours:
        raise gpu_peers.Missing(wrong)
    return function, wrong


class Clock:
    """Measure the seconds of a call on the device, from a cold second-level cache."""

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
        """Return the median of calls that take about SECONDS_A_ROUND together."""
        estimate = median(self.times(call, 2))
        count = min(max(int(SECONDS_A_ROUND / max(estimate, 1e-6)), CALLS[0]), CALLS[1])
        return median(self.times(call, count))


def replay_of(call):
    """Return the replay of a graph of the call, or None if it cannot be captured."""
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
    """Return the peak memory of a call beyond the memory in use before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def call_of(stage, function, chosen):
    """Return the timed call: the function without gradients, or with the gradients of its inputs."""

    def forward():
        with torch.no_grad():
            return function(*chosen)

    if stage == FORWARD:
        return forward
    return partial(inputs.training_step, function, chosen, torch.randn_like(forward()))


class Session:
    """One call of this script: record, contenders, clock, and deadline in seconds of time.monotonic()."""

    def __init__(self, record, deadline, found):
        self.record, self.deadline, self.found = record, deadline, found
        self.cold = {}  # {(name, sizes of a head): why its first call failed}
        self.clock = Clock()

    def left(self):
        return self.deadline - time.monotonic()

    def in_time(self, where, stage, names):
        """Return whether there is time left; otherwise record what is left out."""
        if self.left() > 0:
            say(f"{self.left():4.0f} s left: {stage}, {where}: {', '.join(names)}")
            return True
        for name in names:
            self.record.miss(where, stage, name, "no time was left for it")
        return False

    def take_turns(self, where, stage, calls):
        """Time every call, directly and as a graph, in the same number of rounds, at least one."""
        kinds = {}
        for name, call in calls.items():
            if not (call and self.in_time(where, stage, [name])):
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
            if i and self.left() < 0:
                break
            for (name, what), call in kinds.items():
                self.record.add(where, stage, name, [self.clock.round(call)], what)

    def attempt(self, where, stage, name, build):
        """Return the call that `build()` makes after running it once; None with a record of the reason if it fails."""
        try:
            call = build()
            call()
            self.record.add(where, stage, name, [peak_bytes(call)], BYTES)
            return call
        except Exception as error:  # any reason: the report shows it next to those that run
            self.record.miss(where, stage, name, gpu_peers.reason(error))
            return None

    def checked(self, where, stage, name, shape):
        """Return the call of a contender whose results are right."""
        contender, place = self.found[name], (name, shape[3:])
        if place in self.cold:
            raise gpu_peers.Missing(self.cold[place])
        function, wrong = usable(contender, shape)
        if wrong:  # the first times of a new kernel are useful even so
            self.record.add(where, stage, name, [wrong], WRONG)
        return call_of(stage, function, contender.inputs(shape))

    def operators(self, shape, stage, names, where=None):
        """Time the contenders that work at a shape."""
        where = where or shape
        calls = {
            name: self.attempt(where, stage, name, partial(self.checked, where, stage, name, shape))
            for name in names
            if self.in_time(where, stage, [name])
        }
        self.take_turns(where, stage, calls)
        del calls
        torch.cuda.empty_cache()

    def rates(self):
        """Measure the speed of a copy and of a matrix product, for the floors."""
        source = torch.randn(1 << 30, device=DEVICE)
        target = torch.empty_like(source)
        matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
        for name, call, work in (
            ("copy", partial(target.copy_, source), 2 * source.nbytes),
            ("product", partial(torch.mm, matrix, matrix), 2 * 8192**3),
        ):
            call()
            self.record.add("machine", "", name, [work / self.clock.round(call) for _ in range(ROUNDS)], "per second")

    def sweep(self, names):
        for length in SWEEP:
            self.operators(swept(length), TRAINING, names, f"{length} tokens")

    @torch.no_grad()
    def steps(self, where, shape, context, rules):
        """Time one more token, (B, H, 1, Dk, Dv): of each rule from a state, and of attention over a cached context."""
        names = [*rules, "attention"]
        if not self.in_time(where, STEP, names):
            return
        B, H, _, Dk, Dv = shape
        draw = partial(inputs.draw, dtype=torch.bfloat16, device=DEVICE)

        def step(rule):
            written = inputs.step(rule, draw(rule, (1, H, context, Dk, Dv)), None)()[1]
            return inputs.step(rule, draw(rule, shape), written.expand(B, -1, -1, -1).contiguous())

        def attention():
            token, read = draw("sum", shape), draw("sum", (1, H, context, Dk, Dv))
            cache = [x.expand(B, -1, -1, -1).contiguous() for x in (read["k"], read["v"])]
            return partial(torch.nn.functional.scaled_dot_product_attention, token["q"], *cache)

        builds = {rule: partial(step, rule) for rule in rules} | {"attention": attention}
        self.take_turns(where, STEP, {name: self.attempt(where, STEP, name, build) for name, build in builds.items()})

    def decoding(self):
        for context in CONTEXTS:
            self.steps(context_of(context), STEP_SHAPE, context, ["delta"])

    def check(self, folder, seconds):
        """Run compute-sanitizer and the tests, and record the verdicts: after a failure nothing is published."""
        for tool in gpu_checks.TOOLS:
            self.record.note(tool, gpu_checks.sanitize(tool, folder, min(SANITIZING * seconds, self.left())))
        self.record.note(gpu_checks.LAWS, gpu_checks.laws(folder, min(TESTING * seconds, self.left())))

    def warm(self, flags, seconds):
        """Run every peer's first call at every shape, all at once in separate processes.

        Triton compiles about 100 versions of a peer's kernels and keeps them on disk. The choice of the fastest is not
        kept, because other processes use the GPU here.
        """
        os.environ["FLA_CACHE_RESULTS"] = "0"
        end = time.monotonic() + min(WARMING * seconds, self.left())
        peers = [name for name, x in self.found.items() if not x.ours and x.exact]

        def first_call(job):
            name, shape = job
            command = [sys.executable, __file__, "warm", *flags, "--peer", name, "--shape", SHAPES.index(shape)]
            with tempfile.NamedTemporaryFile() as log:
                status = gpu_checks.limited(command, end - time.monotonic(), log.name)
                return status, gpu_checks.last_line(log.name)

        jobs = [(name, shape) for name in peers for shape in SHAPES]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for (name, shape), (status, said) in zip(jobs, pool.map(first_call, jobs), strict=True):
                if status != 0:
                    self.cold[name, shape[3:]] = "its first call took too long" if status is None else said


def stages(session, part):
    """Yield the measurements of a call, most important first. Foreign kernels come last: they may break the GPU."""
    if part == "models":
        yield partial(gpu_models.measure, session.record, session.in_time)
        return
    half, single = (
        [name for name, x in session.found.items() if x.dtype == dtype] for dtype in (torch.bfloat16, torch.float32)
    )
    yield session.rates
    for shape in SHAPES:
        yield partial(session.operators, shape, TRAINING, half)
    if part == "ours":
        yield session.decoding
    yield partial(session.sweep, [name for name in half if session.found[name].form in ("delta", "sum")])
    for shape in SHAPES:
        yield partial(session.operators, shape, FORWARD, half)
    if part == "ours":
        for B, H, L, *sizes in SHAPES:
            yield partial(session.steps, (B, H, L, *sizes), (B, H, 1, *sizes), L, OURS)
    for shape in SHAPES:
        yield partial(session.operators, shape, TRAINING, single)


def describe(record, kernels):
    """Record device, driver and versions; kernels: the path of our library."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    about = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": commit(), "GPU": torch.cuda.get_device_name(0)}
    about |= {"kernels": Path(kernels).parent.name, "driver": driver} | gpu_peers.versions()
    for name, text in about.items():
        record.note(name, text)


def require_kernels():
    """Return the path of our kernels, building them if no cache has them; exit with the reason otherwise."""
    if not torch.cuda.is_available():
        raise SystemExit(f"no CUDA device: PyTorch {torch.__version__} sees no NVIDIA GPU; run.sh measures on the CPU.")
    status = load_kernels("cuda")
    if not status.built:
        raise SystemExit(f"no CUDA kernels: {status.reason}; {status.cure}.")
    return status.path


def build():
    """Compile our kernels for another machine's GPU, the first of TORCH_CUDA_ARCH_LIST."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    digits = re.match(r"(\d+)\.(\d)", listed)
    if not digits:
        raise SystemExit(f"TORCH_CUDA_ARCH_LIST must name the GPU to build for, as in 9.0, got '{listed}'.")
    capability = int(digits[1]), int(digits[2])
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
    torch.cuda.get_device_capability, torch.cuda.get_device_name = (lambda _: capability), (lambda _: "a GPU")
    print(require_kernels())


def warm(args):
    """Run the first call of a peer, for Session.warm."""
    contender, shape = contenders("peers", args.delta_peer, args.decay_peer)[args.peer], SHAPES[args.shape]
    try:
        function, _ = usable(contender, shape)
        call_of(TRAINING, function, contender.inputs(shape))()
        torch.cuda.synchronize()
    except Exception as error:
        raise SystemExit(gpu_peers.reason(error)) from error


def publish_all(folder):
    """Write the results of the calls in a folder to RESULTS.md, unless a check has failed."""
    found = gpu_report.read_parts(folder)
    refusal = gpu_report.refusal(found)
    if refusal:
        raise SystemExit(f"nothing is published: {refusal}.")
    merged = gpu_report.merge(found.values())
    how = {"head": gpu_report.provenance(merged), "script": "gpu.sh", "panels": gpu_report.PANELS}
    publish("gpu", merged, gpu_report.goals(merged), *gpu_report.paragraphs(merged), **how)


def arguments(argv=None):
    parser = argparse.ArgumentParser(prog="gpu.sh", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "part", choices=[*PARTS, "publish", "build", "warm"], metavar="ours, peers, models, publish, build"
    )
    parser.add_argument("--seconds", type=float, default=490, help="time for the call (default: 490)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: results)")
    for rule, what in (("delta", "lmtool-fwp/src"), ("decay", "T2FW")):
        variable = f"FWP_{rule.upper()}_PEER"
        peer = f"folder {what} with the published {rule} kernel (default: ${variable}), see gpu_peers.py"
        parser.add_argument(f"--{rule}-peer", metavar="FOLDER", default=os.environ.get(variable), help=peer)
    for flag, kind in (("--peer", str), ("--shape", int)):
        parser.add_argument(flag, type=kind, help=argparse.SUPPRESS)  # of `warm`
    return parser.parse_args(argv)


def measure(args):
    """Measure one part, within its seconds."""
    deadline = time.monotonic() + args.seconds
    kernels, record = require_kernels(), Record(path=args.out / f"gpu_{args.part}.csv")
    try:
        describe(record, kernels)
        session = Session(record, deadline, contenders(args.part, args.delta_peer, args.decay_peer))
        if args.part == "ours":
            session.check(args.out, args.seconds)
        if args.part == "peers":
            session.warm(["--delta-peer", args.delta_peer or "", "--decay-peer", args.decay_peer or ""], args.seconds)
        for stage in stages(session, args.part):
            stage()
    except BaseException as error:
        record.note("ended early:", gpu_peers.first_line(error))
        raise
    finally:
        print(gpu_report.provenance(record), *gpu_report.paragraphs(record), sep="\n")


def end_at_the_deadline(args):
    """Measure one part. If something hangs, the process is killed, and all measurements are on disk."""
    signal.alarm(int(args.seconds) + GRACE)
    try:
        measure(args)
    finally:
        signal.alarm(0)


def main(argv=None):
    args = arguments(argv)
    other = {"publish": partial(publish_all, args.out), "build": build, "warm": partial(warm, args)}
    other.get(args.part, partial(end_at_the_deadline, args))()


if __name__ == "__main__":
    main()
