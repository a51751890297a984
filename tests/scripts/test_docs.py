"""The pages that are generated or collected are complete and true, and the site builds without a
warning.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import generate_cli
import numpy as np
import pytest
import torch
from documented_loop import reset_states
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def loop(loss_of):
    """A loop of `hf_ga.Accelerator`: windows of 8 samples in 4 micro-batches."""
    reset_states()
    torch.manual_seed(0)
    accelerator = hf_ga.Accelerator(gradient_accumulation_steps=4)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(32, 5), torch.randint(3, (32,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    for x, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, labels))
            optimizer.step()
            optimizer.zero_grad()


def mean(model, x, labels):
    return nn.functional.cross_entropy(model(x), labels)


def constant_divisor(model, x, labels):
    return nn.functional.cross_entropy(model(x), labels, reduction="sum") / 100


def noise_of_numpy(model, x, labels):
    return mean(model, x + torch.tensor(np.random.rand(*x.shape), dtype=x.dtype), labels)


@pytest.mark.parametrize(
    ("kind", "loss_of"),
    [(errors.LossNotAdditive, constant_divisor), (errors.UnkeyedRandomness, noise_of_numpy)],
)
def test_the_messages_are_real(kind, loss_of):
    """Word for word, but for the numbers in them."""
    with pytest.raises(kind) as caught:
        loop(loss_of)
    assert without_numbers(str(caught.value)) in without_numbers(TROUBLES), str(caught.value)


def without_numbers(text):
    return re.sub(r"\d[\d.e+-]*", "N", text)


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
