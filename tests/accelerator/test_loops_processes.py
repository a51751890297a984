"""The loops of `test_loops.py` on two processes, in layouts of the same windows: the weights are
those of the full batch in float64 on one process, or both processes refuse the loop.
"""

import copy
import os
from collections.abc import Callable
from functools import partial
from itertools import count

import accelerate
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from documented_loop import reset_states
from forked import on_two_ranks, outcome, without_errors
from test_loops import (
    CLOSE,
    EXACT,
    FAR,
    LEARNING_RATE,
    REFUSED,
    UNEQUAL,
    Loop,
    X,
    Y,
    accumulating,
    annealed,
    classifier,
    full_batches_of_sizes,
    plain,
    train_sizes,
    with_hooks,
)
from torch.utils.data import DataLoader, TensorDataset

from hf_ga import Accelerator

pytestmark = pytest.mark.slow("starts processes")
LAYOUTS = [4, 1]  # samples of a micro-batch; the window has 8


def for_each(
    tried: dict[str, Callable[[int], object]], layouts: list[int]
) -> dict[tuple[str, int], list]:
    """What each loop returns or raises on each of two ranks, in each layout."""

    def work():
        return {
            (name, size): outcome(partial(run, size))
            for name, run in tried.items()
            for size in layouts
        }

    first, second = without_errors(on_two_ranks(work, limit=300))
    return {key: [first[key], second[key]] for key in first}


def test_losses_are_those_of_the_full_batch():
    loops = {name: partial(loop.error, Accelerator) for name, loop in EXACT.items()}
    found = for_each(loops, [2])
    found |= for_each({name: loops[name] for name in UNEQUAL}, LAYOUTS)
    wrong = {key: errors for key, errors in found.items() if not _are_close(errors)}
    assert not wrong


def _are_close(errors: list) -> bool:
    return all(isinstance(error, float) and error < CLOSE for error in errors)


def test_accelerates_mean_of_means_is_another_one():
    loop = EXACT["raised_to_1"]
    found = for_each({"raised_to_1": partial(loop.error, accelerate.Accelerator)}, LAYOUTS)
    assert min(error for errors in found.values() for error in errors) > FAR


def test_factors_follow_the_updates():
    """Not the iterations: a rehearsal is one more where a process has one micro-batch."""
    expected = annealed(8, accelerate.Accelerator)

    def error(counts_iterations, size):
        weights = annealed(size, counts_iterations=counts_iterations)
        return float((weights - expected).norm() / expected.norm())

    found = for_each({"updates": partial(error, False)}, [2, *LAYOUTS])
    assert all(map(_are_close, found.values()))
    found = for_each({"iterations": partial(error, True)}, [4])
    assert all(
        "factor in the loss is 0.2 in one iteration and 0.5" in text for text in found.popitem()[1]
    )


def test_a_factor_that_is_drawn_for_each_update_may_be_allowed():
    """The rehearsal, which is not compared then, draws another one."""

    def iteration(accelerator, model, optimizer, x, y, values):
        share = float(np.random.default_rng(next(numbers)).beta(1, 1))
        np.random.rand()  # as a loop's own draw does, this moves numpy's generator
        accelerator.backward(share * F.cross_entropy(model(x), y))

    numbers = count()
    options = {"allow_split_dependent_randomness": True}
    loop = Loop(plain, iteration=iteration, options=options)
    (found,) = for_each({"drawn": partial(loop.run, Accelerator)}, [4]).values()
    assert all(isinstance(weights, torch.Tensor) for weights in found), found


@pytest.mark.parametrize("size", LAYOUTS)
def test_a_factor_of_its_own_on_a_rank_is_refused(size):
    """Which no rank can see by itself."""

    def iteration(accelerator, model, optimizer, x, y, values):
        factor = 1.0 + accelerator.process_index
        accelerator.backward(factor * F.cross_entropy(model(x), y))

    loop = Loop(plain, iteration=iteration)
    (said,) = for_each({"": partial(loop.run, Accelerator)}, [size]).values()
    assert all("differs between processes" in str(text) for text in said), said


