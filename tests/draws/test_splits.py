"""What a sample draws is the same in every split of the window, and another one's is not."""

import pytest
import torch
import torch.nn.functional as F
from draws_of_splits import SPLITS, drawn, rows_of
from torch import Tensor, nn
from torch.nn.functional import dropout as imported_dropout

from hf_ga.draws.keyed import KeyedDraws

EVERYTHING = list(range(8))


# Made outside of all scopes.
DATA = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(1))
PROBABILITIES = DATA.sigmoid()


def data(samples):
    return DATA[samples]


def probabilities(samples):
    return PROBABILITIES[samples]


def empty(samples, *shape, dtype=None):
    return torch.empty(len(samples), *shape, dtype=dtype)


FUNCTIONS = {
    "rand": lambda s: torch.rand(len(s), 5, 6),
    "rand(tuple)": lambda s: torch.rand((len(s), 5)),
    "rand(size=)": lambda s: torch.rand(size=[len(s), 5]),
    "rand float64": lambda s: torch.rand(len(s), 5, dtype=torch.float64),
    "rand bfloat16": lambda s: torch.rand(len(s), 5, dtype=torch.bfloat16),
    "rand complex": lambda s: torch.rand(len(s), 5, dtype=torch.complex64),
    "rand out": lambda s: torch.rand(len(s), 5, out=torch.empty(0)),
    "randn": lambda s: torch.randn(len(s), 5, 6),
    "randn of one dim": lambda s: torch.randn(len(s)),
    "randn float64": lambda s: torch.randn(len(s), 5, dtype=torch.float64),
    "randn complex": lambda s: torch.randn(len(s), 5, dtype=torch.complex128),
    "randn generator": lambda s: torch.randn(len(s), 5, generator=torch.Generator().manual_seed(3)),
    "randint(high, size)": lambda s: torch.randint(1000, (len(s), 5)),
    "randint(low, high, size)": lambda s: torch.randint(-5, 1000, (len(s), 5)),
    "randint(named)": lambda s: torch.randint(low=-5, high=1000, size=(len(s), 5)),
    "randint(high, size=)": lambda s: torch.randint(1000, size=(len(s), 5)),
    "randint int32": lambda s: torch.randint(1000, (len(s), 5), dtype=torch.int32),
    "rand_like": lambda s: torch.rand_like(data(s)),
    "randn_like": lambda s: torch.randn_like(data(s)),
    "randn_like float64": lambda s: torch.randn_like(data(s), dtype=torch.float64),
    "randint_like(high)": lambda s: torch.randint_like(data(s), 1000),
    "randint_like(low, high)": lambda s: torch.randint_like(data(s), -4, 1000),
    "normal(tensor, tensor)": lambda s: torch.normal(data(s), probabilities(s)),
    "normal(tensor, float)": lambda s: torch.normal(data(s), 2.0),
    "normal(float, tensor)": lambda s: torch.normal(1.0, probabilities(s)),
    "normal(float, float, size)": lambda s: torch.normal(1.0, 2.0, (len(s), 5)),
    "bernoulli": lambda s: torch.bernoulli(probabilities(s)),
    "bernoulli(p)": lambda s: torch.bernoulli(data(s), 0.3),
    "Tensor.bernoulli": lambda s: probabilities(s).bernoulli(),
    "Tensor.bernoulli(p)": lambda s: data(s).bernoulli(0.3),
    "multinomial": lambda s: torch.multinomial(probabilities(s)[:, 0], 3),
    "multinomial replacement": lambda s: torch.multinomial(probabilities(s)[:, 0], 20, True),
    "Tensor.multinomial": lambda s: probabilities(s)[:, 0].multinomial(3),
    "multinomial of one distribution": lambda s: torch.multinomial(torch.ones(9), len(s), True),
    "poisson": lambda s: torch.poisson(5 * probabilities(s)),
    "binomial": lambda s: torch.binomial(torch.full((len(s), 5, 6), 9.0), probabilities(s)),
    "uniform_": lambda s: empty(s, 5).uniform_(),
    "uniform_(from, to)": lambda s: empty(s, 5).uniform_(-2, 3),
    "normal_": lambda s: empty(s, 5).normal_(),
    "normal_(mean, std)": lambda s: empty(s, 5).normal_(mean=2, std=3),
    "bernoulli_": lambda s: empty(s, 5, 6).bernoulli_(),
    "bernoulli_(p)": lambda s: empty(s, 5, 6).bernoulli_(0.2),
    "bernoulli_(tensor)": lambda s: empty(s, 5, 6).bernoulli_(probabilities(s)),
    "random_": lambda s: empty(s, 5, dtype=torch.int64).random_(),
    "random_(to)": lambda s: empty(s, 5, dtype=torch.int64).random_(1000),
    "random_(from, to)": lambda s: empty(s, 5, dtype=torch.int64).random_(-3, 1000),
    "random_ float32": lambda s: empty(s, 5).random_(),
    "exponential_": lambda s: empty(s, 5).exponential_(2.0),
    "geometric_": lambda s: empty(s, 5, 6).geometric_(0.1),
    "log_normal_": lambda s: empty(s, 5).log_normal_(0.5, 1.5),
    "cauchy_": lambda s: empty(s, 5).cauchy_(1.0, 2.0),
    "dropout": lambda s: F.dropout(data(s), 0.4),
    "dropout inplace": lambda s: F.dropout(data(s).clone(), 0.4, inplace=True),
    "imported dropout": lambda s: imported_dropout(data(s), 0.4),
    "imported dropout inplace": lambda s: imported_dropout(data(s).clone(), 0.4, inplace=True),
    "nn.Dropout": lambda s: nn.Dropout(0.4)(data(s)),
    "torch.dropout": lambda s: torch.dropout(data(s), 0.4, True),
    "torch.dropout_": lambda s: torch.dropout_(data(s).clone(), 0.4, True),
    "dropout1d": lambda s: F.dropout1d(data(s), 0.4),
    "dropout2d": lambda s: F.dropout2d(data(s)[..., None], 0.4),
    "dropout3d": lambda s: F.dropout3d(data(s)[..., None, None], 0.4),
    "feature_dropout": lambda s: torch.feature_dropout(data(s), 0.4, True),
    "feature_dropout_": lambda s: torch.feature_dropout_(data(s).clone(), 0.4, True),
    "alpha_dropout": lambda s: F.alpha_dropout(data(s), 0.4, training=True),
    "alpha_dropout inplace": lambda s: F.alpha_dropout(data(s).clone(), 0.4, True, inplace=True),
    "feature_alpha_dropout": lambda s: F.feature_alpha_dropout(data(s), 0.4, training=True),
    "rrelu": lambda s: F.rrelu(data(s), training=True),
    "nn.RReLU": lambda s: nn.RReLU(inplace=True)(data(s).clone()),
    "gumbel_softmax": lambda s: F.gumbel_softmax(data(s)),
    "attention": lambda s: F.scaled_dot_product_attention(*[data(s)[:, None]] * 3, dropout_p=0.4),
    "fractional_max_pool2d": lambda s: F.fractional_max_pool2d(data(s)[:, None], 2, 3),
    "Normal": lambda s: torch.distributions.Normal(data(s), 1.0).rsample(),
    "Bernoulli": lambda s: torch.distributions.Bernoulli(probabilities(s)).sample(),
    "Categorical": lambda s: torch.distributions.Categorical(logits=10 * data(s)).sample(),
    "Beta": lambda s: torch.distributions.Beta(probabilities(s), 2.0).rsample(),
    "Gamma": lambda s: torch.distributions.Gamma(probabilities(s), 2.0).rsample(),
    "Dirichlet": lambda s: torch.distributions.Dirichlet(probabilities(s)).rsample(),
    "Exponential": lambda s: torch.distributions.Exponential(probabilities(s)).rsample(),
    "Laplace": lambda s: torch.distributions.Laplace(data(s), 1.0).rsample(),
    "Gumbel": lambda s: torch.distributions.Gumbel(data(s), 1.0).rsample(),
    "Poisson": lambda s: torch.distributions.Poisson(9 * probabilities(s)).sample(),
    "Parameter": lambda s: nn.Parameter(empty(s, 5)).data.normal_(),
    "init": lambda s: nn.init.trunc_normal_(empty(s, 5), std=0.3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_split_draws_the_rows_of_the_whole_window(name):
    function = FUNCTIONS[name]
    before = torch.get_rng_state()
    full = drawn(function, EVERYTHING)
    for split in SPLITS.values():
        draws = KeyedDraws()
        for samples in split:
            assert torch.equal(drawn(function, samples, draws), rows_of(full, samples)), samples
        assert draws.num_reclassified == 0
    assert torch.equal(torch.get_rng_state(), before)
    # Other samples, another epoch and the next draw are different.
    assert not torch.equal(drawn(function, EVERYTHING, epoch=1), full)
    first, second = drawn(lambda s: (function(s), function(s)), EVERYTHING)
    assert torch.equal(first, full)
    assert not torch.equal(second, full)
    assert len({tuple(row.flatten().tolist()) for row in second}) > 4


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_s_own_draws_depend_on_the_split(name):
    function = FUNCTIONS[name]
    torch.manual_seed(0)
    full = function(EVERYTHING)
    torch.manual_seed(0)
    parts = [function(samples) for samples in SPLITS["permuted"]]
    order = [sample for samples in SPLITS["permuted"] for sample in samples]
    assert not torch.equal(torch.cat(parts), rows_of(full, order))


@pytest.mark.parametrize(
    ("shape", "dim", "rows"),
    [
        ((1,), 0, 1),
        ((1, 7), 0, 1),
        ((1, 3, 7, 5), 0, 1),
        ((3, 7), 0, 3),  # samples x heads
        ((4, 5, 2, 3), 0, 4),
        ((7, 1, 3), 1, 1),  # time first
        ((7, 3, 1), 2, 1),
    ],
)
def test_samples_are_found_in_any_dim(shape, dim, rows):
    def draw(samples):
        sizes = list(shape)
        sizes[dim] = rows * len(samples)
        return torch.randn(sizes)

    full = drawn(draw, EVERYTHING)
    for split in SPLITS.values():
        draws = KeyedDraws()
        drawn(draw, EVERYTHING, draws)
        for samples in split:
            assert torch.equal(drawn(draw, samples, draws), rows_of(full, samples, dim, rows))


WIDTHS = {
    "randn": lambda s, width: torch.randn(len(s), width, 3),
    "rand": lambda s, width: torch.rand(len(s), 3, width),
    "randint": lambda s, width: torch.randint(1000, (len(s), width)),
    "exponential_": lambda s, width: torch.empty(len(s), width).exponential_(),
    "bernoulli": lambda s, width: torch.bernoulli(torch.full((len(s), width, 3), 0.5)),
    "dropout": lambda s, width: F.dropout(torch.ones(len(s), width, 3), 0.5),
    "alpha_dropout": lambda s, width: F.alpha_dropout(torch.ones(len(s), width, 3), 0.5, True),
    "rrelu": lambda s, width: F.rrelu(-torch.ones(len(s), width, 3), training=True),
    "randn complex": lambda s, width: torch.randn(len(s), width, 3, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_padding_does_not_change_the_numbers(name):
    wide = drawn(lambda s: WIDTHS[name](s, 11), EVERYTHING)
    for width in (1, 2, 7):
        narrow = drawn(lambda s, width=width: WIDTHS[name](s, width), EVERYTHING)
        dim = 2 if name == "rand" else 1
        assert torch.equal(wide.narrow(dim, 0, width), narrow)


def test_flattened_tokens_of_other_widths():
    """(samples x width, features), as before a layer of experts."""

    def draw(width):
        return lambda samples: torch.randn(len(samples) * width, 3)

    full = drawn(draw(6), EVERYTHING).view(8, 6, 3)
    draws = KeyedDraws()
    for samples, width in [([0, 1], 5), ([2, 3, 4], 6), ([5], 2), ([6, 7], 4)]:
        rows = drawn(draw(width), samples, draws).view(len(samples), width, 3)
        assert torch.equal(rows, full[samples, :width])


def test_generator_of_the_user():
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        state = generator.get_state()
        numbers = drawn(lambda s: torch.randn(len(s), 9, generator=generator), EVERYTHING)
        assert torch.equal(generator.get_state(), state)
        return numbers

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert not torch.equal(draw(1), drawn(lambda s: torch.randn(len(s), 9), EVERYTHING))


def test_diffusion_loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Dropout(0.2), nn.Linear(16, 6)).double()
    images = torch.randn(8, 6, dtype=torch.float64)

    def gradient(split, keyed=True):
        model.zero_grad()
        draws = KeyedDraws()
        for samples in split:

            def loss(samples):
                noise = torch.randn_like(images[samples])
                noise += 0.1 * torch.randn(len(samples), 1)
                step = torch.randint(0, 1000, (len(samples),)).long()
                alpha = (1 - step / 1000)[:, None]
                return F.mse_loss(model(alpha * images[samples] + (1 - alpha) * noise), noise)

            result = drawn(loss, samples, draws) if keyed else loss(samples)
            (result * len(samples) / 8).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    full = gradient([EVERYTHING])
    for split in SPLITS.values():
        torch.testing.assert_close(gradient(split), full, rtol=1e-12, atol=1e-15)
    torch.manual_seed(0)
    native = gradient([EVERYTHING], keyed=False)
    torch.manual_seed(0)
    assert not torch.allclose(gradient(SPLITS["halves"], keyed=False), native, rtol=1e-3)


def test_subclass_of_tensor_stays_one():
    class Named(Tensor):
        pass

    named = torch.zeros(8, 3).as_subclass(Named)
    result = drawn(lambda s: torch.randn_like(named), EVERYTHING)
    assert type(result) is Named
    assert type(drawn(lambda s: named.normal_(), EVERYTHING)) is Named
