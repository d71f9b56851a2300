"""The rows of a corpus in rows.yaml, and the table of what became of them: source, converted, fine-tuned.

    python recipes/decay_finetune/rows.py names ROWS CORPUS           # the rows
    python recipes/decay_finetune/rows.py target ROWS CORPUS NAME     # flags of fwp-convert; none: softmax stays
    python recipes/decay_finetune/rows.py start ROWS CORPUS           # what rows are converted from: source or softmax
    python recipes/decay_finetune/rows.py checkpoint ROWS CORPUS      # which one is measured: best or last
    python recipes/decay_finetune/rows.py tokens ROWS CORPUS OUT      # of a sample in evaluation
    python recipes/decay_finetune/rows.py measures ROWS CORPUS        # lines `SPLIT CONTEXT`
    python recipes/decay_finetune/rows.py csv ROWS CORPUS OUT         # the numbers in the files that run.sh wrote
    python recipes/decay_finetune/rows.py table ROWS CORPUS CSV       # Markdown, of these numbers

A row recovers the source's perplexity divided by its own: Mao 2022, Sec. 4.1.4, has 99 % for 14.5 and 14.6.
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lm_results import read_training

# The model before any conversion; and the same after as much fine-tuning as the other rows.
SOURCE, SOFTMAX = "source", "softmax"


def read_corpus(path: Path, name: str) -> dict[str, Any]:
    """What rows.yaml says of a corpus, where it says nothing the defaults."""
    corpora = yaml.safe_load(path.read_text(encoding="utf-8"))
    if name not in corpora:
        raise ValueError(f"{path} has no corpus {name}: it has {', '.join(corpora)}")
    return {"start": SOURCE, "checkpoint": "best", **corpora[name]}


def target(corpus: dict[str, Any], name: str) -> str:
    """The flags of `fwp-convert` of a row."""
    rows = {row["run"]: row for row in corpus["rows"]}
    if name not in rows:
        raise ValueError(f"there is no row {name}: there are {', '.join(rows)}")
    return str(rows[name].get("target", ""))


def tokens(corpus: dict[str, Any], out: Path) -> int:
    """The length of a sample: that of the corpus, or else of the source, whose positions may end there."""
    if "tokens" in corpus:
        return int(corpus["tokens"])
    flags = (out / SOFTMAX / "converted" / "flags.txt").read_text(encoding="utf-8").split()
    return int(flags[flags.index("--tokens-per-sample") + 1])


def read_measure(folder: Path, measure: str, what: str = "perplexity") -> Any:
    """A number that fwp-eval-lm wrote there; None: it was not run."""
    file = folder / f"{measure}.json"
    return json.loads(file.read_text(encoding="utf-8")).get(what) if file.exists() else None


def read_results(corpus: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """The source, then each row of which there is anything, as they were measured; None where nothing was."""
    measures, first = corpus["measures"], corpus["measures"][0]
    source = out / SOFTMAX / "converted"
    found = [
        {
            "run": SOURCE,
            "state": read_measure(source, first, "state_size"),
            "updates": None,
            "hours": None,
            f"converted, {first}": None,
            **{measure: read_measure(source, measure) for measure in measures},
        }
    ]
    for name in (row["run"] for row in corpus["rows"]):
        folder = out / name
        diverged = (folder / "diverged").exists()
        training = read_training(folder / "train.log") if diverged or (folder / "trained").exists() else None
        row = {
            "run": name,
            "state": read_measure(folder / "converted", first, "state_size"),
            "updates": training and training.updates,
            "hours": training and training.hours,
            f"converted, {first}": read_measure(folder / "converted", first),
        }
        found.append(row | {m: "diverged" if diverged else read_measure(folder, m) for m in measures})
    return [row for row in found if any(value is not None for name, value in row.items() if name != "run")]


def read_csv(path: Path) -> dict[str, dict[str, Any]]:
    """The results in a file, by run: numbers, words, and None for nothing."""

    def value(text: str) -> float | str | None:
        try:
            return float(text)
        except ValueError:
            return text or None

    with path.open(encoding="utf-8", newline="") as file:
        return {row["run"]: {name: value(text) for name, text in row.items()} for row in csv.DictReader(file)}


def shown(value: float | str | None) -> str:
    """A perplexity in a table; a word as it is."""
    if value is None:
        return "not run"
    return value if isinstance(value, str) else f"{value:,.2f}" if value < 1e5 else f"{value:.1e}"


def counted(value: float | None) -> str:
    """A whole number in a table."""
    return "-" if value is None else f"{value:,.0f}"


def recovered(source: float | str | None, found: float | str | None) -> str:
    """The share of the source's performance; - without two numbers."""
    if not isinstance(source, int | float) or not isinstance(found, int | float):
        return "-"
    return f"{source / found:.1%}"


