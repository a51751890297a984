"""The command-line flags of the data; `hf_ga.finetuning.run.flags.config.FinetuneConfig` adds those
of a run.
"""

import os
from dataclasses import Field, dataclass, field, fields
from typing import Any

from hf_ga.finetuning.data.tasks import TASKS

# Type of an option that takes one or several values. The order matters: HfArgumentParser uses the
# type before None as that of the flag.
Several = list[str] | None | str
# The first flag below each heading of `--help` and the documentation.
HEADINGS = {
    "task": "data",
    "model_name_or_path": "model",
    "label_smoothing_factor": "loss",
    "pooling": "embedding",
    "per_device_train_batch_size": "batch",
    "learning_rate": "optimization",
    "per_device_eval_batch_size": "evaluation and output",
    "push_to_hub": "upload",
    "compare": "checker",
}
# The flags that matter first.
FIRST_FLAGS = (
    "task",
    "model_name_or_path",
    "dataset_name",
    "label_column",
    "max_length",
    "global_batch_size",
    "per_device_train_batch_size",
    "learning_rate",
    "num_train_epochs",
    "output_dir",
)
# Names of the options that take one or several values.
SEVERAL = ("dataset_name", "dataset_config_name", "validation_file", "test_file", "predict_file")


def option(default: Any, help: str) -> Any:
    """Return a dataclass field for a command-line flag of the fine-tuning command.

    Args:
        default: The default of the field and the flag.
        help: The flag's text for `--help`.
    """
    # In the metadata, too, because HfArgumentParser ignores the default of a list.
    return field(default=default, metadata={"help": help, "default": default})


def flag_groups(config_class: type) -> dict[str, list[Field]]:
    """Group the options of a dataclass of flags for `--help` and the documentation: heading ->
    options, with `FIRST_FLAGS` first.
    """
    option_of_name = {option.name: option for option in fields(config_class)}
    groups = {"the flags to begin with": [option_of_name[name] for name in FIRST_FLAGS]}
    heading = ""
    for option in option_of_name.values():
        heading = HEADINGS.get(option.name, heading)
        if option.name not in FIRST_FLAGS:
            groups.setdefault(heading, []).append(option)
    return groups


def as_list(value: Several) -> list[str]:
    """Return the values of a command-line option that takes one or several, such as `dataset_name`,
    as a list; None as an empty one.
    """
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


@dataclass
class DataOptions:
    """Options of `prepare_data`: which rows to load, which columns to use, how to tokenize.

    Example:
        options = DataOptions(task="text-classification", dataset_name="reviews.jsonl")
        data = prepare_data(options, tokenizer)
    """

    task: str = option("causal-lm", f"One of: {', '.join(TASKS)}.")
    dataset_name: list[str] | str = option(
        "stdlib",
        "stdlib (embedded: docstrings of Python's standard library), hub ids, files or patterns "
        "of files (json, jsonl, csv, tsv, txt, parquet), or folders.",
    )
    field: str | None = option(
        None,
        "Key of the rows in a JSON file that is one object, with dots for keys in keys. Default: "
        "the only list of objects, or the keys train, validation, test.",
    )
    dataset_weights: list[float] | None = option(
        None,
        "Proportions of the datasets in the training rows, one per dataset_name. Default: all "
        "rows of each.",
    )
    dataset_config_name: Several = option(
        None, "Configuration of a hub dataset: one for all, or one for each."
    )
    validation_file: Several = option(
        None, "Files with validation rows. Default: the validation split, or a part of train."
    )
    test_file: Several = option(None, "Files with test rows. Default: the test split, if any.")
    predict_file: Several = option(
        None, "Files with rows to predict at the end; writes predictions.jsonl to output_dir."
    )
    validation_split_percentage: float = option(
        5.0, "Percentage of the training rows to hold out if there is no validation split."
    )
    eval_only: bool = option(
        False, "Do not train: evaluate the model, predict, and write evaluation.json."
    )
    streaming: bool = option(
        False,
        "Read the training rows as a stream during training, instead of all before the first "
        "step; needs max_steps.",
    )
    shuffle_buffer_size: int = option(
        10_000, "streaming: size of the shuffle buffer in samples; 0: the order of the stream."
    )
    text_column: str | None = option(
        None,
        "Column with the text (the question, the source, the anchor). Default: `text`, a common "
        "name, or the only column of strings.",
    )
    text_pair_column: str | None = option(
        None,
        "Column with a second text (a question's context, an anchor's positive). Default: a common "
        "name of pairs (sentence1, sentence2).",
    )
    label_column: str | None = option(
        None,
        "Column with the label (the score of a pair). Default: `label`, `labels`, or a common name "
        "for the task.",
    )
    choices_column: str | None = option(
        None,
        "multiple-choice: column with the list of choices. Default: `choices`, `endings`, or "
        "ending0, ending1, ...",
    )
    target_column: str | None = option(
        None, "seq2seq: column with the text to generate. Default: `target`, `summary`, ..."
    )
    source_prefix: str | None = option(
        None, "seq2seq: text before every source, such as 'summarize: ' for T5."
    )
    weight_column: str | None = option(
        None,
        "Column with the weight of each row, a number of at least 0, in the loss of training and "
        "evaluations. Default: all rows weigh the same.",
    )
    max_train_samples: int | None = option(
        None, "Use only the first N training rows. Default: all."
    )
    max_eval_samples: int | None = option(
        None, "Use only the first N validation rows. Default: all."
    )
    max_predict_samples: int | None = option(
        None, "Use only the first N test rows, and rows to predict. Default: all."
    )
    max_length: int = option(
        128, "Maximum tokens of a sample; longer ones are truncated and counted in the log."
    )
    max_target_length: int | None = option(
        None, "seq2seq: maximum tokens of a target. Default: max_length."
    )
    truncation_side: str | None = option(
        None,
        "Side of a sample that is too long to truncate: right or left. Default: the tokenizer's.",
    )
    doc_stride: int | None = option(
        None,
        "question-answering: split a context that is too long into windows that share this many "
        "tokens with their neighbors. Default: truncate it.",
    )
    block_size: int | None = option(
        None,
        "causal-lm, masked-lm: concatenate all texts and split them into blocks of this many "
        "tokens, instead of one sample per row.",
    )
    show_samples: int | None = option(
        None,
        "causal-lm: print this many training samples in full, with their targets marked; 0: none. "
        "Default: one, shortened.",
    )
    mlm_probability: float = option(
        0.15, "masked-lm: probability that a token is masked and predicted."
    )

    def __post_init__(self) -> None:
        """Convert options that are `os.PathLike` to strings, so that they can be saved as JSON, and
        lists of a single string to that string.
        """
        for name, value in list(vars(self).items()):
            if name in SEVERAL and isinstance(value, list):
                value = [_path_to_str(item) for item in value]
                if len(value) == 1 and isinstance(value[0], str):
                    value = value[0]
            setattr(self, name, _path_to_str(value))


def _path_to_str(value: Any) -> Any:
    """Convert the value of an option of `DataOptions` to a string if it is `os.PathLike`; return
    any other value unchanged.
    """
    return os.fspath(value) if isinstance(value, os.PathLike) else value
