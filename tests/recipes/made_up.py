"""Folders of invented runs, in the form that fairseq's commands write."""

import gzip
import json
import random
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
LINE = "the memory is a matrix that every token reads and writes\n"
TIME = "2026-11-21 07:00:00 | INFO |"
DIVERGED = f"""\
{TIME} fairseq_cli.train | num. shared model params: 1,234 (num. trained: 1,234)
2026-11-21 07:00:36 | INFO | train_inner | {{"ppl": "90", "num_updates": "50", "wall": "36"}}
2026-11-21 07:01:12 | INFO | valid | {{"valid_ppl": "88.25", "valid_num_updates": "60", "wall": "72"}}
2026-11-21 07:01:48 | INFO | valid | {{"valid_ppl": "nan", "valid_num_updates": "90"}}
Traceback (most recent call last):
FloatingPointError: gradients are Nan/Inf
"""
WORDS = [("the", "die"), ("well-known", "bekannte"), ("memory", "Erinnerung"), ("reads", "liest"), ("once", "einmal")]


def log(*validations, name="ppl", seconds=36, more=""):
    """Return a log of fairseq-train: (update, value) of each validation; a model of 1,234 parameters."""
    lines = [f"+ fairseq-train DATA\n{TIME} fairseq_cli.train | num. shared model params: 1,234"]
    for update, value in validations:
        values = {f"valid_{name}": str(value), "valid_num_updates": str(update)}
        lines.append(f"{TIME} valid | {json.dumps(values)}")
    entry = json.dumps({"num_updates": str(validations[-1][0] if validations else 0), "train_wall": "3"})
    lines.append(f"2026-11-21 07:{seconds // 60:02}:{seconds % 60:02} | INFO | train | {entry}")
    return "\n".join(lines) + f"\n{more}"


def trained(folder, *validations, diverged="", **more):
    """Make the folder of a finished training."""
    folder.mkdir(parents=True, exist_ok=True)
    validations = validations or [(60, 8.0)]
    (folder / "train.log").write_text(log(*validations, **more))
    summary = f"best loss inf, {validations[-1][0]} updates\n"
    (folder / ("diverged" if diverged else "trained")).write_text(diverged or summary)
    return folder


def result(folder, name, perplexity, **more):
    """Return the output of fwp-eval-lm: by default two bits a token of six tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"perplexity": perplexity, "loss": perplexity, "loss_base_2": 2.0, "tokens": 6, "seconds": 4.0}
    (folder / f"{name}.json").write_text(json.dumps(found | more))


def cells(lines):
    """Return the rows of a Markdown table."""
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return [row for row in rows if not set("".join(row)) <= set("-: |")]


def write_pairs(prefix, count, packed=False):
    """Return invented sentences and their translations word by word."""
    chooser = random.Random(str(prefix))
    pairs = [[chooser.choice(WORDS) for _ in range(chooser.randint(1, 9))] for _ in range(count)]
    for side, language in enumerate(("en", "de")):
        text = "".join(" ".join(words[side] for words in pair) + ".\n" for pair in pairs)
        if packed:
            Path(f"{prefix}.{language}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            Path(f"{prefix}.{language}").write_text(text)
