"""When draws are keyed: the scope, its end, suspension, and other threads."""

import threading

import pytest
import torch
import torch._dynamo  # replaces torch.manual_seed when it is imported
import torch.nn.functional as F
from draws_of_splits import WINDOW_KEY, keys_of, micro_batch
from torch import Tensor, nn

from hf_ga.draws.keyed import OF_GENERATOR, KeyedDraws
from hf_ga.draws.replacements import REPLACEMENTS

REPLACED = [*REPLACEMENTS, *OF_GENERATOR]


def current_functions():
    return [getattr(owner, name) for owner, name, _ in REPLACED]


def own_names():
    """Names of replaced functions that their owner has itself, not through its class."""
    return [name in vars(owner) for owner, name, _ in REPLACED]


FUNCTIONS = current_functions()
OWN_NAMES = own_names()


def is_restored():
    same = [now is before for now, before in zip(current_functions(), FUNCTIONS, strict=True)]
    return all(same) and own_names() == OWN_NAMES


def is_native(function):
    """Whether a call moves torch's generator."""
    before = torch.random.default_generator.get_state()
    function()
    return not torch.equal(torch.random.default_generator.get_state(), before)


def draw():
    return torch.randn(8, 3)


def test_all_functions_are_replaced_and_restored():
    draws = KeyedDraws()
    with draws.scope():
        replaced = current_functions()
        assert not any(now is before for now, before in zip(replaced, FUNCTIONS, strict=True))
        names = [function.__name__ for function in replaced]
        assert names == [function.__name__ for function in FUNCTIONS]
    assert is_restored()


def test_scopes_may_be_nested():
    draws = KeyedDraws()
    with draws.scope():
        draws.begin(keys_of(range(8)), WINDOW_KEY)
        with draws.scope():
            assert not is_native(draw)
        assert not is_native(draw)
    assert is_native(draw)
    assert is_restored()


def test_scopes_of_two_objects():
    with micro_batch(range(8)) as outer:
        first = draw()
        with micro_batch(range(8, 16)):
            assert not torch.equal(draw(), first)
        outer.begin(keys_of(range(8)), WINDOW_KEY)
        assert torch.equal(draw(), first)
    assert is_restored()


def test_functions_are_restored_after_an_error():
    with pytest.raises(ZeroDivisionError), micro_batch(range(8)):
        raise ZeroDivisionError
    assert is_restored()
    with pytest.raises(RuntimeError), micro_batch(range(8)):
        torch.rand(3, dtype=torch.int64)
    assert is_restored()


def test_draws_before_the_first_micro_batch_are_native():
    with KeyedDraws().scope():
        assert is_native(draw)


def test_suspended():
    with micro_batch(range(8)) as draws:
        with draws.suspended():
            assert is_native(draw)
            with draws.suspended():
                assert is_native(lambda: F.dropout(torch.ones(8), 0.5))
            assert is_native(draw)
        assert not is_native(draw)
        assert draws.num_draws == 1
        with pytest.raises(ZeroDivisionError), draws.suspended():
            raise ZeroDivisionError
        assert not is_native(draw)


def test_draws_are_counted_from_begin():
    with micro_batch(range(8)) as draws:
        assert draws.num_draws == 0
        draw()
        F.dropout(torch.ones(8, 2), 0.5)
        F.dropout(torch.ones(8, 2), 0.0)
        F.dropout(torch.ones(8, 2), 1.0)
        F.dropout(torch.ones(8, 2), 0.5, training=False)
        assert draws.num_draws == 2
        draws.begin(keys_of(range(8)), WINDOW_KEY)
        assert draws.num_draws == 0


def test_functions_that_were_imported_in_a_scope_are_native_later():
    with micro_batch(range(8)) as draws:
        imported = torch.randn
    assert is_native(lambda: imported(8, 3))
    del draws
    assert is_native(lambda: imported(8, 3))


def test_other_threads_draw_natively():
    native = []
    with micro_batch(range(8)) as draws:
        thread = threading.Thread(target=lambda: native.append(is_native(draw)))
        thread.start()
        thread.join()
        assert draws.num_draws == 0
    assert native == [True]


def test_device_contexts_know_torch_s_functions_after_a_scope():
    torch.utils._device._device_constructors.cache_clear()
    with micro_batch(range(8)), torch.device("meta"):
        assert torch.zeros(3).device.type == "meta"
    with torch.device("meta"):
        assert torch.rand(3).device.type == "meta"


