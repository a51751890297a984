"""Which columns of a dataset a task takes, by their names or by flags."""

import pytest
from column_types import ANSWERS, LISTS, MESSAGES, NUMBER, TEXT, Columns, empty_rows
from datasets import Dataset, DatasetDict

from hf_ga import DataError, FinetuneConfig
from hf_ga.finetuning.data.columns import choose_columns, rename_columns
from hf_ga.finetuning.data.tasks import TASKS

# Task, columns of a dataset, flags; then the column that is chosen for each role.
COLUMNS: list[tuple[str, Columns, dict[str, str], dict[str, str]]] = [
    ("causal-lm", {"text": TEXT, "label": TEXT}, {}, {"text": "text"}),
    ("causal-lm", {"n": NUMBER, "body": TEXT}, {}, {"text": "body"}),
    (
        "causal-lm",
        {"prompt": TEXT, "completion": TEXT},
        {"text_column": "prompt"},
        {"text": "prompt"},
    ),
    (
        "causal-lm",
        {"messages": MESSAGES, "prompt": TEXT, "completion": TEXT},
        {},
        {"messages": "messages"},
    ),
    (
        "causal-lm",
        {"text": TEXT, "prompt": TEXT, "completion": TEXT},
        {},
        {"prompt": "prompt", "completion": "completion"},
    ),
    (
        "causal-lm",
        {"output": TEXT, "input": TEXT, "instruction": TEXT},
        {},
        {"instruction": "instruction", "output": "output", "input": "input"},
    ),
    (
        "causal-lm",
        {"output": TEXT, "instruction": TEXT},
        {},
        {"instruction": "instruction", "output": "output"},
    ),
    (
        "causal-lm",
        {"text": TEXT, "prompt": TEXT, "output": TEXT, "input": TEXT},
        {},
        {"text": "text"},
    ),
    ("masked-lm", {"text": TEXT, "prompt": TEXT, "completion": TEXT}, {}, {"text": "text"}),
    ("text-classification", {"label": TEXT, "body": TEXT}, {}, {"text": "body", "label": "label"}),
    (
        "text-classification",
        {"kind": TEXT, "body": TEXT},
        {"label_column": "kind"},
        {"text": "body", "label": "kind"},
    ),
    (
        "text-classification",
        {"text": TEXT, "labels": TEXT},
        {},
        {"text": "text", "label": "labels"},
    ),
    (
        "text-classification",
        {"text": TEXT, "labels": TEXT, "label": TEXT},
        {},
        {"text": "text", "label": "label"},
    ),
    (
        "text-classification",
        {"sentence1": TEXT, "sentence2": TEXT, "label": TEXT},
        {"text_column": "sentence1"},
        {"text": "sentence1", "label": "label"},
    ),
    (
        "multi-label",
        {"text": TEXT, "label": TEXT, "labels": LISTS},
        {},
        {"text": "text", "label": "labels"},
    ),
    (
        "regression",
        {"body": TEXT, "more": TEXT, "label": TEXT},
        {"text_pair_column": "more"},
        {"text": "body", "text_pair": "more", "label": "label"},
    ),
    (
        "regression",
        {"text": TEXT, "n": NUMBER, "score": TEXT},
        {},
        {"text": "text", "label": "score"},
    ),
    (
        "regression",
        {"a": TEXT, "b": TEXT, "score": TEXT},
        {"text_column": "a", "text_pair_column": "b"},
        {"text": "a", "text_pair": "b", "label": "score"},
    ),
    (
        "regression",
        {"text": TEXT, "b": TEXT, "score": TEXT},
        {"text_pair_column": "b"},
        {"text": "text", "text_pair": "b", "label": "score"},
    ),
    (
        "token-classification",
        {"words": TEXT, "x": LISTS, "pos_tags": TEXT, "ner_tags": TEXT},
        {},
        {"tokens": "words", "label": "ner_tags"},
    ),
    (
        "token-classification",
        {"words": TEXT, "tokens": TEXT, "tags": TEXT, "ner_tags": TEXT},
        {},
        {"tokens": "tokens", "label": "tags"},
    ),
    (
        "token-classification",
        {"tokens": TEXT, "tags": TEXT, "mine": TEXT, "more": TEXT},
        {"text_column": "mine", "label_column": "more"},
        {"tokens": "mine", "label": "more"},
    ),
    (
        "question-answering",
        {"id": TEXT, "title": TEXT, "context": TEXT, "question": TEXT, "answers": ANSWERS},
        {},
        {"question": "question", "context": "context", "answers": "answers"},
    ),
    (
        "question-answering",
        {"q": TEXT, "p": TEXT, "found": ANSWERS, "question": TEXT},
        {"text_column": "q", "text_pair_column": "p", "label_column": "found"},
        {"question": "q", "context": "p", "answers": "found"},
    ),
    (
        "multiple-choice",
        {"sent1": TEXT, "sent2": TEXT, "ending1": TEXT, "ending0": TEXT, "label": TEXT},
        {},
        {
            "text": "sent1",
            "text_pair": "sent2",
            "choice0": "ending0",
            "choice1": "ending1",
            "label": "label",
        },
    ),
    (
        "multiple-choice",
        {"question": TEXT, "choices": LISTS, "mine": LISTS, "answer": TEXT},
        {"choices_column": "mine"},
        {"text": "question", "choices": "mine", "label": "answer"},
    ),
    (
        "seq2seq",
        {"target": TEXT, "source": TEXT, "text": TEXT},
        {},
        {"text": "source", "target": "target"},
    ),
    (
        "seq2seq",
        {"id": TEXT, "document": TEXT, "summary": TEXT},
        {},
        {"text": "document", "target": "summary"},
    ),
    (
        "seq2seq",
        {"article": TEXT, "highlights": TEXT, "id": TEXT},
        {},
        {"text": "article", "target": "highlights"},
    ),
    (
        "seq2seq",
        {"document": TEXT, "summary": TEXT, "title": TEXT},
        {"target_column": "title"},
        {"text": "document", "target": "title"},
    ),
    (
        "seq2seq",
        {"translation.de": TEXT, "translation.en": TEXT},
        {},
        {"text": "translation.de", "target": "translation.en"},
    ),
    (
        "seq2seq",
        {"translation.de": TEXT, "translation.en": TEXT},
        {"text_column": "translation.en"},
        {"text": "translation.en", "target": "translation.de"},
    ),
]
PAIRS = [
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
]
# Task, columns, flags; then the flag whose column is missing, and that column.
MISSING: list[tuple[str, Columns, dict[str, str], str, str]] = [
    ("causal-lm", {"body": TEXT, "title": TEXT}, {}, "text_column", "text"),
    (
        "text-classification",
        {"title": TEXT, "body": TEXT, "label": TEXT},
        {},
        "text_column",
        "text",
    ),
    ("regression", {"n": NUMBER, "label": TEXT}, {}, "text_column", "text"),
    ("masked-lm", {"text": TEXT}, {"text_column": "b"}, "text_column", "b"),
    ("regression", {"text": TEXT}, {}, "label_column", "label"),
    ("multi-label", {"text": TEXT, "tags": TEXT}, {}, "label_column", "labels"),
    (
        "text-classification",
        {"text": TEXT, "label": TEXT},
        {"label_column": "y"},
        "label_column",
        "y",
    ),
    (
        "text-classification",
        {"text": TEXT, "label": TEXT},
        {"text_pair_column": "text_pair"},
        "text_pair_column",
        "text_pair",
    ),
    ("token-classification", {"text": TEXT, "tags": TEXT}, {}, "text_column", "tokens"),
    ("token-classification", {"tokens": TEXT}, {}, "label_column", "tags"),
    (
        "question-answering",
        {"query": TEXT, "context": TEXT, "answers": ANSWERS},
        {},
        "text_column",
        "question",
    ),
    (
        "question-answering",
        {"question": TEXT, "text": TEXT, "answers": ANSWERS},
        {},
        "text_pair_column",
        "context",
    ),
    ("question-answering", {"question": TEXT, "context": TEXT}, {}, "label_column", "answers"),
    ("multiple-choice", {"question": TEXT, "label": TEXT}, {}, "choices_column", "choices"),
    (
        "multiple-choice",
        {"question": TEXT, "label": TEXT},
        {"choices_column": "x"},
        "choices_column",
        "x",
    ),
    (
        "multiple-choice",
        {"question": TEXT, "c": LISTS},
        {"choices_column": "c"},
        "label_column",
        "label",
    ),
    ("seq2seq", {"body": TEXT, "target": TEXT}, {}, "text_column", "source"),
    ("seq2seq", {"source": TEXT, "body": TEXT}, {}, "target_column", "target"),
]


