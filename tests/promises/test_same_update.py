"""Promise 1, same update: the gradient of every split is that of one forward and backward of the
whole global batch.

Oracle: plain PyTorch on all samples of the window at once, in float64. A split may be at most twice
    as far from it as the full batch
in float32 is. Negative control: the usual loop, which divides each micro-batch's mean loss by the
    number of micro-batches.
"""

import helpers as h
import pytest
from accelerate import Accelerator
from steps import backward_window

import hf_ga

pytestmark = pytest.mark.usefixtures("fresh_shell")
WINDOW, SHORT = 16, 5  # samples of the first window, and of the last one of the epoch
MODELS = {
    "GPT-2, mean over tokens": (h.gpt2, h.token_samples),
    "BERT, mean over samples": (h.bert_classifier, h.class_samples),
}
LAYOUTS = {
    "1 x 16": {"per_device_batch_size": 16},
    "4 x 4, by length": {"per_device_batch_size": 4},
    "16 x 1": {"per_device_batch_size": 1},
    "4 x 4, in the order of the epoch": {"per_device_batch_size": 4, "planner": h.by_number(4)},
    "uneven: 6 + 5 + 5": {"per_device_batch_size": 6, "planner": h.by_number(6)},
}


def windows_of(samples, **layout):
    return [
        *hf_ga.WindowLoader(
            samples,
            h.pad_right,
            accelerator=Accelerator(cpu=True),
            global_batch_size=WINDOW,
            **layout,
        )
    ]


@pytest.mark.parametrize("name", MODELS)
def test_every_split_is_the_full_batch(name):
    build, make_samples = MODELS[name]
    model = build()
    samples = make_samples(WINDOW + SHORT)
    for layout in LAYOUTS.values():
        for window, size in zip(windows_of(samples, **layout), (WINDOW, SHORT), strict=True):
            model.zero_grad()
            backward_window(Accelerator(cpu=True), model, window)
            full_batch = h.pad_right([samples[i] for i in window.sample_ids])
            assert len(window.sample_ids) == size
            oracle = h.full_batch_gradient(model, full_batch)
            in_float32 = h.full_batch_gradient(model, full_batch, model.dtype)
            h.assert_promise_1(h.gradients(model), in_float32, oracle)


@pytest.mark.parametrize("window", [0, 1], ids=["full window", "short last window"])
def test_the_usual_loop_fails_the_same_comparison(window):
    model = h.gpt2()
    samples = h.token_samples(WINDOW + SHORT)
    split = windows_of(samples, **LAYOUTS["4 x 4, in the order of the epoch"])[window]
    full_batch = h.pad_right([samples[i] for i in split.sample_ids])
    usual = h.naive_gradient(model, [m.batch for m in split.micro_batches], accumulation_steps=4)
    assert h.relative_error(usual, h.full_batch_gradient(model, full_batch)) > 1e-2
