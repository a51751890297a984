"""hf_ga on a device that is not the CPU: the same gradients, no operand left on the host, no
waiting.

The device is `stand_in_device.py` and, in the tests marked `gpu`, a real one. What the stand-in
cannot show: kernels, rounding, memory and speed of a GPU.
"""

import json
import os
import re
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


# Where a window waits: once for what its loss divides by, once for the status of all processes; a
# chunked loss waits in each forward for the number of its targets. (transformers makes empty
# tensors on the device, of a cache.)
OF_WINDOW = ("on_host < gradient.py", "_agree_on_groups")
OF_MICRO_BATCH = ("select_rows_with_target", "call_loss_fn")
IGNORED = ("lazy_initialization",)
OF_REHEARSAL = ("_rehearse", "_compare", "loss_sums.py", "weight_check.py", "_narrowest")


def places(waits):
    """Where each wait was, without those of rehearsals."""
    found = []
    for wait in waits:
        frames = [f for f in wait.split(" < ") if "_compile.py" not in f and "eval_frame" not in f]
        innermost = " < ".join(re.sub(r":\d+", "", frame) for frame in frames[:2])
        if not any(part in wait for part in OF_REHEARSAL) and not any(
            part in innermost for part in IGNORED
        ):
            found.append(innermost)
    return found


def count_of(parts, found):
    return sum(any(part in place for part in parts) for place in found)


@pytest.mark.parametrize("name", stand_in_worker.CASES)
def test_a_window_waits_once_for_its_numbers(name, found_on):
    """The first one is computed three times: as planned, with a rehearsal, as planned."""
    case = found_on("standin")[name]
    found = places(case["waits"])
    known = (*OF_WINDOW, *OF_MICRO_BATCH, "check_window")
    assert [place for place in found if not any(part in place for part in known)] == []
    num_computed = case["windows"] + 2
    assert 0 < count_of(OF_WINDOW, found) <= 2 * num_computed
    assert count_of(OF_MICRO_BATCH, found) <= num_computed * case["micro-batches"] / case["windows"]


@pytest.mark.parametrize(
    "name", [name for name in stand_in_worker.CASES if name not in ("router", *COUNTED_THERE)]
)
def test_evaluations_wait_once_they_are_done(name, found_on):
    """Each batch's numbers are read when all batches are computed."""
    case = found_on("standin")[name]
    found = places(case["waits of evaluation"])
    assert found and all("on_host" in place for place in found), found


def test_a_step_waits_for_the_device_a_fixed_number_of_times(found_on):
    """For the numbers of its window, and to see whether loss and gradient are finite, before the
    optimizer's step: what is logged of it is known then.
    """
    for waits in found_on("standin")["steps"]:
        found = places(waits)
        assert sum("_loss_and_norm_on_host" in place for place in found) == 1
        assert count_of(OF_WINDOW, found) == 2
        assert len(found) == 3 + count_of(OF_MICRO_BATCH, found), found


def test_exact_trainer_does_not_wait_in_its_forwards(found_on):
    assert found_on("standin")["trainers"]["waits"] == []


def test_the_stand_in_sees_what_waits_and_what_is_mixed(found_on):
    """Controls: `loss.item()` for each micro-batch, and operands on two devices."""
    found = found_on("standin")
    assert sum("usual_loop" in wait for wait in found["usual loop"]) >= 4
    assert "Expected all tensors to be on the same device" in found["mixed"]
