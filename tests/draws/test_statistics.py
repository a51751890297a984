"""Keyed numbers have the distributions that the functions promise, and are independent.

Each check is shown to fail on numbers that are a little wrong.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from draws_of_splits import micro_batch
from torch.distributions import Cauchy, Exponential, LogNormal, Normal

SAMPLES = range(50)
SHAPE = (50, 40, 50)  # 100,000 numbers
KOLMOGOROV_LIMIT = 1.95  # exceeded with probability 0.001
SIGMAS = 4.5


def kolmogorov(numbers, cdf):
    """Kolmogorov's statistic: sqrt(N) times the largest distance from a continuous cdf."""
    expected = cdf(numbers.flatten().double().sort().values)
    count = len(expected)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    return math.sqrt(count) * distance.item()


def chi_squared_sigmas(numbers, probabilities):
    """Deviation of the counts of 0, 1, ... from the expected ones, in standard deviations."""
    counts = torch.bincount(numbers.flatten().long(), minlength=len(probabilities)).double()
    expected = numbers.numel() * torch.as_tensor(probabilities, dtype=torch.float64)
    degrees = len(probabilities) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - degrees) / math.sqrt(2 * degrees)


def correlation_sigmas(first, second):
    first = (first.flatten().double() - first.double().mean()) / first.double().std()
    second = (second.flatten().double() - second.double().mean()) / second.double().std()
    return abs((first * second).mean().item()) * math.sqrt(first.numel())


def uniform_cdf(x):
    return x.clamp(0, 1)


