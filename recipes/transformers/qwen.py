"""Train or time models of Qwen3.5's shape in transformers, or time xLSTM, with its operators and ours: see run.sh."""

import argparse
import re
import sysconfig
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import transformers

from fairseq_fwp.interop.transformers import use_in_transformers

BYTES, TOKENS, LONGEST = 256, 2048, 512  # words are bytes; tokens of a step, and of a document
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64}
SMALL |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_key_value_heads": 2}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 128,
}
LARGE |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_key_value_heads": 2}
HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
RUNS = {  # how batches are made, and whether our operators are used
    "transformers, padded": ("padded", False),
    "fairseq_fwp, padded": ("padded", True),
    "fairseq_fwp, packed": ("packed", True),
}


def build(sizes, **more):
    """Return a Qwen3.5 with random weights; every fourth layer is softmax attention."""
    torch.manual_seed(1)
    config = transformers.CONFIG_MAPPING["qwen3_5_text"](vocab_size=BYTES, **sizes, **HEADS, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def documents():
    """Return the functions and classes of Python's standard library as bytes, at most LONGEST of each, shuffled."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("*.py"))]
    parts = [part for text in texts for part in re.split(r"\n(?=(?:def|class|async def) )", text) if len(part) > 40]
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(1)).tolist()
    return [torch.tensor([*parts[n].encode()[:LONGEST]]) for n in order]


def batches(texts, steps):
    """Yield the documents of each step: at least TOKENS bytes."""
    chosen = iter(texts * (1 + steps * TOKENS // sum(map(len, texts))))
    for _ in range(steps):
        some = []
        while sum(map(len, some)) < TOKENS:
            some.append(next(chosen))
        yield some


def padded(some):
    tokens = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in some], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def packed(some):
    """Return one sequence, as transformers' DataCollatorWithFlattening makes it."""
    tokens, lengths = torch.cat(some).unsqueeze(0), torch.tensor([len(x) for x in some])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    labels = tokens.clone()
    labels[0, ends[:-1].long()] = -100  # no document predicts the first token of the next
    places = torch.cat([torch.arange(n) for n in lengths.tolist()]).unsqueeze(0)
    longest = int(lengths.max())
    return {
        "input_ids": tokens,
        "labels": labels,
        "position_ids": places,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
    } | {"max_length_q": longest, "max_length_k": longest}


def with_adapters(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, target_modules=["in_proj_qkv", "in_proj_z", "out_proj", "q_proj"]))


