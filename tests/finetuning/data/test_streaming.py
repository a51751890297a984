"""StreamLoader: the windows of a list, the same on every process without communication; a shuffle
buffer that needs no state.
"""

import random
import weakref
from functools import partial
from types import SimpleNamespace

import datasets
import helpers as h
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from forked import on_two_ranks, outcome
from torch.utils.data import IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

import hf_ga
from hf_ga.loading.streams.shuffle_buffer import shuffled
from hf_ga.loading.streams.stream_loader import StreamLoader
from hf_ga.order.plan import plan_by_sizes


class Numbers(IterableDataset):
    """Yields {"x": 0}, {"x": 1}, ..."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        for number in range(self.size):
            yield {"x": number}


class Listed(IterableDataset):
    """A stream of given samples."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Augmented(Numbers):
    """Draws from torch, numpy and Python for every sample."""

    def __iter__(self):
        for number in range(self.size):
            yield augmented(number)


def augmented(number):
    return {
        "x": number,
        "draws": torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()]),
    }


class AugmentedRows(list):
    """The same with random access."""

    def __getitem__(self, index):
        return augmented(index)


def stack(samples):
    return {name: torch.stack([torch.as_tensor(s[name]) for s in samples]) for name in samples[0]}


def stack_with_noise(samples):
    """A random collator: it draws for the whole window at once."""
    return {**stack(samples), "noise": torch.rand(len(samples), 3)}


def process(index, num_processes):
    """What a loader asks of an accelerator; it can communicate with nobody."""
    return SimpleNamespace(
        mixed_precision="no",
        num_processes=num_processes,
        process_index=index,
        device=torch.device("cpu"),
        gradient_accumulation_steps=1,
    )


def make_loader(stream, collate_fn=stack, accelerator=None, **options):
    options = {
        "global_batch_size": 8,
        "per_device_batch_size": 3,
        "shuffle_buffer_size": 0,
        **options,
    }
    return StreamLoader(stream, collate_fn, accelerator=accelerator or process(0, 1), **options)


def ids_of(window):
    return [m.batch["x"].tolist() for m in window.micro_batches]


def flat(lists):
    return [item for inner in lists for item in inner]


def seen(windows):
    """Everything that a step could see of windows, comparable with `==`."""
    return [
        (
            w.epoch,
            w.index,
            w.request.seed,
            w.num_samples,
            [
                (
                    m.positions.tolist(),
                    m.sample_ids.tolist(),
                    {k: v.tolist() for k, v in m.batch.items()},
                )
                for m in w.micro_batches
            ],
        )
        for w in windows
    ]


def samples_of(window):
    """All samples of a window, not collated."""
    return window.fetcher.samples(window.request, np.arange(window.num_samples))


# -- the windows of a list
# --------------------------------------------------------------------------------------------------

SPLITS = {
    "by count": {},
    "sorted by length": {"planner": partial(plan_by_sizes, sizes=[3, 1])},
    "by length": {"max_tokens_per_micro_batch": 100},
    "padded": {"pad_to_window": True},
}


def loaders(samples, num_workers=0, **options):
    """(over a stream, over a list)"""
    options = {
        "accelerator": Accelerator(),
        "global_batch_size": 8,
        "per_device_batch_size": 3,
        "seed": 5,
        **options,
    }
    by_length = "max_tokens_per_micro_batch" in options
    planned = "planner" in options
    lengths = [longest_entry(s) for s in samples] if by_length or planned else None
    length_of = longest_entry if by_length else None
    more = {"shuffle_buffer_size": 0, "num_workers": num_workers, "length_of": length_of}
    of_stream = StreamLoader(Listed(samples), h.pad_right, **more, **options)
    if lengths is None:  # or else those of a list are found
        options["planner"] = h.by_number(options["per_device_batch_size"])
    return of_stream, hf_ga.WindowLoader(
        samples, h.pad_right, shuffle=False, lengths=lengths, **options
    )


def longest_entry(sample):
    return max(np.size(v) for v in sample.values())


