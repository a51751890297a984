"""What a trial of a model's loss chooses, and windows in which speed-ups are used."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import helpers as h
import numpy as np
from torch import nn

import hf_ga
from hf_ga.draws.dropout.masks import sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.engine.look.trial import try_loss
from hf_ga.engine.speed_ups import SpeedUps
from hf_ga.parallel.backend import LocalBackend
from hf_ga.speed.speed_up import SpeedUp
from hf_ga.training import LossSettings, loop_of


def tried(
    model: nn.Module,
    samples: Sequence[Any],
    collate: Callable = h.pad_right,
    speed_ups: Sequence[SpeedUp] | None = None,
    **given: Any,
) -> SpeedUps:
    """The speed-ups of the loop that computes the next windows of a model.

    speed_ups: that are tried, in place of the usual ones.
    given: loss_fn and so on.
    """
    backend = LocalBackend(next(model.parameters()).device)
    loop = loop_of(model, backend, LossSettings(**given))
    chosen = loop.engine.speed_ups
    if speed_ups is not None:
        chosen.candidates = lambda model: list(speed_ups)
        chosen.start(model)
    try_loss(loop, samples, collate)
    return chosen


def later(window: hf_ga.Window) -> hf_ga.Window:
    """The window with a number at which it is not rehearsed, so that it is computed with
    speed-ups.
    """
    return replace(window, request=replace(window.request, index=50))


@contextmanager
def keyed(seed: int, epoch: int, positions: np.ndarray, window: int = 0) -> Iterator[None]:
    """Draw in one forward of these samples what a window's micro-batches draw."""
    draws = KeyedDraws()
    with draws.scope():
        draws.begin(sample_keys(seed, epoch, positions), window_key(seed, epoch, window))
        yield
