"""Whether a model can learn from a conversation where its turn ends."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.rendering import RenderedRow


def check_ending(
    row: RenderedRow,
    ids: list[int],
    starts: np.ndarray,
    ends: np.ndarray,
    special_ids: set[int],
) -> None:
    """Check that at least one target of a conversation ends with a special token, because
    generation stops only at such a token.

    It may be the end-of-text token or that of the end of a turn. White space may follow it.

    Args:
        row: A row that was rendered by a chat template.
        ids: The token ids of its text, length (tokens).
        starts: The first character of each token, int of shape (tokens,).
        ends: The character after the last of each token, int of shape (tokens,).
        special_ids: Ids of all special tokens, see `special_token_ids`.

    Raises:
        DataError: If there are targets, but none of them ends with a special token.
    """
    for start, end in row.targets:
        last_character = start + len(row.text[start:end].rstrip()) - 1
        covering = np.flatnonzero((starts <= last_character) & (ends > last_character))
        if any(ids[token] in special_ids for token in covering):
            return
    if row.targets:
        start, end = row.targets[-1]
        raise DataError(
            "the tokenizer's chat template ends turns of the assistant without an end token, so "
            f"the model would never learn to stop; the last target is {row.text[start:end]!r:.80}. "
            "In the template, end these turns with {{ eos_token }}, or with another special token "
            "at which generation stops, inside {% generation %} if it is marked."
        )


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of all special tokens of a tokenizer: those with a role, such as
    `eos_token`, and those that were only added as special.
    """
    added = {
        token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    return added | set(tokenizer.all_special_ids)
