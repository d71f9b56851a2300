"""The results of conversion: source, converted, fine-tuned, and the paper's numbers.

A row recovers the share source's perplexity / its own: Mao 2022, Sec. 4.1.4, has 99 % for 14.5 and 14.6.
"""

import statistics
from pathlib import Path
from typing import Any

from log import read_json
from tables import markdown, mean, read_run, show

# The model before conversion, and the same model after as much fine-tuning as the other rows.
SOURCE, SOFTMAX = "source", "softmax"


def read_results(corpus: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Return the results of the source, then of each row that has any; None: not measured."""
    folders = [(row["run"], out / row["run"]) for row in corpus["rows"]]
    folders = [(run, found) for run, folder in folders for found in (folder, *sorted(folder.glob("seed_*")))]
    rows = [read_row(SOURCE, out / SOFTMAX / "converted", corpus["measures"])]
    rows += [read_row(run, folder, corpus["measures"]) for run, folder in folders]
    return [row for row in rows if any(row[name] is not None for name in row.keys() - {"run", "seed"})]


def read_row(run: str, folder: Path, measures: list[str]) -> dict[str, Any]:
    """Return the results of a training, by the columns of the CSV; None if nothing was measured."""
    training, seed = read_run(folder), folder.name.removeprefix("seed_")
    before, after = (read_json(at / f"{measures[0]}.json") for at in (folder / "converted", folder))
    return {
        "run": run,
        "seed": int(seed) if seed != folder.name else None,
        "state": before.get("state_size") or after.get("state_size"),
        "updates": training.updates,
        "hours": training.hours,
        f"converted, {measures[0]}": before.get("perplexity"),
        **{
            name: "diverged" if training.diverged else read_json(folder / f"{name}.json").get("perplexity")
            for name in measures
        },
    }


def shown(value: float | str | None) -> str:
    """Return a perplexity as text for a table; words stay as they are."""
    return f"{value:.1e}" if isinstance(value, float) and value >= 1e5 else show(value, none="not run")


def numbers(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Return the numbers in a column."""
    return [row[name] for row in rows if isinstance(row[name], int | float)]


def table(corpus: dict[str, Any], found: list[dict[str, Any]]) -> list[str]:
    """Return the source, then a line for each row, with the shares of its source and of softmax."""
    seeds: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        seeds.setdefault(row["run"], []).append(row)
    results = {}
    for run, rows in seeds.items():
        means = {name: numbers(rows, name) for name in rows[0]}
        results[run] = {name: statistics.mean(values) if values else rows[0][name] for name, values in means.items()}
    measures, first, rows = corpus["measures"], corpus["measures"][0], corpus["rows"]
    compared = {"of the source": results.get(corpus["start"], {}).get(first)}
    if corpus["start"] == SOURCE and any(row["run"] == SOFTMAX for row in rows):
        compared["of softmax, fine-tuned"] = results.get(SOFTMAX, {}).get(first)
    # The paper's source, as a separate line or as the row that it fine-tuned.
    paper_source = corpus["source"] or next((row["paper"] for row in rows if row["run"] == SOFTMAX), {})
    papers = list(dict.fromkeys(measure for row in rows for measure in row["paper"]))

    def recovered(whole: Any, part: Any) -> str:
        both = isinstance(whole, int | float) and isinstance(part, int | float)
        return f"{whole / part:.1%}" if both else "-"

    def line(name: str, run: str, paper: dict[str, Any], shares: list[str]) -> list[str]:
        row, several = results.get(run, {}), len(seeds.get(run, ())) > 1
        ours = [shown(row.get(measure)) for measure in measures]
        if several:
            name += f", {len(seeds[run])} seeds"
            values = [numbers(seeds[run], measure) for measure in measures]
            # An infinite perplexity has no deviation.
            ours = [mean(v) if v and max(v) < 1e5 else said for v, said in zip(values, ours, strict=True)]
        start = "-" if run == SOURCE else shown(row.get(f"converted, {first}"))
        theirs = [shown(paper.get(measure, "-")) for measure in papers]
        return [
            *(name, show(row.get("state"), 0), start, *ours, *shares[:-1]),
            *(*theirs, shares[-1], show(row.get("updates"), 0)),
        ]

    before = "source" if corpus["start"] == SOURCE else "before fine-tuning"
    lines = [line(before, SOURCE, corpus["source"], ["-"] * (len(compared) + 1))]
    for row in rows:
        shares = [recovered(source, results.get(row["run"], {}).get(first)) for source in compared.values()]
        measure = next(iter(row["paper"]), None)
        shares.append(recovered(paper_source.get(measure), row["paper"].get(measure)))
        lines.append(line(row["row"], row["run"], row["paper"], shares))
    heads = ["row", "state", f"converted, {first}", *measures, *compared]
    return markdown([*heads, *(f"paper {name}" for name in papers), "paper, of its source", "updates"], lines)
