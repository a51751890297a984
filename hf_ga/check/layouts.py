"""The layouts of a check: how the samples of one window are split into micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from accelerate import Accelerator

from hf_ga.check.gradients import Gradients
from hf_ga.check.subjects import StepFunction, Subject, run_ours, run_step
from hf_ga.errors import ConfigError
from hf_ga.exact.window import Window

AUTO = ("even", "uneven", "one by one", "sorted by length", "short last window")
INDIVISIBLE = "indivisible"  # micro-batches that cannot be dealt out evenly to several processes
NAMES = (*AUTO, INDIVISIBLE)
UNEVEN = (0.40, 0.05, 0.35, 0.20)  # shares of the window, repeated for more than four micro-batches


@dataclass(frozen=True)
class CheckedLayout:
    """One window and its split.

    Attributes:
        name: How reports call it.
        offsets: Positions in the window of each micro-batch's samples; the window consists of the
            first samples.
        accumulation_steps: Micro-batches of a full window; a short last window has fewer.
    """

    name: str
    offsets: list[np.ndarray]
    accumulation_steps: int

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch."""
        return [len(part) for part in self.offsets]

    def window(self, subject: Subject) -> Window:
        """Collate all micro-batches of the window, on every process."""
        return subject.window(sum(self.sizes)).split(self.offsets)

    def run(
        self, subject: Subject, step: StepFunction | None, window: Window
    ) -> tuple[float | None, Gradients]:
        """Run an arm on a window.

        Args:
            subject: The model and what its windows are built from.
            step: The arm's step, which gets all of the window. None: hf_ga, on this process's
                share.
            window: The window.

        Returns:
            Mean loss, if the arm reports one, and gradients.
        """
        if step is None:
            return run_ours(subject, own_share(window, subject.accelerator))
        return run_step(step, subject, window, self.accumulation_steps)


def own_share(window: Window, accelerator: Accelerator) -> Window:
    """Take this process's micro-batches of a window, which are dealt out in turn, as Accelerate's
    loaders do.
    """
    own = slice(accelerator.process_index, None, accelerator.num_processes)
    most = -(-len(window.batches) // accelerator.num_processes)
    request = replace(
        window.request, micro_batches=window.request.micro_batches[own], max_micro_batches=most
    )
    return replace(window, request=request, batches=window.batches[own])


def full_accumulation(num_processes: int) -> int:
    """Return the micro-batches of a full window: at least four, and two for each process."""
    return max(4, 2 * num_processes)


def least_samples(num_processes: int) -> int:
    """Return the samples of the smallest window: two in each micro-batch, on average."""
    return 2 * full_accumulation(num_processes)


def choose_layouts(
    layouts: str | Sequence[str] | Mapping[str, Sequence[int]],
    lengths: np.ndarray,
    num_processes: int = 1,
) -> list[CheckedLayout]:
    """Make the layouts of a check.

    Args:
        layouts: Names; "auto" for all of `AUTO` (on several processes also `INDIVISIBLE`); or sizes
            of micro-batches by name.
        lengths: Tokens of each sample.
        num_processes: Processes of the check.

    Raises:
        ConfigError: If a name is unknown, sizes do not add up to the samples, or there are too few
            samples (8 on one process or two).

    >>> [layout.sizes for layout in choose_layouts(["even", "short last window"], np.ones(16))]
    [[4, 4, 4, 4], [2, 1]]
    """
    least = least_samples(num_processes)
    if len(lengths) < least:
        raise ConfigError(
            f"a check needs at least {least} samples, got {len(lengths)}: a window of several "
            "micro-batches."
        )
    if isinstance(layouts, Mapping):
        return [_of_sizes(name, list(sizes), len(lengths)) for name, sizes in layouts.items()]
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
    return [_named(name, lengths, num_processes) for name in names]


def _named(name: str, lengths: np.ndarray, num_processes: int) -> CheckedLayout:
    """Make one of the layouts in `NAMES`."""
    n = len(lengths)
    steps = full_accumulation(num_processes)
    if name == "short last window":
        size = max(1, n // (2 * steps))
        sizes = np.resize([size, max(1, size // 2)], steps // 2).tolist()
        return replace(_of_sizes(name, sizes, sum(sizes)), accumulation_steps=steps)
    if name == "one by one":
        return _of_sizes(name, [1] * n, n)
    if name == "uneven":
        shares = np.resize(UNEVEN, steps)
        sizes = [max(1, int(share * n / shares.sum())) for share in shares]
        return _of_sizes(name, [n - sum(sizes[1:]), *sizes[1:]], n)
    num = 2 * num_processes - 1 if name == INDIVISIBLE else steps
    sizes = [len(part) for part in np.array_split(np.arange(n), num)]
    order = np.argsort(lengths, kind="stable") if name == "sorted by length" else None
    return _of_sizes(name, sizes, n, order)


def _of_sizes(
    name: str, sizes: list[int], num_samples: int, order: np.ndarray | None = None
) -> CheckedLayout:
    if min(sizes, default=0) < 1 or sum(sizes) != num_samples:
        raise ConfigError(
            f"the micro-batches of layout {name!r} have {sizes} samples, but must add up to "
            f"{num_samples}."
        )
    order = np.arange(num_samples) if order is None else order
    return CheckedLayout(name, np.split(order, np.cumsum(sizes)[:-1]), len(sizes))
