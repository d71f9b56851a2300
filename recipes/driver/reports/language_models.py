"""The report of language models: of a group with its own tables, or a comparison."""

from collections.abc import Callable
from pathlib import Path

from recipe import Model

from reports import comparison, grid, state

# Group of models, conf/GROUP: the function that reports the rows in GROUP.yaml.
GROUPS: dict[str, Callable[[Path, Path, Path], None]] = {"grid": grid.write, "carried": state.write}


def write(recipe: Path, out: Path, models: list[Model], measure: str, text: Path | None) -> None:
    """Write the report of language models: of a group with its own tables, else a comparison.

    measure: perplexity, or loss_base_2 for bits. text: folder of texts, for perplexities per word.
    """
    groups = {model.name.partition("/")[0] for model in models}
    for group, report in GROUPS.items():
        rows = recipe / f"{group}.yaml"
        if group in groups and rows.exists():
            report(rows, out, out / group)  # all existing rows: other processes may have trained some
            models = [model for model in models if not model.name.startswith(f"{group}/")]
    if models:
        comparison.write(out, models, measure, text)
