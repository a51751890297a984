"""Data and losses that mislead who looks at a few rows: what `traps.py` measures.

Each kind is a tiny model, samples that depend on (generator, rate), and a loss: the model's own, or
a `loss_fn(outputs, batch) -> (sum, number)`. Most rows are alike; `rate` is the share of those that
are not. Nothing here calls hf_ga.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import helpers as h
import numpy as np
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

NUM_FEATURES = 6
TEXT_WIDTH = 12  # of rows that are padded to one width
WINDOW = 64  # samples of one update
RARE_DROPOUT = 1e-9  # drops nothing, but speed-ups of attention with dropout are in use
# Of the adversary, counted from 0. It is between windows that hf_ga rehearses: the 16th, the 32nd.
FIRST_ODD_WINDOW = 20
LATER_REHEARSAL = 32
Rows = list[dict[str, Any]]
MakeRows = Callable[[np.random.Generator, int, float], Rows]
OwnLoss = Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, Tensor | int]]


@dataclass(frozen=True)
class Kind:
    """A trap, or a control.

    Attributes:
        name: In reports.
        build: Makes the model: equal weights each time, in training mode, no dropout.
        make_rows: (generator, number of rows, rate) -> rows.
        loss_fn: The loss in place of the model's own.
        is_right: hf_ga must accept it. Otherwise it may refuse it.
        num_windows: Windows to train on.
        may_be_late: The refusal may come some windows after the first wrong update.
    """

    name: str
    build: Callable[[], nn.Module]
    make_rows: MakeRows
    loss_fn: OwnLoss | None = None
    is_right: bool = False
    num_windows: int = 1
    may_be_late: bool = False


# Models


class Features(nn.Module):
    """Features -> outputs, with an own loss of them.

    The targets may be named `y`: hf_ga knows what `labels` are, and varies them.

    Args:
        loss: (outputs, labels, weights) -> mean loss. None: the model returns its outputs.
        num_outputs: For each sample.
    """

    def __init__(self, loss: Callable | None = None, num_outputs: int = 2) -> None:
        super().__init__()
        self.hidden = nn.Linear(NUM_FEATURES, h.WIDTH)
        self.output = nn.Linear(h.WIDTH, num_outputs)
        self.loss = loss

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        y: Tensor | None = None,
        weights: Tensor | None = None,
    ):
        logits = self.output(torch.tanh(self.hidden(x)))
        if self.loss is None:
            return logits
        loss = self.loss(logits, labels if y is None else y, weights)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class Tokens(nn.Module):
    """Tokens -> logits of a label for each, with a weighted mean of the token losses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(h.VOCABULARY, h.WIDTH)
        self.output = nn.Linear(h.WIDTH, h.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, token_weights: Tensor):
        logits = self.output(torch.tanh(self.embedding(input_ids)))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        weights = token_weights.flatten() * (labels.flatten() != h.IGNORED)
        loss = (losses * weights).sum() / weights.sum()
        return SequenceClassifierOutput(loss=loss, logits=logits)


@h.seeded
def features(loss: Callable | None = None, num_outputs: int = 2) -> nn.Module:
    return Features(loss, num_outputs)


@h.seeded
def llama(dropout: float = 0.0) -> nn.Module:
    sizes = {**h.LLAMA_SIZES, "num_hidden_layers": 1}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, attention_dropout=dropout))


tokens = h.seeded(Tokens)
bert = partial(h.bert_masked_lm, num_hidden_layers=1)
bert_classifier = partial(h.bert_classifier, num_hidden_layers=1)
gpt2 = partial(h.gpt2, num_hidden_layers=1)


# Losses of a model: (outputs, labels, weights) -> mean


def cross_entropy(logits: Tensor, labels: Tensor, weights: None = None) -> Tensor:
    return F.cross_entropy(logits, labels)


def squared_error(outputs: Tensor, labels: Tensor, weights: None = None) -> Tensor:
    return F.mse_loss(outputs, labels)


def multi_label(logits: Tensor, labels: Tensor, weights: None = None) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels)


