"""The loop of Accelerate's documentation with one changed import: whatever the layout and the
number of processes, two epochs end with the same weights. Accelerate's own Accelerator fails the
same comparison.
"""

from functools import partial

import accelerate
import pytest
from documented_loop import (
    CASES,
    FULL_BATCH,
    LAYOUTS,
    TWO_STEPS,
    UNEVEN,
    Layout,
    distance,
    num_updates,
    reset_states,
    train,
)
from forked import on_ranks, without_errors

from hf_ga import Accelerator

CLOSE = 1e-6  # relative: norm of the difference over norm of the weights
FAR = 1e-3
NUM_SAMPLES = 37  # windows of 16, 16 and 5 samples
LAST_OF_ONE = 33  # windows of 16, 16 and 1 samples: all ranks but one have none


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


@pytest.fixture(scope="module")
def on_one_process():
    """(name of a case, number of samples) -> trained on the full batch; each is trained once."""
    found = {}

    def full_batch(name, num_samples):
        if (name, num_samples) not in found:
            found[name, num_samples] = train(Accelerator, FULL_BATCH, CASES[name], num_samples)
        return found[name, num_samples]

    return full_batch


def assert_same_training(trained, reference, num_samples):
    assert len(trained.norms) == num_updates(num_samples)
    assert trained.rates == pytest.approx(reference.rates, rel=1e-12)
    assert trained.norms == pytest.approx(reference.norms, rel=1e-4)
    error = distance(trained.weights, reference.weights)
    assert error < CLOSE


# On one process; `test_ranks_end_with_the_same_weights` trains all.
ON_ONE = ("GPT-2", "BERT classification", "T5", "tuples", "LoRA", "Mixtral")


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, UNEVEN) for name in ON_ONE), ("GPT-2", TWO_STEPS)]
)
def test_layouts_end_with_the_same_weights(on_one_process, name, layout):
    reference = on_one_process(name, NUM_SAMPLES)
    trained = train(Accelerator, layout, CASES[name], NUM_SAMPLES)
    assert_same_training(trained, reference, NUM_SAMPLES)
    assert min(trained.norms) > CASES[name].max_norm  # every update was clipped


@pytest.mark.parametrize("name", ON_ONE)
def test_layouts_of_accelerate_end_with_other_weights(name):
    """The control."""
    full_batch, two_steps = (
        train(accelerate.Accelerator, layout, CASES[name], NUM_SAMPLES)
        for layout in (FULL_BATCH, TWO_STEPS)
    )
    assert distance(two_steps.weights, full_batch.weights) > FAR


def train_layouts(name, num_processes):
    """On each rank: (layout, number of samples) -> trained; GPT-2 in all layouts."""
    first, *others, last = LAYOUTS[num_processes]
    trials = [(last, NUM_SAMPLES), (first, LAST_OF_ONE)]
    if name == "GPT-2":
        trials += [(layout, NUM_SAMPLES) for layout in (first, *others)]
    return {trial: train(Accelerator, trial[0], CASES[name], trial[1]) for trial in trials}


ON_THREE = ("GPT-2", "XLNet", "questions")


@pytest.mark.slow("trains on up to three processes")
@pytest.mark.parametrize(
    ("name", "num_processes"),
    [*((name, 2) for name in CASES if name not in ON_THREE), ("GPT-2", 2)]
    + [(name, 3) for name in ON_THREE],
)
def test_ranks_end_with_the_same_weights(on_one_process, name, num_processes):
    """Also where the last window leaves a rank, or all but one, without a sample."""
    work = partial(train_layouts, name, num_processes)
    for found in without_errors(on_ranks(work, num_processes)):
        for (_, num_samples), trained in found.items():
            assert trained.num_processes == num_processes
            assert_same_training(trained, on_one_process(name, num_samples), num_samples)


@pytest.mark.slow("trains on up to three processes")
@pytest.mark.parametrize("num_processes", [2, 3])
def test_ranks_of_accelerate_end_with_other_weights(num_processes):
    """The control: windows of as many samples on two ranks, of 18 on three."""
    layout = LAYOUTS[num_processes][0]
    layout = Layout(layout.per_device_batch_size, 1)
    full_batch = train(accelerate.Accelerator, FULL_BATCH, CASES["GPT-2"], NUM_SAMPLES)
    work = partial(train, accelerate.Accelerator, layout, CASES["GPT-2"], NUM_SAMPLES)
    for found in on_ranks(work, num_processes):
        assert found.num_processes == num_processes
        assert distance(found.weights, full_batch.weights) > FAR
