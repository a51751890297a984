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
from hf_ga.engine.checks.rank_check import NormsByName, check_ranks, digest
from hf_ga.engine.checks.sample_count import SampleCount, check_samples
from hf_ga.engine.parameter_hooks import after_hooks, has_hooks
from hf_ga.engine.sums.agreement import (
    check_factors,
    factor_sums,
    out_of_proportion,
    penalty_sums,
    power_sums,
    present_terms,
    raised_sums,
    ratio_sums,
    sample_sums,
    shares_of_samples,
    squared_differences,
)
from hf_ga.engine.sums.divisors import (
    RELATIVE_ROUNDING,
    DivisorChecks,
    factors_of,
    is_empty,
)
from hf_ga.engine.sums.groups import Group, Grouping
from hf_ga.engine.sums.readings import Number, Reading, TermKey, TermReader, on_host
from hf_ga.engine.sums.same_terms import SameTerms
from hf_ga.engine.sums.shown_gradients import Gradients, ShownGradients
from hf_ga.engine.sums.window_sums import WindowSums
from hf_ga.errors import ConfigError, LossNotAdditive
from hf_ga.order.chunks import ChunkTree
from hf_ga.order.length_plan import Computed
from hf_ga.parallel.backend import Backend, RankStatus

LARGEST_ITERATION = 1 << 10  # numbers that ranks compare are exact
PENALTY_NOT_ONCE = "a penalty on parameters did not count once"
OTHER_STACKS = "what the loss stacks was found to be no losses of samples"


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
        norms: The `norms_by_name` of this rank when the window began. None: ranks compare none.
        sums: What its micro-batches add up to.
    """

    def __init__(self, backend: Backend, parameters: Sequence[nn.Parameter]) -> None:
        """Make the sums for these parameters, and begin a window."""
        self.parameters = list(parameters)
        self.sums = WindowSums(backend, self.parameters)
        self.reader = TermReader(self.parameters)
        self.shown = ShownGradients(self.parameters)
        self.checks = DivisorChecks()
        self.grouping = Grouping()
        self.same_terms = SameTerms()
        self._lone_terms = LoneTerms()
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
        self.norms: NormsByName | None = None
        self.grouping.rename(self.same_terms.key_of)
        self.grouping.keep_apart(chunk_tree is not None)
        self.sums.begin(chunk_tree)
        self._has_new_terms = False
        self._shared_penalties: set[TermKey] = set()  # that counted by a share in this window
        self._factors: dict[TermKey, float] = {}  # of this rank's terms, at the window's end
        self.shown.begin()

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

    def read(self, loss: Tensor, num_samples: int, num_targets: Number | None) -> list[Reading]:
        """Read the terms of a micro-batch's loss: see `TermReader.read`."""
        num_changed = self.reader.stack_sizes.num_changed
        readings = self.reader.read(loss, num_samples, num_targets)
        if self.reader.stack_sizes.num_changed != num_changed and self.readings:
            self.repeat_misread(OTHER_STACKS)
        return readings

    def has_sums_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether a backward of this window has reached one of these parameters."""
        known = {id(parameter) for parameter in parameters}
        reached = zip(self.parameters, self.sums.reached(), strict=True)
        return any(is_reached and id(parameter) in known for parameter, is_reached in reached)

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
        self._shared_penalties |= {r.key for r in readings} - {r.key for r in data_terms}
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
        self.shown.set_beside_earlier(self._after_hooks(multiples))

    def show_unfinished(self) -> None:
        """Let `.grad` be the sums so far, as another backward of the micro-batch is expected: only
        so a change of it is seen that comes before `finish` (see `is_changed`).
        """
        if not self.backend.is_sharded:  # FSDP keeps its sums there
            self.shown.set(self.sums.unfinished())

    def is_changed(self) -> bool:
        """Whether the loop has changed `.grad` since it was last set in this window."""
        return not self.backend.is_sharded and self.shown.is_changed()

    def repeat_misread(self, reason: str) -> None:
        """Let the window be computed once more, because its terms will be read in another way."""
        self.must_repeat = reason
        self.is_misread = True

    def begin_again_if_zeroed(self) -> None:
        """Begin a window by hand again if the loop has set the gradients that `show` set to zero,
        before the first backward, or after any."""
        if not self.shown.is_set:
            self.shown.begin()
        elif self.shown.is_zeroed():
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
            self.shown.withdraw()
            return False
        if self.num_backwards > 1 or self.backend.num_processes > 1:
            self.reader.stack_sizes.settle()
        means = self.sums.mean_gradients()
        if adds:
            self.show(means, times=1)
            return True
        self.shown.set(self._after_hooks(means))
        return True

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
            group.raised = [float(r.divisor) for r in of_group if not is_empty(r)]
            group.num_samples = sum(
                reading.num_samples
                for reading, divisor in zip(of_group, group.divisors, strict=True)
                if divisor or not self.checks.is_unknown(reading)
            )
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
            if self.reader.merge_stacks(self.backend):  # all read the same terms from now on
                self.repeat_misread(OTHER_STACKS)
            self._merge_same_terms()
            self.checks.merge(self.backend.gather_objects(self.checks.state()))
            self._merge_groups()
            self._add_totals(on_host(self.readings))
        groups = self.sums.groups or []
        keys = [key for group in groups for key in group.keys]
        if not self._shared_penalties.isdisjoint(keys):  # alone in another micro-batch
            self.must_repeat = PENALTY_NOT_ONCE
        if self.must_pad:
            self.must_repeat = (
                "a sample's gradient, or a divisor, depends on the padded width or on the other "
                "samples of its micro-batch"
            )
        loss_sum, found = self._sum_over_ranks(groups, keys, can_repeat)
        if squared_differences(tuple(found["iteration"])):
            raise _out_of_step()
        if squared_differences(tuple(found["norms"])):
            check_ranks(self.backend.gather_objects(self.norms))
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
        check_factors(keys, found["factors"], self._name_of)
        if found["factors"]:
            self._lone_terms.note(self._factors, present_terms(keys, found["factors"]))
        (num_samples,) = found["num_samples"]
        shares = shares_of_samples(groups, found["of_groups"], num_samples, self._name_of)
        if self._split_groups(groups, found["ratios"]) or self._miscounts_penalties(found, shares):
            dead_end = self._failure_or_dead_end(can_repeat)
            if dead_end is not None:
                raise dead_end
            return False
        if self.backend.is_sharded:
            self.sums.take_shards()
        self.loss = self.sums.take_totals(loss_sum, found, shares)
        return True

    def _sum_over_ranks(
        self, groups: Sequence[Group], keys: Sequence[TermKey], can_repeat: bool
    ) -> tuple[Tensor, dict[str, list[float]]]:
        """Return the sums over all ranks of the loss, and of what else the window's end depends on,
        by name. Raises an error of any rank on all. A collective, and but for that of the gradients
        the only one of a window that is like the last one.
        """
        is_alone = self.backend.num_processes == 1
        own = {
            "must_repeat": [float(self.must_repeat is not None)],
            "must_pad": [float(self.must_pad)],
            "must_look": [float(self.must_look)],
            "needs_padding": [float(self.needs_padding)],
            "has_compared_widths": [float(self.has_compared_widths)],
            "has_padded": [float(self.computed < Computed.REAL)],
            "has_no_rows": [float(self.computed < Computed.ROWS)],
            "iteration": power_sums([self.iteration % LARGEST_ITERATION]),
            "norms": power_sums([] if self.norms is None else [digest(self.norms)]),
            "has_hooks": [float(any(map(has_hooks, self.parameters)))],
            "widths": power_sums(self.widths),
            "parts": [float(self.sums.part)],
            "samples": self.samples.sums(),
            "totals": [group.total for group in groups],
            "raised": raised_sums(groups),
            "num_samples": [float(self.samples.number)],
            "of_groups": sample_sums(groups),
            "values": self.sums.values,
            "penalties": penalty_sums(groups),
            "factors": [] if is_alone else factor_sums(keys, self._factors),
            "ratios": [] if is_alone else ratio_sums(groups),
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

    def _split_groups(self, groups: Sequence[Group], sums: Sequence[float]) -> bool:
        """Give each term its own group that has other proportions on another rank, by
        `ratio_sums`, and let the window be computed again. The same on all ranks.
        """
        misfits = out_of_proportion(groups, sums)
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
        number, counted = found["penalties"]
        totals = found["totals"]
        total = totals[0] / shares[0] if number else 0.0
        is_once = bool(total) and math.isclose(counted, total, rel_tol=RELATIVE_ROUNDING)
        if not number or is_once:
            return False
        if not total and any(totals):  # terms that the loss had earlier
            self.grouping.put_first([index for index, value in enumerate(totals) if value])
        elif self._has_recounted_penalties:
            raise LossNotAdditive(
                "a penalty on parameters counts by the share of the term beside it, which adds up "
                f"to {counted / (total or 1.0):.4g} in this window, not to 1: some micro-batches "
                "lack one of both, or no sample of the window is a target. Let each micro-batch "
                "have the same terms (a term may be 0, as outputs.sum() * 0), and run the backward "
                "of the penalty apart: accelerator.backward(penalty)."
            )
        else:
            self._has_recounted_penalties = True
        self.must_repeat = PENALTY_NOT_ONCE
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
        is_new = self._has_new_terms or self.reader.has_new_stacks
        is_new |= self.same_terms.is_changed or self.checks.is_changed
        return bool(self.backend.max_over_ranks(int(is_new)))

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


def _out_of_step() -> ConfigError:
    """Return the error for ranks of which one finishes a window while others are elsewhere."""
    return ConfigError(
        "a process ran accelerator.backward more often in an iteration than another one, so their "
        "gradients cannot be summed: call it as often on each of them, for example with "
        "outputs.sum() * 0 for a loss that no sample of a micro-batch has."
    )


def _too_many_groups(names: Sequence[str]) -> ConfigError:
    """Return the error for terms that need a buffer each under FSDP or in a pipeline."""
    return ConfigError(
        "the loss is a sum of means whose divisors keep no proportion ("
        f"{', '.join(names)}), which need a buffer each, but FSDP and pipelines have one: use DDP."
    )
