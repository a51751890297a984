"""The package's design: allowed imports, and no second loop over micro-batches."""

import doctest
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from count_loops import loops

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_ga"


def sources(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def test_examples_in_docstrings_give_what_they_show():
    for path in PACKAGE.rglob("*.py"):
        if ">>> " in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            assert doctest.testmod(importlib.import_module(name)).failed == 0, name


def test_no_import_circles():
    # An import for annotations only makes no circle at run time.
    graph = grimp.build_graph("hf_ga", exclude_type_checking_imports=True)
    circles = []
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            if back := graph.find_shortest_chain(imported, module):
                circles.append(" -> ".join((module, *back)))
    assert not circles, "\n".join(circles)


def lint(root: Path) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as main; main()",
        "--no-cache",
    ]
    return subprocess.run(
        command, cwd=root, env={"PYTHONPATH": str(root), "PATH": ""}, capture_output=True, text=True
    )


def test_imports_go_down_only():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("order/order.py", "import hf_ga.recovery.files"),
        ("rows/packing.py", "import hf_ga.parallel.processes"),
        ("finetuning/data/encoding/masking.py", "import hf_ga.finetuning.run.flags.config"),
        ("trainer/checks.py", "import hf_ga.finetuning.data.tasks"),
        (
            "errors.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hf_ga.order.plan",
        ),
    ],
)
def test_upward_import_breaks_the_contract(tmp_path, module, line):
    shutil.copytree(PACKAGE, tmp_path / "hf_ga", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "hf_ga" / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint(tmp_path)
    importer = "hf_ga." + module.removesuffix(".py").replace("/", ".")
    assert result.returncode == 1
    assert f"{importer} -> {line.split()[-1]}" in result.stdout, result.stdout + result.stderr


def test_no_loop_over_micro_batches_but_the_engines():
    """Whose forward and backward are calls of the engine."""
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sources(PACKAGE)
        for line, name in loops(path.read_text())
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("def f():\n    for batch in window:\n        model(**batch).loss.backward()", 1),
        (
            "def f():\n    while batches:\n        loss = term(module(batches.pop()))\n        "
            "accelerator.backward(loss)",
            1,
        ),
        (
            "def f():\n    for batch in window:\n        for part in batch:\n            "
            "self.model(part).sum().backward()",
            1,
        ),
        ("def f():\n    for batch in window:\n        model(**batch)", 0),
        ("def f():\n    model(**batch).loss.backward()", 0),
    ],
)
def test_loops_are_counted(source, number):
    assert len(loops(source)) == number
