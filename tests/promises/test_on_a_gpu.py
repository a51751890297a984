"""The promises on a GPU in float32 (without TF32), bf16 and fp16, and what only a GPU has: compiled
masks, pinned copies, NCCL.

`tests/parallel/test_stand_in_device.py` compares a GPU with the CPU, by the tests of the stand-in.
"""

import copy
import os

import helpers as h
import numpy as np
import pytest
import test_same_on_any_number_of_processes as several_processes
import torch
import two_processes_worker as worker
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from steps import backward_window
from tried import later, tried

import hf_ga
from hf_ga.draws.dropout.masks import apply_dropout_mask, keep_mask, sample_keys
from hf_ga.parallel.prepare import enable_fp16_on_cpu
from hf_ga.rows.packing import Packing
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.lean_forward import LeanForward

DEVICE = torch.device("cuda")  # with "cpu", and without the marks, the same tests run there
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
WINDOW = 16
MODELS = {"GPT-2": (h.gpt2, h.token_samples), "BERT": (h.bert_classifier, h.class_samples)}
SPEED_UPS = {"GPT-2": [LeanForward, ChunkedLoss, Packing], "BERT": [Packing]}
os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # for deterministic kernels; must be set before the first one


@pytest.fixture(params=h.ROUNDING)
def accelerator(request, monkeypatch):
    """As a script has it that was launched in this precision."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(DEVICE.type == "cpu").lower())
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", request.param)
    AcceleratorState._reset_state(True)
    accelerator = Accelerator()
    assert (
        accelerator.device.type == DEVICE.type and torch.get_float32_matmul_precision() == "highest"
    )  # no TF32
    enable_fp16_on_cpu(accelerator)  # on a GPU it does nothing
    yield accelerator
    torch.use_deterministic_algorithms(False)
    AcceleratorState._reset_state(True)


def gradient(accelerator, model, samples, size, speed_ups=None, seed=0):
    """hf_ga's, in micro-batches of `size` samples."""
    prepared = accelerator.prepare(copy.deepcopy(model))
    found = tried(prepared, samples, speed_ups=speed_ups)
    for speed_up in speed_ups or ():
        assert speed_up in found.used, found.left_out
        speed_up._min_padding_ratio = 1.0  # packs however few tokens that saves
    sizes = {
        "per_device_batch_size": size,
        "global_batch_size": WINDOW,
        "shuffle": False,
        "seed": seed,
    }
    (window,) = hf_ga.WindowLoader(samples, h.pad_right, accelerator=accelerator, **sizes)
    assert window.batches[0]["labels"].is_pinned() == (DEVICE.type == "cuda")
    backward_window(accelerator, prepared, later(window))
    return h.divided(
        h.gradients(prepared), h.SCALE if accelerator.mixed_precision == "fp16" else 1.0
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_split_is_the_full_batch(name, accelerator):
    """Oracle: float64 on the CPU, and the full batch in this precision. Negative control: the mean
    of two means.
    """
    build, make_samples = MODELS[name]
    model = build()
    samples = make_samples(WINDOW)
    precision = accelerator.mixed_precision
    batch = h.pad_right(samples)
    parts = [h.pad_right(samples[:2]), h.pad_right(samples[2:])]
    oracle = h.full_batch_gradient(model, batch)
    on_device = copy.deepcopy(model).to(DEVICE)
    full, usual = (
        h.autocast_gradient(precision, on_device, b, [1 / len(b)] * len(b))
        for b in ([batch], parts)
    )
    for size in (WINDOW, 5, 1):
        h.assert_promise_1(
            gradient(accelerator, model, samples, size), full, oracle, h.ROUNDING[precision]
        )
    with pytest.raises(AssertionError, match="all parameters"):
        h.assert_promise_1(usual, full, oracle, h.ROUNDING[precision])


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_the_same_in_every_split(name, accelerator):
    """Oracle: the window as one micro-batch. Also with each speed-up that needs no CPU. Negative
    control: another seed.
    """
    build, make_samples = MODELS[name]
    model = build(0.1)
    samples = make_samples(WINDOW)
    allowed = 4 * h.ROUNDING[accelerator.mixed_precision]
    full = gradient(accelerator, model, samples, WINDOW)
    for size, speed_ups in [
        (5, None),
        (1, None),
        *((4, [speed_up()]) for speed_up in SPEED_UPS[name]),
    ]:
        assert (
            h.relative_error(gradient(accelerator, model, samples, size, speed_ups), full)
            <= allowed
        )
    assert (
        h.relative_error(gradient(accelerator, model, samples, WINDOW, seed=1), full) > 10 * allowed
    )


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 7, 16), 0), ((10, 2, 9, 9), 0), ((7, 5, 8), 1), ((6, 8), None)]
)
def test_masks_are_those_of_the_cpu_bit_for_bit(shape, axis):
    keys = sample_keys(1, 2, np.arange(1 if axis is None else 5))
    x = torch.randn(shape)
    expected, found = (
        keep_mask(k, 12345678901234567890, shape, axis, 0.3) for k in (keys, keys.to(DEVICE))
    )
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(
        apply_dropout_mask(x.to(DEVICE), 0.3, found).cpu(), apply_dropout_mask(x, 0.3, expected)
    )


@pytest.mark.slow("whole runs")
def test_a_killed_run_is_resumed_bit_for_bit(accelerator, tmp_path):
    pytest.importorskip("datasets", reason="whole runs of finetune need datasets")
    import test_same_after_a_stop as after_a_stop

    after_a_stop.check(tmp_path, full_determinism=True)


@pytest.mark.slow("starts two processes")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_two_gpus_train_as_one(accelerator, tmp_path):
    """Over NCCL."""
    found = several_processes.launch("multi_gpu", tmp_path, accelerator.mixed_precision)
    assert (found["processes"], found["kind"]) == (2, "MULTI_GPU")
    assert found["losses"] == pytest.approx(
        worker.train(accelerator)["losses"], rel=10 * h.ROUNDING[accelerator.mixed_precision]
    )
