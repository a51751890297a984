"""Training rows that are read and tokenized while training.

The first rows are read ahead and serve as the training split before the first step: for columns, labels and the proof.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset, load_dataset

from hf_ga.data.corpus import SPLITS
from hf_ga.data.files import is_file, load_files, readable_files, reading, unreadable
from hf_ga.data.labels import label_ids
from hf_ga.data.mixing import by_split, joined, named_datasets
from hf_ga.data.options import DataOptions, as_list
from hf_ga.data.sources import is_saved
from hf_ga.errors import DataError, HfGaError

NUM_READ_AHEAD = 1000
BATCH_SIZE = 100  # rows tokenized together


def load_streamed(options: DataOptions) -> tuple[DatasetDict, IterableDataset]:
    """The splits (`train` has the first rows of the stream), and the stream of all training rows.

    Validation and test rows are read whole.

    Raises:
        DataError: a missing or unreadable file, an unknown dataset, no training rows, no validation rows.
    """
    streams = [(", ".join(names), _streams(names, config)) for names, config in named_datasets(options)]
    name, splits = ", ".join(name for name, _ in streams), by_split(streams, options.dataset_weights)
    train = joined(splits["train"], options.dataset_weights) if "train" in splits else None
    files, rows = {"validation": options.validation_file, "test": options.test_file}, DatasetDict()
    for split in SPLITS:
        if file := files.get(split):
            rows[split] = load_files(as_list(file))
        elif split == "train" and train is not None:
            rows[split] = _read(name, train, NUM_READ_AHEAD)
        elif split in splits:
            rows[split] = joined([(of, _read(of, stream, None)) for of, stream in splits[split]])
    if not len(rows.get("train", ())):
        raise DataError(f"dataset_name {name} has no training rows (splits: {', '.join(splits)}): there is nothing to train on.")
    if not len(rows.get("validation", ())):
        raise DataError(
            f"dataset_name {name} has no validation rows, and a stream cannot be split: give --validation_file, or omit streaming."
        )
    return rows, train


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


def _streams(names: Sequence[str], config: str | None) -> dict[str, IterableDataset]:
    """The splits of one dataset."""
    name = names[0]
    if is_saved(Path(name).expanduser()):
        raise DataError(f"dataset_name {name} was saved by `save_to_disk` and is memory-mapped anyway: omit streaming.")
    if is_file(name):
        kind, paths = readable_files(names)
        with reading(name):
            return load_dataset(kind, data_files={"train": paths}, streaming=True)
    with reading(name):
        return load_dataset(name, config, streaming=True)


def _read(name: str, stream: IterableDataset, most: int | None) -> Dataset:
    with reading(name):
        return Dataset.from_list(list(islice(stream, most)), features=stream.features)


def _encode(rows: dict[str, list], feature: ClassLabel | None, labels: Sequence[str], tokenize: partial) -> dict[str, list]:
    if labels:
        ids = label_ids([[value] for value in rows["label"]], feature, labels, "the stream")
        rows = {**rows, "label": [of_row[0] for of_row in ids]}
    return tokenize(rows)
