"""Tables of language models: several on one text, and rows next to a paper's tables, as peps/grid.yaml or carried.yaml.

Perplexity per word spreads the loss of all tokens over words and line ends, and so can be compared between
vocabularies; perplexity per token cannot. A run counts as diverged if fairseq-train stopped at a non-finite gradient.
In a grid it also does if its last validation is not finite or worse than `FAR` times its best one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands import run
from data.prepare import count
from flags import read_yaml
from log import read_json, read_training
from model import Model, runs
from pictures import compared_split, draw_carried, draw_grid
from tables import Row, Run, by_model, markdown, mean, named, read_run, row_of, save, show

HEADS = {"perplexity": "ppl", "loss_base_2": "bits"}
FAR = 1.5
# The validation of training reads as training does: in segments, or from the states that training has left. The other
# ways are in evaluation.yaml; a row of a carried state may have another name for the last.
AS_TRAINED = "as trained"
WAYS = (AS_TRAINED, "blocks", "window", "carried")


def write_tables(recipe: Path, out: Path, measure: str, text: Path | None, models: Sequence[Model]) -> None:
    """Write the tables of a recipe of language models: of several models on one text, and of each group of rows.

    A group is a folder conf/GROUP with the rows of GROUP.yaml; its table has all of them, since others may have trained
    some. measure: perplexity, or loss_base_2 for bits. text: folder of texts, for perplexities per word.
    """
    others = list(models)
    for group, write_group in GROUPS.items():
        rows, inside = recipe / f"{group}.yaml", f"{group}/"
        if rows.exists() and any(model.name.startswith(inside) for model in others):
            write_group(rows, out, out / group)
            others = [model for model in others if not model.name.startswith(inside)]
    if others:
        write_compared(out, others, measure, text)


# Several models on one text.


def write_compared(out: Path, models: Sequence[Model], measure: str, text: Path | None) -> None:
    """Write results.csv with a row for each run, and table.md with one for each model, the mean of its seeds."""
    finished = {}
    for model in models:
        found = read_run(model.folder)
        if found.diverged:
            print(f"{model.label} is not in the table, it diverged: {found.diverged}.")
        elif found.updates is not None:
            finished[model] = found
    if not finished:
        return
    rows = [compared_row(model, found, measure, text) for model, found in finished.items()]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    rows = [{head: row.get(head, "") for head in heads} for row in rows]
    logs = [f"{model.label}={model.folder / 'train.log'}" for model in finished]
    run("fwp-plot", *logs, "--out", out / "curves.png")
    lines = by_model(rows, {head: head for head in heads if head.startswith(("valid", "test"))})
    for model in finished:
        if found := attention_lengths(model.folder):
            lines += ["", f"{model.label}:", "", *found]
    save(out, "results", rows, lines, "curves.png")


def compared_row(model: Model, found: Run, measure: str, text: Path | None) -> Row:
    """Return the numbers of a run, from all its evaluations of valid and test."""
    paths = sorted(model.folder.glob("*.json"), key=lambda path: (path.stem.startswith("test"), path.stem))
    results = {path.stem: read_json(path) for path in paths if path.stem.partition(" ")[0] in ("valid", "test")}
    scores = {f"{name} {HEADS[measure]}": result[measure] for name, result in results.items()}
    for name, result in results.items() if text else ():
        bits = result["loss_base_2"] * result["tokens"]
        scores[f"{name}, per word"] = 2 ** (bits / count(text / f"{name.split()[0]}.txt"))
    return row_of(model, found._replace(hours=round(found.hours, 3)), scores)


def attention_lengths(folder: Path) -> list[str]:
    """Return the table of Dai et al. 2019, Table 6; empty if the run was not evaluated by attention length.

    PPL init is that of the training lengths, PPL best the lowest one over attention lengths. Attn Len is the shortest
    length with PPL best to two digits, chosen on the validation set.
    """
    lengths = [int(path.stem.split()[-1]) for path in folder.glob("valid attention *.json") if path.stem[-1].isdigit()]
    if not lengths:
        return []

    def perplexity(name: str) -> float:
        return float(read_json(folder / f"{name}.json").get("perplexity", "nan"))

    best = min(lengths, key=lambda length: (round(perplexity(f"valid attention {length}"), 2), length))
    rows = []
    for split in sorted({path.stem.split()[0] for path in folder.glob("* attention *.json")}, reverse=True):
        found = [perplexity(f"{split} {label}") for label in ("init", f"attention {best}")]
        rows.append([split, *(f"{ppl:.2f}" for ppl in found), best])
    return markdown(["split", "PPL init", "PPL best", "Attn Len"], rows)


# Rows of the papers' tables.


def read_row(run: Run, *labels: str) -> Row:
    """Return the numbers of a training, with the perplexities of its evaluations under the labels."""
    found = {split: run.result(" ".join([split, *labels])).get("perplexity") for split in ("valid", "test")}
    return {**found, "parameters": run.parameters, "updates": run.updates, "hours": run.hours, "diverged": run.diverged}


def said(row: Row) -> str:
    return "diverged" if row.get("diverged") else "not run"


def perplexities(row: Row) -> list[str]:
    """Return those of valid and test for a table, or the words for a missing one."""
    return [show(row.get(split), 1, said(row)) for split in ("valid", "test")]


# Rows of a grid, by rank.


def write_grid(tables: Path, out: Path, folder: Path) -> None:
    """Write grid.csv, grid.png and table.md of the runs in out/grid/RUN."""
    grid, rows = read_yaml(tables, plain=False), []
    for name in runs(tables):
        run = read_run(out / "grid" / name)
        if run.updates is None:
            continue
        if not run.diverged:
            *_, (_, last) = read_training(run.folder / "train.log").curve()
            if not last <= FAR * run.best:
                where = f"ended at a validation perplexity of {last:.1f}, its best was {run.best:.1f}"
                run = run._replace(diverged=where)
        rows.append({"run": name, **read_row(run)})
    if rows:
        grid = with_rows(grid, {row["run"] for row in rows})
        draw_grid(grid, rows, folder / "grid.png")
        save(folder, "grid", rows, grid_lines(grid, rows), "grid.png")


def with_rows(grid: list[dict[str, Any]], ended: set[str]) -> list[dict[str, Any]]:
    """Return the tables with rows that have ended, without those that only share such rows with a complete table."""
    asked = [{row["run"] for row in table["rows"]} for table in grid]
    complete = set().union(*(rows for rows in asked if rows <= ended))
    return [table for table, rows in zip(grid, asked, strict=True) if rows <= ended or rows & ended - complete]


def grid_lines(grid: list[dict[str, Any]], rows: list[Row]) -> list[str]:
    """Return a table of Markdown for each of the papers' tables, ranked by test if the paper has it, else by valid."""
    heads = ["row", "conf/grid/", "valid", "test", "rank", "paper valid", "paper test", "paper rank"]
    outcomes, found, diverged = {row["run"]: row for row in rows}, [], {}
    for table in grid:
        asked, split = table["rows"], compared_split(table)
        outcome, papers = [outcomes.get(row["run"], {}) for row in asked], [row.get(split) for row in asked]
        ours = ranks([paper and (our.get(split) or said(our)) for our, paper in zip(outcome, papers, strict=True)])
        cells = []
        for row, our, rank, paper in zip(asked, outcome, ours, ranks(papers), strict=True):
            theirs = [show(row.get(name), 1) for name in ("valid", "test")]
            cells.append([row["row"], row["run"], *perplexities(our), rank, *theirs, paper])
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


