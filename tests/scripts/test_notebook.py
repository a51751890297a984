"""The notebooks run from top to bottom in kernels of their own, and are kept with their outputs.

`python tests/scripts/test_notebook.py` executes all of them and writes the outputs again.
"""

import re
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
FILES = sorted(FOLDER.glob("*.ipynb"))
NOISE = re.compile(r"[Ww]arning|Traceback|/tmp|/home|/root|/usr|site-packages|%\|")  # warnings, paths of a machine, progress bars


def executed(name: str, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs; of what is printed, stdout only."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=300, record_timing=False, resources={"metadata": {"path": str(folder)}})
    client.execute()
    for cell in code_of(notebook):
        printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        shown = [output for output in cell.outputs if output.output_type != "stream"]
        cell.outputs = [*([nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed else []), *shown]
    notebook.metadata.language_info = {"name": "python"}  # the version is that of whoever ran it
    return notebook


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed_in(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for cell in code_of(notebook) for output in cell.outputs)


def difference_in(notebook: nbformat.NotebookNode) -> float:
    """The relative difference of losses that it prints."""
    (found,) = re.findall(r"largest relative difference of a loss.*: (\S+)", printed_in(notebook))
    return float(found)


@pytest.mark.slow("starts a kernel and trains")
def test_quickstart(tmp_path):
    notebook = executed("quickstart", tmp_path)
    assert difference_in(notebook) < 1e-5 and "step 40: validation loss" in printed_in(notebook)


@pytest.mark.slow("starts a kernel and trains")
def test_own_module(tmp_path):
    notebook = executed("own_module", tmp_path)
    assert difference_in(notebook) < 1e-5 and "the loss of a batch is not the mean over its targets" in printed_in(notebook)


@pytest.mark.slow("starts a kernel and trains")
def test_check_your_step(tmp_path):
    printed = printed_in(executed("check_your_step", tmp_path))
    assert re.findall(r"^(.*): (passed|FAILED)", printed, re.MULTILINE) == [
        ("hf_ga", "passed"),
        ("mean of means", "FAILED"),
        ("by targets", "passed"),
    ]


@pytest.mark.slow("starts a kernel and trains")
def test_two_processes(tmp_path):
    """18 steps, of which every sixth has a short window; two processes are two, and they learn."""
    notebook = executed("two_processes", tmp_path)
    printed = printed_in(notebook)
    assert difference_in(notebook) < 1e-5 and "\n18 steps" in printed
    assert "= 1 process x 5 micro-batches x 4\n" in printed and "= 2 processes x 3 micro-batches x at most 4\n" in printed
    first, last = (float(loss) for loss in re.findall(r"loss (\S+) to (\S+)", printed)[0])
    assert last < first - 0.05


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kept_outputs(file):
    """Every cell was run, in order; there is a plot, and neither warnings nor paths of a machine."""
    cells = code_of(nbformat.read(file, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) or "<img" in output.get("data", {}).get("text/html", "") for output in outputs)
    texts = [output.get("text") or output.data.get("text/plain") for output in outputs]
    assert [found.group() for text in [*texts, *(cell.source for cell in cells)] for found in NOISE.finditer(text)] == []
    assert all(output.get("name") != "stderr" and output.output_type != "error" for output in outputs)


def test_the_notebooks_are_these():
    assert [file.stem for file in FILES] == ["check_your_step", "own_module", "quickstart", "two_processes"]


if __name__ == "__main__":
    for name in sys.argv[1:] or [file.stem for file in FILES]:
        with tempfile.TemporaryDirectory() as empty:
            nbformat.write(executed(name, Path(empty)), FOLDER / f"{name}.ipynb")
