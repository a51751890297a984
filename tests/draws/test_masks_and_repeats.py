"""Attention masks that are added to the scores, and inputs that are repeated within a forward."""

import helpers as h
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from windows import one_window, window_gradient

import hf_ga
from hf_ga.loading.batches import count_tokens


def additive_masks(value):
    """Collate function: masks of shape (n, 1, L, L), `value` where a token does not attend."""

    def collate(samples):
        batch = h.pad_right(samples)
        num_samples, width = batch["input_ids"].shape
        real = batch["attention_mask"].bool().view(num_samples, 1, 1, width)
        seen = real & torch.ones(width, width, dtype=torch.bool).tril()
        batch["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, value)
        return batch

    return collate


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_additive_masks_of_four_dimensions(value, dropout):
    samples = h.token_samples(12)
    model = h.gpt2(dropout=dropout)
    collate = additive_masks(value)
    full, _ = window_gradient(model, one_window(samples, 12, collate))
    for size in (1, 5):
        split, _ = window_gradient(model, one_window(samples, size, collate))
        assert h.relative_error(split, full) < 1e-6
    usual, _ = window_gradient(model, one_window(samples, 5, h.pad_right))
    assert h.relative_error(usual, full) < 1e-6, "as with masks of zeros and ones"
    if not dropout:
        reference = h.full_batch_gradient(model, h.pad_right(samples))
        assert h.relative_error(full, reference) < 1e-6


def test_only_masks_of_zeros_and_ones_count_tokens():
    samples = h.token_samples(4)
    real = sum(len(sample["input_ids"]) for sample in samples)
    batch = h.pad_right(samples)
    assert count_tokens(batch, 4) == real
    assert count_tokens({**batch, "attention_mask": batch["attention_mask"].float()}, 4) == real
    assert count_tokens(additive_masks(-torch.inf)(samples), 4) == batch["input_ids"].numel()
    of_two_texts = {f"attention_mask_{name}": batch["attention_mask"] for name in ("a", "b")}
    assert count_tokens(of_two_texts, 4) == 2 * real


class TwoPasses(nn.Module):
    """R-Drop (Wu et al. 2021): both passes of a sample through dropout, pulled towards each other.

    Args:
        repeat: Gives the inputs of both passes.
        passes: Takes the two passes from the outputs.
    """

    def __init__(self, repeat, passes):
        super().__init__()
        self.repeat = repeat
        self.passes = passes
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, x, labels):
        one, two = self.passes(self.layers(self.repeat(x)).squeeze(-1))
        return {"loss": F.mse_loss(one, labels) + F.mse_loss(two, labels) + F.mse_loss(one, two)}


def halves(x):
    return x.chunk(2)


def beside_each_other():
    return TwoPasses(lambda x: x.repeat_interleave(2, dim=0), lambda y: (y[0::2], y[1::2]))


def stack(samples):
    return {
        "x": torch.stack([x for x, _ in samples]),
        "labels": torch.tensor([y for _, y in samples]),
    }


def features(count=12):
    return [(torch.randn(4), float(i % 3)) for i in range(count)]


def test_passes_beside_each_other_are_right_in_every_split():
    samples = features()
    model = beside_each_other()
    full, _ = window_gradient(model, one_window(samples, 12, stack))
    for size in (1, 5):
        split, _ = window_gradient(model, one_window(samples, size, stack))
        assert h.relative_error(split, full) < 1e-6
    model.passes = lambda y: (y[0::2], y[0::2])
    same, _ = window_gradient(model, one_window(samples, 12, stack))
    assert h.relative_error(same, full) > 1e-2, "each pass has its own masks"


def test_passes_behind_each_other_are_named():
    model = TwoPasses(lambda x: torch.cat([x, x]), halves)
    with pytest.raises(hf_ga.LossNotAdditive, match="depends on the other samples"):
        window_gradient(model, one_window(features(), 5, stack))


def test_batches_that_hold_each_sample_twice_are_named():
    def twice(samples):
        batch = stack(samples)
        return {**batch, "x": torch.cat([batch["x"]] * 2)}

    model = TwoPasses(lambda x: x, halves)
    with pytest.raises(hf_ga.DataError, match=r"let the model repeat its inputs.*interleave"):
        window_gradient(model, one_window(features(), 5, twice))


def test_a_mean_across_samples_is_not_taken_for_masks():
    """Masks of several rows for each sample that are right, and another cause."""
    model = beside_each_other()
    plain = model.forward
    model.forward = lambda x, labels: {"loss": plain(x, labels)["loss"].sqrt()}
    with pytest.raises(hf_ga.LossNotAdditive, match="SqrtBackward0"):
        window_gradient(model, one_window(features(), 5, stack))
