"""The pages that are generated or collected are complete and true, and the site builds without a
warning.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import generate_cli
import pytest

import hf_ga
from hf_ga import errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TROUBLES = " ".join((DOCS / "troubleshooting.md").read_text().split())


def test_the_flags_are_those_of_the_configuration():
    """After a change of an option: python docs/generate_cli.py"""
    page = generate_cli.cli_page()
    assert page == (DOCS / "cli.md").read_text()
    assert (
        "## Model\n" in page
        and "- `--assert` (off): " in page
        and page.count("`--output_dir`") == 2
    )


def test_every_error_is_explained():
    classes = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and name not in ("HfGaError", "NoLoss")  # a LossNotAdditive
    ]
    assert [name for name in classes if f"## {name} " not in TROUBLES] == [] and len(classes) == 12


def build(root, site):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow("builds the site")
def test_the_site_builds_without_a_warning(tmp_path):
    result = build(ROOT, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    api = (tmp_path / "api/index.html").read_text()
    assert [name for name in hf_ga.__all__ if f'id="hf_ga.{name}"' not in api] == []
    assert "Any split of a global batch is the full batch" in (tmp_path / "index.html").read_text()


@pytest.mark.slow("builds the site again")
def test_a_broken_link_and_a_public_name_without_docs_fail_the_build(tmp_path):
    for name in (
        "mkdocs.yml",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs",
        "notebooks",
        "hf_ga",
    ):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").write_text(
        (ROOT / "README.md").read_text() + "\n[a page](docs/missing.md)\n"
    )
    api = tmp_path / "docs/api.md"
    api.write_text(api.read_text().replace("::: hf_ga.train_step\n", ""))
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode == 1
    assert (
        "missing.md" in result.stderr
        and "train_step is missing or has no docstring" in result.stderr
    ), result.stderr
