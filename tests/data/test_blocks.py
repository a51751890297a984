"""Texts put together and cut into blocks: against Python lists, for every way in which a dataset can lie in memory."""

import datasets
import helpers as h
import numpy as np
import pytest
from datasets import Dataset, Features, Sequence, Value, concatenate_datasets

from hf_ga.data.collation import collate_causal
from hf_ga.data.tokenization import cut_into_blocks


@pytest.fixture(autouse=True, scope="module")
def no_progress_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def make_rows(num_rows=30, low=0, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, n).tolist() for n in rng.integers(low, 12, num_rows)]


def as_dataset(rows):
    columns = {"input_ids": rows, "length": [len(row) for row in rows], "text": [str(row) for row in rows]}
    features = Features({"input_ids": Sequence(Value("int64")), "length": Value("int64"), "text": Value("string")})
    return Dataset.from_dict(columns, features=features)


def expected_blocks(rows, block_size):
    ids = [token for row in rows for token in row]
    return [ids[start : start + block_size] for start in range(0, len(ids), block_size)]


def check(dataset, rows, block_size):
    blocks = cut_into_blocks(dataset, block_size)
    expected = expected_blocks(rows, block_size)
    assert blocks.column_names == ["input_ids", "length", "num_targets", "was_cut"]
    assert list(blocks["input_ids"]) == expected and len(blocks) == len(expected)
    assert [row["input_ids"] for row in blocks] == expected  # one by one, as a loader reads them
    assert list(blocks["length"]) == [len(block) for block in expected]
    assert list(blocks["num_targets"]) == [len(block) - 1 for block in expected]
    assert list(blocks["was_cut"]) == [False] * len(expected)
    return blocks


@pytest.mark.parametrize("block_size", [2, 7, 64, 10_000])
@pytest.mark.parametrize("low", [0, 1], ids=["some empty", "none empty"])
def test_content_in_its_order(block_size, low):
    rows = make_rows(low=low)
    assert ([] in rows) == (low == 0)
    blocks = check(as_dataset(rows), rows, block_size)
    total = sum(map(len, rows))
    lengths = list(blocks["length"])
    assert set(lengths[:-1]) <= {block_size} and lengths[-1] == (total % block_size or block_size) and sum(lengths) == total


@pytest.mark.parametrize(
    ("rows", "block_size", "blocks"),
    [
        ([[1, 2, 3], [4, 5, 6]], 2, [[1, 2], [3, 4], [5, 6]]),  # an exact multiple: no empty block
        ([[1, 2, 3], [4, 5, 6]], 3, [[1, 2, 3], [4, 5, 6]]),
        ([[1, 2, 3], [4, 5, 6]], 4, [[1, 2, 3, 4], [5, 6]]),
        ([[1, 2, 3], [4, 5, 6]], 5, [[1, 2, 3, 4, 5], [6]]),  # one token: no target
        ([[1, 2, 3], [4, 5, 6]], 6, [[1, 2, 3, 4, 5, 6]]),
        ([[1, 2, 3], [4, 5, 6]], 7, [[1, 2, 3, 4, 5, 6]]),
        ([[1, 2, 3, 4, 5]], 2, [[1, 2], [3, 4], [5]]),  # one row
        ([[7]], 2, [[7]]),
        ([[], [7, 8], []], 2, [[7, 8]]),
        ([[], []], 2, []),
    ],
    ids=str,
)
def test_by_hand(rows, block_size, blocks):
    assert list(check(as_dataset(rows), rows, block_size)["input_ids"]) == blocks


WAYS = {
    "select by indices": lambda d: d.select([5, 3, 28, 3, 0]),
    "select a range of a range": lambda d: d.select(range(4, 17)).select(range(3, 9)),
    "filter, then a range": lambda d: d.filter(lambda row: row["length"] > 4).select(range(2, 6)),
    "shuffle": lambda d: d.shuffle(seed=3),
    "shard": lambda d: d.shard(3, 1),
    "concatenated": lambda d: concatenate_datasets([d, d.select([2, 1]), d.select(range(5, 8))]),
    "mapped in batches": lambda d: d.map(lambda row: {"text": "x"}, batched=False, writer_batch_size=4),
    "numpy format": lambda d: d.with_format("numpy"),
    "other integers": lambda d: d.cast_column("input_ids", Sequence(Value("uint16"))),
    "large lists": lambda d: d.cast_column("input_ids", datasets.LargeList(Value("int64"))),
}


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("way", WAYS)
def test_of_any_dataset(way, on_disk, tmp_path):
    dataset = as_dataset(make_rows(low=1))
    if on_disk:
        dataset.save_to_disk(tmp_path / "rows", num_shards=3)
        dataset = Dataset.load_from_disk(tmp_path / "rows")
    dataset = WAYS[way](dataset)
    rows = [list(map(int, dataset[i]["input_ids"])) for i in range(len(dataset))]
    before = [list(map(int, row)) for row in dataset["input_ids"]]
    check(dataset, rows, 6)
    assert [list(map(int, row)) for row in dataset["input_ids"]] == before == rows  # what was given stays


def test_what_is_done_with_blocks(tmp_path):
    """Selected, saved, read again, collated; other rows make another fingerprint."""
    rows = make_rows(low=1)
    blocks = cut_into_blocks(as_dataset(rows), 6)
    expected = expected_blocks(rows, 6)
    assert list(blocks.select([3, 1])["input_ids"]) == [expected[3], expected[1]]
    assert list(cut_into_blocks(blocks, 4)["input_ids"]) == expected_blocks(rows, 4)
    batch = collate_causal([blocks[0], blocks[-1]], pad_token_id=0)
    assert int((batch["labels"][:, 1:] != h.IGNORED).sum()) == blocks[0]["num_targets"] + blocks[-1]["num_targets"]
    blocks.save_to_disk(tmp_path / "blocks")
    assert list(Dataset.load_from_disk(tmp_path / "blocks")["input_ids"]) == expected
    assert blocks._fingerprint != cut_into_blocks(as_dataset(rows[::-1]), 6)._fingerprint


def test_a_million_tokens():
    rows = np.arange(1_000_003).reshape(-1)
    dataset = as_dataset([part.tolist() for part in np.array_split(rows, 1000)])
    blocks = cut_into_blocks(dataset, 512).with_format("numpy")
    assert np.array_equal(np.concatenate(list(blocks["input_ids"][:])), rows) and len(blocks) == -(-1_000_003 // 512)