def class_weights(logits: Tensor, labels: Tensor, weights: None, **options: float) -> Tensor:
    of_class = torch.tensor([1.0, 20.0], dtype=logits.dtype)
    return F.cross_entropy(logits, labels, weight=of_class, **options)


def smoothing_of_class(logits: Tensor, labels: Tensor, weights: None = None) -> Tensor:
    """A mean over samples; only how far each label is smoothed depends on its class."""
    log_probabilities = logits.log_softmax(-1)
    smoothing = torch.tensor([0.0, 0.3], dtype=logits.dtype)[labels]
    of_label = F.nll_loss(log_probabilities, labels, reduction="none")
    of_all = -log_probabilities.mean(-1)
    return ((1 - smoothing) * of_label + smoothing * of_all).mean()


def weighted_mean(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * weights).sum() / weights.sum()


def largest_weight_is_1(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * weights / weights.max()).mean()


def known_labels(logits: Tensor, labels: Tensor, weights: None = None) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=-1)


def finite_targets(outputs: Tensor, labels: Tensor, weights: None = None) -> Tensor:
    is_known = labels.isfinite()
    return F.mse_loss(outputs[is_known], labels[is_known])


def labelled_rows(outputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    is_known = weights > 0
    return F.mse_loss(outputs[is_known], labels[is_known])


def focal_losses(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


def focal_over_positives(logits: Tensor, labels: Tensor, weights: None = None) -> Tensor:
    """Detectors' usual guard: a batch without positives is a mean over its samples."""
    num_positives = (labels == 1).sum()
    number = num_positives if num_positives else len(labels)
    return focal_losses(logits, labels).sum() / number


def focal_over_at_least_one(logits: Tensor, labels: Tensor, weights: None = None) -> Tensor:
    return focal_losses(logits, labels).sum() / (labels == 1).sum().clamp(min=1)


def policy_gradient(advantages: Tensor, logits: Tensor, actions: Tensor) -> Tensor:
    """With a small loss of its own, so that equal rewards leave something to learn."""
    losses = F.cross_entropy(logits, actions, reduction="none")
    return (advantages * losses).mean() + 0.1 * logits.square().mean()


def centred_advantages(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return policy_gradient(weights - weights.mean(), logits, labels)


def scaled_advantages(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return policy_gradient(weights / (weights.std() + 1.0), logits, labels)


def branch(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Flagged rows have another loss with a mean of its own."""
    loss = F.cross_entropy(logits, labels)
    is_flagged = weights > 0
    if is_flagged.any():
        loss = loss + logits[is_flagged].square().mean()
    return loss


def same_group(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Pushes rows of one group apart. Most groups have one row."""
    is_pair = (weights[:, None] == weights[None, :]).triu(1)
    similarities = logits @ logits.T
    return F.cross_entropy(logits, labels) + (similarities * is_pair).sum() / len(logits)


def clipped_mean(outputs: Tensor, labels: Tensor, weights: None = None) -> Tensor:
    """Outliers clip the loss of the batch: its logarithm from 4 on."""
    loss = F.mse_loss(outputs, labels)
    return loss if loss < 4 else 4 * (1 + (loss / 4).log())


# Losses of a loop: (outputs, batch) -> (sum, number)


def sum_of_weights(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(logits, batch["labels"], reduction="none")
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


def number_of_positives(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(logits, batch["labels"], reduction="none")
    return losses.sum(), (batch["labels"] == 1).sum()


def at_least_one_positive(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = focal_losses(logits, batch["labels"])
    return losses.sum(), (batch["labels"] == 1).sum().clamp(min=1)


def hardest_half(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    losses = F.cross_entropy(logits, batch["labels"], reduction="none")
    number = len(losses) // 2
    return losses.topk(number).values.sum(), number


# Rows


def odd_rows(generator: np.random.Generator, count: int, rate: float) -> np.ndarray:
    """Which rows are unlike the others: each with probability `rate`, and at least one."""
    is_odd = generator.random(count) < rate
    is_odd[generator.integers(count)] |= not is_odd.any()
    return is_odd


def feature_rows(
    generator: np.random.Generator, count: int, labels: np.ndarray, **columns: np.ndarray
) -> Rows:
    x = generator.standard_normal((count, NUM_FEATURES))
    x = torch.tensor(x, dtype=torch.float32)
    entries = {"x": x, "labels": _tensor(labels)}
    entries |= {name: _tensor(values) for name, values in columns.items()}
    return [{name: values[i] for name, values in entries.items()} for i in range(count)]


def _tensor(values: np.ndarray) -> Tensor:
    is_float = values.dtype.kind == "f"
    return torch.tensor(values, dtype=torch.float32 if is_float else torch.int64)


def rare_class(generator: np.random.Generator, count: int, rate: float) -> Rows:
    is_odd = odd_rows(generator, count, rate)
    return feature_rows(generator, count, is_odd.astype(int))


def named_y(make_rows: MakeRows, *args: Any, **options: Any) -> Rows:
    """The same rows with another name of their labels."""
    rows = make_rows(*args, **options)
    return [{"y" if name == "labels" else name: v for name, v in row.items()} for row in rows]


def positive_in_each_window(generator: np.random.Generator, count: int, rate: float) -> Rows:
    """Without positives, a window has no mean over them."""
    parts = [rare_class(generator, WINDOW, rate) for _ in range(count // WINDOW)]
    return [row for part in parts for row in part]


def signed_weights(generator: np.random.Generator, count: int, rate: float) -> Rows:
    """A micro-batch of 8 with one odd row has weights of sum 0. The sum of a window is positive: it
    has at most three odd rows.
    """
    weights = np.where(odd_rows(generator, count, rate), -7.0, 1.0)
    for start in range(0, count, WINDOW):
        is_odd = weights[start : start + WINDOW] < 0
        weights[start + np.flatnonzero(is_odd)[3:]] = 1.0
    return feature_rows(generator, count, generator.integers(0, 2, count), weights=weights)


def two_classes(generator: np.random.Generator, count: int, rate: float) -> Rows:
    return feature_rows(generator, count, generator.integers(0, 2, count))


def unknown_labels(generator: np.random.Generator, count: int, rate: float, unknown: int) -> Rows:
    labels = generator.integers(0, 2, count)
    labels[odd_rows(generator, count, rate)] = unknown
    return feature_rows(generator, count, labels)


def float_targets(generator: np.random.Generator, count: int, rate: float) -> Rows:
    return feature_rows(generator, count, generator.standard_normal((count, 2)))


def missing_targets(generator: np.random.Generator, count: int, rate: float) -> Rows:
    targets = generator.standard_normal((count, 2))
    targets[odd_rows(generator, count, rate)] = np.nan
    return feature_rows(generator, count, targets)


def outliers(generator: np.random.Generator, count: int, rate: float) -> Rows:
    targets = generator.standard_normal((count, 2))
    targets[odd_rows(generator, count, rate)] *= 20
    return feature_rows(generator, count, targets)


def unlabelled(generator: np.random.Generator, count: int, rate: float) -> Rows:
    targets = generator.standard_normal((count, 2))
    is_labelled = ~odd_rows(generator, count, rate)
    return feature_rows(generator, count, targets, weights=is_labelled.astype(float))


def many_labels(generator: np.random.Generator, count: int, rate: float) -> Rows:
    labels = generator.integers(0, 2, (count, 2)).astype(float)
    return feature_rows(generator, count, labels)


def weighted_rows(
    generator: np.random.Generator, count: int, rate: float, usual: float, odd: float
) -> Rows:
    """One column with another value in odd rows."""
    weights = np.where(odd_rows(generator, count, rate), odd, usual)
    return feature_rows(generator, count, generator.integers(0, 2, count), weights=weights)


def groups(generator: np.random.Generator, count: int, rate: float) -> Rows:
    """Odd rows are all of one group, and are two at least."""
    is_odd = odd_rows(generator, count, rate)
    first = int(np.flatnonzero(is_odd)[0])
    is_odd[(first + 1 + generator.integers(count - 1)) % count] = True
    group = np.where(is_odd, 0.0, np.arange(1.0, count + 1))
    return feature_rows(generator, count, generator.integers(0, 2, count), weights=group)


def late_rows(count: int) -> np.ndarray:
    """Which rows are late: none that a trial takes, which spreads its samples over the data."""
    is_late = np.arange(count) >= FIRST_ODD_WINDOW * WINDOW
    for number in (64, 63):
        is_late[np.linspace(0, count - 1, number).astype(int)] = False
        is_late[np.linspace(0, count - 1, number).round().astype(int)] = False
    is_late[:: max(1, count // 64)] = False
    return is_late


def late_weights(generator: np.random.Generator, count: int, rate: float) -> Rows:
    is_odd = late_rows(count) & (generator.random(count) < 0.5)
    weights = np.where(is_odd, 10.0, 1.0)
    return feature_rows(generator, count, generator.integers(0, 2, count), weights=weights)


def text_rows(generator: np.random.Generator, lengths: np.ndarray) -> Rows:
    rows = []
    for length in lengths:
        ids = generator.integers(2, h.VOCABULARY, length).tolist()
        rows.append({"input_ids": ids, "attention_mask": [1] * length, "labels": list(ids)})
    return rows


def ragged_text(generator: np.random.Generator, count: int, rate: float) -> Rows:
    return text_rows(generator, generator.integers(4, 12, count))


def late_token_weights(generator: np.random.Generator, count: int, rate: float) -> Rows:
    is_late = late_rows(count)
    rows = text_rows(generator, generator.integers(4, 12, count))
    for row, late in zip(rows, is_late, strict=True):
        del row["attention_mask"]
        weight = float(generator.integers(1, 10)) if late else 1.0
        row["token_weights"] = [weight] * len(row["input_ids"])
    return rows


def token_weights(generator: np.random.Generator, count: int, rate: float) -> Rows:
    rows = text_rows(generator, generator.integers(4, 12, count))
    for row, is_odd in zip(rows, odd_rows(generator, count, rate), strict=True):
        del row["attention_mask"]
        weights = np.ones(len(row["input_ids"]))
        if is_odd:
            weights = generator.integers(1, 10, len(weights)).astype(float)
        row["token_weights"] = weights.tolist()
    return rows


def long_rows(generator: np.random.Generator, count: int, rate: float) -> Rows:
    lengths = np.where(odd_rows(generator, count, rate), 30, generator.integers(4, 8, count))
    return text_rows(generator, lengths)


def rows_without_targets(generator: np.random.Generator, count: int, rate: float) -> Rows:
    """They are the longest ones, so that a plan by length puts them together."""
    is_odd = odd_rows(generator, count, rate)
    rows = text_rows(generator, np.where(is_odd, 14, generator.integers(4, 12, count)))
    return [h.without_targets(row) if odd else row for row, odd in zip(rows, is_odd, strict=True)]


def masked_text(
    generator: np.random.Generator,
    count: int,
    rate: float,
    mask_odd: Callable[[np.random.Generator, np.ndarray], np.ndarray],
) -> Rows:
    """All rows have one width and end in padding; `mask_odd` makes other masks of some.

    Args:
        generator: Of all numbers.
        count: Number of rows.
        rate: Share of the odd ones.
        mask_odd: (generator, mask of ones then zeros) -> mask; both of shape (TEXT_WIDTH,).

    Returns:
        Rows with a label for each token that the mask attends to.
    """
    rows = []
    for is_odd in odd_rows(generator, count, rate):
        mask = (np.arange(TEXT_WIDTH) < generator.integers(4, TEXT_WIDTH)).astype(int)
        if is_odd:
            mask = mask_odd(generator, mask)
        ids = np.where(mask, generator.integers(2, h.VOCABULARY, TEXT_WIDTH), 0)
        labels = np.where(mask, ids, h.IGNORED)
        row = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        rows.append({name: values.tolist() for name, values in row.items()})
    return rows


def padded_on_the_left(generator: np.random.Generator, mask: np.ndarray) -> np.ndarray:
    return mask[::-1]


def padded_on_both_sides(generator: np.random.Generator, mask: np.ndarray) -> np.ndarray:
    start = generator.integers(0, TEXT_WIDTH - mask.sum() + 1)
    return np.roll(mask, start)


def with_holes(generator: np.random.Generator, mask: np.ndarray) -> np.ndarray:
    """The first token stays."""
    holes = generator.random(TEXT_WIDTH) < 0.4
    holes[0] = False
    return mask * ~holes


def all_ones_over_padding(generator: np.random.Generator, count: int, rate: float) -> Rows:
    """The masks of odd rows attend to the padding, too; it still has no labels."""
    rows = masked_text(generator, count, 0.0, lambda generator, mask: mask)
    for row, is_odd in zip(rows, odd_rows(generator, count, rate), strict=True):
        if is_odd:
            row["attention_mask"] = [1] * TEXT_WIDTH
    return rows


def masks_of_floats(generator: np.random.Generator, count: int, rate: float) -> Rows:
    """Left padding, in masks of another dtype."""
    rows = masked_text(generator, count, rate, padded_on_the_left)
    for row in rows:
        row["attention_mask"] = [float(value) for value in row["attention_mask"]]
    return rows


def additive_masks(generator: np.random.Generator, count: int, rate: float) -> Rows:
    """Left padding, in masks of shape (1, width, width) that are added to the scores."""
    rows = masked_text(generator, count, rate, padded_on_the_left)
    for row in rows:
        is_seen = torch.tensor(row["attention_mask"], dtype=torch.bool)
        of_keys = torch.zeros(TEXT_WIDTH).masked_fill(~is_seen, float("-inf"))
        row["attention_mask"] = of_keys.expand(1, TEXT_WIDTH, TEXT_WIDTH)
    return rows


def one_label(make_rows: MakeRows, *args: Any, **options: Any) -> Rows:
    """Texts with one class for each."""
    rows = make_rows(*args, **options)
    return [{**row, "labels": sum(row["input_ids"]) % h.NUM_CLASSES} for row in rows]


def micro_batch_without_targets(generator: np.random.Generator, count: int, rate: float) -> Rows:
    """Eight rows in turn."""
    rows = ragged_text(generator, count, rate)
    start = 8 * int(generator.integers(count // 8))
    for index in range(start, start + 8):
        rows[index] = h.without_targets(rows[index])
    return rows


LANGUAGE_MODELS = {"BERT": bert, "GPT-2": gpt2, "Llama": llama}
usual_1_odd_20 = partial(weighted_rows, usual=1.0, odd=20.0)
flags = partial(weighted_rows, usual=0.0, odd=1.0)

CONTROLS = [
    Kind("control: classification", partial(features, cross_entropy), two_classes, is_right=True),
    Kind("control: regression", partial(features, squared_error), float_targets, is_right=True),
    Kind("control: multi-label", partial(features, multi_label), many_labels, is_right=True),
    Kind("control: causal LM", gpt2, ragged_text, is_right=True),
    Kind("control: masked LM", bert, ragged_text, is_right=True),
    Kind(
        "control: (sum, sum of weights)",
        features,
        usual_1_odd_20,
        sum_of_weights,
        is_right=True,
    ),
    Kind(
        "control: smoothing by class",
        partial(features, smoothing_of_class),
        partial(named_y, rare_class),
        is_right=True,
    ),
    Kind(
        "control: unlabelled rows (-100)",
        partial(features, cross_entropy),
        partial(unknown_labels, unknown=h.IGNORED),
        is_right=True,
    ),
]

WEIGHTS = [
    Kind("class weights", partial(features, class_weights), rare_class),
    Kind("class weights of y", partial(features, class_weights), partial(named_y, rare_class)),
    Kind(
        "class weights of y, smoothed",
        partial(features, partial(class_weights, label_smoothing=0.1)),
        partial(named_y, rare_class),
    ),
    Kind("weight column", partial(features, weighted_mean), usual_1_odd_20),
    Kind("weights over their largest", partial(features, largest_weight_is_1), usual_1_odd_20),
    Kind("token weights", tokens, token_weights),
    Kind("advantages, centred", partial(features, centred_advantages), flags),
    Kind(
        "advantages over their deviation",
        partial(features, scaled_advantages),
        partial(weighted_rows, usual=1.0, odd=4.0),
    ),
]

NUMBERS = [
    Kind("unknown labels -1", partial(features, known_labels), partial(unknown_labels, unknown=-1)),
    Kind(
        "unknown labels -1 of y",
        partial(features, known_labels),
        partial(named_y, unknown_labels, unknown=-1),
    ),
    Kind("NaN targets", partial(features, finite_targets), missing_targets),
    Kind("column of labelled rows", partial(features, labelled_rows), unlabelled),
    Kind("focal over positives", partial(features, focal_over_positives), rare_class),
    Kind(
        "focal over positives of y",
        partial(features, focal_over_positives),
        partial(named_y, rare_class),
    ),
    Kind("focal over max(positives, 1)", partial(features, focal_over_at_least_one), rare_class),
    Kind("loss_fn: (sum, positives)", features, positive_in_each_window, number_of_positives),
    Kind("loss_fn: (sum, max(positives, 1))", features, rare_class, at_least_one_positive),
    Kind("loss_fn: (sum, signed weights)", features, signed_weights, sum_of_weights),
]

OTHER_LOSSES = [
    Kind("loss_fn: hardest half", features, rare_class, hardest_half),
    Kind("branch by a flag", partial(features, branch), flags),
    Kind("pairs of one group", partial(features, same_group), groups),
    Kind("outliers clip the mean", partial(features, clipped_mean), outliers),
]

left_padding = partial(masked_text, mask_odd=padded_on_the_left)
both_sides = partial(masked_text, mask_odd=padded_on_both_sides)
holes = partial(masked_text, mask_odd=with_holes)
ODD_MASKS = {
    "left padding": left_padding,
    "both sides": both_sides,
    "holes": holes,
    "ones over padding": all_ones_over_padding,
}
MASKS = [
    *(
        Kind(f"{mask}: {name}", build, make_rows, is_right=True)
        for mask, make_rows in ODD_MASKS.items()
        for name, build in LANGUAGE_MODELS.items()
    ),
    *(
        Kind(
            f"{mask}, dropout: {name}",
            partial(build, dropout=RARE_DROPOUT),
            make_rows,
            is_right=True,
        )
        for mask, make_rows in ODD_MASKS.items()
        for name, build in LANGUAGE_MODELS.items()
    ),
    *(
        Kind(
            f"{mask}: BERT classifier",
            bert_classifier,
            partial(one_label, make_rows),
            is_right=True,
        )
        for mask, make_rows in ODD_MASKS.items()
    ),
    Kind("float masks, left padding: BERT", bert, masks_of_floats, is_right=True),
    Kind("4-D float masks, left padding: BERT", bert, additive_masks),
    Kind("rows without targets: GPT-2", gpt2, rows_without_targets, is_right=True),
    Kind("rows without targets: BERT", bert, rows_without_targets, is_right=True),
    Kind("8 rows without targets: GPT-2", gpt2, micro_batch_without_targets, is_right=True),
    Kind("rare long rows: GPT-2", gpt2, long_rows, is_right=True),
    Kind("rare long rows: BERT", bert, long_rows, is_right=True),
]

ADVERSARIES = [
    Kind(
        f"weights from window {FIRST_ODD_WINDOW}",
        partial(features, weighted_mean),
        late_weights,
        num_windows=FIRST_ODD_WINDOW + 2,
    ),
    Kind(
        f"token weights from window {FIRST_ODD_WINDOW}",
        tokens,
        late_token_weights,
        num_windows=LATER_REHEARSAL + 2,
        may_be_late=True,
    ),
]

KINDS = {
    kind.name: kind for kind in (*CONTROLS, *WEIGHTS, *NUMBERS, *OTHER_LOSSES, *MASKS, *ADVERSARIES)
}
