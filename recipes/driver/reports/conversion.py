"""The results of conversion: source, converted, fine-tuned, and the paper's numbers.

A row recovers the share source's perplexity / its own: Mao 2022, Sec. 4.1.4, has 99 % for 14.5 and 14.6.
"""

import statistics
from pathlib import Path
from typing import Any

from log import read_json, read_training
from tables import markdown, spread

# The model before conversion, and the same model after as much fine-tuning as the other rows.
SOURCE, SOFTMAX = "source", "softmax"


def read_measure(folder: Path, measure: str, what: str = "perplexity") -> Any:
    """Return a number that fwp-eval-lm wrote into a folder; None: it was not run."""
    return read_json(folder / f"{measure}.json").get(what)


def read_results(corpus: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Return the results of the source, then of each row that has any; None: not measured."""
    measures, first = corpus["measures"], corpus["measures"][0]
    source = out / SOFTMAX / "converted"
    found = [
        {
            "run": SOURCE,
            "seed": None,
            "state": read_measure(source, first, "state_size"),
            "updates": None,
            "hours": None,
            f"converted, {first}": None,
            **{measure: read_measure(source, measure) for measure in measures},
        }
    ]
    for name in (row["run"] for row in corpus["rows"]):
        for folder in (out / name, *sorted((out / name).glob("seed_*"))):
            found.append({"run": name} | read_row(folder, measures))
    return [
        row for row in found if any(value is not None for name, value in row.items() if name not in ("run", "seed"))
    ]


def read_row(folder: Path, measures: list[str]) -> dict[str, Any]:
    """Return the results of a training, by the columns of the CSV; None if nothing was measured."""
    diverged = (folder / "diverged").exists()
    training = read_training(folder / "train.log") if diverged or (folder / "trained").exists() else None
    row = {
        "seed": int(folder.name.removeprefix("seed_")) if folder.name.startswith("seed_") else None,
        "state": read_measure(folder / "converted", measures[0], "state_size")
        or read_measure(folder, measures[0], "state_size"),
        "updates": training and training.updates,
        "hours": training and training.hours,
        f"converted, {measures[0]}": read_measure(folder / "converted", measures[0]),
    }
    return row | {m: "diverged" if diverged else read_measure(folder, m) for m in measures}


def shown(value: float | str | None) -> str:
    """Return a perplexity as text for a table; words stay as they are."""
    if value is None:
        return "not run"
    return value if isinstance(value, str) else f"{value:,.2f}" if value < 1e5 else f"{value:.1e}"


def counted(value: float | None) -> str:
    """Return a whole number as text for a table."""
    return "-" if value is None else f"{value:,.0f}"


def recovered(source: float | str | None, found: float | str | None) -> str:
    """Return the share of the source's performance; - without two numbers."""
    if not isinstance(source, int | float) or not isinstance(found, int | float):
        return "-"
    return f"{source / found:.1%}"


def mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for the seeds of a run: the means of its numbers."""
    values = {name: numbers(rows, name) for name in rows[0]}
    return {name: statistics.mean(found) if found else rows[0][name] for name, found in values.items()}


def numbers(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Return the numbers in a column."""
    return [row[name] for row in rows if isinstance(row[name], int | float)]


def table(corpus: dict[str, Any], found: list[dict[str, Any]]) -> list[str]:
    """Return the source, then a line for each row, with the shares of its source and of softmax."""
    by_run: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        by_run.setdefault(row["run"], []).append(row)
    results = {name: rows[0] if len(rows) == 1 else mean(rows) for name, rows in by_run.items()}
    measures, first, rows = corpus["measures"], corpus["measures"][0], corpus["rows"]
    compared = {"of the source": results.get(corpus["start"], {}).get(first)}
    if corpus["start"] == SOURCE and any(row["run"] == SOFTMAX for row in rows):
        compared["of softmax, fine-tuned"] = results.get(SOFTMAX, {}).get(first)
    # The paper's source, as a separate line or as the row that it fine-tuned.
    paper_source = corpus["source"] or next((row["paper"] for row in rows if row["run"] == SOFTMAX), {})
    papers = list(dict.fromkeys(measure for row in rows for measure in row["paper"]))
    converted = f"converted, {first}"
    heads = ["row", "state", converted, *measures, *compared, *(f"paper {measure}" for measure in papers)]
    heads += ["paper, of its source", "updates"]
    lines = []

    def add(name: str, run: str, paper: dict[str, Any], shares: list[str]) -> None:
        row = results.get(run, {})
        own = [shown(paper.get(measure, "-")) for measure in papers]
        start = "-" if run == SOURCE else shown(row.get(converted))
        perplexities = [shown(row.get(measure)) for measure in measures]
        if len(seeds := by_run.get(run, [])) > 1:
            name += f", {len(seeds)} seeds"
            found = [numbers(seeds, measure) for measure in measures]
            # An infinite perplexity has no deviation.
            perplexities = [
                spread(values) if values and max(values) < 1e5 else said
                for values, said in zip(found, perplexities, strict=True)
            ]
        cells = [name, counted(row.get("state")), start, *perplexities, *shares[:-1], *own, shares[-1]]
        lines.append([*cells, counted(row.get("updates"))])

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
    return markdown(heads, lines)
