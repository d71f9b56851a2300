"""The notebook runs as it stands, in Jupyter's own kernel, and is committed without outputs."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

PATH = Path(__file__).parents[2] / "recipes/notebook/tour.ipynb"


def test_the_tour_runs_and_is_stored_without_outputs():
    tour = nbformat.read(PATH, as_version=4)
    nbformat.validate(tour)
    codes = [cell for cell in tour.cells if cell.cell_type == "code"]
    assert len(tour.cells) == 10 and codes[0].source.startswith("# Colab: ")
    assert not any(cell.outputs or cell.execution_count for cell in codes)
    NotebookClient(tour, timeout=1200, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    shown = ["".join(str(output.get("text", "")) for output in cell.outputs) for cell in codes]
    assert "kernels True" in shown[1] and "bits per letter" in "".join(shown)
    assert ["image/png" in str(cell.outputs) for cell in codes].count(
        True
    ) == 2  # what the memory stores, and the curve
