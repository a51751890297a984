"""Training rows that are read one after the other: where they come from, and how they become samples while they are read.

The first rows are read ahead. They stand for the training split wherever something must be known before the first step: columns,
labels, the proof of the target rule.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError

from hf_ga.data.column_checks import TEXTS
from hf_ga.data.row_checks import NUM_SHOWN, Origin, RowsError, with_row_numbers
from hf_ga.data.sources import (
    check_config_name,
    check_exists,
    is_file,
    load,
    load_file,
    readable_file,
    unreadable,
    with_usual_names,
)
from hf_ga.errors import DataError
from hf_ga.run.config import FinetuneConfig

STREAM = "the stream"
NUM_READ_AHEAD = 1000
BATCH_SIZE = 100  # rows that are tokenised at once


def load_streamed(config: FinetuneConfig) -> tuple[DatasetDict, IterableDataset]:
    """The splits, of which `train` is the first rows of the stream, and the stream of all training rows.

    Validation and test rows are read whole.

    Raises:
        DataError: a missing or unreadable file, an unknown dataset, no training rows, no validation rows.
    """
    splits = with_usual_names(_streams(config))
    name, files = config.dataset_name, {"validation": config.validation_file, "test": config.test_file}
    if "train" not in splits:
        raise DataError(f"dataset_name {name} has no training rows (splits: {', '.join(splits)}): there is nothing to train on.")
    rows = DatasetDict(train=_read(name, splits["train"], NUM_READ_AHEAD))
    if not len(rows["train"]):
        raise DataError(f"dataset_name {name} has no training rows: there is nothing to train on.")
    for split, file in files.items():
        if file:
            rows[split] = load_file(file)
        elif split in splits:
            rows[split] = _read(name, splits[split], None)
    if not len(rows.get("validation", ())):
        raise DataError(
            f"dataset_name {name} has no validation rows, and none can be taken from a stream: give --validation_file, or leave "
            "streaming out."
        )
    return rows, splits["train"]


def samples_of(
    stream: IterableDataset,
    columns: dict[str, str],
    labels: Sequence[str],
    tokenize: Callable[[dict[str, list]], dict[str, list]],
    name: str,
) -> "StreamedSamples":
    """The stream's samples, tokenised while they are read; empty rows are left out.

    Args:
        name: of the dataset, for messages.
        columns: role -> column of the rows. labels: names in the order of their ids; empty where rows have none.
        tokenize: rows by role -> columns of samples.
    """
    stream = stream.select_columns(list(columns.values()))
    stream = stream.rename_columns({column: role for role, column in columns.items() if column != role})
    feature = (stream.features or {}).get("label")
    names = feature.names if isinstance(feature, ClassLabel) else None
    encode = partial(_encode, names=names, labels=labels, tokenize=tokenize)
    samples = stream.map(encode, batched=True, batch_size=BATCH_SIZE, with_indices=True, remove_columns=list(columns))
    return StreamedSamples(samples.filter(_is_filled), name)


class StreamedSamples:
    """The samples of a stream; what cannot be read becomes one clear error."""

    def __init__(self, samples: IterableDataset, name: str) -> None:
        self.samples, self.name = samples, name

    def set_epoch(self, epoch: int) -> None:
        """Of streams that draw."""
        self.samples.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One pass.

        Raises:
            DataError: a row that cannot be read, or is no sample, by its number in the stream.
        """
        try:
            yield from self.samples
        except RowsError as error:
            file = self.name if is_file(self.name) else None
            raise DataError(error.told(Origin(error.split, file))) from error
        except (ValueError, OSError, EOFError, TypeError, DatasetsError, zlib.error) as error:
            raise unreadable(self.name, error) from error


def _streams(config: FinetuneConfig) -> dict[str, IterableDataset]:
    name, path = config.dataset_name, Path(config.dataset_name).expanduser()
    check_config_name(config)
    if is_file(name):
        kind, path = readable_file(name)
        return load(name, load_dataset, kind, data_files={"train": str(path)}, streaming=True)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        raise DataError(
            f"dataset_name {name} was saved to disk by `datasets`, which reads it row by row anyway: leave streaming out."
        )
    check_exists(name)
    return load(name, load_dataset, name, config.dataset_config_name, streaming=True)


def _read(name: str, stream: IterableDataset, most: int | None) -> Dataset:
    features = stream.features

    def read() -> Dataset:
        return Dataset.from_list(list(islice(stream, most)), features=Features(features) if features else None)

    return load(name, read)


def _encode(
    rows: dict[str, list],
    numbers: list[int],
    names: Sequence[str] | None,
    labels: Sequence[str],
    tokenize: Callable[[dict[str, list]], dict[str, list]],
) -> dict[str, list]:
    for role in TEXTS & set(rows):
        wrong = [i for i, value in enumerate(rows[role]) if value is not None and not isinstance(value, str)]
        if wrong:
            shown = [f"holds {rows[role][i]!r:.60}" for i in wrong[:NUM_SHOWN]]
            raise RowsError(
                STREAM, [numbers[i] for i in wrong], len(numbers), shown, f"the column of the {role} must hold strings."
            )
    if labels:
        rows = {
            **rows,
            "label": [_label_id(value, names, labels, number) for value, number in zip(rows["label"], numbers, strict=True)],
        }
    return with_row_numbers(tokenize, STREAM)(rows, numbers)


def _label_id(value: Any, names: Sequence[str] | None, labels: Sequence[str], number: int) -> int:
    """Numbers that a dataset names stand for the names."""
    name = names[value] if names and isinstance(value, int) and 0 <= value < len(names) else str(value)
    if name not in labels:
        rule = (
            f"the stream has the label {name!r}, which is none of the {len(labels)} known ones (such as {', '.join(labels[:5])}): "
            f"those of the first {NUM_READ_AHEAD} rows, unless the dataset names all (ClassLabel) or the model was trained on them."
        )
        raise RowsError(STREAM, [number], 0, [f"has the label {value!r:.60}"], rule)
    return labels.index(name)


def _is_filled(sample: dict[str, Any]) -> bool:
    return sample["length"] > 0
