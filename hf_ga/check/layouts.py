"""The layouts of a check: how the samples of one window are split into micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hf_ga.check.subjects import Subject
from hf_ga.errors import ConfigError
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader

AUTO = ("even", "uneven", "one by one", "sorted by length", "short last window")
ACCUMULATION_STEPS = 4
LEAST_SAMPLES = 8  # four micro-batches of two
UNEVEN = (0.40, 0.05, 0.35, 0.20)  # shares of the window


@dataclass(frozen=True)
class CheckedLayout:
    """One window and its split.

    Attributes:
        offsets: positions in the window of each micro-batch's samples; the window consists of the first samples.
        accumulation_steps: micro-batches of a full window; a short last window has fewer.
    """

    name: str
    offsets: list[np.ndarray]
    accumulation_steps: int

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch."""
        return [len(part) for part in self.offsets]

    def window(self, subject: Subject) -> Window:
        """The window as a `WindowLoader` would yield it."""
        num_samples = sum(self.sizes)
        loader = WindowLoader(
            subject.samples[:num_samples],
            subject.collate_fn,
            accelerator=subject.accelerator,
            per_device_batch_size=max(self.sizes),
            global_batch_size=num_samples,
            seed=subject.settings.seed,
            shuffle=False,
            planner=lambda lengths, processes: [self.offsets],
        )
        return next(iter(loader))


def choose_layouts(layouts: str | Sequence[str] | Mapping[str, Sequence[int]], lengths: np.ndarray) -> list[CheckedLayout]:
    """The layouts by name ("auto": all of `AUTO`), or by the sizes of their micro-batches.

    Raises:
        ConfigError: an unknown name, sizes that do not add up to the samples, or fewer than 8 samples.

    >>> [layout.sizes for layout in choose_layouts(["even", "short last window"], np.ones(16))]
    [[4, 4, 4, 4], [2, 1]]
    """
    if len(lengths) < LEAST_SAMPLES:
        raise ConfigError(f"a check needs at least {LEAST_SAMPLES} samples, got {len(lengths)}: a window of several micro-batches.")
    if isinstance(layouts, Mapping):
        return [_of_sizes(name, list(sizes), len(lengths)) for name, sizes in layouts.items()]
    names = AUTO if layouts == "auto" else [layouts] if isinstance(layouts, str) else list(layouts)
    if not names or not set(names) <= set(AUTO):
        raise ConfigError(f"layouts must be auto, some of {', '.join(AUTO)}, or a dict of sizes, got {layouts!r}.")
    return [_named(name, lengths) for name in names]


def _named(name: str, lengths: np.ndarray) -> CheckedLayout:
    n = len(lengths)
    if name == "short last window":
        size = max(1, n // 8)
        return CheckedLayout(name, [np.arange(size), size + np.arange(max(1, size // 2))], ACCUMULATION_STEPS)
    if name == "one by one":
        return _of_sizes(name, [1] * n, n)
    if name == "uneven":
        sizes = [max(1, int(share * n)) for share in UNEVEN]
        return _of_sizes(name, [n - sum(sizes[1:]), *sizes[1:]], n)
    sizes = [len(part) for part in np.array_split(np.arange(n), ACCUMULATION_STEPS)]
    return _of_sizes(name, sizes, n, np.argsort(lengths, kind="stable") if name == "sorted by length" else None)


def _of_sizes(name: str, sizes: list[int], num_samples: int, order: np.ndarray | None = None) -> CheckedLayout:
    if min(sizes, default=0) < 1 or sum(sizes) != num_samples:
        raise ConfigError(f"the micro-batches of layout {name!r} have {sizes} samples, but must add up to {num_samples}.")
    order = np.arange(num_samples) if order is None else order
    ends = np.cumsum(sizes)
    offsets = [order[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return CheckedLayout(name, offsets, len(sizes))
