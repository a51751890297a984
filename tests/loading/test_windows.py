"""WindowLoader: each sample once, the same windows and tensors in every layout, resumable, no
global randomness moved.
"""

import random
from functools import partial

import helpers as h
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ChainDataset, DataLoader

import hf_ga
from hf_ga.order.plan import plan_by_sizes


class Numbers:
    """Sample i is {"x": i}."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": index}


class Augmented(Numbers):
    """Draws from torch, numpy and Python for every sample."""

    def __getitem__(self, index):
        return {
            "x": index,
            "draws": torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]),
        }


def stack(samples):
    return {name: torch.stack([torch.as_tensor(s[name]) for s in samples]) for name in samples[0]}


def stack_with_noise(samples):
    """A random collator: two draws of the batch's shape, as masked-LM collators make."""
    return {
        **stack(samples),
        "noise": torch.cat([torch.rand(len(samples), 3), torch.rand(len(samples), 3)], dim=1),
    }


def make_loader(dataset, collate_fn=stack, accumulation=1, **options):
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    return hf_ga.WindowLoader(dataset, collate_fn, accelerator=accelerator, **options)


def ids_of(window):
    """The sample ids as the tensors have them, micro-batch by micro-batch."""
    return [m.batch["x"].tolist() for m in window.micro_batches]


def flat(lists):
    return [item for inner in lists for item in inner]


def tensors_by_sample(loader):
    """{sample id: {name: values}} over one epoch, found from the tensors themselves."""
    found = {}
    for micro_batch in (m for window in loader for m in window.micro_batches):
        for row, sample_id in enumerate(micro_batch.batch["x"].tolist()):
            assert sample_id not in found
            found[sample_id] = {
                name: values[row].tolist() for name, values in micro_batch.batch.items()
            }
    return found


@given(
    num_samples=st.integers(1, 70),
    window=st.integers(1, 40),
    micro_batch=st.integers(1, 45),
    epoch=st.integers(0, 3),
    drop=st.booleans(),
    shuffle=st.booleans(),
)
def test_every_sample_once_an_epoch(num_samples, window, micro_batch, epoch, drop, shuffle):
    options = {
        "per_device_batch_size": micro_batch,
        "global_batch_size": window,
        "shuffle": shuffle,
    }
    if drop and num_samples < window:
        with pytest.raises(hf_ga.DataError, match="drop_last_window"):
            make_loader(Numbers(num_samples), drop_last_window=True, **options)
        return
    loader = make_loader(Numbers(num_samples), drop_last_window=drop, **options)
    loader.set_epoch(epoch)
    windows = list(loader)
    full, rest = divmod(num_samples, window)
    assert [w.num_samples for w in windows] == [window] * full + [rest] * (rest > 0 and not drop)
    assert len(loader) == len(windows)
    seen = [flat(ids_of(w)) for w in windows]
    assert [len(ids) for ids in seen] == [w.num_samples for w in windows]
    assert len(set(flat(seen))) == len(flat(seen)) == (full * window if drop else num_samples)
    assert all(0 < len(ids) <= micro_batch for w in windows for ids in ids_of(w))
    for index, w in enumerate(windows):
        assert (w.index, w.epoch) == (index, epoch)
        assert [m.sample_ids.tolist() for m in w.micro_batches] == ids_of(w)
        assert flat(m.positions.tolist() for m in w.micro_batches) == list(
            range(index * window, index * window + w.num_samples)
        )
    assert shuffle or flat(seen) == list(range(len(flat(seen))))


LAYOUTS = {
    "one by one": {"per_device_batch_size": 1},
    "by three": {"per_device_batch_size": 3},
    "whole": {"per_device_batch_size": 16},
    "by three, in workers": {"per_device_batch_size": 3, "num_workers": 2},
    "uneven": {"planner": partial(plan_by_sizes, sizes=[7, 2])},
    "length-sorted": {
        "planner": partial(plan_by_sizes, sizes=[5]),
        "lengths": h.ragged_lengths(37),
    },
}


