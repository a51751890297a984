"""Promise 2, same randomness: order and dropout are functions of (seed, epoch, position), so they
are the same in every split.

Oracle: the window as one micro-batch, with dropout. Negative controls: torch's own dropout, and
    another seed.
"""

from dataclasses import replace
from itertools import chain

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from steps import backward_window

import hf_ga

pytestmark = pytest.mark.usefixtures("fresh_shell")
WINDOW = 16
SAMPLES = h.token_samples(3 * WINDOW)
LAYOUTS = {
    "4 x 4, by length": {"per_device_batch_size": 4},
    "16 x 1": {"per_device_batch_size": 1},
    "uneven: 6 + 5 + 5": {"per_device_batch_size": 6, "planner": h.by_number(6)},
}
MODELS = {"GPT-2": h.gpt2, "BERT, masked LM": h.bert_masked_lm, "T5": h.t5}


def loader(seed=0, **layout):
    sizes = {"global_batch_size": WINDOW, **(layout or {"per_device_batch_size": WINDOW})}
    return hf_ga.WindowLoader(
        SAMPLES, h.pad_right, accelerator=Accelerator(cpu=True), seed=seed, **sizes
    )


def gradient(model, window):
    model.zero_grad()
    backward_window(Accelerator(cpu=True), model, window)
    return h.gradients(model)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_the_same_in_every_split(name):
    model = MODELS[name](dropout=0.1)
    before = h.global_random_states()
    expected = gradient(model, next(iter(loader())))
    for layout in LAYOUTS.values():
        assert h.relative_error(gradient(model, next(iter(loader(**layout)))), expected) < 1e-6
    assert h.global_random_states() == before, "a training forward moved a global random generator"
    window = next(iter(loader()))
    other_masks = gradient(
        model, replace(window, request=replace(window.request, seed=1))
    )  # of the same samples
    assert h.relative_error(other_masks, expected) > 1e-2


def test_dropout_of_torch_differs_between_splits():
    model = h.gpt2(dropout=0.1)
    window = next(iter(loader()))

    def usual(size):
        torch.manual_seed(0)
        samples = [SAMPLES[i] for i in window.sample_ids]
        batches = [h.pad_right(samples[start : start + size]) for start in range(0, WINDOW, size)]
        total = h.num_targets(model, h.pad_right(samples))
        model.zero_grad()
        for batch in batches:  # the right weights, so that only the masks differ
            (h.mean_loss(model, batch) * h.num_targets(model, batch) / total).backward()
        return h.gradients(model)

    assert h.relative_error(usual(4), usual(16)) > 1e-2


def test_order_is_the_same_in_every_split_and_another_in_every_epoch():
    def order(epoch, **layout):
        windows = loader(**layout)
        windows.set_epoch(epoch)
        return [window.sample_ids.tolist() for window in windows]

    for layout in LAYOUTS.values():
        assert order(0, **layout) == order(0)
    for epoch in (0, 1):
        assert sorted(chain(*order(epoch))) == [*range(len(SAMPLES))]
    assert order(0) != order(1)
