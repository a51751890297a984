"""Activation checkpointing repeats the draws of the forward in the backward."""

import pytest
import torch
import torch.nn.functional as F
from draws_of_splits import WINDOW_KEY, keys_of, micro_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import UnkeyedRandomness


class Noisy(nn.Module):
    """Draws dropout, noise and a number that all samples share."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        x = F.dropout(self.first(x).tanh(), 0.3)
        x = x + 0.1 * torch.randn_like(x) * torch.rand(1)
        return F.dropout(self.second(x), 0.3)


def plain(function, *args, use_reentrant):
    return function(*args)


def chain(run, model, x, use_reentrant):
    for layer in model:
        x = run(layer, x, use_reentrant=use_reentrant)
    return x


def twice(run, model, x, use_reentrant):
    """Twin encoders: one module is called for two inputs."""
    first = run(model[0], x, use_reentrant=use_reentrant)
    second = run(model[0], x, use_reentrant=use_reentrant)
    return first * second + torch.randn_like(x)


def nested(run, model, x, use_reentrant):
    def inner(x):
        return run(model[1], model[0](x), use_reentrant=use_reentrant)

    def outer(x):
        return model[2](run(inner, x, use_reentrant=use_reentrant)) * torch.rand_like(x)

    return run(outer, x, use_reentrant=use_reentrant)


# Torch's warning of a reentrant checkpoint inside another one, whose forward has no gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("forward", [chain, twice, nested])
def test_gradient_is_that_without_checkpointing(forward, use_reentrant):
    model = nn.Sequential(Noisy(), Noisy(), Noisy()).double()
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)

    def gradient(run):
        model.zero_grad()
        x.grad = None
        with micro_batch(range(8)) as draws:
            loss = forward(run, model, x, use_reentrant=use_reentrant).square().sum()
            num_draws = draws.num_draws
            loss.backward()
            assert draws.num_draws == num_draws
            after = torch.randn(8)
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [x.grad, *grads, after]

    for actual, expected in zip(gradient(checkpoint), gradient(plain), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_backward_after_the_next_micro_batch_has_begun(use_reentrant):
    model = Noisy().double()
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)

    def gradient(run):
        model.zero_grad()
        draws = KeyedDraws()
        with draws.scope():
            losses = []
            for samples in ([0, 1, 2], [3, 4, 5, 6, 7]):
                draws.begin(keys_of(samples), WINDOW_KEY)
                losses.append(run(model, x[samples], use_reentrant=use_reentrant).square().sum())
            sum(losses).backward()
            assert draws.num_samples == 5
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    assert torch.equal(gradient(checkpoint), gradient(plain))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_draws_that_are_not_repeated_are_refused(use_reentrant):
    model = Noisy()
    x = torch.randn(8, 6, requires_grad=True)
    with micro_batch(range(8)):
        with torch.random.fork_rng():
            loss = checkpoint(model, x, use_reentrant=use_reentrant, preserve_rng_state=False).sum()
        with pytest.raises(UnkeyedRandomness, match="preserve_rng_state=True"):
            loss.backward()


def test_noise_on_gradients_is_refused():
    x = torch.randn(8, 6, requires_grad=True)
    with micro_batch(range(8)):
        y = x.square()
        y.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        with pytest.raises(UnkeyedRandomness, match="drawn in a backward"):
            y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_without_draws_needs_no_state(use_reentrant):
    x = torch.randn(8, 6, requires_grad=True)
    with micro_batch(range(8)):
        y = checkpoint(torch.tanh, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        y.sum().backward()
    assert x.grad is not None


def test_gradient_penalty_inside_a_forward():
    """A backward in the middle of the loop does not move the number of the draw."""
    layer = Noisy().double()
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)

    def penalty(run):
        with micro_batch(range(8)):
            y = run(layer, x, use_reentrant=False).sum()
            (gradient,) = torch.autograd.grad(y, x)
            return gradient + torch.randn_like(x)

    assert torch.equal(penalty(checkpoint), penalty(plain))
