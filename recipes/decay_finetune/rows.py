"""The rows of a corpus in rows.yaml, and the table of what became of them: source, converted, fine-tuned.

    python recipes/decay_finetune/rows.py names ROWS CORPUS           # the rows
    python recipes/decay_finetune/rows.py target ROWS CORPUS NAME     # flags of fwp-convert; none: softmax stays
    python recipes/decay_finetune/rows.py tokens ROWS CORPUS          # of a sample in evaluation
    python recipes/decay_finetune/rows.py measures ROWS CORPUS        # lines `SPLIT CONTEXT`
    python recipes/decay_finetune/rows.py table ROWS CORPUS OUT       # Markdown, of the files that run.sh wrote

A row recovers the source's perplexity divided by its own: Mao 2022, Sec. 4.1.4, has 99 % for 14.5 and 14.6.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lm_results import read_training

# The source as a model of this plugin, and after as much fine-tuning as the other rows.
SOFTMAX = "softmax"


def read_corpus(path: Path, name: str) -> dict[str, Any]:
    """What rows.yaml says of a corpus."""
    corpora = yaml.safe_load(path.read_text(encoding="utf-8"))
    if name not in corpora:
        raise ValueError(f"{path} has no corpus {name}: it has {', '.join(corpora)}")
    found: dict[str, Any] = corpora[name]
    return found


def target(corpus: dict[str, Any], name: str) -> str:
    """The flags of `fwp-convert` of a row."""
    rows = {row["run"]: row for row in corpus["rows"]}
    if name not in rows:
        raise ValueError(f"there is no row {name}: there are {', '.join(rows)}")
    return str(rows[name].get("target", ""))


def perplexity(folder: Path, measure: str) -> float | None:
    """What was measured there; None: it was not."""
    file = folder / f"{measure}.json"
    return json.loads(file.read_text(encoding="utf-8"))["perplexity"] if file.exists() else None


def shown(value: float | str | None) -> str:
    """A number of a table; a word as it is."""
    if value is None:
        return "not run"
    return value if isinstance(value, str) else f"{value:,.2f}" if value < 1e5 else f"{value:.1e}"


def recovered(source: float | str | None, found: float | str | None) -> str:
    """The share of the source's performance; - without two numbers."""
    if not isinstance(source, int | float) or not isinstance(found, int | float):
        return "-"
    return f"{source / found:.1%}"


def state_size(folder: Path, measure: str) -> str:
    """Numbers that a sequence needs kept, as fwp-eval-lm counts them."""
    file = folder / f"{measure}.json"
    size = json.loads(file.read_text(encoding="utf-8")).get("state_size") if file.exists() else None
    return "-" if size is None else f"{size:,}"


def updates(folder: Path) -> str:
    """Those of a fine-tuning that has come to its end; -: none has."""
    if not any((folder / end).exists() for end in ("trained", "diverged")):
        return "-"
    return f"{read_training(folder / 'train.log').updates:,}"


def table(corpus: dict[str, Any], out: Path) -> list[str]:
    """The source, then a line for each row."""
    measures = corpus["measures"]
    first, rows = measures[0], corpus["rows"]
    sources = {measure: perplexity(out / SOFTMAX / "converted", measure) for measure in measures}
    tuned = perplexity(out / SOFTMAX, first)
    # The paper's source, as a line of its own or as the row that it fine-tuned.
    paper_source = corpus["source"] or next((row["paper"] for row in rows if row["run"] == SOFTMAX), {})
    paper_measures = list(dict.fromkeys(measure for row in rows for measure in row["paper"]))
    heads = [
        "row", "state", f"converted, {first}", *measures, "of the source", "of softmax, fine-tuned",
        *(f"paper {measure}" for measure in paper_measures), "paper, of its source", "updates",
    ]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    own = [shown(corpus["source"].get(measure, "-")) for measure in paper_measures]
    cells = [
        "source",
        state_size(out / SOFTMAX / "converted", first),
        "-",
        *map(shown, sources.values()),
        "-",
        "-",
        *own,
    ]
    lines.append("| " + " | ".join([*cells, "-", "-"]) + " |")
    for row in rows:
        folder, paper = out / row["run"], row["paper"]
        where = (folder / "diverged").exists()
        ours = {measure: "diverged" if where else perplexity(folder, measure) for measure in measures}
        compared = next(iter(paper), None)
        cells = [
            row["row"],
            state_size(folder / "converted", first),
            shown(perplexity(folder / "converted", first)),
            *map(shown, ours.values()),
            recovered(sources[first], ours[first]),
            recovered(tuned, ours[first]),
            *(shown(paper.get(measure, "-")) for measure in paper_measures),
            recovered(paper_source.get(compared), paper.get(compared)),
            updates(folder),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(arguments: list[str]) -> None:
    match arguments:
        case ["names", rows, name]:
            print(" ".join(row["run"] for row in read_corpus(Path(rows), name)["rows"]))
        case ["target", rows, name, run]:
            print(target(read_corpus(Path(rows), name), run))
        case ["tokens", rows, name]:
            print(read_corpus(Path(rows), name)["tokens"])
        case ["measures", rows, name]:
            print("\n".join(read_corpus(Path(rows), name)["measures"]))
        case ["table", rows, name, out]:
            print("\n".join(table(read_corpus(Path(rows), name), Path(out))))
        case _:
            sys.exit(
                "usage: rows.py names|tokens|measures ROWS CORPUS | target ROWS CORPUS NAME | table ROWS CORPUS OUT"
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"rows.py: {error}")
