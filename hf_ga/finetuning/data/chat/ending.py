"""Whether a model can learn from a row where its turn ends."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.rendering import Rendered


def check_ending(
    row: Rendered,
    ids: list[int],
    starts: np.ndarray,
    ends: np.ndarray,
    special: set[int],
) -> None:
    """Check that a target ends with a special token: a generation stops at such a token only. It
    may be the end of text, or the end of a turn; only white space may follow it.

    Args:
        row: Rendered by a chat template.
        ids: Its tokens, int of shape (tokens,).
        starts: First character of each token, int of shape (tokens,).
        ends: The character after the last of each token, int of shape (tokens,).
        special: `special_ids` of the tokenizer.

    Raises:
        DataError: No target of the row ends with a special token.
    """
    for start, end in row.targets:
        last = start + len(row.text[start:end].rstrip()) - 1
        covering = np.flatnonzero((starts <= last) & (ends > last))
        if any(ids[token] in special for token in covering):
            return
    if row.targets:
        start, end = row.targets[-1]
        raise DataError(
            "the tokenizer's chat template ends turns of the assistant without an end token, so "
            f"the model would never learn to stop; the last target is {row.text[start:end]!r:.80}. "
            "In the template, end these turns with {{ eos_token }}, or with another special token "
            "at which generation stops, inside {% generation %} if it is marked."
        )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of all special tokens, those that were added without a role included."""
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    return added | set(tokenizer.all_special_ids)
