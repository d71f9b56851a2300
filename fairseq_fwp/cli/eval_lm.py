"""fwp-eval-lm: perplexity of a language model by the protocols that papers report, every token scored once.

    fwp-eval-lm DATA --path checkpoint_best.pt                        # a window that moves by one token
    fwp-eval-lm DATA --path checkpoint_best.pt --stride 32            # nearly the same, with 1/32 of the passes
    fwp-eval-lm DATA --path checkpoint_best.pt --context-window 0     # blocks, as in fairseq-eval-lm
    fwp-eval-lm DATA --path checkpoint_best.pt --carry-state          # the text once, with a carried state
    fwp-eval-lm DATA --path checkpoint_best.pt --carry-state --warm-up 50000 --streams 16  # at the age of training
    fwp-eval-lm DATA --path checkpoint_best.pt --line-start word      # each line by itself, from its first word on
    fwp-eval-lm DATA --path checkpoint_best.pt --carry-state --dynamic sgd --dynamic-lr 0.1  # the model learns too

The sliding window is that of Schlag et al. 2021, Sec. 6.3, Table 2 and Al-Rfou et al. 2019. Carried state is that of
Schlag et al. 2021, Table 4. Mao 2022, Table 3 has `--tokens-per-sample 512` with `--context-window 0` and `480`. As in
fairseq, the text is one stream, and the model reads the end of a line before the first token. So every token is scored.
The settings of the model and the task are those of the checkpoint. --dynamic is the dynamic evaluation of Krause et al.
2018 and 2019. rms is the rule of the papers; rms-sum is that of their code for Transformer-XL, with the values there.
A model of --task fwp_lines is evaluated as it was trained, by lines.
"""

import argparse
import json
import logging
from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from fairseq_fwp.cli import make_parser, one_sentence, start_logging, write_whole
from fairseq_fwp.cli.arguments import dictionary_of_settings, non_negative, output_file, positive

if TYPE_CHECKING:
    from fairseq.data import Dictionary
    from fairseq.models import FairseqLanguageModel
    from fairseq.tasks import FairseqTask

    from fairseq_fwp.evaluation import Protocol, Scores
    from fairseq_fwp.evaluation.windows import Window
    from fairseq_fwp.patches.options import Settings

logger = logging.getLogger(__name__)

# The flags that set the arguments that the library's errors name.
FLAGS = {
    "window": "--tokens-per-sample",
    "context": "--context-window",
    "carry_state": "--carry-state",
    "warm_up": "--warm-up",
    "train": "the text 'train'",
    "max_target_positions": "--model-overrides \"{'max_target_positions': N}\"",
}

BY_LINES = {
    "end": "each line by itself, all of it scored",
    "word": "each line by itself, scored after its first word",
}


def summarize(args: Namespace, model: "FairseqLanguageModel", characters: int | None, scores: "Scores") -> "Settings":
    """Return what was evaluated and its result, as --json writes them; None for an unknown number."""
    tokens, protocol = len(scores.log_probs), str(scores.protocol)
    protocol += f", reset after {args.reset_after}" if args.reset_after else ""
    return {
        "path": args.path,
        "subset": args.gen_subset,
        "protocol": BY_LINES.get(args.line_start, protocol),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_size": scores.state_size,
        "tokens": tokens,
        "seconds": scores.seconds,
        "loss": scores.loss,
        "characters": characters,
        "loss_base_2": scores.bits,
        "perplexity": scores.perplexity,
        "bits_per_character": scores.bits * tokens / characters if characters else None,
    }


def report(summary: "Settings") -> list[str]:
    """The lines of a summary, with fairseq-eval-lm's words where it has them."""
    of = Namespace(**summary)
    lines = [f"{of.subset}: {of.protocol}", f"num. model params: {of.parameters:,}"]
    if of.state_size is not None:
        lines.append(f"state size: {of.state_size:,} numbers ({of.state_size / 1e6:.2f} M)")
    lines.append(f"Evaluated {of.tokens:,} tokens in {of.seconds:.1f}s ({of.tokens / of.seconds:.2f} tokens/s)")
    lines.append(f"Loss (base e): {of.loss:.4f}")
    lines.append(f"Loss (base 2): {of.loss_base_2:.4f}, Perplexity: {of.perplexity:.2f}")
    if of.bits_per_character is not None:
        lines.append(f"Bits per character: {of.bits_per_character:.4f} ({of.characters:,} characters)")
    return lines


def count_characters(dictionary: "Dictionary", tokens: int, expected: int | None) -> int | None:
    """Return the expected number, or that of tokens of one character each. Raises ValueError where the two differ."""
    words = [word for word in dictionary.symbols[dictionary.nspecial :] if not word.startswith("madeupword")]
    counted = tokens if words and all(len(word) == 1 for word in words) else None
    if None not in (expected, counted) and expected != counted:
        reason = "because every token is a character"
        raise ValueError(f"--characters must be {counted:,}, {reason}, got {expected:,}: leave it out")
    return expected if counted is None else counted


