"""Heads that ignore label 0: any split of a window is the full batch. Oracle: one target at a time in
float64, without the head's own loss. Controls: the usual loop, and the labels of 0 as targets.
"""

import helpers as h
import pytest
import torch
from windows import one_window, window_gradient

SAMPLES = [
    {name: sample[name] for name in ("input_ids", "labels")} for sample in h.token_samples(16)
]


def by_target():
    """(gradients, loss) of the mean over the targets, added up one by one."""
    model = h.positive_tagger().double()
    losses = []
    for sample in SAMPLES:
        scores = model(torch.tensor([sample["input_ids"]])).log_softmax(-1)
        losses += [-scores[i, v] for i, v in enumerate(sample["labels"]) if v > 0]
    loss = sum(losses) / len(losses)
    loss.backward()
    return h.gradients(model), float(loss.detach()), len(losses)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 5, 16])
def test_any_split_is_the_full_batch(micro_batch_size):
    expected, loss, number = by_target()
    in_float32 = h.full_batch_gradient(
        h.positive_tagger(), h.pad_with_zeros(SAMPLES), torch.float32
    )
    window = one_window(SAMPLES, micro_batch_size, h.pad_with_zeros)
    gradients, result = window_gradient(h.positive_tagger(), window)
    h.assert_promise_1(gradients, in_float32, expected)
    assert (result.loss, result.num_targets) == (pytest.approx(loss, rel=1e-6), number)


def test_other_ways_of_counting_fail_the_same_comparison():
    expected, *_ = by_target()
    window = one_window(SAMPLES, 3, h.pad_with_zeros)
    batches = [micro_batch.batch for micro_batch in window.micro_batches]
    usual = h.naive_gradient(h.positive_tagger(), batches, len(batches))
    assert h.relative_error(usual, expected) > 1e-2
    tokens = torch.tensor([float((batch["input_ids"] > 0).sum()) for batch in batches])
    shares = (tokens / tokens.sum()).tolist()
    by_tokens = h.autocast_gradient("no", h.positive_tagger(), batches, shares)
    assert h.relative_error(by_tokens, expected) > 1e-2
