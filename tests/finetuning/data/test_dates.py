"""Texts of JSON files that are dates stay these texts, although pyarrow converts them."""

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import load_dataset

from hf_ga import FinetuneConfig
from hf_ga.errors import DataError
from hf_ga.finetuning.data.data import prepare_data
from hf_ga.finetuning.data.formats.corpus import train_tokenizer
from hf_ga.finetuning.data.formats.documents import to_dataset
from hf_ga.finetuning.data.formats.files import load_files

DATE = "2024-01-02"
OTHER_FORM = "2024-01-02T03:04:05Z"
# Prints by how many MiB memory rises at most. (The peak of `getrusage` is that of pytest at first.)
MEASURE = """
import json, re, sys
from pathlib import Path
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
path, is_control = sys.argv[1:]
if is_control != "True":
    from hf_ga.finetuning.data.formats.files import load_files
before = peak()
rows = [*map(json.loads, open(path))] if is_control == "True" else load_files([path], "train")
assert len(rows) == 150_000
print(peak() - before)
"""


def write_lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def read_by_datasets(path):
    return list(load_dataset("json", data_files=path, split="train"))


def test_a_column_of_dates_stays_texts(tmp_path):
    rows = [{"source": "2 January 2024", "target": DATE}, {"source": "x", "target": OTHER_FORM}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert read_by_datasets(path) != rows  # the control
    assert list(load_files([path], "train")) == rows


def test_dates_in_conversations_stay_texts(tmp_path):
    rows = [{"messages": [{"role": "user", "content": DATE}]}] * 2
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert read_by_datasets(path) != rows
    assert list(load_files([path], "train")) == rows


def test_a_file_of_dates_after_one_of_other_texts(tmp_path):
    """Each file is converted for itself, so the column of both is one of strings."""
    texts = [write_lines(tmp_path / "a.jsonl", [{"text": "a", "n": 1}])]
    texts.append(write_lines(tmp_path / "b.jsonl", [{"text": DATE, "n": 2}]))
    converted = load_dataset("json", data_files=texts, split="train")["text"][:]
    assert converted == ["a", "2024-01-02 00:00:00"]
    rows = load_files(texts, "train")
    assert rows["text"][:] == ["a", DATE]
    assert rows["n"][:] == [1, 2]


def test_a_list_and_a_compressed_file(tmp_path):
    rows = [{"text": DATE}, {"text": OTHER_FORM}]
    listed = tmp_path / "rows.json"
    listed.write_text(json.dumps(rows, indent=1))
    compressed = tmp_path / "rows.jsonl.gz"
    with gzip.open(compressed, "wt") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    assert list(load_files([str(listed)], "train")) == rows
    assert list(load_files([str(compressed)], "train")) == rows


def test_a_text_that_looks_converted_is_not_changed(tmp_path):
    rows = [{"text": "2024-01-02 00:00:00 was a Tuesday"}, {"text": "b"}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert list(load_files([path], "train")) == rows


def test_a_column_that_the_first_row_lacks(tmp_path):
    rows = [{"text": DATE}, {"text": OTHER_FORM, "label": "a"}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert list(load_files([path], "train")) == [{"text": DATE, "label": None}, rows[1]]


def test_a_list_of_dates(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([DATE, OTHER_FORM]))
    assert list(load_files([str(path)], "train")) == [{"text": DATE}, {"text": OTHER_FORM}]


def test_dates_in_a_stream_are_refused(tmp_path):
    """By the check of the column, which has no texts."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": DATE}] * 4))
    lines = write_lines(tmp_path / "rows.jsonl", [{"text": DATE}] * 4)
    options = FinetuneConfig(streaming=True, validation_file=lines, max_steps=1)
    for name in (str(path), lines):
        with pytest.raises(DataError, match="text_column must name a column of strings"):
            prepare_data(replace(options, dataset_name=name), train_tokenizer(["a"]))


def test_a_row_of_several_lines(tmp_path):
    row = {"messages": [{"role": "user", "content": DATE}]}
    path = tmp_path / "row.json"
    path.write_text(json.dumps(row, indent=1))
    assert list(load_files([str(path)], "train")) == [row]


def test_a_streamed_list_without_dates(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b"}]))
    found = list(load_files([str(path)], "train", streaming=True))
    assert found == [{"text": "a"}, {"text": "b"}]


TYPES = {
    "numbers that have decimals later": (1, 0.5),
    "numbers and texts": (1, "a"),
    "none at first": (None, "a"),
    "an empty list": ([], ["a"]),
    "objects with other keys": ({"a": 1}, {"b": 2}),
    "a list and an object": ([1], {"b": 2}),
    "lists of objects with other keys": ([{"a": 1}], [{"a": 1}, {"b": None}]),
}


@pytest.mark.parametrize("name", TYPES)
def test_the_types_of_a_mapped_file_are_of_all_rows(name, tmp_path):
    """`datasets` writes 1,000 rows at a time. The reference knows all at once."""
    first, other = TYPES[name]
    rows = [{"date": DATE, "x": first}] * 1001 + [{"x": other, "more": True}]
    found = load_files([write_lines(tmp_path / "rows.jsonl", rows)], "train")
    expected = to_dataset(rows)
    assert found.features == expected.features
    assert list(found) == list(expected)
    assert found.cache_files


def test_a_changed_file_is_read_again(tmp_path):
    for day in (DATE, "2024-01-03"):
        path = write_lines(tmp_path / "rows.jsonl", [{"text": day}] * 2)
        assert load_files([path], "train")["text"][:] == [day] * 2
        assert load_files([path], "train")["text"][:] == [day] * 2


def risen_mib(path, *, is_control: bool) -> float:
    command = [sys.executable, "-c", MEASURE, path, str(is_control)]
    cache = {"HF_DATASETS_CACHE": str(Path(path).parent / "cache")}
    return float(subprocess.check_output(command, env=os.environ | cache, text=True))


@pytest.mark.slow("reads 200 MB in two processes")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_a_large_file_is_not_held_in_memory(tmp_path):
    """The control: Python holds the rows."""
    turns = [{"role": role, "content": role * 75} for role in ("question ", "answer ")]
    path = write_lines(tmp_path / "rows.jsonl", [{"date": DATE, "messages": turns}] * 150_000)
    mapped = risen_mib(path, is_control=False)
    held = risen_mib(path, is_control=True)
    print(f"{Path(path).stat().st_size / 1e6:.0f} MB: {mapped:.0f} MiB mapped, {held:.0f} held")
    assert mapped < 100 < 300 < held


def test_a_whole_number_that_no_float_equals_is_not_rounded(tmp_path):
    """In a column with other numbers; `datasets` would round it in a file without dates."""
    rows = [{"id": 2**53 + 1, "text": DATE}, {"id": 2.5, "text": "b"}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match="9007199254740993"):
        load_files([path], "train")
    rows[1]["id"] = 2
    path = write_lines(tmp_path / "whole.jsonl", rows)
    assert list(load_files([path], "train")) == rows
