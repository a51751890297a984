"""Texts put together and cut into blocks: against Python lists, for every way in which a dataset
can lie in memory.
"""

import datasets
import numpy as np
import pytest
from datasets import Dataset, Features, Sequence, Value, concatenate_datasets

from hf_ga.finetuning.data.encoding.tokenization import split_into_blocks


def make_rows():
    """Some of them empty."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 1000, n).tolist() for n in rng.integers(0, 12, 30)]


def as_dataset(rows):
    columns = {
        "input_ids": rows,
        "length": [len(row) for row in rows],
        "text": [str(row) for row in rows],
    }
    features = Features(
        {"input_ids": Sequence(Value("int64")), "length": Value("int64"), "text": Value("string")}
    )
    return Dataset.from_dict(columns, features=features)


def check(dataset, rows, block_size):
    blocks = split_into_blocks(dataset, block_size)
    ids = [token for row in rows for token in row]
    expected = [ids[start : start + block_size] for start in range(0, len(ids), block_size)]
    assert blocks.column_names == ["input_ids", "length", "num_targets", "was_truncated"]
    assert list(blocks["input_ids"]) == expected
    assert len(blocks) == len(expected)
    assert [row["input_ids"] for row in blocks] == expected  # one by one, as a loader reads them
    assert list(blocks["length"]) == [len(block) for block in expected]
    assert list(blocks["num_targets"]) == [len(block) - 1 for block in expected]
    assert list(blocks["was_truncated"]) == [False] * len(expected)
    return blocks


def test_by_hand():
    six = [[1, 2, 3], [4, 5, 6]]
    for rows, block_size, blocks in [
        (six, 2, [[1, 2], [3, 4], [5, 6]]),  # an exact multiple: no empty block
        (six, 4, [[1, 2, 3, 4], [5, 6]]),
        (six, 5, [[1, 2, 3, 4, 5], [6]]),  # one token: no target
        (six, 7, [[1, 2, 3, 4, 5, 6]]),
        ([[1, 2, 3, 4, 5]], 2, [[1, 2], [3, 4], [5]]),  # one row
        ([[7]], 2, [[7]]),
        ([[], [7, 8], []], 2, [[7, 8]]),
        ([[], []], 2, []),
    ]:
        assert list(check(as_dataset(rows), rows, block_size)["input_ids"]) == blocks


WAYS = {
    "as it was made": lambda d: d,
    "select a range of a range": lambda d: d.select(range(4, 17)).select(range(3, 9)),
    "filter, then a range": lambda d: d.filter(lambda row: row["length"] > 4).select(range(2, 6)),
    "shuffle": lambda d: d.shuffle(seed=3),
    "concatenated": lambda d: concatenate_datasets([d, d.select([2, 1]), d.select(range(5, 8))]),
    "numpy format": lambda d: d.with_format("numpy"),
    "other integers": lambda d: d.cast_column("input_ids", Sequence(Value("uint16"))),
    "large lists": lambda d: d.cast_column("input_ids", datasets.LargeList(Value("int64"))),
}


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("way", WAYS)
def test_of_any_dataset(way, on_disk, tmp_path):
    dataset = as_dataset(make_rows())
    if on_disk:
        dataset.save_to_disk(tmp_path / "rows", num_shards=3)
        dataset = Dataset.load_from_disk(tmp_path / "rows")
    dataset = WAYS[way](dataset)
    rows = [list(map(int, dataset[i]["input_ids"])) for i in range(len(dataset))]
    before = [list(map(int, row)) for row in dataset["input_ids"]]
    for block_size in (2, 7, 64, 10_000):
        check(dataset, rows, block_size)
    assert (
        [list(map(int, row)) for row in dataset["input_ids"]] == before == rows
    )  # what was given stays