# Rows of a carried state, by its size.


def write_carried(table: Path, out: Path, folder: Path) -> None:
    """Write carried.csv, carried.png and table.md of the runs in out/carried/RUN, or of their seeds there.

    A row of the YAML is a run and the way in which it carries its state. It has the paper's state in millions of
    numbers, and the paper's perplexities, which may be a bound like "> 260". The table shows the validation of
    training, and test perplexities.
    """
    as_trained = [f"{AS_TRAINED}: {split}" for split in ("valid", "test")]
    heads = ["model", "trained", "state", *as_trained, *WAYS[1:], "paper state (M)", "paper valid", "paper test"]
    heads.append("conf/carried/")
    rows, cells, trainings, drawn = [], [], {}, []
    for asked in read_yaml(table, plain=False):
        of_run, carried = out / "carried" / asked["run"], asked.get("evaluated", WAYS[-1])
        runs = [read_run(seed) for seed in sorted(of_run.glob("seed_*")) or [of_run]]
        ways = {way: [carried_row(asked, run, way) for run in runs] for way in (*WAYS[:-1], carried)}
        found = [row for seeds in ways.values() for row in seeds if row["valid"] or row["test"]]
        found += [row for row in ways[carried] if row["diverged"]]
        rows += [row for row in found if row not in rows]  # Transformer-XL has several rows of one training
        ours = [mean([row["test"] for row in seeds if row["test"]], 1) for seeds in ways.values()]
        *_, last = seeds = ways[carried]
        ours[-1] = said(last) if ours[-1] == "-" else ours[-1]
        drawn += [(asked | {"evaluated": way}, row) for way, found in ways.items() for row in found]
        name = named(asked["row"] + (f", {carried}" if carried not in WAYS else ""), seeds)
        paper = [str(asked.get(head, "-")) for head in ("state", "valid", "test")]
        valid = mean([row["valid"] or "" for row in ways[AS_TRAINED]], 1)
        cells.append([name, asked["trained"], show(last["state"], 0), valid, *ours, *paper, f"{asked['run']}.yaml"])
        if last["updates"] is not None:
            size = f": {last['parameters']:,} parameters, {last['updates']:,} updates, {last['hours']:.3f} hours"
            diverged = f" diverged: {last['diverged']}"
            trainings[asked["run"]] = f"- {asked['run']}" + (diverged if last["diverged"] else size)
    if rows:
        draw_carried(drawn, folder / "carried.png")
        lines = [*markdown(heads, cells, left=2), "", *trainings.values()]
        save(folder, "carried", rows, lines, "carried.png")


def carried_row(asked: Row, run: Run, way: str) -> Row:
    """Return the numbers of a run that is evaluated in a way."""
    test, seed = run.result(f"test {way}"), run.folder.name.partition("seed_")[2]
    state = asked.get("numbers", test.get("state_size")) if test else None
    found = read_row(run, way)
    if way == AS_TRAINED and not run.diverged:
        found |= {"valid": run.best, "test": run.test}
    return {"run": asked["run"], "seed": seed, "evaluated": way, "state": state, **found}


# Group of models: the function that reports it.
GROUPS = {"grid": write_grid, "carried": write_carried}