def clock():
    """Return seconds: with one thread CPU time, which other work on the machine does not add to."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def train(name, steps, lora, bf16):
    """Train for some steps; return their losses and the words a second, without the first step."""
    form, ours = RUNS[name]
    model = build(SMALL)
    model = with_adapters(model) if lora else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    losses, words, start = [], 0, 0.0
    with use_in_transformers() if ours else nullcontext():
        for step, some in enumerate(batches(documents(), steps)):
            if step == 1:
                words, start = 0, clock()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):  # as transformers' Trainer with bf16=True
                loss = model(**(padded if form == "padded" else packed)(some), use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            words += sum(map(len, some))
            if step % 10 == 0 or step == steps - 1:
                print(f"{name}: step {step + 1}, loss {losses[-1]:.4f}", flush=True)
    return losses, words / (clock() - start)


def compare(steps, lora, bf16):
    found = {name: train(name, steps, lora, bf16) for name in RUNS}
    (losses, words), *_ = found.values()
    print(
        "\n| operators, batches | last loss | greatest difference | words/s | ratio |\n| --- | --- | --- | --- | --- |"
    )
    for name, (of_run, speed) in found.items():
        differs = max(abs(x - y) for x, y in zip(of_run, losses, strict=True))
        print(f"| {name} | {of_run[-1]:.4f} | {differs:.1e} | {speed:.0f} | {speed / words:.2f} |")


def least(call, seconds):
    """Return the least times of a call in ms, with the operators of transformers and with ours, which take turns."""
    found, end = {False: [], True: []}, time.monotonic() + seconds
    while len(found[True]) < 4 or time.monotonic() < end:
        for ours, times in found.items():
            with use_in_transformers() if ours else nullcontext():
                start = clock()
                call()
                times.append(1000 * (clock() - start))
    return (min(times[1:]) for times in found.values())


def parts_of_qwen():
    """Return what is timed of the larger model, by name and tokens: a layer, a training step and a decoding step."""
    model = build(LARGE, layer_types=["linear_attention", "linear_attention"])
    layer, calls = model.model.layers[0].linear_attn, {}
    for length in (512, 2048):
        hidden = torch.randn(1, length, LARGE["hidden_size"])
        tokens = torch.randint(BYTES, (1, length))

        def forward(hidden=hidden):
            with torch.no_grad():
                layer(hidden)

        def both(hidden=hidden):
            layer(hidden).square().mean().backward()

        calls |= {("layer, forward", length): forward, ("layer, forward + backward", length): both}
        calls |= {("training step, 2 layers", length): partial(step, model, tokens)}
    hybrid = build(LARGE, layer_types=["linear_attention", "full_attention"])
    return calls | {("decoding step, a layer of each kind", 1): decoding(hybrid)}


def parts_of_xlstm():
    """Return the same of xLSTM: its operator with the heads of xLSTM-7B, and two layers of width 1,024."""
    torch.manual_seed(1)
    heads, keys, values = 8, 256, 512
    config = transformers.xLSTMConfig(vocab_size=BYTES, hidden_size=1024, num_hidden_layers=2, num_heads=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    operator = model.backbone.blocks[0].mlstm_layer.mlstm_backend

    def tensors(length):  # gates as of a trained model: most memories are kept, and new maxima occur
        q, k = torch.randn(2, 1, heads, length, keys)
        i, f = torch.randn(2, 1, heads, length)
        return q, k, torch.randn(1, heads, length, values), 3 * i - 3, f + 4

    given, token = tensors(512), tensors(1)
    leaves = [x.requires_grad_() for x in tensors(512)]
    state = torch.randn(1, heads, keys, values), torch.randn(1, heads, keys), torch.zeros(1, heads, 1)

    def forward():
        with torch.no_grad():
            operator(*given)

    def both():
        operator(*leaves)[0].square().mean().backward()

    def one():
        with torch.no_grad():
            operator(*token, *state)

    calls = {("operator of xLSTM-7B, forward", 512): forward, ("operator of xLSTM-7B, forward + backward", 512): both}
    calls["operator of xLSTM-7B, one token", 1] = one
    calls["training step, 2 layers", 512] = partial(step, model, torch.randint(BYTES, (1, 512)))
    return calls | {("decoding step, 2 layers", 1): decoding(model)}


def step(model, tokens):
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()


def decoding(model):
    """Return a call that reads one more token after 16."""
    with torch.no_grad():
        cache = model(input_ids=torch.randint(BYTES, (1, 16)), use_cache=True).cache

    def decode():
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64), cache=cache, use_cache=True)

    return decode


PARTS = {"qwen": parts_of_qwen, "xlstm": parts_of_xlstm}


def measure(seconds, parts):
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{torch.get_num_threads()} threads, float32, {versions}, {torch.backends.cpu.get_cpu_capability()}\n")
    print("| what | tokens | transformers, ms | fairseq_fwp, ms | ratio |\n| --- | --- | --- | --- | --- |")
    for (what, length), call in parts().items():
        theirs, ours = least(call, seconds)
        print(f"| {what} | {length:,} | {theirs:.1f} | {ours:.1f} | {theirs / ours:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="of each training (default 60)")
    parser.add_argument("--threads", type=int, default=2, help="(default 2)")
    parser.add_argument("--lora", action="store_true", help="train only adapters")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where PyTorch's autocast does")
    parser.add_argument(
        "--measure", nargs="?", const="qwen", choices=PARTS, help="time a larger model instead, of qwen or xlstm"
    )
    parser.add_argument("--seconds", type=float, default=5, help="of each measurement (default 5)")
    given = parser.parse_args()
    if given.measure and (given.lora or given.bf16):
        parser.error("--lora and --bf16 must be left out with --measure, which times a model in float32")
    if given.steps < 2 or given.threads < 1 or given.seconds <= 0:
        parser.error("--steps must be at least 2, --threads at least 1, and --seconds above 0")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(given.threads)
    measure(given.seconds, PARTS[given.measure]) if given.measure else compare(given.steps, given.lora, given.bf16)


if __name__ == "__main__":
    main()
