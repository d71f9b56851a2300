"""fwp-eval-lm: perplexity of a language model by the protocols that papers report, every token scored once.

    fwp-eval-lm DATA --path checkpoint_best.pt                        # sliding window, all of it before every token
    fwp-eval-lm DATA --path checkpoint_best.pt --stride 32            # the same in a 32nd of the time, nearly
    fwp-eval-lm DATA --path checkpoint_best.pt --context-window 0     # blocks; as `fairseq-eval-lm` has it
    fwp-eval-lm DATA --path checkpoint_best.pt --carry-state          # one pass, the state carried from end to end
    fwp-eval-lm DATA --path checkpoint_best.pt --carry-state --dynamic sgd --dynamic-lr 0.1  # and learning from it

The sliding window is that of Schlag et al. 2021, Sec. 6.3, Table 2 and Al-Rfou et al. 2019; carried state is that of
Schlag et al. 2021, Table 4; `--tokens-per-sample 512 --context-window 0` and `480` are those of Mao 2022, Table 3. As
in fairseq the text is one stream with the end of a line before its first token, which is scored too. The settings of
the model and the task are those of the checkpoint. --dynamic is the dynamic evaluation of Krause et al. 2018 and 2019:
rms the rule as they write it, rms-sum that of their code for Transformer-XL, to which its values belong.
"""

import argparse
import dataclasses
import json
import logging
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.data import data_utils
from fairseq.logging.progress_bar import progress_bar
from torch import Tensor

import fairseq_fwp
from fairseq_fwp.cli import start_logging
from fairseq_fwp.cli.argument_types import dictionary_of_settings, non_negative, output_file, positive
from fairseq_fwp.cli.checkpoint import load_model
from fairseq_fwp.cli.dynamic import KINDS, DynamicRule, gather_statistics
from fairseq_fwp.cli.protocol import (
    Protocol,
    choose_protocol,
    count_state,
    document_starts,
    make_scorer,
    plan_windows,
    warn_of_positions,
)
from fairseq_fwp.cli.scoring import Text, score
from fairseq_fwp.modules.onednn import OneDnnLinear
from fairseq_fwp.tasks.text_blocks import BLANK_LINE

logger = logging.getLogger(__name__)

# What --batch-size amounts to by default. A CPU works from its caches: beyond these, batches gain nothing.
TOKENS_AT_ONCE = {"cpu": 1536, "cuda": 32768}


@dataclass
class Result:
    """loss: mean, base e; state_size: numbers a sequence needs kept, None = unknown; times in seconds."""

    path: str
    subset: str
    protocol: str
    parameters: int
    state_size: int | None
    tokens: int
    seconds: float
    loss: float
    characters: int | None

    @property
    def bits(self) -> float:
        """Mean loss of a token, base 2."""
        return self.loss / math.log(2)

    @property
    def perplexity(self) -> float:
        """Infinite where it is no float."""
        return math.exp(self.loss) if self.loss < math.log(sys.float_info.max) else math.inf

    @property
    def bits_per_character(self) -> float | None:
        """None: the number of characters is not known."""
        return self.bits * self.tokens / self.characters if self.characters else None

    def lines(self) -> list[str]:
        """The report, with fairseq-eval-lm's words where it has them."""
        found = [f"{self.subset}: {self.protocol}", f"num. model params: {self.parameters:,}"]
        if self.state_size is not None:
            found.append(f"state size: {self.state_size:,} numbers ({self.state_size / 1e6:.2f} M)")
        speed = self.tokens / self.seconds
        found.append(f"Evaluated {self.tokens:,} tokens in {self.seconds:.1f}s ({speed:.2f} tokens/s)")
        found.append(f"Loss (base e): {self.loss:.4f}")
        found.append(f"Loss (base 2): {self.bits:.4f}, Perplexity: {self.perplexity:.2f}")
        if self.bits_per_character is not None:
            found.append(f"Bits per character: {self.bits_per_character:.4f} ({self.characters:,} characters)")
        return found

    def as_json(self) -> str:
        """All fields and what follows from them."""
        derived = {"loss_base_2": self.bits, "perplexity": self.perplexity}
        return json.dumps(
            {**dataclasses.asdict(self), **derived, "bits_per_character": self.bits_per_character}, indent=2
        )


def import_plugin(args: Namespace) -> None:
    """Imports the --user-dir, unless it is this package: fairseq would take it for another one of the same name.

    Raises ValueError where there is no such folder.
    """
    if args.user_dir is None or Path(args.user_dir).resolve() != Path(fairseq_fwp.__file__).resolve().parent:
        if os.path.isfile(args.user_dir or ""):
            raise ValueError(f"--user-dir {args.user_dir} is a file: give the folder of a plug-in")
        try:
            utils.import_user_module(args)
        except FileNotFoundError as error:
            raise ValueError(f"there is no plug-in {error}: give its folder as --user-dir") from error


