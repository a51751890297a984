"""hf_ga on a device that is not the CPU: the same gradients, no operand left on the host, no
waiting.

The device is `stand_in_device.py` and, in the tests marked `gpu`, a real one. What the stand-in
cannot show: kernels, rounding, memory and speed of a GPU.
"""

import json
import os
import subprocess
import sys

import helpers as h
import pytest
import torch

# It trains whole runs, which need the packages of fine-tuning.
stand_in_worker = pytest.importorskip("stand_in_worker", exc_type=ImportError)

LIMIT = 400  # seconds
SAME, ANOTHER = (
    h.FLOOR,
    0.5,
)  # relative errors of a gradient: rounding (4e-7 was seen), and that of another window (1.2)
WIDER = {"standin": 1, "cuda": 100}  # a GPU rounds in another way
COUNTED_THERE = (
    "own loss",
)  # whose number of targets is computed on the device, and has to be waited for
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["standin", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]

pytestmark = pytest.mark.slow("starts processes")


@pytest.fixture(scope="module")
def found_on(tmp_path_factory):
    """device -> what the worker found there."""
    known = {}

    def found(device: str) -> dict:
        if device not in known:
            folder = tmp_path_factory.mktemp(device)
            environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "false"}
            command = [sys.executable, stand_in_worker.__file__, str(folder), device]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
            )
            known[device] = done.returncode, done.stderr[-4000:], folder / "found.json"
        code, said, file = known[device]
        assert code == 0, said
        return json.loads(file.read_text())

    return found


@pytest.mark.parametrize("name", stand_in_worker.CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_and_evaluations_are_those_of_the_cpu(device, name, found_on):
    """With dropout, of every window of an epoch."""
    case = found_on(device)[name]
    assert case["error"] < SAME * WIDER[device]
    assert case["error of another window"] > ANOTHER
    assert case["results"] == pytest.approx(case["results on the CPU"], rel=1e-6 * WIDER[device])


@pytest.mark.parametrize("device", DEVICES)
def test_the_check_of_equivalence_and_exact_trainer_run_there(device, found_on):
    found = found_on(device)
    assert found["equivalence"]["passed"], found["equivalence"]["text"]
    losses = found["trainers"]["losses"]
    assert len(losses["2"]) == 2
    assert losses["2"] == pytest.approx(losses["4"], rel=1e-6 * WIDER[device])


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_there_is_that_on_the_cpu_and_goes_on_after_a_stop(device, found_on):
    """Loading, training, evaluating, saving. Weights up to rounding, of which Adam makes much; bit
    for bit when resumed.
    """
    found = found_on(device)["runs"]
    assert found["distance"] < found["of one step"] / 50 * WIDER[device] ** 0.5
    assert found["stopped"]
    assert found["cut"] == found["whole"]


@pytest.mark.parametrize("name", stand_in_worker.CASES)
def test_no_window_waits_for_the_device(name, found_on):
    case = found_on("standin")[name]
    waits = case["waits"]
    if name in COUNTED_THERE:
        assert 0 < len(waits) <= case["micro-batches"], "\n".join(waits)
    else:
        assert not waits, "\n".join(waits)


@pytest.mark.parametrize(
    "name", [name for name in stand_in_worker.CASES if name not in ("router", *COUNTED_THERE)]
)
def test_evaluations_wait_once_they_are_done(name, found_on):
    """Each batch's sum is read when all batches are computed."""
    case = found_on("standin")[name]
    waits = case["waits of evaluation"]
    early = [wait for wait in waits if "_in_parts" in wait]
    assert not early and sum("_in_parts" not in wait for wait in waits) == case["forwards"], (
        "\n".join(waits)
    )


def test_a_step_waits_once_for_the_device(found_on):
    """To see whether loss and gradient are finite, before the optimizer's step: what is logged of
    it is known then.
    """
    waits = found_on("standin")["steps"]
    assert len(waits) == 2 and all(
        len(of_step) == 1 and "_loss_and_norm_on_host" in of_step[0] for of_step in waits
    ), waits


def test_exact_trainer_does_not_wait_in_its_forwards(found_on):
    assert found_on("standin")["trainers"]["waits"] == []


def test_the_stand_in_sees_what_waits_and_what_is_mixed(found_on):
    """Controls: `loss.item()` for each micro-batch, and operands on two devices."""
    found = found_on("standin")
    assert sum("usual_loop" in wait for wait in found["usual loop"]) >= 4
    assert "Expected all tensors to be on the same device" in found["mixed"]
