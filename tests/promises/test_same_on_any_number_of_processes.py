"""Promise 4, same on any number of processes: two processes train as one does.

They are forked, with the environment of `accelerate launch`, whose starts would take most of the
time. Started by it: tests/run/test_run.py, tests/finetuning/run/test_finetune_processes.py, and, on
GPUs, `launch`.

Oracle: the same training on one process. Negative control: the mean over processes of their own
    mean losses.
"""

import json
import sys
from pathlib import Path

import launching
import pytest
import two_processes_worker as worker
from accelerate import Accelerator
from forked import on_two_ranks, without_errors

PROFILES = Path(__file__).parents[2] / "accelerate_configs"


def launch(profile, folder, precision="no"):
    """What the worker finds on two processes."""
    words = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        PROFILES / f"{profile}.yaml",
    ]
    words += ["--num_processes", "2", "--mixed_precision", precision, "--main_process_port", "0"]
    done = launching.run([*words, worker.__file__, folder / "found.json"], None, 240)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_two_processes_train_as_one():
    """Under DDP; under FSDP: tests/parallel/test_processes.py."""

    def work() -> dict:
        return worker.found_with(Accelerator(cpu=True))

    found, _ = without_errors(on_two_ranks(work))
    assert (found["processes"], found["kind"]) == (2, "MULTI_CPU")
    alone = worker.train(Accelerator(cpu=True))
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert min(alone["norms"]) > worker.MAX_NORM  # every gradient was clipped
    assert found["usual loss"] != pytest.approx(worker.usual_loss(Accelerator(cpu=True)), rel=1e-4)
