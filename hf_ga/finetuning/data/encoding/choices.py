"""Multiple choice: columns in several formats -> texts, choices, index of the correct choice; their
samples.
"""

from datasets import Dataset, List, Value
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import DataError
from hf_ga.finetuning.data.checks import check_values, is_list_of_texts
from hf_ga.finetuning.data.encoding.tokenization import Rows, encode_groups, make_samples


def encode_choices(dataset: Dataset, split: str) -> Dataset:
    """Convert the multiple-choice rows of a split to one format: a column `choices` with a list of
    strings per row, and integer labels.

    The given choices are a column `choices` of lists, or the columns `choice0`, `choice1`, ...; a
    column `text_pair` (the beginning of each choice) is prepended to each choice and removed.

    Args:
        dataset: The rows of the split.
        split: Its name, for errors.

    Returns:
        The same rows with `choices` and, if they had labels, `label` as int64: the 0-based index of
        the correct choice.

    Raises:
        DataError: If choices are not lists of strings, rows have different numbers of choices or
            fewer than two, or a label is not the index of a choice.
    """
    choice_columns = [name for name in dataset.column_names if name.startswith("choice")]
    choices = dataset[choice_columns[0]][:]
    if choice_columns != ["choices"]:
        choices = [list(row.values()) for row in dataset.select_columns(choice_columns)]
    remedy = "Choose the column with --choices_column."
    rule = "choices must be lists of strings"
    check_values(split, choices, is_list_of_texts, rule=rule, remedy=remedy)
    counts = set(map(len, choices))
    if len(counts) != 1 or min(counts) < 2:
        listed = " and ".join(map(str, sorted(counts)))
        raise DataError(
            "all rows need the same number of choices, at least 2, because a batch is one block of "
            f"samples x choices; there are {split} rows with {listed}. Remove or complete these "
            "rows."
        )
    texts = []
    for row, row_choices in zip(dataset, choices, strict=True):
        beginning = row.get("text_pair") or ""
        texts.append([f"{beginning} {choice or ''}".removeprefix(" ") for choice in row_choices])
    encoded = dataset.select_columns("text")
    if "label" in dataset.column_names:
        labels = dataset["label"][:]
        (count,) = counts
        check_values(
            split,
            labels,
            # A label is an int, or a string of digits.
            lambda label: str(label).isdecimal() and int(label) < count,
            rule=f"a label must be the 0-based index of one of {count} choices",
        )
        encoded = encoded.add_column("label", list(map(int, labels)))
    return encoded.add_column("choices", texts, feature=List(Value("string")))


def tokenize_choices(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> Rows:
    """Tokenize the text of each multiple-choice row paired with each of its choices, with special
    tokens. A sample has one target.

    Args:
        rows: A batch of rows by column: `text`, `choices` and optionally `label`.
        tokenizer: The tokenizer of the model.
        max_length: Maximum number of tokens of a text with a choice. None: no truncation.

    Returns:
        `input_ids` and optionally `token_type_ids`, one list per choice; `length`, the number of
        tokens of the longest; `num_targets`, 0 for a row without text or choices, which has no
        tokens either; `was_truncated`; `label`, if the rows have it.
    """
    texts = [
        [text or ""] * len(row_choices)
        for text, row_choices in zip(rows["text"], rows["choices"], strict=True)
    ]
    columns, full = encode_groups(tokenizer, max_length, texts, rows["choices"])
    has_content = [
        bool(text) and any(row_choices)
        for text, row_choices in zip(rows["text"], rows["choices"], strict=True)
    ]
    return make_samples(rows, columns, has_content, full)
