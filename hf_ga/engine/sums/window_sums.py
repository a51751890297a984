"""What the micro-batches of a window add up to: gradients of undivided terms, a buffer for each
group of terms, the window's loss, and parts of a loss of the whole window.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn

from hf_ga.engine.parameter_hooks import hooks_suspended
from hf_ga.engine.sums.agreement import raised_divisors
from hf_ga.engine.sums.chunk_sums import ChunkSums
from hf_ga.engine.sums.divisors import is_empty
from hf_ga.engine.sums.groups import Group
from hf_ga.engine.sums.readings import Reading, TermKey
from hf_ga.engine.sums.shown_gradients import Gradients, set_gradients
from hf_ga.loss import undivided
from hf_ga.loss.nodes.saved import number
from hf_ga.model.precision import sum_dtype
from hf_ga.order.chunks import ChunkTree
from hf_ga.parallel.backend import Backend

# Returns the context of a backward, in which a sharded model reduces its gradients.
Sync = Callable[[], AbstractContextManager[None]]
INEXACT_LOSS = (
    "hf_ga: torch does not keep the values of several sums in the loss, which have divisors of "
    "their own: the loss of a window that is returned or logged depends on the split. The update "
    "does not. In a loop, call accelerator.backward for each of them."
)


class WindowSums:
    """The sums of one window at a time. `.grad` of the parameters is as before after each method.

    Args:
        backend: How ranks communicate.
        parameters: The trainable parameters, in the same order on all ranks.

    Attributes:
        backend: How ranks communicate.
        groups: The groups of terms whose gradients are added up together. None before `use_groups`.
        loss: The sum of the micro-batches' losses, each times its first divisor, a scalar.
        values: For each group, the sum of its terms' values, each times its divisor.
        has_exact_loss: Whether the value of each group in each micro-batch was found.
        part: The sum of the parts of a loss of the whole window.
        has_parts: Whether micro-batches add such parts (see `add_part`).
        num_micro_batches: About how many micro-batches the window has on all ranks.
        is_full_batch: Whether a single micro-batch is the whole window, so that its backward may
            divide: code of the model's own (hooks that clip) then gets what plain torch gives it.
        is_reached_anywhere: For each parameter, whether it has a gradient on any rank. The owner
            sets it at the window's end.
    """

    def __init__(self, backend: Backend, parameters: Sequence[nn.Parameter]) -> None:
        """Make the sums for these parameters."""
        self.backend = backend
        self.num_micro_batches = 1
        self.is_full_batch = False
        self._parameters = parameters
        self._first_exponent: int | None = None  # of shards' scale in the first window

    def begin(self, chunk_tree: ChunkTree | None = None) -> None:
        """Begin a window, or begin it again: forget all sums.

        Args:
            chunk_tree: For same bits, the tree over the micro-batches of the window, which fixes
                the order of summation. None: any order.
        """
        device = self.backend.device
        self.loss = torch.zeros((), dtype=sum_dtype(device), device=device)
        self.part = torch.zeros_like(self.loss)
        self.has_parts = False
        self.has_exact_loss = True
        self.is_reached_anywhere: Sequence[bool] = ()
        self.drop_groups()
        self._parts: Gradients = [None] * len(self._parameters)
        self._reached = [False] * len(self._parameters)  # by a backward of an earlier chunk
        self._chunks: ChunkSums | None = None
        if chunk_tree is not None:
            self._chunks = ChunkSums(chunk_tree, self.backend.process_index)

    def drop_groups(self) -> None:
        """Forget the groups, the gradients of their terms, and the loss."""
        self.groups: list[Group] | None = None
        self.values: list[float] = []
        self._buffers: list[Gradients] = []
        self._scales: list[float] = []  # power of two near each group's divisor
        self.loss = torch.zeros_like(self.loss)

    def use_groups(self, groups: list[Group]) -> None:
        """Use other groups. Those that were used before keep their sums; those of others are 0."""
        before = [id(group) for group in self.groups or []]
        kept = [before.index(id(g)) if id(g) in before else None for g in groups]
        if len(before) == 1 and len(groups) > 1:  # whose values are told apart from now on
            self.values = [float(self.loss)]
        values, buffers, scales = self.values, self._buffers, self._scales
        self.groups = groups
        self._clear_buffers()
        for index, old in enumerate(kept):
            if old is not None:
                self.values[index] = values[old]
                self._buffers[index] = buffers[old]
                self._scales[index] = scales[old]

    def has_gradients_of(self, group: Group) -> bool:
        """Whether a backward of the window has added to the gradients of a group in use."""
        index = [id(g) for g in self.groups].index(id(group))
        return any(gradient is not None for gradient in self._buffers[index])

    def unfinished(self) -> Gradients:
        """Return for each parameter the undivided sum of a group that reaches it, or None."""
        result: Gradients = [None] * len(self._parameters)
        for buffer in self._buffers:
            result = [known if g is None else g for known, g in zip(result, buffer, strict=True)]
        return result

    def _clear_buffers(self) -> None:
        """Set the sums of the groups to zero."""
        number = len(self.groups or [])
        self.values = [0.0] * number
        self._buffers = [[None] * len(self._parameters) for _ in range(number)]
        self._scales = [0.0] * number

    # Micro-batches

    def add(
        self,
        loss: Tensor,
        readings: Sequence[Reading],
        data_terms: Sequence[Reading],
        *,
        true_divisor: Callable[[Reading], float],
        retain_graph: bool = False,
        sync: Sync = nullcontext,
    ) -> None:
        """Run the backward of a micro-batch's loss, and add its undivided gradients to the sums.

        Args:
            loss: The loss.
            readings: Its terms.
            data_terms: Those of them that are in groups; on the host if there are several terms.
            true_divisor: Returns what a reading on the host adds to the divisor of the window.
            retain_graph: Whether the loop runs another backward through the same graph.
            sync: Returns the context of the backward.
        """
        divisors = {reading.key: reading.divisor for reading in data_terms}
        if len(readings) > 1:
            divisors = {reading.key: true_divisor(reading) for reading in data_terms}
        has_several_groups = len(self.groups) > 1
        values = self._values_by_group(loss, readings, divisors) if has_several_groups else None
        has_penalties = len(readings) > len(data_terms)
        used = [
            index
            for index, group in enumerate(self.groups)
            if not divisors.keys().isdisjoint(group.keys) or (index == 0 and has_penalties)
        ]
        if self.is_full_batch and used:
            scales = _full_batch_scales(readings, divisors)
            self._backward_into(0, loss, readings, scales, retain_graph, sync)
            used = []
        elif has_penalties:
            group = self.groups[0]
            group.of_penalties.append(float(divisors.get(group.keys[0], 0.0)))
        for index in used:
            scales = self._scales_of(index, readings, divisors)
            is_kept = retain_graph or index != used[-1]
            self._backward_into(index, loss, readings, scales, is_kept, sync)
        self._add_loss(loss, data_terms)
        if values is not None:
            self._add_values(values, divisors)

    def add_part(
        self,
        part: Tensor,
        loss: Tensor,
        readings: Sequence[Reading],
        *,
        retain_graph: bool = False,
        sync: Sync = nullcontext,
    ) -> None:
        """Run the backward of a micro-batch's part of a loss of the whole window: the parts of all
        micro-batches add up to it, and are divided by nothing.

        Args:
            part: The part, a scalar.
            loss: The micro-batch's loss, from the same forward.
            readings: Its terms.
            retain_graph: Whether another backward follows through the same graph.
            sync: Returns the context of the backward, in each part.
        """
        if not part.requires_grad:
            return
        earlier = [parameter.grad for parameter in self._parameters]
        set_gradients(self._parameters, self._parts)
        with ExitStack() as stack:
            stack.enter_context(sync())
            stack.enter_context(self._without_hooks())
            total = part
            if self.backend.is_sharded and loss.requires_grad:
                # FSDP gathers parameters where a gradient enters outputs: let zeros enter there.
                terms = [reading.term for reading in readings if reading.term is not None]
                stack.enter_context(undivided(terms, [0.0] * len(terms)))
                total = part + (loss if terms else loss * 0)
            self.backend.scaled(total).backward(retain_graph=retain_graph)
        self._parts = [parameter.grad for parameter in self._parameters]
        set_gradients(self._parameters, earlier)
        self.part = self.part + part.detach().to(self.part.dtype)

    def add_nothing(
        self,
        loss: Tensor,
        readings: Sequence[Reading],
        *,
        retain_graph: bool = False,
        sync: Sync = nullcontext,
    ) -> None:
        """Run the backward of a filler with a gradient of zero, if a backward is a collective."""
        self.agree_on_first_scale(())
        if not self.backend.is_sharded or not loss.requires_grad:
            return
        terms = [reading.term for reading in readings if reading.term is not None]
        nothing = loss if terms else loss * 0
        hooks = undivided(terms, [0.0] * len(terms))
        with sync():
            self.backend.run_backward(nothing, hooks, retain_graph=retain_graph)

    def _backward_into(
        self,
        index: int,
        loss: Tensor,
        readings: Sequence[Reading],
        scales: Sequence[float | Tensor],
        retain_graph: bool,
        sync: Sync,
    ) -> None:
        """Run one backward, with `.grad` being the buffer of a group meanwhile."""
        if not loss.requires_grad:
            return
        is_sharded = self.backend.is_sharded
        earlier = [parameter.grad for parameter in self._parameters]
        if not is_sharded:
            set_gradients(self._parameters, self._buffers[index])
        terms = [reading.term for reading in readings if reading.term is not None]
        hooks: AbstractContextManager[None] = undivided(terms, scales)
        scaled = loss
        if len(terms) != len(readings):
            hooks = nullcontext()
            scaled = loss * scales[0]
        with sync(), self._without_hooks():
            self.backend.run_backward(scaled, hooks, retain_graph=retain_graph)
        self._buffers[index] = [parameter.grad for parameter in self._parameters]
        if not is_sharded:
            set_gradients(self._parameters, earlier)

    def _without_hooks(self) -> AbstractContextManager[None]:
        """Within the block, hooks of parameters get no gradient: that of the window comes. Those of
        shards, which FSDP does not call, are left alone.
        """
        return nullcontext() if self.backend.is_sharded else hooks_suspended(self._parameters)

    # Scales

    def _scales_of(
        self,
        index: int,
        readings: Sequence[Reading],
        divisors: Mapping[TermKey, float | Tensor],
    ) -> list[float | Tensor]:
        """Return what each term's undivided gradient is multiplied by in a group's buffer."""
        group = self.groups[index]
        if not self._scales[index]:
            self._scales[index] = self._power_of_two_near(group, divisors)
        scale = self._scales[index]
        scales: list[float | Tensor] = []
        for reading in readings:
            if reading.key in group.keys:
                scales.append(1.0 / (group.ratios.get(reading.key, 1.0) * scale))
            elif reading.key not in divisors and index == 0:
                # A penalty, the same in every micro-batch: it counts by the micro-batch's share.
                scales.append(divisors.get(group.keys[0], 0.0) / scale)
            else:
                scales.append(0.0)
        return scales

    def _power_of_two_near(self, group: Group, divisors: Mapping[TermKey, float | Tensor]) -> float:
        """Return a power of two near the expected divisor of the window, so that fp16 does not
        overflow; 1 in other precisions. Multiplying by it is exact.
        """
        if not self.backend.has_loss_scale:
            return 1.0
        if self.backend.is_sharded:
            return 2.0 ** (self._first_exponent or 0)
        first = max(1.0, float(divisors.get(group.keys[0], 0.0)))
        if self._chunks is not None:  # the same for a chunk on any number of ranks
            return 2.0 ** _exponent(first)
        return 2.0 ** _exponent(first * self.num_micro_batches)

    def agree_on_first_scale(self, readings: Sequence[Reading]) -> None:
        """Let all ranks with shards multiply by the same power of two before the first window's
        end. A collective: each rank calls it in its first micro-batch, also in a filler.
        """
        is_scaled = self.backend.has_loss_scale
        if not is_scaled or not self.backend.is_sharded or self._first_exponent is not None:
            return
        divisors = [float(reading.divisor) * self.num_micro_batches for reading in readings[:1]]
        exponent = max(map(_exponent, divisors), default=0)
        self._first_exponent = self.backend.max_over_ranks(exponent)

    # The loss

    def _add_loss(self, loss: Tensor, data_terms: Sequence[Reading]) -> None:
        """Add the micro-batch's loss, weighted by its divisor, for the mean loss of the window."""
        if not data_terms:
            return
        first = data_terms[0]
        value = number(loss)
        if isinstance(value, Tensor):
            value = value.to(self.loss.dtype)
        if any(not isinstance(r.divisor, Tensor) and is_empty(r) for r in data_terms[1:]):
            # Of a term without targets.
            value = torch.as_tensor(value, dtype=self.loss.dtype).nan_to_num()
        if first.term is None:
            self.loss += value
            return
        divisor = first.divisor
        if isinstance(divisor, Tensor):
            self.loss += torch.where(divisor == 0, 0.0, value * divisor)
        elif divisor:
            self.loss += value * divisor

    def _values_by_group(
        self, loss: Tensor, readings: Sequence[Reading], divisors: Mapping[TermKey, float]
    ) -> list[float]:
        """Return what the terms of each group add to a micro-batch's loss, 0 for terms without
        targets (0 / 0). One group's values follow from those of the others; of several unknown
        groups, the first one gets all, and the window's loss is not exact.
        """
        known: list[float | None] = []
        for group in self.groups:
            of_group = [
                None if r.term is None else r.term.value()
                for r in readings
                if r.key in group.keys and divisors.get(r.key)
            ]
            is_known = all(value is not None for value in of_group)
            known.append(float(sum(of_group)) if is_known else None)
        unknown = [index for index, value in enumerate(known) if value is None]
        values = [value or 0.0 for value in known]
        rest = _mean_of(loss, readings) - sum(values)
        is_finite = math.isfinite(rest)
        if len(unknown) > 1 or (unknown and not is_finite):
            self.has_exact_loss = False
        if is_finite:  # without unknown groups, it is that of penalties
            values[unknown[0] if unknown else 0] += rest
        return values

    def _add_values(
        self, values: Sequence[float], divisors: Mapping[TermKey, float | Tensor]
    ) -> None:
        """Add the values of each group, weighted by its divisor, for the window's mean loss."""
        for index, group in enumerate(self.groups):
            divisor = float(divisors.get(group.keys[0], 0.0))
            if divisor:
                self.values[index] += values[index] * divisor

    # For same bits: the sums of chunks

    def end_micro_batch(self) -> None:
        """For same bits, move what the micro-batch added to the sums of the window's chunks."""
        if self._chunks is None:
            return
        for buffer, scale in zip(self._buffers, self._scales, strict=True):
            gradients = [gradient for gradient in buffer if gradient is not None]
            if gradients:
                torch._foreach_mul_(gradients, scale)  # by a power of two, which is exact
        self._reached = self.reached()
        self._chunks.add(self._flat())
        self.loss = torch.zeros_like(self.loss)
        self.part = torch.zeros_like(self.part)
        self._parts = [None] * len(self._parameters)
        self._clear_buffers()

    def _flat(self) -> list[Tensor]:
        """Return all sums in one list: loss and values as one tensor, then the gradients of each
        group, with zeros for those that are None; the parts last, if there are any.
        """
        numbers = torch.stack([self.loss, self.part])
        values = torch.tensor(self.values, dtype=numbers.dtype, device=numbers.device)
        buffers = [*self._buffers, self._parts] if self.has_parts else self._buffers
        gradients = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for buffer in buffers
            for parameter, gradient in zip(self._parameters, buffer, strict=True)
        ]
        return [torch.cat([numbers, values]), *gradients]

    def _take_chunks(self) -> None:
        """For same bits, take the sums of all chunks of all ranks. A collective."""
        numbers, *gradients = self._chunks.total(self._flat(), self.backend.num_processes)
        self.loss = numbers[0]
        self.part = numbers[1]
        self.values = numbers[2:].tolist()
        self._scales = [1.0] * len(self._buffers)
        size = len(self._parameters)
        buffers = [
            [
                gradient if is_reached else None
                for gradient, is_reached in zip(of_buffer, self.is_reached_anywhere, strict=True)
            ]
            for of_buffer in (gradients[i : i + size] for i in range(0, len(gradients), size))
        ]
        if self.has_parts:
            self._parts = buffers.pop()
        self._buffers = buffers

    # What was reached

    def reached(self) -> list[bool]:
        """Return for each parameter whether a backward of the window has reached it."""
        if self.backend.is_stage:
            return [parameter.grad is not None for parameter in self._parameters]
        reached = self._reached
        for buffer in (*self._buffers, self._parts):
            reached = [r or g is not None for r, g in zip(reached, buffer, strict=True)]
        return reached

    def has_gradients(self) -> bool:
        """Whether a backward of the window has added to the gradients of its groups."""
        in_buffers = any(g is not None for buffer in self._buffers for g in buffer)
        return in_buffers or any(self._reached)

    # The window's end

    def take_totals(
        self, loss: Tensor, found: Mapping[str, list[float]], shares: Sequence[float]
    ) -> Tensor:
        """Give the groups their divisors over all ranks.

        Args:
            loss: The sum of `loss` over all ranks.
            found: Name of a number -> the sums of it over all ranks.
            shares: The share of each group's divisor that was read.

        Returns:
            The window's mean loss, a scalar.
        """
        groups = self.groups or []
        totals = found["totals"]
        values = found["values"]
        (part,) = found["parts"]
        if self._chunks is not None:
            totals = self._exact_totals()
            self._take_chunks()
            loss = self.loss
            part = float(self.part)
            values = self.values
        raised = raised_divisors(found["raised"])
        totals = [
            total / share or divisor
            for total, share, divisor in zip(totals, shares, raised, strict=True)
        ]
        for group, total in zip(groups, totals, strict=True):
            group.total = total
        mean = loss / (totals[0] or 1.0) if totals else loss
        if len(groups) > 1:
            means = [value / (total or 1.0) for value, total in zip(values, totals, strict=True)]
            mean = torch.full_like(mean, sum(means))
        return mean + part

    def _exact_totals(self) -> list[float]:
        """Return the divisors of all ranks, summed exactly, so that no order of summation matters.
        A collective.
        """
        groups = self.groups or []
        of_ranks = self.backend.gather_objects([group.divisors for group in groups])
        return [
            math.fsum(divisor for of_rank in of_ranks for divisor in of_rank[index])
            for index in range(len(groups))
        ]

    def take_shards(self) -> None:
        """Take the gradients that are in `.grad`: those that FSDP reduced, also on a rank that had
        fillers only, and those of a pipeline's schedule.
        """
        if len(self.groups or []) == 1:
            self._scales = [self._power_of_two_near(self.groups[0], {})]
            self._buffers = [[parameter.grad for parameter in self._parameters]]

    def mean_gradients(self) -> Gradients:
        """Return the gradients of the window's mean loss: the sums over all ranks, divided. They
        may be the sums themselves, to which another backward of the window may still add.
        """
        result: Gradients = [None] * len(self._parameters)
        averages_over = self.backend.averages_over
        groups = self.groups or []
        for index, (group, buffer) in enumerate(zip(groups, self._buffers, strict=True)):
            factor = 1.0  # the backward of a full batch has divided
            if not self.is_full_batch:
                if not group.total:  # the sums stay: a later micro-batch may have targets
                    zeros = [g if g is None else torch.zeros_like(g) for g in buffer]
                    _add_scaled(result, zeros, 1.0)
                    continue
                factor = self._scales[index] / group.total
            _add_scaled(result, buffer, factor * averages_over)
            self._scales[index] = group.total / averages_over
        _add_scaled(result, self._parts, averages_over)
        if self._chunks is not None or self.backend.num_processes == 1:
            return result
        return self._summed_over_replicas(result)

    def _summed_over_replicas(self, gradients: Gradients) -> Gradients:
        """Sum gradients over the ranks that hold the same parameters, in buckets."""
        kept = [parameter.grad for parameter in self._parameters]
        set_gradients(self._parameters, gradients)
        self.backend.sum_over_replicas(self._parameters, self.is_reached_anywhere)
        summed = [parameter.grad for parameter in self._parameters]
        set_gradients(self._parameters, kept)
        return summed


