"""What the loss divides by in each micro-batch, read from it; and what a step may count instead."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hf_ga.check.steps import CheckContext, device_of
from hf_ga.engine.own_loop import OwnLoop
from hf_ga.engine.sums.readings import Reading, TermKey, on_host
from hf_ga.engine.window_engine import WindowEngine
from hf_ga.errors import DataError, LossNotAdditive
from hf_ga.loading.batches import IGNORED_LABEL
from hf_ga.loading.window import Window
from hf_ga.model.forward import restored_state
from hf_ga.parallel.backend import LocalBackend

LABELS = "labels"
SHIFTED_LABELS = "shifted labels"  # without column 0, which causal models do not predict


@dataclass(frozen=True)
class Divisors:
    """What a term of the loss divides by.

    Attributes:
        name: The term in words.
        values: What it divides by in each micro-batch, float64 of shape (micro-batches,).
    """

    name: str
    values: np.ndarray

    @property
    def shares(self) -> np.ndarray:
        """The share of each micro-batch in the term's mean over the window."""
        return self.values / self.values.sum()


def read_divisors(context: CheckContext, window: Window) -> list[Divisors]:
    """Read the terms of the loss in each micro-batch of a window.

    Args:
        context: The model and the settings of the check.
        window: The window, all micro-batches of which are computed on this process.

    Returns:
        The terms; of a loss that cannot be read, the number of samples.
    """
    by_samples = [Divisors("samples", count_usual(window)["samples"])]
    if context.settings.whole_batch is not None:
        return by_samples
    model = context.model
    backend = LocalBackend(device_of(model))
    engine = WindowEngine(lambda: backend, allow_split_dependent_randomness=True)
    engine.rehearses = False  # divisors are read in any case; gradients are compared elsewhere
    with restored_state(model), suppress(LossNotAdditive, DataError):
        OwnLoop(engine, model, context.settings.loss_fn).add_gradients(window)
    model.zero_grad()
    found = []
    all_readings = on_host(engine.gradient.readings)
    for readings in readings_by_term(all_readings):
        is_penalty = readings[0].term is not None and readings[0].term.is_penalty
        values = np.array(engine.gradient.checks.true_divisors(readings[0].key, all_readings))
        if not is_penalty and len(values) == len(window.micro_batches) and values.sum():
            found.append(Divisors(name_of_term(readings), values))
    return found or by_samples


def readings_by_term(readings: Iterable[Reading]) -> list[list[Reading]]:
    """Return the readings of a window on the host, a list for each term of the loss."""
    by_key: dict[TermKey, list[Reading]] = defaultdict(list)
    for reading in on_host(list(readings)):
        by_key[reading.key].append(reading)
    return list(by_key.values())


def name_of_term(readings: Sequence[Reading]) -> str:
    """Return the term of these readings in words, without its factor."""
    return readings[0].name.split(", factor")[0]


def count_usual(window: Window) -> dict[str, np.ndarray]:
    """Return what training steps usually count in a micro-batch, whatever the loss divides by.

    Returns:
        Name -> number in each micro-batch, float64 of shape (micro-batches,); without those that
        are 0 in the whole window.
    """
    counts: dict[str, list[int]] = defaultdict(list)
    for micro_batch in window.micro_batches:
        batch = micro_batch.batch
        counts["samples"].append(len(micro_batch))
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.dim() and not labels.is_floating_point():
            counts[LABELS].append(int((labels != IGNORED_LABEL).sum()))
            if labels.dim() > 1:
                counts[SHIFTED_LABELS].append(int((labels[:, 1:] != IGNORED_LABEL).sum()))
        if isinstance(batch.get("attention_mask"), Tensor):
            counts["tokens"].append(int(batch["attention_mask"].sum()))
        if isinstance(batch.get("input_ids"), Tensor):
            counts["tokens with padding"].append(batch["input_ids"].numel())
    return {name: np.array(numbers, float) for name, numbers in counts.items() if any(numbers)}


def format_numbers(numbers: Sequence[float]) -> str:
    """Format numbers as `8, 3, 5`, at most eight of them."""
    shown = [f"{number:g}" for number in numbers[:8]]
    if len(numbers) > 8:
        shown.append("...")
    return ", ".join(shown)
