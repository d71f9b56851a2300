"""Check what was scored, and make one table of a comparison of language models.

    python recipes/lm_results.py check LOG TOKENISED_TEXT    # fails unless every token of the text was scored
    python recipes/lm_results.py table [--per-word] OUT NAME...    # the runs OUT/NAME -> Markdown
    python recipes/lm_results.py diverged TRAIN_LOG    # says where; fails unless a gradient that is not finite ended it

Perplexity per word spreads the loss of all tokens over words and line ends, and so can be compared between
vocabularies; perplexity per token cannot.
"""

import csv
import json
import math
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

START = re.compile(r"^\+ (?:.*[ /])?fairseq-train ", re.MULTILINE)
TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \| ", re.MULTILINE)
# fairseq's words for a gradient that is NaN or infinite (with --fp16: that stays so at every scale of the loss).
NOT_FINITE = re.compile(r"^FloatingPointError: (gradients are Nan/Inf|Minimum loss scale reached)", re.MULTILINE)


def count(text: Path) -> int:
    """The words or tokens of a text with one end of line each, as fairseq counts them."""
    with text.open(encoding="utf-8") as file:
        return sum(len(line.split()) + 1 for line in file)


def read_log(log: Path) -> tuple[int, int, float]:
    """The parameters, the tokens scored and their mean loss in bits, of fairseq-eval-lm or the JSON of fwp-eval-lm."""
    text = log.read_text(encoding="utf-8")
    if text.startswith("{"):
        result = json.loads(text)
        return result["parameters"], result["tokens"], result["loss_base_2"]
    patterns = r"num\. model params: ([\d,]+)", r"Evaluated ([\d,]+) tokens", r"Loss \(base 2\): ([\d.]+)"
    found = [re.search(pattern, text) for pattern in patterns]
    if not all(found):
        raise ValueError(f"{log} holds no result of fairseq-eval-lm: delete it and evaluate again.")
    parameters, tokens, loss = (match[1].replace(",", "") for match in found)
    return int(parameters), int(tokens), float(loss)


class Training(NamedTuple):
    """What a log of fairseq-train says: validations are (update, perplexity), of a resumed run those that counted."""

    parameters: int
    updates: int
    hours: float  # of all starts together
    validations: list[tuple[int, float]]
    not_finite: bool  # the last start ended at a gradient that is NaN or infinite


def read_training(log: Path) -> Training:
    """Reads what `fairseq-train --log-format json` printed, each start after a line `+ ...fairseq-train ...`."""
    text = log.read_text(encoding="utf-8", errors="replace")
    parameters = re.search(r"num\. shared model params: ([\d,]+)", text)
    if not parameters:
        raise ValueError(f"{log} is no log of fairseq-train that came as far as its model.")
    updates, validations = 0, []
    for found in re.finditer(r"\| (\{\".*\})$", text, re.MULTILINE):
        entry = json.loads(found[1])
        if "num_updates" in entry:
            updates = int(entry["num_updates"])
        if "valid_ppl" in entry:
            updates = int(entry["valid_num_updates"])
            validations = [known for known in validations if known[0] < updates]
            validations.append((updates, float(entry["valid_ppl"])))
    starts = START.split(text)
    not_finite = NOT_FINITE.search(starts[-1]) is not None
    hours = sum(map(hours_of, starts))
    return Training(int(parameters[1].replace(",", "")), updates, hours, validations, not_finite)


def hours_of(start: str) -> float:
    """From the first to the last line of one start; fairseq's own clock stands still once a run was resumed."""
    times = [datetime.fromisoformat(time) for time in TIME.findall(start)]
    return (times[-1] - times[0]).total_seconds() / 3600 if times else 0.0


def diverged(log: Path) -> str:
    training = read_training(log)
    if not training.not_finite:
        raise ValueError(f"{log} does not end at a gradient that is not finite.")
    finite = [(update, ppl) for update, ppl in training.validations if math.isfinite(ppl)]
    before = "last finite validation perplexity {1:.2f} at {0:,}".format(*finite[-1]) if finite else "no validation yet"
    return f"gradient not finite after update {training.updates:,}, {before}"


def check(log: Path, text: Path) -> None:
    _, scored, _ = read_log(log)
    if scored != count(text):
        raise ValueError(f"{log}: {scored:,} tokens were scored, but {text} has {count(text):,}: nothing is reported.")


def table(out: Path, names: list[str], with_words: bool = False) -> list[str]:
    """The lines of a table: a row for each run, with all its OUT/NAME/*.ppl.log and what OUT/curves.csv says of it."""
    with (out / "curves.csv").open(encoding="utf-8") as file:
        trained = {row["run"]: row for row in csv.DictReader(file)}  # the last row of each run
    protocols = [log.name.removesuffix(".ppl.log") for log in (out / names[0]).glob("*.ppl.log")]
    protocols.sort(key=lambda protocol: (protocol.startswith("test"), protocol))
    words_heads = [f"{protocol}, per word" for protocol in protocols if with_words]
    heads = ["model", "parameters", *(f"{protocol} ppl" for protocol in protocols), *words_heads, "updates", "hours"]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for name in names:
        per_token, per_word = [], []
        for protocol in protocols:
            parameters, tokens, loss = read_log(out / name / f"{protocol}.ppl.log")
            per_token.append(f"{2**loss:.2f}")
            if with_words:
                words = count(out / "data" / "text" / f"{protocol.split()[0]}.txt")
                per_word.append(f"{2 ** (loss * tokens / words):.1f}")
        run = trained[name]
        cells = [name, f"{parameters:,}", *per_token, *per_word, f"{int(run['update']):,}", run["hours"]]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(arguments: list[str]) -> None:
    match arguments:
        case ["check", log, text]:
            check(Path(log), Path(text))
        case ["diverged", log]:
            print(diverged(Path(log)))
        case ["table", "--per-word", out, *names] if names:
            print("\n".join(table(Path(out), names, with_words=True)))
        case ["table", out, *names] if names:
            print("\n".join(table(Path(out), names)))
        case _:
            sys.exit("usage: lm_results.py check LOG TEXT | table [--per-word] OUT NAME... | diverged TRAIN_LOG")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"lm_results.py: {error}")
