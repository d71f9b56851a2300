"""Speed, memory and errors on one NVIDIA GPU, by calls of `gpu.sh`: see "One GPU" in RESULTS.md.

A call writes gpu_PART.csv to --out, every number at once. A job is a process: a kernel that hangs, or after which the
GPU does not work, ends only its job. A contender is a rule and a backend, in bfloat16 or as named. A time is the median
of CUDA events around some calls, with a cold second-level cache, as called from Python and, if possible, as a graph,
without gaps between launches. In a round all contenders of a rule take turns.
"""

import argparse
import importlib.metadata
import itertools
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import inputs
import torch
from inputs import FORWARD, STEP, TRAINING
from record import BYTES, HERE, RESULTS, Goal, Record, commit, compare, publish, table
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from fairseq_fwp.kernels import load_kernels
from fairseq_fwp.kernels.self_check import find_faults
from fairseq_fwp.ops.fla import FORMS as IN_FLA

CALLED, GRAPH, ERROR, ERROR_OF_ALL = "seconds as called", "seconds of a graph", "error", "error of all tokens"
HALF, SINGLE, SDPA = torch.bfloat16, torch.float32, "scaled_dot_product_attention"
ATTENTION = {SDPA: (partial(scaled_dot_product_attention, is_causal=True), "sum")}  # and the form of its inputs
# Shares of a call's time: the build and fla's first calls, a job (killed GRACE seconds later), the checks.
FIRST_CALLS, JOB, GRACE, CHECKS = 0.4, 0.3, 20, {"laws": 0.65, "memcheck": 0.15, "racecheck": 0.15}
CAPTURED = re.compile(".*, kernel|(delta|sum)[^_]*, fla|scaled_dot")  # fla looks at decays, which a graph cannot do
FIRST = ("delta", "gated_delta, decay per head", "gated_delta, decay per key dimension")
FORMS = (*FIRST, *(form for form in inputs.FORMS if form not in (*FIRST, "fwm")))
# Shapes (B, H, L, Dk, Dv), and the least ratio of fla's time to ours for delta.
GOALS = {(96, 8, 256, 16, 16): 3, (56, 8, 384, 32, 32): 3, (8, 16, 4096, 64, 64): 2.5, (1, 16, 32768, 128, 128): 2}
SHAPES = (*GOALS, (1, 16, 8192, 128, 128), (1, 32, 8192, 128, 128))
LONG = 2048  # tokens from which kernels have segments: then out of all tokens is compared, not only of the first 256
DEVICE, ROUNDS, RATE = "cuda", 5, 8192  # RATE: rows of the matrices copied and multiplied
STEP_SHAPE, CONTEXTS, SPARE = (32, 16, 1, 64, 64), (1, 1024, 16384, 65536), 1000  # SPARE: most steps after a context
MODELS = ("delta_lm_wt103", "gated_delta_lm_wt103", "softmax_lm_wt103")
SAMPLES, TOKENS, WORDS, FLAGS = 96, 256, 267_744, ("--bf16",)  # of an update; words of WikiText-103, with symbols
TESTS = ("tests/laws", "tests/ops", "-k", "cuda", "-n", "auto")
if "FWP_TINY" in os.environ:  # the tests of this script, on a CPU
    DEVICE, ROUNDS, RATE, LONG, SAMPLES, TOKENS, WORDS = "cpu", 2, 64, 16, 2, 16, 1000
    FORMS, SHAPES, STEP_SHAPE, CONTEXTS = FORMS[:2], ((1, 2, 24, 8, 8),), (2, 2, 1, 8, 8), (1, 9)
    FLAGS = ("--cpu", "--decoder-layers", "1", "--adaptive-softmax-cutoff", "500")
ON_GPU = DEVICE == "cuda"
WITH_FLA = tuple(form for form in FORMS if f"{inputs.FORMS[form][0]}_rule" in IN_FLA)
FORKS = multiprocessing.get_context("forkserver")  # processes begin with these imports, and without CUDA
with suppress(ImportError):
    import triton.testing  # its times are in milliseconds; it also tries hundreds of configurations of fla's kernels

    triton.testing.do_bench = partial(triton.testing.do_bench, warmup=5, rep=20)


