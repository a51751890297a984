"""The notebooks run from top to bottom, and are kept with their outputs.

`python tests/scripts/test_notebook.py` executes all of them and writes the outputs again.
"""

import re
import sys
import tempfile
from pathlib import Path

import nbformat
import notebook_worker
import pytest
from forked import run_script
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
FILES = sorted(FOLDER.glob("*.ipynb"))
NOISE = re.compile(
    r"[Ww]arning|Traceback|/tmp|/home|/root|/usr|site-packages|%\|"
)  # warnings, paths of a machine, progress bars


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(name: str, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, in a kernel of its own; of what is printed, stdout only."""
    notebook = read(name)
    client = NotebookClient(
        notebook, timeout=300, record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    for cell in code_of(notebook):
        printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        shown = [output for output in cell.outputs if output.output_type != "stream"]
        cell.outputs = [
            *([nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed else []),
            *shown,
        ]
    notebook.metadata.language_info = {"name": "python"}  # the version is that of whoever ran it
    return notebook


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed_in_a_kernel(name: str, folder: Path) -> str:
    cells = code_of(executed(name, folder))
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


def printed_by_cells(name: str, folder: Path) -> str:
    """Without a kernel, some text replaced."""
    cells = [cell.source for cell in code_of(read(name))]
    for text, change in SHORTER.get(name, {}).items():
        assert sum(text in cell for cell in cells) == 1
        cells = [cell.replace(text, change) for cell in cells]
    return run_script(notebook_worker.__file__, folder, cells)


PRINTED = {
    "check_your_step": ["hf_ga: passed", "mean of means: FAILED", "by targets: passed"],
    "own_module": ["it is a mean, or compares samples"],
    "quickstart": ["step 10: validation loss"],
    # 18 steps, of which every sixth has a short window.
    "two_processes": [
        "18 steps, loss ",
        "= 1 process x 5 micro-batches x 4\n",
        "= 2 processes x 3 micro-batches x at most 4\n",
    ],
}
# Fewer rows and steps than in the outputs that are kept.
SHORTER = {
    "quickstart": {
        "max_steps=40, eval_steps=20": (
            "max_steps=10, eval_steps=5, max_train_samples=640, max_eval_samples=100, "
            "max_predict_samples=100"
        ),
        "epochs=4": "epochs=2",
    },
}


@pytest.mark.slow("starts a kernel and trains")
@pytest.mark.parametrize("name", PRINTED)
def test_the_notebook_runs(name, tmp_path):
    """That which starts processes in a kernel, as the launcher depends on what was imported."""
    run = printed_in_a_kernel if name == "two_processes" else printed_by_cells
    printed = run(name, tmp_path)
    assert all(text in printed for text in PRINTED[name])
    differences = re.findall(r"largest relative difference of a loss.*: (\S+)", printed)
    assert len(differences) == (name != "check_your_step")
    assert all(float(value) < 1e-5 for value in differences)
    assert all(
        float(last) < float(first) - 0.05
        for first, last in re.findall(r"loss ([\d.]+) to ([\d.]+)", printed)
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kept_outputs(file):
    """Each is run above. Every cell was run, in order; there is a plot, and neither warnings nor
    paths of a machine.
    """
    assert file.stem in PRINTED
    cells = code_of(nbformat.read(file, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any(
        "image/png" in output.get("data", {})
        or "<img" in output.get("data", {}).get("text/html", "")
        for output in outputs
    )
    texts = [output.get("text") or output.data.get("text/plain") for output in outputs]
    assert [
        found.group()
        for text in [*texts, *(cell.source for cell in cells)]
        for found in NOISE.finditer(text)
    ] == []
    assert all(
        output.get("name") != "stderr" and output.output_type != "error" for output in outputs
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or [file.stem for file in FILES]:
        with tempfile.TemporaryDirectory() as empty:
            nbformat.write(executed(name, Path(empty)), FOLDER / f"{name}.ipynb")
