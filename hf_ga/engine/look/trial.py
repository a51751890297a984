"""Tries a model's loss on a few samples before training: whether it is read, whether its samples
compare themselves, whether padding matters, and which speed-ups change nothing.

    facts = try_loss(loop, samples, collate_fn)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_ga.draws.generators import preserved_random_states
from hf_ga.engine.look.choice import NUM_FIRST_WINDOWS
from hf_ga.engine.look.looks import NO_POSITIONS
from hf_ga.engine.own_loop import OwnLoop
from hf_ga.engine.speed_ups import ChosenSpeedUps
from hf_ga.engine.whole.whole_window import UsedOutputs
from hf_ga.loading.batches import IGNORED_LABEL
from hf_ga.loading.fetch import Fetcher, WindowRequest
from hf_ga.loading.window import LoaderState, Window
from hf_ga.model.forward import restored_modes, restored_state

# In a trial, in micro-batches of two. Seven are rehearsed: no draw of the size of a layer, as 16,
# is taken for one of rows of seven samples.
NUM_SAMPLES = 8


@dataclass(frozen=True)
class LossFacts:
    """What is known about a model's loss from a few samples.

    Attributes:
        terms: Each term of the loss in words: what it averages over, and where it is computed.
        draws: Random functions whose numbers belong to samples: name -> where they are called.
        pad_to_window: Whether all micro-batches must be padded to their window's longest sample.
        is_width_tried: Whether a sample was compared in two padded widths: not if all are equally
            long.
        speed_ups: The speed-ups that changed neither loss nor gradient.
        unused: Names of the parameters that got no gradient.
        used_outputs: The outputs that a loss of whole windows uses. None for any other loss.
    """

    terms: tuple[str, ...]
    draws: Mapping[str, str]
    pad_to_window: bool
    is_width_tried: bool
    speed_ups: ChosenSpeedUps
    unused: frozenset[str]
    used_outputs: UsedOutputs | None

    def note_padding(self, state: LoaderState) -> None:
        """Let the windows of a loader be padded as the trial found out."""
        state.pad_to_window |= self.pad_to_window
        state.is_width_tried |= self.is_width_tried


def try_loss(
    loop: OwnLoop, samples: Sequence[Any], collate_fn: Callable[[list[Any]], Any]
) -> LossFacts:
    """Compute some samples as a window with a rehearsal, then a micro-batch with each speed-up.

    Model, gradients and random states are as before afterwards.

    Args:
        loop: The loop that will train the model, which is not wrapped yet. What it learns here, it
            keeps.
        samples: Some samples of the dataset.
        collate_fn: A function (list of samples) -> arguments of the model.

    Raises:
        LossNotAdditive, UnkeyedRandomness, DataError, OutOfMemory: See `OwnLoop.add_gradients`.
    """
    window = _trial_window(samples, collate_fn)
    engine = loop.engine
    with _unchanged(loop):
        # All are compared but the longest one, which has no padding in any company.
        engine.looks.positions = window.request.positions[: NUM_SAMPLES - 1]
        try:
            loop.add_gradients(window)
        finally:
            engine.looks.positions = NO_POSITIONS
        terms = _terms_of(loop)
        unused = [name for name, p in loop.model.named_parameters() if p.grad is None]
        # Micro-batches of short and long samples, for packing.
        parts = [part for part in (window.offsets[::2], window.offsets[1::2]) if len(part)]
        mixed = window.split(parts)
        # Of a number at which windows are not rehearsed.
        mixed = replace(mixed, request=replace(mixed.request, index=NUM_FIRST_WINDOWS))
        loop.add_gradients(mixed)
    return LossFacts(
        terms=terms,
        draws=dict(engine.draws.places),
        pad_to_window=window.state.pad_to_window,
        is_width_tried=window.state.is_width_tried,
        speed_ups=engine.speed_ups.chosen(),
        unused=frozenset(unused),
        used_outputs=loop.used_outputs,
    )


def adopt(loop: OwnLoop, facts: LossFacts) -> None:
    """Let the loop of a model without weights know what the trial on another process found out."""
    model = loop.model
    loop.engine.speed_ups.adopt(model, facts.speed_ups)
    with restored_modes(model):
        if not model.training:
            model.train()
        loop.adopt_outputs(facts.used_outputs)


def _terms_of(loop: OwnLoop) -> tuple[str, ...]:
    """Return the terms of the loss of the last window in words."""
    if loop.whole_batch is not None:
        return ("whole_batch, of all samples of a window",)
    if loop.loss_fn is not None:
        return ("loss_fn, the sum over its number of targets",)
    checks = loop.engine.gradient.checks
    names: dict[str, None] = {}
    for reading in loop.engine.gradient.readings:
        name = reading.name.split(", factor")[0]
        kinds = " or ".join(sorted(checks.follows(reading.key)))
        names[f"{name} over {kinds}" if kinds else name] = None
    return tuple(names)


def _trial_window(samples: Sequence[Any], collate_fn: Callable[[list[Any]], Any]) -> Window:
    """Return a window of some samples, from the shortest to the longest, with targets if possible.

    Its micro-batches have samples of similar lengths, so that the longest one of each, which has no
    padding there, has some in the rehearsal.
    """
    candidates = [index for index, sample in enumerate(samples) if _has_target(sample)]
    candidates = candidates or list(range(len(samples)))
    by_length = sorted(candidates, key=lambda index: _longest_row(samples[index]))
    number = min(NUM_SAMPLES, len(by_length))
    spread = np.linspace(0, len(by_length) - 1, number).astype(int)
    offsets = np.arange(number)
    num_parts = min(number, max(2, number // 2))
    micro_batches = np.array_split(offsets, num_parts)
    request = WindowRequest(
        seed=0,
        epoch=0,
        index=0,
        positions=offsets,
        sample_ids=np.array([by_length[index] for index in spread], np.int64),
        micro_batches=micro_batches,
        pad_to_window=False,
        max_micro_batches=len(micro_batches),
    )
    fetcher = Fetcher(samples, collate_fn)
    return Window(request, fetcher, fetcher[request])


def _longest_row(value: Any) -> int:
    """Return how long a sample is, in the last dim of its values: choices are lists of lists."""
    if isinstance(value, Mapping):
        return max(map(_longest_row, value.values()), default=1)
    if hasattr(value, "shape"):
        return value.shape[-1] if len(value.shape) else 1
    if not isinstance(value, list | tuple) or not len(value):
        return 1
    has_rows = isinstance(value[0], list | tuple)
    return max(map(_longest_row, value)) if has_rows else len(value)


def _has_target(sample: Any) -> bool:
    """Whether a sample has a label that counts, as far as is known."""
    labels = sample.get("labels") if isinstance(sample, Mapping) else None
    if labels is None:
        return True
    try:
        return bool((torch.as_tensor(labels) != IGNORED_LABEL).any())
    except (TypeError, ValueError, RuntimeError):
        return True  # no numbers


@contextmanager
def _unchanged(loop: OwnLoop) -> Iterator[None]:
    """Train in the block, and leave the model as it was."""
    model = loop.model
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    with preserved_random_states(), restored_modes(model), restored_state(model):
        if not model.training:
            model.train()
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
