"""Adds up the gradient of a window over its micro-batches, and divides it at the window's end.

    gradient of the window = sum over terms k of
        (sum over micro-batches of factor_k x gradient of numerator_k) / (sum of divisor_k)

Nothing is counted ahead: each loss is read when the loop passes it. Until the window's end `.grad`
of the parameters stays as the loop left it; the sums are kept here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor, nn

from hf_ga.engine.look.sample_count import SampleCount, check_samples
from hf_ga.engine.parameter_hooks import after_hooks, hooks_suspended
from hf_ga.engine.sums.chunk_sums import ChunkSums
from hf_ga.engine.sums.divisors import (
    DivisorChecks,
    Reading,
    TermKey,
    check_factor_sums,
    factors_of,
    is_empty,
    on_host,
    power_sums,
    squared_differences,
    true_divisor,
)
from hf_ga.engine.sums.groups import Group, Grouping
from hf_ga.engine.sums.same_terms import SameTerms
from hf_ga.errors import ConfigError, LossNotAdditive
from hf_ga.loss import StackSizes, Term, read_terms, undivided
from hf_ga.model.precision import sum_dtype
from hf_ga.order.chunks import ChunkTree
from hf_ga.order.length_plan import Computed
from hf_ga.parallel.backend import Backend, RankStatus

Gradients = list[Tensor | None]
SMALLEST_ID = 1 << 20  # Python's ids are addresses, indices are smaller


class WindowGradient:
    """The gradient of one window at a time, for the parameters that a loop trains.

    Args:
        backend: How ranks communicate.
        parameters: The trainable parameters, in the same order on all ranks.

    Attributes:
        readings: The terms that were read in this window, of all micro-batches.
        failure: An error of this rank that all ranks raise at the window's end.
        loss: The mean loss of the window so far or, after `finish`, of the whole window, a scalar.
            If terms in other proportions cannot be valued apart (sums that the loop wrote itself),
            it is the mean of the micro-batches' losses, weighted by the first one's divisors.
        must_repeat: Why the window must be computed once more, or None.
        must_pad: Whether it must be padded to its longest sample then.
        must_look: Whether it must be computed with a rehearsal then: its loss has a new form, or
            `must_try_widths`.
        must_try_widths: Whether that is because its micro-batches have several widths, and no
            sample was compared in two of them so far. The same on all ranks after `finish`.
        tries_widths: Whether `finish` may set it.
        same_terms: Which keys mean one term.
        samples: Which samples of the window were computed on this rank.
        tries_terms: Whether the window may be computed again to find out. None: a look finds out
            now.
        undecided: After `finish`, two keys of which that must be found out, or None.
        has_compared_widths: Whether a sample of the window was compared in two widths: before
            `finish` on this rank, afterwards on any.
        computed: Which tokens the model computes from now on: before `finish` on this rank,
            afterwards on all.
        widths: For each counted micro-batch so far, the number of elements of one sample.
        needs_padding: Whether later windows must be padded, too: before `finish` because of this
            rank, afterwards because of any. `begin` keeps it.
        earlier: `.grad` of the parameters when the window began.
        num_backwards: Number of backwards in this window.
        num_micro_batches: About how many micro-batches the window has on all ranks.
        has_parts: Whether micro-batches add parts of a loss of the whole window (see `add_part`).
    """

    def __init__(self, backend: Backend, parameters: Sequence[nn.Parameter]) -> None:
        """Make the sums for these parameters, and begin a window."""
        self.backend = backend
        self.parameters = list(parameters)
        self.checks = DivisorChecks()
        self.grouping = Grouping()
        self.same_terms = SameTerms()
        self._index_of = {id(p): index for index, p in enumerate(self.parameters)}
        self.stack_sizes = StackSizes()
        self._num_merged_pairs = 0
        self._has_hooks = False  # whether a parameter has one, on any rank
        self._first_exponent: int | None = None  # of shards' scale in the first window
        self.loss: Tensor | None = None
        self.num_micro_batches = 1
        self.needs_padding = False
        self.tries_widths = False
        self.tries_terms: bool | None = False
        self.begin()

    def begin(self, chunk_tree: ChunkTree | None = None) -> None:
        """Begin a window, or begin it again: forget all sums.

        Args:
            chunk_tree: For same bits, the tree over the micro-batches of the window, which fixes
                the order of summation. None: any order.
        """
        self.readings: list[Reading] = []
        self._switched_off: list[Reading] = []
        self.failure: Exception | None = None
        self.must_repeat: str | None = None
        self.must_pad = False
        self.must_look = False
        self.must_try_widths = False
        self.undecided: tuple[TermKey, TermKey] | None = None
        self.has_compared_widths = False
        self.computed = Computed.PADDED
        self.widths: list[float] = []
        self.samples = SampleCount()
        self.num_backwards = 0
        self.has_parts = False
        self._chunks: ChunkSums | None = None
        self.grouping.rename(self.same_terms.key_of)
        self.grouping.keep_apart(chunk_tree is not None)
        if chunk_tree is not None:
            self._chunks = ChunkSums(chunk_tree, self.backend.process_index)
        self._reached = [False] * len(self.parameters)  # by a backward of an earlier chunk
        self._groups: list[Group] | None = None
        self._buffers: list[Gradients] = []
        self._scales: list[float] = []  # power of two near each group's divisor
        self._value_sums: list[float] = []  # of each group's terms, times its divisor
        self._lacks_values = False
        self._has_new_terms = False
        self._factors: dict[TermKey, float] = {}  # of this rank's terms, at the window's end
        device = self.backend.device
        self._loss_sum = torch.zeros((), dtype=sum_dtype(device), device=device)
        self._parts: Gradients = [None] * len(self.parameters)  # see `add_part`
        self._part_sum = torch.zeros_like(self._loss_sum)
        self.earlier: Gradients = [p.grad for p in self.parameters]
        self._shown: Gradients | None = None

    @property
    def num_targets(self) -> float:
        """After `finish`, what the first term that the window has divides by, over all ranks."""
        return next((group.total for group in self._groups or [] if group.total), 0.0)

    # Reading

    def read(
        self, loss: Tensor, num_samples: int, num_targets: float | Tensor | None
    ) -> list[Reading]:
        """Read the terms of a micro-batch's loss, those that are switched off (a factor of 0) last.

        Args:
            loss: The loss, a scalar.
            num_samples: Number of samples of the micro-batch.
            num_targets: What the loss is a sum over. None: the loss is read.

        Raises:
            LossNotAdditive: If the loss is no sum of means.
        """
        if num_targets is not None:
            number = num_targets if isinstance(num_targets, Tensor) else float(num_targets)
            is_zero = loss.detach() == 0
            return [
                Reading(("num_targets",), None, num_samples, number, None, 1.0, is_zero=is_zero)
            ]
        num_changed = self.stack_sizes.num_changed
        terms = read_terms(
            loss,
            num_samples=num_samples,
            stack_sizes=self.stack_sizes,
            with_switched_off=True,
        )
        if self.stack_sizes.num_changed != num_changed and self.num_backwards:
            self.must_repeat = "what the loss stacks was found to be no losses of samples"
        keys = self._keys_of(terms)
        return [
            Reading(
                key,
                term,
                num_samples,
                term.divisor,
                term.count(),
                term.factor,
                num_elements=term.num_elements,
                num_nonzero=term.num_nonzero(),
                class_weights=term.class_weights(),
                ignores_width=term.ignores_width(),
            )
            for key, term in zip(keys, terms, strict=True)
        ]

    def _keys_of(self, terms: Sequence[Term]) -> list[TermKey]:
        """Return keys that are the same on all ranks: parameters by index, equal terms numbered."""
        keys: list[TermKey] = []
        num_equal: dict[TermKey, int] = {}
        for term in terms:
            identity = self._with_indices(term.identity)
            number = num_equal.get(identity, 0)
            num_equal[identity] = number + 1
            keys.append((*identity, number))
        return keys

    def _with_indices(self, identity: TermKey) -> TermKey:
        """Return an identity with the indices of parameters in place of their ids, in order. Those
        that are not trained (of a teacher) count as one.
        """
        if not isinstance(identity, tuple):
            return identity
        are_ids = [isinstance(part, int) and part > SMALLEST_ID for part in identity]
        if identity and all(are_ids):
            return tuple(sorted(self._index_of.get(part, -1) for part in identity))
        return tuple(self._with_indices(part) for part in identity)

    # Adding

    def add(
        self,
        loss: Tensor,
        readings: list[Reading],
        *,
        retain_graph: bool = False,
        sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run the backward of a micro-batch's loss, and add its undivided gradients to the sums.

        Args:
            loss: The loss.
            readings: Its terms, from `read`.
            retain_graph: Whether the loop runs another backward through the same graph.
            sync: Returns the context in which a sharded model reduces its gradients.
        """
        self._agree_on_first_scale(readings)
        data_terms = self._terms_to_group(readings)
        if len(readings) > 1:
            data_terms = on_host(data_terms)  # to compare the proportions of their divisors
        groups = self._groups_for(data_terms)
        if self.backend.is_sharded and len(groups) > 1:
            raise _too_many_groups([reading.name for reading in data_terms])
        self.readings += [reading.without_graph() for reading in readings]
        self.num_backwards += 1
        divisors = {reading.key: reading.divisor for reading in data_terms}
        if len(readings) > 1:
            divisors = {reading.key: true_divisor(reading) for reading in data_terms}
        penalties = len(readings) > len(data_terms)
        values = None
        if len(groups) > 1:
            values = self._values_by_group(loss, readings, divisors)
        used = [
            index
            for index, group in enumerate(groups)
            if not divisors.keys().isdisjoint(group.keys) or (index == 0 and penalties)
        ]
        for index in used:
            scales = self._scales_of(index, groups[index], readings, divisors)
            is_kept = retain_graph or index != used[-1]
            self._backward_into(index, loss, readings, scales, is_kept, sync)
        self._add_loss(loss, data_terms)
        if values is not None:
            self._add_values(values, divisors)
        elif len(groups) > 1:
            self._lacks_values = True

    def end_micro_batch(self) -> None:
        """For same bits, move what the micro-batch added to the sums of the window's chunks."""
        if self._chunks is None or self.must_repeat is not None:
            return  # if it is repeated, its groups may be others than those of earlier chunks
        for buffer, scale in zip(self._buffers, self._scales, strict=True):
            gradients = [gradient for gradient in buffer if gradient is not None]
            if gradients:
                torch._foreach_mul_(gradients, scale)  # by a power of two, which is exact
        self._reached = [a or b for a, b in zip(self._reached, self._has_sums(), strict=True)]
        self._chunks.add(self._flat_sums())
        self._forget_sums()

    def _flat_sums(self) -> list[Tensor]:
        """Return all sums in one list: loss and values as one tensor, then the gradients of each
        group, with zeros for those that are None; the parts last, if there are any.
        """
        numbers = torch.stack([self._loss_sum, self._part_sum])
        values = torch.tensor(self._value_sums, dtype=numbers.dtype, device=numbers.device)
        buffers = [*self._buffers, self._parts] if self.has_parts else self._buffers
        gradients = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for buffer in buffers
            for parameter, gradient in zip(self.parameters, buffer, strict=True)
        ]
        return [torch.cat([numbers, values]), *gradients]

    def _forget_sums(self) -> None:
        """Start with sums of zero, in the same groups."""
        num_groups = len(self._buffers)
        self._loss_sum = torch.zeros_like(self._loss_sum)
        self._part_sum = torch.zeros_like(self._part_sum)
        self._value_sums = [0.0] * num_groups
        self._scales = [0.0] * num_groups
        self._buffers = [[None] * len(self.parameters) for _ in range(num_groups)]
        self._parts = [None] * len(self.parameters)

    def _take_chunk_sums(self) -> None:
        """For same bits, take the sums of all chunks of all ranks. A collective."""
        templates = self._flat_sums()
        numbers, *gradients = self._chunks.total(templates, self.backend.num_processes)
        self._loss_sum = numbers[0]
        self._part_sum = numbers[1]
        self._value_sums = numbers[2:].tolist()
        self._scales = [1.0] * len(self._buffers)
        size = len(self.parameters)
        buffers = [
            [
                gradient if has_gradient else None
                for gradient, has_gradient in zip(part, self._has_gradient, strict=True)
            ]
            for part in (gradients[i : i + size] for i in range(0, len(gradients), size))
        ]
        if self.has_parts:
            self._parts = buffers.pop()
        self._buffers = buffers

    def _has_sums(self) -> list[bool]:
        """Return for each parameter whether any sum of it is not None."""
        if self.backend.is_stage:
            return [parameter.grad is not None for parameter in self.parameters]
        return [
            any(buffer[i] is not None for buffer in (*self._buffers, self._parts))
            for i in range(len(self.parameters))
        ]

    def add_part(
        self,
        part: Tensor,
        loss: Tensor,
        readings: Sequence[Reading],
        *,
        retain_graph: bool = False,
        sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run the backward of a micro-batch's part of a loss of the whole window: the parts of all
        micro-batches add up to it, and are divided by nothing.

        Args:
            part: The part, a scalar.
            loss: The micro-batch's loss, from the same forward.
            readings: Its terms.
            retain_graph: Whether another backward follows through the same graph.
            sync: Returns the context in which a sharded model reduces its gradients, in each part.
        """
        if not part.requires_grad:
            return
        earlier = [parameter.grad for parameter in self.parameters]
        self._set_gradients(self._parts)
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
        self._parts = [parameter.grad for parameter in self.parameters]
        self._set_gradients(earlier)
        self._part_sum = self._part_sum + part.detach().to(self._part_sum.dtype)

    def note_switched_off(self, readings: Sequence[Reading], *, is_counted: bool) -> None:
        """Remember terms that a micro-batch has with a factor of 0: others must have that, too."""
        self._switched_off += [
            replace(reading.without_graph(), is_counted=is_counted) for reading in readings
        ]

    def note_rehearsal(self, readings: Sequence[Reading]) -> None:
        """Learn from the terms of a rehearsal, whose gradient does not count."""
        self._agree_on_first_scale(readings)
        self._groups_for(self._terms_to_group(readings))
        of_rehearsal = [replace(reading, is_counted=False) for reading in readings]
        self.readings += [reading.without_graph() for reading in of_rehearsal]

    def turn_into_rehearsal(self) -> None:
        """Drop the sums of the window so far, whose samples come again. What `show` set stays."""
        self.readings = [replace(reading, is_counted=False) for reading in self.readings]
        self.num_backwards = 0
        self.samples = SampleCount()
        self._loss_sum = torch.zeros_like(self._loss_sum)
        self._groups = None
        self._buffers = []

    def add_nothing(
        self,
        loss: Tensor,
        readings: Sequence[Reading],
        *,
        retain_graph: bool = False,
        sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Run the backward of a filler with a gradient of zero, if a backward is a collective."""
        self._agree_on_first_scale(())
        if not self.backend.is_sharded or not loss.requires_grad:
            return
        terms = [reading.term for reading in readings if reading.term is not None]
        nothing = loss if terms else loss * 0
        hooks = undivided(terms, [0.0] * len(terms))
        with sync():
            self.backend.run_backward(nothing, hooks, retain_graph=retain_graph)

    def show(self, gradients: Gradients, *, times: int) -> None:
        """Set `.grad` to gradients within a window, for a loop that accumulates by hand.

        Args:
            gradients: The gradients of the mean so far.
            times: What they are multiplied by.
        """
        shown: Gradients = []
        multiples = [None if gradient is None else gradient * times for gradient in gradients]
        for parameter, gradient, earlier in zip(
            self.parameters, self._after_hooks(multiples), self.earlier, strict=True
        ):
            if gradient is not None:
                parameter.grad = gradient if earlier is None else earlier + gradient
            shown.append(parameter.grad)
        self._shown = shown

    def begin_again_if_zeroed(self) -> None:
        """Begin a window by hand again if the loop has set the gradients that `show` set to zero,
        before the first backward, or after any."""
        now: Gradients = [parameter.grad for parameter in self.parameters]
        if self._shown is None:
            self.earlier = now
            return
        pairs = [(a, b) for a, b in zip(now, self._shown, strict=True) if b is not None]
        if pairs and all(a is None or not bool(a.any()) for a, _ in pairs):
            self.begin()

    def _terms_to_group(self, readings: Sequence[Reading]) -> list[Reading]:
        """Return the terms of a loss that are grouped by their divisors: no penalties, which take
        the share of the terms beside them (in a backward of their own, that of a micro-batch).
        """
        data_terms = [r for r in readings if r.term is None or not r.term.is_penalty]
        if len(data_terms) == len(readings):
            return data_terms
        if not data_terms:
            return list(readings)
        grouped = {key for keys in self.grouping.structure for key in keys}
        return [r for r in readings if r in data_terms or r.key in grouped]

    def _groups_for(self, data_terms: Sequence[Reading]) -> list[Group]:
        """Return the groups of the window, split where a micro-batch is out of proportion."""
        keys = [reading.key for reading in data_terms]
        if self.grouping.add_terms(keys):
            self._has_new_terms = True
            self._regroup()
        if self._groups is None:
            self._regroup()
        if len(data_terms) < 2 and len(self.grouping.structure) < 2:
            single = self._groups[0].keys if self._groups else []
            if len(single) < 2:
                return self._groups
        divisors = {reading.key: true_divisor(reading) for reading in on_host(data_terms)}
        misfits = [group for group in self._groups if not group.fits(divisors)]
        for group in misfits:
            self.grouping.split(group, divisors)
        if misfits:
            self._has_new_terms = True
            self._regroup()
        for group in self._groups:
            group.learn(divisors)
        return self._groups

    def _regroup(self) -> None:
        """Make the groups of the window anew. What was added in other groups must be repeated."""
        if self._has_group_sums():
            self.must_repeat = "terms of the loss have divisors in other proportions"
        self._groups = [Group(list(keys)) for keys in self.grouping.structure]
        self._buffers = [[None] * len(self.parameters) for _ in self._groups]
        self._scales = [0.0] * len(self._groups)
        self._value_sums = [0.0] * len(self._groups)

    def _has_group_sums(self) -> bool:
        """Whether a backward of the window has added to the sums of its groups, or will in a stage
        of a pipeline.
        """
        if self.backend.is_stage:
            return self.num_backwards > 0
        in_buffers = (gradient is not None for buffer in self._buffers for gradient in buffer)
        return any(in_buffers) or any(self._reached)

    def _scales_of(
        self,
        index: int,
        group: Group,
        readings: Sequence[Reading],
        divisors: Mapping[TermKey, float | Tensor],
    ) -> list[float | Tensor]:
        """Return what each term's undivided gradient is multiplied by in a group's buffer."""
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

    def _agree_on_first_scale(self, readings: Sequence[Reading]) -> None:
        """Let all ranks with shards multiply by the same power of two before the first window's
        end. A collective: each rank calls it in its first micro-batch, also in a filler.
        """
        is_scaled = self.backend.has_loss_scale
        if not is_scaled or not self.backend.is_sharded or self._first_exponent is not None:
            return
        divisors = [float(reading.divisor) * self.num_micro_batches for reading in readings[:1]]
        exponent = max(map(_exponent, divisors), default=0)
        self._first_exponent = self.backend.max_over_ranks(exponent)

    def _backward_into(
        self,
        index: int,
        loss: Tensor,
        readings: Sequence[Reading],
        scales: Sequence[float | Tensor],
        retain_graph: bool,
        sync: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Run one backward, with `.grad` being the buffer of a group meanwhile."""
        if not loss.requires_grad:
            return
        is_sharded = self.backend.is_sharded
        earlier = [parameter.grad for parameter in self.parameters]
        if not is_sharded:
            self._set_gradients(self._buffers[index])
        terms = [reading.term for reading in readings if reading.term is not None]
        hooks: AbstractContextManager[None] = undivided(terms, scales)
        scaled = loss
        if len(terms) != len(readings):
            hooks = nullcontext()
            scaled = loss * scales[0]
        with sync(), self._without_hooks():
            self.backend.run_backward(scaled, hooks, retain_graph=retain_graph)
        self._buffers[index] = [parameter.grad for parameter in self.parameters]
        if not is_sharded:
            self._set_gradients(earlier)

    def _without_hooks(self) -> AbstractContextManager[None]:
        """Within the block, hooks of parameters get no gradient: that of the window comes. Those of
        shards, which FSDP does not call, are left alone.
        """
        return nullcontext() if self.backend.is_sharded else hooks_suspended(self.parameters)

    def _after_hooks(self, gradients: Gradients) -> Gradients:
        """Return what hooks of parameters make of the window's gradients. A collective if any rank
        has hooks.

        Raises:
            ConfigError: If they make something else of them on another rank: weights would differ.
        """
        if not self._has_hooks or self.backend.is_sharded:
            return gradients
        with self.backend.failing_on_all_ranks():
            changed = [
                None if gradient is None else after_hooks(parameter, gradient)
                for parameter, gradient in zip(self.parameters, gradients, strict=True)
            ]
        # As text, in which NaN equals NaN.
        found = [repr((float(g.norm()), float(g.sum()))) for g in changed if g is not None]
        if any(other != found for other in self.backend.gather_objects(found)):
            raise ConfigError(
                "a hook on a parameter changes the window's gradient on one process in another way "
                "than on the others, so their weights would differ: register it on all of them."
            )
        return changed

    def has_sums_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether a backward of this window has reached one of these parameters."""
        indices = [self._index_of[id(p)] for p in parameters if id(p) in self._index_of]
        if any(self._reached[index] for index in indices):
            return True
        return any(buffer[index] is not None for buffer in self._buffers for index in indices)

    def _set_gradients(self, gradients: Gradients) -> None:
        """Set `.grad` of all parameters."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _add_loss(self, loss: Tensor, data_terms: Sequence[Reading]) -> None:
        """Add the micro-batch's loss, weighted by its divisor, for the mean loss of the window."""
        if not data_terms:
            return
        first = data_terms[0]
        value = loss.detach().to(self._loss_sum.dtype).reshape(())
        if any(not isinstance(r.divisor, Tensor) and is_empty(r) for r in data_terms[1:]):
            value = value.nan_to_num()  # of a term without targets
        if first.term is None:
            self._loss_sum += value
            return
        divisor = first.divisor
        if isinstance(divisor, Tensor):
            self._loss_sum += torch.where(divisor == 0, 0.0, value * divisor)
        elif divisor:
            self._loss_sum += value * divisor

    def _values_by_group(
        self, loss: Tensor, readings: Sequence[Reading], divisors: Mapping[TermKey, float]
    ) -> list[float] | None:
        """Return what the terms of each group add to a micro-batch's loss, 0 for terms without
        targets (0 / 0); None if unknown. One group's values follow from those of the others.
        """
        known: list[float | None] = []
        for group in self._groups:
            of_group = [
                r.term.value() for r in readings if r.key in group.keys and divisors.get(r.key)
            ]
            is_known = all(value is not None for value in of_group)
            known.append(float(sum(of_group)) if is_known else None)
        unknown = [index for index, value in enumerate(known) if value is None]
        if len(unknown) > 1:
            return None
        rest = float(loss.detach()) - sum(value for value in known if value is not None)
        if unknown:
            known[unknown[0]] = rest
        elif math.isfinite(rest):
            known[0] += rest  # penalties
        return known

    def _add_values(
        self, values: Sequence[float], divisors: Mapping[TermKey, float | Tensor]
    ) -> None:
        """Add the values of each group, weighted by its divisor, for the window's mean loss."""
        for index, group in enumerate(self._groups):
            divisor = float(divisors.get(group.keys[0], 0.0))
            if divisor:
                self._value_sums[index] += values[index] * divisor

    # The window's end

    def finish(self, *, is_padded: bool, can_repeat: bool, keeps_sums: bool) -> bool:
        """Check the window's divisors, sum over all ranks, and set `.grad` to the gradient of the
        window's mean loss. A collective: each rank must call it once per window.

        Args:
            is_padded: Whether all micro-batches of the window have the same padded width.
            can_repeat: Whether the loop can be given the window once more.
            keeps_sums: Whether another backward may follow in this window, which adds to the sums.

        Returns:
            Whether `.grad` is set. False: the window must be computed again (see `must_repeat`).

        Raises:
            Exception: The error of this rank.
            ProcessFailed: If another rank failed.
        """
        readings = self._checked_readings(is_padded)
        self._add_totals(readings)
        if not self._agree_on_groups(can_repeat):
            # An earlier backward of the window showed its sums, or FSDP has reduced them there.
            self._set_gradients(self.earlier)
            return False
        if self.num_backwards > 1 or self.backend.num_processes > 1:
            self.stack_sizes.settle()
        gradients = self._after_hooks(self._mean_gradients(keeps_sums))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient
        return True

    def withdraw(self) -> None:
        """Set `.grad` back to what it was before the window, which is computed once more."""
        self._set_gradients(self.earlier)

    def mean_so_far(self, *, is_padded: bool) -> Gradients:
        """Return the gradient of the mean loss of the micro-batches so far, summed over all ranks,
        for a loop that accumulates by hand. A collective.
        """
        readings = self._checked_readings(is_padded)
        self._add_totals(readings)
        self._agree_on_groups(can_repeat=False)
        return self._mean_gradients(keeps_sums=True)

    def _checked_readings(self, is_padded: bool) -> list[Reading]:
        """Return the window's readings on the host; keep the error if they cannot be trusted."""
        readings = on_host(self.readings)
        self._switched_off = on_host(self._switched_off)
        if self.failure is not None:
            return readings
        try:
            if not self.checks.check(readings, self._switched_off, is_padded=is_padded):
                self.must_pad = True
                self.needs_padding = True
        except Exception as error:
            self.failure = error
        return readings

    def _add_totals(self, readings: Sequence[Reading]) -> None:
        """Add up the divisors of each group, and note the terms' factors."""
        self._factors = factors_of([*self._switched_off, *readings])
        for group in self._groups or []:
            group.divisors = [
                self.checks.true_divisor(reading)
                for reading in readings
                if reading.is_counted and reading.key == group.keys[0]
            ]
            group.total = math.fsum(group.divisors)

    def _agree_on_groups(self, can_repeat: bool) -> bool:
        """Exchange the status of all ranks: failures, repetitions, divisors. Returns whether the
        window is complete; if not, all ranks repeat it.
        """
        if self._groups is None and self.grouping.structure:
            self._regroup()  # this rank had fillers only, but sends as many numbers as the others
        if self.backend.num_processes > 1 and self._is_new_anywhere():
            self._merge_stack_sizes()
            self._merge_same_terms()
            self._merge_groups()
        groups = self._groups or []
        keys = [key for group in groups for key in group.keys]
        if self.must_pad:
            self.must_repeat = (
                "a sample's gradient, or a divisor, depends on the padded width or on the other "
                "samples of its micro-batch"
            )
        loss_sum, found = self._sum_over_ranks(groups, keys, can_repeat)
        self.must_pad = bool(found["must_pad"][0])
        self.must_look = bool(found["must_look"][0])
        self.needs_padding = bool(found["needs_padding"][0])
        self.has_compared_widths = bool(found["has_compared_widths"][0])
        self._has_hooks = bool(found["has_hooks"][0])
        if found["has_padded"][0]:
            self.computed = Computed.PADDED
        elif found["has_no_rows"][0]:
            self.computed = Computed.REAL
        if found["must_repeat"][0]:
            self.must_repeat = self.must_repeat or "another process repeats it"
            return False
        has_several_widths = bool(squared_differences(tuple(found["widths"])))
        if self.tries_widths and has_several_widths and not self.has_compared_widths:
            self.must_try_widths = True
            self.must_look = True
            self.must_repeat = "it has several widths, and it was not tried whether padding matters"
            return False
        check_samples(tuple(found["samples"]), self.backend.num_processes)
        self._decide_terms(keys, found["factors"])
        if self.undecided is not None:
            return False
        self._check_factors(keys, found["factors"])
        if self._split_groups(groups, found["ratios"]):
            dead_end = self._failure_or_dead_end(can_repeat)
            if dead_end is not None:
                raise dead_end
            return False
        if self.backend.is_sharded:
            self._take_shards(groups)
        self._take_totals(groups, loss_sum, found)
        return True

    def _sum_over_ranks(
        self, groups: Sequence[Group], keys: Sequence[TermKey], can_repeat: bool
    ) -> tuple[Tensor, dict[str, list[float]]]:
        """Return the sums over all ranks of the loss, and of what else the window's end depends on,
        by name. Raises an error of any rank on all. A collective, and but for that of the gradients
        the only one of a window that is like the last one.
        """
        own = {
            "must_repeat": [float(self.must_repeat is not None)],
            "must_pad": [float(self.must_pad)],
            "must_look": [float(self.must_look)],
            "needs_padding": [float(self.needs_padding)],
            "lacks_values": [float(self._lacks_values)],
            "has_compared_widths": [float(self.has_compared_widths)],
            "has_padded": [float(self.computed < Computed.REAL)],
            "has_no_rows": [float(self.computed < Computed.ROWS)],
            "has_hooks": [float(any(parameter._backward_hooks for parameter in self.parameters))],
            "widths": power_sums(self.widths),
            "parts": [float(self._part_sum)],
            "samples": self.samples.sums(),
            "totals": [group.total for group in groups],
            "values": self._value_sums,
            "factors": self._factor_sums(keys),
            "ratios": self._ratio_sums(groups),
        }
        status = RankStatus(
            loss=self._loss_sum,
            counts=tuple(chain.from_iterable(own.values())),
            has_gradient=[a or b for a, b in zip(self._reached, self._has_sums(), strict=True)],
            failure=self._failure_or_dead_end(can_repeat),
        )
        status = self.backend.all_reduce_status(status)
        self._has_gradient = status.has_gradient
        sums = iter(status.counts)
        found = {name: list(islice(sums, len(numbers))) for name, numbers in own.items()}
        return status.loss, found

    def _take_totals(
        self, groups: Sequence[Group], loss_sum: Tensor, found: Mapping[str, list[float]]
    ) -> None:
        """Give the groups their divisors over all ranks, and compute the window's mean loss."""
        totals = found["totals"]
        value_sums = found["values"]
        (sum_of_parts,) = found["parts"]
        if self._chunks is not None:
            totals = self._exact_totals(groups)
            self._take_chunk_sums()
            loss_sum = self._loss_sum
            sum_of_parts = float(self._part_sum)
            value_sums = self._value_sums
        for group, total in zip(groups, totals, strict=True):
            group.total = total
        self.loss = loss_sum / (totals[0] or 1.0) if totals else loss_sum
        if len(groups) > 1 and not found["lacks_values"][0]:
            means = [
                value / (total or 1.0) for value, total in zip(value_sums, totals, strict=True)
            ]
            self.loss = torch.full_like(self.loss, sum(means))
        self.loss = self.loss + sum_of_parts

    def _exact_totals(self, groups: Sequence[Group]) -> list[float]:
        """Return the divisors of all ranks, summed exactly, so that no order of summation matters.
        A collective.
        """
        of_ranks = self.backend.gather_objects([group.divisors for group in groups])
        return [
            math.fsum(divisor for of_rank in of_ranks for divisor in of_rank[index])
            for index in range(len(groups))
        ]

    def _factor_sums(self, keys: Sequence[TermKey]) -> list[float]:
        """Return what shows whether all ranks have the same factors: three numbers for each grouped
        term, and for the sum of the others', of penalties. Nothing on a single rank.
        """
        if self.backend.num_processes == 1:
            return []
        others = [factor for key, factor in self._factors.items() if key not in keys]
        factors = [*(self._factors.get(key) for key in keys), sum(others) if others else None]
        of_this_rank = [[] if factor is None else [factor] for factor in factors]
        return [number for numbers in of_this_rank for number in power_sums(numbers)]

    def _ratio_sums(self, groups: Sequence[Group]) -> list[float]:
        """Return what shows whether the terms of each group have the same proportions on all ranks:
        three numbers for each term but the first one. Nothing on a single rank.
        """
        if self.backend.num_processes == 1:
            return []
        ratios = [group.ratios.get(key) for group in groups for key in group.keys[1:]]
        of_this_rank = [[] if ratio is None else [ratio] for ratio in ratios]
        return [number for numbers in of_this_rank for number in power_sums(numbers)]

    def _split_groups(self, groups: Sequence[Group], sums: Sequence[float]) -> bool:
        """Give each term its own group that has other proportions on another rank, by
        `_ratio_sums`, and let the window be computed again. The same on all ranks.
        """
        later = [key for group in groups for key in group.keys[1:]]
        misfits = (
            [
                key
                for i, key in enumerate(later)
                if squared_differences(tuple(sums[3 * i : 3 * i + 3]))
            ]
            if sums
            else []
        )
        if misfits and self.backend.is_sharded:
            names = {reading.key: reading.name for reading in self.readings}
            keys = [key for group in groups for key in group.keys]
            raise _too_many_groups([names.get(key, "one of another process") for key in keys])
        for key in misfits:
            self.grouping.take_out(key)
            self.must_repeat = "processes had terms of the loss in other proportions"
        return bool(misfits)

    def _decide_terms(self, keys: Sequence[TermKey], sums: Sequence[float]) -> None:
        """Let the window be computed again if two of its terms, on any rank, may be one. If that
        cannot be found out, all ranks raise LossNotAdditive.
        """
        if self.tries_terms is None:
            return
        present = [key for key in keys if key in self._factors]
        if sums:
            present = [key for index, key in enumerate(keys) if sums[3 * index]]
        pair = self.same_terms.undecided(present)
        if pair is None:
            return
        if not self.tries_terms or frozenset(pair) in self.same_terms.looked_at:
            names = {reading.key: reading.name for reading in self.readings}
            named = " and ".join(names.get(key, "one of another process") for key in pair)
            raise LossNotAdditive(
                f"the micro-batches of a window have different terms of the loss ({named}), and "
                "none of them has both, so it cannot be known whether they are one mean over all "
                "samples or two. Let each micro-batch have the same terms: a term may be 0, as "
                "outputs.sum() * 0, or pass the sum and its number of targets: "
                "accelerator.backward(sum, num_targets=n)."
            )
        self.same_terms.looked_at.add(frozenset(pair))
        self.undecided = pair
        self.must_look = True
        self.must_repeat = "its micro-batches have different terms of the loss"

    def _check_factors(self, keys: Sequence[TermKey], sums: Sequence[float]) -> None:
        """Check that all ranks have the same factors, see `_factor_sums`; all of them raise
        otherwise.
        """
        names = {reading.key: reading.name for reading in self.readings}
        for index, start in enumerate(range(0, len(sums), 3)):
            name = "the penalties on parameters"
            if index < len(keys):
                name = names.get(keys[index], "a term of the loss")
            check_factor_sums(name, tuple(sums[start : start + 3]))

    def _take_shards(self, groups: Sequence[Group]) -> None:
        """Take the gradients that are in `.grad`: those that FSDP reduced, also on a rank that had
        fillers only, and those of a pipeline's schedule.
        """
        if len(groups) == 1:
            self._scales = [self._power_of_two_near(groups[0], {})]
            self._buffers = [[parameter.grad for parameter in self.parameters]]

    def _failure_or_dead_end(self, can_repeat: bool) -> Exception | None:
        """Return this rank's error, also if the window cannot be repeated but must be."""
        if self.failure is None and self.must_repeat is not None and not can_repeat:
            return ConfigError(
                f"{self.must_repeat}, so this window must be computed once more, but a loop that "
                "accumulates by hand cannot be given it again: pass gradient_accumulation_steps to "
                "Accelerator, and put the loop's body into `with accelerator.accumulate(model):`."
            )
        return self.failure

    def _is_new_anywhere(self) -> bool:
        """Return whether any rank has terms, groups or stacks that it did not have before."""
        has_new_stacks = self.stack_sizes.num_pairs != self._num_merged_pairs
        is_new = self._has_new_terms or has_new_stacks or self.same_terms.is_changed
        return bool(self.backend.max_over_ranks(int(is_new)))

    def _merge_stack_sizes(self) -> None:
        """Let all ranks know the sizes of all stacks: those of one rank may fit samples by chance.
        They then read the same terms, in a window that is computed again.
        """
        own_keys = {self._with_indices(key): key for key in self.stack_sizes.pairs}
        own = {name: self.stack_sizes.pairs[key] for name, key in own_keys.items()}
        for of_rank in self.backend.gather_objects(own):
            known = {own_keys[name]: pairs for name, pairs in of_rank.items() if name in own_keys}
            if self.stack_sizes.merge(known):
                self.must_repeat = "what the loss stacks was found to be no losses of samples"
        self._num_merged_pairs = self.stack_sizes.num_pairs

    def _merge_same_terms(self) -> None:
        """Let all ranks know which keys mean one term."""
        self.same_terms.merge(self.backend.gather_objects(self.same_terms.state()))

    def _merge_groups(self) -> None:
        """Let all ranks use the same groups, in the same order."""
        own = [list(keys) for keys in self.grouping.structure]
        self.grouping.merge(self.backend.gather_objects(own))
        self._has_new_terms = False
        if self.grouping.structure == own:
            return
        totals = {group.keys[0]: group.total for group in self._groups or []}
        if self._has_group_sums():
            self.must_repeat = "processes had terms of the loss in other proportions"
        self._groups = [
            Group(list(keys), total=totals.get(keys[0], 0.0)) for keys in self.grouping.structure
        ]
        self._buffers = [[None] * len(self.parameters) for _ in self._groups]
        self._scales = [1.0] * len(self._groups)
        self._value_sums = [0.0] * len(self._groups)

    def _mean_gradients(self, keeps_sums: bool) -> Gradients:
        """Return the gradients of the window's mean loss: the sums over all ranks, divided."""
        result: Gradients = [None] * len(self.parameters)
        for group, buffer, scale in zip(
            self._groups or [], self._buffers, self._scales, strict=True
        ):
            factor = scale / group.total if group.total else 0.0
            factor *= self.backend.averages_over
            self._add_scaled(result, buffer, factor, in_place=not keeps_sums)
        self._add_scaled(result, self._parts, self.backend.averages_over, in_place=not keeps_sums)
        if self._chunks is not None or self.backend.num_processes == 1:
            return result
        return self._summed_over_replicas(result)

    @staticmethod
    def _add_scaled(result: Gradients, buffer: Gradients, factor: float, *, in_place: bool) -> None:
        """Add the gradients of a group, times a factor, to the result."""
        first = [i for i, gradient in enumerate(buffer) if gradient is not None]
        gradients = [buffer[i] for i in first]
        if not gradients:
            return
        if in_place:
            torch._foreach_mul_(gradients, factor)
            scaled = gradients
        else:
            scaled = torch._foreach_mul(gradients, factor)
        for index, gradient in zip(first, scaled, strict=True):
            result[index] = gradient if result[index] is None else result[index] + gradient

    def _summed_over_replicas(self, gradients: Gradients) -> Gradients:
        """Sum gradients over the ranks that hold the same parameters, in buckets."""
        kept = [parameter.grad for parameter in self.parameters]
        self._set_gradients(gradients)
        self.backend.sum_over_replicas(self.parameters, self._has_gradient)
        summed = [parameter.grad for parameter in self.parameters]
        self._set_gradients(kept)
        return summed


def _too_many_groups(names: Sequence[str]) -> ConfigError:
    """Return the error for terms that need a buffer each under FSDP or in a pipeline."""
    return ConfigError(
        "the loss is a sum of means whose divisors keep no proportion ("
        f"{', '.join(names)}), which need a buffer each, but FSDP and pipelines have one: use DDP."
    )


def _exponent(divisor: float) -> int:
    """Return the exponent of the power of two near a divisor; 0 for 0, infinities and NaN."""
    return round(math.log2(abs(divisor))) if divisor and math.isfinite(divisor) else 0
