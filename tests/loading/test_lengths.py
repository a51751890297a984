"""Lengths that a loader finds by itself: a loop of one's own is planned by length without saying
so.
"""

from itertools import chain

import datasets
import helpers as h
import numpy as np
import pytest
import torch
from accelerate import Accelerator

import hf_ga
from hf_ga.loading.lengths import find_lengths

LENGTHS = h.ragged_lengths(40, low=2, high=30)
SAMPLES = [{"input_ids": list(range(2, 2 + n)), "labels": [7] * n} for n in LENGTHS]
TABLE = datasets.Dataset.from_list(SAMPLES)
ORDER = np.random.default_rng(1).permutation(40)[:25].tolist()


def to_fixed_width(samples):
    """Pads everything to 32, as `padding="max_length"` does."""
    batch = h.pad_right([*samples, {"input_ids": [0] * 32, "labels": [h.IGNORED] * 32}])
    return {name: tensor[:-1] for name, tensor in batch.items()}


INDEXED = torch.utils.data.Subset(SAMPLES, range(40))  # random access, no columns

FOUND = {
    "list of dicts": (SAMPLES, LENGTHS),
    "tuple of dicts of arrays": (
        tuple({"input_ids": np.array(s["input_ids"])} for s in SAMPLES),
        LENGTHS,
    ),
    "input_ids column": (TABLE, LENGTHS),
    "input_ids column, as tensors": (TABLE.with_format("torch"), LENGTHS),
    "length column": (
        TABLE.add_column("length", [2 * n for n in LENGTHS]),
        [2 * n for n in LENGTHS],
    ),
    "selected": (TABLE.select(ORDER), [LENGTHS[i] for i in ORDER]),
    "shuffled, then selected": (TABLE.shuffle(seed=3).select(range(7, 20)), None),
    "filtered": (
        TABLE.filter(lambda row: len(row["input_ids"]) > 9),
        [n for n in LENGTHS if n > 9],
    ),
    "joined": (
        datasets.concatenate_datasets([TABLE.select(ORDER), TABLE]),
        [*(LENGTHS[i] for i in ORDER), *LENGTHS],
    ),
    "one length": ([{"input_ids": [1, 2], "labels": [1, 2]}] * 3, [2, 2, 2]),
}


@pytest.mark.parametrize("name", FOUND)
def test_lengths_are_found(name):
    dataset, expected = FOUND[name]
    expected = [len(row["input_ids"]) for row in dataset] if expected is None else expected
    states = h.global_random_states()
    found = find_lengths(dataset, h.pad_right)
    assert found.dtype == np.int64
    assert found.tolist() == expected
    assert h.global_random_states() == states


NOT_FOUND = {
    "no columns": INDEXED,
    "another name": [{"tokens": s["input_ids"]} for s in SAMPLES],
    "no dicts": [s["input_ids"] for s in SAMPLES],
    "one sample without": [*SAMPLES, {"labels": [1]}],
    "another column": TABLE.rename_column("input_ids", "tokens"),
    "texts as lengths": TABLE.remove_columns("input_ids").add_column("length", ["9"] * 40),
    "a missing length": TABLE.remove_columns("input_ids").add_column(
        "length", [*LENGTHS[:39], None]
    ),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_lengths_are_not_guessed(name):
    collate = (
        h.pad_right if name not in ("no dicts", "one sample without") else None
    )  # never called
    assert find_lengths(NOT_FOUND[name], collate) is None


def test_lengths_that_tell_nothing_are_left_out():
    """The collate function makes all samples as wide. It may take entries out of what it gets."""
    assert find_lengths(SAMPLES, to_fixed_width) is find_lengths(TABLE, to_fixed_width) is None

    def popping(samples):
        return h.pad_right([{"input_ids": sample.pop("input_ids")} for sample in samples])

    assert find_lengths(SAMPLES, popping).tolist() == LENGTHS
    assert all("input_ids" in sample for sample in SAMPLES)


def plans(dataset, collate_fn=h.pad_right, **options):
    """The micro-batches of every window, as sample ids."""
    windows = hf_ga.WindowLoader(
        dataset,
        collate_fn,
        accelerator=Accelerator(),
        per_device_batch_size=2,
        global_batch_size=16,
        seed=5,
        **options,
    )
    return [
        [request.sample_ids[m].tolist() for m in request.micro_batches]
        for request in windows.requests()
    ]


def test_a_loop_of_ones_own_is_planned_as_one_that_gives_lengths():
    """Controls: by number it is another plan; lengths of one's own win over those that are
    found.
    """
    given = plans(SAMPLES, lengths=LENGTHS)
    assert plans(SAMPLES) == plans(TABLE) == given
    by_number = plans(SAMPLES, planner=h.by_number(2))
    assert given != by_number == plans(INDEXED) == plans(SAMPLES, to_fixed_width)
    assert plans(SAMPLES, lengths=LENGTHS[::-1]) != given
    padded = [
        sum(len(m) * max(LENGTHS[i] for i in m) for window in plan for m in window)
        for plan in (given, by_number)
    ]
    assert padded[0] < 0.9 * padded[1]
    assert padded[0] < 1.3 * sum(LENGTHS)
    for window, other in zip(given, by_number, strict=True):  # the same samples
        assert sorted(chain.from_iterable(window)) == sorted(chain.from_iterable(other))
