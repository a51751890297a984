"""The audits of one window, by forwards of the engine that computes it (see `audit.py`).

When created   decides which micro-batches are audited
keep           stores the sums and counts of the window's own forwards, which need not be recomputed
run            checks additivity, before the gradients are reduced and the model is updated
"""

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_ga.errors import LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.audit import (
    ROUNDING_FACTOR,
    TOLERANCES,
    ChosenCall,
    KeptOutputs,
    SumsAndCounts,
    additivity_error,
    failed_audit,
    is_small,
    join_outputs,
    sums_and_counts,
    uneven_part,
)
from hf_ga.exact.forward import extra_forwards, force_eager
from hf_ga.exact.generators import random_states
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import Sums, UserLoss
from hf_ga.exact.memory import is_out_of_memory

if TYPE_CHECKING:
    from hf_ga.exact.engine import Engine


class WindowAudit:
    """Checks on the training data of one window that the loss is additive, as the engine's rule
    assumes.

    Creating it chooses the micro-batches to audit.

    Args:
        engine: The engine, which has begun the window and planned its forwards. Its settings
            `is_audited` and `audits_together` decide whether there are audits, and whether all
            ranks make the same number of forwards.
    """

    def __init__(self, engine: "Engine") -> None:
        """Choose the micro-batches on which the additivity of the loss is checked, if it is checked
        in this window.
        """
        # The engine refers to this object. A strong reference back would be a cycle, which keeps
        # the window's tensors in memory until the garbage collector runs.
        self.engine = weakref.proxy(engine)
        self._chosen: list[ChosenCall] = []  # the micro-batches to audit
        # Loss sums and target counts of training forwards, by the index of the micro-batch.
        self._results: dict[int, SumsAndCounts] = {}
        self._kept_outputs: list[KeptOutputs] = []
        if self.is_on and engine.has_targets and engine.window.num_samples > 1:
            self._choose()

    @property
    def is_on(self) -> bool:
        """Whether the additivity of the loss is checked (audited) in this window.

        It is not if the window is a single micro-batch (nothing is split), in evaluation, if audits
        are turned off, or if the training loop computes the loss sums itself.
        """
        engine = self.engine
        is_one_batch = engine.backend.num_processes == 1 and len(engine.window.batches) == 1
        is_wanted = engine.is_audited and engine.is_training and engine.loss.is_audited
        return is_wanted and not is_one_batch

    def keep(self, outputs: Any, sums: Sums, counts: Counts) -> None:
        """Store the loss sums of the current micro-batch's training forward, as the additivity
        check at the end of the window compares with them.

        Args:
            outputs: What the model returned for the micro-batch. They are kept, too, if they are
                small and the loss is the user's `loss_fn`.
            sums: Its loss sums, one for each mean that the loss consists of.
            counts: Its numbers of targets, one for each of these means.
        """
        if not self.is_on:
            return
        call = self.engine.call
        is_chosen = any(chosen.call.index == call.index for chosen in self._chosen)
        keeps_outputs = isinstance(self.engine.loss, UserLoss) and call.weight and is_small(outputs)
        if not is_chosen and not keeps_outputs:
            return
        additive_loss = self.engine.loss.additive
        if additive_loss is not self.engine.loss:
            sums, counts = additive_loss.sums(outputs, call)
        result = sums_and_counts(sums, counts)
        self._results[call.index] = result
        if keeps_outputs:
            num_samples = len(call.micro_batch)
            self._kept_outputs.append(KeptOutputs(outputs, call.batch, num_samples, result))

    def run(self) -> None:
        """Check that the loss is additive on the chosen micro-batches of this window.

        Also check the user's loss function on the outputs that were kept. A no-op if this rank
        failed in the window.

        Raises:
            LossNotAdditive: If the loss is not additive.
            UnkeyedRandomness: If a forward drew from a random generator.
        """
        engine = self.engine
        has_work = self._chosen or len(self._kept_outputs) > 1
        if not has_work or not self.is_on or engine.status.failure is not None:
            return
        current_call = engine.call
        # Compiled layers would be compiled again for forwards without gradients.
        with torch.no_grad(), extra_forwards(engine.model), force_eager():
            self._audit_outputs()
            for chosen in self._chosen:
                self._audit_call(chosen)
        engine.call = current_call  # the forwards of the audits replaced it

    def run_together(self) -> None:
        """Check the additivity of the loss before the window's training forwards, if forwards are
        collectives (FSDP). All ranks must call it, as they make the same number of forwards.

        The check comes first because FSDP holds gradients of the window between its training
        forwards, which other forwards would disturb.

        Raises:
            LossNotAdditive: If the loss is not additive on this rank.
            UnkeyedRandomness: If a forward of this rank drew from a random generator.
            ProcessFailed: If the audit failed on another rank.
        """
        if not self._chosen:
            return
        engine = self.engine
        with engine.deferring_failures():
            try:
                self.run()
            except (LossNotAdditive, UnkeyedRandomness) as error:
                engine.status.failure = error  # exchanged below: all ranks reach that point
        if engine.backend.num_processes > 1 or engine.status.failure is not None:
            engine.backend.all_reduce_status(engine.status)  # raises on all ranks

    def _choose(self) -> None:
        """Choose the micro-batches on which the additivity of the loss is checked. If forwards are
        collectives (FSDP), all ranks choose the same number of micro-batches.
        """
        engine = self.engine
        audits = engine.window.state.audits
        self._chosen = audits.choose(engine.calls)
        if engine.audits_together:
            max_over_ranks = engine.backend.max_over_ranks(len(self._chosen))
            num_missing = max_over_ranks - len(self._chosen)
            self._chosen += audits.choose_more(engine.calls, num_missing)

    def _audit_outputs(self) -> None:
        """Check that the user's loss function is additive on the outputs that were kept in this
        window: its sum for all of them together must be the total of its sums for each micro-batch.

        Raises:
            LossNotAdditive: If the loss function is not additive.
        """
        joined = join_outputs(self._kept_outputs)
        if joined is None:
            return
        engine = self.engine
        outputs, batch = joined
        with engine.backend.autocast():
            sums, counts = engine.loss.sums(outputs, Call(engine.call.micro_batch, batch))
        results = [kept.result for kept in self._kept_outputs]
        error = additivity_error(sums_and_counts(sums, counts), results)
        if error > TOLERANCES[torch.float32]:
            raise failed_audit(engine.window.description, error, engine.rule.name)

    def _audit_call(self, chosen: ChosenCall) -> None:
        """Check the additivity of the loss on one micro-batch, and record that it was audited.

        If the forwards run out of memory, warn and skip the check; if forwards are collectives
        (FSDP), raise instead.

        Raises:
            LossNotAdditive: If the loss is not additive.
        """
        engine = self.engine
        try:
            for first, second in self._groups_to_compare(chosen):
                self._check_additivity(first, second, chosen)
        except Exception as error:
            if not is_out_of_memory(error) or engine.audits_together:
                raise
            where = engine.window.description
            warnings.warn(
                f"hf_ga: {where}: an audit ran out of memory and was skipped.", stacklevel=2
            )
        engine.window.state.audits.record(chosen)

    def _groups_to_compare(self, chosen: ChosenCall) -> list[tuple[np.ndarray, np.ndarray]]:
        """Choose the groups of samples of an additivity check: pairs whose loss sums are compared
        with the sum of both groups computed together.

        The first pair is the micro-batch, split in two. If all of its samples have the same new
        data pattern, or it is a single sample, another pair is half of it and as many samples of
        other micro-batches. If forwards are collectives, there is exactly one pair on all ranks:
        the micro-batch and samples of others.

        Args:
            chosen: The micro-batch to audit.

        Returns:
            Pairs of offsets of samples in the window.
        """
        window = self.engine.window
        inside = window.offsets_of(chosen.call.micro_batch)
        outside = np.setdiff1d(window.offsets, inside)

        def spread_outside(num_samples: int) -> np.ndarray:
            """Choose up to this many samples of the window's other micro-batches, evenly spread."""
            indices = np.linspace(0, len(outside) - 1, num_samples).astype(int)
            return outside[np.unique(indices)]

        first_part = uneven_part(len(inside))
        two_parts = inside[first_part], np.delete(inside, first_part)
        if self.engine.audits_together:
            if len(outside) == 0:
                return [two_parts]
            return [(inside, spread_outside(max(1, len(inside) - 1)))]
        pairs = [two_parts] if len(inside) > 1 else []
        if len(outside) and (chosen.is_uniform or len(inside) == 1):
            num_samples = max(1, len(inside) // 2)
            pairs.append((inside[:num_samples], spread_outside(num_samples)))
        return pairs

    def _check_additivity(self, first: np.ndarray, second: np.ndarray, chosen: ChosenCall) -> None:
        """Check that the loss sums and target counts of two groups of samples add up to those of
        both groups together.

        Args:
            first: Offsets in the window of the samples of one group.
            second: Those of the other group.
            chosen: The micro-batch that is audited. If it consists of the two groups, the result of
                its own forward is used again.

        Raises:
            LossNotAdditive: If sums or counts do not add up, beyond rounding.
        """
        engine = self.engine
        groups = [first, second]
        both = np.concatenate(groups)
        micro_batch_offsets = engine.window.offsets_of(chosen.call.micro_batch)
        is_micro_batch = np.array_equal(np.sort(both), np.sort(micro_batch_offsets))
        known = self._results.get(chosen.call.index) if is_micro_batch else None
        if known is None or engine.audits_together:
            *parts, whole = self._compute([*groups, both])
        else:
            parts = self._compute(groups)
            whole = known
        error = additivity_error(whole, parts)
        if error > self._tolerance(error, both):
            sample_ids = engine.window.sample_ids[both].tolist()
            where = f"{engine.window.description}, samples {sample_ids[:8]}"
            raise failed_audit(where, error, engine.rule.name, chosen.new_patterns)

    def _compute(self, groups: list[np.ndarray]) -> list[SumsAndCounts]:
        """Compute the loss sums and target counts of groups of the window's samples, with one
        forward without gradients per group and the dropout masks of the training forwards.

        Args:
            groups: For each group, the offsets of its samples in the window.

        Raises:
            UnkeyedRandomness: If a forward drew from a random generator.
        """
        engine = self.engine
        loss = engine.loss.additive
        state = engine.window.state
        num_plain = state.num_plain
        before = random_states()
        results = []
        with engine.scope(), engine.backend.autocast():
            for index, micro_batch in enumerate(engine.window.split(groups).micro_batches):
                counts = loss.count(micro_batch.batch, len(micro_batch))
                outputs = engine.forward_only(Call(micro_batch, index=index, counts=counts))
                results.append(sums_and_counts(*loss.sums(outputs, engine.call)))
        # The number of micro-batches computed without speed-ups counts training forwards only.
        state.num_plain = num_plain
        engine.check_generators(before)
        return results

    def _tolerance(self, error: float, offsets: np.ndarray) -> float:
        """Return the relative error that rounding may cause in a check of the loss's additivity.

        It is a constant for each dtype. If the error is larger and forwards are not collectives,
        the samples are also computed in two orders, and a multiple of the difference is tolerated.

        Args:
            error: The relative error that was found.
            offsets: Offsets in the window of the samples that were compared.
        """
        engine = self.engine
        device_type = engine.backend.device.type
        with engine.backend.autocast():
            is_autocast = torch.is_autocast_enabled(device_type)
            dtype = torch.get_autocast_dtype(device_type) if is_autocast else torch.float32
        tolerance = TOLERANCES[dtype]
        if error <= tolerance or engine.audits_together:
            return tolerance
        in_order, reversed_order = self._compute([offsets, offsets[::-1]])
        rounding_error = additivity_error(in_order, [reversed_order])
        return max(tolerance, ROUNDING_FACTOR * rounding_error)