def resume(path):
    """Return the record in a file, to which other processes may have written."""
    return Record(Record.read(path).rows if path.exists() else (), path)


def seconds_of(call):
    of_cpu = Timer("call()", globals={"call": call})
    return triton.testing.do_bench(call, return_mode="median") / 1e3 if ON_GPU else of_cpu.timeit(1).median


class Session:
    """The measurements of one process, until `end` in seconds of time.monotonic()."""

    def __init__(self, path, end):
        self.record, self.end = resume(path), end
        if ON_GPU:
            torch.cuda.set_stream(torch.cuda.Stream())  # graphs need one for the calls before they are captured

    def attempt(self, where, stage, name, build):
        """Return the call that build() makes, after two calls; None with a record of the reason if there is none."""
        if time.monotonic() > self.end:
            return self.record.miss(where, stage, name, "no time was left for it")
        try:
            call = build()
            call()
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call()
                torch.cuda.synchronize()
                self.record.add(where, stage, name, [torch.cuda.max_memory_allocated() - before], BYTES)
            return call
        except Exception as error:  # any reason: the table shows it next to those that run
            self.record.miss(where, stage, name, repr(error)[:200])
            if ON_GPU:
                torch.cuda.synchronize()  # raises the error again if the GPU does not work: then this job ends

    def take_turns(self, where, stage, calls):
        """Time every call, and the graphs of those that can be captured, in the same number of rounds."""
        kinds = {(name, CALLED): call for name, call in calls.items() if call}
        for name in [name for name, _ in kinds if ON_GPU and CAPTURED.match(name)]:
            with suppress(RuntimeError):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    calls[name]()
                kinds[name, GRAPH] = graph.replay
        for i in range(ROUNDS):
            if i == 0 or time.monotonic() < self.end:
                for (name, what), call in kinds.items():
                    self.record.add(where, stage, name, [seconds_of(call)], what)

    def operators(self, stage, forms, dtype, late):
        """Time the contenders of each form at each shape; late: {(form, shape): why fla is not called}."""

        def build(shape, name, function, form):
            if name.endswith(", fla") and (form, shape) in late:
                raise RuntimeError(f"its first call: {late[form, shape]}")
            tensors = inputs.leaves(form, shape, dtype, DEVICE)
            if stage == TRAINING:
                return partial(inputs.training_step, function, tensors, inputs.gradient_of_out(shape, dtype, DEVICE))
            state = [torch.randn(*shape[:2], *shape[3:], device=DEVICE)] if stage == STEP else []
            return torch.no_grad()(partial(function, *tensors, *state))

        for shape, form in itertools.product([STEP_SHAPE] if stage == STEP else SHAPES, forms):
            found = {f"{form}, kernel" + ", float32" * (dtype == SINGLE): (inputs.call(form), form)}
            if dtype == HALF and stage != STEP:
                found |= {f"{form}, fla": (inputs.call(form, "fla"), form)} if form in WITH_FLA else {}
                found |= ATTENTION if form == "delta" else {}
            calls = {x: self.attempt(shape, stage, x, partial(build, shape, x, *found[x])) for x in found}
            self.take_turns(shape, stage, calls)
            for name in [x for x, call in calls.items() if call and stage == TRAINING and x != SDPA]:
                with suppress(RuntimeError):  # such as too little memory for float64: errors stop nothing
                    errors = inputs.errors(*found[name], shape, dtype, DEVICE, whole=shape[2] >= LONG)
                    self.record.add(shape, stage, name, [errors.pop("out of all tokens", math.nan)], ERROR_OF_ALL)
                    self.record.add(shape, stage, name, [torch.tensor([*errors.values()]).max().item()], ERROR)
            torch.cuda.empty_cache()

    def rates(self):
        """Measure a copy of device memory and a matrix product, for the floors."""
        source = torch.randn(16, RATE, RATE, device=DEVICE)
        matrix = torch.randn(RATE, RATE, device=DEVICE, dtype=HALF)
        copy, product = partial(torch.empty_like(source).copy_, source), partial(torch.mm, matrix, matrix)
        for name, call, work in (("copy", copy, 2 * source.nbytes), ("product", product, 2 * RATE**3)):
            self.record.add("machine", "", name, [work / seconds_of(call) for _ in range(ROUNDS)], "per second")

    def whole_models(self):
        """Time updates of fairseq's own trainer, and a step of decoding after each context."""
        import models
        from fairseq.trainer import Trainer

        def update(name):
            built = models.build(WORDS, "--arch", name, "--tokens-per-sample", TOKENS, *FLAGS)
            built.cfg.common.tpu = False  # fairseq sets it with --bf16
            trainer = Trainer(*built)
            trainer.begin_epoch(1)
            return partial(trainer.train_step, [models.sample(WORDS, SAMPLES, TOKENS)])

        @torch.no_grad()
        def decode(name, context):
            built = models.build(WORDS, "--arch", name, "--tokens-per-sample", context + SPARE, *FLAGS)
            decoder = built.model.eval().to(DEVICE, HALF if ON_GPU else SINGLE).decoder
            tokens = models.sample(WORDS, 1, context + SPARE)["net_input"]["src_tokens"].to(DEVICE)
            state, ends = {}, iter(range(context + 1, context + SPARE))
            decoder(tokens[:, :context], incremental_state=state, features_only=True)
            return torch.no_grad()(lambda: decoder(tokens[:, : next(ends)], incremental_state=state))

        place = f"{SAMPLES} x {TOKENS} tokens", "update"
        self.take_turns(*place, {name: self.attempt(*place, name, partial(update, name)) for name in MODELS})
        for name, context in itertools.product((MODELS[0], MODELS[-1]), CONTEXTS):
            place = f"context {context}", STEP
            self.take_turns(*place, {name: self.attempt(*place, name, partial(decode, name, context))})