def test_generators_stay_as_they_are():
    before = torch.get_rng_state()
    with micro_batch(range(8)):
        state = torch.get_rng_state()
        assert torch.equal(state, before)
        draw()
        torch.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), before)


def test_user_restores_the_state_of_the_generator():
    """As with torch's own draws, the numbers after it are the same again."""
    with micro_batch(range(8)) as draws:
        state = torch.get_rng_state()
        first = draw()
        with torch.random.fork_rng():
            torch.manual_seed(1)
        assert not torch.equal(draw(), first)
        torch.set_rng_state(state)
        assert torch.equal(draw(), first)
        # In another micro-batch, the state of an old one has no meaning.
        draws.begin(keys_of([3, 4]), WINDOW_KEY)
        expected = torch.randn(2, 3)
        draws.begin(keys_of([3, 4]), WINDOW_KEY)
        torch.set_rng_state(state)
        assert torch.equal(torch.randn(2, 3), expected)


def test_seed_of_the_user_repeats_the_draws_of_a_micro_batch():
    def seeded(samples, seed):
        torch.manual_seed(seed)
        assert torch.initial_seed() == seed
        return torch.randn(len(samples), 3), torch.randn(7, 5)

    with micro_batch(range(8)) as draws:
        first = draw()
        rows, shared = seeded(range(8), 1)
        for one, other in zip(seeded(range(8), 1), (rows, shared), strict=True):
            assert torch.equal(one, other)
        assert not torch.equal(seeded(range(8), 2)[0], rows)
        assert not torch.equal(rows, first)
        draws.begin(keys_of([3, 4]), WINDOW_KEY)
        draws.begin(keys_of([3, 4]), WINDOW_KEY)
        torch.randn(2, 3)
        part, shared_part = seeded([3, 4], 1)
        assert torch.equal(part, rows[3:5])
        assert torch.equal(shared_part, shared)


def test_draws_in_a_fork_with_a_seed_are_others_than_after_it():
    with micro_batch(range(8)):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            inside = draw()
        after = draw()
    with micro_batch(range(8)):
        assert torch.equal(draw(), after)
    assert not torch.equal(inside, after)


def test_saved_state_has_no_traces_of_the_draws(tmp_path):
    with micro_batch(range(8)):
        state = torch.get_rng_state()
        torch.save(state, tmp_path / "state.pt")
    assert vars(state) == {}
    assert torch.equal(torch.load(tmp_path / "state.pt"), state)


def test_methods_of_parameters_and_subclasses():
    class Named(Tensor):
        pass

    parameter = nn.Parameter(torch.zeros(8, 3))
    named = torch.zeros(8, 3).as_subclass(Named)
    with micro_batch(range(8)):
        with torch.no_grad():
            assert parameter.normal_() is parameter
        assert named.uniform_() is named
        assert not is_native(lambda: parameter.data.exponential_())
    assert parameter.abs().min() > 0
    assert named.abs().min() > 0
    assert is_restored()


def test_dropout_of_a_parameter_is_shared_by_the_samples():
    """Whose rows are as many as the samples of one micro-batch. The control is no parameter."""
    weight = nn.Parameter(torch.ones(8, 3))
    with micro_batch(range(8)):
        of_eight = F.dropout(weight, 0.5)
        rows_of_eight = F.dropout(torch.ones(8, 3), 0.5)
    with micro_batch(range(8, 12)):
        of_four = F.dropout(weight, 0.5)
        others = F.dropout(torch.ones(8, 3), 0.5)
    assert torch.equal(of_eight, of_four)
    assert not torch.equal(rows_of_eight, others)


METHODS = {
    "normal_": lambda: torch.empty(8, 3).normal_(),
    "bernoulli_": lambda: torch.empty(8, 3).bernoulli_(0.5),
    "bernoulli": lambda: torch.full((8, 3), 0.5).bernoulli(),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_draws_once_within_a_mode(name):
    """`torch.device` is a mode in which torch looks methods up by their names, so it finds the
    replacements where they call the methods.
    """
    with micro_batch(range(8)):
        expected = METHODS[name]()
    with micro_batch(range(8)) as draws, torch.device("cpu"):
        assert torch.equal(METHODS[name](), expected)
        assert draws.num_draws == 1
