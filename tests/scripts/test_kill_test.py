"""scripts/kill_test.py: real kills end as the undisturbed run does, and its comparison sees a run
that does not.
"""

import shutil
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import kill_test
import pytest
import torch
from accelerate.state import AcceleratorState
from forked import FORK

import hf_ga
from hf_ga.finetuning.run import finetune

SCRIPTS = Path(__file__).parents[2] / "scripts"
DOCS = (SCRIPTS.parent / "docs/recovery.md").read_text().splitlines()
COMMANDS = [
    line.partition("#")[0].split()
    for line in DOCS
    if line.startswith("python scripts/kill_test.py")
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with the inputs and a whole run in `undisturbed`."""
    folder = tmp_path_factory.mktemp("kill test")
    kill_test.write_inputs(folder)
    hf_ga.finetune(hf_ga.FinetuneConfig(**kill_test.settings(folder, folder / "undisturbed")))
    return folder


def resumed(folder, output):
    """What is left of the run when only its first checkpoint that was kept is there, and then
    resumed.
    """
    shutil.copytree(folder / "undisturbed", output)
    for name in ("checkpoint-12", "summary.json", "model.safetensors"):
        (shutil.rmtree if (output / name).is_dir() else Path.unlink)(output / name)
    hf_ga.finetune(hf_ga.FinetuneConfig(**kill_test.settings(folder, output)))
    return kill_test.differences(folder / "undisturbed", output)


@pytest.mark.slow("five runs")
def test_a_resumed_run_is_the_same_and_one_without_the_optimizer_is_not(
    undisturbed, tmp_path, monkeypatch
):
    assert resumed(undisturbed, tmp_path / "out") == []
    resume = finetune.resume

    def forgets(run, *args, **kwargs):
        fresh = run.optimizer.state_dict()
        progress = resume(run, *args, **kwargs)
        run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": fresh["state"]})
        return progress

    monkeypatch.setattr(finetune, "resume", forgets)
    found = resumed(undisturbed, tmp_path / "forgets")
    assert any(text.startswith("weights_sha256 ") for text in found)
    assert "model.safetensors differs" in found
    assert any(
        text.startswith("metrics.jsonl has the steps [1, 2, ") and text.endswith("run's")
        for text in found
    )


def test_lines_and_files_are_compared(undisturbed, tmp_path):
    """The speed may be another one."""
    whole = undisturbed / "undisturbed"
    output = tmp_path / "out"
    shutil.copytree(whole, output)
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for damaged, seen in [
        (lines[:4] + lines[5:], "metrics.jsonl has the steps [1, 2, 3, 4, 6,"),
        (lines[:5] + lines[4:], "metrics.jsonl has the steps [1, 2, 3, 4, 5, 5,"),
        (
            [*lines[:4], lines[4].replace('"num_targets": ', '"num_targets": 1'), *lines[5:]],
            "of which [5] differ",
        ),
        ([line.replace('"tokens_per_second": ', '"tokens_per_second": 1') for line in lines], None),
    ]:
        path.write_text("".join(damaged))
        found = kill_test.differences(whole, output)
        assert len(found) == (seen is not None)
        assert all(seen in text for text in found)
    (output / "partial-checkpoint-4").mkdir()
    weights = output / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert kill_test.differences(whole, output) == [
        "best/model.safetensors differs",
        "files in only one of the folders: partial-checkpoint-4",
    ]


@pytest.mark.slow("starts processes, and kills them")
@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd's threads survive no fork")
def test_kills(tmp_path, monkeypatch, capsys):
    """The command of two processes in the docs, shortened; of one:
    promises/test_same_after_a_stop.py. Its server is this process, which has the imports.
    """
    train = kill_test.train

    def train_anew(*arguments: Any) -> None:
        warnings.simplefilter("ignore")
        AcceleratorState._reset_state(True)
        train(*arguments)

    monkeypatch.setattr(kill_test, "train", train_anew)
    monkeypatch.setattr(kill_test, "settings", partial(kill_test.settings, max_steps=6))
    monkeypatch.setattr(kill_test, "SERVER", FORK)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    _, script, *flags = COMMANDS[1]
    flags += ["--kills", "1", "--seed", "3", "--output_dir", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", [script, *flags])
    assert kill_test.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("uninterrupted: ")
    assert lines[-1] == "0 of 1 differ"