def work(path, end, method, *args):
    getattr(Session(path, end), method)(*args)


def first_call(form, shape):
    """Compile fla's kernels. The choice of the fastest is not kept, because other processes use the GPU now."""
    os.environ["FLA_CACHE_RESULTS"] = "0"
    tensors = inputs.leaves(form, shape, HALF, DEVICE)
    inputs.training_step(inputs.call(form, "fla"), tensors, inputs.gradient_of_out(shape, HALF, DEVICE))


def run(jobs, seconds, at_once=1):
    """Run {name: (function, *arguments)} in processes, first ones first; return {name: why it failed}."""
    failed, end = {}, time.monotonic() + seconds
    with FORKS.Pool(at_once, maxtasksperchild=1) as pool:  # kills its processes at the end
        results = {name: pool.apply_async(function, args) for name, (function, *args) in jobs.items()}
        for name, result in results.items():
            try:
                result.get(max(end - time.monotonic(), 0))
            except Exception as error:
                failed[name] = repr(error)[:200]
    return failed


def run_jobs(path, seconds, end, jobs):
    """Run {name: (a method of Session, *arguments)}, at most `seconds` each; note those that fail."""
    describe(path)
    for name, job in jobs.items():
        until = min(end, time.monotonic() + seconds)
        for why in run({name: (work, path, until, *job)}, max(until - time.monotonic(), 0) + GRACE).values():
            resume(path).note(name, why)


def measure(path, seconds, end):
    calls = {(form, shape): (first_call, form, shape) for form in WITH_FLA for shape in SHAPES}
    late = run({"faults": (find_faults, f"{DEVICE}:0")} | calls, FIRST_CALLS * seconds, os.cpu_count())
    jobs = {"rates": ("rates",)} | {form: ("operators", TRAINING, [form], HALF, late) for form in FORMS}
    jobs |= {FORWARD: ("operators", FORWARD, FORMS, HALF, late), "float32": ("operators", TRAINING, FORMS, SINGLE, {})}
    run_jobs(path, JOB * seconds, end, jobs | {STEP: ("operators", STEP, FORMS, HALF, {})})


