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
import torch
from gpu_report import (
    BYTES,
    CONTEXTS,
    EAGER,
    FORWARD,
    GRAPH,
    SHAPES,
    STEP,
    STEP_SHAPE,
    SWEEP,
    TRAINING,
    Record,
    swept,
)
from report import commit, publish, say, write_csv

from fairseq_fwp import ops
from fairseq_fwp.kernels import load_kernels

DEVICE = "cuda"
UNFINISHED = "gpu_unfinished"  # results/gpu_unfinished.csv: what a run that was killed had measured
ROUNDS = 5
SECONDS_A_ROUND = 0.02
CALLS = (3, 100)  # of a contender in a round: at least, at most
# Greatest relative error against the float64 reference, of out and of each gradient.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}


class Contender(NamedTuple):
    """`build()` returns the form, or raises gpu_peers.Missing; `rule` is what it must agree with, None if with none."""

    rule: str | None
    names: str
    build: object
    dtype: torch.dtype = torch.bfloat16
    tokens_first: bool = False
    ours: bool = False


INPUTS = {"sum": "q k v", "gated": "q k v gate", "delta": "q k v beta", "decay": "q k v key_decay value_decay"}


def kernel(rule):
    function = getattr(ops, f"{rule}_rule")
    return lambda *x: function(*x, backend="kernel")[0]


def call_of_kernel(rule, tensors, state=None):
    """Our kernel on those of `tensors` that it takes."""
    chosen = (tensors[name] for name in INPUTS[rule].split())
    return partial(getattr(ops, f"{rule}_rule"), *chosen, state, backend="kernel")


def contenders(delta_peer=None, decay_peer=None):
    """{name: Contender}, ours first."""
    found = {rule: Contender(rule, names, partial(kernel, rule), ours=True) for rule, names in INPUTS.items()}
    for rule in ("delta", "decay"):
        found[f"{rule} float32"] = found[rule]._replace(dtype=torch.float32)
    found["FLA delta"] = Contender("delta", INPUTS["delta"], gpu_peers.fla_delta, tokens_first=True)
    found["FLA sum"] = Contender("sum", INPUTS["sum"], gpu_peers.fla_sum, tokens_first=True)
    found["flash attention"] = Contender(None, INPUTS["sum"], lambda: gpu_peers.flash_attention)
    for rule, build, folder in (
        ("delta", gpu_peers.published_delta, delta_peer),
        ("decay", gpu_peers.published_decay, decay_peer),
    ):
        found[f"published {rule}"] = Contender(rule, INPUTS[rule], partial(build, folder), torch.float32)
    return found


def dtypes(found):
    """{name: (rule or None, name of the dtype)}, as gpu_report wants them."""
    return {name: (one.rule, str(one.dtype).removeprefix("torch.")) for name, one in found.items()}


def inputs(shape, dtype=torch.bfloat16):
    """q and k positive with sum 1, as the models' sum normalisation leaves them; beta in (0, 1), decays near one."""
    B, H, L, Dk, Dv = shape
    generator = torch.Generator(DEVICE).manual_seed(1)
    draw = partial(torch.randn, generator=generator, device=DEVICE)
    tensors = {"q": draw(B, H, L, Dk).softmax(-1), "k": draw(B, H, L, Dk).softmax(-1), "v": draw(B, H, L, Dv)}
    tensors["beta"] = draw(B, H, L).sigmoid()
    tensors["gate"] = tensors["beta"].clone()
    tensors["key_decay"], tensors["value_decay"] = (draw(B, H, L, d).add(4).sigmoid() for d in (Dk, Dv))
    return {name: x.to(dtype) for name, x in tensors.items()}


def leaves(contender, tensors):
    """The contender's inputs in its own layout, apart from everybody else's."""
    chosen = [tensors[name].to(contender.dtype) for name in contender.names.split()]
    chosen = [x.transpose(1, 2).contiguous() if contender.tokens_first else x.clone() for x in chosen]
    return [x.requires_grad_() for x in chosen]


def back(contender, x):
    return x.transpose(1, 2) if contender.tokens_first else x


