"""Types of columns, and datasets of given columns without rows."""

from typing import Any

from datasets import Dataset, Features, List, Value

Columns = dict[str, Any]  # name of a column -> its type

TEXT = Value("string")
NUMBER = Value("int64")
LISTS = List(Value("string"))
MESSAGES = List({"role": Value("string"), "content": Value("string")})
ANSWERS = {"text": List(Value("string")), "answer_start": List(Value("int64"))}


def empty_rows(columns: Columns) -> Dataset:
    """A dataset of these columns, without rows."""
    return Dataset.from_dict({name: [] for name in columns}, Features(columns))
