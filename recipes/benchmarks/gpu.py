"""Errors, speed and memory on one NVIDIA GPU, by calls of `gpu.sh`: see "One GPU" in RESULTS.md.

A call writes gpu_PART.csv to --out, every number at once. A job is a process: a kernel that hangs, or after which the
GPU does not work, ends only its job. A contender is a rule and a backend, in bfloat16 or as named. A time is the median
of CUDA events around some calls, with a cold second-level cache, as called from Python and, if possible, as a graph,
without gaps between launches. In a round all contenders of a job take turns: those of ours come before any of fla.
"""

import argparse
import collections
import importlib.metadata
import itertools
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import inputs
import torch
from inputs import FORWARD, STEP, TRAINING
from record import BYTES, HERE, MISSED, RESULTS, SPEED, Goal, Record, commit, compare, publish, table
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from fairseq_fwp.ops.fla import FORMS as IN_FLA
from fairseq_fwp.ops.kernels import load_kernels, self_check

CALLED, GRAPH, ERROR, ERROR_OF_ALL = "seconds as called", "seconds of a graph", "error", "error of all tokens"
KERNELS, SAME_BITS, TEXT, ALL = "seconds of kernels", "runs of the same bits", "text", "all dtypes"
HALF, SINGLE, SDPA = torch.bfloat16, torch.float32, "scaled_dot_product_attention"
ATTENTION = {SDPA: (partial(scaled_dot_product_attention, is_causal=True), "sum")}  # and the form of its inputs
# Shares of a call's time: all of fla, and its first calls, a job (killed GRACE seconds later), the checks.
OF_FLA, FIRST_CALLS, JOB, GRACE, CHECKS = 0.5, 0.3, 0.3, 15, {"laws": 0.65, "memcheck": 0.15, "racecheck": 0.15}
CHECKING = 0.5  # of the check of every rule; the rest is for the one before first use
# The parts of each call of a lease, and the seconds of each. Their sum, the start and the transfers take 800 of 900 s.
LEASE = {"1": {"check": 110, "kernels": 50}, "2": {"measure": 290}, "3": {"models": 100, "laws": 140}}
CAPTURED = re.compile(".*, kernel|(delta|sum)[^_]*, fla|scaled_dot")  # fla looks at decays, which a graph cannot do
FIRST = ("delta", "gated_delta, decay per head", "gated_delta, decay per key dimension")
FORMS = (*FIRST, *(form for form in inputs.FORMS if form not in (*FIRST, "fwm")))
# Shapes (B, H, L, Dk, Dv), and the least ratio of fla's time to ours for delta.
GOALS = {(96, 8, 256, 16, 16): 3, (56, 8, 384, 32, 32): 3, (8, 16, 4096, 64, 64): 2.5, (1, 16, 32768, 128, 128): 2}
SHAPES = (*GOALS, (1, 16, 8192, 128, 128), (1, 32, 8192, 128, 128))
# Numbers of tokens with which kernels have segments, and a loop ends in time: then `out` of all tokens is compared, not
# only of the first 256.
LONG = range(2048, 8193)
ROOT = HERE.parents[1]
DEVICE, ROUNDS, RATE = "cuda", 3, 8192  # RATE: rows of the matrices copied and multiplied
STEP_SHAPE, CONTEXTS, SPARE = (32, 16, 1, 64, 64), (1, 1024, 16384, 65536), 1000  # SPARE: most steps after a context
# The paper's small and medium models. Schlag et al. 2021, Section 6.3, compare the speed of delta, sum and softmax, Mao
# 2022, Figure 1, the decoding of decay and softmax.
NAMES = ("delta", "softmax", "sum", "delta_dpfp", "delta_favor", "decay", "gated_delta")
MODELS = (*(f"{name}_lm_wt103" for name in NAMES), "delta_lm_wt103_medium", "softmax_lm_wt103_medium")
MODELS += tuple(f"{name}_lm_wt103, float32" for name in NAMES[:5])  # as Schlag et al. have measured
DECODED = ("softmax_lm_wt103", "delta_lm_wt103", "decay_lm_wt103")
# Of an update, of the small and the medium models; words of WikiText-103, with symbols.
SAMPLES, TOKENS, WORDS, FLAGS = (96, 56), (256, 384), 267_744, ("--bf16",)
# What only a GPU can tell comes first.
TESTS = ("tests/ops/test_cuda.py", "tests/laws/test_operators.py", "tests/ops", "-k", "cuda", "-n", "12")
# Of the check, which has the sizes of scans and of every kernel on tensor cores, and segments in bfloat16.
DTYPES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # and greatest errors
CHECKED = [(2, 3, 37, 17, 33), (1, 2, 70, 16, 16), (2, 1, 95, 32, 40), (1, 2, 77, 64, 64), (1, 1, 70, 128, 128)]
SEGMENTS = [(1, 1, 2100, 16, 160), (1, 2, 2100, 64, 64), (1, 1, 2100, 128, 128)]
if "FWP_TINY" in os.environ:  # the tests of this script, on this device
    DEVICE, ROUNDS, RATE, SAMPLES, TOKENS, WORDS = os.environ["FWP_TINY"], 2, 64, (2, 2), (16, 16), 1000
    SHAPES, STEP_SHAPE, CONTEXTS, LONG = ((1, 2, 24, 8, 8),), (2, 2, 1, 8, 8), (1, 9), range(16, 32)
    TESTS = (TESTS[0], "-k", "extra_memory")
    LEASE = {call: {part: 9 * seconds for part, seconds in parts.items()} for call, parts in LEASE.items()}
    CHECKED, SEGMENTS, MODELS, DECODED = [(1, 2, 35, 8, 8)], [], MODELS[:1] + MODELS[8:10], DECODED[:1]
    FLAGS = ("--cpu" if DEVICE == "cpu" else "--bf16", "--decoder-layers", "1", "--adaptive-softmax-cutoff", "500")
