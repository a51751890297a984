"""CSV and TSV files: rows compared with pandas' own reading and with rows by hand."""

import gzip

import datasets
import pandas as pd
import pytest

from hf_ga import DataError, FinetuneConfig
from hf_ga.finetuning.data.formats import delimited
from hf_ga.finetuning.data.formats.delimited import detect_separator
from hf_ga.finetuning.data.formats.files import check_same_columns, load_splits
from hf_ga.finetuning.data.sources import load_rows

pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*[ct]sv:pytest.PytestUnraisableExceptionWarning"
)  # `datasets` leaves a stream's file open


def loaded(*files, notes=None, streaming=False) -> list[dict]:
    return list(load_splits([*map(str, files)], notes=notes, streaming=streaming)["train"])


def written(path, text: str, encoding="utf-8"):
    content = text.encode(encoding)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


BODY = "row 0 is bad,neg\nrow 1 is good,pos\n"
# name of the file: its content, its separator, the line in the log
SEPARATED = {
    "semicolon.csv": ("text;label\na;neg\nb;pos\n", ";", "semicolons"),
    "commas in texts.csv": ("text;label\na, b, c;neg\nd, e;pos\n", ";", "semicolons"),
    "quoted.csv": ('text;label\n"a; b";neg\n"c ""d""";pos\n', ";", "semicolons"),
    "excel.csv": ("\ufefftext;label\r\na;neg\r\nb;pos\r\n", ";", "semicolons"),
    "tabs.tsv": ("text\tlabel\na\tneg\nb, c; d\tpos\n", "\t", "tabs"),
    "packed.tsv.gz": ("text\tlabel\na\tneg\nb\tpos\n", "\t", "tabs"),
    "tabs.csv": ("text\tlabel\na\tneg\nb\tpos\n", "\t", "tabs"),
    "bars.csv": ("text|label\na|neg\nb|pos\n", "|", "vertical bars"),
    "usual.csv": ('text,label\n"a, b",neg\nc;d,pos\n', ",", None),
    "commas.tsv": ("text,label\na,neg\nb,pos\n", ",", None),
    "one column.csv": ("text\na b\nc; d\n", ",", None),
    "lines.csv": ('text,label\n"a\nb",neg\nc,pos\n', ",", None),
}


@pytest.mark.parametrize("name", SEPARATED)
def test_separators(name, tmp_path):
    text, separator, words = SEPARATED[name]
    path = written(tmp_path / name, text)
    notes = []
    assert detect_separator(str(path)) == separator
    expected = pd.read_csv(path, sep=separator).to_dict("records")
    assert loaded(path, notes=notes) == expected
    assert len(expected) == 2
    assert notes == ([f"{name}: columns separated by {words}"] if words else [])
    if separator != ",":  # the control: read with a comma, the file has other columns
        assert set(pd.read_csv(path, on_bad_lines="skip").columns) != {"text", "label"}


def test_a_file_is_said_once(tmp_path):
    path = str(written(tmp_path / "d.csv", "text;label\n" + "a;x\nb;y\n" * 20))
    notes = []
    load_rows(FinetuneConfig(dataset_name=path, validation_file=path, test_file=path), notes)
    assert notes == ["d.csv: columns separated by semicolons"]


def test_files_with_different_separators(tmp_path):
    """Their columns may be in another order; numbers are told over all files."""
    files = [
        written(tmp_path / "1.csv", "text,label\na,1\n"),
        written(tmp_path / "2.csv", "label;text\n2;b\n"),
        written(tmp_path / "3.csv", "text\tlabel\nc\tx\n"),
    ]
    expected = [{"text": "a", "label": 1}, {"text": "b", "label": 2}]
    assert loaded(*files[:2]) == loaded(*files[:2], streaming=True) == expected
    assert [row["label"] for row in loaded(*files)] == ["1", "2", "x"]
    written(tmp_path / "4.csv", "text,class\na,1\n")
    with pytest.raises(DataError, match=r"different columns: .*1\.csv has label, text; .*4\.csv"):
        loaded(files[0], tmp_path / "4.csv")


def test_parts_of_one_name_are_compared():
    """Two configurations of a dataset have its name."""
    parts = [("glue", datasets.Dataset.from_dict({name: [1]})) for name in ("a", "b")]
    with pytest.raises(DataError, match="different columns: glue has a; glue has b"):
        check_same_columns(parts)
    check_same_columns([parts[0]] * 2)


