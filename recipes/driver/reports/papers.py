"""Language models next to a paper's tables: rows of a YAML like peps/grid.yaml or peps/carried.yaml.

A run counts as diverged if fairseq-train stopped at a non-finite gradient. In a grid it also does if its last
validation is not finite or worse than `FAR` times its best one.
"""

from pathlib import Path
from typing import Any

from flags import read_yaml
from log import read_training
from recipe import runs
from tables import Run, markdown, read_run, save, show

FAR = 1.5
Row = dict[str, Any]  # of the CSV: a run, its perplexities per token, the numbers of its training; None = missing


def read_row(run: Run, *labels: str) -> Row:
    """Return the numbers of a training, with the perplexities of its evaluations under the labels."""
    words = " ".join(["", *labels])
    found = {split: run.result(f"{split}{words}").get("perplexity") for split in ("valid", "test")}
    return {**found, **{name: value for name, value in run._asdict().items() if name != "folder"}}


def said(row: Row) -> str:
    return "diverged" if row.get("diverged") else "not run"


def perplexities(row: Row) -> list[str]:
    """Return those of valid and test for a table, or the words for a missing one."""
    return [show(row.get(split), 1, said(row)) for split in ("valid", "test")]


# A grid, by rank.


def write_grid(tables: Path, out: Path, folder: Path) -> None:
    """Write grid.csv and table.md of the runs in out/grid/RUN."""
    grid = read_yaml(tables, plain=False)
    rows = [{"run": run, **read_grid_run(out / "grid" / run)} for run in runs(grid)]
    if rows := [row for row in rows if row["updates"] is not None]:
        save(folder, "grid", rows, grid_lines(grid, rows))


def read_grid_run(folder: Path) -> Row:
    run = read_run(folder)
    if run.updates is not None and not run.diverged:
        training = read_training(folder / "train.log")
        last, best = training.curve()[-1][1], training.best()
        if not last <= FAR * best:
            where = f"ended at a validation perplexity of {last:.1f}, its best was {best:.1f}"
            run = run._replace(diverged=where)
    return read_row(run)


def grid_lines(grid: list[dict[str, Any]], rows: list[Row]) -> list[str]:
    """Return a table of Markdown for each of the papers' tables, ranked by test if the paper has it, else by valid."""
    heads = ["row", "conf/grid/", "valid", "test", "rank", "paper valid", "paper test", "paper rank"]
    outcomes, found, diverged = {row["run"]: row for row in rows}, [], {}
    for table in grid:
        split = "test" if any("test" in row for row in table["rows"]) else "valid"
        outcome = [outcomes.get(row["run"], {}) for row in table["rows"]]
        papers = [row.get(split) for row in table["rows"]]
        ours = ranks([paper and (our.get(split) or said(our)) for our, paper in zip(outcome, papers, strict=True)])
        cells = [
            [
                row["row"],
                row["run"],
                *perplexities(our),
                rank,
                show(row.get("valid"), 1),
                show(row.get("test"), 1),
                paper,
            ]
            for row, our, rank, paper in zip(table["rows"], outcome, ours, ranks(papers), strict=True)
        ]
        diverged |= {x["run"]: f"- {x['run']} diverged: {x['diverged']}" for x in outcome if x.get("diverged")}
        ranked = any(isinstance(paper, float) for paper in papers)  # else it is a table of ours
        width = len(heads) if ranked else 4
        title = f"**{table['table']}**" + (f", ranked by {split}" if ranked else "")
        found += ["", title, "", *markdown(heads[:width], [row[:width] for row in cells], left=2)]
    return [*found[1:], "", *diverged.values()]


def ranks(values: list[float | str | None]) -> list[str]:
    """Return the ranks of perplexities; equal ones share a rank, words stay words, and None is a dash."""
    known = [x for x in values if isinstance(x, float)]
    return [str(1 + sum(y < x for y in known)) if isinstance(x, float) else x or "-" for x in values]


# A carried state, by its size.


def write_carried(table: Path, out: Path, folder: Path) -> None:
    """Write carried.csv and table.md of the runs in out/carried/RUN.

    A row of the YAML is a run under one protocol. It has the paper's state in millions of numbers, and the paper's
    perplexities, which may be a bound like "> 260".
    """
    heads = ["model", "trained", "evaluated", "state", "valid", "test", "paper state (M)", "paper valid", "paper test"]
    rows, cells, trainings = [], [], {}
    for asked in read_yaml(table, plain=False):
        run, protocol = read_run(out / "carried" / asked["run"]), asked["evaluated"]
        test = run.result(f"test {protocol}")
        row = {"run": asked["run"], "evaluated": protocol, "state": asked.get("numbers", test.get("state_size"))}
        row |= {"state": row["state"] if test else None, **read_row(run, protocol)}
        paper = [str(asked.get(name, "-")) for name in ("state", "valid", "test")]
        ours = [show(row["state"], 0), *perplexities(row)]
        cells.append([asked["row"], asked["trained"], protocol, *ours, *paper, f"{asked['run']}.yaml"])
        if run.updates is not None:
            rows.append(row)
            size = f": {run.parameters:,} parameters, {run.updates:,} updates, {run.hours:.3f} hours"
            trainings[asked["run"]] = f"- {asked['run']}" + (f" diverged: {run.diverged}" if run.diverged else size)
    if rows:
        save(folder, "carried", rows, [*markdown([*heads, "conf/carried/"], cells, left=3), "", *trainings.values()])
