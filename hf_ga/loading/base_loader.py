"""Base class of the loaders of windows: batch sizes, plans of windows, state to resume from."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedType

from hf_ga.errors import ConfigError
from hf_ga.loading.fetch import WindowRequest
from hf_ga.loading.window import LoaderState
from hf_ga.order.chunks import ChunkTree
from hf_ga.order.layout import Layout
from hf_ga.order.length_plan import CPU_OVERHEAD, GPU_OVERHEAD, ByLength, Computed
from hf_ga.order.plan import Plan, Planner, check_plan, plan_window


@dataclass(frozen=True)
class Splitter:
    """Splits windows over processes and micro-batches. All processes compute the same split.

    Attributes:
        seed: Seed of the order of the samples.
        layout: Batch sizes and number of processes.
        process_index: Index of this process, or of its replica of the model.
        planner: Function that splits a window. None: evenly by number of samples.
        canonical_micro_batch: For same bits, the number of samples in one chunk of a window; each
            chunk is computed in one forward. None: windows are not split into chunks.
    """

    seed: int
    layout: Layout
    process_index: int
    planner: Planner | None = None
    canonical_micro_batch: int | None = None

    def make_request(
        self,
        epoch: int,
        index: int,
        sample_ids: np.ndarray,
        lengths: np.ndarray,
        *,
        pad_to_window: bool = False,
        computed: Computed = Computed.PADDED,
    ) -> WindowRequest:
        """Plan a window and return this process's part of it, as a request for its batches.

        For the same bits on any number of processes, the window is split into chunks of
        `canonical_micro_batch` samples, whose gradients are summed in the order of a tree.

        Args:
            epoch: The epoch of the window (0-based).
            index: The index of the window in the epoch (0-based).
            sample_ids: Ids of its samples in the order of the epoch, shape (samples,).
            lengths: Number of tokens of each of its samples, shape (samples,).
            pad_to_window: Whether all micro-batches are padded to the longest sample of the window.
            computed: Which tokens the model computes. Ignored if the window is padded, for same
                bits, and without a plan by lengths.

        Raises:
            ConfigError: If the plan drops or repeats samples, or has an empty micro-batch.
        """
        is_by_length = isinstance(self.planner, ByLength)
        if not is_by_length or pad_to_window or self.canonical_micro_batch is not None:
            computed = Computed.PADDED
        plan = self.plan(lengths, pad_to_window, computed)
        chunk_tree = None
        if self.canonical_micro_batch is not None:
            chunks = plan[0]  # of the whole window, as it was planned for a single process
            padded_tokens = [len(chunk) * max(1, int(lengths[chunk].max())) for chunk in chunks]
            chunk_tree = ChunkTree(tuple(padded_tokens), self.layout.num_processes)
            plan = [[chunks[i] for i in indices] for indices in chunk_tree.chunks_per_rank]
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
            lengths=lengths if is_by_length else None,
            chunk_tree=chunk_tree,
            computed=computed,
            max_tokens=self.planner.max_tokens if computed else None,
        )

    def plan(
        self,
        lengths: np.ndarray,
        pad_to_window: bool,
        computed: Computed = Computed.PADDED,
    ) -> Plan:
        """Split a window into the micro-batches of all processes.

        For same bits, split it into chunks (groups of `canonical_micro_batch` samples) instead, as
        if there were a single process.

        Args:
            lengths: Number of tokens of each sample of the window, shape (samples,).
            pad_to_window: Whether all micro-batches are padded to the longest sample of the window.
                If so, a plan by length treats all samples as equally long.
            computed: Which tokens a plan by length counts.

        Returns:
            For each process, the list of its micro-batches (offsets of samples in the window).
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
        if computed:
            return replace(self.planner, computed=computed)(lengths, num_processes)
        return self.planner(lengths, num_processes)

    def replan(self, request: WindowRequest, **options: Any) -> WindowRequest:
        """Plan a window again, which was planned by lengths; the options are those of
        `make_request`.
        """
        return self.make_request(
            request.epoch, request.index, request.sample_ids, request.lengths, **options
        )


