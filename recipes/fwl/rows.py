"""What the rows of run.sh came to.

python recipes/fwl/rows.py best FOLDER LABEL    # the value V with the best "FOLDER/valid LABEL V.json"
python recipes/fwl/rows.py csv OUT              # the numbers of the rows of OUT/local and OUT/xl
python recipes/fwl/rows.py table CSV            # these numbers -> Markdown
"""

import csv
import json
import sys
from pathlib import Path

# Row of Table 2 of Clark et al. 2022, the folder and label of ours, and the paper's valid perplexity by base.
ROWS = [
    ("No FWLs", "base", "plain", {"local": 25.1, "xl": 17.3}),
    ("the layer, without fast weights", "slow", "plain", {}),
    ("FWLs", "fwl", "plain", {"local": 22.4, "xl": 15.9}),
    ("FWLs, gradients at carried weights", "carried", "plain", {}),
    ("Test-time only", "slow", "test-time", {"local": 24.1, "xl": 16.7}),
    ("Test-time only, gradients at carried weights", "slow", "carried", {}),
    ("Bias only, at test time", "slow", "test-bias", {}),
    ("Bias only", "bias", "plain", {"local": 25.0, "xl": 17.3}),
    ("Dynamic evaluation, RMS", "base", "rms", {"local": 22.4, "xl": 15.8}),
    ("Dynamic evaluation, RMS", "slow", "rms", {}),
    ("Dynamic evaluation, SGD", "base", "sgd", {}),
]
# Blocks that are read each by itself carry nothing.
ROWS_OF = {"local": [row for row in ROWS if "carried" not in row[1:3]], "xl": ROWS}


def results(folder: Path, split: str, label: str) -> dict[str, dict]:
    """The results of a split under a label, by what follows it in the file's name."""
    files = folder.glob(f"{split} {label}*.json")
    return {file.stem.removeprefix(f"{split} {label}").strip(): json.loads(file.read_text()) for file in files}


def best(folder: Path, label: str) -> str:
    """The value that serves the validation text best."""
    found = results(folder, "valid", label)
    if not found:
        raise ValueError(f"{folder} has no result on the validation text for {label}: run the stage eval first.")
    return min(found, key=lambda value: found[value]["loss"])


def write_csv(out: Path) -> None:
    """A line for each row; tokens a second are of the text that all speeds are measured on. Empty: not run."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["base", "row", "conf", "step", "valid", "test", "tokens_per_second", "paper_valid"])
    for base, rows in ROWS_OF.items():
        for row, name, label, paper in rows:
            folder = out / base / name
            valid = results(folder, "valid", label)
            value = best(folder, label) if valid else ""
            test = results(folder, "test", label).get(value)
            timed = results(folder, "speed", label).get("")
            ours = [found["perplexity"] if found else "" for found in (valid.get(value), test)]
            speed = timed["tokens"] / timed["seconds"] if timed else ""
            writer.writerow([base, row, name, value, *ours, speed, paper.get(base, "")])


def table(path: Path) -> list[str]:
    """A table for each base, of a file that `write_csv` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = []
    for base, title in (("local", "Local attention"), ("xl", "Transformer-XL")):
        heads = ["row of Table 2", f"conf/{base}/", "step", "valid", "test", "tokens/s", "paper valid"]
        lines += [f"**{title}**", "", "| " + " | ".join(heads) + " |", "| --- | --- |" + " ---: |" * 5]
        for row in (row for row in rows if row["base"] == base):
            ours = [f"{float(row[split]):.2f}" if row[split] else "not run" for split in ("valid", "test")]
            speed = f"{float(row['tokens_per_second']):,.0f}" if row["tokens_per_second"] else "-"
            cells = [row["row"], f"{row['conf']}.yaml", row["step"] or "-", *ours, speed, row["paper_valid"] or "-"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return lines[:-1]


def main(arguments: list[str]) -> None:
    match arguments:
        case ["best", folder, label]:
            print(best(Path(folder), label))
        case ["csv", out]:
            write_csv(Path(out))
        case ["table", file]:
            print("\n".join(table(Path(file))))
        case _:
            sys.exit("usage: rows.py best FOLDER LABEL | csv OUT | table CSV")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"rows.py: {error}")