def read_protocol(args: Namespace, model: "FairseqLanguageModel", task: "FairseqTask") -> "Protocol":
    """The protocol that the arguments name; ValueError where the model, or the task's settings, cannot follow it."""
    from fairseq_fwp.evaluation import DynamicRule, Protocol
    from fairseq_fwp.patches.options import flag, setting

    limit = model.max_positions()
    window = args.tokens_per_sample or min(setting(task, "tokens_per_sample", None) or limit, limit)
    options = {"lr": args.dynamic_lr, "decay": args.dynamic_decay, "epsilon": args.dynamic_epsilon}
    options = {name: value for name, value in options.items() if value is not None}
    rule = DynamicRule(kind=args.dynamic, windows=args.dynamic_statistics, **options) if args.dynamic else None
    if args.line_start is not None:
        for name in ("stride", "context_window", "carry_state", "warm_up", "streams", "reset_after", "dynamic"):
            if getattr(args, name):
                reason = ": the model would learn from one line only" * (name == "dynamic")
                raise ValueError(f"{flag(name)} must be left out where each line is read by itself{reason}")
        return Protocol(window)
    stride = args.stride or 1
    if args.context_window is None and stride > window:
        raise ValueError(f"--stride must be at most {window}, the length of a window, got {stride}")
    context = window - stride if args.context_window is None else args.context_window
    separator = setting(task, "reset_state_after", None)
    if args.carry_state and separator and separator != args.reset_after:
        remedy = f"pass --reset-after {separator}, or leave out --carry-state"
        raise ValueError(f"the model was trained with --reset-state-after {separator}: {remedy}")
    return Protocol(window, 0 if args.carry_state else context, args.carry_state, rule, args.warm_up or 0)


