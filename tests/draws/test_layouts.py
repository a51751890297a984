"""Which dim of a draw holds the samples: shapes that coincide by chance, and shared draws."""

import pytest
import torch
import torch.nn.functional as F
from draws_of_splits import SPLITS, drawn, micro_batch, rows_of

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.draws.sample_dims import PaddedRows, SampleDims, SampleRows, Shared, possible_layouts

EVERYTHING = list(range(8))


@pytest.mark.parametrize(
    ("shape", "num_samples", "first"),
    [
        ((4, 6), 4, SampleRows(0, 1)),
        ((8, 6), 4, SampleRows(0, 2)),
        ((8, 4), 4, SampleRows(0, 2)),
        ((7, 4, 3), 4, SampleRows(1, 1)),
        ((7, 8, 3), 4, Shared((7, 8, 3))),
        ((7, 3), 4, Shared((7, 3))),
        ((1,), 4, Shared((1,))),
        ((), 4, Shared(())),
        ((1,), 1, SampleRows(0, 1)),
        ((), 1, Shared(())),
    ],
)
def test_most_probable_layout(shape, num_samples, first):
    assert possible_layouts(shape, num_samples)[0] == first


def test_layouts_that_a_micro_batch_contradicts_are_dropped():
    dims = SampleDims()
    assert dims.find("noise", (64, 32), 4) == SampleRows(0, 16)
    assert dims.find("noise", (64, 32), 4) == SampleRows(0, 16)
    assert dims.num_reclassified == 0
    # (0, 16), (1, 8) and padded rows are impossible.
    assert dims.find("noise", (64, 32), 3) == Shared((64, 32))
    assert dims.num_reclassified == 1
    assert dims.find("noise", (64, 32), 4) == Shared((64, 32))
    assert dims.num_reclassified == 1
    assert dims.find("noise", (65, 32), 4) is None
    assert dims.find("other", (64, 32), 4) == SampleRows(0, 16)


def test_time_first_shows_when_the_width_changes():
    dims = SampleDims()
    assert dims.find("x", (12, 4, 5), 4) == SampleRows(0, 3)
    assert dims.find("x", (9, 3, 5), 3) == SampleRows(0, 3)
    assert dims.find("x", (10, 4, 5), 4) == SampleRows(1, 1)
    assert dims.num_reclassified == 1


def test_padded_rows():
    dims = SampleDims()
    assert dims.find("tokens", (4 * 7, 5), 4) == SampleRows(0, 7)
    assert dims.find("tokens", (3 * 6, 5), 3) == PaddedRows()
    assert dims.find("tokens", (4 * 7, 5), 4) == PaddedRows()
    assert dims.num_reclassified == 1


def test_one_sample_first():
    dims = SampleDims()
    assert dims.find("coin", (1,), 1) == SampleRows(0, 1)
    assert dims.find("coin", (1,), 3) == Shared((1,))
    assert dims.num_reclassified == 1


def layer_noise(samples):
    return torch.randn(64, 32)


def test_noise_of_a_layer_is_shared_once_the_number_of_samples_has_changed():
    draws = KeyedDraws()
    drawn(layer_noise, [0, 1, 2, 3], draws)
    assert draws.num_reclassified == 0
    first = drawn(layer_noise, [4, 5, 6], draws)
    assert draws.num_reclassified == 1
    for samples in SPLITS["permuted"]:
        assert torch.equal(drawn(layer_noise, samples, draws), first)
    assert draws.num_reclassified == 1


def test_time_first_draws_belong_to_samples_once_the_width_has_changed():
    def draw(samples, width=12):
        return torch.randn(width, len(samples), 5)

    draws = KeyedDraws()
    full = drawn(draw, EVERYTHING)  # 12 is no multiple of 8
    drawn(draw, [0, 1, 2, 3], draws)  # of 4
    assert torch.equal(drawn(lambda s: draw(s, 9), [4, 5], draws), rows_of(full, [4, 5], dim=1)[:9])
    assert draws.num_reclassified == 1
    for samples in SPLITS["halves"]:
        assert torch.equal(drawn(draw, samples, draws), rows_of(full, samples, dim=1))


def test_one_sample_gives_the_same_numbers_in_any_dim():
    """A micro-batch of one sample does not show the dim, so that it must not matter."""
    draws = KeyedDraws()
    full = drawn(lambda s: torch.randn(7, len(s), 5), EVERYTHING)
    alone = drawn(lambda s: torch.randn(7, len(s), 5), [3], draws)
    assert torch.equal(alone, full[:, 3:4])


SHARED = {
    "coin of layer drop": lambda s: torch.rand([]),
    "one number": lambda s: torch.rand(1),
    "shared noise": lambda s: torch.randn(1, 7),
    "noise of a layer": lambda s: torch.randn(11, 13),
    "index": lambda s: torch.randint(1000, (1,)),
    "permutation of patches": lambda s: torch.randperm(1009),
    "in place": lambda s: torch.empty(11).exponential_(),
    "dropout of shared embeddings": lambda s: F.dropout(torch.ones(11, 13), 0.5),
    "Beta, as in mixup": lambda s: torch.distributions.Beta(0.4, 0.4).sample(),
    "Dirichlet": lambda s: torch.distributions.Dirichlet(torch.ones(2)).sample(),
    "multinomial": lambda s: torch.multinomial(torch.ones(100), 11, replacement=True),
}


@pytest.mark.parametrize("name", SHARED)
def test_draws_without_samples_are_those_of_the_window(name):
    function = SHARED[name]
    draws = KeyedDraws()
    full = drawn(function, EVERYTHING, draws)
    for samples in ([0, 1], [2, 3, 4], [5, 6, 7]):
        assert torch.equal(drawn(function, samples, draws), full)
    assert draws.num_reclassified == 0
    with micro_batch(EVERYTHING) as draws:
        function(EVERYTHING)
        assert not torch.equal(function(EVERYTHING), full)  # the next draw
        draws.begin(draws._micro_batch.keys, torch.tensor([5]))
        assert not torch.equal(function(EVERYTHING), full)  # another window


def test_shared_draws_of_two_samples_do_not_split_a_distribution():
    """Two concentrations for two samples are one distribution all the same."""
    sample = drawn(lambda s: torch.distributions.Dirichlet(torch.ones(2)).sample(), [0, 1])
    assert 0 < sample[0] < 1
    assert sample.sum() == pytest.approx(1)


def test_permutation_is_one():
    permutation = drawn(lambda s: torch.randperm(1009), EVERYTHING)
    assert torch.equal(permutation.sort().values, torch.arange(1009))
