"""Draws that cannot be tied to samples: refused with the line of the user's code, or allowed."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from draws_of_splits import WINDOW_KEY, keys_of, micro_batch

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import UnkeyedRandomness


def nested_tensor():
    rows = [torch.ones(2, 3), torch.ones(4, 3), torch.ones(1, 3), torch.ones(2, 3)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


REFUSED = {
    "permutation of the samples": lambda: torch.randperm(4),
    "permutation of rows of the samples": lambda: torch.randperm(12),
    "samples without replacement": lambda: torch.multinomial(torch.ones(9), 4),
    "out of normal": lambda: torch.normal(torch.zeros(4), 1.0, out=torch.empty(4)),
    "out of bernoulli": lambda: torch.bernoulli(torch.zeros(4), out=torch.empty(4)),
    "nested tensor": lambda: F.dropout(nested_tensor(), 0.5),
    "in vmap": lambda: torch.vmap(lambda x: x + torch.randn(4, 3), randomness="different")(
        torch.zeros(4)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(UnkeyedRandomness) as refusal, micro_batch(range(4)):
        REFUSED[name]()
    message = str(refusal.value)
    source, first_line = inspect.getsourcelines(REFUSED[name])
    lines = [f"{Path(__file__)}:{first_line + i}:" for i in range(len(source))]
    assert any(line in message for line in lines), message
    assert "\n" not in message
    assert "Draw it in the dataset or in the collate function" in message
    assert "Accelerator(allow_split_dependent_randomness=True)" in message
    with micro_batch(range(4), KeyedDraws(allow_unkeyed=True)) as draws:
        before = torch.get_rng_state()
        REFUSED[name]()
        assert not torch.equal(torch.get_rng_state(), before) or name == "out of bernoulli"
        assert draws.unkeyed_after_backward is None


def test_message():
    with pytest.raises(UnkeyedRandomness) as refusal, micro_batch(range(4)):
        order = torch.randperm(4)  # THIS LINE
        assert order is None
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.endswith("# THIS LINE"))
    assert str(refusal.value) == (
        f"randperm of shape [4] at {__file__}:{line}: it permutes the 4 samples of the micro-batch "
        "among themselves. Draw it in the dataset or in the collate function, or give it one row "
        "per sample, or use Accelerator(allow_split_dependent_randomness=True)."
    )


def test_shape_that_follows_the_data_is_refused():
    """Noise for selected tokens: a split would give the first ones the same numbers each time."""
    draws = KeyedDraws()
    with micro_batch(range(4), draws):
        torch.randn(7, 3)
        with pytest.raises(UnkeyedRandomness, match=r"randn of shape \[9, 3\].* its shape changes"):
            draws.begin(keys_of(range(4)), WINDOW_KEY)
            torch.randn(9, 3)


def test_dropout_that_cannot_be_keyed_is_refused_once():
    draws = KeyedDraws()
    with micro_batch(range(4), draws):
        F.dropout(torch.ones(7, 3), 0.5)
        draws.begin(keys_of(range(4)), WINDOW_KEY)
        with pytest.raises(UnkeyedRandomness, match=r"dropout of shape \[9, 3\]"):
            F.dropout(torch.ones(9, 3), 0.5)
        draws.allow_unkeyed = True
        assert F.dropout(torch.ones(9, 3), 0.5).shape == (9, 3)


def test_unkeyed_draws_do_not_change_the_keyed_ones():
    def numbers(samples, randperm):
        draws = KeyedDraws(allow_unkeyed=True)
        with micro_batch(samples, draws):
            first = torch.rand(len(samples))
            torch.randperm(randperm)
            return first, torch.rand(len(samples))

    for one, other in zip(numbers(range(4), 4), numbers(range(4), 5), strict=True):
        assert torch.equal(one, other)


def test_after_backward_unkeyed_draws_are_torch_s_own_and_noted():
    with micro_batch(range(4)) as draws:
        draws.after_backward()
        before = torch.get_rng_state()
        keyed = torch.randn(4, 3)
        assert draws.unkeyed_after_backward is None
        assert torch.equal(torch.get_rng_state(), before)
        torch.randperm(4)
        assert not torch.equal(torch.get_rng_state(), before)
        assert draws.unkeyed_after_backward.startswith(f"randperm of shape [4] at {__file__}:")
        torch.multinomial(torch.ones(9), 4)
        assert draws.unkeyed_after_backward.startswith("randperm")
        draws.begin(keys_of(range(4)), WINDOW_KEY)
        assert draws.unkeyed_after_backward is None
        assert torch.equal(torch.randn(4, 3), keyed)
        with pytest.raises(UnkeyedRandomness):
            torch.randperm(4)


@pytest.mark.parametrize(("num_pictures", "has_gradients"), [(1, True), (4, False)])
def test_after_backward_the_user_s_generator_draws_pictures(num_pictures, has_gradients):
    """A validation that seeds a generator wants the same pictures each time."""

    def pictures():
        generator = torch.Generator().manual_seed(0)
        with torch.set_grad_enabled(has_gradients):
            return torch.randn(num_pictures, 7, generator=generator)

    own = pictures()
    with micro_batch(range(4)) as draws:
        draws.models = [torch.nn.Identity()]
        draws.after_backward()
        assert torch.equal(pictures(), own)
        assert draws.unkeyed_after_backward.startswith("randn")


def test_after_backward_an_evaluation_draws_torch_s_own_numbers():
    torch.manual_seed(1)
    own = torch.randn(4)
    with micro_batch(range(4)) as draws, torch.no_grad():
        draws.models = [torch.nn.Identity()]
        draws.models[0].eval()
        torch.manual_seed(1)
        assert not torch.equal(torch.randn(4), own)
        draws.after_backward()
        draws.models[0].train()
        torch.manual_seed(1)
        assert not torch.equal(torch.randn(4), own)
        draws.models[0].eval()
        torch.manual_seed(1)
        assert torch.equal(torch.randn(4), own)