def test_accumulation_steps_size_the_window():
    loader = make_loader(Numbers(50), accumulation=3, per_device_batch_size=5)
    assert [[len(ids) for ids in ids_of(w)] for w in loader] == [[5, 5, 5]] * 3 + [[5]]


def test_epochs_advance_and_can_be_set():
    loader = make_loader(Numbers(20), global_batch_size=8)
    epochs = [[(w.epoch, flat(ids_of(w))) for w in loader] for _ in range(3)]
    assert [{epoch for epoch, _ in found} for found in epochs] == [{0}, {1}, {2}]
    assert len({str([ids for _, ids in found]) for found in epochs}) == 3
    loader.set_epoch(1)
    assert [(w.epoch, flat(ids_of(w))) for w in loader] == epochs[1]


@pytest.mark.parametrize(("consumed", "num_workers"), [(0, 0), (1, 0), (3, 0), (0, 2), (1, 2)])
def test_resume_inside_an_epoch(consumed, num_workers):
    """In other micro-batches. The state counts windows that were taken, not those that workers
    prefetched.
    """
    options = {"global_batch_size": 8, "seed": 5}
    first = make_loader(
        Augmented(30), stack_with_noise, per_device_batch_size=4, num_workers=num_workers, **options
    )
    first.set_epoch(2)
    for _ in zip(range(consumed), first, strict=False):
        pass
    second = make_loader(Augmented(30), stack_with_noise, per_device_batch_size=3, **options)
    second.load_state_dict(first.state_dict())
    assert second.num_consumed == consumed
    whole = make_loader(Augmented(30), stack_with_noise, per_device_batch_size=4, **options)
    whole.set_epoch(2)
    expected = [w for w in whole if w.index >= second.num_consumed]
    resumed = list(second)
    assert [(w.epoch, w.index, flat(ids_of(w))) for w in resumed] == [
        (2, w.index, flat(ids_of(w))) for w in expected
    ]
    assert [rows_of(w, "noise") for w in resumed] == [rows_of(w, "noise") for w in expected]
    assert second.state_dict()["epoch"] == 3


def rows_of(window, name):
    return flat(m.batch[name].tolist() for m in window.micro_batches)


@pytest.mark.parametrize(
    ("size", "options", "named"),
    [
        (30, {"seed": 6}, "seed 5 -> 6"),
        (31, {}, "num_samples 30 -> 31"),
        (30, {"global_batch_size": 9}, "window_size 8 -> 9"),
        (30, {"shuffle": False}, "shuffle 1 -> 0"),
    ],
    ids=str,
)
def test_a_state_of_another_order_is_refused(size, options, named):
    common = {"global_batch_size": 8, "seed": 5}
    state = make_loader(Numbers(30), **common).state_dict()
    loader = make_loader(Numbers(size), **{**common, **options})
    with pytest.raises(hf_ga.ConfigError, match=named):
        loader.load_state_dict(state)
    assert (loader.epoch, loader.num_consumed) == (0, 0)


@pytest.mark.parametrize("found", ["pad_to_window", "is_padding_tried", "is_width_tried"])
def test_what_training_found_out_about_padding_is_resumed(found):
    """Else the windows after the checkpoint would have other micro-batches."""
    first = make_loader(Numbers(30))
    second = make_loader(Numbers(30))
    second.load_state_dict(first.state_dict())
    assert not getattr(second.state, found)
    setattr(first.state, found, True)
    second.load_state_dict(first.state_dict())
    assert getattr(second.state, found)