def chosen(task: str, columns: Columns, **flags) -> dict[str, str]:
    """The columns chosen from a dataset that has the given ones, under the given flags."""
    rows = DatasetDict(train=empty_rows(columns))
    config = FinetuneConfig(dataset_name="x", task=task, **flags)
    found = choose_columns(rows, config, TASKS[task])
    rename_columns(rows, found)  # which checks that they are there
    return found


@pytest.mark.parametrize(("task", "columns", "flags", "expected"), COLUMNS)
def test_columns(task, columns, flags, expected):
    assert chosen(task, columns, **flags) == expected


@pytest.mark.parametrize("task", ["text-classification", "multi-label", "regression"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_known_names_of_pairs_of_texts(first, second, task):
    columns = {second: TEXT, "text": TEXT, first: TEXT, "label": TEXT}
    assert chosen(task, columns) == {"text": first, "text_pair": second, "label": "label"}


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_first_text_of_a_pair_alone(first, second):
    columns = {first: TEXT, "label": NUMBER}
    assert chosen("regression", columns, label_column="label") == {"text": first, "label": "label"}
    columns = {"text": TEXT, first: TEXT, "label": TEXT}
    assert chosen("regression", columns) == {"text": "text", "label": "label"}


@pytest.mark.parametrize(("task", "columns", "flags", "flag", "missing"), MISSING)
def test_columns_that_are_missing(task, columns, flags, flag, missing):
    """The error names the flag, the column, those that there are, and the flag again as the
    remedy.
    """
    there = next(iter(columns))
    message = f"^{flag} '{missing}' is not in the train rows.*{there}.*--{flag}"
    with pytest.raises(DataError, match=message):
        chosen(task, columns, **flags)


def test_one_column_cannot_have_two_roles():
    message = "text_column and label_column must be different columns"
    with pytest.raises(DataError, match=message):
        chosen("regression", {"text": TEXT, "label": TEXT}, label_column="text")
    with pytest.raises(DataError, match=message):
        chosen("token-classification", {"tags": TEXT}, text_column="tags")


def test_block_size_needs_plain_texts():
    message = r"block_size concatenates plain texts.*prompt, completion.*--text_column"
    with pytest.raises(DataError, match=message):
        chosen("causal-lm", {"prompt": TEXT, "completion": TEXT}, block_size=8)


def test_columns_that_one_split_lacks():
    """Those of conversations have no flag, so none is named."""
    config = FinetuneConfig(dataset_name="x")
    instructions = {"instruction": TEXT, "output": TEXT}
    rows = DatasetDict(
        train=empty_rows(instructions | {"input": TEXT}), test=empty_rows(instructions)
    )
    message = r"column 'input' is not in the test rows.*Fix these rows, or rename the column"
    with pytest.raises(DataError, match=message) as error:
        rename_columns(rows, choose_columns(rows, config, TASKS["causal-lm"]))
    assert "--" not in str(error.value)


def test_texts_that_the_validation_rows_lack():
    config = FinetuneConfig(dataset_name="x")
    rows = DatasetDict(train=empty_rows({"text": TEXT}), validation=empty_rows({"body": TEXT}))
    message = "text_column 'text' is not in the validation rows, which have: body"
    with pytest.raises(DataError, match=message):
        rename_columns(rows, choose_columns(rows, config, TASKS["causal-lm"]))


def test_words_are_lists():
    """The control: a row may be None."""
    for rows in (["a b"], [3], [["a", None]]):
        with pytest.raises(DataError, match="text_column must name a column of lists of strings"):
            rename_columns(
                DatasetDict(train=Dataset.from_dict({"words": rows})), {"tokens": "words"}
            )
    rows = DatasetDict(train=Dataset.from_dict({"words": [["a"], None]}))
    assert rename_columns(rows, {"tokens": "words"})["train"]["tokens"][:] == [["a"], None]
