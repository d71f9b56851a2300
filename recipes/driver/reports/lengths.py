"""The columns of Dai et al. 2019, Table 6, from the evaluations of a row of conf/ablation.

PPL init is that of the training lengths, PPL best the lowest one over attention lengths. Attn Len is the shortest
length with PPL best to two digits, chosen on the validation set.
"""

from pathlib import Path

from log import read_json
from tables import markdown


def table(folder: Path) -> list[str]:
    """Return the table of a run; empty if it was not evaluated by attention length."""
    lengths = [int(path.stem.split()[-1]) for path in folder.glob("valid attention *.json") if path.stem[-1].isdigit()]
    if not lengths:
        return []
    best = min(lengths, key=lambda length: (round(perplexity(folder, f"valid attention {length}"), 2), length))
    rows = []
    for split in ("valid", "test"):
        found = [perplexity(folder, f"{split} {label}") for label in ("init", f"attention {best}")]
        rows.append([split, *(f"{ppl:.2f}" for ppl in found), best])
    return markdown(["split", "PPL init", "PPL best", "Attn Len"], rows)


def perplexity(folder: Path, name: str) -> float:
    return float(read_json(folder / f"{name}.json").get("perplexity", "nan"))
