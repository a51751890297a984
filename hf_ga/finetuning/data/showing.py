"""Samples of a language model as lines of text that tell context and targets apart."""

from itertools import groupby
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_ga.exact.batches import IGNORED_LABEL
from hf_ga.finetuning.data.data import PreparedData

WIDTH = 80  # characters of a line
NUM_PARTS = 4  # of a shortened sample


def sample_lines(data: PreparedData, count: int | None) -> list[list[str]]:
    """The first training samples as lines.

    Args:
        data: Of the task causal-lm; of others no lines are returned.
        count: Number of samples, in full. None: one, shortened.

    Returns:
        For each sample the lines of its parts, such as `target   'hello<|im_end|>'`. What follows
        the first token is a target of plain text, the completions of a conversation.
    """
    if data.task.pipeline != "text-generation" or "train" not in data.splits:
        return []
    rows = data.splits["train"]
    samples = [rows[i] for i in range(min(len(rows), 1 if count is None else count))]
    parts = [split_at_targets(sample, data.tokenizer) for sample in samples]
    return [_shortened(of_sample) if count is None else _whole(of_sample) for of_sample in parts]


def split_at_targets(
    sample: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, str]]:
    """Cut a sample where targets begin and end.

    Args:
        sample: `input_ids`, and `labels` unless all tokens are targets.
        tokenizer: Decodes them.

    Returns:
        ("context", text) and ("target", text) in turn. The first token is context: nothing
        predicts it.
    """
    ids = np.asarray(sample["input_ids"])
    labels = np.array(sample.get("labels", ids))
    labels[:1] = IGNORED_LABEL
    parts = []
    for is_target, numbers in groupby(range(len(ids)), lambda i: labels[i] != IGNORED_LABEL):
        text = tokenizer.decode(ids[list(numbers)], clean_up_tokenization_spaces=False)
        parts.append(("target" if is_target else "context", text))
    return parts


def _whole(parts: list[tuple[str, str]]) -> list[str]:
    lines = []
    for name, text in parts:
        written = repr(text)
        for start in range(0, len(written), WIDTH):
            lines.append(f"{name if start == 0 else '':<9}{written[start : start + WIDTH]}")
    return lines


def _shortened(parts: list[tuple[str, str]]) -> list[str]:
    lines = [f"{name:<9}{_middle_left_out(repr(text))}" for name, text in parts[:NUM_PARTS]]
    if len(parts) > NUM_PARTS:
        lines.append(f"... {len(parts) - NUM_PARTS} more parts")
    return lines


def _middle_left_out(text: str) -> str:
    half = (WIDTH - len(" ... ")) // 2
    return text if len(text) <= WIDTH else f"{text[:half]} ... {text[-half:]}"
