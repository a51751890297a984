"""The notebook runs from top to bottom in a kernel of its own, and shows what it says."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FILE = Path(__file__).parent.parent / "notebooks/quickstart.ipynb"


@pytest.mark.launch
def test_quickstart_runs(tmp_path):
    notebook = nbformat.read(FILE, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2  # the run's curves, the three layouts
    printed = "".join(output.get("text", "") for output in outputs)
    assert "largest relative difference" in printed and "tags in the last window" in printed
    assert "eval_accuracy" in str(outputs)


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(FILE, as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
