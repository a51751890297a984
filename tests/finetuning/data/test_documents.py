"""JSON files that are one object: rows compared with those they were made of, by hand or by pandas.

The control of all: `datasets` reads such a file as a single row.
"""

import gzip
import json

import datasets
import pandas as pd
import pytest
from datasets.packaged_modules.json.json import JsonConfig

from hf_ga import ConfigError, DataError, FinetuneConfig
from hf_ga.finetuning.data.formats.files import load_files, load_splits
from hf_ga.finetuning.data.sources import load_rows

ROWS = [{"text": f"row {i}", "label": i % 2} for i in range(6)]
FRAME = pd.DataFrame(ROWS)


def written(path, content, **how) -> str:
    text = content if isinstance(content, str) else json.dumps(content, **how)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def splits_of(file, notes=None, **how) -> dict[str, list[dict]]:
    loaded = load_splits([file], notes=notes, **how)
    return {split: list(rows) for split, rows in loaded.items()}


NESTED = {
    "under data": ({"version": "1", "data": ROWS}, "rows under the key `data`"),
    "under rows": ({"rows": ROWS}, "rows under the key `rows`"),
    "with facts beside": (
        {"meta": {"by": "me", "year": 2020}, "tags": ["a", "b"], "items": ROWS},
        "rows under the key `items` (not used: meta, tags)",
    ),
    "only training rows": ({"train": ROWS}, "splits under the keys train"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("layout", ["one line", "many lines", "packed"])
@pytest.mark.parametrize("name", NESTED)
def test_rows_under_a_key(name, layout, streaming, tmp_path):
    document, form = NESTED[name]
    ending = "json.gz" if layout == "packed" else "json"
    how = {"indent": 2} if layout == "many lines" else {}
    file = written(tmp_path / f"d.{ending}", document, **how)
    notes = []
    assert splits_of(file, notes, streaming=streaming) == {"train": ROWS}
    assert notes == [f"d.{ending}: {form}"]
    assert len(datasets.load_dataset("json", data_files=file, split="train")) == 1


FORMS = ["records", "columns", "index", "split", "tight"]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_pandas(form, tmp_path):
    """Rows of a filtered frame are in the order of the frame, not of their numbers."""
    file = tmp_path / "d.json"
    for frame in (FRAME, FRAME[FRAME["label"] == 1], FRAME.iloc[[4, 0, 3]], FRAME[["text"]]):
        if form == "tight":
            written(file, frame.to_dict("tight"))
        else:
            frame.to_json(file, orient=form)
        notes = []
        assert splits_of(str(file), notes) == {"train": frame.to_dict("records")}
        assert len(notes) == (form != "records")


def test_lines_and_lists_of_columns(tmp_path):
    FRAME.to_json(tmp_path / "d.jsonl", orient="records", lines=True)
    assert splits_of(str(tmp_path / "d.jsonl")) == {"train": ROWS}
    columns = {"tokens": [["a", "b"], ["c"]], "tags": [["x", "y"], ["x"]]}
    expected = [{"tokens": ["a", "b"], "tags": ["x", "y"]}, {"tokens": ["c"], "tags": ["x"]}]
    assert splits_of(written(tmp_path / "c.json", columns)) == {"train": expected}
    frame = FRAME.to_dict("list")
    assert splits_of(written(tmp_path / "e.json", frame)) == {"train": ROWS}


def test_types_of_values_are_kept(tmp_path):
    """Texts of digits stay texts, and rows may lack a key."""
    rows = [{"text": "01", "label": True, "w": 1}, {"text": "1", "label": False, "w": 0.5}]
    file = written(tmp_path / "d.json", {"data": [*rows, {"text": None, "label": True}]})
    assert splits_of(file)["train"] == [*rows, {"text": None, "label": True, "w": None}]


SPLITS = {
    "all": ({"train": ROWS[:3], "validation": ROWS[3:5], "test": ROWS[5:]}, ""),
    "other names": ({"training": ROWS[:3], "dev": ROWS[3:5], "testing": ROWS[5:]}, ""),
    "with facts beside": (
        {"version": 2, "train": ROWS[:3], "val": ROWS[3:5], "test": ROWS[5:], "labels": ["a"]},
        " (not used: labels)",
    ),
    "an unknown split": (
        {"train": ROWS[:3], "valid": ROWS[3:5], "test": ROWS[5:], "unlabelled": ROWS},
        " (not used: unlabelled)",
    ),
    "forms of pandas": (
        {
            "train": FRAME[:3].to_dict("list"),
            "validation": json.loads(FRAME[3:5].to_json(orient="split")),
            "test": json.loads(FRAME[5:].to_json()),
        },
        "",
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_as_keys(name, tmp_path):
    document, more = SPLITS[name]
    file = written(tmp_path / "d.json", document)
    notes = []
    expected = {"train": ROWS[:3], "validation": ROWS[3:5], "test": ROWS[5:]}
    assert splits_of(file, notes) == expected
    assert notes[0].startswith("d.json: splits under the keys tr")
    assert notes[0].endswith(more)
    rows, _ = load_rows(FinetuneConfig(dataset_name=file))
    assert {split: list(of_split) for split, of_split in rows.items()} == expected
    assert list(load_files([file], "validation")) == ROWS[3:5]
    assert list(load_files([file], "test")) == ROWS[5:]
    with pytest.raises(DataError, match="none for predict: save these rows in a file of their own"):
        load_files([file], "predict")


def test_two_keys_for_one_split(tmp_path):
    file = written(tmp_path / "d.json", {"train": ROWS[:3], "val": ROWS[3:4], "dev": ROWS[4:]})
    with pytest.raises(DataError, match="keys train, val, dev, of which several name the same"):
        load_splits([file])


def test_files_of_a_folder_are_read_as_any_other(tmp_path):
    """The control: `datasets` itself makes nulls of the words NA. With a README it reads them."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        (folder / f"{split}.csv").write_text("text;label\nNA;1\nnull;0\n")
    notes = []
    rows, _ = load_rows(FinetuneConfig(dataset_name=str(folder)), notes)
    expected = [{"text": "NA", "label": 1}, {"text": "null", "label": 0}]
    assert {split: list(of_split) for split, of_split in rows.items()} == {
        "train": expected,
        "validation": expected,
        "test": expected,
    }
    assert sorted(notes) == [
        f"{split}.csv: columns separated by semicolons" for split in ("test", "train", "validation")
    ]
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  sep: ;\n---\n")
    rows, _ = load_rows(FinetuneConfig(dataset_name=str(folder)))
    assert list(rows["train"]["text"]) == [None, None]


def test_conversations_that_look_like_logs_of_agents(tmp_path):
    """The control: `datasets` asks for a package that reads such logs."""
    turns = [{"role": "user", "content": "a"}]
    row = {"id": "1", "source": "s", "model": "m", "system_prompt": "p", "messages": turns}
    file = written(tmp_path / "d.jsonl", row)
    assert splits_of(file) == {"train": [row]}
    if hasattr(JsonConfig, "parse_agent_traces"):
        with pytest.raises(datasets.exceptions.DatasetGenerationError):
            datasets.load_dataset("json", data_files=file)


def test_splits_of_several_files(tmp_path):
    """Files without splits are training rows; an empty split is none."""
    files = [
        written(tmp_path / "1.json", {"train": ROWS[:2], "test": ROWS[2:3], "validation": []}),
        written(tmp_path / "2.jsonl", "\n".join(map(json.dumps, ROWS[3:4]))),
        written(tmp_path / "3.json", {"data": ROWS[4:]}),
    ]
    loaded = {split: list(rows) for split, rows in load_splits(files).items()}
    assert loaded == {"train": ROWS[:2] + ROWS[3:], "test": ROWS[2:3]}


def test_a_named_key(tmp_path):
    document = {"train": ROWS[:3], "other": {"rows": ROWS[3:]}, "n": 1}
    file = written(tmp_path / "d.json", document)
    for field, expected in {"train": ROWS[:3], "other.rows": ROWS[3:]}.items():
        assert splits_of(file, field=field) == {"train": expected}
        assert list(load_files([file], "predict", field=field)) == expected
    two = written(tmp_path / "e.json", {"a": ROWS[:3], "b": ROWS[3:]})
    with pytest.raises(DataError, match=r"several lists of rows \(a, b\): name one with --field"):
        load_splits([two])
    assert splits_of(two, field="b") == {"train": ROWS[3:]}


def test_a_key_that_does_not_fit(tmp_path):
    file = written(tmp_path / "d.json", {"data": ROWS, "n": 1})
    for field in ("rows", "n", "data.text", "data.0"):
        with pytest.raises(DataError, match=f"field {field}: there is no list of rows.*data, n"):
            load_splits([file], field=field)
    for name, content in {
        "l.jsonl": "\n".join(map(json.dumps, ROWS)),
        "l.json": ROWS,
        "m.json": "\n".join(map(json.dumps, ROWS)),
    }.items():
        with pytest.raises(DataError, match="has one row per line or is a list of rows: omit"):
            load_splits([written(tmp_path / name, content)], field="data")
    with pytest.raises(DataError, match=r"applies to JSON files, not to .*d\.csv: omit it"):
        load_splits([written(tmp_path / "d.csv", "text\na\n")], field="data")
    with pytest.raises(ConfigError, match="stdlib is not a file: omit it"):
        load_rows(FinetuneConfig(field="data"))


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ONE_ROW = {
    "a text": {"text": "a b"},
    "a conversation": {"messages": TURNS, "tools": [{"name": "f"}]},
    "a conversation of ShareGPT": {"conversations": [{"from": "human", "value": "a"}]},
    "an answer": {"question": "a", "context": "b", "answers": {"text": ["b"], "answer_start": [0]}},
    "a translation": {"translation": {"en": "a", "de": "b"}},
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_an_object_may_be_a_row(name, tmp_path):
    """Pretty-printed, too. In a .jsonl file, a single line always is."""
    row = ONE_ROW[name]
    file = written(tmp_path / "d.json", row)
    notes = []
    assert splits_of(file, notes) == {"train": [row]}
    assert notes == []
    nested = {"question": "a", "answers": [{"text": "b", "answer_start": 0}]}
    assert splits_of(written(tmp_path / "d.jsonl", nested)) == {"train": [nested]}


def test_rows_and_columns_that_cannot_be_told_apart(tmp_path):
    """The object is a row."""
    row = FRAME.set_axis(list("abcdef")).to_dict()
    file = written(tmp_path / "d.json", row)
    assert splits_of(file) == {"train": [row]}
    with pytest.raises(DataError, match=r"1 training rows are too few.*--field"):
        load_rows(FinetuneConfig(dataset_name=file))


def test_rows_under_a_key_of_a_single_line(tmp_path):
    """It is a row, unless `field` names the key."""
    file = written(tmp_path / "d.jsonl", {"version": "1", "data": ROWS})
    with pytest.raises(DataError, match=r"1 training rows are too few.*--field"):
        load_rows(FinetuneConfig(dataset_name=file))
    rows, _ = load_rows(FinetuneConfig(dataset_name=file, field="data"))
    assert rows.num_rows == {"train": 5, "validation": 1}


@pytest.mark.parametrize("name", ["d.json", "d.jsonl", "d.txt", "d.csv"])
def test_byte_order_marks(name, tmp_path):
    """The mark of Windows' editors is no part of a key, a column or a text."""
    texts = ["one", "two", "three"]
    contents = {
        "d.json": json.dumps({"data": [{"text": text} for text in texts]}),
        "d.jsonl": "\n".join(json.dumps({"text": text}) for text in texts),
        "d.txt": "\n".join(texts),
        "d.csv": "\n".join(["text", *texts]),
    }
    for mark in ("", "\ufeff"):
        file = tmp_path / name
        file.write_text(mark + contents[name], encoding="utf-8")
        for streaming in (False, True):
            rows = splits_of(str(file), streaming=streaming)["train"]
            assert [row["text"] for row in rows] == texts


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456\n"


@pytest.mark.parametrize(
    "name",
    ["d.txt", "d.csv", "d.tsv", "d.json", "d.jsonl", "d.jsonl.gz", "d.parquet", "folder/d.csv"],
)
def test_pointers_of_git_lfs(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(POINTER)
    dataset = path.parent if "/" in name else path
    with pytest.raises(DataError, match=r"d\.\S+ is a git-lfs pointer.*git lfs pull"):
        load_rows(FinetuneConfig(dataset_name=str(dataset)))
    path.write_text("version https://example.org\na text\n")  # the control: it only begins alike
    if name == "d.txt":
        assert splits_of(str(path))["train"][1] == {"text": "a text"}
