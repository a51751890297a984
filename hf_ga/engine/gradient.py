"""Adds up the gradient of a window over its micro-batches, and divides it at the window's end.

    gradient of the window = sum over terms k of
        (sum over micro-batches of factor_k x gradient of numerator_k) / (sum of divisor_k)

Nothing is counted ahead: each loss is read when the loop passes it. Until the window's end `.grad`
of the parameters stays as the loop left it; the sums are kept here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, islice

from torch import Tensor, nn

from hf_ga.engine.checks.lone_terms import LoneTerms
from hf_ga.engine.checks.sample_count import SampleCount, check_samples
from hf_ga.engine.parameter_hooks import after_hooks
from hf_ga.engine.sums.divisors import (
    RELATIVE_ROUNDING,
    DivisorChecks,
    Reading,
    TermKey,
    factors_differ,
    factors_of,
    on_host,
    power_sums,
    present_terms,
    squared_differences,
    unknown_share,
)
from hf_ga.engine.sums.groups import Group, Grouping
from hf_ga.engine.sums.same_terms import SameTerms
from hf_ga.engine.sums.window_sums import Gradients, WindowSums, set_gradients
from hf_ga.errors import ConfigError, LossNotAdditive
from hf_ga.loss import StackSizes, Term, read_terms
from hf_ga.order.chunks import ChunkTree
from hf_ga.order.length_plan import Computed
from hf_ga.parallel.backend import Backend, RankStatus

SMALLEST_ID = 1 << 20  # Python's ids are addresses, indices are smaller
LARGEST_ITERATION = 1 << 10  # numbers that ranks compare are exact


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
        is_misread: Whether that is because its terms were read in a way that will change.
        has_other_keys: Whether its terms, but not their number, are other ones because of speed-ups
            that were given up.
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
        iteration: The number of the loop's iteration, the same on all ranks if they are in step.
        sums: What its micro-batches add up to.
    """

    def __init__(self, backend: Backend, parameters: Sequence[nn.Parameter]) -> None:
        """Make the sums for these parameters, and begin a window."""
        self.parameters = list(parameters)
        self.sums = WindowSums(backend, self.parameters)
        self.checks = DivisorChecks()
        self.grouping = Grouping()
        self.same_terms = SameTerms()
        self._index_of = {id(p): index for index, p in enumerate(self.parameters)}
        self.stack_sizes = StackSizes()
        self._lone_terms = LoneTerms()
        self._num_merged_pairs = 0
        self._has_hooks = False  # whether a parameter has one, on any rank
        self._has_recounted_penalties = False  # as a window was computed again
        self.loss: Tensor | None = None
        self.needs_padding = False
        self.tries_widths = False
        self.tries_terms: bool | None = False
        self.iteration = 0
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
        self.is_misread = False
        self.has_other_keys = False
        self.must_pad = False
        self.must_look = False
        self.must_try_widths = False
        self.undecided: tuple[TermKey, TermKey] | None = None
        self.has_compared_widths = False
        self.computed = Computed.PADDED
        self.widths: list[float] = []
        self.samples = SampleCount()
        self.num_backwards = 0
        self.grouping.rename(self.same_terms.key_of)
        self.grouping.keep_apart(chunk_tree is not None)
        self.sums.begin(chunk_tree)
        self._has_new_terms = False
        self._factors: dict[TermKey, float] = {}  # of this rank's terms, at the window's end
        self.earlier: Gradients = [p.grad for p in self.parameters]
        self._shown: list[tuple[Tensor, int] | None] | None = None  # (gradient, its version)

    @property
    def backend(self) -> Backend:
        """How ranks communicate."""
        return self.sums.backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        """Communicate in another way from the next window on."""
        self.sums.backend = backend

    @property
    def num_targets(self) -> float:
        """After `finish`, what the first term that the window has divides by, over all ranks."""
        return next((group.total for group in self.sums.groups or [] if group.total), 0.0)

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
        if self.stack_sizes.num_changed != num_changed and self.readings:
            self.repeat_misread("what the loss stacks was found to be no losses of samples")
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

    def has_sums_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether a backward of this window has reached one of these parameters."""
        reached = self.sums.reached()
        return any(reached[self._index_of[id(p)]] for p in parameters if id(p) in self._index_of)

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
        self.sums.agree_on_first_scale(readings)
        data_terms = self._terms_to_group(readings)
        if len(readings) > 1:
            data_terms = on_host(data_terms)  # to compare the proportions of their divisors
        groups = self._groups_for(data_terms)
        if self.backend.is_sharded and len(groups) > 1:
            raise _too_many_groups([reading.name for reading in data_terms])
        self.readings += [reading.without_graph() for reading in readings]
        self.num_backwards += 1
        self.sums.add(
            loss,
            readings,
            data_terms,
            true_divisor=self.checks.true_divisor,
            retain_graph=retain_graph,
            sync=sync,
        )

    def note_switched_off(self, readings: Sequence[Reading], *, is_counted: bool) -> None:
        """Remember terms that a micro-batch has with a factor of 0: others must have that, too."""
        self._switched_off += [
            replace(reading.without_graph(), is_counted=is_counted) for reading in readings
        ]

    def note_rehearsal(self, readings: Sequence[Reading]) -> None:
        """Learn from the terms of a rehearsal, whose gradient does not count."""
        self.sums.agree_on_first_scale(readings)
        self._groups_for(self._terms_to_group(readings))
        of_rehearsal = [replace(reading, is_counted=False) for reading in readings]
        self.readings += [reading.without_graph() for reading in of_rehearsal]

    def turn_into_rehearsal(self) -> None:
        """Drop the sums of the window so far, whose samples come again. What `show` set stays."""
        self.readings = [replace(reading, is_counted=False) for reading in self.readings]
        self.num_backwards = 0
        self.samples = SampleCount()
        self.sums.drop_groups()

    def show(self, gradients: Gradients, *, times: int) -> None:
        """Set `.grad` to gradients within a window, for a loop that accumulates by hand.

        Args:
            gradients: The gradients of the mean so far.
            times: What they are multiplied by.
        """
        multiples = [None if gradient is None else gradient * times for gradient in gradients]
        for parameter, gradient, earlier in zip(
            self.parameters, self._after_hooks(multiples), self.earlier, strict=True
        ):
            if gradient is not None:
                parameter.grad = gradient if earlier is None else earlier + gradient
        self._note_shown([parameter.grad for parameter in self.parameters])

    def show_unfinished(self) -> None:
        """Let `.grad` be the sums so far, as another backward of the micro-batch is expected: only
        so a change of it is seen that comes before `finish` (see `is_changed`).
        """
        if self.backend.is_sharded:  # FSDP keeps its sums there
            return
        sums = self.sums.unfinished()
        for parameter, gradient in zip(self.parameters, sums, strict=True):
            if gradient is not None:
                parameter.grad = gradient
        self._note_shown(sums)

    def _note_shown(self, gradients: Gradients) -> None:
        """Remember what `.grad` is now, where it is not None."""
        self._shown = [None if g is None else (g, g._version) for g in gradients]

    @property
    def is_shown(self) -> bool:
        """Whether this window has set `.grad`."""
        return self._shown is not None

    def is_changed(self) -> bool:
        """Whether the loop has changed `.grad` since it was last set in this window."""
        if self._shown is None or self.backend.is_sharded:
            return False
        now = [parameter.grad for parameter in self.parameters]
        pairs = [(a, b) for a, b in zip(now, self._shown, strict=True) if b is not None]
        return any(a is not shown or shown._version != version for a, (shown, version) in pairs)

    def repeat_misread(self, reason: str) -> None:
        """Let the window be computed once more, because its terms will be read in another way."""
        self.must_repeat = reason
        self.is_misread = True

    def begin_again_if_zeroed(self) -> None:
        """Begin a window by hand again if the loop has set the gradients that `show` set to zero,
        before the first backward, or after any."""
        now: Gradients = [parameter.grad for parameter in self.parameters]
        if self._shown is None:
            self.earlier = now
            return
        pairs = [(a, b) for a, b in zip(now, self._shown, strict=True) if b is not None]
        if pairs and all(a is None or _is_zeroed(a, *b) for a, b in pairs):
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
        if self.sums.groups is None:
            self._regroup()
        groups = self.sums.groups
        if len(data_terms) < 2 and len(self.grouping.structure) < 2:
            single = groups[0].keys if groups else []
            if len(single) < 2:
                return groups
        divisors = {r.key: self.checks.true_divisor(r) for r in on_host(data_terms)}
        misfits = [group for group in groups if not group.fits(divisors)]
        for group in misfits:
            self.grouping.split(group, divisors)
        if misfits:
            self._has_new_terms = True
            self._regroup()
        for group in self.sums.groups:
            group.learn(divisors)
        return self.sums.groups

    def _regroup(self) -> None:
        """Make the groups of the window anew. Those with the same terms go on; what was added in
        others must be repeated.
        """
        if not self._use_structure():
            self.must_repeat = "terms of the loss have divisors in other proportions"

    def _use_structure(self) -> bool:
        """Use a group for each list of terms of `grouping`: one with the same terms goes on.

        Returns:
            Whether no sums were dropped.
        """
        before = self.sums.groups or []
        can_go_on = not self.grouping.are_apart and not self.backend.is_sharded
        known = {tuple(group.keys): group for group in before if can_go_on}
        structure = self.grouping.structure
        groups = [known.pop(tuple(keys), None) or Group(list(keys)) for keys in structure]
        if can_go_on:
            are_kept = not any(map(self.sums.has_gradients_of, known.values()))
        else:
            are_kept = not self._has_group_sums()
        self.sums.use_groups(groups)
        return are_kept

    def _has_group_sums(self) -> bool:
        """Whether a backward of the window has added to the sums of its groups, or will in a stage
        of a pipeline.
        """
        if self.backend.is_stage:
            return self.num_backwards > 0
        return self.sums.has_gradients()

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

    # The window's end

    def finish(self, *, is_padded: bool, can_repeat: bool, adds: bool = False) -> bool:
        """Check the window's divisors, sum over all ranks, and set `.grad` to the gradient of the
        window's mean loss. A collective: each rank must call it as often as the others. Another
        backward may follow, and then another `finish`.

        Args:
            is_padded: Whether all micro-batches of the window have the same padded width.
            can_repeat: Whether the loop can be given the window once more.
            adds: Whether to add to `earlier`, in place of setting.

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
            self.withdraw()
            return False
        if self.num_backwards > 1 or self.backend.num_processes > 1:
            self.stack_sizes.settle()
        means = self.sums.mean_gradients()
        if adds:
            self.show(means, times=1)
            return True
        gradients = self._after_hooks(means)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient
        self._note_shown(gradients)
        return True

    def withdraw(self) -> None:
        """Set `.grad` back to what it was before the window, which is computed once more."""
        set_gradients(self.parameters, self.earlier)
        self._shown = None

    def mean_so_far(self, *, is_padded: bool) -> Gradients:
        """Return the gradient of the mean loss of the micro-batches so far, summed over all ranks,
        for a loop that accumulates by hand. A collective.
        """
        has_one_width = self.backend.num_processes == 1 and len(set(self.widths)) == 1
        readings = self._checked_readings(is_padded or has_one_width)
        self._add_totals(readings)
        self._agree_on_groups(can_repeat=False)
        return self.sums.mean_gradients()

    def _checked_readings(self, is_padded: bool) -> list[Reading]:
        """Return the window's readings on the host; keep the error if they cannot be trusted.
        Misread ones are not checked: the window is computed again.
        """
        readings = on_host(self.readings)
        self._switched_off = on_host(self._switched_off)
        if self.failure is not None or self.is_misread:
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
        counted = [reading for reading in readings if reading.is_counted]
        for group in self.sums.groups or []:
            of_group = [reading for reading in counted if reading.key == group.keys[0]]
            group.divisors = self.checks.true_divisors(group.keys[0], counted)
            group.total = math.fsum(group.divisors)
            known = [reading for reading in of_group if not self.checks.is_unknown(reading)]
            group.num_samples = sum(reading.num_samples for reading in known)
            group.counts_samples = (False, False)
            if of_group:
                group.counts_samples = self.checks.may_count_samples(of_group[0])

    def _agree_on_groups(self, can_repeat: bool) -> bool:
        """Exchange the status of all ranks: failures, repetitions, divisors. Returns whether the
        window is complete; if not, all ranks repeat it.
        """
        if self.sums.groups is None and self.grouping.structure:
            self._regroup()  # this rank had fillers only, but sends as many numbers as the others
        if self.backend.num_processes > 1 and self._is_new_anywhere():
            self._merge_stack_sizes()
            self._merge_same_terms()
            self._merge_groups()
        groups = self.sums.groups or []
        keys = [key for group in groups for key in group.keys]
        if self.must_pad:
            self.must_repeat = (
                "a sample's gradient, or a divisor, depends on the padded width or on the other "
                "samples of its micro-batch"
            )
        loss_sum, found = self._sum_over_ranks(groups, keys, can_repeat)
        if squared_differences(tuple(found["iteration"])):
            raise _out_of_step()
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
        if found["factors"]:
            self._lone_terms.note(self._factors, present_terms(keys, found["factors"]))
        shares = self._shares_of_samples(groups, found)
        if self._split_groups(groups, found["ratios"]) or self._miscounts_penalties(found, shares):
            dead_end = self._failure_or_dead_end(can_repeat)
            if dead_end is not None:
                raise dead_end
            return False
        if self.backend.is_sharded:
            self.sums.take_shards()
        self.loss = self.sums.take_totals(loss_sum, found, shares)
        return True

    def _shares_of_samples(
        self, groups: Sequence[Group], found: Mapping[str, list[float]]
    ) -> list[float]:
        """Return the share of the window's samples that each group's divisors are of, 1 where they
        do not count samples. The same on all ranks, which raise LossNotAdditive if it is unknown.
        """
        (total,) = found["num_samples"]
        numbers = iter(found["of_groups"])
        shares = []
        for group, number, counts, counts_not in zip(
            groups, numbers, numbers, numbers, strict=True
        ):
            is_complete = number in (0, total)
            if not is_complete and not counts and not counts_not:
                raise unknown_share(self._name_of(group.keys[0]))
            shares.append(number / total if counts and not is_complete else 1.0)
        return shares

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
            "lacks_values": [float(self.sums.lacks_values)],
            "has_compared_widths": [float(self.has_compared_widths)],
            "has_padded": [float(self.computed < Computed.REAL)],
            "has_no_rows": [float(self.computed < Computed.ROWS)],
            "iteration": power_sums([self.iteration % LARGEST_ITERATION]),
            "has_hooks": [float(any(parameter._backward_hooks for parameter in self.parameters))],
            "widths": power_sums(self.widths),
            "parts": [float(self.sums.part)],
            "samples": self.samples.sums(),
            "totals": [group.total for group in groups],
            "num_samples": [float(self.samples.number)],
            "of_groups": [float(n) for g in groups for n in (g.num_samples, *g.counts_samples)],
            "values": self.sums.values,
            "penalties": [
                number
                for group in groups[:1]
                for number in (float(len(group.of_penalties)), math.fsum(group.of_penalties))
            ],
            "factors": self._factor_sums(keys),
            "ratios": self._ratio_sums(groups),
        }
        status = RankStatus(
            loss=self.sums.loss,
            counts=tuple(chain.from_iterable(own.values())),
            has_gradient=self.sums.reached(),
            failure=self._failure_or_dead_end(can_repeat),
        )
        status = self.backend.all_reduce_status(status)
        self.sums.is_reached_anywhere = status.has_gradient
        sums = iter(status.counts)
        found = {name: list(islice(sums, len(numbers))) for name, numbers in own.items()}
        return status.loss, found

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
            keys = [key for group in groups for key in group.keys]
            raise _too_many_groups([self._name_of(key) for key in keys])
        for key in misfits:
            self.grouping.take_out(key)
            self.must_repeat = "processes had terms of the loss in other proportions"
        return bool(misfits)

    def _miscounts_penalties(
        self, found: Mapping[str, list[float]], shares: Sequence[float]
    ) -> bool:
        """Whether the penalties of the window do not count once, by the sums over all ranks: it was
        not yet known what a micro-batch without targets adds to the divisor, or some micro-batches
        lack the penalties. Lets the window be computed again; raises LossNotAdditive if it was.
        """
        number, counted = found["penalties"] or (0.0, 0.0)
        total = found["totals"][0] / shares[0] if number else 0.0
        is_once = bool(total) and math.isclose(counted, total, rel_tol=RELATIVE_ROUNDING)
        if not number or is_once:
            return False
        if self._has_recounted_penalties:
            raise LossNotAdditive(
                "a penalty on parameters counts by the share of the term beside it, which adds up "
                f"to {counted / (total or 1.0):.4g} in this window, not to 1: some micro-batches "
                "lack one of both, or no sample of the window is a target. Let each micro-batch "
                "have the same terms (a term may be 0, as outputs.sum() * 0), and run the backward "
                "of the penalty apart: accelerator.backward(penalty)."
            )
        self._has_recounted_penalties = True
        self.must_repeat = "a penalty on parameters did not count once"
        return True

    def _decide_terms(self, keys: Sequence[TermKey], sums: Sequence[float]) -> None:
        """Let the window be computed again if two of its terms, on any rank, may be one. If that
        cannot be found out, all ranks raise LossNotAdditive.
        """
        if self.tries_terms is None:
            return
        present = [key for key in keys if key in self._factors]
        if sums:
            present = present_terms(keys, sums)
        pair = self.same_terms.undecided(present)
        if pair is None:
            return
        if not self.tries_terms or frozenset(pair) in self.same_terms.looked_at:
            named = " and ".join(map(self._name_of, pair))
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
        for index, start in enumerate(range(0, len(sums), 3)):
            of_term = tuple(sums[start : start + 3])
            if squared_differences(of_term):
                is_penalty = index == len(keys)
                name = "the penalties on parameters" if is_penalty else self._name_of(keys[index])
                raise factors_differ(name, of_term)

    def _name_of(self, key: TermKey) -> str:
        """Return a term in words; of another process if this one has not read it."""
        names = (reading.name for reading in self.readings if reading.key == key)
        return next(names, "a term of another process")

    def _failure_or_dead_end(self, can_repeat: bool) -> Exception | None:
        """Return this rank's error, also if the window cannot be repeated but must be."""
        if self.failure is None and self.must_repeat is not None and not can_repeat:
            return ConfigError(
                f"{self.must_repeat}, so this window must be computed once more, but a loop that "
                "accumulates by hand, or has stepped, cannot be given it again: pass "
                "gradient_accumulation_steps to Accelerator, and put the loop's body into `with "
                "accelerator.accumulate(model):`."
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
                self.repeat_misread("what the loss stacks was found to be no losses of samples")
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
        if not self._use_structure():
            self.must_repeat = "processes had terms of the loss in other proportions"
        self._add_totals(on_host(self.readings))


def _out_of_step() -> ConfigError:
    """Return the error for ranks of which one finishes a window while others are elsewhere."""
    return ConfigError(
        "a process ran accelerator.backward more often in an iteration than another one, so their "
        "gradients cannot be summed: call it as often on each of them, for example with "
        "outputs.sum() * 0 for a loss that no sample of a micro-batch has."
    )


def _is_zeroed(gradient: Tensor, shown: Tensor, version: int) -> bool:
    """Whether a gradient was set to 0 since it was shown; it may have been 0 there."""
    is_changed = gradient is not shown or gradient._version != version
    return is_changed and not bool(gradient.any())


def _too_many_groups(names: Sequence[str]) -> ConfigError:
    """Return the error for terms that need a buffer each under FSDP or in a pipeline."""
    return ConfigError(
        "the loss is a sum of means whose divisors keep no proportion ("
        f"{', '.join(names)}), which need a buffer each, but FSDP and pipelines have one: use DDP."
    )