ON_GPU = DEVICE == "cuda"
WITH_FLA = tuple(form for form in FORMS if f"{inputs.FORMS[form][0]}_rule" in IN_FLA)
# Processes begin with these imports, and without CUDA. fla is not among them: it asks for the device when imported.
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["torch._dynamo", "torch.profiler", "triton.testing", self_check.__name__, "inputs", "record"]
FORKS.set_forkserver_preload(PRELOADED)
with suppress(ImportError):
    import triton.testing  # its times are in milliseconds; it also tries hundreds of configurations of fla's kernels

    triton.testing.do_bench = partial(triton.testing.do_bench, warmup=2, rep=10)


def ours(form, dtype):
    return f"{form}, kernel" + ", float32" * (dtype == SINGLE)


def seconds_of(call):
    if not ON_GPU:
        return Timer("call()", globals={"call": call}).timeit(1).median
    return triton.testing.do_bench(call, warmup=5, rep=20, return_mode="median") / 1e3


class Session:
    """The measurements of one process, until `end` in seconds of time.monotonic()."""

    def __init__(self, path, end):
        self.record, self.end = Record.resume(path), end
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

    def check(self, rule):
        """Compare outputs and gradients of a rule with the loop in float64, and the bits of three runs."""
        from support.subjects import RULES, cotangents, relative_error, results, sample_inputs

        self_check.find_faults = lambda device: {}  # this is the check
        torch.set_num_threads(1)

        def run(given, gradients):
            return results(partial(RULES[rule].function, backend="kernel"), given, gradients)

        of_segments = [(shape, HALF) for shape in SEGMENTS]
        for shape, dtype in [*itertools.product(CHECKED, DTYPES), *of_segments]:
            if time.monotonic() > self.end:
                return self.record.miss(shape, str(dtype), rule, "no time was left for it")
            given = sample_inputs(rule, shape, dtype)
            gradients = cotangents(given)
            exact = {name: x.double() for name, x in given.items()}
            truth = results(RULES[rule].reference, exact, tuple(x.double() for x in gradients))
            on_gpu = {name: x.to(DEVICE) for name, x in given.items()}, tuple(x.to(DEVICE) for x in gradients)
            found, *again = [run(*on_gpu) for _ in range(3)]
            errors = {name: relative_error(found[name].cpu(), x) for name, x in truth.items()}
            worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
            self.record.add(shape, str(dtype), rule, [errors[worst]], ERROR)
            self.record.add(shape, str(dtype), rule, [worst], TEXT)
            same = sum(all(torch.equal(x, run[name]) for name, x in found.items()) for run in again)
            self.record.add(shape, str(dtype), rule, [1 + same], SAME_BITS)
        return None

    def split(self, where, stage, name, call):
        """Record the time of all kernels of a call, and of each: without the gaps between them."""
        with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as seen:
            for _ in range(ROUNDS):
                call()
            if ON_GPU:
                torch.cuda.synchronize()
        kernels = collections.Counter()
        for event in seen.key_averages():
            seconds = (event.self_device_time_total if ON_GPU else event.self_cpu_time_total) / 1e6 / ROUNDS
            kernels[re.sub(r"\(.*|void |fwp::|cuda::|\s", "", event.key)[:80]] += seconds
        self.record.add(where, stage, name, [kernels.total()], KERNELS)
        for kernel, seconds in kernels.most_common(12):
            self.record.add(where, stage, f"{name}: {kernel}", [seconds], KERNELS)

    def kernels(self, forms, dtype):
        """Record the time of every kernel of forward + backward."""
        for form, shape in itertools.product(forms, SHAPES):
            name, build = ours(form, dtype), partial(inputs.training, inputs.call(form), form, shape, dtype, DEVICE)
            if call := self.attempt(shape, TRAINING, name, build):
                self.split(shape, TRAINING, name, call)

    def operators(self, stage, forms, dtype, late=None):
        """Time ours and SDPA, of each form at each shape; or fla, with {(form, shape): why its first call failed}."""

        def build(shape, name, function, form):
            reason = (late or {}).get((form, shape))
            # Where only its backward pass is refused, the first call has compiled the forward pass.
            if reason and (stage == TRAINING or "TimeoutError" in reason):
                raise RuntimeError(f"its first call: {reason}")
            if stage == TRAINING:
                return inputs.training(function, form, shape, dtype, DEVICE)
            tensors = inputs.leaves(form, shape, dtype, DEVICE)
            state = [torch.randn(*shape[:2], *shape[3:], device=DEVICE)] if stage == STEP else []
            return torch.no_grad()(partial(function, *tensors, *state))

        for shape, form in itertools.product([STEP_SHAPE] if stage == STEP else SHAPES, forms):
            if late is not None:
                found = {f"{form}, fla": (inputs.call(form, "fla"), form)}
            else:
                with_attention = dtype == HALF and stage != STEP and form == "delta"
                found = {ours(form, dtype): (inputs.call(form), form)} | (ATTENTION if with_attention else {})
            calls = {x: self.attempt(shape, stage, x, partial(build, shape, x, *found[x])) for x in found}
            self.take_turns(shape, stage, calls)
            for name in [x for x, call in calls.items() if call and stage == TRAINING and x != SDPA]:
                with suppress(RuntimeError):  # such as too little memory for float64: errors stop nothing
                    errors = inputs.errors(*found[name], shape, dtype, DEVICE, whole=shape[2] in LONG)
                    self.record.add(shape, stage, name, [errors.pop("out of all tokens", math.nan)], ERROR_OF_ALL)
                    self.record.add(shape, stage, name, [torch.tensor([*errors.values()]).max().item()], ERROR)
            if ON_GPU:
                torch.cuda.empty_cache()

    def rates(self):
        """Measure a copy of device memory and a matrix product, for the floors."""
        source = torch.randn(16, RATE, RATE, device=DEVICE)
        matrix = torch.randn(RATE, RATE, device=DEVICE, dtype=HALF)
        copy, product = partial(torch.empty_like(source).copy_, source), partial(torch.mm, matrix, matrix)
        for name, call, work in (("copy", copy, 2 * source.nbytes), ("product", product, 2 * RATE**3)):
            self.record.add("machine", "", name, [work / seconds_of(call) for _ in range(ROUNDS)], "per second")

    def update(self, name):
        """Time updates of fairseq's own trainer as called, and their kernels."""
        import models
        from fairseq.trainer import Trainer

        arch, single = name.removesuffix(", float32"), name.endswith(", float32")
        medium, flags = arch.endswith("medium"), [flag for flag in FLAGS if flag != "--bf16" or not single]
        flags.append("--no-save")  # so that it locks no folder
        samples, tokens = SAMPLES[medium], TOKENS[medium]
        place = f"{samples} x {tokens} tokens", "update"

        def build():
            built = models.build(WORDS, "--arch", arch, "--tokens-per-sample", tokens, *flags)
            built.cfg.common.tpu = False  # fairseq sets it with --bf16
            trainer = Trainer(*built)
            # It would save the model after an error, and hide the reason if it cannot; and forget the peak of memory.
            trainer.save_checkpoint, trainer.cuda_env = (lambda *_, **__: None), None
            trainer.begin_epoch(1)
            return partial(trainer.train_step, [models.sample(WORDS, samples, tokens)])

        if call := self.attempt(*place, name, build):
            self.take_turns(*place, {name: call})
            speeds = [samples * tokens / x for x in self.record.values(*place, name, CALLED)]
            self.record.add(*place, name, speeds, SPEED)
            self.split(*place, name, call)

    def decoding(self, name):
        """Time a step of decoding after each context."""
        import models

        @torch.no_grad()
        def decode(context):
            built = models.build(WORDS, "--arch", name, "--tokens-per-sample", context + SPARE, *FLAGS)
            decoder = built.model.eval().to(DEVICE, HALF if ON_GPU else SINGLE).decoder
            tokens = models.sample(WORDS, 1, context + SPARE)["net_input"]["src_tokens"].to(DEVICE)
            state, ends = {}, iter(range(context + 1, context + SPARE))
            decoder(tokens[:, :context], incremental_state=state, features_only=True)
            return torch.no_grad()(lambda: decoder(tokens[:, : next(ends)], incremental_state=state))

        for context in CONTEXTS:
            place = f"context {context}", STEP
            self.take_turns(*place, {name: self.attempt(*place, name, partial(decode, context))})


