"""A run that stops and goes on from `save_state` ends as if it had never stopped: bit for bit in
the same layout, within rounding in another one and on another number of processes.

The script is Accelerate's own example; Accelerate's Accelerator fails the same comparison.
"""

import json
import random
from functools import cache, partial
from itertools import cycle

import accelerate
import numpy as np
import pytest
import torch
from documented_loop import CASES, FULL_BATCH, LAYOUTS, TWO_STEPS, UNEVEN, distance, reset_states
from forked import on_ranks, without_errors
from resumable_loop import train_with_states
from torch.utils.data import DataLoader, TensorDataset

from hf_ga import Accelerator
from hf_ga.accelerator.state import STATE_FILE_NAME
from hf_ga.errors import HfGaError

NUM_SAMPLES = 37  # windows of 16, 16 and 5 samples: three updates in each of two epochs
CASE = CASES["GPT-2"]
# Where a run stops -> how it saves, and how many updates it has made.
STOPS = {"step_2": (2, 2), "step_4": (2, 4), "epoch_0": ("epoch", 3)}
WITHIN = {"step_1": (1, 1)}


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


@pytest.fixture(scope="module")
def undisturbed():
    """layout -> a run on one process that never stops; each is trained once."""
    found = {}

    def run(layout, accelerator_class=Accelerator):
        if (layout, accelerator_class) not in found:
            found[layout, accelerator_class] = train_with_states(
                accelerator_class, layout, CASE, NUM_SAMPLES
            )
        return found[layout, accelerator_class]

    return run


def begin(folder, stop, layout, accelerator_class=Accelerator, **options):
    """Train until the state is saved; on every rank."""
    saved_every, _ = STOPS[stop]
    train_with_states(
        accelerator_class,
        layout,
        CASE,
        NUM_SAMPLES,
        output_dir=folder,
        checkpointing_steps=saved_every,
        stop_after=stop,
        **options,
    )


def go_on(folder, stop, layout, accelerator_class=Accelerator, **options):
    """As a new process would: its generators stand somewhere else."""
    torch.manual_seed(999)
    np.random.seed(999)
    random.seed(999)
    return train_with_states(
        accelerator_class,
        layout,
        CASE,
        NUM_SAMPLES,
        resume_from_checkpoint=folder / stop,
        **options,
    )


def assert_went_on(resumed, reference, stop):
    _, num_done = (STOPS | WITHIN)[stop]
    assert resumed.rates == pytest.approx(reference.rates[num_done:], rel=1e-12)
    assert resumed.norms == pytest.approx(reference.norms[num_done:], rel=1e-4)
    assert distance(resumed.weights, reference.weights) < 1e-6


def same_bits(weights, others):
    return all(torch.equal(weights[name], others[name]) for name in others)


# Where a run stops has nothing to do with how its windows are split: each stop in uneven
# micro-batches, and each layout at one of the stops.
@pytest.mark.parametrize(
    ("stop", "layout"),
    [*((stop, UNEVEN) for stop in STOPS), ("step_2", FULL_BATCH)],
)
def test_the_same_layout_goes_on_bit_for_bit(undisturbed, tmp_path, stop, layout):
    begin(tmp_path, stop, layout)
    resumed = go_on(tmp_path, stop, layout)
    reference = undisturbed(layout)
    assert_went_on(resumed, reference, stop)
    assert same_bits(resumed.weights, reference.weights)


@pytest.mark.parametrize(
    ("stop", "before", "after"),
    [("step_2", TWO_STEPS, UNEVEN), ("epoch_0", UNEVEN, FULL_BATCH)],
)
def test_another_layout_goes_on(undisturbed, tmp_path, stop, before, after):
    begin(tmp_path, stop, before)
    resumed = go_on(tmp_path, stop, after)
    assert_went_on(resumed, undisturbed(FULL_BATCH), stop)


@pytest.mark.parametrize("stop", STOPS)
def test_accelerate_does_not(undisturbed, tmp_path, stop):
    """The control."""
    begin(tmp_path, stop, TWO_STEPS, accelerate.Accelerator)
    resumed = go_on(tmp_path, stop, FULL_BATCH, accelerate.Accelerator)
    reference = undisturbed(FULL_BATCH, accelerate.Accelerator)
    assert distance(resumed.weights, reference.weights) > 1e-3