# cells of a column -> its values
COLUMNS = {
    "whole numbers": (["1", "-2", " 30", "+4"], [1, -2, 30, 4]),
    "numbers": (["1", "0.5", "-1e3", ".25"], [1.0, 0.5, -1000.0, 0.25]),
    "whole floats": (["0.0", "1.0"], [0.0, 1.0]),
    "numbers and empty cells": (["1", "", "3"], [1, None, 3]),
    "truth": (["true", "False", "TRUE"], [True, False, True]),
    "words for null": (["NA", "null", "None", "nan", "N/A", "NULL", "n/a", "#N/A"], None),
    "numbers and NA": (["1", "NA", "3"], None),
    "numbers and nan": (["1.5", "nan", "inf"], None),
    "only nan": (["nan", "nan"], None),
    "words and empty cells": (["a", "", "c"], ["a", None, "c"]),
    "only empty cells": (["", ""], [None, None]),
    "codes": (["007", "01", "12"], None),
    "long numbers": (["12345678901234567890", "12345678901234567891"], None),
    "numbers with words": (["1", "two"], None),
    "decimal commas": (["0,5", "1,5"], None),
    "truth with words": (["true", "maybe"], None),
    "spaces": (["pos", "pos "], None),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", COLUMNS)
def test_types_of_columns(name, streaming, tmp_path):
    cells, values = COLUMNS[name]
    body = "".join(f'"{cell}";x\n' for cell in cells)
    rows = loaded(written(tmp_path / "d.csv", f"c;text\n{body}"), streaming=streaming)
    expected = cells if values is None else values
    found = [row["c"] for row in rows]
    assert found == expected
    assert list(map(type, found)) == list(map(type, expected))
    assert [row["text"] for row in rows] == ["x"] * len(cells)


def test_words_for_null_are_texts_and_empty_cells_are_not(tmp_path):
    """The control: pandas makes nulls of all of them."""
    path = written(tmp_path / "d.csv", "text,label\nNA,None\n,yes\nnull,nan\n")
    assert loaded(path) == [
        {"text": "NA", "label": "None"},
        {"text": None, "label": "yes"},
        {"text": "null", "label": "nan"},
    ]
    assert pd.read_csv(path).isna().to_numpy().sum() == 5


def test_a_type_holds_for_the_whole_file(tmp_path):
    """`datasets` reads 10,000 rows at a time. The control: its own types make 7 of a later 007."""
    path = written(tmp_path / "d.csv", "text\n" + "a\n" * 10_000 + "007\n" * 2)
    assert [row["text"] for row in loaded(path)[-3:]] == ["a", "007", "007"]
    own = datasets.load_dataset("csv", data_files=str(path), split="train")
    assert own["text"][-2:] == ["7", "7"]


def test_numbers_of_a_stream_are_told_by_its_first_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "NUM_INFERENCE_ROWS", 2)
    path = written(tmp_path / "d.csv", "text,label\na,1\nb,2\nc,x\n")
    assert [row["label"] for row in loaded(path)] == ["1", "2", "x"]
    with pytest.raises(ValueError, match="'x'"):
        loaded(path, streaming=True)


SHIFTED = {
    "a comma in each text": "text,label\nhello, you,1\nbye, you,0\n",
    "no name for the first column": "text,label\n0,a,x\n1,b,y\n",
    "a separator at the end": "text,label\na,x,\nb,y,\n",
    "commas in one column": "text\nhello, you\nbye, you\n",
}


@pytest.mark.parametrize("name", SHIFTED)
def test_rows_with_more_fields_than_the_header(name, tmp_path):
    """The control: pandas reads the file, with other texts in the columns."""
    path = written(tmp_path / "d.csv", SHIFTED[name])
    with pytest.raises(DataError, match=r"d\.csv have more fields than its header \(text.*quotes"):
        loaded(path)
    first = pd.read_csv(path)["text"].iloc[0]
    assert first != SHIFTED[name].splitlines()[1].split(",")[0]


def test_a_quote_that_is_not_closed(tmp_path):
    """The control: pandas makes one row of three. A closed quote may hold line breaks."""
    text = 'text\tlabel\n"a\tx\nb\ty\nc"\tz\nd\tx\n'
    path = written(tmp_path / "d.tsv", text)
    with pytest.raises(DataError, match=r"the column 'text' .*d\.tsv has texts with tabs and line"):
        loaded(path)
    assert len(pd.read_csv(path, sep="\t")) == 2
    good = written(tmp_path / "good.tsv", 'text\tlabel\n"a\nb"\tx\n"c\td"\ty\n')
    assert [row["text"] for row in loaded(good)] == ["a\nb", "c\td"]


def test_files_without_rows(tmp_path):
    for text in ("text,label\n", "text;label\n", "text\n\n\n"):
        with pytest.raises(DataError, match=r"d\.csv has no rows"):
            loaded(written(tmp_path / "d.csv", text))
    with pytest.raises(DataError, match=r"d\.csv: byte 0 \(0xff\) is not UTF-8"):
        loaded(written(tmp_path / "d.csv", "text,label\na,b\n", encoding="utf-16"))


def test_a_file_that_is_not_utf8_is_refused_with_the_remedy(tmp_path):
    file = tmp_path / "latin.csv"
    file.write_bytes("text,label\nKäse,gut\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"is not UTF-8.*save the file as UTF-8.*iconv"):
        load_splits([str(file)])


def test_classes_of_several_files_are_the_same(tmp_path):
    """Numbers of a class take the names of the first file; other names are refused."""
    classes = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = {"text": ["a", "b"], "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features=classes).to_parquet(tmp_path / "1.parquet")
    pd.DataFrame(rows).to_parquet(tmp_path / "2.parquet")
    both = load_splits([str(tmp_path / "1.parquet"), str(tmp_path / "2.parquet")])["train"]
    assert both.features == classes
    assert both["label"][:] == [0, 1, 0, 1]
    others = datasets.Features(classes | {"label": datasets.ClassLabel(names=["yes", "no"])})
    datasets.Dataset.from_dict(rows, features=others).to_parquet(tmp_path / "3.parquet")
    with pytest.raises(DataError, match=r"the classes no, yes in .*1\.parquet, but yes, no"):
        load_splits([str(tmp_path / "1.parquet"), str(tmp_path / "3.parquet")])
