"""Samples of a stream of training rows, tokenized while the rows are read."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from datasets import ClassLabel, IterableDataset

from hf_ga.finetuning.data.checks import check_values
from hf_ga.finetuning.data.columns import select_by_role
from hf_ga.finetuning.data.encoding.labels import (
    CLASS_RULE,
    class_label_feature,
    labels_to_ids,
    read_numbers,
)
from hf_ga.finetuning.data.formats.files import wrap_read_errors

BATCH_SIZE = 100  # rows that are tokenized together


class StreamedSamples:
    """Iterates over the tokenized samples of a stream of training rows (`streaming`); rows without
    tokens are skipped.

    Args:
        stream: The training rows.
        name: Name of the dataset, for errors.
        columns: The column of the rows for each role, such as {"text": "body", "label": "stars"}.
        labels: Class names in the order of their ids; empty if the task has no classes.
        tokenize: Function from rows (a list per role) to samples (a list per column).
    """

    def __init__(
        self,
        stream: IterableDataset,
        name: str,
        columns: Mapping[str, str],
        labels: Sequence[str],
        tokenize: partial,
    ) -> None:
        self.name = name
        stream = select_by_role(stream, columns)
        encode = partial(
            _encode_and_tokenize,
            class_label=class_label_feature(stream),
            labels=labels,
            tokenize=tokenize,
        )
        samples = stream.map(
            encode,
            batched=True,
            batch_size=BATCH_SIZE,
            remove_columns=list(columns),
        )
        self.samples = samples.filter(bool, input_columns="length")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a stream of training rows that shuffles its rows by epoch."""
        self.samples.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Read the stream of training rows once, and yield its tokenized samples.

        Raises:
            DataError: If a row cannot be read or tokenized, or has an unknown label or an invalid
                weight.
        """
        with wrap_read_errors(self.name):
            yield from self.samples


def _encode_and_tokenize(
    rows: dict[str, list],
    class_label: ClassLabel | None,
    labels: Sequence[str],
    tokenize: partial,
) -> dict[str, list]:
    """Replace the labels of a batch of streamed rows by class ids, and tokenize it."""
    if labels:
        check_values(
            "streamed",
            rows["label"],
            lambda value: value is not None,
            rule=CLASS_RULE,
        )
        lists = [[value] for value in rows["label"]]
        ids = labels_to_ids(lists, class_label, labels, "streamed")
        rows = {**rows, "label": [row_ids[0] for row_ids in ids]}
    samples = tokenize(rows)
    if "weight" in rows:
        samples["weight"] = read_numbers("streamed", rows["weight"], "weight")
    return samples