def work(path, end, method, *args):
    getattr(Session(path, end), method)(*args)


def first_call(form, shape):
    """Compile fla's kernels. The choice of the fastest is not kept, because other processes use the GPU now."""
    os.environ["FLA_CACHE_RESULTS"] = "0"
    inputs.training(inputs.call(form, "fla"), form, shape, HALF, DEVICE)()


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
    for name, job in jobs.items():
        until = min(end, time.monotonic() + seconds)
        for why in run({name: (work, path, until, *job)}, max(until - time.monotonic(), 0) + GRACE).values():
            Record.resume(path).note(name, why)


def check(path, seconds, end):
    """Check every rule at once, because the references need the cores; then run the check before first use."""
    from support.subjects import WITH_KERNEL

    with tempfile.TemporaryDirectory() as folder:
        paths = {rule: Path(folder, f"{rule}.csv") for rule in WITH_KERNEL}
        failed = check_apart(paths, min(end, time.monotonic() + CHECKING * seconds))
        record = Record((row for file in paths.values() for row in Record.resume(file).rows), path)
    for rule, why in failed.items():
        record.miss("all shapes", ALL, rule, why)
    print("\n".join(verdicts(record)), flush=True)
    describe(record)


def check_apart(paths, end):
    """Check each rule in a program of its own, because a kernel may never end; return why some have failed."""
    code = "import sys, gpu; gpu.work(gpu.Path(sys.argv[1]), float(sys.argv[2]), 'check', sys.argv[3])"
    start = [sys.executable, "-W", "ignore", "-c", code]
    pipe = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    running = {rule: subprocess.Popen([*start, path, str(end), rule], **pipe) for rule, path in paths.items()}
    failed = {}
    for rule, process in running.items():
        try:
            _, said = process.communicate(timeout=max(end + GRACE - time.monotonic(), 0))
            if process.returncode:
                failed[rule] = (said.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1][:200]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failed[rule] = "it did not end in time"
    return failed


