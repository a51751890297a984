"""One random draw: the keys and the layout from which its numbers are computed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from hf_ga.draws import values
from hf_ga.draws.dropout.masks import keep_mask
from hf_ga.draws.hashing import fold_in, mix_in_place, mixed, signed

cached_key = lru_cache(1 << 16)(fold_in)  # every micro-batch computes the same keys

# First argument of the keys of axes: no key of a draw may be one of them, because both are added.
AXES = (1 << 64) - 1

# Elements that are hashed at a time on a CPU: what stays in the cache is hashed four times faster.
CHUNK_ON_CPU = 1 << 16
CHUNK_ON_GPU = 1 << 24  # bounds the memory that hashes need


@dataclass(frozen=True)
class Draw:
    """One random draw, whose numbers are a function of (key of the sample, key of the draw,
    coordinates within the sample's rows). The coordinate in each dim is hashed, not the flat index,
    so the padded width does not change the numbers of real tokens.

    Attributes:
        keys: One random key per sample: int64, shape (samples,); or that of the window, shape (1,).
        site: 64-bit key of the draw.
        shape: Shape of the numbers.
        sample_dim: The dim that holds the samples, each with the same number of consecutive rows;
            None if all samples share the numbers.
    """

    keys: Tensor
    site: int
    shape: torch.Size
    sample_dim: int | None

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Draw uniformly distributed numbers of [0, 1)."""
        return self._draw(partial(values.uniform, dtype=dtype))

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Draw standard normal numbers, as float64 or float32."""
        return self._draw(partial(values.normal, dtype=values.computing_dtype(dtype)))

    def exponential(self, dtype: torch.dtype) -> Tensor:
        """Draw exponentially distributed positive numbers of rate 1, as float64 or float32."""
        return self._draw(partial(values.exponential, dtype=values.computing_dtype(dtype)))

    def integers(self, low: int, high: int) -> Tensor:
        """Draw uniformly distributed integers of [low, high)."""
        return self._draw(partial(values.integers, low=low, high=high))

    def keep_mask(self, drop_probability: float) -> Tensor:
        """Draw a dropout mask: bool, True where dropout keeps."""
        return keep_mask(
            self.keys,
            site=self.site,
            shape=self.shape,
            sample_dim=self.sample_dim,
            drop_probability=drop_probability,
        )

    def seeds(self) -> list[int]:
        """Return one seed for a `torch.Generator` per sample, or one seed for all."""
        return [key & values.MAX_INT64 for key in mixed(self.keys + signed(self.site)).tolist()]

    def pairs(self) -> "Draw":
        """Return a draw of pairs of numbers, for the real and the imaginary parts."""
        return replace(self, shape=torch.Size((*self.shape, 2)))

    @property
    def rows_per_sample(self) -> int:
        """Number of rows of a sample in the dim that holds the samples."""
        return self.shape[self.sample_dim] // len(self.keys)

    def _draw(self, from_hashes: Callable[[Tensor], Tensor]) -> Tensor:
        """Draw the numbers from one hash (int64) per element, in a layout like that of
        `masks.keep_mask`.
        """
        dim = self.sample_dim
        if dim is None:
            sizes = [1, *self.shape]
            axes = [len(self.shape), *range(len(self.shape))]
        else:
            other_dims = [other for other in range(len(self.shape)) if other != dim]
            sizes = [self.rows_per_sample, *[self.shape[other] for other in other_dims]]
            axes = [dim, *other_dims]
        numbers = _by_chunks(self.keys + signed(self.site), sizes, axes, from_hashes)
        if dim is None:
            return numbers.view(self.shape)
        return numbers.view(self.shape[dim], *sizes[1:]).movedim(0, dim)


def _by_chunks(
    keys: Tensor, sizes: list[int], axes: list[int], from_hashes: Callable[[Tensor], Tensor]
) -> Tensor:
    """Draw numbers from hashes of (key, coordinates), a few rows at a time. As splitmix64 does it,

        hash = mix(key + coordinate_0 * multiplier_0 + coordinate_1 * multiplier_1 + ...).

    The keys are int64, shape (keys,). `axes` has the number of each dim, which gives its
    multiplier.
    """
    *multiples, columns = [
        _multiples(size, axis, keys.device) for size, axis in zip(sizes, axes, strict=True)
    ]
    counters = keys
    for of_axis in multiples:
        counters = counters.unsqueeze(-1) + of_axis
    chunk = CHUNK_ON_CPU if keys.device.type == "cpu" else CHUNK_ON_GPU
    rows_at_a_time = max(1, chunk // max(1, len(columns)))
    rows = counters.view(-1, 1).split(rows_at_a_time)
    numbers = [from_hashes(mix_in_place(part + columns)) for part in rows]
    return numbers[0] if len(numbers) == 1 else torch.cat(numbers)


def _multiples(size: int, axis: int, device: torch.device) -> Tensor:
    """Return the coordinates 0, 1, ... of an axis times its multiplier, an odd 64-bit number."""
    multiplier = signed(cached_key(AXES, axis) | 1)
    return torch.arange(size, device=device).mul_(multiplier)