def laws(path, seconds, _):
    """Run the tests, and compute-sanitizer over `cases`; note a verdict of each."""
    record = describe(path)  # with the check of kernels, which would take minutes under compute-sanitizer
    options = ["--error-exitcode", "86", "--report-api-errors", "no", "--launch-timeout", "0", "--target-processes"]
    options += ["application-only", "--kernel-name", "kernel_substring=fwp", sys.executable, __file__, "cases"]
    for name, share in CHECKS.items():
        command, found = ["compute-sanitizer", "--tool", name, *options], 86
        if name == "laws":
            command, found = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--maxprocesses=8", *TESTS], 1
        log = path.with_name(f"gpu_{name}.txt")
        with log.open("w") as file:
            command = ["timeout", "-k", "9", f"{seconds * share:.0f}", *command]  # kills also what it has started
            status = subprocess.call(command, stdout=file, stderr=subprocess.STDOUT, cwd=HERE.parents[1])
        words = {0: "passed", found: "failed", 124: "not finished", 127: "not run"}
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        record.note(name, f"{words.get(status, f'ended with status {status}')}: {lines[-1].strip('= ')[:200]}")


def cases(*_):
    """Run kernels on tensor cores, segments, ragged sizes and scans, and few others: inputs are drawn on the CPU."""
    wide = itertools.product(FIRST, ((1, 1, 77, 128, 33), (1, 1, 2100, 64, 64), (1, 2, 2100, 128, 128)), [HALF])
    for form, shape, dtype in [*wide, *itertools.product(FORMS, [(1, 2, 70, 16, 24)], [HALF, SINGLE])]:
        tensors = [x.to(DEVICE).requires_grad_() for x in inputs.draw(form, shape, dtype).values()]
        results = inputs.training_step(inputs.call(form), tensors, inputs.gradient_of_out(shape, dtype, DEVICE))
        print(form, shape, dtype, *(f"{x.float().norm().item():.3g}" for x in results), flush=True)


def describe(path):
    """Return a record with notes of GPU, versions, our library and its faults; exit if there is no library."""
    status = load_kernels(DEVICE)
    if not status.path:
        raise SystemExit(f"no kernels for {DEVICE}: {status.reason}; {status.cure}.")
    path.unlink(missing_ok=True)
    record, found = Record(path=path), find_faults(f"{DEVICE}:0")
    record.note("date", time.strftime("%Y-%m-%d %H:%M"))
    record.note("commit", os.environ.get("FWP_COMMIT") or commit())
    record.note("kernels", Path(status.path).parent.name)
    record.note("faults", "; ".join(f"{rule}: {fault}" for rule, fault in found.items()) or "none")
    query = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader --id=0"
    record.note("GPU and driver", subprocess.getoutput(query))
    packages = [x for x in importlib.metadata.distributions() if x.name in ("torch", "triton", "fla-core")]
    record.note("versions", ", ".join(f"{x.name} {x.version}" for x in packages))
    return record


def least_seconds(form, stage, shape, size, copy, product):
    """Return the floor: inputs, results and a step's state at the speed of a copy, for delta its products in chunks."""
    B, H, L, Dk, Dv = shape
    names, sizes = inputs.FORMS[form][1].split(), {"Dk": Dk, "Dv": Dv, "N": 2}
    given = sum(math.prod(sizes[size] for size in inputs.TENSORS[name][0].split()) for name in names)
    # Backward reads the inputs and the gradient of out, and writes a gradient for each input.
    numbers = given + Dv + (2 * given + Dv if stage == TRAINING else 0)
    flops = L * (30 * min(Dk, 64) * Dk + 20 * Dk * Dk) if (form, stage) == ("delta", TRAINING) else 0
    return B * H * max((L * numbers * size + (8 * Dk * Dv if stage == STEP else 0)) / copy, flops / product)


