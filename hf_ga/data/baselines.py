"""What a model must beat, measured on the data themselves, and a hash of what it is trained on."""

from statistics import median_low
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher

from hf_ga.data import corpus
from hf_ga.exact.batches import IGNORED_LABEL
from hf_ga.run.metrics import answer_words, words_f1

if TYPE_CHECKING:
    from hf_ga.data.data import PreparedData

# Columns of a sample that are lists of numbers, or numbers, and make a model what it becomes.
_LEARNED_FROM = ("token_type_ids", "choice_lengths", "labels", "start_positions", "end_positions")


def measure(prepared: "PreparedData") -> None:
    """Unigram entropy or the best simple guess into `prepared`, and a hash of the training samples."""
    train = prepared.splits["train"].with_format("numpy")
    ids = np.concatenate(train["input_ids"][:])
    columns = [ids, train["length"][:]]
    learned = {name: _flat(train[name][:]) for name in _LEARNED_FROM if name in train.column_names}
    columns += learned.values()
    if prepared.task.labels in ("none", "target"):
        targets = learned.get("labels", ids)  # of a completion or a generated text: only its tokens are predicted
        counts = np.bincount(targets[targets != IGNORED_LABEL], minlength=len(prepared.tokenizer))
        if prepared.is_masked:
            counts[list(prepared.tokenizer.all_special_ids)] = 0
        prepared.unigram_entropy = corpus.unigram_entropy(counts)
    elif prepared.task.labels == "answers":
        prepared.facts.append(_first_words(prepared.splits["train"], prepared.splits["validation"]))
    else:
        labels = list(train["label"][:])
        columns += [_flat(labels), np.array([np.size(of_row) for of_row in labels])]
        prepared.facts += _simplest_guess(prepared)
    hashed = [np.asarray(c, np.float64 if c.dtype.kind == "f" else np.int64).tobytes() for c in columns]
    prepared.content_hash = Hasher.hash([prepared.labels, *hashed])


def _simplest_guess(prepared: "PreparedData") -> list[str]:
    """What it reaches on the validation rows."""
    kind = prepared.task.labels
    labels = _flat(prepared.splits["validation"].with_format("numpy")["label"][:])
    if kind == "number":
        mean = _flat(prepared.splits["train"].with_format("numpy")["label"][:]).mean()
        return [f"guessing the mean of training, {mean:.4g}: mean absolute error {np.abs(labels - mean).mean():.4g}"]
    names, counts = np.unique(labels[labels != IGNORED_LABEL], return_counts=True)
    if not len(names):
        return []
    total = len(prepared.splits["validation"]) if kind == "classes" else counts.sum()
    most, share = names[counts.argmax()], counts.max() / total
    if kind == "choice":
        num_choices = len(prepared.splits["validation"][0]["choice_lengths"])
        return [f"guessing one of {num_choices} choices: accuracy {1 / num_choices:.3f}; always number {most}: {share:.3f}"]
    of = "tags" if kind == "tags" else "rows"
    return [f"majority class of validation: {prepared.labels[most]}, {share:.1%} of {total} {of}"]


def _first_words(train: Dataset, validation: Dataset) -> str:
    """F1 of answering with the first words of the context, as many as training answers usually have."""
    count = median_low([len(texts[0].split()) if texts else 0 for texts in train["answers"]])
    guesses = [answer_words(" ".join(context.split()[:count])) for context in validation["context"]]
    best = [
        max(words_f1(answer_words(text), guess) for text in texts or [""])
        for guess, texts in zip(guesses, validation["answers"], strict=True)
    ]
    return f"answering with the first {count} words of the context: F1 {np.mean(best):.3f} on {len(best)} validation rows"


def _flat(column: Any) -> np.ndarray:
    """A column of numbers or of lists of numbers as one vector."""
    values = list(column)
    parts = [np.atleast_1d(v) for v in values if np.size(v)]  # an empty list has no type, or another
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
