"""Batches in which samples have several rows of an entry, or none: images and their patches."""

import pytest
import torch

import hf_ga
from hf_ga.loading.batches import take_rows
from hf_ga.loading.entries import Entries, put_together


def collate(samples):
    """`pixels`: the rows of all samples one after the other; absent where no sample has any."""
    batch = {
        "x": torch.tensor([[float(sample["x"])] for sample in samples]),
        "names": [str(sample["x"]) for sample in samples],
        "scale": 3.0,
        "kind": "text",
        "table": torch.arange(3),
    }
    pixels = [torch.full((1,), float(value)) for sample in samples for value in sample["pixels"]]
    if pixels:
        batch["pixels"] = torch.stack(pixels)
        batch["files"] = [f"file {int(value)}" for value in torch.cat(pixels)]
    return batch


def samples_of(*pixels):
    return [{"x": i, "pixels": list(values)} for i, values in enumerate(pixels)]


@pytest.mark.parametrize("first", [0, 1, 2], ids=["none", "one", "several"])
def test_any_rows_are_those_of_their_samples(first):
    """Whichever sample shows the entries: one without pixels, with one row, with two."""
    samples = samples_of([], [10], [20, 21], [], [40])
    entries = Entries(collate, samples[first])
    entries.inspect_samples(samples)
    whole = entries.split(collate(samples), samples)
    for rows in ([0], [1], [2], [0, 3], [2, 4], [4, 2, 0], [0, 1, 2, 3, 4]):
        taken = put_together(take_rows(whole, rows, entries.of_samples))
        expected = collate([samples[row] for row in rows])
        assert taken.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(taken[name], value), name
            else:
                assert taken[name] == value, name


def test_as_many_rows_as_samples_that_are_not_theirs():
    """Two samples with two rows and none: a slice by samples would give each of them one."""
    samples = samples_of([10, 11], [], [20, 21], [])
    entries = Entries(collate, samples_of([5])[0])
    entries.inspect_samples(samples)
    whole = entries.split(collate(samples), samples)
    assert len(collate(samples)["pixels"]) == len(samples)
    taken = put_together(take_rows(whole, [0, 1], entries.of_samples))
    assert taken["pixels"].flatten().tolist() == [10, 11]
    assert "pixels" not in put_together(take_rows(whole, [1, 3], entries.of_samples))


@pytest.mark.parametrize("absent", [None, torch.zeros(0, 1)], ids=["None", "no rows"])
def test_samples_without_rows_keep_what_the_collate_function_gives(absent):
    def with_absent(samples):
        return {"pixels": absent, "files": [], **collate(samples)}

    samples = samples_of([], [10], [20, 21])
    entries = Entries(with_absent, samples[0])
    whole = entries.split(with_absent(samples), samples)
    taken = put_together(take_rows(whole, [0], entries.of_samples))["pixels"]
    assert taken is None if absent is None else taken.shape == (0, 1)
    taken = put_together(take_rows(whole, [0, 2], entries.of_samples))["pixels"]
    assert taken.flatten().tolist() == [20, 21]


def test_shared_entries_may_depend_on_the_width():
    """A table of one row for each column, not for each sample."""

    def with_table(samples):
        width = max(len(sample["pixels"]) for sample in samples) + 1
        return {"x": torch.zeros(len(samples), width), "columns": torch.arange(width)}

    samples = samples_of([], [10], [20, 21])
    entries = Entries(with_table, samples[1])
    entries.inspect_samples(samples)
    whole = entries.split(with_table(samples), samples)
    assert len(take_rows(whole, [0], entries.of_samples)["columns"]) == 3
    assert not entries.ragged


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda batch: {"x": torch.cat([batch["x"]] * 2)}, "are not consecutive"),
        (lambda batch: {"labels": torch.cat([batch["x"]] * 2)}, "'labels' does not have one row"),
        (lambda batch: {"x": batch["x"].mT}, "samples in the first dim"),
        (lambda batch: {"pixels": batch["pixels"][:2]}, "2 rows for 3 samples, which have 3 rows"),
    ],
    ids=["repeated", "labels", "second axis", "rows missing"],
)
def test_what_cannot_be_cut_is_named(changed, message):
    def wrong(samples):
        batch = collate(samples)
        if len({sample["x"] for sample in samples}) > 1 or message[0] != "2":
            batch.update(changed(batch))
        return {**batch, "own": torch.zeros(len(samples))}

    samples = samples_of([9, 8], [10], [])
    with pytest.raises(hf_ga.DataError, match=message):
        Entries(wrong, samples[0]).split(wrong(samples), samples)