def run(args: Namespace) -> None:
    """Run the evaluation that the arguments describe; print its result and write its files."""
    import torch
    from fairseq.logging.progress_bar import progress_bar

    from fairseq_fwp.checkpoints.pretrained import read
    from fairseq_fwp.cli import loading
    from fairseq_fwp.evaluation import evaluate
    from fairseq_fwp.modules.decoding import streaming
    from fairseq_fwp.patches.options import setting, word
    from fairseq_fwp.tasks.streams import trained_age, warn_of_age

    loading.import_plugin(args.user_dir)
    checkpoint = read(args.path)
    model, task = loading.load_model(checkpoint, args.data, args.model_overrides)
    cfg = checkpoint.cfg
    args.line_start = args.line_start or word(setting(cfg.task, "line_start", None))
    protocol = read_protocol(args, model, cfg.task)
    dictionary = task.source_dictionary
    first = dictionary.bos() if setting(cfg.task, "add_bos_token", False) else dictionary.eos()
    reading = (first, args.reset_after, args.line_start, protocol.window)
    text = loading.load_text(task, args.data, args.gen_subset, *reading)
    characters = count_characters(dictionary, len(text.tokens), args.characters)
    if args.streams:
        text = text._replace(starts=tuple(len(text.tokens) * part // args.streams for part in range(args.streams)))
    needs_train = args.warm_up or args.dynamic not in (None, "sgd")
    train = None if not needs_train else loading.load_text(task, args.data, "train", *reading)
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    model = model.to(device).requires_grad_(args.dynamic is not None)
    decoder = streaming(model)
    if args.carry_state and decoder is not None:
        # Each document has its own positions.
        longest = max(end - start for start, end in pairwise([*text.starts, len(text.tokens)])) + protocol.warm_up
        if decoder.has_positions and longest > model.max_positions():
            logger.warning(
                f"absolute positions grow to {longest:,}, and the model has seen only {model.max_positions():,} in "
                "training: leave out --carry-state, or train a model with --no-token-positional-embeddings, as Schlag "
                "et al. 2021 do"
            )
        if decoder.ages:
            trained = trained_age((checkpoint.saved.get("extra_state") or {}).get("train_iterator", {}))
            warn_of_age(longest, trained, "--warm-up and --streams choose the age of a state")

    def progress(batches: "list[list[Window]]") -> "Iterable[list[Window]]":
        shown = {"prefix": args.gen_subset, "default_log_format": "simple" if args.no_progress_bar else "tqdm"}
        return progress_bar(batches, args.log_format, args.log_interval, **shown)

    scores = evaluate(model, text, protocol, train, args.batch_size, progress)
    summary = summarize(args, model, characters, scores)
    if args.scores:
        scored = enumerate(zip(text.tokens.tolist(), scores.log_probs.tolist(), strict=True))
        rows = [f"{place}\t{dictionary[token]}\t{log_prob:.9g}\n" for place, (token, log_prob) in scored]
        table = "".join(["position\ttoken\tlog_prob\n", *rows])
        write_whole(args.scores, lambda file: file.write_text(table, encoding="utf-8"))
    if args.json:
        lines = json.dumps(summary, indent=2) + "\n"
        write_whole(args.json, lambda file: file.write_text(lines, encoding="utf-8"))
    print("\n".join(report(summary)))


def parser() -> argparse.ArgumentParser:
    command = make_parser(__doc__)
    add, choose = command.add_argument, command.add_mutually_exclusive_group().add_argument
    add("data", help="folder that fairseq-preprocess has written, with the dictionary of the training")
    add("--path", required=True, help="the checkpoint")
    add("--gen-subset", default="test", metavar="SPLIT", help="split to evaluate: train, valid, test, ... (test)")
    add("--tokens-per-sample", type=positive, metavar="N", help="tokens of a window or segment (as in training)")
    choose("--stride", type=positive, metavar="N", help="number of last tokens that a window scores (1)")
    choose("--context-window", type=int, metavar="N", help="number of first tokens that a window does not score")
    choose("--carry-state", action="store_true", help="read the text once, carrying the state to the next segment")
    reset = "reset the state and the weights after this symbol, or after each blank-line"
    warm = "with --carry-state: last tokens of the training text that are read before the text, not scored (0)"
    add("--warm-up", type=positive, metavar="N", help=warm)
    parts = "with --carry-state: equal parts of the text, each begins with the state of --warm-up (1)"
    add("--streams", type=positive, metavar="N", help=parts)
    add("--reset-after", metavar="SYMBOL", help=reset)
    lines = "read each line by itself, after </s> (end) or from its first word on, which is not scored (word)"
    choose("--line-start", choices=[*BY_LINES], help=lines)
    rule = "rule by which the model learns from each window after it is scored"
    add("--dynamic", choices=["sgd", "rms", "rms-sum"], help=rule)
    add("--dynamic-lr", type=non_negative, metavar="LR", help="step size; required with --dynamic")
    add("--dynamic-decay", type=non_negative, metavar="D", help="strength of the pull to the trained weights (0)")
    add("--dynamic-epsilon", type=non_negative, metavar="E", help="with rms, rms-sum: added to divisors (1e-5)")
    squares = "windows of the training text whose squared gradients rms averages (all) and rms-sum adds"
    add("--dynamic-statistics", type=positive, metavar="N", help=squares)
    add("--batch-size", type=positive, metavar="N", help="windows at once; 1 with --carry-state or --dynamic")
    add("--characters", type=positive, metavar="N", help="characters of the text (wc -m), for bits per character")
    add("--scores", type=output_file, metavar="TSV", help="write each token with its log-probability (base e)")
    add("--json", type=output_file, metavar="JSON", help="write the result")
    replaced = "settings that replace the checkpoint's"
    add("--model-overrides", type=dictionary_of_settings, default={}, metavar="DICT", help=replaced)
    add("--user-dir", help="plugin that the checkpoint needs besides this package")
    add("--cpu", action="store_true", help="do not use a GPU")
    add("--log-format", choices=["json", "none", "simple", "tqdm"], help="format of the progress")
    add("--log-interval", type=positive, default=100, metavar="N", help="batches between two lines of progress (100)")
    add("--no-progress-bar", action="store_true", help="show progress in lines, as without a terminal")
    return command


def main(arguments: Sequence[str] | None = None) -> None:
    start_logging()
    command = parser()
    args = command.parse_args(arguments)
    names = ("lr", "decay", "epsilon", "statistics")
    chosen = [name for name in names if getattr(args, f"dynamic_{name}") is not None]
    if args.carry_state and args.batch_size not in (None, 1):
        command.error("--batch-size must be left out with --carry-state, which reads one stream")
    if not args.carry_state and (args.warm_up or args.streams):
        command.error(f"--carry-state must be given with {'--warm-up' if args.warm_up else '--streams'}")
    if args.streams and args.reset_after:
        command.error("--reset-after must be left out with --streams, which says where states begin")
    if args.dynamic and args.batch_size not in (None, 1):
        command.error("--batch-size must be left out with --dynamic, which learns from one window after the other")
    if args.dynamic and args.dynamic_lr is None:
        command.error("--dynamic-lr, the step size, must be given with --dynamic")
    if chosen and not args.dynamic:
        command.error(f"--dynamic must be sgd, rms or rms-sum with --dynamic-{chosen[0]}, got none")
    if args.dynamic == "sgd" and chosen[-1] in ("epsilon", "statistics"):
        command.error(f"--dynamic must be rms or rms-sum with --dynamic-{chosen[-1]}, got sgd")
    if args.dynamic == "rms-sum" and args.dynamic_statistics is None:
        command.error("--dynamic-statistics must be given with --dynamic rms-sum, whose steps depend on this number")
    if args.json and args.json == args.scores:
        command.error(f"--json and --scores must be different files, got {args.json} for both")
    with one_sentence("fwp-eval-lm"):
        from torch.cuda import OutOfMemoryError

        from fairseq_fwp.cli import loading
        from fairseq_fwp.ops.checks import renaming

        loading.refuse_inputs(args.data, args.path, {"--json": args.json, "--scores": args.scores})
        try:
            with renaming(FLAGS):
                run(args)
        except OutOfMemoryError as error:
            remedy = "pass a smaller --batch-size"
            raise ValueError(f"the GPU ran out of memory with that many windows at once: {remedy}") from error


if __name__ == "__main__":
    main()