def training_step(form, chosen, gradient):
    return torch.autograd.grad(form(*chosen), chosen, gradient)


def relative_error(found, truth):
    return ((found.double() - truth).norm() / truth.norm()).item()


def ends(x):
    """The first and last two of all heads, as those of one sequence: (B, H, ...) -> (1, 4 or fewer, ...)."""
    heads = x.flatten(0, 1)
    return heads[[i for i in range(len(heads)) if i < 2 or i >= len(heads) - 2]].unsqueeze(0)


def check(contender, form, shape):
    """Raises Missing unless out and all gradients agree with the float64 reference, at some heads and 256 tokens.

    The form is given all heads: how a kernel lays out its work depends on their number.
    """
    B, H, L, Dk, Dv = shape
    tensors = inputs((B, H, min(L, 256), Dk, Dv), contender.dtype)
    exact = [ends(tensors[name]).double().requires_grad_() for name in contender.names.split()]
    out = getattr(ops, f"{contender.rule}_rule")(*exact, backend="reference")[0]
    draws = torch.Generator(DEVICE).manual_seed(2)
    gradient = torch.randn(tensors["v"].shape, device=DEVICE, generator=draws).to(contender.dtype)
    truth = [out, *torch.autograd.grad(out, exact, ends(gradient).double())]
    chosen = leaves(contender, tensors)
    found = form(*chosen)
    layout = gradient.transpose(1, 2).contiguous() if contender.tokens_first else gradient
    results = [found, *torch.autograd.grad(found, chosen, layout)]
    for name, x, y in zip(("out", *contender.names.split()), results, truth, strict=True):
        error = relative_error(ends(back(contender, x)), y)
        if not error <= TOLERANCE[contender.dtype]:
            raise gpu_peers.Missing(f"its {name} differs from the float64 reference by {error:.1e}")


def usable(name, contender, shape):
    """The form, checked. A peer that fails is Missing; if ours does, nothing at all is reported."""
    try:
        form = contender.build()
        if contender.rule:
            check(contender, form, shape)
    except gpu_peers.Missing as error:
        if contender.ours:
            raise SystemExit(f"{name} at {shape}: {error}. Nothing is reported.") from error
        raise
    except Exception as error:
        if contender.ours:
            raise
        raise gpu_peers.Missing(f"it fails: {gpu_peers.first_line(error)}") from error
    return form


# ---- timing


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


def take_turns(session, where, stage, calls):
    """Times every call, as it is and as a graph, in rounds: as many of each, one at least, for they are compared."""
    kinds = {}
    for name, call in calls.items():
        if not session.in_time(where, stage, [name]):
            continue
        for _ in range(3):
            call()
        kinds[name, EAGER] = call
        replay = replay_of(call)
        if replay:
            kinds[name, GRAPH] = replay
        else:
            say(f"{name} cannot be captured as a graph at {where}, {stage}: its time is as called")
    seconds = {key: [] for key in kinds}
    for i in range(ROUNDS):
        if i and session.seconds_left() < 0:
            break
        for key, call in kinds.items():
            seconds[key].append(session.clock.round(call))
    for (name, what), found in seconds.items():
        session.record.add(where, stage, name, what, found)