def load_text(task: Any, data: str, subset: str, first: int) -> Text:
    """The subset as one stream, with the symbol `first` read before it; ValueError if it is not there or empty."""
    folder = utils.split_paths(data)[0]
    prefix = os.path.join(folder, subset)
    if os.path.exists(f"{prefix}.bin") and not os.path.getsize(f"{prefix}.bin"):
        raise ValueError(f"the text {subset!r} in {folder} is empty: preprocess a file with at least one token")
    dataset = data_utils.load_indexed_dataset(prefix, task.source_dictionary)
    if dataset is None:
        found = sorted({file.stem for file in Path(folder).glob("*.idx")})
        raise ValueError(f"no text {subset!r} in {folder}, where there is {', '.join(found) or 'none'}")
    tokens = torch.cat([dataset[index] for index in range(len(dataset))]).long()
    return Text(torch.cat([tokens.new_tensor([first]), tokens[:-1]]), tokens)


def count_characters(dictionary: Any, tokens: int, given: int | None) -> int | None:
    """The number given; else that of the tokens, where every word of the dictionary is one character; else None."""
    if given is not None:
        return given
    words = [word for word in dictionary.symbols[dictionary.nspecial :] if not word.startswith("madeupword")]
    return tokens if words and all(len(word) == 1 for word in words) else None


