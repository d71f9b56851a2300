"""A table of several language models on one text, and their validation curves.

Perplexity per word spreads the loss of all tokens over words and line ends, and so can be compared between
vocabularies; perplexity per token cannot.
"""

from pathlib import Path
from typing import Any

from commands import run
from log import read_json
from prepare import count
from recipe import Model
from tables import markdown, spread

from reports import lengths
from reports.files import Run, read_run, save, show

HEADS = {"perplexity": "ppl", "loss_base_2": "bits"}


def write(out: Path, models: list[Model], measure: str, text: Path | None) -> None:
    """Write results.csv with a row for each run, and table.md with one for each model, the mean of its seeds."""
    runs = {model: read_run(model.folder) for model in models}
    for model, found in runs.items():
        if found.diverged:
            print(f"{model.label} is not in the table, it diverged: {found.diverged}.")
    finished = {model: found for model, found in runs.items() if found.updates is not None and not found.diverged}
    if not finished:
        return
    rows = [read_row(model, found, measure, text) for model, found in finished.items()]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    rows = [{head: row.get(head, "") for head in heads} for row in rows]
    logs = [f"{model.label}={model.folder / 'train.log'}" for model in finished]
    run("fwp-plot", *logs, "--out", out / "curves.png")
    lines = table(rows, [head for head in heads if head.startswith(("valid", "test"))])
    for model in finished:
        if found := lengths.table(model.folder):
            lines += ["", f"{model.label}:", "", *found]
    save(out, "results", rows, lines, "curves.png")


def read_row(model: Model, found: Run, measure: str, text: Path | None) -> dict[str, Any]:
    """Return the numbers of a run, from all its evaluations of valid and test."""
    files = sorted(
        (path.stem for path in model.folder.glob("*.json")), key=lambda name: (name.startswith("test"), name)
    )
    names = [name for name in files if name.partition(" ")[0] in ("valid", "test")]
    results = {name: read_json(model.folder / f"{name}.json") for name in names}
    row = {"model": model.name, "seed": "" if model.seed is None else model.seed, "parameters": found.parameters}
    row |= {f"{name} {HEADS[measure]}": result[measure] for name, result in results.items()}
    if text:
        row |= {
            f"{name}, per word": per_word(result, text / f"{name.split()[0]}.txt") for name, result in results.items()
        }
    return row | {"updates": found.updates, "hours": round(found.hours or 0, 3)}


def per_word(result: dict[str, Any], text: Path) -> float:
    return float(2 ** (result["loss_base_2"] * result["tokens"] / count(text)))


def table(rows: list[dict[str, Any]], measured: list[str]) -> list[str]:
    """Return a row for each model: mean and deviation of its seeds."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    heads = ["model", "parameters", *measured, "updates", "hours"]
    lines = []
    for name in names:
        seeds = [row for row in rows if row["model"] == name]
        cells = [mean([row[head] for row in seeds], 1 if "per word" in head else 2) for head in measured]
        first, hours = seeds[0], sum(row["hours"] for row in seeds)
        said = f"{name}, {len(seeds)} seeds" if len(seeds) > 1 else name
        lines.append([said, f"{first['parameters']:,}", *cells, f"{first['updates']:,}", f"{hours:.2f}"])
    return markdown(heads, lines)


def mean(values: list[Any], digits: int) -> str:
    known = [float(value) for value in values if value != ""]
    return spread(known, digits) if known else show(None)