CONTINUOUS = {
    "rand": (lambda: torch.rand(SHAPE), uniform_cdf),
    "rand float64": (lambda: torch.rand(SHAPE, dtype=torch.float64), uniform_cdf),
    "uniform_": (lambda: torch.empty(SHAPE).uniform_(-1, 3), lambda x: uniform_cdf((x + 1) / 4)),
    "rrelu": (lambda: F.rrelu(-torch.ones(SHAPE), 0, 1, True).abs(), uniform_cdf),
    "randn": (lambda: torch.randn(SHAPE), Normal(0, 1).cdf),
    "randn float64": (lambda: torch.randn(SHAPE, dtype=torch.float64), Normal(0, 1).cdf),
    "randn complex": (
        lambda: torch.view_as_real(torch.randn(50, 40, 25, dtype=torch.complex64)),
        Normal(0, math.sqrt(0.5)).cdf,
    ),
    "normal": (lambda: torch.normal(torch.full(SHAPE, 2.0), 3.0), Normal(2, 3).cdf),
    "normal_": (lambda: torch.empty(SHAPE).normal_(2, 3), Normal(2, 3).cdf),
    "exponential_": (lambda: torch.empty(SHAPE).exponential_(2), Exponential(2.0).cdf),
    "log_normal_": (lambda: torch.empty(SHAPE).log_normal_(1, 2), LogNormal(1.0, 2.0).cdf),
    "cauchy_": (lambda: torch.empty(SHAPE).cauchy_(1, 2), Cauchy(1.0, 2.0).cdf),
    "shared": (lambda: torch.rand(333, 301), uniform_cdf),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distribution(name):
    function, cdf = CONTINUOUS[name]
    with micro_batch(SAMPLES):
        numbers = function()
    assert kolmogorov(numbers, cdf) < KOLMOGOROV_LIMIT
    lower, upper = numbers.flatten()[:10_000].double().quantile(torch.tensor([0.25, 0.75]).double())
    shifted = numbers + 0.03 * (upper - lower)
    assert kolmogorov(shifted, cdf) > KOLMOGOROV_LIMIT


# Of 1, 2, ... 8, and of all above.
GEOMETRIC = [*[0.4 * 0.6 ** (k - 1) for k in range(1, 9)], 0.6**8]


DISCRETE = {
    "randint": (lambda: torch.randint(7, SHAPE), [1 / 7] * 7),
    "randint with low": (lambda: torch.randint(3, 13, SHAPE) - 3, [0.1] * 10),
    "randint_like": (lambda: torch.randint_like(torch.empty(SHAPE), 256), [1 / 256] * 256),
    "random_": (lambda: torch.empty(SHAPE, dtype=torch.int64).random_(7), [1 / 7] * 7),
    "random_ uint8": (lambda: torch.empty(SHAPE, dtype=torch.uint8).random_(), [1 / 256] * 256),
    "bits of int64": (
        lambda: torch.empty(SHAPE, dtype=torch.int64).random_() % 16,
        [1 / 16] * 16,
    ),
    "bernoulli": (lambda: torch.bernoulli(torch.full(SHAPE, 0.3)), [0.7, 0.3]),
    "bernoulli_": (lambda: torch.empty(SHAPE).bernoulli_(0.01), [0.99, 0.01]),
    "dropout": (lambda: F.dropout(torch.ones(SHAPE), 0.3).sign(), [0.3, 0.7]),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.ones(SHAPE), 0.3, True) > 0, [0.3, 0.7]),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([[1.0, 0.0, 2.0, 5.0]]).expand(50, 4), 2000, True),
        [0.125, 1e-9, 0.25, 0.625],
    ),
    "multinomial without replacement": (
        lambda: torch.multinomial(torch.tensor([1.0, 2.0, 5.0]).expand(50_000, 3), 1),
        [0.125, 0.25, 0.625],
    ),
    "second without replacement": (
        lambda: torch.multinomial(torch.tensor([1.0, 2.0, 5.0]).expand(50_000, 3), 2)[:, 1],
        [1 / 8 * (2 / 6 + 5 / 3), 2 / 8 * (1 / 7 + 5 / 3), 5 / 8 * (1 / 7 + 2 / 6)],
    ),
    "geometric_": (
        lambda: torch.empty(SHAPE).geometric_(0.4).clamp(max=9) - 1,
        GEOMETRIC,
    ),
    "poisson": (
        lambda: torch.poisson(torch.full((50, 400), 1.5)).clamp(max=6),
        [*[math.exp(-1.5) * 1.5**k / math.factorial(k) for k in range(6)], 0.00446],
    ),
    "gumbel_softmax": (
        lambda: F.gumbel_softmax(torch.tensor([1.0, 2, 5]).log().expand(50_000, 3)).argmax(-1),
        [0.125, 0.25, 0.625],
    ),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_distribution(name):
    function, probabilities = DISCRETE[name]
    assert sum(probabilities) == pytest.approx(1, abs=1e-3)
    with micro_batch(SAMPLES):
        numbers = function()
    assert chi_squared_sigmas(numbers, probabilities) < SIGMAS
    wrong = numbers.flatten().clone()
    largest = (wrong == wrong.max()).nonzero().flatten()
    wrong[largest[: len(largest) // 2]] = 0
    assert chi_squared_sigmas(wrong, probabilities) > SIGMAS


def test_impossible_categories_are_never_drawn():
    weights = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]).expand(50, 5)
    with micro_batch(SAMPLES):
        drawn = torch.multinomial(weights, 10_000, replacement=True)
        both = torch.multinomial(weights, 2)
    assert drawn.unique().tolist() == [1, 3]
    assert both.sort(-1).values.tolist() == [[1, 3]] * 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rand_is_below_one_and_reaches_near_it(dtype):
    with micro_batch(SAMPLES):
        numbers = torch.rand(SHAPE, dtype=dtype)
    step = torch.finfo(dtype).eps / 2
    assert numbers.max() < 1
    assert numbers.min() >= 0
    assert numbers.max().double() > 1 - max(4 * step, 1e-4)
    assert abs(numbers.double().mean() - 0.5) < 0.004 + step


def test_extreme_numbers():
    with micro_batch(SAMPLES):
        assert (torch.empty(SHAPE).exponential_() > 0).all()
        assert torch.empty(SHAPE).exponential_().isfinite().all()
        normal = torch.randn(SHAPE)
    assert normal.isfinite().all()
    assert 4 < normal.abs().max() < 6


def test_moments_of_normal_numbers():
    with micro_batch(SAMPLES):
        numbers = torch.randn(SHAPE, dtype=torch.float64)
    count = math.sqrt(numbers.numel())
    assert abs(numbers.mean()) * count < SIGMAS
    assert abs(numbers.pow(2).mean() - 1) * count / math.sqrt(2) < SIGMAS
    assert abs(numbers.pow(3).mean()) * count / math.sqrt(15) < SIGMAS
    assert abs(numbers.pow(4).mean() - 3) * count / math.sqrt(96) < SIGMAS


