"""Masks drawn in advance: of all places that are alike, and of the samples that follow in forwards of the same shape.

A draw for few samples is mostly calls of numpy and torch, and the Python between them runs slowly where products of matrices have
just emptied a processor's caches. Masks are functions of keys, so who draws them, and when, is free.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_ga.exact.keyed import keep_masks
from hf_ga.exact.packed_tokens import PackedTokens, packed_keep_masks
from hf_ga.exact.place_probe import Place, alike_places

# Masks of equal shape are drawn together, up to so many elements of a byte each. In two lanes of a CPU, which wait for each other's
# calls of torch and numpy, a mask of 65,000 elements took 0.83 ms by itself, 0.20 among 9 and 0.15 among 64.
DRAWN_TOGETHER = 1 << 22


class MasksAhead:
    """The masks of places and samples that were drawn along with those asked for, until they are asked for themselves."""

    def __init__(self, places: dict[int, Place]) -> None:
        self.places = places
        self._alike = alike_places(places)  # of each place: all places whose masks are alike, and its index there
        self._waiting: dict[int, list[tuple[tuple, Tensor]]] = {}  # of each place: what masks were drawn for, and they; last first
        # What waits is known by the address of its keys: nothing else gets it as long as they are kept.
        self._keys: Tensor | None = None
        self._num_samples = 0
        self._window_key: Tensor | None = None

    def set_keys(self, sample_keys: Tensor, num_samples: int, window_key: Tensor) -> None:
        """See `KeyedPlaces.set_keys`. Masks that wait for others than the first of these samples are forgotten."""
        same_window = window_key is self._window_key
        self._keys, self._num_samples, self._window_key = sample_keys, num_samples, window_key
        first = sample_keys.data_ptr()
        self._waiting = {place: of for place, of in self._waiting.items() if of[-1][0][0] == first} if same_window else {}

    def forget(self) -> None:
        """Nothing waits any more."""
        self._waiting.clear()

    def mask(self, key: int, shape: torch.Size, drop_probability: float, packed: PackedTokens | None) -> Tensor:
        """The mask of a place, of this shape, for the samples of this forward; packed: for their tokens, where it sees those."""
        drawn_for = self._keys.data_ptr(), shape, drop_probability, packed is not None
        waiting = self._waiting.get(key)
        if not waiting or waiting[-1][0] != drawn_for:
            if torch._C._current_graph_task_id() != -1:  # checkpointing runs the last modules first: the next ones are done
                return self._drawn([key], 1, shape, drop_probability, packed)[0]
            self._draw(key, shape, drop_probability, packed)
            waiting = self._waiting[key]
        kept = waiting.pop()[1]
        if not waiting:
            del self._waiting[key]
        return kept

    def _draw(self, key: int, shape: torch.Size, drop_probability: float, packed: PackedTokens | None) -> None:
        """For this place and the next ones that are alike, and where there is room for all of these, for the next forwards too."""
        alike, index = self._alike[key]
        axis, room = self.places[key].axis, max(1, DRAWN_TOGETHER // max(1, shape.numel()))
        together, forwards = alike[index : index + room], [self._keys]
        if packed is None and axis is not None:
            forwards = self._keys.split(self._num_samples)[: max(1, room // len(together))]
        drawn_for = [(keys.data_ptr(), shape, drop_probability, packed is not None) for keys in forwards]
        for place, mask in zip(together, self._drawn(together, len(forwards), shape, drop_probability, packed), strict=True):
            masks = [mask] if len(forwards) == 1 else mask.split(shape[axis], axis)
            self._waiting[place] = list(zip(drawn_for, masks, strict=True))[::-1]

    def _drawn(
        self, places: list[int], num_forwards: int, shape: torch.Size, drop_probability: float, packed: PackedTokens | None
    ) -> Sequence[Tensor]:
        """Of each place one mask, for the samples of so many forwards."""
        axis, keys = self.places[places[0]].axis, self._keys[: self._num_samples * num_forwards]
        if packed is not None:
            return packed_keep_masks(keys, places, packed, shape, drop_probability).unbind()
        if axis is None:
            return keep_masks(self._window_key, places, shape, None, drop_probability).unbind()
        whole = (*shape[:axis], shape[axis] * num_forwards, *shape[axis + 1 :])
        return keep_masks(keys, places, whole, axis, drop_probability).unbind()
