"""The audits of one window, by forwards of the engine that computes it (see `audit.py`).

begin    decides which micro-batches are audited
keep     takes the numbers of the window's own forwards, which need not be computed again
run      compares, before the gradients are reduced and the model is updated
"""

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_ga.errors import LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.audit import (
    TIMES_ROUNDING,
    TOLERANCES,
    Chosen,
    Numbers,
    Outputs,
    is_small,
    not_additive,
    numbers_of,
    residual,
    together,
    uneven_part,
)
from hf_ga.exact.forward import extra_forwards, not_compiled
from hf_ga.exact.generators import random_states
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import OwnSum, Sums
from hf_ga.exact.memory import is_out_of_memory

if TYPE_CHECKING:
    from hf_ga.exact.engine import Engine


class WindowAudit:
    """Tests an engine's rule on the window that it began.

    Args:
        engine: It has planned its forwards. Its settings `is_audited` and `audits_together` decide
            whether there are audits, and whether all ranks make the same number of forwards.
    """

    def __init__(self, engine: "Engine") -> None:
        # The engine holds this audit: a circle would keep a window's tensors from being freed.
        self.engine = weakref.proxy(engine)
        self._chosen: list[Chosen] = []
        self._numbers: dict[int, Numbers] = {}
        self._outputs: list[Outputs] = []
        if self.is_on and engine.has_targets and engine.window.num_samples > 1:
            self._choose()

    @property
    def is_on(self) -> bool:
        """Whether this window is audited: not where it is one micro-batch, as nothing is split, nor
        where the loop computes the loss."""
        engine = self.engine
        is_whole = engine.backend.num_processes == 1 and len(engine.window.batches) == 1
        is_wanted = engine.is_audited and engine.is_training and engine.loss.is_audited
        return is_wanted and not is_whole

    def keep(self, outputs: Any, sums: Sums, counts: Counts) -> None:
        """Keep what was computed for the current micro-batch, to compare with.

        Args:
            outputs: What the model returned for it. They are kept if they are small and the loss
                is a function of them.
            sums: See `Loss.sums`.
            counts: See `Loss.sums`.
        """
        if not self.is_on:
            return
        call = self.engine.call
        is_chosen = any(chosen.call.index == call.index for chosen in self._chosen)
        is_kept = isinstance(self.engine.loss, OwnSum) and call.weight and is_small(outputs)
        if not is_chosen and not is_kept:
            return
        additive = self.engine.loss.additive
        if additive is not self.engine.loss:
            sums, counts = additive.sums(outputs, call)
        numbers = numbers_of(sums, counts)
        self._numbers[call.index] = numbers
        if is_kept:
            self._outputs.append(Outputs(outputs, call.batch, len(call.micro_batch), numbers))

    def run(self) -> None:
        """Test the rule on this window.

        Raises:
            LossNotAdditive: If it does not hold.
            UnkeyedRandomness: If a forward drew from a random generator.
        """
        engine = self.engine
        has_work = self._chosen or len(self._outputs) > 1
        if not has_work or not self.is_on or engine.status.failure is not None:
            return
        call = engine.call
        # Compiled layers would be compiled again for forwards without gradients.
        with torch.no_grad(), extra_forwards(engine.model), not_compiled():
            self._audit_outputs()
            for chosen in self._chosen:
                self._audit_call(chosen)
        engine.call = call  # the audits made others

    def run_together(self) -> None:
        """Run the audits of ranks whose forwards are collectives, before the window's own: FSDP
        keeps the gradients of a window where other forwards would disturb them.

        Raises:
            LossNotAdditive: If the rule does not hold.
            ProcessFailed: If it does not hold on another rank.
        """
        if not self._chosen:
            return
        engine = self.engine
        with engine.deferring_failures():
            try:
                self.run()
            except (LossNotAdditive, UnkeyedRandomness) as error:
                engine.status.failure = error  # of all ranks, which are all here
        if engine.backend.num_processes > 1 or engine.status.failure is not None:
            engine.backend.all_reduce_status(engine.status)  # raises on all ranks

    def _choose(self) -> None:
        engine = self.engine
        audits = engine.window.state.audits
        self._chosen = audits.choose(engine.calls)
        if engine.audits_together:
            number = engine.backend.max_over_ranks(len(self._chosen))
            self._chosen += audits.more(engine.calls, number - len(self._chosen))

    def _audit_outputs(self) -> None:
        """Check that the user's loss of all outputs together is that of the micro-batches."""
        whole = together(self._outputs)
        if whole is None:
            return
        engine = self.engine
        outputs, batch = whole
        with engine.backend.autocast():
            sums, counts = engine.loss.sums(outputs, Call(engine.call.micro_batch, batch))
        parts = [kept.numbers for kept in self._outputs]
        error = residual(numbers_of(sums, counts), parts)
        if error > TOLERANCES[torch.float32]:
            raise not_additive(engine.window.description, error, engine.rule.name)

    def _audit_call(self, chosen: Chosen) -> None:
        """Audit one call, and note it. If it does not fit into memory, warn and leave it out."""
        engine = self.engine
        try:
            for first, second in self._comparisons(chosen):
                self._compare(first, second, chosen)
        except Exception as error:
            if not is_out_of_memory(error) or engine.audits_together:
                raise
            where = engine.window.description
            warnings.warn(
                f"hf_ga: {where}: an audit ran out of memory and was left out.", stacklevel=2
            )
        engine.window.state.audits.note(chosen)

    def _comparisons(self, chosen: Chosen) -> list[tuple[np.ndarray, np.ndarray]]:
        """Choose pairs of groups of samples, as offsets in the window, to be compared with both
        together.

        They are the two parts of the call; where all of its samples are of the new kind, also some
        of them and as many others.
        """
        window = self.engine.window
        own = window.offsets_of(chosen.call.micro_batch)
        others = np.setdiff1d(window.offsets, own)

        def some_others(number: int) -> np.ndarray:
            spread = np.linspace(0, len(others) - 1, number).astype(int)
            return others[np.unique(spread)]

        first = uneven_part(len(own))
        halves = own[first], np.delete(own, first)
        if self.engine.audits_together:  # the same number of forwards on all ranks
            return [(own, some_others(max(1, len(own) - 1))) if len(others) else halves]
        pairs = [halves] if len(own) > 1 else []
        if len(others) and (chosen.is_uniform or len(own) == 1):
            number = max(1, len(own) // 2)
            pairs.append((own[:number], some_others(number)))
        return pairs

    def _compare(self, first: np.ndarray, second: np.ndarray, chosen: Chosen) -> None:
        """Check that the numbers of two groups of samples add up to those of both together.

        Raises:
            LossNotAdditive: If they do not.
        """
        engine = self.engine
        groups = [first, second]
        own = engine.window.offsets_of(chosen.call.micro_batch)
        is_call = np.array_equal(np.sort(np.concatenate(groups)), np.sort(own))
        known = self._numbers.get(chosen.call.index) if is_call else None
        if known is None or engine.audits_together:
            *numbers, whole = self._numbers_of([*groups, np.concatenate(groups)])
        else:
            numbers = self._numbers_of(groups)
            whole = known
        error = residual(whole, numbers)
        if error > self._tolerance(error, groups):
            ids = engine.window.sample_ids[np.concatenate(groups)].tolist()
            where = f"{engine.window.description}, samples {ids[:8]}"
            raise not_additive(where, error, engine.rule.name, chosen.new)

    def _numbers_of(self, groups: list[np.ndarray]) -> list[Numbers]:
        """Compute sums and counts of groups of the window's samples, by forwards without gradients.

        Args:
            groups: Offsets in the window.
        """
        engine = self.engine
        loss = engine.loss.additive
        state = engine.window.state
        num_plain = state.num_plain
        before = random_states()
        found = []
        with engine.scope(), engine.backend.autocast():
            for index, micro_batch in enumerate(engine.window.split(groups).micro_batches):
                counts = loss.count(micro_batch.batch, len(micro_batch))
                outputs = engine.forward_only(Call(micro_batch, index=index, counts=counts))
                found.append(numbers_of(*loss.sums(outputs, engine.call)))
        state.num_plain = num_plain  # which counts what is trained on
        engine.check_generators(before)
        return found

    def _tolerance(self, error: float, halves: list[np.ndarray]) -> float:
        """Return the relative error that rounding may cause: in doubt, as much as another order of
        the same samples does.
        """
        engine = self.engine
        device = engine.backend.device.type
        with engine.backend.autocast():
            is_autocast = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if is_autocast else torch.float32
        tolerance = TOLERANCES[dtype]
        if error <= tolerance or engine.audits_together:
            return tolerance
        whole = np.concatenate(halves)
        in_order, reversed_order = self._numbers_of([whole, whole[::-1]])
        return max(tolerance, TIMES_ROUNDING * residual(in_order, [reversed_order]))
