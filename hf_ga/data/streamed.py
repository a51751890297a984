"""Training rows that are read and tokenized while training."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from datasets import ClassLabel, IterableDataset

from hf_ga.data.files import unreadable
from hf_ga.data.labels import label_ids
from hf_ga.errors import HfGaError

BATCH_SIZE = 100  # rows tokenized together


class StreamedSamples:
    """The samples of a stream, tokenized while they are read; empty rows are skipped.

    Args:
        stream: the training rows. name: of the dataset, for errors.
        columns: role -> column of the rows. labels: names in the order of their ids; empty if rows have none.
        tokenize: rows by role -> columns of samples.
    """

    def __init__(
        self, stream: IterableDataset, name: str, columns: dict[str, str], labels: Sequence[str], tokenize: partial
    ) -> None:
        self.name = name
        stream = stream.select_columns(list(columns.values()))
        stream = stream.rename_columns({column: role for role, column in columns.items() if column != role})
        feature = (stream.features or {}).get("label")
        named = feature if isinstance(feature, ClassLabel) else None
        encode = partial(_encode, feature=named, labels=labels, tokenize=tokenize)
        samples = stream.map(encode, batched=True, batch_size=BATCH_SIZE, remove_columns=list(columns))
        self.samples = samples.filter(bool, input_columns="length")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of streams that shuffle by epoch."""
        self.samples.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One pass.

        Raises:
            DataError: a row cannot be read, tokenized, or has an unknown label.
        """
        try:
            yield from self.samples
        except HfGaError:
            raise
        except Exception as error:
            raise unreadable(self.name, error) from error


def _encode(rows: dict[str, list], feature: ClassLabel | None, labels: Sequence[str], tokenize: partial) -> dict[str, list]:
    if labels:
        ids = label_ids([[value] for value in rows["label"]], feature, labels, "the stream")
        rows = {**rows, "label": [of_row[0] for of_row in ids]}
    return tokenize(rows)