def test_other_numbers_of_backwards_on_a_rank_are_refused():
    """In the last micro-batch of a window that is not rehearsed."""

    def iteration(accelerator, model, optimizer, x, window):
        accelerator.backward(model(x).pow(2).mean())
        if window[0] == 3 and accelerator.is_main_process:
            accelerator.backward(F.softplus(model(x)).mean())

    columns = (torch.randn(40, 6), torch.arange(40) // 8)
    loop = Loop(plain, iteration=iteration, columns=columns)
    (said,) = for_each({"": partial(loop.run, Accelerator)}, [4]).values()
    assert all("ran accelerator.backward more often" in str(text) for text in said), said


def adversarial():
    """Moves the weights along their gradient between two backwards, and back."""
    reset_states()
    accelerator = Accelerator(cpu=True)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * parameter.grad.sign()
        accelerator.backward(F.cross_entropy(model(x), y))
        model.load_state_dict(before)
        optimizer.step()
        optimizer.zero_grad()


def test_weights_that_move_between_two_backwards_are_refused():
    """As `.grad` may be no gradient then. On one process, a window of one micro-batch may do so."""
    (said,) = for_each({"": lambda size: adversarial()}, [4]).values()
    assert all("weights changed within a window" in str(text) for text in said), said


# Their bodies read an attribute of the bare model, which DDP hides.
NOT_UNDER_DDP = {"in_batch_negatives_by_functional", "a_centre_that_the_loss_keeps"}


def test_losses_that_depend_on_the_split_are_refused():
    """On one rank by its name, on the other one by that or as the failure of the first. Torch's
    BatchNorm raises an error of its own where a micro-batch has one sample.
    """
    tried = {
        name: partial(loop.run, Accelerator)
        for name, (loop, _) in REFUSED.items()
        if name not in NOT_UNDER_DDP
    }
    found = for_each(tried, LAYOUTS)
    accepted = {key: said for key, said in found.items() if not all(map(_is_refusal, said))}
    assert set(accepted) == {("batch_norm", 1), ("batch_norm_in_a_linear_loss", 1)}
    assert all(
        "more than 1 value per channel" in text for said in accepted.values() for text in said
    )


def _is_refusal(said: object) -> bool:
    return isinstance(said, str) and said.startswith(("LossNotAdditive: ", "ProcessFailed: "))


def hooked_on_main(change):
    """A loop with a hook on a parameter of the main process only."""
    is_main = os.environ["RANK"] == "0"
    return Loop(plain, partial(with_hooks, *([change] if is_main else [])))


@pytest.mark.parametrize("size", [2, 1])
def test_hooks_of_one_process(size):
    """One that only looks may be on the main process alone, as loggers register theirs; one that
    changes the gradient there would let the weights of the processes drift apart.
    """

    def work():
        looking = hooked_on_main(lambda gradient: None).run(Accelerator, size)
        halving = hooked_on_main(lambda gradient: gradient / 2)
        return looking, outcome(partial(halving.run, Accelerator, size))

    (first, said), (second, said_too) = without_errors(on_two_ranks(work))
    assert torch.equal(first, second)
    assert "changes the window's gradient on one process in another way" in said
    assert said_too == said


@pytest.mark.parametrize("steps", [2, 1])
def test_a_process_that_cannot_collate_a_rehearsal_goes_on_with_the_others(steps):
    """In most windows, the samples of one process have two sizes, those of the other one."""

    sizes = (2, 3, 3, 3, 3, 3)

    def work():
        return train_sizes(Accelerator, steps, accumulating, sizes)

    first, second = without_errors(on_two_ranks(work))
    assert torch.equal(first, second)
    expected = full_batches_of_sizes(2 * steps, sizes)
    assert (first - expected).norm() < CLOSE * expected.norm()