@pytest.mark.parametrize("name", ["rand", "randn", "bernoulli_", "exponential_"])
def test_numbers_are_independent(name):
    functions = {
        "rand": lambda: torch.rand(SHAPE),
        "randn": lambda: torch.randn(SHAPE),
        "bernoulli_": lambda: torch.empty(SHAPE).bernoulli_(0.5),
        "exponential_": lambda: torch.empty(SHAPE).exponential_(),
    }
    with micro_batch(SAMPLES) as draws:
        draws_in_turn = [functions[name]() for _ in range(4)]
    with micro_batch(SAMPLES, epoch=1):
        next_epoch = functions[name]()
    numbers, *others = draws_in_turn
    for other in (*others, next_epoch):
        assert correlation_sigmas(numbers, other) < SIGMAS
        assert correlation_sigmas(numbers[:-1], other[1:]) < SIGMAS
        assert correlation_sigmas(numbers[:, :, :-1], other[:, :, 1:]) < SIGMAS
    for dim in range(3):
        for lag in (1, 2, 8):
            size = SHAPE[dim] - lag
            first = numbers.narrow(dim, 0, size)
            second = numbers.narrow(dim, lag, size)
            assert correlation_sigmas(first, second) < SIGMAS, (dim, lag)
            assert correlation_sigmas(first.square(), second.square()) < SIGMAS, (dim, lag)
    assert correlation_sigmas(numbers, numbers + 20 * others[0]) > SIGMAS  # 5 % correlation is seen
    assert draws.num_draws == 4


def test_real_and_imaginary_parts_are_independent():
    with micro_batch(SAMPLES):
        numbers = torch.randn(50, 1000, dtype=torch.complex64)
    assert correlation_sigmas(numbers.real, numbers.imag) < SIGMAS


def test_dropout_and_noise_of_other_numbers_are_independent():
    with micro_batch(SAMPLES):
        kept = F.dropout(torch.ones(SHAPE), 0.5).sign()
        noise = torch.rand(SHAPE)
    with micro_batch(SAMPLES):
        same_number = torch.rand(SHAPE)
    assert correlation_sigmas(kept, noise) < SIGMAS
    assert correlation_sigmas(kept, same_number) < SIGMAS


def test_every_permutation_is_equally_probable():
    with micro_batch(range(7)):  # 3 is no multiple of 7
        permutations = torch.stack([torch.randperm(3) for _ in range(2000)])
    numbers = permutations @ torch.tensor([9, 3, 1])
    ranks = torch.unique(numbers, return_inverse=True)[1]
    assert chi_squared_sigmas(ranks, [1 / 6] * 6) < SIGMAS


def test_gamma_and_binomial_by_their_moments():
    with micro_batch(SAMPLES):
        gamma = torch._standard_gamma(torch.full((50, 2000), 3.0))
        binomial = torch.binomial(torch.full((50, 2000), 10.0), torch.full((50, 2000), 0.3))
    for numbers, mean, variance in [(gamma, 3, 3), (binomial, 3, 2.1)]:
        deviation = (numbers.double().mean() - mean) / math.sqrt(variance / numbers.numel())
        assert abs(deviation) < SIGMAS
        assert numbers.double().var() == pytest.approx(variance, rel=0.03)


def test_no_hash_is_used_twice():
    """Not by two draws, nor by two samples, nor at two coordinates."""
    with micro_batch(range(8)):
        shapes = [(8, 12, 12, 12), (8, 12, 12), (8, 12), (11, 12, 13)] * 12
        numbers = [torch.rand(shape, dtype=torch.float64).flatten() for shape in shapes]
    numbers = torch.cat(numbers)
    assert len(numbers.unique()) == len(numbers)


def test_a_hash_that_is_used_twice_is_found(monkeypatch):
    """As if the keys of draws were also the multipliers of axes."""
    monkeypatch.setattr("hf_ga.draws.draw.cached_key", lambda *parts: 2 * parts[-1] + 1)
    with pytest.raises(AssertionError):
        test_no_hash_is_used_twice()
