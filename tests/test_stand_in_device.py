"""hf_ga on a device that is not the CPU, on a machine without one: the same gradients, no operand left on the host, no waiting.

The device is `stand_in_device.py`. What it cannot show: kernels, rounding, memory and speed of a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import runs
import stand_in_runs
import stand_in_worker

LIMIT = 400  # seconds; a script takes 60 to 90
SAME, ANOTHER = helpers.FLOOR, 0.5  # relative errors of a gradient: rounding (4e-7 was seen), and that of another window (1.2)
# Cases whose loss counts on the device, so that its number has to be waited for: how often in a micro-batch.
COUNTED_THERE = {"own loss": 1}
MICRO_BATCHES = 12  # of the three windows of a case
ASKED_BY_ITSELF = {"width"} if helpers.BEFORE_5_23 else set()  # XLNet made a mask on the host


def found_by(script, folder: Path) -> dict:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "false"}
    command = [sys.executable, script.__file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return found_by(stand_in_worker, tmp_path_factory.mktemp("there"))


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, found_by(stand_in_runs, folder)


pytestmark = pytest.mark.launch


@pytest.mark.parametrize("name", stand_in_worker.CASES)
def test_gradients_are_those_of_the_cpu(name, found):
    """With dropout, of every window of an epoch."""
    case = found[name]
    assert case["error"] < SAME and case["error of another window"] > ANOTHER
    assert case["packed"] == ("packed" in name)


@pytest.mark.parametrize("name", stand_in_worker.CASES)
def test_no_window_waits_for_the_device(name, found):
    allowed = (COUNTED_THERE.get(name, 0) + (name in ASKED_BY_ITSELF)) * MICRO_BATCHES
    assert len(found[name]["waits"]) == allowed, "\n".join(found[name]["waits"])


@pytest.mark.parametrize("name", stand_in_worker.CASES)
def test_evaluations_agree(name, found):
    case = found[name]
    assert case["results"] == pytest.approx(case["results on the CPU"], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in stand_in_worker.CASES if name not in ("router", *COUNTED_THERE)])
def test_evaluations_wait_once_they_are_done(name, found):
    """Each batch's sum is read when all batches are computed."""
    waits, batches = found[name]["waits of evaluation"], found[name]["forwards of evaluation"]
    early = [wait for wait in waits if "_share_of" in wait and name not in ASKED_BY_ITSELF]
    assert not early and sum("_own_shares" in wait and "_share_of" not in wait for wait in waits) == batches, "\n".join(waits)


@pytest.mark.parametrize("clips", [True, False])
def test_a_step_waits_once_for_the_device(clips, found):
    """To see whether loss and gradient are finite, before the optimizer's step: what is logged of it is known then."""
    waits = found["steps"][0 if clips else 1]
    assert len(waits) == 2 and all(len(of_step) == 1 and "_is_finite" in of_step[0] for of_step in waits), waits


def test_answers_are_read_at_once(found):
    """Start and end logits of all samples: two copies to the host."""
    assert len(found["answers"]) == 2, found["answers"]


def test_the_stand_in_sees_what_waits_and_what_is_mixed(found):
    """Controls: `loss.item()` for each micro-batch, and operands on two devices."""
    assert sum("usual_loop" in wait.split(" < ")[2] for wait in found["usual loop"]) >= 4
    assert "Expected all tensors to be on the same device" in found["mixed"]


def test_the_check_of_equivalence_runs_there(found):
    """Against float64, and a mean of means fails it."""
    assert found["equivalence"]["hf_ga"]["passed"], found["equivalence"]["hf_ga"]["text"]
    assert "in float64" in found["equivalence"]["hf_ga"]["text"]
    assert not found["equivalence"]["mean of means"]["passed"]


def test_exact_trainer_runs_there(found):
    """With the same losses for two sizes of micro-batches, and no waiting in its forwards."""
    losses = found["trainers"]["losses"]
    assert len(losses["2"]) == 2 and losses["2"] == pytest.approx(losses["4"], rel=1e-6)
    assert found["trainers"]["waits"] == []


@pytest.mark.parametrize("name", runs.JOBS)
def test_every_task_trains_there_as_on_the_cpu(name, whole_runs):
    """Whole runs with evaluations and checkpoints: loading, training, saving. Weights up to rounding, of which Adam makes much."""
    folder, waits = whole_runs
    there, on_cpu = folder / f"{name} there", folder / f"{name} on the CPU"
    moved = runs.relative_distance(on_cpu / "checkpoint-3", on_cpu / "checkpoint-2")  # by one step; a hundredth of it was seen
    assert runs.relative_distance(there / "checkpoint-3", on_cpu / "checkpoint-3") < moved / 50
    summaries = [json.loads((place / "summary.json").read_text()) for place in (there, on_cpu)]
    assert summaries[0]["test_loss"] == pytest.approx(summaries[1]["test_loss"], rel=1e-6)
    assert [len(of_step) for of_step in waits[name]] == [1] * stand_in_runs.STEPS, waits[name]


def test_a_run_that_was_stopped_there_goes_on_there(whole_runs):
    """Stopped after 5 of 8 steps, two behind a checkpoint: bit for bit the run that was not stopped."""
    folder, waits = whole_runs
    whole, cut = (json.loads((folder / name / "summary.json").read_text()) for name in ("whole", "cut"))
    assert whole["weights_sha256"] == cut["weights_sha256"] and whole["steps"] == 8
    assert len(waits["after the stop"]) == 5