def verdicts(record):
    """Return a line for each error above its bound, for runs of other bits, and for what is missing."""
    bounds = {str(dtype): bound for dtype, bound in DTYPES.items()}
    right, lines = 0, []
    for where, stage, name, what, _, value in record.rows:
        if what == MISSED or (what == SAME_BITS and int(value) < 3):
            lines.append(f"{name} at {where} in {stage}: {value} {what}")
        elif what == ERROR:
            good = float(value) <= bounds[stage]
            right += good
            worst = next(row[5] for row in record.rows if row[:4] == [where, stage, name, TEXT])
            lines += [] if good else [f"{name} at {where} in {stage}: error {float(value):.1e} of {worst}"]
    return [f"{right} cases right, {len(lines)} lines of others", *lines]


def kernels(path, seconds, end):
    describe(Record(path=path))
    run_jobs(path, seconds, end, {str(dtype): ("kernels", FORMS, dtype) for dtype in (HALF, SINGLE)})


def measure(path, seconds, end):
    """Ours and SDPA before fla, which compiles for minutes."""
    jobs = {"rates": ("rates",)} | {form: ("operators", TRAINING, [form], HALF) for form in FORMS}
    jobs |= {FORWARD: ("operators", FORWARD, FORMS, HALF), STEP: ("operators", STEP, FORMS, HALF)}
    jobs |= {"float32": ("operators", TRAINING, FORMS, SINGLE)}
    describe(Record(path=path))
    run_jobs(path, JOB * seconds, end - OF_FLA * seconds, jobs)
    widest_first = sorted(SHAPES, key=lambda shape: -shape[3])
    calls = {(form, shape): (first_call, form, shape) for shape in widest_first for form in WITH_FLA}
    late = run(calls, min(FIRST_CALLS * seconds, end - time.monotonic()), os.cpu_count())
    jobs = {f"{form}, fla": ("operators", TRAINING, [form], HALF, late) for form in WITH_FLA}
    jobs |= {f"{FORWARD}, fla": ("operators", FORWARD, WITH_FLA, HALF, late)}
    run_jobs(path, JOB * seconds, end, jobs)