@pytest.mark.parametrize(
    ("split", "num_workers"), [(s, n) for s in SPLITS for n in (0, 1) if not (n and s == "padded")]
)
def test_windows_of_a_stream_are_those_of_the_list(split, num_workers):
    samples = h.token_samples(37)
    of_stream, of_list = loaders(samples, num_workers=num_workers, **SPLITS[split])
    for _ in range(2):
        windows = list(of_stream)
        expected = list(of_list)
        assert [w.num_samples for w in windows] == [8, 8, 8, 8, 5]
        assert seen(windows) == seen(expected)
        assert seen(w.padded_to_window() for w in windows) == seen(
            w.padded_to_window() for w in expected
        )
        assert flat(samples_of(w) for w in windows) == samples


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [stack, stack_with_noise])
def test_random_transforms_and_collators_draw_what_they_draw_on_a_list(collate_fn, num_workers):
    options = {"seed": 5, "global_batch_size": 8, "per_device_batch_size": 3}
    of_list = hf_ga.WindowLoader(
        AugmentedRows(range(20)), collate_fn, accelerator=Accelerator(), shuffle=False, **options
    )
    of_stream = make_loader(Augmented(20), collate_fn, num_workers=num_workers, **options)
    before = h.global_random_states()
    for _ in range(2):
        windows = list(of_stream)
        expected = list(of_list)
        assert seen(windows) == seen(expected)
        again = [w.split([np.arange(w.num_samples)[i::2] for i in range(2)]) for w in windows]
        assert seen(again) == seen(
            w.split([np.arange(w.num_samples)[i::2] for i in range(2)]) for w in expected
        )
    assert h.global_random_states() == before
    next(iter(Augmented(1)))  # the control
    assert h.global_random_states() != before


def test_samples_are_kept_from_collators_that_take_entries_out():
    def popping(samples):
        return {"x": torch.tensor([s.pop("x") for s in samples])}

    (window,) = make_loader(Numbers(4), popping)
    assert ids_of(window.split([np.arange(3), np.arange(3, 4)])) == [[0, 1, 2], [3]]
    assert samples_of(window) == [{"x": i} for i in range(4)]


def test_a_proof_gets_short_and_long_samples_of_the_beginning():
    samples = [{"input_ids": list(range(3 + i % 50))} for i in range(300)]
    for num_workers in (0, 1):
        loader = make_loader(Listed(samples), h.pad_right, num_workers=num_workers)
        probes = loader.trial_samples(64)
        lengths = [len(s["input_ids"]) for s in probes]
        assert len(probes) == 64
        assert min(lengths) == 3
        assert max(lengths) == 52
        assert len(set(lengths)) > 40
        assert len(loader.trial_samples(5)) == 5


def test_of_what_a_reader_hands_out_only_tensors_are_pinned(monkeypatch):
    """On a GPU the loader pins each item: raw samples and requests must come through as they are,
    and at once.
    """
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor.clone())
    item = next(iter(make_loader(Augmented(8)).reader))
    request, samples, batches = pin_memory(item)
    assert request is item[0]
    assert samples is item[1]
    assert all(
        new["draws"] is not old["draws"] and new["draws"].equal(old["draws"])
        for new, old in zip(batches, item[2], strict=True)
    )


@pytest.mark.parametrize("buffer_size", [0, 7])
@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_processes_share_each_window_without_communication(num_processes, buffer_size):
    options = {
        "global_batch_size": 8,
        "per_device_batch_size": 2,
        "shuffle_buffer_size": buffer_size,
        "seed": 3,
    }
    alone = [w.sample_ids.tolist() for w in make_loader(Numbers(33), **options)]
    assert [len(ids) for ids in alone] == [8, 8, 8, 8, 1]
    assert flat(alone) == order(33, buffer_size, seed=3)
    shares = [
        list(make_loader(Numbers(33), accelerator=process(i, num_processes), **options))
        for i in range(num_processes)
    ]
    for ids, *windows in zip(alone, *shares, strict=True):
        assert all(w.sample_ids.tolist() == ids for w in windows)  # all know the window
        assert flat(flat(map(ids_of, windows))) == ids  # and each sample is in the tensors of one
        sizes = [sum(map(len, ids_of(w))) for w in windows]
        assert max(sizes) - min(sizes) <= 1
        most = max(len(w.micro_batches) for w in windows)
        assert {w.request.max_micro_batches for w in windows} == {most}


# -- stop and resume
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("consumed", "num_workers", "buffer_size"),
    [(3, 0, 0), (0, 0, 11), (1, 0, 11), (4, 0, 11), (3, 1, 11)],
)
def test_resume_inside_an_epoch(consumed, num_workers, buffer_size):
    """The state counts windows that were taken, not those that were read; it goes on in another
    layout, and so does the loader.
    """
    options = {"shuffle_buffer_size": buffer_size, "seed": 5, "num_workers": num_workers}
    whole, first = (make_loader(Augmented(30), stack_with_noise, **options) for _ in range(2))
    for loader in (whole, first):
        loader.set_epoch(2)
    expected = list(whole)
    for _ in zip(range(consumed), first, strict=False):
        pass
    second = make_loader(Augmented(30), stack_with_noise, **options)
    second.load_state_dict(first.state_dict())
    assert seen(second) == seen(expected[consumed:])
    assert second.state_dict() == whole.state_dict()
    assert second.epoch == 3
    other_layout = make_loader(Augmented(30), stack_with_noise, per_device_batch_size=1, **options)
    other_layout.load_state_dict(first.state_dict())
    assert [w.sample_ids.tolist() for w in other_layout] == [
        w.sample_ids.tolist() for w in expected[consumed:]
    ]
    assert seen(first) == seen(expected[consumed:])


