"""Training samples of a language model as lines for the log, with context and targets marked."""

from itertools import groupby
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.data.sources import first_rows
from hf_ga.loading.batches import IGNORED_LABEL

WIDTH = 80  # characters of a line
NUM_PARTS = 4  # maximum number of parts that are shown of an abridged sample


def sample_lines(data: PreparedData, count: int | None) -> list[list[str]]:
    """Format the first training samples of a language model as lines for the log.

    Args:
        data: Prepared for the task causal-lm. For other tasks, or without training rows, no samples
            are returned.
        count: Number of samples, each shown in full. None: one sample, abridged.

    Returns:
        The lines of each sample: one or more for each part, such as `target   'hello<|im_end|>'`.
        In a sample of plain text, the first token is context and all others are targets; in a
        conversation, the completions are targets.
    """
    if data.task.pipeline != "text-generation" or "train" not in data.splits:
        return []
    samples = first_rows(data.splits["train"], 1 if count is None else count)
    parts_of_samples = [split_at_targets(sample, data.tokenizer) for sample in samples]
    return [_to_lines(parts, is_abridged=count is None) for parts in parts_of_samples]


def split_at_targets(
    sample: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, str]]:
    """Decode a training sample of a language model in parts: runs of context and of targets.

    Args:
        sample: `input_ids`, and `labels` unless all tokens are targets.
        tokenizer: The tokenizer that decodes the parts.

    Returns:
        ("context", text) and ("target", text), alternating. The first token is context, because
        nothing predicts it.
    """
    ids = np.asarray(sample["input_ids"])
    labels = np.array(sample.get("labels", ids))
    labels[:1] = IGNORED_LABEL
    parts = []
    for is_target, positions in groupby(range(len(ids)), lambda i: labels[i] != IGNORED_LABEL):
        text = tokenizer.decode(ids[list(positions)], clean_up_tokenization_spaces=False)
        parts.append(("target" if is_target else "context", text))
    return parts


def _to_lines(parts: list[tuple[str, str]], is_abridged: bool) -> list[str]:
    """Format the parts of a training sample as lines of `WIDTH` characters for the log; abridged,
    the first `NUM_PARTS` parts as one line each, and a line with the number of the others.
    """
    lines = []
    half = (WIDTH - len(" ... ")) // 2
    for name, text in parts[:NUM_PARTS] if is_abridged else parts:
        quoted = repr(text)
        if is_abridged and len(quoted) > WIDTH:
            quoted = f"{quoted[:half]} ... {quoted[-half:]}"
        for start in range(0, len(quoted), WIDTH):
            margin = name if start == 0 else ""
            lines.append(f"{margin:<9}{quoted[start : start + WIDTH]}")
    if is_abridged and len(parts) > NUM_PARTS:
        lines.append(f"... {len(parts) - NUM_PARTS} more parts")
    return lines