def _mean_of(loss: Tensor, readings: Sequence[Reading]) -> float:
    """Return a micro-batch's loss; a sum that the loop passed with num_targets is divided."""
    value = float(loss.detach())
    if readings and readings[0].term is None:
        return value / (float(readings[0].divisor) or 1.0)
    return value


def _add_scaled(result: Gradients, buffer: Gradients, factor: float) -> None:
    """Multiply the gradients of a group by a factor, and add them to the result."""
    reached = [index for index, gradient in enumerate(buffer) if gradient is not None]
    gradients = [buffer[index] for index in reached]
    if not gradients:
        return
    torch._foreach_mul_(gradients, factor)
    for index, gradient in zip(reached, gradients, strict=True):
        result[index] = gradient if result[index] is None else result[index] + gradient


def _full_batch_scales(
    readings: Sequence[Reading], divisors: Mapping[TermKey, float | Tensor]
) -> list[float | Tensor]:
    """Return what each term's undivided gradient is multiplied by to be that of the mean, 0 for
    terms without targets. A penalty counts once, whatever is beside it.
    """
    return [_reciprocal(divisors.get(reading.key, 1.0)) for reading in readings]


def _reciprocal(divisor: float | Tensor) -> float | Tensor:
    """Return 1 / divisor, 0 for 0; one on an accelerator is not read."""
    if isinstance(divisor, Tensor):
        return torch.where(divisor == 0, 0.0, 1.0 / divisor)
    return 1.0 / divisor if divisor else 0.0


def _exponent(divisor: float) -> int:
    """Return the exponent of the power of two near a divisor; 0 for 0, infinities and NaN."""
    return round(math.log2(abs(divisor))) if divisor and math.isfinite(divisor) else 0
