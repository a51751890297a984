"""The rows of a run by split (train, validation, test), before tokenization: those of
`--dataset_name`, `--validation_file` and `--test_file`, limited, and with a validation split.
"""

from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, IterableDataset

from hf_ga.errors import DataError
from hf_ga.finetuning.data.formats import corpus
from hf_ga.finetuning.data.formats.documents import flatten_articles
from hf_ga.finetuning.data.formats.files import load_files, wrap_read_errors
from hf_ga.finetuning.data.formats.named_datasets import EMBEDDED_CORPUS, load_named_datasets
from hf_ga.finetuning.data.options import DataOptions, as_list
from hf_ga.order.order import epoch_order

# Rows of a stream that are read at the start: to choose columns, to collect class names, and to
# test the model on.
NUM_READ_AHEAD = 1000
# Seed that chooses validation rows. Not the run's seed, so that runs with different seeds are
# validated on the same rows.
VALIDATION_SEED = 0


def load_rows(
    options: DataOptions, notes: list[str] | None = None
) -> tuple[DatasetDict, IterableDataset | None]:
    """Load the rows of all splits.

    - Rows of `validation_file` and `test_file` replace those splits of `dataset_name`.
    - If there are no validation rows, `validation_split_percentage` of the training rows are taken.
    - Each split is limited by `max_train_samples`, `max_eval_samples` or `max_predict_samples`.
    - With `eval_only`, training rows are optional; the embedded corpus, which is the default of
      `dataset_name`, is not read if there are files to evaluate or predict.

    Args:
        options: The options of the run's data.
        notes: Lines for the log, on how files were read, are appended to it.

    Returns:
        (rows by split, None). With `streaming`, (rows by split, stream of all training rows): the
        split `train` then has only the first `NUM_READ_AHEAD` rows of the stream.

    Raises:
        ConfigError: If options contradict each other, such as `field` without a JSON file.
        DataError: If a file or dataset is missing or unreadable; if there are no training rows, or
            with `eval_only` no rows at all; if a stream has no validation rows.
    """
    files = {"validation": options.validation_file, "test": options.test_file}
    from_files = {
        split: load_files(as_list(file), split, field=options.field, notes=notes)
        for split, file in files.items()
        if file
    }
    limits = {
        "train": options.max_train_samples,
        "validation": options.max_eval_samples,
        "test": options.max_predict_samples,
    }
    has_files = bool(from_files) or options.predict_file is not None
    from_names: dict[str, Any] = {}
    # An evaluation of files does not read the embedded corpus, which is only the default.
    if not (options.eval_only and has_files and options.dataset_name == EMBEDDED_CORPUS):
        from_names = load_named_datasets(options, notes)
    stream = None
    if options.streaming:
        stream = from_names.get("train")
        # Of training rows the first, of other splits as many as are evaluated.
        limits["train"] = NUM_READ_AHEAD
        from_names = {
            split: _read_stream(rows, limits[split], options)
            for split, rows in from_names.items()
            if split not in from_files
        }
    loaded = {**from_names, **from_files}
    if options.task == "question-answering":
        loaded = {split: flatten_articles(dataset) for split, dataset in loaded.items()}
    rows = DatasetDict()
    for split in corpus.SPLITS:
        if split in loaded and (split == "train" or len(loaded[split])):
            rows[split] = loaded[split]
    aim = "evaluate" if options.eval_only else "train on"
    if options.eval_only:
        lacks_rows = not rows and options.predict_file is None
    else:
        lacks_rows = not len(rows.get("train", ()))
    if lacks_rows:
        raise DataError(
            f"dataset_name {options.dataset_name} has no rows to {aim} (splits: "
            f"{dict(rows.num_rows)})."
        )
    if stream is not None and "validation" not in rows:
        raise DataError(
            f"dataset_name {options.dataset_name} has no validation rows, and a stream cannot be "
            "split: give --validation_file, or omit streaming."
        )
    if "train" in rows and "validation" not in rows:
        rows = _with_validation(rows, options.validation_split_percentage)
    rows = DatasetDict({split: first_rows(rows[split], limits[split]) for split in rows})
    if options.task == "seq2seq":
        # {"translation": {"en": ..., "de": ...}} becomes translation.en and translation.de.
        rows = rows.flatten()
    return rows, stream


def first_rows(rows: Dataset, count: int | None) -> Dataset:
    """Return the first `count` rows of a split, or all if there are fewer or `count` is None."""
    return rows.select(range(len(rows))[:count])


def _read_stream(stream: IterableDataset, count: int | None, options: DataOptions) -> Dataset:
    """Read the first `count` rows of a stream into memory, or all if `count` is None."""
    with wrap_read_errors(", ".join(as_list(options.dataset_name))):
        rows = list(islice(stream, count))
        return Dataset.from_list(rows, features=stream.features)


def _with_validation(rows: DatasetDict, percentage: float) -> DatasetDict:
    """Split validation rows off the training rows; both stay in their order."""
    train = rows["train"]
    size = max(1, round(len(train) * percentage / 100))
    if size >= len(train):
        raise DataError(
            f"{len(train)} training rows are too few to take validation rows from: give "
            "--validation_file, or --field if a JSON object holds the rows under a key."
        )
    order = epoch_order(len(train), VALIDATION_SEED, 0)
    parts = {
        "train": train.select(np.sort(order[size:])),
        "validation": train.select(np.sort(order[:size])),
    }
    return DatasetDict({**rows, **parts})
