"""Which columns of a dataset are a conversation, and which it cannot have beside them."""

from collections.abc import Collection

from hf_ga.errors import DataError

# The first form that the dataset has is used.
FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
BESIDE = ("tools", "functions", "system", "chat_template_kwargs")
BESIDE_INSTRUCTIONS = ("input", "history")

NO_PREFERENCES = (
    "but causal-lm would learn all completions alike: keep the completions to learn, as "
    "`completion` or `messages`, and remove the other columns"
)
TEXT_ONLY = "but causal-lm reads text only: remove the column, or these rows"
# Columns -> what they are, and the remedy.
REFUSED = {
    ("chosen", "rejected"): ("pairs of preferences, as for DPO", NO_PREFERENCES),
    ("preferred_output", "non_preferred_output"): ("pairs of preferences", NO_PREFERENCES),
    ("completion", "label"): (
        "completions with labels of preferences (desired or not), as for KTO",
        NO_PREFERENCES,
    ),
    ("kto_tag",): ("labels of preferences (desired or not), as for KTO", NO_PREFERENCES),
    ("completions", "labels"): ("steps with labels, for reward models", NO_PREFERENCES),
    ("segments",): (
        "texts that skip the chat template",
        "which is unsupported: use `prompt` and `completion`, or `messages`",
    ),
    ("image",): ("images", TEXT_ONLY),
    ("images",): ("images", TEXT_ONLY),
    ("videos",): ("videos", TEXT_ONLY),
    ("audio",): ("sound", TEXT_ONLY),
    ("audios",): ("sound", TEXT_ONLY),
}


def chat_columns(columns: Collection[str]) -> list[str]:
    """Return the conversation columns of a dataset; empty if it has none.

    >>> chat_columns(["id", "system", "messages"])
    ['messages', 'system']
    """
    for form in FORMS:
        if set(form) <= set(columns):
            optional = BESIDE + BESIDE_INSTRUCTIONS * ("instruction" in form)
            return [*form, *(name for name in optional if name in columns)]
    return []


def check_learnable(columns: Collection[str]) -> None:
    """Check that the rows of a language model have something to learn, and nothing that it cannot
    learn from. Plain text may stand beside anything.

    Raises:
        DataError: Preferences, steps with labels, images or sound, by the names of their columns;
            prompts alone.
    """
    is_chat = bool(chat_columns(columns))
    if "text" in columns and not is_chat:
        return
    for names, (what, remedy) in REFUSED.items():
        if set(names) <= set(columns):
            raise DataError(f"the rows have {what} (columns: {', '.join(names)}), {remedy}.")
    if "prompt" in columns and not is_chat:
        raise DataError(
            f"the rows have prompts without completions (columns: {', '.join(columns)}), so there "
            "is nothing to learn: add a column `completion`, or name a column of plain text with "
            "--text_column."
        )
