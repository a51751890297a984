"""What the loaders of windows share: sizes, this process's part of a window, and where an iteration stands."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator

from hf_ga.errors import ConfigError
from hf_ga.fetch import Splitter
from hf_ga.layout import Layout
from hf_ga.plan import Planner, plan_window

if TYPE_CHECKING:
    from hf_ga.targets import TargetRule

    Proof = tuple[torch.nn.Module, Any, TargetRule]  # model, code of the loss_fn, what was proven of them


class BaseLoader:
    """Sizes, position and proofs of a loader.

    A window counts as consumed when it is handed out, so a loop that was left goes on behind it (`set_epoch` begins anew).

    Attributes:
        layout: how a window is computed. epoch, num_consumed: where the iteration stands. proofs: target rules found so far.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        per_device_batch_size: int,
        global_batch_size: int | None,
        *,
        seed: int,
        planner: Planner | None,
        pad_to_window: bool,
        drop_last_window: bool,
        num_workers: int,
    ) -> None:
        accumulation = accelerator.gradient_accumulation_steps if global_batch_size is None else None
        self.layout = Layout.from_sizes(
            accelerator.num_processes, per_device_batch_size, accumulation, global_batch_size=global_batch_size
        )
        planner = planner or partial(_plan_by_count, micro_batch_size=per_device_batch_size)
        self.splitter = Splitter(seed, self.layout, planner, accelerator.process_index)
        self.device = accelerator.device
        self.seed, self.drop_last_window, self.num_workers = seed, drop_last_window, num_workers
        self.pad_to_window = pad_to_window
        self.epoch, self.num_consumed = 0, 0
        self.proofs: list[Proof] = []

    def set_epoch(self, epoch: int) -> None:
        """Begin the given epoch (0-based) at its first window."""
        self.epoch, self.num_consumed = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where the iteration stands: epoch, windows consumed, and what makes the order."""
        return {"epoch": self.epoch, "num_consumed": self.num_consumed, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a `state_dict()`, also one of another layout.

        Raises:
            ConfigError: the state belongs to another order (of another seed, window size, ...).
        """
        if changed := {k: (state.get(k), v) for k, v in self._identity().items() if state.get(k) != v}:
            listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
            raise ConfigError(f"this position belongs to another order of windows: {listed}")
        self.epoch, self.num_consumed = state["epoch"], state["num_consumed"]

    @property
    def pads_to_window(self) -> bool:
        """Whether micro-batches are collated as wide as their window: asked for, or needed by a rule that was proven."""
        return self.pad_to_window or any(rule.pad_to_window for _, _, rule in self.proofs)

    def _identity(self) -> dict[str, int]:
        """What must be equal for a position to mean the same samples."""
        return {"seed": self.seed, "window_size": self.layout.window_size}


def as_it_is(value: Any) -> Any:
    """The collate function of a `DataLoader` whose items are windows already."""
    return value


def _plan_by_count(lengths: np.ndarray, num_processes: int, micro_batch_size: int) -> list[list[np.ndarray]]:
    return plan_window(len(lengths), num_processes, micro_batch_size)
