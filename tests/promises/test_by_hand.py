"""The cases of CONTRIBUTING.md, which can be worked by hand: a model with one weight w, whose loss of
a target with the number x is w x, so that the gradient is x.
"""

import pytest
import torch
from torch import nn

import hf_ga

SAMPLES = torch.tensor([1.0, 2.0, 3.0, 4.0])


class Product(nn.Module):
    """w x for each number x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.weight * x


def sum_of_losses(outputs, batch):
    return outputs[batch["is_target"]].sum(), batch["is_target"].sum()


def gradient(x, is_target, micro_batch_size):
    model = Product()
    batch = {"x": x, "is_target": is_target}
    hf_ga.backward(model, batch, micro_batch_size=micro_batch_size, loss_fn=sum_of_losses)
    return model.weight.grad.item()


def mean_of_means(x, sizes):
    return sum(part.mean() for part in x.split(sizes)).item() / len(sizes)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4])
def test_the_mean_of_four_samples(micro_batch_size):
    assert gradient(SAMPLES, SAMPLES > 0, micro_batch_size) == 2.5


def test_the_mean_of_means_is_another():
    assert mean_of_means(SAMPLES, [3, 1]) == 3.0


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4])
def test_the_mean_over_tokens(micro_batch_size):
    """The first sample has three tokens, the others one."""
    tokens = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0], [3.0, 0.0, 0.0], [4.0, 0.0, 0.0]])
    assert gradient(tokens, tokens > 0, micro_batch_size) == 2.0


def test_a_short_last_window():
    """Two samples of four: their mean, not their sum over four."""
    assert gradient(SAMPLES[:2], SAMPLES[:2] > 0, micro_batch_size=1) == 1.5
