"""The notebooks run from top to bottom in kernels of their own, and show what they say."""

import json
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
FILES = sorted(FOLDER.glob("*.ipynb"))


def executed(name, folder):
    """The outputs of all cells, and what was printed."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return outputs, "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow("starts processes")
def test_quickstart_runs(tmp_path):
    outputs, printed = executed("quickstart", tmp_path)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2  # the run's curves, the three layouts
    assert "largest relative difference" in printed and "tags in the last window" in printed
    assert "eval_accuracy" in str(outputs)


@pytest.mark.slow("starts processes")
def test_two_processes_from_a_notebook_are_the_same_run(tmp_path):
    """18 steps, of which every sixth has a short window; two processes are two, and they learn."""
    _, printed = executed("two_processes", tmp_path)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert "20 samples = 1 process(es)" in one["layout"] and "20 samples = 2 process(es)" in two["layout"]
    assert len(one["losses"]) == len(two["losses"]) == 18 and one["losses"][-1] < one["losses"][0] - 0.05
    off = np.abs(np.array(two["losses"]) / np.array(one["losses"]) - 1).max()
    assert off < 1e-5 and f"difference of a loss: {off:.1e}" in printed


def test_the_notebooks_are_kept_without_outputs():
    assert {file.stem for file in FILES} >= {"quickstart", "two_processes"}
    for file in FILES:
        cells = nbformat.read(file, as_version=4).cells
        assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")
