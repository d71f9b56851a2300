"""The columns of Dai et al. 2019, Table 6, from the evaluations of a row by `run.sh eval`.

    python recipes/wikitext103/attention_lengths.py runs/wikitext103/ablation/recurrent

PPL init is that of the lengths of training, PPL best the lowest of the attention lengths tried, Attn Len the shortest
that has it to two digits. It is chosen on the validation set.
"""

import json
import sys
from pathlib import Path


def table(run: Path) -> list[str]:
    """The lines of the table of a run; OSError where it has not been evaluated."""
    lengths = [int(path.stem.split()[-1]) for path in run.glob("valid attention *.json")]
    if not lengths:
        raise FileNotFoundError(
            f"{run} has no evaluations by attention length: run `run.sh eval --conf` of its row first"
        )
    best = min(lengths, key=lambda length: (round(perplexity(run, f"valid attention {length}"), 2), length))
    lines = ["| split | PPL init | PPL best | Attn Len |", "| --- | ---: | ---: | ---: |"]
    for split in ("valid", "test"):
        found = [perplexity(run, f"{split} {label}") for label in ("init", f"attention {best}")]
        lines.append(f"| {split} | {found[0]:.2f} | {found[1]:.2f} | {best} |")
    return lines


def perplexity(run: Path, name: str) -> float:
    """That of an evaluation by its name."""
    result: float = json.loads((run / f"{name}.json").read_text(encoding="utf-8"))["perplexity"]
    return result


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python recipes/wikitext103/attention_lengths.py OUT/ablation/ROW")
    try:
        print("\n".join(table(Path(sys.argv[1]))))
    except OSError as error:
        sys.exit(f"attention_lengths.py: {error}")
