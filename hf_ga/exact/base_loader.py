"""What the loaders of windows share: sizes, this rank's part of a window, and the position of an
iteration.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedType

from hf_ga.errors import ConfigError
from hf_ga.exact.chunks import ChunkTree
from hf_ga.exact.fetch import WindowRequest
from hf_ga.exact.layout import Layout
from hf_ga.exact.length_plan import CPU_OVERHEAD, GPU_OVERHEAD, ByLength
from hf_ga.exact.plan import Plan, Planner, check_plan, plan_window
from hf_ga.exact.window import LoaderState


@dataclass(frozen=True)
class Splitter:
    """Decides which part of a window this process computes, from what all processes know.

    Attributes:
        seed: Of the order.
        layout: How a window is computed.
        process_index: Which process this is.
        planner: Splits windows. None: evenly by number.
        canonical_micro_batch: Samples in one chunk, for the same bits. None: no chunks.
    """

    seed: int
    layout: Layout
    process_index: int
    planner: Planner | None
    canonical_micro_batch: int | None = None

    def request(
        self,
        epoch: int,
        index: int,
        sample_ids: np.ndarray,
        lengths: np.ndarray,
        pad_to_window: bool = False,
    ) -> WindowRequest:
        """Plan a window.

        Args:
            epoch: Of the window.
            index: Its number in the epoch.
            sample_ids: Of its samples, in the order of the epoch, shape (n,).
            lengths: Tokens of its samples, shape (n,).
            pad_to_window: Whether all micro-batches are padded to one width.

        Raises:
            ConfigError: If the planner drops or repeats samples.
        """
        plan = self.plan(lengths, pad_to_window)
        chunks = None
        if self.canonical_micro_batch is not None:
            of_window = plan[0]
            costs = [len(chunk) * max(1, int(lengths[chunk].max())) for chunk in of_window]
            chunks = ChunkTree(tuple(costs), self.layout.num_processes)
            plan = [of_window[own.start : own.stop] for own in chunks.chunks_per_rank]
        check_plan(plan, len(sample_ids), self.layout.num_processes)
        positions = index * self.layout.window_size + np.arange(len(sample_ids))
        return WindowRequest(
            seed=self.seed,
            epoch=epoch,
            index=index,
            positions=positions,
            sample_ids=sample_ids,
            micro_batches=plan[self.process_index],
            pad_to_window=pad_to_window,
            max_micro_batches=max(map(len, plan)),
            lengths=lengths if isinstance(self.planner, ByLength) else None,
            chunks=chunks,
        )

    def plan(self, lengths: np.ndarray, pad_to_window: bool) -> Plan:
        """Split a window into micro-batches, or into chunks as for a single process.

        Args:
            lengths: Tokens of its samples, shape (n,).
            pad_to_window: Whether all micro-batches are padded to one width. A plan by length is
                then one of equal lengths.
        """
        num_processes = self.layout.num_processes
        size = self.layout.micro_batch_size
        if self.canonical_micro_batch is not None:
            num_processes = 1
            size = self.canonical_micro_batch
        if self.planner is None:
            return plan_window(len(lengths), num_processes, size)
        if pad_to_window and isinstance(self.planner, ByLength):
            lengths = np.full_like(lengths, lengths.max())
        return self.planner(lengths, num_processes)

    def padded(self, request: WindowRequest) -> WindowRequest:
        """Plan a window again for micro-batches as wide as its longest sample."""
        return self.request(
            request.epoch, request.index, request.sample_ids, request.lengths, pad_to_window=True
        )


class BaseLoader:
    """Sizes, position and shared state of a loader.

    A window counts as consumed when it is handed out, so a loop that was left continues behind it
    (`set_epoch` resets it).

    Attributes:
        layout: How a window is computed.
        epoch: The epoch of the iteration (0-based).
        num_consumed: Windows of the epoch that were handed out.
        state: What the loader shares with its windows.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        per_device_batch_size: int,
        global_batch_size: int | None,
        seed: int,
        pad_to_window: bool,
        canonical_micro_batch: int | None,
    ) -> None:
        steps = accelerator.gradient_accumulation_steps if global_batch_size is None else None
        self.layout = Layout.from_sizes(
            accelerator.num_processes, per_device_batch_size, steps, global_batch_size
        )
        chunk_size = canonical_micro_batch
        if chunk_size is not None and not 0 < chunk_size <= per_device_batch_size:
            raise ConfigError(
                "canonical_micro_batch (same_bits) must be at least 1 and at most the per-device "
                f"batch size {per_device_batch_size}, as one forward computes a chunk, got "
                f"{chunk_size}."
            )
        self.accelerator = accelerator
        self.seed = seed
        self.canonical_micro_batch = canonical_micro_batch
        self.epoch = 0
        self.num_consumed = 0
        self.state = LoaderState(pad_to_window=pad_to_window)

    def _make_splitter(
        self, planner: Planner | None, by_length: bool, longest: int | None, max_tokens: int | None
    ) -> Splitter:
        """Choose how windows are split.

        Args:
            planner: See `WindowLoader`.
            by_length: Whether lengths are known.
            longest: Tokens of the longest sample. None: unknown.
            max_tokens: See `max_tokens_per_micro_batch` of `WindowLoader`.

        Raises:
            ConfigError: If the plan cannot keep the limit of tokens.
        """
        if max_tokens is not None and (planner is not None or not by_length):
            raise ConfigError(
                f"max_tokens_per_micro_batch {max_tokens} limits micro-batches that are planned "
                "by length: give lengths (of a stream, length_of) and no custom planner, or omit "
                "it."
            )
        check_limit(max_tokens, longest or 1, "the longest sample's")
        if planner is None and by_length:
            planner = self._plan_by_length(longest, max_tokens)
        return Splitter(
            self.seed,
            self.layout,
            self.accelerator.process_index,
            planner,
            self.canonical_micro_batch,
        )

    def _plan_by_length(self, longest: int | None, max_tokens: int | None) -> ByLength:
        size = self.canonical_micro_batch or self.layout.micro_batch_size
        if not max_tokens and longest is not None:
            max_tokens = size * max(1, longest)
        is_cpu = self.accelerator.device.type == "cpu"
        is_fsdp = self.accelerator.distributed_type == DistributedType.FSDP
        return ByLength(
            size,
            max_tokens or None,
            overhead=CPU_OVERHEAD if is_cpu else GPU_OVERHEAD,
            lockstep=is_fsdp,  # its ranks wait for each other in every forward
        )

    def use_seed(self, seed: int) -> None:
        """Take over the seed of a saved position."""
        self.seed = seed
        self.splitter = replace(self.splitter, seed=seed)

    def split_over(self, num_replicas: int, replica: int) -> None:
        """Split windows over replicas of the model instead of processes, where several processes
        hold one replica: the stages of a pipeline compute the same samples.

        Args:
            num_replicas: How many there are. The size of the windows stays.
            replica: Which of them this process is part of, from 0.
        """
        self.layout = Layout.from_sizes(
            num_replicas, self.layout.micro_batch_size, None, self.layout.window_size
        )
        self.splitter = replace(self.splitter, layout=self.layout, process_index=replica)

    def set_epoch(self, epoch: int) -> None:
        """Begin the given epoch (0-based) at its first window."""
        self.epoch = epoch
        self.num_consumed = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration: epoch, windows consumed, what makes the order, and
        the memory limit if there is one.
        """
        state = {"epoch": self.epoch, "num_consumed": self.num_consumed, **self._identity()}
        if self.state.max_elements is not None:
            state["max_elements"] = self.state.max_elements
        return state

    def load_state_dict(self, state: dict[str, Any], *, allow_changes: bool = False) -> None:
        """Continue at a `state_dict()`, also one of another layout.

        Args:
            state: The position.
            allow_changes: Accept a position in another order, too. The loader then continues behind
                as many samples of the epoch: whole windows of the new size that they fill, and the
                whole epoch where there are no more.

        Raises:
            ConfigError: If the state belongs to another order (of another seed, window size, ...),
                and that is not allowed.
        """
        here = self._identity()
        changed = [name for name in here if state.get(name) != here[name]]
        if changed and not allow_changes:
            listed = ", ".join(f"{name} {state.get(name)} -> {here[name]}" for name in changed)
            raise ConfigError(f"this position belongs to another order of windows: {listed}")
        self.epoch = state["epoch"]
        self.num_consumed = self._carried_over(state) if changed else state["num_consumed"]
        self.state.max_elements = state.get("max_elements", self.state.max_elements)

    def _carried_over(self, state: dict[str, Any]) -> int:
        """Count how many of this loader's windows are filled by the samples that were consumed in
        another order.
        """
        size = self.layout.window_size
        consumed = state["num_consumed"] * state["window_size"]
        consumed = min(consumed, state.get("num_samples", math.inf))  # its last window may be short
        num_samples = self._identity().get("num_samples", math.inf)  # unknown of a stream
        if consumed >= num_samples:
            return math.ceil(num_samples / size)
        return int(consumed // size)

    def _identity(self) -> dict[str, int]:
        """Return what must be equal for a position to mean the same samples."""
        identity = {"seed": self.seed, "window_size": self.layout.window_size}
        if self.canonical_micro_batch is not None:
            identity["canonical_micro_batch"] = self.canonical_micro_batch
        return identity


def check_limit(max_tokens: int | None, longest: int, what: str) -> None:
    """Refuse a limit into which the longest sample does not fit.

    Args:
        max_tokens: The limit. None: there is none.
        longest: Tokens of the longest sample.
        what: How the message names these tokens.

    Raises:
        ConfigError: If the limit is below the longest sample.
    """
    if max_tokens is not None and max_tokens < longest:
        raise ConfigError(
            f"max_tokens_per_micro_batch {max_tokens} is less than {what} {longest} tokens: every "
            f"sample must fit into a micro-batch. Allow at least {longest}, or cut samples shorter "
            "(max_length)."
        )
