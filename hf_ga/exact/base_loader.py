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
from hf_ga.exact.chunks import Chunks
from hf_ga.exact.fetch import WindowRequest
from hf_ga.exact.layout import Layout
from hf_ga.exact.length_plan import CPU_OVERHEAD, GPU_OVERHEAD, ByLength
from hf_ga.exact.plan import Plan, Planner, check_plan, plan_window
from hf_ga.exact.window import LoaderState


@dataclass(frozen=True)
class Splitter:
    """Makes requests: which part of a window this process computes, from what all processes know.

    Attributes:
        planner: None splits evenly by number. canonical_micro_batch: samples in one chunk, for the
            same bits.
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
        whole_window: bool = False,
    ) -> WindowRequest:
        """The window with this number in its epoch. `sample_ids` and `lengths` are in the order of
        the epoch, shape (n,).

        Raises:
            ConfigError: the planner drops or repeats samples.
        """
        plan, chunks = self.plan(lengths, whole_window), None
        if self.canonical_micro_batch is not None:
            of_window = plan[0]
            padded_tokens = tuple(
                len(chunk) * max(1, int(lengths[chunk].max())) for chunk in of_window
            )
            chunks = Chunks(padded_tokens, self.layout.num_processes)
            plan = [of_window[run.start : run.stop] for run in chunks.runs]
        check_plan(plan, len(sample_ids), self.layout.num_processes)
        positions = index * self.layout.window_size + np.arange(len(sample_ids))
        own, most = plan[self.process_index], max(map(len, plan))
        known = lengths if isinstance(self.planner, ByLength) else None
        return WindowRequest(
            self.seed, epoch, index, positions, sample_ids, own, whole_window, most, known, chunks
        )

    def plan(self, lengths: np.ndarray, whole_window: bool) -> Plan:
        """Who computes what; chunks are planned for a single process. Where all samples are padded
        to one width, a plan by length is one of equal lengths.
        """
        num_processes = self.layout.num_processes if self.canonical_micro_batch is None else 1
        if self.planner is None:
            return plan_window(
                len(lengths),
                num_processes,
                self.canonical_micro_batch or self.layout.micro_batch_size,
            )
        equal = whole_window and isinstance(self.planner, ByLength)
        return self.planner(
            np.full_like(lengths, lengths.max()) if equal else lengths, num_processes
        )

    def padded(self, request: WindowRequest) -> WindowRequest:
        """The same window, planned again for micro-batches as wide as its longest sample."""
        return self.request(
            request.epoch, request.index, request.sample_ids, request.lengths, whole_window=True
        )


class BaseLoader:
    """Sizes, position and shared state of a loader.

    A window counts as consumed when it is handed out, so a loop that was left continues behind it
    (`set_epoch` resets it).

    Attributes:
        layout: how a window is computed. epoch, num_consumed: position of the iteration. state:
            shared with the windows.
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
        self.accelerator, self.seed, self.canonical_micro_batch = (
            accelerator,
            seed,
            canonical_micro_batch,
        )
        if (
            canonical_micro_batch is not None
            and not 0 < canonical_micro_batch <= per_device_batch_size
        ):
            raise ConfigError(
                "canonical_micro_batch (same_bits) must be at least 1 and at most the per-device "
                "batch size "
                f"{per_device_batch_size}, as one forward computes a chunk, got "
                f"{canonical_micro_batch}."
            )
        self.epoch, self.num_consumed = 0, 0
        self.state = LoaderState(pad_to_window=pad_to_window)

    def _make_splitter(
        self, planner: Planner | None, by_length: bool, longest: int | None, max_tokens: int | None
    ) -> Splitter:
        """by_length: lengths are known. longest: the longest sample's, where that is known. The
        others: see `WindowLoader`.

        Raises:
            ConfigError: a limit of tokens that the plan cannot keep.
        """
        if max_tokens is not None and (planner is not None or not by_length):
            raise ConfigError(
                f"max_tokens_per_micro_batch {max_tokens} limits micro-batches that are planned "
                "by length: give lengths (of a "
                "stream, length_of) and no custom planner, or omit it."
            )
        check_limit(max_tokens, longest or 1, "the longest sample's")
        if planner is None and by_length:
            size = self.canonical_micro_batch or self.layout.micro_batch_size
            overhead = CPU_OVERHEAD if self.accelerator.device.type == "cpu" else GPU_OVERHEAD
            limit = max_tokens or (None if longest is None else size * max(1, longest))
            in_step = (
                self.accelerator.distributed_type == DistributedType.FSDP
            )  # ranks wait for each other in every forward
            planner = ByLength(size, limit, overhead, in_step)
        return Splitter(
            self.seed,
            self.layout,
            self.accelerator.process_index,
            planner,
            self.canonical_micro_batch,
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
        self.epoch, self.num_consumed = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The position of the iteration: epoch, windows consumed, what makes the order, and the
        memory limit if there is one.
        """
        limit = {} if self.state.max_elements is None else {"max_elements": self.state.max_elements}
        return {"epoch": self.epoch, "num_consumed": self.num_consumed, **self._identity(), **limit}

    def load_state_dict(self, state: dict[str, Any], *, allow_changes: bool = False) -> None:
        """Continue at a `state_dict()`, also one of another layout.

        Args:
            allow_changes: also one of another order, behind as many samples of the epoch: whole
                windows of the new size that they fill, and the whole epoch where there are no more.

        Raises:
            ConfigError: the state belongs to another order (of another seed, window size, ...), and
                that is not allowed.
        """
        changed = {k: (state.get(k), v) for k, v in self._identity().items() if state.get(k) != v}
        if changed and not allow_changes:
            listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
            raise ConfigError(f"this position belongs to another order of windows: {listed}")
        self.epoch, self.num_consumed = (
            state["epoch"],
            self._carried_over(state) if changed else state["num_consumed"],
        )
        self.state.max_elements = state.get("max_elements", self.state.max_elements)

    def _carried_over(self, state: dict[str, Any]) -> int:
        """How many of this loader's windows the samples fill that were consumed in another
        order.
        """
        here, size = (
            self._identity().get("num_samples", math.inf),
            self.layout.window_size,
        )  # unknown of a stream
        consumed = min(
            state["num_consumed"] * state["window_size"], state.get("num_samples", math.inf)
        )
        return int(consumed // size) if consumed < here else math.ceil(here / size)

    def _identity(self) -> dict[str, int]:
        """What must be equal for a position to mean the same samples."""
        chunk = (
            {}
            if self.canonical_micro_batch is None
            else {"canonical_micro_batch": self.canonical_micro_batch}
        )
        return {"seed": self.seed, "window_size": self.layout.window_size, **chunk}


def check_limit(max_tokens: int | None, longest: int, what: str) -> None:
    """Refuse a limit into which the longest sample does not fit.

    Raises:
        ConfigError: that.
    """
    if max_tokens is not None and max_tokens < longest:
        raise ConfigError(
            f"max_tokens_per_micro_batch {max_tokens} is less than {what} {longest} tokens: every "
            "sample must fit into a "
            f"micro-batch. Allow at least {longest}, or cut samples shorter (max_length)."
        )