def evaluate(args: Namespace) -> None:
    """Runs the evaluation that the arguments describe; prints its result and writes its files."""
    import_plugin(args)
    model, task, cfg = load_model(args.path, args.data, args.model_overrides)
    protocol = choose_protocol(args, model, cfg.task)
    dictionary = task.source_dictionary
    first = dictionary.bos() if getattr(cfg.task, "add_bos_token", False) else dictionary.eos()
    text = load_text(task, args.data, args.gen_subset, first)
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")
    model, text = model.to(device), Text(*(part.to(device) for part in text))
    model.requires_grad_(protocol.dynamic is not None)
    length = len(text.tokens)
    warn_of_positions(model, protocol, length)

    starts = document_starts(text.tokens, dictionary, args.reset_after)
    batch_size = args.batch_size or max(1, TOKENS_AT_ONCE[device.type] // protocol.size)
    plan = plan_windows(starts, length, protocol, batch_size)
    rms = None
    if protocol.dynamic is not None and protocol.dynamic.needs_statistics:
        train = load_text(task, args.data, "train", first)
        rms, windows = training_statistics(model, train, protocol, protocol.dynamic, dictionary)
        protocol.dynamic = dataclasses.replace(
            protocol.dynamic, windows=windows
        )  # a short text has fewer than asked for
    scorer = make_scorer(model, text, protocol, starts, rms)
    default_format = "simple" if args.no_progress_bar else "tqdm"
    bar = progress_bar(
        plan, args.log_format, args.log_interval, prefix=args.gen_subset, default_log_format=default_format
    )
    started = time.perf_counter()
    with OneDnnLinear():
        log_probs = score(scorer, bar, length, bar.log)
    result = Result(
        path=args.path,
        subset=args.gen_subset,
        protocol=str(protocol),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        state_size=count_state(model, protocol),
        tokens=length,
        seconds=time.perf_counter() - started,
        loss=-float(log_probs.mean()),
        characters=count_characters(dictionary, length, args.characters),
    )
    if args.scores:
        words = [dictionary[token] for token in text.tokens.tolist()]
        table = score_table(words, log_probs.tolist())
        write_whole(args.scores, lambda file: file.write_text(table, encoding="utf-8"))
    if args.json:
        write_whole(args.json, lambda file: file.write_text(result.as_json() + "\n", encoding="utf-8"))
    print("\n".join(result.lines()))


def training_statistics(
    model: Any, text: Text, protocol: Protocol, rule: DynamicRule, dictionary: Any
) -> tuple[list[Tensor], int]:
    """What a rule of dynamic evaluation knows of the training text, read as the protocol reads; of how many windows."""
    started, device = time.perf_counter(), next(model.parameters()).device
    starts = document_starts(text.tokens, dictionary, protocol.reset_after)
    plan = plan_windows(starts, len(text.tokens), protocol, 1)[: rule.windows]
    text = Text(*(part.to(device) for part in text))
    scorer = make_scorer(model, text, dataclasses.replace(protocol, dynamic=None), starts, None)
    rms = gather_statistics(scorer, plan, rule)
    logger.info("gathered statistics of %s windows of train in %.1fs", f"{len(plan):,}", time.perf_counter() - started)
    return rms, len(plan)


def score_table(words: Sequence[str], log_probs: Sequence[float]) -> str:
    """Lines of tab-separated position, token and log-probability (base e), under a heading."""
    rows = (f"{i}\t{word}\t{value:.9g}" for i, (word, value) in enumerate(zip(words, log_probs, strict=True)))
    return "\n".join(["position\ttoken\tlog_prob", *rows]) + "\n"


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Calls write for a file of another name first, so that one of this name is whole."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="fwp-eval-lm",
        description=__doc__.removeprefix("fwp-eval-lm: "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("data", help="folder that fairseq-preprocess has written, with the dictionary of the training")
    add("--path", required=True, help="the checkpoint")
    add("--gen-subset", default="test", metavar="SPLIT", help="train, valid, test, ... (test)")
    add("--tokens-per-sample", type=positive, metavar="N", help="tokens a window or segment reads (as in training)")
    protocol = made.add_mutually_exclusive_group()
    protocol.add_argument(
        "--stride", type=positive, default=1, metavar="N", help="tokens that a window scores, its last ones (1)"
    )
    protocol.add_argument(
        "--context-window", type=int, metavar="N", help="tokens that a window does not score, its first ones"
    )
    protocol.add_argument(
        "--carry-state", action="store_true", help="read the text once, with the state of what came before"
    )
    add(
        "--reset-after",
        metavar="SYMBOL",
        help=f"start anew, without a state and with the trained weights, after this symbol or each {BLANK_LINE}",
    )
    add("--dynamic", choices=[*KINDS], help="learn from each window once it is scored, by the rule of that name")
    add("--dynamic-lr", type=non_negative, metavar="LR", help="with it, and needed: the step size")
    add("--dynamic-decay", type=non_negative, metavar="D", help="pull back to the trained weights (0)")
    add("--dynamic-epsilon", type=non_negative, metavar="E", help="of rms, rms-sum: added to divisors (1e-5)")
    add(
        "--dynamic-statistics",
        type=positive,
        metavar="N",
        help="windows of the training text whose squared gradients rms averages (all), and rms-sum adds up",
    )
    add("--batch-size", type=positive, metavar="N", help="windows at once; the state has but one stream")
    add("--characters", type=positive, metavar="N", help="characters of the text (wc -m), for bits per character")
    add("--scores", type=output_file, metavar="TSV", help="write each token with its log-probability (base e)")
    add("--json", type=output_file, metavar="JSON", help="write the result")
    add(
        "--model-overrides",
        type=dictionary_of_settings,
        default={},
        metavar="DICT",
        help="settings in place of the checkpoint's",
    )
    add("--user-dir", help="plugin that the checkpoint needs besides this package")
    add("--cpu", action="store_true", help="do not use a GPU")
    add("--log-format", choices=["json", "none", "simple", "tqdm"], help="of the progress")
    add("--log-interval", type=positive, default=100, metavar="N", help="batches between two lines of progress (100)")
    add("--no-progress-bar", action="store_true", help="progress in lines, as where there is no terminal")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    start_logging()
    made = parser()
    args = made.parse_args(arguments)
    if args.carry_state and args.batch_size not in (None, 1):
        made.error("--carry-state reads one stream: leave out --batch-size")
    if args.dynamic and args.batch_size not in (None, 1):
        made.error("--dynamic learns from one window after the other: leave out --batch-size")
    if args.dynamic and args.dynamic_lr is None:
        made.error("--dynamic needs its step size, --dynamic-lr")
    names = ("lr", "decay", "epsilon", "statistics")
    given = [name for name in names if getattr(args, f"dynamic_{name}") is not None]
    if given and not args.dynamic:
        made.error(f"--dynamic-{given[0]} belongs to --dynamic: give that, sgd, rms or rms-sum")
    if args.dynamic == "sgd" and given[-1] in ("epsilon", "statistics"):
        made.error(f"--dynamic-{given[-1]} belongs to --dynamic rms and rms-sum: leave it out with sgd")
    if args.json and args.json == args.scores:
        made.error(f"--json and --scores are two files, got {args.json} for both")
    if args.dynamic == "rms-sum" and args.dynamic_statistics is None:
        made.error("--dynamic rms-sum takes steps that depend on the number of its windows: give --dynamic-statistics")
    try:
        evaluate(args)
    except (ValueError, OSError) as error:
        sys.exit(f"fwp-eval-lm: {error}")
    except torch.cuda.OutOfMemoryError:
        sys.exit(
            "fwp-eval-lm: the GPU has too little memory for that many windows at once: pass a smaller --batch-size"
        )


if __name__ == "__main__":
    main()