def table(corpus: dict[str, Any], results: dict[str, dict[str, Any]]) -> list[str]:
    """The source, then a line for each row; shares of what rows are converted from, and of softmax fine-tuned."""
    measures, first, rows = corpus["measures"], corpus["measures"][0], corpus["rows"]
    compared = {"of the source": results.get(corpus["start"], {}).get(first)}
    if corpus["start"] == SOURCE and any(row["run"] == SOFTMAX for row in rows):
        compared["of softmax, fine-tuned"] = results.get(SOFTMAX, {}).get(first)
    # The paper's source, as a line of its own or as the row that it fine-tuned.
    paper_source = corpus["source"] or next((row["paper"] for row in rows if row["run"] == SOFTMAX), {})
    papers = list(dict.fromkeys(measure for row in rows for measure in row["paper"]))
    converted = f"converted, {first}"
    heads = ["row", "state", converted, *measures, *compared, *(f"paper {measure}" for measure in papers)]
    heads += ["paper, of its source", "updates"]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]

    def add(name: str, run: str, paper: dict[str, Any], shares: list[str]) -> None:
        found = results.get(run, {})
        own = [shown(paper.get(measure, "-")) for measure in papers]
        start = "-" if run == SOURCE else shown(found.get(converted))
        perplexities = [shown(found.get(measure)) for measure in measures]
        cells = [name, counted(found.get("state")), start, *perplexities, *shares[:-1], *own, shares[-1]]
        lines.append("| " + " | ".join([*cells, counted(found.get("updates"))]) + " |")

    add(
        "source" if corpus["start"] == SOURCE else "before fine-tuning",
        SOURCE,
        corpus["source"],
        ["-"] * (len(compared) + 1),
    )
    for row in rows:
        shares = [recovered(source, results.get(row["run"], {}).get(first)) for source in compared.values()]
        measure = next(iter(row["paper"]), None)
        shares.append(recovered(paper_source.get(measure), row["paper"].get(measure)))
        add(row["row"], row["run"], row["paper"], shares)
    return lines


def main(arguments: list[str]) -> None:
    match arguments:
        case ["names", rows, name]:
            print(" ".join(row["run"] for row in read_corpus(Path(rows), name)["rows"]))
        case ["target", rows, name, run]:
            print(target(read_corpus(Path(rows), name), run))
        case ["start" | "checkpoint" as what, rows, name]:
            print(read_corpus(Path(rows), name)[what])
        case ["tokens", rows, name, out]:
            print(tokens(read_corpus(Path(rows), name), Path(out)))
        case ["measures", rows, name]:
            print("\n".join(read_corpus(Path(rows), name)["measures"]))
        case ["csv", rows, name, out]:
            results = read_results(read_corpus(Path(rows), name), Path(out))
            writer = csv.DictWriter(sys.stdout, list(results[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(results)
        case ["table", rows, name, file]:
            print("\n".join(table(read_corpus(Path(rows), name), read_csv(Path(file)))))
        case _:
            sys.exit(
                "usage: rows.py names|start|checkpoint|measures ROWS CORPUS | target ROWS CORPUS NAME | "
                "tokens|csv ROWS CORPUS OUT | table ROWS CORPUS CSV"
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"rows.py: {error}")
