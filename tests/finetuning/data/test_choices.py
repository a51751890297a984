"""Multiple choice: columns of all kinds, samples and batches by hand."""

import pytest
from datasets import Dataset, DatasetDict
from test_data import ids_of
from test_tokenization import encoder_tokenizer

from hf_ga import DataError, FinetuneConfig
from hf_ga.finetuning.data.columns import choose_columns, rename_columns
from hf_ga.finetuning.data.encoding.choices import encode_choices, tokenize_choices
from hf_ga.finetuning.data.encoding.collation import collate_samples
from hf_ga.finetuning.data.tasks import TASKS


def encoded(*rows):
    """As `prepare_data` does: columns by name, then texts, choices and labels."""
    splits = DatasetDict(train=Dataset.from_list(list(rows)))
    columns = choose_columns(
        splits, FinetuneConfig(dataset_name="x", task="multiple-choice"), TASKS["multiple-choice"]
    )
    dataset = encode_choices(rename_columns(splits, columns)["train"], "train")
    return [(row["text"], row["choices"], row["label"]) for row in dataset]


SWAG = {
    "sent1": "He runs.",
    "sent2": "She",
    **{f"ending{i}": f"goes {i}." for i in (2, 0, 3, 1)},
    "label": 2,
}
RACE = {"article": "Long.", "question": "Who?", "options": ["x", "y"], "answer": 1}
CASES = {
    "SWAG": (SWAG, ("He runs.", ["She goes 0.", "She goes 1.", "She goes 2.", "She goes 3."], 2)),
    "HellaSwag": (
        {"ctx": "He runs", "endings": ["off.", None], "label": "1"},
        ("He runs", ["off.", ""], 1),
    ),
    "MMLU": ({"question": "Why?", "choices": ["x", "y"], "answer": 1}, ("Why?", ["x", "y"], 1)),
    "RACE": (RACE, ("Long.", ["Who? x", "Who? y"], 1)),
    "COPA": (
        {"premise": "It fell.", "choice1": "x", "choice2": "y", "label": 0},
        ("It fell.", ["x", "y"], 0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_columns_of_well_known_datasets(name):
    row, expected = CASES[name]
    assert encoded(row) == [expected]


GOOD = {"question": "q", "choices": ["x", "y"], "label": 0}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, GOOD | {"choices": ["x"]}], "the same number of choices.*rows with 1 and 2"),
        ([GOOD | {"choices": ["x"]}], "at least 2.*rows with 1"),
        (
            [GOOD, GOOD | {"label": 2}],
            "index of one of 2 choices, but 1 of 2 train rows have 2 .*--label_column",
        ),
        ([GOOD, GOOD | {"label": -1}], "1 of 2 train rows have -1"),
        ([GOOD, GOOD | {"label": None}], "1 of 2 train rows have None"),
        ([GOOD | {"label": "B"}], "1 of 1 train rows have 'B'"),
        ([GOOD | {"label": "7"}], "1 of 1 train rows have '7'"),
        (
            [GOOD, GOOD | {"choices": None}],
            "choices must be lists of strings, but 1 of 2 train rows have.*--choices_column",
        ),
    ],
)
def test_rows_that_cannot_be_used(rows, message):
    with pytest.raises(DataError, match=message):
        encoded(*rows)


ROWS = {
    "text": ["a b", "c", None],
    "choices": [["d", "e f g"], ["", "h"], ["a", "b"]],
    "label": [1, 0, 0],
}


def test_samples_by_hand():
    """<cls> text <sep> choice <sep>; at 6 tokens the longer text is cut first."""
    columns = tokenize_choices(ROWS, encoder_tokenizer(), 6)
    assert columns["input_ids"][0] == [
        [13, *ids_of("a b"), 14, *ids_of("d"), 14],
        [13, *ids_of("a"), 14, *ids_of("e f"), 14],
    ]
    assert columns["token_type_ids"][0] == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert columns["input_ids"][1:] == [[[13, 5, 14, 14], [13, 5, 14, 10, 14]], []]
    assert columns["length"] == [6, 5, 0]
    assert columns["was_truncated"] == [True, False, False]
    assert columns["num_targets"] == [1, 1, 0]
    batch = collate_samples(
        [{name: values[i] for name, values in columns.items()} for i in range(2)], pad_token_id=0
    )
    assert batch["input_ids"].tolist() == [
        [[13, 3, 4, 14, 6, 14], [13, 3, 14, 7, 8, 14]],
        [[13, 5, 14, 14, 0, 0], [13, 5, 14, 10, 14, 0]],
    ]
    assert batch["attention_mask"].sum(-1).tolist() == [[6, 6], [4, 5]]
    assert batch["labels"].tolist() == [1, 0]
    uncut = tokenize_choices(ROWS, encoder_tokenizer(), None)
    assert [list(map(len, row)) for row in uncut["input_ids"]] == [[6, 8], [4, 5], []]
    assert not any(uncut["was_truncated"])
