"""Files as people have them, through the command: read up to the model, and the line that says how,
or refused.
"""

import json

import pytest
from bad_files import arguments_of
from test_bad_rows import check

from hf_ga.finetuning.run.flags import cli

ROWS = [{"text": f"row {i} is {('bad', 'good')[i % 2]}", "label": i % 2} for i in range(40)]
CLASSIFY = "--task text-classification"
ANSWERED = {
    "id": "0",
    "question": "Where?",
    "answers": [{"text": "Oslo", "answer_start": 16}],
}
ARTICLE = {
    "title": "T",
    "paragraphs": [{"context": "The tower is in Oslo.", "qas": [ANSWERED] * 20}],
}


def cells(separator: str, label=str, names: str = "text label") -> str:
    lines = [f"{row['text']}{separator}{label(row['label'])}" for row in ROWS]
    return "\n".join([separator.join(names.split()), *lines, ""])


CLASSES = ["pos", "pos ", "neg"]
NULLS = ["NA", "null", "None", "nan", "a text"]
# file: task, content, a line of the output or words of the error
FILES = {
    "nested.json": (CLASSIFY, json.dumps({"v": "1", "data": ROWS}), "rows under the key `data`"),
    "splits_as_keys.json": (
        CLASSIFY,
        json.dumps({"train": ROWS[:32], "test": ROWS[32:]}),
        "30 train, 8 test, 2 validation rows",
    ),
    "squad_own_format.json": (
        "--task question-answering",
        json.dumps({"version": "1.1", "data": [ARTICLE]}),
        "19 train, 1 validation rows",
    ),
    "semicolon.csv": (
        CLASSIFY,
        cells(";", ("neg", "pos").__getitem__),
        "semicolon.csv: columns separated by semicolons",
    ),
    "tabs.tsv": (CLASSIFY, cells("\t"), "tabs.tsv: columns separated by tabs"),
    "decimal_comma.csv": (
        "--task regression",
        cells(";", "{},5".format, "text score"),
        "numbers of the labels have a decimal comma",
    ),
    "float_labels.csv": (CLASSIFY, cells(",", "{}.0".format), "classes    0 20, 1 18"),
    "null_words.csv": (
        CLASSIFY,
        "text,label\n"
        + "".join(f"{NULLS[i % 5]},{('None', 'NA', 'yes')[i % 3]}\n" for i in range(45)),
        "null_words.csv: 43 train, 2 validation rows",
    ),
    "class_with_space.csv": (
        CLASSIFY,
        "text,label\n" + "".join(f"row {i},{CLASSES[i % 3]}\n" for i in range(45)),
        "the labels 'pos' and 'pos ' differ in spaces or case only",
    ),
    "git_lfs_pointer.txt": (
        "--task causal-lm",
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123456\n",
        ["git_lfs_pointer.txt is a git-lfs pointer", "`git lfs pull`"],
    ),
    "one_hot_two_classes.jsonl": (
        "--task multi-label",
        "".join(
            json.dumps({"text": row["text"], "labels": [1 - row["label"], row["label"]]}) + "\n"
            for row in ROWS
        ),
        "labels: a 0 or 1 for each of 2 classes (one-hot)",
    ),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", FILES)
def test_file(name, files, tmp_path, capsys):
    task, content, expected = FILES[name]
    (tmp_path / name).write_text(content)
    text = f"{task} --dataset_name {tmp_path / name} --model_name_or_path {{d}}/bert"
    if "causal-lm" in task:
        text = text.replace("/bert", "/gpt")
    check(arguments_of(text, files, tmp_path / "out"), expected, capsys)


@pytest.mark.usefixtures("no_model")
def test_no_row_of_null_words_is_empty(files, tmp_path, capsys):
    """The control: a row without a text is."""
    task, content, _ = FILES["null_words.csv"]
    for more, is_empty in (("", False), (",yes\n", True)):
        (tmp_path / "d.csv").write_text(content + more)
        text = f"{task} --dataset_name {tmp_path / 'd.csv'} --validation_file {tmp_path / 'd.csv'}"
        arguments = arguments_of(f"{text} --model_name_or_path {{d}}/bert", files, tmp_path / "out")
        with pytest.raises(AssertionError, match="was built before"):
            cli.finetune_main(arguments)
        assert ("skipped because they are empty" in capsys.readouterr().out) == is_empty