def test_a_state_of_another_order_is_refused():
    state = make_loader(Numbers(30), seed=5).state_dict()
    for name, value, named in [
        ("seed", 6, "seed 5"),
        ("global_batch_size", 9, "window_size 8"),
        ("shuffle_buffer_size", 10, "0"),
    ]:
        with pytest.raises(hf_ga.ConfigError, match=f"{named} -> {value}"):
            make_loader(Numbers(30), **{"seed": 5, name: value}).load_state_dict(state)


@pytest.mark.parametrize(("size", "is_refused"), [(30, False), (25, False), (24, True), (5, True)])
def test_a_stream_that_became_shorter(size, is_refused):
    """All four windows were consumed: nothing is left, but only a stream with a fourth window can
    have had them.
    """
    loader = make_loader(Numbers(30))
    for _ in loader:
        state = loader.state_dict()
    assert state["num_consumed"] == 4
    resumed = make_loader(Numbers(size))
    resumed.load_state_dict(state)
    if is_refused:
        with pytest.raises(
            hf_ga.DataError, match=f"ended after {size} samples in epoch 0, but 4 windows of 8"
        ):
            list(resumed)
    else:
        assert list(resumed) == []
        assert resumed.state_dict()["epoch"] == 1


# -- the shuffle buffer
# -----------------------------------------------------------------------------------------------------


def order(size, buffer_size, seed=0, epoch=0):
    return list(shuffled(iter(range(size)), buffer_size, seed, epoch))


@pytest.mark.parametrize("buffer_size", [0, 1, 2, 7, 50, 90])
@pytest.mark.parametrize("size", [0, 1, 6, 50])
def test_an_epoch_is_a_permutation_within_reach_of_the_buffer(size, buffer_size):
    found = order(size, buffer_size)
    assert sorted(found) == list(range(size))
    assert all(number < position + max(1, buffer_size) for position, number in enumerate(found))
    assert buffer_size > 1 or found == list(range(size))