def row(record, rates, where, stage, name):
    """Return a row of the table."""

    def cell(what, scale=1e6, digits=".1f"):
        values = record.values(where, stage, name, what)
        return "-" if isinstance(values, str) else format(median(values) * scale, digits)

    found, floor = [cell(GRAPH), cell(CALLED)], ["-", "-"]
    form, missed = re.sub(", (kernel|fla).*", "", name), record.values(where, stage, name, CALLED)
    if form in inputs.FORMS:
        shape = [int(n) for n in re.findall(r"\d+", where)]
        least = 1e6 * least_seconds(form, stage, shape, 4 if "float32" in name else 2, *rates)
        floor = [f"{least:.1f}", *(f"{float(x) / least:.1f}" for x in found if x != "-"), "-"][:2]
    numbers = [*found, *floor, cell(BYTES, 1e-6, ".0f"), cell(ERROR, 1, ".1e"), cell(ERROR_OF_ALL, 1, ".1e")]
    return [where, stage, name, *numbers, missed.partition(": ")[2] if isinstance(missed, str) else ""]


def publish_all(path, *_):
    """Print the table of the calls in a folder, unless a check failed or they are not of one GPU and version."""
    parts = [part for part in ("measure", "models", "laws") if path.with_name(f"gpu_{part}.csv").exists()]
    found = [Record.read(path.with_name(f"gpu_{part}.csv")) for part in parts]
    for about in ("GPU and driver", "commit", "kernels"):
        if len(seen := sorted({record.notes().get(about, "none") for record in found})) != 1:
            raise SystemExit(f"nothing is published: {about} must be the same in all calls, got {seen or 'no call'}.")
    record = Record(line for part in found for line in part.rows)
    notes = {"laws": "not run"} | record.notes()
    for name in CHECKS:
        if notes.get(name, "").startswith("failed"):
            raise SystemExit(f"nothing is published: {name} {notes[name]}.")
    rates = [record.values("machine", "", name, "per second") for name in ("copy", "product")]
    rates = [math.nan if isinstance(found, str) else max(found) for found in rates]
    header = ["where", "stage", "contender", "us", "us as called", "floor us", "times the floor", "MB"]
    places = dict.fromkeys(tuple(line[:3]) for line in record.rows if line[0] != "machine")
    text = table([*header, ERROR, ERROR_OF_ALL, "note"], [row(record, rates, *place) for place in places])
    notes |= {"copy": f"{rates[0] / 1e12:.2f} TB/s", "product": f"{rates[1] / 1e12:.0f} TFLOP/s"}
    head = ", ".join(f"{name} {said}" for name, said in notes.items()) + "."
    pairs = [*((f"{form}, fla", f"{form}, kernel") for form in WITH_FLA), (SDPA, "delta, kernel")]
    goals = []
    for (slower, faster), shape in itertools.product(pairs, SHAPES):
        goal = Goal(f"{slower} vs {faster}", str(shape), GOALS.get(shape) if slower == "delta, fla" else None)
        goals.append(compare(record, goal, (shape, TRAINING, slower), (shape, TRAINING, faster), (GRAPH, CALLED)))
    publish("gpu", record, goals, text, head=head)


def build(*_):
    """Build the kernels for a GPU that is not there, the first one in TORCH_CUDA_ARCH_LIST."""
    digits = os.environ.get("TORCH_CUDA_ARCH_LIST", "").split(".")
    if len(digits) < 2:
        raise SystemExit("gpu.sh build: TORCH_CUDA_ARCH_LIST must name the GPU to build for, as in 9.0.")
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
    torch.cuda.get_device_capability = lambda _: (int(digits[0]), int(digits[1][0]))
    torch.cuda.get_device_name = str
    print(status := load_kernels("cuda"))
    sys.exit(not status.built)


models = partial(run_jobs, jobs={"whole models": ("whole_models",)})
PARTS = {"measure": measure, "models": models, "laws": laws, "publish": publish_all, "build": build, "cases": cases}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="gpu.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=490, help="time for the call (default: 490)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: results)")
    args = parser.parse_args()
    PARTS[args.part](args.out.resolve() / f"gpu_{args.part}.csv", args.seconds, time.monotonic() + args.seconds)
