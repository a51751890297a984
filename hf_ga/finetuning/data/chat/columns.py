"""Which columns of a dataset are conversations, and from which columns a language model cannot
learn.
"""

from collections.abc import Collection

from hf_ga.errors import DataError

# Required columns of each format of conversations; the first format that a dataset has is used.
FORMATS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
# Optional columns of all formats.
OPTIONAL_COLUMNS = ("tools", "functions", "system", "chat_template_kwargs")
# Further optional columns of the format with instructions.
OPTIONAL_WITH_INSTRUCTION = ("input", "history")

# What refused columns contain, with the remedy -> the columns.
REFUSED = {
    "preferences or labels of preferences, as for DPO, KTO or reward models, but causal-lm would "
    "learn all completions alike: keep the completions to learn, as `completion` or `messages`, "
    "and remove the other columns": (
        ("chosen", "rejected"),
        ("preferred_output", "non_preferred_output"),
        ("completion", "label"),
        ("kto_tag",),
        ("completions", "labels"),
    ),
    "texts that skip the chat template, which is unsupported: use `prompt` and `completion`, or "
    "`messages`": (("segments",),),
    "images, videos or sound, but causal-lm reads text only: remove the column, or these rows": (
        ("image",),
        ("images",),
        ("videos",),
        ("audio",),
        ("audios",),
    ),
}


def chat_columns(columns: Collection[str]) -> list[str]:
    """Return the columns of a dataset that make up its conversations, or an empty list if it has no
    conversations.

    Args:
        columns: All columns of the dataset.

    >>> chat_columns(["id", "system", "messages"])
    ['messages', 'system']
    """
    for required in FORMATS:
        if set(required) <= set(columns):
            optional = OPTIONAL_COLUMNS
            if "instruction" in required:
                optional = OPTIONAL_COLUMNS + OPTIONAL_WITH_INSTRUCTION
            return [*required, *(name for name in optional if name in columns)]
    return []


def check_learnable(columns: Collection[str]) -> None:
    """Check by its columns that a causal language model can learn from a dataset. With a column
    `text` and no conversations, other columns are ignored.

    Args:
        columns: All columns of the dataset.

    Raises:
        DataError: If columns have names of preferences, steps with labels, images or sound, or if
            there are prompts without completions.
    """
    is_chat = bool(chat_columns(columns))
    if "text" in columns and not is_chat:
        return
    for contents, refused in REFUSED.items():
        for names in refused:
            if set(names) <= set(columns):
                raise DataError(f"the columns {', '.join(names)} have {contents}.")
    if "prompt" in columns and not is_chat:
        raise DataError(
            f"the rows have prompts without completions (columns: {', '.join(columns)}), so there "
            "is nothing to learn: add a column `completion`, or name a column of plain text with "
            "--text_column."
        )
