"""Losses that are not sums of means are refused, with the reason."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel.distributed import _DDPSink

from hf_ga.errors import LossNotAdditive
from hf_ga.loss import read_terms


class Double(torch.autograd.Function):
    """A custom function that the reader does not know."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def make():
    torch.manual_seed(0)
    z = nn.Linear(6, 5)(torch.randn(8, 6))
    return z, torch.randint(5, (8,))


def dice(z, y):
    p = z.softmax(-1)[:, 1]
    t = (y == 1).float()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum() + 1)


def weight_of_several(z, y):
    log_variance = nn.Parameter(torch.zeros(()))
    return torch.exp(-log_variance) * (F.cross_entropy(z, y) + z.square().mean())


def load_balancing(z, y):
    share = F.one_hot(y, 5).float().mean(0)
    return (share * z.softmax(-1).mean(0)).sum() * 5


REFUSED = {
    "sqrt": (lambda z, y: F.mse_loss(z, z.detach() + 1).sqrt(), "the square root of a mean"),
    "log": (lambda z, y: z.pow(2).mean().log(), "the logarithm of a mean"),
    "exp": (lambda z, y: F.cross_entropy(z, y).exp(), "the exponential of a mean"),
    "power": (lambda z, y: F.cross_entropy(z, y) ** 2, "a power of a mean"),
    "product": (lambda z, y: F.cross_entropy(z, y) * z.mean(), "a product of two quantities"),
    "weight of several": (weight_of_several, "multiply each of them"),
    "weight of data": (
        lambda z, y: F.cross_entropy(z, y) / z.exp().sum(),
        "a division by a quantity",
    ),
    "logsumexp": (
        lambda z, y: torch.logsumexp(F.cross_entropy(z, y, reduction="none"), 0),
        "a logsumexp over the batch",
    ),
    "maximum": (lambda z, y: z.max(), "a maximum over the batch"),
    "largest": (lambda z, y: torch.aminmax(z).max, "not a sum or a mean .AminmaxBackward0"),
    "norm": (lambda z, y: z.norm(), "a norm over the batch"),
    "variance": (lambda z, y: z.var(), "a variance over the batch"),
    "dice": (dice, "a division by a quantity that needs a gradient"),
    "reciprocal": (lambda z, y: 1 / z.mean(), "a number divided by a mean"),
    "sum": (lambda z, y: F.cross_entropy(z, y, reduction="sum"), "the loss is a sum, not a mean"),
    "weighted sum": (lambda z, y: (0.1 * z).sum() * 0.5, "pass num_targets="),
    "sum of squares": (lambda z, y: F.mse_loss(z, z.detach() + 1, reduction="sum"), "is a sum"),
    "load balancing": (load_balancing, "the loss is a sum"),
    "element": (lambda z, y: F.cross_entropy(z, y, reduction="none")[2], "one element of"),
    "custom": (lambda z, y: Double.apply(z.mean()), "custom autograd function .DoubleBackward"),
    "mean of a mean": (
        lambda z, y: (z.mean() * z.detach()).mean(),
        "a number of the whole micro-batch",
    ),
    "variance by hand": (
        lambda z, y: (z - z.mean()).pow(2).mean(),
        "a number of the whole micro-batch",
    ),
    "moments": (lambda z, y: (z.mean(0) - 1).pow(2).mean(), "a sum or mean over samples"),
    "sum over samples": (lambda z, y: z.pow(2).sum(0).mean(), "a sum or mean over samples"),
    "distance of means": (
        lambda z, y: F.mse_loss(z.mean(), z.detach().mean() + 1),
        "a number of the whole micro-batch",
    ),
    "normalised": (lambda z, y: (z / z.std()).pow(2).mean(), "a number of the whole micro-batch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    loss_of, message = REFUSED[name]
    with pytest.raises(LossNotAdditive, match=message) as raised:
        read_terms(loss_of(*make()), num_samples=8)
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_loss_is_refused():
    z, y = make()
    compiled = torch.compile(lambda z, y: F.cross_entropy(z, y), backend="aot_eager")
    with pytest.raises(LossNotAdditive, match="compile_layers"):
        read_terms(compiled(z, y), num_samples=8)


def test_a_part_with_factor_zero_is_not_read():
    z, y = make()
    assert read_terms(0 * z.max(), num_samples=8) == []
    loss = F.cross_entropy(z, y) + 0.0 * z.max() + torch.zeros(()) * z.sum()
    [term] = read_terms(loss, num_samples=8)
    assert term.node.name() == "NllLossBackward0"


def test_a_loss_without_gradient_has_no_terms():
    z, y = make()
    assert read_terms(F.cross_entropy(z.detach(), y), num_samples=8) == []


def test_outputs_of_ddp_are_passed_through():
    """DDP's sink returns its inputs: the term is below the output that is the loss."""
    z, y = make()
    loss = F.cross_entropy(z, y)
    ddp = SimpleNamespace(_ddp_sink_clone=True, reducer=None, static_graph=False)
    wrapped = _DDPSink.apply(lambda: ddp, z.sum(1), loss)[1]
    [term] = read_terms(wrapped, num_samples=8)
    assert term.node is loss.grad_fn


def test_a_sum_that_doubles_itself_ends():
    z, _ = make()
    loss = z.mean()
    for _ in range(40):
        loss = loss + loss
    with pytest.raises(LossNotAdditive, match="adds itself up"):
        read_terms(loss, num_samples=8)


def test_long_sums_do_not_recurse():
    z, _ = make()
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3000)]
    terms = read_terms(z.mean() + 0.1 * sum(w.pow(2).sum() for w in weights), num_samples=8)
    assert len(terms) == 3001
    assert sum(term.is_penalty for term in terms) == 3000