def test_order_and_randomness_belong_to_the_sample_not_to_the_layout():
    """What a sample and a window draw depends on their positions. Neither workers nor the global
    random states matter.
    """
    found = {}
    next_epoch = {}
    for index, (name, options) in enumerate(LAYOUTS.items()):
        torch.manual_seed(index)
        np.random.seed(index)
        random.seed(index)
        loader = make_loader(
            Augmented(37), stack_with_noise, global_batch_size=16, seed=2**40, **options
        )
        found[name], next_epoch[name] = tensors_by_sample(loader), tensors_by_sample(loader)
    assert all(tensors == found["whole"] for tensors in found.values())
    assert all(tensors == next_epoch["whole"] for tensors in next_epoch.values())
    other = tensors_by_sample(
        make_loader(Augmented(37), stack_with_noise, global_batch_size=16, **LAYOUTS["whole"])
    )
    assert list(other) != list(found["whole"]) and other != found["whole"], "control: another seed"
    for name in ("draws", "noise"):  # all different: between samples, and between epochs
        drawn = [
            str(tensors[i][name])
            for tensors in (found["whole"], next_epoch["whole"])
            for i in range(37)
        ]
        assert len(set(drawn)) == 2 * 37
    plain = []
    for size in (3, 16):  # control: the same seed and order
        torch.manual_seed(0)
        plain.append(
            flat(
                b["noise"].tolist()
                for b in DataLoader(Numbers(32), size, collate_fn=stack_with_noise)
            )
        )
    assert plain[0] != plain[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_random_states_do_not_move(num_workers):
    before = h.global_random_states()
    loader = make_loader(
        Augmented(20),
        stack_with_noise,
        global_batch_size=8,
        per_device_batch_size=3,
        num_workers=num_workers,
    )
    for window in loader:
        loader.trial_samples(5)
        window.padded_to_window()
    assert h.global_random_states() == before
    stack_with_noise([Augmented(1)[0]])  # the control
    assert h.global_random_states() != before


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        (Numbers(0), {}, hf_ga.DataError, "0 samples .* the dataset is empty"),
        (ChainDataset([]), {}, hf_ga.DataError, "ChainDataset has no length .*use a StreamLoader"),
        (iter(()), {}, hf_ga.DataError, "tuple_iterator has no length"),
        (Numbers(5), {"lengths": np.ones(6)}, hf_ga.ConfigError, "6 lengths, 5 samples"),
        (Numbers(5), {"per_device_batch_size": 0}, hf_ga.ConfigError, "at least 1, got 0"),
        (
            Numbers(5),
            {"global_batch_size": 0},
            hf_ga.ConfigError,
            "global_batch_size must be at least 1, got 0",
        ),
    ],
)
def test_errors(dataset, options, error, message):
    with pytest.raises(error, match=message):
        make_loader(dataset, **options)


class OwnGenerator:
    """A collator with a random state of its own, as DataCollatorForLanguageModeling(seed=...)
    has.
    """

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, samples):
        return {**stack(samples), "noise": torch.rand(len(samples), 3, generator=self.generator)}


def test_a_collator_with_its_own_generator():
    """Its masks would depend on the layout, unseen by the generators that are seeded here."""
    before = h.global_random_states()
    with pytest.raises(hf_ga.UnkeyedRandomness, match="collate function"):
        tensors_by_sample(
            make_loader(Numbers(32), OwnGenerator(), global_batch_size=16, per_device_batch_size=3)
        )
    assert h.global_random_states() == before, "after an error, too"


@pytest.mark.parametrize(
    "plan",
    [
        lambda n: [np.arange(n - 1)],
        lambda n: [np.arange(n), np.arange(1)],
        lambda n: [np.arange(n), np.arange(0)],
    ],
    ids=["drops", "repeats", "empty micro-batch"],
)
def test_a_planner_that_loses_samples_is_refused(plan):
    loader = make_loader(
        Numbers(8), global_batch_size=4, planner=lambda lengths, num_processes: [plan(len(lengths))]
    )
    with pytest.raises(hf_ga.HfGaError):
        list(loader)


def stack_numpy(samples):
    """A column left in numpy, with a draw so that rows are cut from the whole window."""
    return {**stack_with_noise(samples), "y": np.array([s["y"] for s in samples])}


def test_numpy_columns_are_cut_like_tensors():
    rows = [{"x": i, "y": np.float32(i)} for i in range(6)]
    (window,) = make_loader(rows, stack_numpy, global_batch_size=6, per_device_batch_size=2)
    assert [m.batch["y"].tolist() for m in window.micro_batches] == ids_of(window)