def test_orders_differ_by_seed_and_epoch_and_never_change():
    orders = [order(40, 10, seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len(set(map(tuple, orders))) == 16
    assert orders == [order(40, 10, seed, epoch) for seed in range(4) for epoch in range(4)]
    assert order(8, 4) == [0, 4, 3, 1, 6, 7, 5, 2]  # on every machine and version


def test_the_buffer_holds_no_more_than_its_size_and_shuffles_evenly():
    taken = []

    def stream():
        for number in range(2000):
            taken.append(number)
            yield number

    delays = []
    for position, number in enumerate(shuffled(stream(), 100, 0, 0)):
        assert len(taken) <= position + 100
        delays.append(position - number)
    # In the steady state a thing leaves with probability 1 / 100 at each turn: geometric, with mean
    # 99 turns since it came in.
    stay = np.array(delays[:1800]) + 99
    assert stay.min() >= 0
    assert abs(stay.mean() - 99) < 10
    assert stay.max() > 300
    first_come = np.array(order(2000, 100)[:1000])
    assert (np.diff(first_come) > 0).mean() < 0.6  # in the stream's own order it is 1


class Counted(dict):
    """A sample that tells how many are alive."""

    alive = weakref.WeakSet()

    def __init__(self, *args):
        super().__init__(*args)
        Counted.alive.add(self)

    def __hash__(self):
        return id(self)

    def __copy__(self):  # what is collated is not a sample that is held
        return dict(self)


@pytest.mark.parametrize("buffer_size", [0, 20])
def test_no_more_samples_are_held_than_stated(buffer_size):
    held = []

    class Watched(Numbers):
        def __iter__(self):
            for number in range(self.size):
                held.append(len(Counted.alive))
                yield Counted({"x": number})

    for window in make_loader(Watched(120), shuffle_buffer_size=buffer_size):
        assert window.num_samples == 8
    # The buffer, the window that is read, the one that the loop still has.
    assert buffer_size + 8 < max(held) <= buffer_size + 8 + 8 < 120
    held.clear()
    del window
    for window in make_loader(Watched(120), shuffle_buffer_size=buffer_size):
        del window
    assert max(held) <= buffer_size + 8


# -- epochs, datasets of the library `datasets`
# -----------------------------------------------------------------------------


def test_a_stream_has_no_length_and_epochs_advance():
    told = []

    class Told(Numbers):
        def set_epoch(self, epoch):
            told.append(epoch)

    loader = make_loader(Told(20), shuffle_buffer_size=10)
    with pytest.raises(TypeError):
        len(loader)
    epochs = [[(w.epoch, w.index, w.sample_ids.tolist()) for w in loader] for _ in range(3)]
    assert [{epoch for epoch, _, _ in found} for found in epochs] == [{0}, {1}, {2}]
    assert told == [
        0,
        1,
        2,
    ]
    assert len({str([ids for *_, ids in found]) for found in epochs}) == 3
    loader.set_epoch(1)
    assert [(w.epoch, w.index, w.sample_ids.tolist()) for w in loader] == epochs[1]
    assert told[-1] == 1


def test_the_last_window_can_be_left_out():
    loader = make_loader(Numbers(20), drop_last_window=True)
    assert [w.num_samples for w in loader] == [8, 8]
    assert loader.epoch == 1


def halved(row):
    return {"x": row["x"] // 2, "draw": random.random()}


def streamed(num_rows=60):
    """Three shards, a filter, a random transform, rows tokenised in batches, a shuffle with a seed
    of its own.
    """
    rows = datasets.Dataset.from_dict({"x": list(range(num_rows))}).to_iterable_dataset(
        num_shards=3
    )
    rows = rows.shuffle(seed=1, buffer_size=10).filter(lambda row: row["x"] % 5 != 0).map(halved)
    return rows.map(
        lambda columns: {"y": [x + 1 for x in columns["x"]]}, batched=True, batch_size=7
    )


def test_datasets_streams_are_the_same_on_every_process_and_in_a_worker():
    options = {"shuffle_buffer_size": 6, "seed": 2}
    found = [
        [
            flat([s["x"], s["y"], s["draw"]] for s in samples_of(w))
            for w in make_loader(streamed(), num_workers=n, accelerator=p, **options)
        ]
        for n, p in [(0, None), (1, None), (0, process(1, 2))]
    ]
    assert found[0] == found[1] == found[2]
    assert sum(len(window) for window in found[0]) == 3 * 48
    loader = make_loader(streamed(), **options)
    epochs = [[s["x"] for w in loader for s in samples_of(w)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


# -- errors
# -----------------------------------------------------------------------------------------------------------------


ROWS = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2)


@pytest.mark.parametrize(
    ("stream", "options", "error", "message"),
    [
        (Numbers(0), {}, hf_ga.DataError, "the stream is empty in epoch 0"),
        (iter([{"x": 1}]), {}, hf_ga.DataError, "can be read only once"),
        (Listed(["text"]), {}, hf_ga.DataError, r"sample 0 of the stream is a str \('text'\)"),
        (Listed([{"x": 1}, None]), {}, hf_ga.DataError, "sample 1 of the stream is a NoneType"),
        (datasets.IterableDatasetDict({"train": ROWS}), {}, hf_ga.DataError, "choose one split"),
        (Numbers(5), {"num_workers": 2}, hf_ga.ConfigError, "at most one worker"),
        (
            Numbers(5),
            {"shuffle_buffer_size": -1},
            hf_ga.ConfigError,
            "shuffle_buffer_size must be at least 0, got -1",
        ),
        (
            Numbers(5),
            {"drop_last_window": True},
            hf_ga.DataError,
            "drop_last_window.*5 samples: use a window below 8",
        ),
        (
            Numbers(5),
            {"global_batch_size": 0},
            hf_ga.ConfigError,
            "global_batch_size must be at least 1, got 0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(stream, options, error, message):
    before = h.global_random_states()
    with pytest.raises(error, match=message):
        list(make_loader(stream, **options))
    assert h.global_random_states() == before


def test_a_stream_that_cannot_be_read_again_ends_the_second_epoch():
    loader = make_loader(Listed(iter([{"x": i} for i in range(4)])))
    assert len(list(loader)) == 1
    with pytest.raises(hf_ga.DataError, match=r"empty in epoch 1: .*must restart it"):
        list(loader)


def test_a_collator_with_its_own_generator_is_refused():
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(hf_ga.UnkeyedRandomness):
        list(
            make_loader(
                Numbers(8),
                lambda samples: {
                    **stack(samples),
                    "noise": torch.rand(len(samples), generator=generator),
                },
            )
        )


def test_two_processes_see_when_their_streams_differ():
    samples = h.token_samples(33)

    def work():
        accelerator = Accelerator(cpu=True)
        others = [samples, samples[::-1], samples[:30], samples[:32]]
        options = {"accelerator": accelerator, "global_batch_size": 10, "per_device_batch_size": 2}
        streams = others if accelerator.process_index else [samples] * len(others)
        return [
            outcome(lambda own=own: len(list(make_loader(Listed(own), h.pad_right, **options))))
            for own in streams
        ]

    first, second = on_two_ranks(work)
    assert first == second
    assert first[0] == 4
    for message, window in zip(first[1:], (0, 3, 3), strict=True):
        assert f"different streams: window {window} of epoch 0 differs" in message
