"""What the loaders of windows share: sizes, this process's part of a window, and where an iteration stands."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator

from hf_ga.errors import ConfigError
from hf_ga.exact.costs import CostModel, cost_model
from hf_ga.exact.fetch import Splitter
from hf_ga.exact.layout import Layout
from hf_ga.exact.length_plan import ByLength
from hf_ga.exact.memory import MemoryLimit
from hf_ga.exact.plan import Plan, Planner, plan_window
from hf_ga.exact.reduce import is_sharded

if TYPE_CHECKING:
    from hf_ga.proof.targets import TargetRule

    Proof = tuple[torch.nn.Module, Any, TargetRule]  # model, code of the loss_fn, what was proven of them


class BaseLoader:
    """Sizes, position and proofs of a loader.

    A window counts as consumed when it is handed out, so a loop that was left goes on behind it (`set_epoch` begins anew).

    Attributes:
        layout: how a window is computed. epoch, num_consumed: where the iteration stands. proofs: target rules found so far.
        memory: how large a micro-batch may be.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        per_device_batch_size: int,
        global_batch_size: int | None,
        *,
        seed: int,
        planner: Planner | None,
        cost: CostModel | None,
        by_length: bool,
        longest: int | None,
        max_tokens: int | None,
        pad_to_window: bool,
        drop_last_window: bool,
        num_workers: int,
    ) -> None:
        accumulation = accelerator.gradient_accumulation_steps if global_batch_size is None else None
        self.layout = Layout.from_sizes(
            accelerator.num_processes, per_device_batch_size, accumulation, global_batch_size=global_batch_size
        )
        _check_limit(max_tokens, longest, planner, by_length)
        if planner is None and by_length:
            cost = cost or cost_model(accelerator.device.type)
            limit = max_tokens or (None if longest is None else per_device_batch_size * int(cost.widths(np.array(longest))))
            planner = ByLength(per_device_batch_size, limit, cost, in_step=is_sharded(accelerator))
        planner = planner or partial(_plan_by_count, micro_batch_size=per_device_batch_size)
        self.splitter = Splitter(seed, self.layout, planner, accelerator.process_index)
        self.device = accelerator.device
        self.seed, self.drop_last_window, self.num_workers = seed, drop_last_window, num_workers
        self.pad_to_window = pad_to_window
        self.epoch, self.num_consumed = 0, 0
        self.proofs: list[Proof] = []
        self.memory = MemoryLimit()

    def set_epoch(self, epoch: int) -> None:
        """Begin the given epoch (0-based) at its first window."""
        self.epoch, self.num_consumed = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands: epoch, windows consumed, what makes the order, and the limit of memory if one was found."""
        memory = {} if self.memory.elements is None else {"memory": self.memory.state_dict()}
        return {"epoch": self.epoch, "num_consumed": self.num_consumed, **self._identity(), **memory}

    def load_state_dict(self, state: dict[str, Any], *, allow_changes: bool = False) -> None:
        """Continue at a `state_dict()`, also one of another layout.

        Args:
            allow_changes: also one of another order, behind as many samples of the epoch: whole windows of the new size that they
                fill, and the whole epoch where there are no more.

        Raises:
            ConfigError: the state belongs to another order (of another seed, window size, ...), and that is not allowed.
        """
        changed = {k: (state.get(k), v) for k, v in self._identity().items() if state.get(k) != v}
        if changed and not allow_changes:
            listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
            raise ConfigError(f"this position belongs to another order of windows: {listed}")
        self.epoch, self.num_consumed = state["epoch"], self._carried_over(state) if changed else state["num_consumed"]
        if "memory" in state:
            self.memory.load_state_dict(state["memory"])

    @property
    def pads_to_window(self) -> bool:
        """Whether micro-batches are collated as wide as their window: asked for, or needed by a rule that was proven."""
        return self.pad_to_window or any(rule.pad_to_window for _, _, rule in self.proofs)

    def _carried_over(self, state: dict[str, Any]) -> int:
        """How many of this loader's windows the samples make that were consumed in another order."""
        here, size = self._identity().get("num_samples", math.inf), self.layout.window_size  # of a stream it is not known
        consumed = min(state["num_consumed"] * state["window_size"], state.get("num_samples", math.inf))
        return int(consumed // size) if consumed < here else math.ceil(here / size)

    def _identity(self) -> dict[str, int]:
        """What must be equal for a position to mean the same samples."""
        return {"seed": self.seed, "window_size": self.layout.window_size}


def as_it_is(value: Any) -> Any:
    """The collate function of a `DataLoader` whose items are windows already."""
    return value


def check_limit(max_tokens: int | None, longest: int, what: str) -> None:
    """Refuse a limit into which the longest sample does not fit.

    Raises:
        ConfigError: that.
    """
    if max_tokens is not None and max_tokens < longest:
        raise ConfigError(
            f"every sample must fit into a micro-batch, but max_tokens_per_micro_batch {max_tokens} is less than {what} {longest} "
            f"tokens: allow at least {longest}, or cut samples shorter (max_length)."
        )


def _check_limit(max_tokens: int | None, longest: int | None, planner: Planner | None, by_length: bool) -> None:
    if max_tokens is None:
        return
    if max_tokens < 1:
        raise ConfigError(f"max_tokens_per_micro_batch must be at least 1, got {max_tokens}.")
    if planner is not None or not by_length:
        raise ConfigError(
            f"max_tokens_per_micro_batch {max_tokens} limits micro-batches that are planned by length: give lengths (of a stream, "
            "length_of) and no planner of your own, or leave it out."
        )
    if longest is not None:
        check_limit(max_tokens, longest, "the longest sample's")


def _plan_by_count(lengths: np.ndarray, num_processes: int, micro_batch_size: int) -> Plan:
    return plan_window(len(lengths), num_processes, micro_batch_size)