def test_another_seed_in_the_script_does_not_change_what_is_left(undisturbed, tmp_path):
    """A script that sets no seed has another one in each process."""
    begin(tmp_path, "step_2", TWO_STEPS)
    resumed = go_on(tmp_path, "step_2", TWO_STEPS, seed=7)
    assert_went_on(resumed, undisturbed(TWO_STEPS), "step_2")


def test_the_scale_of_fp16_goes_on(tmp_path, own_accelerator_state):
    reference = train_with_states(Accelerator, TWO_STEPS, CASE, NUM_SAMPLES, mixed_precision="fp16")
    begin(tmp_path, "step_4", TWO_STEPS, mixed_precision="fp16")
    resumed = go_on(tmp_path, "step_4", TWO_STEPS, mixed_precision="fp16")
    assert resumed.rates == reference.rates[4:]
    assert same_bits(resumed.weights, reference.weights)


def train_by_hand(batch_size, first, last, load=None, save=None):
    """A loop that divides by k, and multiplies its inputs by a number that all samples share."""
    reset_states()
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(72.0).view(24, 3) / 72), batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if load is not None:
        accelerator.load_state(load)
    step = first
    for number, (x,) in enumerate(loader, start=1):
        accelerator.backward(model(x * torch.rand(())).pow(2).mean() / (4 // batch_size))
        if number % (4 // batch_size) == 0:
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        if step == last:
            break
    if save is not None:
        accelerator.save_state(save)
    return flat_weights(model)


def flat_weights(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("batch_size", [4, 2])
def test_draws_of_a_loop_by_hand_that_all_samples_share_go_on(tmp_path, batch_size):
    expected = train_by_hand(batch_size, 0, 6)
    train_by_hand(batch_size, 0, 2, save=tmp_path / "first")
    train_by_hand(batch_size, 2, 4, load=tmp_path / "first", save=tmp_path / "second")
    found = train_by_hand(batch_size, 4, 6, load=tmp_path / "second")
    assert torch.allclose(found, expected, rtol=1e-5, atol=0)


def test_a_checkpoint_of_an_earlier_version_is_loaded(tmp_path):
    train_by_hand(4, 0, 2, save=tmp_path)
    path = tmp_path / STATE_FILE_NAME
    saved = json.loads(path.read_text())
    del saved["num_updates_by_hand"]
    path.write_text(json.dumps(saved))
    train_by_hand(4, 2, 6, load=tmp_path)


def test_another_window_is_refused(tmp_path):
    """Windows of 8 samples would visit others than those that are left."""
    begin(tmp_path, "step_2", TWO_STEPS)
    with pytest.raises(HfGaError, match=r"16|window"):
        go_on(tmp_path, "step_2", type(TWO_STEPS)(8, 1))


def test_a_state_that_is_saved_within_a_window(undisturbed, tmp_path):
    """Accelerate's example saves after any batch, and loses the gradients of the window: refused,
    or right.
    """

    class SavesEarly(Accelerator):
        """Saves after the third micro-batch, the first of the second window."""

        num_backwards = 0

        def backward(self, loss, **kwargs):
            super().backward(loss, **kwargs)
            self.num_backwards += 1
            if self.num_backwards == 3:
                self.save_state(tmp_path / "step_1")

    try:
        train_with_states(SavesEarly, TWO_STEPS, CASE, NUM_SAMPLES)
        resumed = go_on(tmp_path, "step_1", TWO_STEPS)
    except HfGaError:
        return
    assert_went_on(resumed, undisturbed(TWO_STEPS), "step_1")


def train_with_loaders(num_loaders, *, save=None, load=None, before_step=False):
    """A new loader in each epoch, of two updates. Saves in the last epoch."""
    reset_states()
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = TensorDataset(torch.arange(24.0).view(8, 3))
    if num_loaders == 0:
        accelerator.load_state(load)
    for epoch in range(num_loaders):
        loader = accelerator.prepare(DataLoader(data, 2, shuffle=True))
        if load is not None:
            accelerator.load_state(load)
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).pow(2).mean())
                has_to_save = save is not None and accelerator.sync_gradients
                has_to_save = has_to_save and epoch == num_loaders - 1
                if has_to_save and before_step:
                    accelerator.save_state(save)
                optimizer.step()
                optimizer.zero_grad()
                if has_to_save:
                    accelerator.save_state(save)
                    return flat_weights(model)
    return flat_weights(model)


@pytest.mark.parametrize(("num_saved", "num_prepared"), [(3, 1), (1, 0)])
def test_a_position_without_a_loader_is_refused(tmp_path, num_saved, num_prepared):
    """The loader would begin with the second epoch, or with the first one again."""
    train_with_loaders(num_saved, save=tmp_path)
    with pytest.raises(HfGaError, match=f"in {num_saved} prepared loaders, but .* {num_prepared},"):
        train_with_loaders(num_prepared, load=tmp_path)


def test_a_model_without_its_optimizer_needs_no_loader(tmp_path):
    weights = train_with_loaders(1, save=tmp_path)
    reset_states()
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    accelerator.load_state(tmp_path)
    assert torch.equal(flat_weights(model), weights)


def test_a_state_that_is_saved_before_the_step_is_refused(tmp_path):
    """The window would count as done, but its update would be lost."""
    with pytest.raises(HfGaError, match="before the optimizer's step of a window"):
        train_with_loaders(1, save=tmp_path, before_step=True)


# -- other numbers of processes

MOVES = [
    (1, TWO_STEPS, 2, LAYOUTS[2][1]),
    (1, UNEVEN, 3, LAYOUTS[3][1]),
    (2, LAYOUTS[2][0], 1, TWO_STEPS),
    (2, LAYOUTS[2][1], 3, LAYOUTS[3][0]),
    (3, LAYOUTS[3][1], 2, LAYOUTS[2][2]),
    (3, LAYOUTS[3][0], 1, FULL_BATCH),
]


def ranks(work, num_processes):
    """What each rank returns."""
    return [work()] if num_processes == 1 else without_errors(on_ranks(work, num_processes))


@pytest.mark.slow("trains on up to three processes")
@pytest.mark.parametrize(
    ("num_before", "before", "num_after", "after", "stop"),
    [(*move, stop) for move, stop in zip(MOVES, cycle(STOPS), strict=False)],
    ids=[f"{move[0]} to {move[2]} ranks" for move in MOVES],
)
def test_another_number_of_ranks_goes_on(
    undisturbed, tmp_path, num_before, before, num_after, after, stop
):
    """Each stop is tried in two moves."""
    ranks(partial(begin, tmp_path, stop, before), num_before)
    for resumed in ranks(partial(go_on, tmp_path, stop, after), num_after):
        assert resumed.num_processes == num_after
        assert_went_on(resumed, undisturbed(FULL_BATCH), stop)


@cache
def trained_on_two_ranks():
    """Without a stop."""
    return ranks(partial(train_with_states, Accelerator, LAYOUTS[2][1], CASE, NUM_SAMPLES), 2)


@pytest.mark.slow("trains on two processes")
@pytest.mark.parametrize("stop", STOPS)
def test_the_same_ranks_go_on_bit_for_bit(tmp_path, stop):
    layout = LAYOUTS[2][1]
    references = trained_on_two_ranks()
    ranks(partial(begin, tmp_path, stop, layout), 2)
    resumed = ranks(partial(go_on, tmp_path, stop, layout), 2)
    for one, reference in zip(resumed, references, strict=True):
        assert_went_on(one, reference, stop)
        assert same_bits(one.weights, reference.weights)


@pytest.mark.slow("trains on two processes")
def test_shards_go_on(undisturbed, tmp_path):
    """FSDP2: in the same layout, and in another one of as many ranks."""
    before, after = LAYOUTS[2][:2]
    without_errors(on_ranks(partial(begin, tmp_path, "step_4", before), 2, "fsdp2"))
    for layout in (before, after):
        work = partial(go_on, tmp_path, "step_4", layout)
        for resumed in without_errors(on_ranks(work, 2, "fsdp2")):
            assert_went_on(resumed, undisturbed(FULL_BATCH), "step_4")


@pytest.mark.slow("trains on two processes")
def test_fsdp1_on_a_cpu_is_refused(tmp_path):
    """Where torch would end the process."""
    work = partial(begin, tmp_path, "step_4", LAYOUTS[2][0])
    for error in on_ranks(work, 2, "fsdp1"):
        assert "On a CPU use FSDP2 or DDP" in str(error)
