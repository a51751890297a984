"""The layouts of a check: how the samples of one window are split into micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from accelerate import Accelerator

from hf_ga.check.gradients import Gradients
from hf_ga.check.steps import CheckContext, StepFunction, run_hf_ga_step, run_user_step
from hf_ga.errors import ConfigError
from hf_ga.loading.window import Window

AUTO = ("even", "uneven", "one by one", "sorted by length", "short last window")
INDIVISIBLE = "indivisible"  # the number of micro-batches is not a multiple of the processes
NAMES = (*AUTO, INDIVISIBLE)
# Shares of the window in the layout "uneven", repeated for more than four micro-batches.
UNEVEN_SHARES = (0.40, 0.05, 0.35, 0.20)


@dataclass(frozen=True)
class CheckedLayout:
    """One way to split a window into micro-batches.

    Attributes:
        name: Name of the layout in the report.
        offsets: For each micro-batch, the positions of its samples in the window, int64 of shape
            (samples of the micro-batch,). Together they are the first samples of the check; only
            the layout "short last window" does not use all of them.
        accumulation_steps: Micro-batches of a full window over all processes; a short last window
            has fewer.
    """

    name: str
    offsets: list[np.ndarray]
    accumulation_steps: int

    @property
    def sizes(self) -> list[int]:
        """Number of samples in each micro-batch."""
        return [len(micro_batch) for micro_batch in self.offsets]

    @property
    def num_samples(self) -> int:
        """Number of samples over all micro-batches."""
        return sum(self.sizes)

    def collate_window(self, context: CheckContext) -> Window:
        """Return the window in this layout, all of whose micro-batches are on every process."""
        return context.first_samples_window(self.num_samples).split(self.offsets)

    def run(
        self, context: CheckContext, step: StepFunction | None, window: Window
    ) -> tuple[float | None, Gradients]:
        """Run a step on a window of `collate_window`, and return its loss, if it has one, and its
        gradients.

        The step receives all micro-batches; hf_ga's own (None) those of this process.
        """
        if step is None:
            return run_hf_ga_step(context, local_micro_batches(window, context.accelerator))
        return run_user_step(step, context, window, self.accumulation_steps)


def local_micro_batches(window: Window, accelerator: Accelerator) -> Window:
    """Return the window with this process's micro-batches only: r, r + num_processes, ..., as in
    the loaders that Accelerate prepares.
    """
    local = slice(accelerator.process_index, None, accelerator.num_processes)
    max_per_process = -(-len(window.batches) // accelerator.num_processes)
    request = replace(
        window.request,
        micro_batches=window.request.micro_batches[local],
        max_micro_batches=max_per_process,
    )
    return replace(window, request=request, batches=window.batches[local])


def full_window_micro_batches(num_processes: int) -> int:
    """Return the number of micro-batches of a full window over all processes."""
    return max(4, 2 * num_processes)


def min_samples(num_processes: int) -> int:
    """Return the smallest number of samples of a check: two for each micro-batch on average."""
    return 2 * full_window_micro_batches(num_processes)


def choose_layouts(
    layouts: str | Sequence[str] | Mapping[str, Sequence[int]],
    lengths: np.ndarray,
    num_processes: int = 1,
) -> list[CheckedLayout]:
    """Build the layouts from the `layouts` argument of `check_equivalence`.

    Args:
        layouts: Names of layouts; "auto" for all of `AUTO` (on several processes also
            `INDIVISIBLE`); or a dict from any name to the numbers of samples of its micro-batches.
        lengths: Tokens of each sample, shape (samples,).
        num_processes: Processes of the check.

    Raises:
        ConfigError: If a name is unknown, sizes do not add up to the number of samples, or there
            are fewer samples than `min_samples` (8 on one process or two).

    >>> [layout.sizes for layout in choose_layouts(["even", "short last window"], np.ones(16))]
    [[4, 4, 4, 4], [2, 1]]
    """
    num_required = min_samples(num_processes)
    if len(lengths) < num_required:
        raise ConfigError(
            f"a check needs at least {num_required} samples, got {len(lengths)}: a window of "
            "several micro-batches."
        )
    if isinstance(layouts, Mapping):
        return [
            _layout_of_sizes(name, list(sizes), len(lengths)) for name, sizes in layouts.items()
        ]
    known = AUTO if num_processes == 1 else NAMES
    if layouts == "auto":
        names = known
    elif isinstance(layouts, str):
        names = [layouts]
    else:
        names = list(layouts)
    if not names or not set(names) <= set(known):
        raise ConfigError(
            f"layouts must be auto, some of {', '.join(known)}, or a dict of sizes, got "
            f"{layouts!r}."
        )
    return [_built_in_layout(name, lengths, num_processes) for name in names]


def _built_in_layout(name: str, lengths: np.ndarray, num_processes: int) -> CheckedLayout:
    """Build a layout of `NAMES` for samples of these lengths."""
    num_samples = len(lengths)
    num_micro_batches = full_window_micro_batches(num_processes)
    if name == "short last window":
        size = max(1, num_samples // (2 * num_micro_batches))
        alternating = [size, max(1, size // 2)]
        sizes = np.resize(alternating, num_micro_batches // 2).tolist()
        layout = _layout_of_sizes(name, sizes, sum(sizes))
        return replace(layout, accumulation_steps=num_micro_batches)
    if name == "one by one":
        return _layout_of_sizes(name, [1] * num_samples, num_samples)
    if name == "uneven":
        shares = np.resize(UNEVEN_SHARES, num_micro_batches)
        sizes = [max(1, int(share * num_samples / shares.sum())) for share in shares]
        # The first micro-batch gets what rounding left over.
        sizes[0] = num_samples - sum(sizes[1:])
        return _layout_of_sizes(name, sizes, num_samples)
    if name == INDIVISIBLE:
        num_micro_batches = 2 * num_processes - 1
    sizes = [len(part) for part in np.array_split(np.arange(num_samples), num_micro_batches)]
    order = np.argsort(lengths, kind="stable") if name == "sorted by length" else None
    return _layout_of_sizes(name, sizes, num_samples, order)


def _layout_of_sizes(
    name: str, sizes: list[int], num_samples: int, order: np.ndarray | None = None
) -> CheckedLayout:
    """Build a layout whose micro-batches take the next samples of `order`, or of the window."""
    if min(sizes, default=0) < 1 or sum(sizes) != num_samples:
        raise ConfigError(
            f"the micro-batches of layout {name!r} have {sizes} samples, but must add up to "
            f"{num_samples}."
        )
    order = np.arange(num_samples) if order is None else order
    return CheckedLayout(name, np.split(order, np.cumsum(sizes)[:-1]), len(sizes))