class BaseLoader:
    """Base class of loaders: batch sizes, the position of the iteration, and shared state.

    A window counts as consumed as soon as it is yielded. If a loop breaks, the next one continues
    with the following window, unless `set_epoch` is called.

    Args:
        accelerator: Its number of processes and `gradient_accumulation_steps` are used.
        per_device_batch_size: Maximum number of samples in one micro-batch.
        global_batch_size: Number of samples in a window over all processes. None: the product of
            the other sizes.
        seed: Seed of the order.
        pad_to_window: Whether all micro-batches are padded to the longest sample of their window.
        canonical_micro_batch: For same bits, the number of samples in one chunk of a window, which
            is computed in one forward. None: windows are not split into chunks.

    Attributes:
        splitter: Plans the windows.
        epoch: The current epoch (0-based).
        num_consumed: Number of windows of the epoch that were yielded.
        state: State that the loader shares with its windows.
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
        """Derive the layout from the sizes, and start at the first window of epoch 0."""
        # A global batch size determines the number of accumulation steps.
        steps = accelerator.gradient_accumulation_steps if global_batch_size is None else None
        layout = Layout.from_sizes(
            num_processes=accelerator.num_processes,
            micro_batch_size=per_device_batch_size,
            accumulation_steps=steps,
            global_batch_size=global_batch_size,
        )
        samples_per_chunk = canonical_micro_batch
        if samples_per_chunk is not None and not 0 < samples_per_chunk <= per_device_batch_size:
            raise ConfigError(
                "canonical_micro_batch (same_bits) must be at least 1 and at most the per-device "
                f"batch size {per_device_batch_size}, as one forward computes a chunk of that many "
                f"samples, got {samples_per_chunk}."
            )
        self.accelerator = accelerator
        self.splitter = Splitter(
            seed=seed,
            layout=layout,
            process_index=accelerator.process_index,
            canonical_micro_batch=canonical_micro_batch,
        )
        self.epoch = 0
        self.num_consumed = 0
        self.state = LoaderState(pad_to_window=pad_to_window)

    @property
    def seed(self) -> int:
        """Seed of the order of the samples."""
        return self.splitter.seed

    @property
    def layout(self) -> Layout:
        """Batch sizes and number of processes."""
        return self.splitter.layout

    def _plan_with(
        self, planner: Planner | None, by_length: bool, longest: int | None, max_tokens: int | None
    ) -> None:
        """Plan this loader's windows by the user's planner, by length if known (`by_length`), or by
        number. ConfigError if the longest sample exceeds the limit.
        """
        if max_tokens is not None and (planner is not None or not by_length):
            raise ConfigError(
                f"max_tokens_per_micro_batch {max_tokens} limits micro-batches that are planned "
                "by length: give lengths (of a stream, length_of) and no custom planner, or omit "
                "it."
            )
        check_limit(max_tokens, longest or 1, "the longest sample's")
        if planner is None and by_length:
            planner = self._planner_by_length(longest, max_tokens)
        self.splitter = replace(self.splitter, planner=planner)

    def _planner_by_length(self, longest: int | None, max_tokens: int | None) -> ByLength:
        """Return the planner by length for this device and parallelism. Without `max_tokens`, a
        micro-batch has the tokens of `per_device_batch_size` samples of length `longest`.
        """
        size = self.splitter.canonical_micro_batch or self.layout.micro_batch_size
        if not max_tokens and longest is not None:
            max_tokens = size * max(1, longest)
        is_cpu = self.accelerator.device.type == "cpu"
        is_fsdp = self.accelerator.distributed_type == DistributedType.FSDP
        return ByLength(
            micro_batch_size=size,
            max_tokens=max_tokens or None,
            overhead=CPU_OVERHEAD if is_cpu else GPU_OVERHEAD,
            lockstep=is_fsdp,  # FSDP's ranks wait for each other in every forward
            pads_attention=is_cpu,
        )

    def use_seed(self, seed: int) -> None:
        """Replace the seed of the order of samples by that of a loader's saved position."""
        self.splitter = replace(self.splitter, seed=seed)

    def split_over(self, num_replicas: int, replica: int) -> None:
        """Split windows over replicas of the model instead of processes, for pipeline parallelism.

        The stages of a pipeline hold one replica together, and compute the same samples. The number
        of samples in a window does not change.

        Args:
            num_replicas: Number of replicas.
            replica: Index of the replica that this process is part of (0-based).
        """
        layout = Layout.from_sizes(
            num_processes=num_replicas,
            micro_batch_size=self.layout.micro_batch_size,
            global_batch_size=self.layout.window_size,
        )
        self.splitter = replace(self.splitter, layout=layout, process_index=replica)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (0-based) of the loader, so that the next iteration begins at its first
        window.
        """
        self.epoch = epoch
        self.num_consumed = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration over windows, for a checkpoint.

        It holds the epoch, the number of consumed windows, everything that determines the order of
        the samples (seed, window size, ...), the memory limit of micro-batches, if there is one,
        and what training found out about padding and packing.
        """
        state = {"epoch": self.epoch, "num_consumed": self.num_consumed, **self._identity()}
        if self.state.max_elements is not None:
            state["max_elements"] = self.state.max_elements
        state["pad_to_window"] = self.state.pad_to_window
        state["is_padding_tried"] = self.state.is_padding_tried
        state["is_width_tried"] = self.state.is_width_tried
        state["computed_tokens"] = int(self.state.computed)
        return state

    def load_state_dict(self, state: dict[str, Any], *, allow_changes: bool = False) -> None:
        """Resume the iteration over windows at the position of a loader's `state_dict()`.

        The number of processes and the size of micro-batches may differ from those of the run that
        saved the state.

        Args:
            state: The saved position.
            allow_changes: Whether to accept a position in another order of samples. The loader then
                skips about as many samples of the epoch as were consumed: as many windows of the
                new size as these samples fill completely, or the whole epoch if it has no more.

        Raises:
            ConfigError: If the state belongs to another order (its seed, window size, ... differ),
                and `allow_changes` is False.
        """
        changed = self.changed_settings(state)
        if changed and not allow_changes:
            raise ConfigError(
                f"this position belongs to another order of windows: {', '.join(changed)}. Make "
                "the loader with the saved settings, or pass allow_changes=True."
            )
        self.epoch = state["epoch"]
        if changed:
            self.num_consumed = self._num_windows_to_skip(state)
        else:
            self.num_consumed = state["num_consumed"]
        self.state.max_elements = state.get("max_elements", self.state.max_elements)
        self.state.pad_to_window |= state.get("pad_to_window", False)
        self.state.is_padding_tried |= state.get("is_padding_tried", False)
        self.state.is_width_tried |= state.get("is_width_tried", False)
        computed = Computed(state.get("computed_tokens", Computed.PADDED))
        self.state.computed = max(self.state.computed, computed)

    def changed_settings(self, state: dict[str, Any]) -> list[str]:
        """List the settings that determine the order of the samples and differ from those of a
        saved position, each as "window_size 16 -> 24".
        """
        identity = self._identity()
        return [
            f"{name} {state.get(name)} -> {identity[name]}"
            for name in identity
            if state.get(name) != identity[name]
        ]

    def _num_windows_to_skip(self, state: dict[str, Any]) -> int:
        """Return how many of this loader's windows hold the samples that were consumed before a
        position of another order, rounded down; all windows if the whole epoch was consumed.
        """
        size = self.layout.window_size
        consumed = state["num_consumed"] * state["window_size"]
        # The last window of the epoch may be short.
        consumed = min(consumed, state.get("num_samples", math.inf))
        # The number of samples of a stream is unknown.
        num_samples = self._identity().get("num_samples", math.inf)
        if consumed >= num_samples:
            return math.ceil(num_samples / size)
        return int(consumed // size)

    def _identity(self) -> dict[str, int]:
        """Return the settings that determine the order of samples, windows and chunks: a saved
        position refers to the same samples only if all of them are equal.
        """
        identity = {"seed": self.seed, "window_size": self.layout.window_size}
        if self.splitter.canonical_micro_batch is not None:
            identity["canonical_micro_batch"] = self.splitter.canonical_micro_batch
        return identity


def check_limit(max_tokens: int | None, longest: int, what: str) -> None:
    """Check that the longest sample fits into the token limit of a micro-batch, before windows are
    planned by length.

    Args:
        max_tokens: Maximum number of padded tokens in one micro-batch. None: no limit.
        longest: Number of tokens of the longest sample.
        what: Phrase before that number in the error message, such as "the longest sample's".

    Raises:
        ConfigError: If the limit is below the longest sample.
    """
    if max_tokens is not None and max_tokens < longest:
        raise ConfigError(
            f"max_tokens_per_micro_batch {max_tokens} is less than {what} {longest} tokens: every "
            f"sample must fit into a micro-batch. Allow at least {longest}, or truncate samples "
            "(max_length)."
        )
