"""Random numbers that cannot be tied to samples: refused, or accepted where the user allows them."""

import helpers as h
import numpy as np
import pytest
import torch
from torch import nn
from windows import one_window, window_gradient

import hf_ga


class Noisy(nn.Module):
    """A tagger with noise in its hidden states."""

    def __init__(self, noise):
        super().__init__()
        self.embedding = nn.Embedding(h.VOCABULARY, 8)
        self.head = nn.Linear(8, h.VOCABULARY)
        self.noise = noise

    def forward(self, input_ids, labels):
        logits = self.head(self.noise(self.embedding(input_ids)))
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=h.IGNORED
        )


def of_numpy(x):
    return x * torch.from_numpy(np.random.rand(*x.shape)).float()


def of_other_samples(x):
    return x + 0.5 * x[torch.randperm(len(x))].detach()


def normalised(x):
    """No random numbers."""
    return x - x.mean(0, keepdim=True)


def gradient(noise, **options):
    window = one_window(h.plain_samples(12), 4)
    return window_gradient(h.seeded(Noisy)(noise), window, **options)[0]


@pytest.mark.parametrize("noise", [of_numpy, of_other_samples])
def test_draws_are_refused_or_allowed(noise):
    """A rehearsal does not repeat them, so it cannot tell them from a dependence on samples."""
    with pytest.raises(hf_ga.UnkeyedRandomness):
        gradient(noise)
    allowed = gradient(noise, allow_split_dependent_randomness=True)
    assert h.relative_error(allowed, gradient(lambda x: x)) > 1e-2, "there is noise"


def test_a_loss_that_compares_samples_is_refused_where_draws_are_allowed_and_none_is_made():
    with pytest.raises(hf_ga.LossNotAdditive):
        gradient(normalised, allow_split_dependent_randomness=True)
