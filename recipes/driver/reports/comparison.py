"""A table of several language models on one text, and their validation curves.

Perplexity per word spreads the loss of all tokens over words and line ends, and so can be compared between
vocabularies; perplexity per token cannot. A model that was evaluated by attention length also has the columns of Dai et
al. 2019, Table 6: PPL init is that of the training lengths, PPL best the lowest one over attention lengths. Attn Len is
the shortest length with PPL best to two digits, chosen on the validation set.
"""

from pathlib import Path
from typing import Any

from commands import run
from log import read_json
from prepare import count
from recipe import Model
from tables import Run, by_model, markdown, read_run, save

HEADS = {"perplexity": "ppl", "loss_base_2": "bits"}


def write(out: Path, models: list[Model], measure: str, text: Path | None) -> None:
    """Write results.csv with a row for each run, and table.md with one for each model, the mean of its seeds.

    measure: perplexity, or loss_base_2 for bits. text: folder of texts, for perplexities per word.
    """
    finished = {}
    for model in models:
        found = read_run(model.folder)
        if found.diverged:
            print(f"{model.label} is not in the table, it diverged: {found.diverged}.")
        elif found.updates is not None:
            finished[model] = found
    if not finished:
        return
    rows = [read_row(model, found, measure, text) for model, found in finished.items()]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    rows = [{head: row.get(head, "") for head in heads} for row in rows]
    logs = [f"{model.label}={model.folder / 'train.log'}" for model in finished]
    run("fwp-plot", *logs, "--out", out / "curves.png")
    lines = by_model(rows, {head: head for head in heads if head.startswith(("valid", "test"))})
    for model in finished:
        if found := attention_lengths(model.folder):
            lines += ["", f"{model.label}:", "", *found]
    save(out, "results", rows, lines, "curves.png")


def read_row(model: Model, found: Run, measure: str, text: Path | None) -> dict[str, Any]:
    """Return the numbers of a run, from all its evaluations of valid and test."""
    paths = sorted(model.folder.glob("*.json"), key=lambda path: (path.stem.startswith("test"), path.stem))
    results = {path.stem: read_json(path) for path in paths if path.stem.partition(" ")[0] in ("valid", "test")}
    row = {"model": model.name, "seed": "" if model.seed is None else model.seed, "parameters": found.parameters}
    row |= {f"{name} {HEADS[measure]}": result[measure] for name, result in results.items()}
    if text:
        row |= {
            f"{name}, per word": per_word(result, text / f"{name.split()[0]}.txt") for name, result in results.items()
        }
    return row | {"updates": found.updates, "hours": round(found.hours or 0, 3)}


def per_word(result: dict[str, Any], text: Path) -> float:
    return float(2 ** (result["loss_base_2"] * result["tokens"] / count(text)))


def attention_lengths(folder: Path) -> list[str]:
    """Return the table of Dai et al. 2019; empty if the run was not evaluated by attention length."""
    lengths = [int(path.stem.split()[-1]) for path in folder.glob("valid attention *.json") if path.stem[-1].isdigit()]
    if not lengths:
        return []

    def perplexity(name: str) -> float:
        return float(read_json(folder / f"{name}.json").get("perplexity", "nan"))

    best = min(lengths, key=lambda length: (round(perplexity(f"valid attention {length}"), 2), length))
    rows = []
    for split in ("valid", "test"):
        found = [perplexity(f"{split} {label}") for label in ("init", f"attention {best}")]
        rows.append([split, *(f"{ppl:.2f}" for ppl in found), best])
    return markdown(["split", "PPL init", "PPL best", "Attn Len"], rows)
