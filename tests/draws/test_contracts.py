"""Keyed functions return what torch's own return, except for the numbers."""

import pytest
import torch
import torch.nn.functional as F
from draws_of_splits import micro_batch
from torch import nn

DATA = torch.linspace(-2, 2, 48).view(8, 6)
PROBABILITIES = DATA.sigmoid()
NEEDS_GRADIENT = DATA.clone().requires_grad_()
TRANSPOSED = torch.linspace(-2, 2, 48).view(6, 8).t()


def with_gradient(function):
    """Result of a differentiable function of one tensor, and its gradient."""
    x = NEEDS_GRADIENT.detach().clone().requires_grad_()
    result = function(x)
    result.sum().backward()
    return result, x.grad


def filled(function, **options):
    tensor = torch.empty(8, 6, **options)
    result = function(tensor)
    assert result is tensor
    return result


def in_place_of_non_leaf():
    x = NEEDS_GRADIENT.detach().clone().requires_grad_()
    y = x * 1
    y.normal_()
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    return y


RESULTS = {
    "rand": lambda: torch.rand(8, 6),
    "rand of nothing": lambda: torch.rand(0, 6),
    "rand of no dims": lambda: torch.rand([]),
    "rand float64": lambda: torch.rand(8, 6, dtype=torch.float64),
    "rand float16": lambda: torch.rand(8, 6, dtype=torch.float16),
    "rand complex": lambda: torch.rand(8, 6, dtype=torch.complex64),
    "rand requires_grad": lambda: torch.rand(8, 6, requires_grad=True),
    "rand device": lambda: torch.rand(8, 6, device="cpu"),
    "rand meta": lambda: torch.rand(8, 6, device="meta"),
    "rand layout": lambda: torch.rand(8, 6, layout=torch.strided),
    "rand out": lambda: torch.rand(8, 6, out=torch.empty(0, dtype=torch.float64)),
    "randn": lambda: torch.randn(8, 6),
    "randn bfloat16": lambda: torch.randn(8, 6, dtype=torch.bfloat16),
    "randn complex half": lambda: torch.randn(8, 6, dtype=torch.complex128),
    "randn requires_grad": lambda: torch.randn((8, 6), requires_grad=True),
    "rand_like": lambda: torch.rand_like(DATA),
    "rand_like dtype": lambda: torch.rand_like(DATA, dtype=torch.float64),
    "rand_like transposed": lambda: torch.rand_like(TRANSPOSED),
    "randn_like contiguous": lambda: torch.randn_like(
        TRANSPOSED, memory_format=torch.contiguous_format
    ),
    "randn_like of one with gradient": lambda: torch.randn_like(NEEDS_GRADIENT),
    "randn_like requires_grad": lambda: torch.randn_like(DATA, requires_grad=True),
    "randint": lambda: torch.randint(9, (8, 6)),
    "randint float": lambda: torch.randint(2, 9, (8, 6), dtype=torch.float32),
    "randint uint8": lambda: torch.randint(2, 9, (8, 6), dtype=torch.uint8),
    "randint bool": lambda: torch.randint(2, (8, 6), dtype=torch.bool),
    "randint of tensors": lambda: torch.randint(torch.tensor(2), torch.tensor(9), (8, 6)),
    "randint out": lambda: torch.randint(9, (8, 6), out=torch.empty(0)),
    "randint requires_grad": lambda: torch.randint(
        9, (8, 6), dtype=torch.float32, requires_grad=True
    ),
    "randint_like": lambda: torch.randint_like(DATA, 9),
    "randint_like dtype": lambda: torch.randint_like(DATA, 2, 9, dtype=torch.int64),
    "randperm": lambda: torch.randperm(5),
    "randperm int32": lambda: torch.randperm(5, dtype=torch.int32),
    "normal": lambda: torch.normal(DATA, PROBABILITIES),
    "normal float, tensor": lambda: torch.normal(1.0, PROBABILITIES.half()),
    "normal tensor": lambda: torch.normal(DATA.double()),
    "normal promotion": lambda: torch.normal(DATA, PROBABILITIES.double()),
    "normal broadcast": lambda: torch.normal(DATA, PROBABILITIES[:1]),
    "normal size": lambda: torch.normal(1.0, 2.0, (8, 6), dtype=torch.float64),
    "normal size=": lambda: torch.normal(mean=1.0, std=2.0, size=(8, 6)),
    "normal gradient": lambda: with_gradient(lambda x: torch.normal(x, 1.0)),
    "bernoulli": lambda: torch.bernoulli(PROBABILITIES),
    "bernoulli float64": lambda: torch.bernoulli(PROBABILITIES.double()),
    "bernoulli p of integers": lambda: torch.bernoulli(torch.zeros(8, dtype=torch.int64), 0.5),
    "bernoulli gradient": lambda: with_gradient(lambda x: torch.bernoulli(x.sigmoid())),
    "multinomial": lambda: torch.multinomial(PROBABILITIES, 3),
    "multinomial half": lambda: torch.multinomial(PROBABILITIES.half(), 3, replacement=True),
    "poisson": lambda: torch.poisson(PROBABILITIES),
    "poisson gradient": lambda: with_gradient(lambda x: torch.poisson(x.sigmoid())),
    "binomial": lambda: torch.binomial(count=torch.ones(8, 6), prob=PROBABILITIES),
    "gamma gradient": lambda: with_gradient(lambda x: torch._standard_gamma(x.sigmoid())),
    "uniform_": lambda: filled(lambda x: x.uniform_()),
    "uniform_(from=, to=)": lambda: filled(lambda x: x.uniform_(**{"from": 1, "to": 2})),
    "normal_ float16": lambda: filled(lambda x: x.normal_(1, 2), dtype=torch.float16),
    "normal_ of a slice": lambda: DATA.clone()[:, ::2].normal_(),
    "normal_ of a non-leaf": in_place_of_non_leaf,
    "bernoulli_ bool": lambda: filled(lambda x: x.bernoulli_(0.5), dtype=torch.bool),
    "random_ uint8": lambda: filled(lambda x: x.random_(), dtype=torch.uint8),
    "random_ from": lambda: filled(lambda x: x.random_(5, None), dtype=torch.int64),
    "random_ bool": lambda: filled(lambda x: x.random_(), dtype=torch.bool),
    "random_ float16": lambda: filled(lambda x: x.random_(), dtype=torch.float16),
    "exponential_": lambda: filled(lambda x: x.exponential_(lambd=2)),
    "geometric_ integers": lambda: filled(lambda x: x.geometric_(0.5), dtype=torch.int64),
    "geometric_ one": lambda: filled(lambda x: x.geometric_(0.999999)),
    "log_normal_": lambda: filled(lambda x: x.log_normal_()),
    "cauchy_": lambda: filled(lambda x: x.cauchy_()),
    "dropout": lambda: F.dropout(NEEDS_GRADIENT),
    "dropout eval": lambda: F.dropout(NEEDS_GRADIENT, training=False),
    "dropout p = 0": lambda: F.dropout(NEEDS_GRADIENT, 0.0),
    "dropout p = 1": lambda: F.dropout(NEEDS_GRADIENT, 1.0),
    "dropout inplace": lambda: F.dropout(DATA.clone(), inplace=True),
    "dropout bfloat16": lambda: F.dropout(DATA.bfloat16(), 0.1),
    "dropout of nothing": lambda: F.dropout(torch.ones(0, 6), 0.1),
    "alpha_dropout": lambda: F.alpha_dropout(NEEDS_GRADIENT, 0.5, True),
    "alpha_dropout half": lambda: F.alpha_dropout(DATA.half(), 0.5, True),
    "alpha_dropout p = 1": lambda: F.alpha_dropout(DATA, 1.0, True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(NEEDS_GRADIENT, 0.5, True),
    "rrelu": lambda: F.rrelu(NEEDS_GRADIENT, training=True),
    "rrelu float64": lambda: F.rrelu(DATA.double(), training=True),
    "rrelu eval": lambda: F.rrelu(DATA),
    "gumbel_softmax": lambda: F.gumbel_softmax(NEEDS_GRADIENT, hard=True),
    "Normal": lambda: torch.distributions.Normal(NEEDS_GRADIENT, 1.0).rsample(),
    "Normal sample": lambda: torch.distributions.Normal(NEEDS_GRADIENT, 1.0).sample(),
    "Beta": lambda: torch.distributions.Beta(PROBABILITIES, 1.0).sample((3,)),
}


def properties(result):
    """All of a tensor that is not its numbers."""
    if isinstance(result, tuple):
        return [properties(tensor) for tensor in result]
    return {
        "type": type(result),
        "dtype": result.dtype,
        "device": result.device,
        "layout": result.layout,
        "shape": result.shape,
        "stride": result.stride(),
        "requires_grad": result.requires_grad,
        "is_leaf": result.is_leaf,
        "is_inference": result.is_inference(),
    }


@pytest.mark.parametrize("name", RESULTS)
def test_result_is_like_torch_s_own(name):
    expected = properties(RESULTS[name]())
    with micro_batch(range(8)):
        assert properties(RESULTS[name]()) == expected


@pytest.mark.parametrize("name", [name for name in RESULTS if "gradient" not in name])
def test_result_in_inference_mode(name):
    if name in ("normal_ of a non-leaf", "gamma gradient"):
        pytest.skip("computes a gradient")
    with torch.inference_mode():
        expected = properties(RESULTS[name]())
        with micro_batch(range(8)):
            assert properties(RESULTS[name]()) == expected


ERRORS = {
    "rand of integers": lambda: torch.rand(8, dtype=torch.int64),
    "randn of integers": lambda: torch.randn(8, dtype=torch.int64),
    "rand_like of integers": lambda: torch.rand_like(torch.zeros(8, dtype=torch.int64)),
    "negative size": lambda: torch.rand(-1),
    "unknown argument": lambda: torch.rand(8, colour="red"),
    "no size": lambda: torch.randint(5),
    "empty range": lambda: torch.randint(5, 5, (8,)),
    "range beyond the dtype": lambda: torch.randint(0, 999, (8,), dtype=torch.uint8),
    "empty range of randint_like": lambda: torch.randint_like(DATA, 0),
    "negative std": lambda: torch.normal(0.0, -1.0, (8,)),
    "negative std of normal_": lambda: torch.empty(8).normal_(0, -1),
    "empty range of uniform_": lambda: torch.empty(8).uniform_(1, 0),
    "normal_ of integers": lambda: torch.empty(8, dtype=torch.int64).normal_(),
    "exponential_ of integers": lambda: torch.empty(8, dtype=torch.int64).exponential_(),
    "cauchy_ of integers": lambda: torch.empty(8, dtype=torch.int64).cauchy_(),
    "log_normal_ of integers": lambda: torch.empty(8, dtype=torch.int64).log_normal_(),
    "normal_ of a leaf": lambda: NEEDS_GRADIENT.normal_(),
    "bernoulli beyond 1": lambda: torch.bernoulli(torch.full((8,), 1.5)),
    "bernoulli_ beyond 1": lambda: torch.empty(8).bernoulli_(1.5),
    "exponential_ of a negative rate": lambda: torch.empty(8).exponential_(-1.0),
    "geometric_ of 0": lambda: torch.empty(8).geometric_(0.0),
    "multinomial of nan": lambda: torch.multinomial(torch.full((8, 3), torch.nan), 1),
    "multinomial of nothing": lambda: torch.multinomial(torch.zeros(8, 3), 1, True),
    "multinomial of too few": lambda: torch.multinomial(torch.ones(8, 3), 4),
    "poisson of negatives": lambda: torch.poisson(-torch.ones(8)),
    "dropout beyond 1": lambda: F.dropout(DATA, 1.5),
    "alpha_dropout beyond 1": lambda: F.alpha_dropout(DATA, 1.5, True),
    "random_ of a negative": lambda: torch.empty(8).random_(-5),
    "randperm of a negative": lambda: torch.randperm(-1),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments_are_refused_as_torch_refuses_them(name):
    with pytest.raises(Exception) as native:
        ERRORS[name]()
    with pytest.raises(type(native.value)), micro_batch(range(8)):
        ERRORS[name]()


@pytest.mark.parametrize("name", ["dropout", "alpha_dropout", "feature_alpha_dropout"])
def test_gradient_of_dropout_is_its_factor(name):
    """Dropout is x -> a x + b with a mask that the output shows; in place, it is the same."""
    function = getattr(F, name)
    x = torch.randn(8, 6, 4, dtype=torch.float64, requires_grad=True)
    with micro_batch(range(8)):
        y = function(x, 0.4, True)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    factors = gradient.unique()
    assert len(factors) == 2
    assert factors[0] == 0
    with torch.no_grad(), micro_batch(range(8)):
        in_place = x.detach().clone()
        assert function(in_place, 0.4, True, inplace=True) is in_place
    torch.testing.assert_close(in_place, y.detach(), rtol=1e-12, atol=1e-12)
    kept = gradient > 0
    assert 0.5 < kept.double().mean() < 0.7
    native = function(x.detach(), 0.4, True)
    for own in (y.detach(), native):
        # Torch's own draw has the same two values for an element, dropped or kept.
        dropped = y.detach()[~kept].unique()
        assert len(dropped) == 1
        is_dropped = (own - dropped).abs() < 1e-9
        offset = (y - x * factors[1]).detach()[kept].mean()
        expected = torch.where(is_dropped, dropped, x.detach() * factors[1] + offset)
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_rrelu_multiplies_negative_inputs_by_slopes():
    x = torch.randn(8, 1000, requires_grad=True)
    with micro_batch(range(8)):
        y = F.rrelu(x, 0.25, 0.75, training=True)
    slopes = torch.autograd.grad(y.sum(), x)[0]
    torch.testing.assert_close(y, x * slopes)
    assert (slopes[x > 0] == 1).all()
    negative = slopes[x <= 0]
    assert negative.min() >= 0.25
    assert negative.max() < 0.75
    assert abs(negative.mean() - 0.5) < 0.01
    with torch.no_grad(), micro_batch(range(8)):
        in_place = x.detach().clone()
        F.rrelu(in_place, 0.25, 0.75, training=True, inplace=True)
    torch.testing.assert_close(in_place, y.detach())


def test_rsample_is_differentiable():
    mean = torch.zeros(8, 3, requires_grad=True)
    std = torch.ones(8, 3, requires_grad=True)
    with micro_batch(range(8)):
        sample = torch.distributions.Normal(mean, std).rsample()
    sample.sum().backward()
    assert torch.equal(mean.grad, torch.ones(8, 3))
    assert torch.equal(std.grad, sample.detach())


def test_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        with micro_batch(range(8)):
            assert torch.rand(8).dtype == torch.float64
            assert torch.normal(0.0, 1.0, (8,)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_dropout_under_autocast():
    layer = nn.Linear(6, 6)
    with torch.autocast("cpu", torch.bfloat16), micro_batch(range(8)):
        assert F.dropout(layer(DATA), 0.1).dtype == torch.bfloat16
