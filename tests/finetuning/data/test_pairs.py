"""Embeddings: columns of all kinds, samples and batches by hand."""

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from test_data import ids_of
from test_tokenization import encoder_tokenizer

from hf_ga import DataError, FinetuneConfig
from hf_ga.finetuning.data.columns import choose_columns, rename_columns
from hf_ga.finetuning.data.encoding.labels import encode_numbers
from hf_ga.finetuning.data.encoding.pairs import (
    collate_pairs,
    text_id,
    tokenize_pairs,
)
from hf_ga.finetuning.data.tasks import TASKS


def chosen(rows, features=None, **flags):
    """Rows by role, as `prepare_data` makes them."""
    splits = DatasetDict(train=Dataset.from_list(rows, features=features))
    options = FinetuneConfig(dataset_name="x", task="embedding", **flags)
    roles = choose_columns(splits, options, TASKS["embedding"])
    splits = rename_columns(splits, roles)
    if "label" in roles:
        return encode_numbers(splits["train"], "train", "label", "pairs", []).to_list()
    return splits["train"].to_list()


NLI = {"anchor": "a", "positive": "p", "negative": "n"}
MARCO = {"negative_2": "y", "query": "a", "negative_10": "z", "positive": "p", "negative_1": "x"}
CASES = {
    "NLI": (NLI, NLI),
    "MS MARCO": (
        MARCO,
        {"anchor": "a", "positive": "p", "negative": "x", "negative_1": "y", "negative_2": "z"},
    ),
    "Natural Questions": ({"query": "a", "answer": "p"}, {"anchor": "a", "positive": "p"}),
    "GooAQ": ({"answer": "p", "question": "a"}, {"anchor": "a", "positive": "p"}),
    "reading": ({"question": "a", "passage": "y", "answer": "p"}, {"anchor": "a", "positive": "p"}),
    "search": ({"query": "a", "document": "p", "id": 3}, {"anchor": "a", "positive": "p"}),
    "STS": (
        {"sentence1": "a", "sentence2": "p", "score": 0.5},
        {"anchor": "a", "positive": "p", "label": 0.5},
    ),
    "SICK": (
        {"sentence_A": "a", "sentence_B": "p", "label": 4},
        {"anchor": "a", "positive": "p", "label": 4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_columns_of_well_known_datasets(name):
    row, expected = CASES[name]
    assert chosen([row]) == [expected]


def test_columns_by_flag():
    row = {"anchor": "x", "positive": "y", "head": "a", "tail": "p", "close": 2.0}
    flags = {"text_column": "head", "text_pair_column": "tail", "label_column": "close"}
    assert chosen([row], **flags) == [{"anchor": "a", "positive": "p", "label": 2.0}]


SCORED = {"sentence1": "a", "sentence2": "p"}
AS_CLASS = Features(
    sentence1=Value("string"),
    sentence2=Value("string"),
    label=ClassLabel(names=["entailment", "neutral"]),
)


@pytest.mark.parametrize(
    ("rows", "features", "message"),
    [
        ([{"text": "a"}], None, "text_column 'anchor' is not in the train rows.*--text_column"),
        ([{"anchor": "a"}], None, "text_pair_column 'positive' is not in the train rows"),
        (
            [NLI | {"negative": 3.0}],
            None,
            "negative must name a column of strings, but .* Fix these rows, or rename the column",
        ),
        ([NLI | {"score": 1.0}], None, "a score .'score'. and negatives .negative., but .* remove"),
        (
            [SCORED | {"score": 1.0}, SCORED | {"score": None}],
            None,
            "the score of a pair must be a finite number, .* but 1 of 2 train rows have None",
        ),
        ([SCORED | {"score": "high"}], None, "1 of 1 train rows have 'high'.*--label_column"),
        (
            [SCORED | {"label": 0}],
            AS_CLASS,
            "must be a number, .* but 'label' is a class .entailment, neutral.: replace",
        ),
    ],
)
def test_rows_that_cannot_be_used(rows, features, message):
    with pytest.raises(DataError, match=message):
        chosen(rows, features)


ROWS = {
    "anchor": ["a b", "c", None, "d"],
    "positive": ["d e f g h", "a b", "a", " "],
    "negative": ["h", None, "b", "c"],
}


def test_samples_by_hand():
    """<cls> text <sep> for each text, truncated to 6 tokens. Rows without anchor or positive are
    empty; the second has no negative.
    """
    columns = tokenize_pairs(ROWS, encoder_tokenizer(), 6)
    assert columns["input_ids"] == [
        [[13, *ids_of("a b"), 14], [13, *ids_of("d e f g"), 14], [13, *ids_of("h"), 14]],
        [[13, *ids_of("c"), 14], [13, *ids_of("a b"), 14], [13, 14]],
        [],
        [],
    ]
    assert columns["length"] == [6, 4, 0, 0]
    assert columns["num_targets"] == [1, 1, 0, 0]
    assert columns["was_truncated"] == [True, False, False, False]
    samples = [{name: values[i] for name, values in columns.items()} for i in range(2)]
    batch = collate_pairs(samples, pad_token_id=0)
    assert batch["input_ids_anchor"].tolist() == [[13, *ids_of("a b"), 14], [13, 5, 14, 0]]
    assert batch["attention_mask_anchor"].sum(1).tolist() == [4, 3]
    assert batch["input_ids_positive"].shape == (2, 6)
    assert batch["attention_mask_negative"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["text_id_anchor"][0] == batch["text_id_positive"][1] == text_id("a b")
    assert len({*batch["text_id_anchor"].tolist(), *batch["text_id_positive"].tolist()}) == 3
    assert batch["text_id_negative"].tolist() == [text_id("h"), 0]
    assert "score" not in batch


def test_scores_are_float32():
    rows = {"anchor": ["a", "b"], "positive": ["c", "d"], "label": [1, 0.25]}
    columns = tokenize_pairs(rows, encoder_tokenizer(), None)
    samples = [{name: values[i] for name, values in columns.items()} for i in range(2)]
    assert collate_pairs(samples, pad_token_id=0)["score"].tolist() == [1.0, 0.25]