def laws(path, seconds, _):
    """Run the tests, and compute-sanitizer over `cases`; note a verdict of each."""
    record = describe(Record(path=path))  # with the check of kernels, which would take minutes under compute-sanitizer
    options = ["--error-exitcode", "86", "--report-api-errors", "no", "--launch-timeout", "0", "--target-processes"]
    options += ["application-only", "--kernel-name", "kernel_substring=fwp", sys.executable, __file__, "cases"]
    for name, share in CHECKS.items():
        command, found = ["compute-sanitizer", "--tool", name, *options], 86
        if name == "laws":
            command, found = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--maxprocesses=8", *TESTS], 1
        log = path.with_name(f"gpu_{name}.txt")
        with log.open("w") as file:
            # It kills also what it has started. Interrupted, pytest still says what failed.
            command = ["timeout", "-s", "INT", "-k", "9", f"{seconds * share:.0f}", *command]
            status = subprocess.call(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
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


def describe(record):
    """Note GPU, versions, our library and its faults in a record, and return it; exit if there is no library."""
    status = load_kernels(DEVICE)
    if not status.path:
        raise SystemExit(f"no kernels for {DEVICE}: {status.reason}; {status.cure}.")
    found = self_check.find_faults(f"{DEVICE}:0")
    record.note("date", time.strftime("%Y-%m-%d %H:%M"))
    record.note("commit", os.environ.get("FWP_COMMIT") or commit())
    record.note("kernels", Path(status.path).parent.name)
    record.note("faults", "; ".join(f"{rule}: {fault}" for rule, fault in found.items()) or "none")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = "unknown"
    with suppress(OSError):  # there is no nvidia-smi
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    record.note("GPU and driver", f"{torch.cuda.get_device_name() if ON_GPU else 'a CPU'}, {driver}")
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
    def cell(what, scale=1e6, digits=".1f"):
        values = record.values(where, stage, name, what)
        return "-" if isinstance(values, str) else format(median(values) * scale, digits)

    found, floor = [cell(KERNELS), cell(GRAPH), cell(CALLED)], ["-", "-"]
    form, missed = re.sub(", (kernel|fla).*", "", name), record.values(where, stage, name, CALLED)
    if form in inputs.FORMS:
        shape = [int(n) for n in re.findall(r"\d+", where)]
        least = 1e6 * least_seconds(form, stage, shape, 4 if "float32" in name else 2, *rates)
        floor = [f"{least:.1f}", *(f"{float(x) / least:.1f}" for x in found if x != "-"), "-"][:2]
    numbers = [*found, *floor, cell(BYTES, 1e-6, ".0f"), cell(ERROR, 1, ".1e"), cell(ERROR_OF_ALL, 1, ".1e")]
    return [where, stage, name, *numbers, missed.partition(": ")[2] if isinstance(missed, str) else ""]


def publish_all(path, *_):
    """Print the table of the calls in a folder, unless a check failed or they are not of one GPU and version."""
    parts = [part for part in PARTS if path.with_name(f"gpu_{part}.csv").exists()]
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
    header = ["where", "stage", "contender", "us of kernels", "us of a graph", "us as called"]
    of_check = {ALL, *map(str, DTYPES)}
    places = dict.fromkeys(tuple(x[:3]) for x in record.rows if x[0] != "machine" and x[1] not in of_check)
    rows = [row(record, rates, *place) for place in places if ": " not in place[2]]
    text = table([*header, "floor us", "times the floor", "MB", ERROR, ERROR_OF_ALL, "note"], rows)
    text += "\n" + "\n".join(verdicts(Record(x for x in record.rows if x[1] in of_check)))
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


def models(path, seconds, end):
    jobs = {f"update of {name}": ("update", name) for name in MODELS}
    describe(Record(path=path))
    run_jobs(path, JOB * seconds, end, jobs | {f"decoding of {name}": ("decoding", name) for name in DECODED})


def lease(path, call):
    """Run the parts of a call, at most so many seconds each, also after one that fails; exit with 1 if one did."""
    failed = []
    for part, seconds in LEASE[call].items():
        command = [sys.executable, __file__, part, "--seconds", str(seconds), "--out", path.parent]
        status = subprocess.call(["timeout", "-k", "9", f"{seconds + GRACE}", *command])
        print(f"{part} ended with status {status}", flush=True)
        failed += [part] if status else []
    sys.exit(bool(failed))


PARTS = {"check": check, "kernels": kernels, "measure": measure, "models": models, "laws": laws}
PARTS |= {"publish": publish_all, "build": build, "cases": cases}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="gpu.sh", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=[*PARTS, "lease"])
    parser.add_argument("call", nargs="?", choices=LEASE, help="of a lease: its first, second or third call")
    parser.add_argument("--seconds", type=float, default=290, help="time for the part (default: 290)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: results)")
    args = parser.parse_args()
    if (args.part == "lease") != bool(args.call):
        parser.error("a lease must have a call, 1, 2 or 3, and nothing else has one")
    path = args.out.resolve() / f"gpu_{args.part}.csv"
    if args.call:
        lease(path, args.call)
    else:
        PARTS[args.part](path, args.seconds, time.monotonic() + args.seconds)
