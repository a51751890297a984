"""Numbers with a decimal comma and Decimals, against the same numbers with a point."""

from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data import letter_tokenizer, prepared, write

from hf_ga import DataError

CLASSES = {"cls_token": "<cls>", "sep_token": "<sep>"}
NUMBERS = [0.5, -1.5, 20.0, 3000.25, 1.5e-3]
WITH_COMMA = ["0,5", "-1,5", "20", "3000,25", "1,5e-3"]
LINE = "numbers of the labels have a decimal comma"


def csv_of(path, cells, separator=";") -> str:
    rows = [f'a{separator}"{cell}"' for cell in cells]
    path.write_text("\n".join([f"text{separator}score", *rows, ""]))
    return str(path)


def of_regression(file, **more):
    more = {"label_column": "score", "validation_file": file, **more}
    return prepared(file, letter_tokenizer(**CLASSES), task="regression", **more)


@pytest.mark.parametrize("separator", [";", "\t", ",", "|"])
def test_decimal_commas(separator, tmp_path):
    """Also between quotes in a file with commas."""
    data = of_regression(csv_of(tmp_path / "d.csv", WITH_COMMA, separator))
    assert data.splits["train"]["label"][:] == data.splits["validation"]["label"][:] == NUMBERS
    assert data.notes.count(LINE) == 1
    data = of_regression(csv_of(tmp_path / "e.csv", NUMBERS, separator))
    assert data.splits["train"]["label"][:] == NUMBERS
    assert LINE not in data.notes


def test_other_files_and_roles(tmp_path):
    """Texts of a JSON file; the weight of a row; the score of a pair. Other columns are texts."""
    rows = [{"text": "a", "score": text} for text in WITH_COMMA]
    data = of_regression(write(tmp_path / "d.jsonl", rows))
    assert data.splits["train"]["label"][:] == NUMBERS
    rows = [{"text": "1,5", "label": "0,5", "w": text} for text in ("0,5", "2")]
    rows.append({"text": "2,5", "label": "1,5", "w": "1,25"})
    file = write(tmp_path / "w.jsonl", rows)
    more = {"task": "text-classification", "weight_column": "w", "validation_file": file}
    data = prepared(file, letter_tokenizer(**CLASSES), **more)
    assert data.splits["train"]["weight"][:] == [0.5, 2.0, 1.25]
    assert data.labels == ["0,5", "1,5"]
    pairs = [{"sentence1": "a", "sentence2": "b", "score": text} for text in WITH_COMMA]
    file = write(tmp_path / "p.jsonl", pairs)
    data = prepared(file, letter_tokenizer(**CLASSES), task="embedding", validation_file=file)
    assert data.splits["train"]["label"][:] == NUMBERS


REFUSED = {
    "a word": (["0,5", "NA", "1,5"], "labels of a regression must .*1 of 3 train rows have 'NA'"),
    "a word among points": (["0.5", "NA", "1.5"], "1 of 3 train rows have 'NA'"),
    "commas and points": (["0,5", "1.5", "2,5"], r"with a decimal comma\), but 1 of 3 .*'1.5'"),
    "thousands with commas": (["1.234,5", "0,5"], "1 of 2 train rows have '1.234,5'"),
    "perhaps thousands": (["1,234", "12,500", "7"], "may be 1.234 or 1234: write"),
    "an empty cell": (["0,5", "", "1,5"], "1 of 3 train rows have None"),
    "too large": (
        ["0,5", "1,5e39"],
        r"finite float32 numbers \(with a decimal comma\), but 1 of 2 train rows have 1.5e\+39",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_number_with_a_decimal_comma(name, tmp_path):
    cells, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        of_regression(csv_of(tmp_path / "d.csv", cells))


def decimals(path, values) -> str:
    column = pa.array([Decimal(value) for value in values], pa.decimal128(12, 2))
    pq.write_table(pa.table({"text": ["a"] * len(values), "score": column}), path)
    return str(path)


def test_decimals(tmp_path):
    file = decimals(tmp_path / "d.parquet", ["0.5", "-1.25", "3.00"])
    assert of_regression(file).splits["train"]["label"][:] == [0.5, -1.25, 3.0]
    more = {"task": "text-classification", "label_column": "score"}
    file = decimals(tmp_path / "e.parquet", ["10", "2.00", "10"])
    data = prepared(file, letter_tokenizer(**CLASSES), validation_file=file, **more)
    assert data.labels == ["2", "10"]
    assert data.splits["train"]["label"][:] == [1, 0, 1]
    file = decimals(tmp_path / "f.parquet", ["10", "2.50"])
    with pytest.raises(DataError, match=r"names or whole numbers, .*Decimal\('10.00'\)|2\.50"):
        prepared(file, letter_tokenizer(**CLASSES), validation_file=file, **more)
