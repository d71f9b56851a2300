"""Runs of several days: numbers stay right, and memory does not grow."""

import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf
from support.subjects import RULES, fastest_backend, relative_error, sample_inputs

from fairseq_fwp.evaluation.scoring import StreamScorer, WindowScorer
from fairseq_fwp.evaluation.windows import Text, windows

STEPS = 100_000
SIZE = {"decoder_layers": 1, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 16, "decoder_attention_heads": 2}


@pytest.mark.parametrize("rule", RULES)
def test_decoding_equals_float64_after_100000_steps(rule):
    """Independent rounding errors add up as a random walk: by the root of the number of steps at most."""
    inputs = sample_inputs(rule, (1, 2, STEPS, 8, 8), torch.float32, forgetful=True, state=False)
    tokens = {name: x for name, x in inputs.items() if x is not None}
    function, backend = RULES[rule].function, fastest_backend(rule)
    state, exact = None, None
    with torch.no_grad():
        for step in range(STEPS):
            out, state = function(
                **{name: x[:, :, step : step + 1] for name, x in tokens.items()}, state=state, backend=backend
            )
        for start in range(0, STEPS, 5000):
            chunk = {name: x[:, :, start : start + 5000].double() for name, x in tokens.items()}
            outs, exact = function(**chunk, state=exact, backend=backend)
    bound = math.sqrt(STEPS) * torch.finfo(torch.float32).eps
    errors = relative_error(state, exact), relative_error(out, outs[:, :, -1:])
    print(f"{rule}: {errors[0]:.1e}, {errors[1]:.1e}; bound {bound:.1e}")
    assert max(errors) <= bound


def build(arch, words=40, **flags):
    """Return a small model of fairseq's, and its dictionary."""
    dictionary = Dictionary()
    for word in range(words - len(dictionary)):
        dictionary.add_symbol(f"w{word}")
    flags = {"tokens_per_sample": 16, "max_target_positions": None, "add_bos_token": False, **SIZE, **flags}
    args = Namespace(**flags)
    ARCH_CONFIG_REGISTRY[arch](args)
    config = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY[arch]])
    model = ARCH_MODEL_REGISTRY[arch].build_model(
        OmegaConf.merge(config, vars(args)), Namespace(target_dictionary=dictionary)
    )
    return model, dictionary


def updates(model, count, autocast=False, lr=1e-3):
    """Return the loss of each of `count` updates on random parts of a learnable sequence."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(count):
        tokens = (torch.randint(4, 40, (2, 1)) + 3 * torch.arange(9)) % 36 + 4
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model.get_normalized_probs(model(tokens[:, :-1]), log_probs=True)
        loss = torch.nn.functional.nll_loss(logits.float().transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def test_50000_updates_in_bfloat16_stay_numbers():
    """FAVOR+ draws again in each update."""
    model, _ = build("delta_favor_lm_wt103", dropout=0.0)
    found = list(updates(model, 50_000, autocast=True))
    print(f"loss {found[0]:.3f} -> {sum(found[-100:]) / 100:.4f}")
    assert all(map(math.isfinite, found)) and sum(found[-100:]) / 100 < 0.5 * found[0]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def resident():
    """Return the MiB of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise ValueError("no VmRSS")


def growth(work, warm, rest):
    """Return the MiB by which `rest` calls of `work` grow the process, after `warm` calls that fill caches."""
    for _ in range(warm):
        work()
    before = resident()
    for _ in range(rest):
        work()
    found = resident() - before
    print(f"grown by {found:.1f} MiB")
    return found


# One of each kind of state: fast weights, the memory of past segments, and weights that learn while they read.
ARCHITECTURES = ["delta_favor_lm_wt103", "xl_lm_wt103_medium", "fwp_fwl_lm"]
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")


@needs_proc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_training_10000_updates_takes_no_more_memory(arch):
    model, _ = build(arch)
    training = updates(model, 10_000)
    assert growth(lambda: next(training), 1_000, 9_000) < 8


@needs_proc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_generating_10000_sentences_takes_no_more_memory(arch):
    model, dictionary = build(arch)
    generator = SequenceGenerator([model.eval()], dictionary, beam_size=2, max_len_b=8)

    def generate():
        prompts = torch.randint(4, 40, (50, 2))
        sample = {"net_input": {"src_tokens": prompts, "src_lengths": torch.full((50,), 2)}}
        assert len(generator.generate([model], sample)) == 50

    assert growth(generate, 20, 180) < 8


@needs_proc
@pytest.mark.parametrize("kind", [WindowScorer, StreamScorer])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_scoring_1000_windows_takes_no_more_memory(arch, kind):
    model, _ = build(arch)
    length, given = 16_000, 0 if kind is StreamScorer else 8
    tokens = torch.randint(4, 40, (length,))
    plan = iter(windows(length, 16, given))
    scorer = kind(model, Text(tokens, tokens))
    assert growth(lambda: scorer([next(plan)]), 100, 890) < 4