def peak_bytes(call):
    """Peak memory of one call beyond what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ---- what is measured


class Session:
    """One run: its record, its clock and its deadline."""

    def __init__(self, record, seconds, found):
        self.record, self.found, self.deadline = record, found, time.monotonic() + seconds
        self.clock = Clock()

    def seconds_left(self):
        return self.deadline - time.monotonic()

    def in_time(self, where, stage, names):
        """Whether the deadline is still ahead; the record says what is left out."""
        if self.seconds_left() > 0:
            say(f"{self.seconds_left():4.0f} s left: {stage}, {where}: {', '.join(names)}")
            return True
        for name in names:
            self.record.miss(where, stage, name, "no time was left for it")
        return False

    def forms(self, where, stage, shape, names):
        """{name: (contender, form)} of those that can be measured at a shape; the others are recorded as missed."""
        usable_forms = {}
        for name in names:
            if not self.in_time(where, stage, [name]):
                continue
            try:
                usable_forms[name] = self.found[name], usable(name, self.found[name], shape)
            except gpu_peers.Missing as error:
                self.record.miss(where, stage, name, str(error))
        return usable_forms

    def operators(self, shape, stage, names):
        forms, calls = self.forms(shape, stage, shape, names), {}
        tensors = inputs(shape) if forms else {}
        for name, (contender, form) in forms.items():
            try:
                calls[name] = call_of(stage, form, leaves(contender, tensors))
                calls[name]()
                self.record.add(shape, stage, name, BYTES, [peak_bytes(calls[name])])
            except RuntimeError as error:
                full = isinstance(error, torch.cuda.OutOfMemoryError)
                if contender.ours and not full:
                    raise
                calls.pop(name, None)
                reason = (
                    "it needs more memory than this GPU has" if full else f"it fails: {gpu_peers.first_line(error)}"
                )
                self.record.miss(shape, stage, name, reason)
        take_turns(self, shape, stage, calls)
        del tensors, calls
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
            seconds = [self.clock.round(call) for _ in range(ROUNDS)]
            self.record.add("machine", "", name, "per second", [work / s for s in seconds])

    def sweep(self):
        names = ["delta", "sum", "FLA delta", "flash attention"]
        for length in SWEEP:
            self.operators(swept(length), TRAINING, names)

    def decoding(self):
        """A step of the delta rule after contexts of growing length, and attention over a cache of as many tokens."""
        B, H, _, Dk, Dv = STEP_SHAPE
        step = {name: x.detach() for name, x in inputs(STEP_SHAPE).items()}
        for context in CONTEXTS:
            where = f"context {context}"
            if not self.in_time(where, STEP, ["delta", "attention"]):
                continue
            read = inputs((1, H, context, Dk, Dv))
            with torch.no_grad():
                _, written = call_of_kernel("delta", read)()
                state = written.expand(B, -1, -1, -1).contiguous()
                cache = [x.expand(B, -1, -1, -1).contiguous() for x in (read["k"], read["v"])]
                attend = torch.nn.functional.scaled_dot_product_attention
                calls = {"delta": call_of_kernel("delta", step, state), "attention": partial(attend, step["q"], *cache)}
                take_turns(self, where, STEP, calls)

    def steps(self, shape):
        """One token more, from a state: every rule, and attention over a cache of as many tokens as the shape has."""
        B, H, _, Dk, Dv = shape
        names = [*INPUTS, "flash attention"]
        if not self.in_time(shape, STEP, names):
            return
        token, cache = inputs((B, H, 1, Dk, Dv)), inputs(shape)
        state = torch.zeros(B, H, Dk, Dv, device=DEVICE)
        calls = {rule: call_of_kernel(rule, token, state) for rule in INPUTS}
        attend = torch.nn.functional.scaled_dot_product_attention
        calls["flash attention"] = partial(attend, token["q"], cache["k"], cache["v"])
        with torch.no_grad():
            for name, call in calls.items():
                call()
                self.record.add(shape, STEP, name, BYTES, [peak_bytes(call)])
            take_turns(self, shape, STEP, calls)

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


def call_of(stage, form, chosen):
    """What is timed: the form without gradients, or with the gradients of its inputs."""

    def forward():
        with torch.no_grad():
            return form(*chosen)

    return forward if stage == FORWARD else partial(training_step, form, chosen, torch.randn_like(forward()))


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
    for shape in SHAPES:
        yield partial(session.steps, shape)
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
    record.note("", time.strftime("%Y-%m-%d %H:%M"))
    record.note("commit", commit())
    record.note("", torch.cuda.get_device_name(0))
    record.note("driver", driver)
    for package, version in gpu_peers.versions().items():
        record.note(package, version)


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
            publish_record(record, found)
        save().unlink()


def publish_record(record, found):
    publish(
        "gpu",
        Record.HEADER,
        record.rows,
        gpu_report.goals(record),
        *gpu_report.sections(record, dtypes(found)),
        head=gpu_report.provenance(record),
        script="gpu.sh",
    )


if __name__ == "__main__":
    main()
