"""Finds out what a model's loss averages over, whether it depends on padding, and which speed-ups
leave it unchanged.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.batches import IGNORED_LABEL, Batch, take_rows
from hf_ga.exact.entries import put_together
from hf_ga.exact.forward import LossFunction, restored_buffers, restored_modes
from hf_ga.exact.hooks import SpeedUp
from hf_ga.exact.loss import COUNTING_RULES, HeadMean, Loss, SumOfMeans, UserLoss, WithRouter
from hf_ga.exact.override import override
from hf_ga.exact.router import Router
from hf_ga.exact.rule import structure_of
from hf_ga.exact.sums_of_means import find_sum_of_means
from hf_ga.proof import causes
from hf_ga.proof.coverage import (
    num_classes,
    special_tokens,
    with_extreme_values,
    with_other_labels,
    with_sorted_labels,
)
from hf_ga.proof.prober import BatchLoss, Prober
from hf_ga.proof.probes import (
    NUM_IN_A,
    NUM_PROBE_SAMPLES,
    TOLERANCE,
    ProbeResult,
    additivity_error,
    applicable_rules,
    integer_labels,
    relative_error,
    same_shapes,
    separating_labels,
    separating_means,
    targets_per_sample,
)

# The relative error of a correct rule is rounding: at most TOLERANCE, or ROUNDING_FACTOR times the
# relative error of reordering the samples. If reordering gives more than MAX_ROUNDING, correct and
# wrong rules are indistinguishable.
ROUNDING_FACTOR = 20.0
MAX_ROUNDING = 5e-4
NUM_WIDTHS = 8  # maximum number of short samples to test with and without padding
# Rows of the probe batch. Sample i of it has position i, which keys its dropout.
ALL_ROWS = np.arange(NUM_PROBE_SAMPLES)
# For trials of speed-ups: two short samples with few targets, and the longest.
TRIAL_ROWS = np.array([0, 1, NUM_PROBE_SAMPLES - 1])
# A proof compares two groups of samples, A and B, with both together.
GROUP_ROWS = {"A": ALL_ROWS[:NUM_IN_A], "B": ALL_ROWS[NUM_IN_A:], "A+B": ALL_ROWS}
# Changes of a buffer's value, to see whether the loss reads it: to a value near it, and to one
# beyond the number of steps at which a schedule may change.
BUFFER_CHANGES = (lambda value: 2 * value + 1, lambda value: value + 10**6)
# What a loss_fn returns if classes, samples or targets have weights.
WEIGHTED_FORM = """
    losses = torch.nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")
    return (weights * losses).sum(), weights.sum()  # with weights = class_weights[batch["labels"]]
"""


class Prover(Prober):
    """Runs the parts of a proof; `targets.prove` calls them in order.

    Args:
        model: The model, wrapped or not.
        samples: Some samples of the dataset.
        collate_fn: List of samples -> keyword arguments of the model.
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets). None: the loss of the
            model's own head.

    Attributes:
        router: The load-balancing loss of a mixture of experts. None if the head adds none.
        rejected_speed_ups: Names of the speed-ups that failed, each with the reason.
        structure: Names, dtypes and numbers of dims of the forward's arguments in the trials of the
            speed-ups (see `structure_of`).
        tolerance: Maximum relative error that counts as rounding, as measured by `prove_loss`.
        ignored_label: The label that the head ignores: -100, or 0 (see `find_ignored_label`).
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Sequence[Any],
        collate_fn: Callable,
        loss_fn: LossFunction | None,
    ) -> None:
        """Start a proof in which nothing is proven yet; the class docstring has the arguments."""
        super().__init__(model, samples, collate_fn, loss_fn)
        self.router: Router | None = None
        self.rejected_speed_ups: dict[str, str] = {}
        self.structure: frozenset | None = None
        self.tolerance = TOLERANCE
        self.ignored_label = IGNORED_LABEL

    def find_router(self) -> None:
        """Set `router` if the head adds the load-balancing loss of a mixture of experts.

        Runs one forward and backward, which shows the coefficients of this loss. Without a
        coefficient other than zero, `router` stays None.
        """
        router = Router(self.model)
        if self.loss_fn is not None or not router.owners:
            return
        with router.patched():
            self._probe(self.probe_batch(), ALL_ROWS)
            router.find_coefficients()
        self.router = router if any(router.coefficients) else None

    def find_ignored_label(self) -> None:
        """Set `ignored_label` to 0 if the head treats label 0 as padding (`ignore_index=0`).

        Then the probe batches are masked with 0: such a head may not support labels of -100, which
        on a GPU is a device-side assert.
        """
        if self.loss_fn is None and self._ignores_zeros():
            self.ignored_label = 0

    def _ignores_zeros(self) -> bool:
        """Whether labels of 0 add nothing to the head's loss.

        Tests a probe batch in which all labels of group A are 0: the loss of A is then 0, or NaN (a
        mean over no targets), and A and B together have the loss and the gradient of B. False if
        that is unknown: the labels are no classes, none is positive, or the head fails on them.
        """
        try:
            batch = self.probe_batch(ignored_label=0)
            batch = separating_labels(batch, NUM_PROBE_SAMPLES, ignored_label=0)
            labels = integer_labels(batch, NUM_PROBE_SAMPLES)
            if labels is None:
                return False
            labels = labels.clone()
            labels[:NUM_IN_A] = 0
            batch = {**batch, "labels": labels}
            parts = {
                group: take_rows(batch, rows, self.sample_entries)
                for group, rows in GROUP_ROWS.items()
            }
            with self._without_router():
                loss_of_a = self._batch_loss(parts["A"], GROUP_ROWS["A"])
                if np.isfinite(loss_of_a) and loss_of_a != 0:
                    return False
                together = self._probe(batch, ALL_ROWS)
                only_b = self._probe(parts["B"], GROUP_ROWS["B"])
                tolerance = self._measure_tolerance(batch, ALL_ROWS, together)
        except (IndexError, RuntimeError, ValueError):
            return False
        return relative_error(together, only_b) <= tolerance

    def choose_speed_ups(self, candidates: Sequence[SpeedUp]) -> None:
        """Try each speed-up together with those that have passed before it.

        A speed-up passes if loss and gradient of three samples are the same with and without it, up
        to rounding. It is then added to `speed_ups`; otherwise its name and the reason are added to
        `rejected_speed_ups`. Also sets `structure`.
        """
        batch = take_rows(self._separated_batch(), TRIAL_ROWS, self.sample_entries)
        with self._without_router():
            reference = self._probe(batch, TRIAL_ROWS)
            tolerance = self._measure_tolerance(batch, TRIAL_ROWS, reference)
            for speed_up in candidates:
                reason = self._rejection_reason(speed_up, batch, reference, tolerance)
                if reason is None:
                    self.speed_ups.append(speed_up)
                else:
                    self.rejected_speed_ups[speed_up.name] = reason
        self.structure = structure_of(self._model_arguments(put_together(batch)))

    def _rejection_reason(
        self, speed_up: SpeedUp, batch: Batch, reference: ProbeResult, tolerance: float
    ) -> str | None:
        """Attach a speed-up to the model, run a trial batch with it, and judge the result.

        The trial also uses the speed-ups that have passed before. `speed_ups` is unchanged
        afterwards. A speed-up changes the model only while a batch is computed, so there is nothing
        to detach if it fails.

        Args:
            speed_up: The speed-up to try.
            batch: The trial batch, with the rows `TRIAL_ROWS` of the probe batch.
            reference: Loss and gradient of this batch without the speed-up.
            tolerance: Maximum relative error of loss and gradient.

        Returns:
            Why the speed-up is rejected: it does not support this model, raises an error, had no
            effect on the trial batch, or changes loss or gradient. None if it passes.
        """
        # A loss_fn, and a head whose loss is a sum of several means, read the logits.
        is_sum_of_means = find_sum_of_means(self._model_arguments(batch)) is not None
        reason = speed_up.attach(
            self.model,
            self.dropout,
            reads_logits=self.loss_fn is not None or is_sum_of_means,
            has_router=self.router is not None,
        )
        if reason is not None:
            return reason
        self.speed_ups.append(speed_up)
        try:
            error = relative_error(self._probe(batch, TRIAL_ROWS), reference)
            reason = speed_up.verdict()
        except Exception as failure:  # any error of a forward that does not support it
            return f"{type(failure).__name__}: {failure}"
        finally:
            self.speed_ups.remove(speed_up)
        if reason is not None:
            return reason
        if not error <= tolerance:  # also if it is NaN
            return f"it changes loss or gradient (relative error {error:.0e})"
        return None

    def prove_loss(self) -> float:
        """Find the rule by which losses of micro-batches add up, and set `loss` and `tolerance`.

        Tests each rule on a probe batch that is split into two groups of samples, A and B: the
        terms of A and B must sum to loss and gradient of both together.

        Returns:
            The relative error of the sum.

        Raises:
            LossNotAdditive: If no rule fits, if several different ones fit, or if training forwards
                change buffers in a way that depends on the split.
        """
        batch = self._separated_batch()
        batches = {
            group: take_rows(batch, rows, self.sample_entries) for group, rows in GROUP_ROWS.items()
        }
        with self._without_router():
            results = {
                group: self._probe(batches[group], rows) for group, rows in GROUP_ROWS.items()
            }
            self.tolerance = self._measure_tolerance(batch, ALL_ROWS, results["A+B"])
            proven = self._prove_sum_of_means(batches, results["A+B"])
            if proven is None:
                proven = self._prove_one_mean(batches, results)
            self.loss, residual = proven
        if self.router is not None:
            residual = self._prove_router(self.router, batches)
        self._check_state(batch, ALL_ROWS, is_additive=True)
        return residual

    def _prove_router(self, router: Router, batches: dict[str, Batch]) -> float:
        """Test the loss together with the load-balancing loss of a mixture of experts.

        Sets `loss` to the sum of both.

        Args:
            router: The load-balancing loss.
            batches: The probe batches: two groups of samples, "A" and "B", and both together,
                "A+B".

        Returns:
            The relative error of the sum over A and B.

        Raises:
            LossNotAdditive: If the head computes the load-balancing loss in another way.
        """
        self.loss = WithRouter(self.loss, router)
        split = self._sum_of_groups(batches)
        residual = relative_error(split, self._probe(batches["A+B"], ALL_ROWS))
        if not residual <= self.tolerance:
            raise LossNotAdditive(
                "the router's auxiliary loss differs from that of Switch Transformer "
                f"(relative error {residual:.1e}). Set output_router_logits=False (no load "
                "balancing), or pass loss_fn."
            )
        return residual

    def _prove_sum_of_means(
        self, batches: dict[str, Batch], reference: ProbeResult
    ) -> tuple[Loss, float] | None:
        """Test whether the head's loss is a sum of several means (question answering, for example).

        The labels in the batch show which kind of head it is; `exact/sums_of_means.py` then
        recomputes each mean from the logits. Sets `loss` to this candidate, also if it fails.

        Args:
            batches: The probe batches: two groups of samples, "A" and "B", and both together,
                "A+B".
            reference: Loss and gradient of A+B, as the head computes them.

        Returns:
            The loss and the relative error of its sum over A and B. None if the head is of another
            kind, or its loss is not reproduced.
        """
        if self.loss_fn is not None:
            return None
        name = find_sum_of_means(self._model_arguments(batches["A+B"]))
        if name is None:
            return None
        self.loss = SumOfMeans(name)
        try:
            residual = relative_error(self._sum_of_groups(batches), reference)
        except LossNotAdditive:  # the outputs are not those of this kind of head
            return None
        if residual > self.tolerance:
            return None
        return self.loss, residual

    def _prove_one_mean(
        self, batches: dict[str, Batch], results: dict[str, ProbeResult]
    ) -> tuple[Loss, float]:
        """Find the counting rule by which the loss is one mean over its targets.

        For each rule that may apply, tests whether the losses of two groups of samples add up to
        that of both, weighted by their numbers of targets. Several rules fit by chance if they give
        A the same share of the targets of A+B; then the last sample's labels are masked, too. Rules
        that still give the same share make the same update.

        Args:
            batches: The probe batches: two groups of samples, "A" and "B", and both together,
                "A+B".
            results: Their losses and gradients.

        Returns:
            The loss, and the relative error of its sum over A and B.

        Raises:
            LossNotAdditive: If no counting rule fits, or several different ones do.
        """
        is_sum = self.loss_fn is not None
        counts = self._count_targets(batches, results)
        residuals = {
            rule: additivity_error(list(results.values()), num_targets, is_sum)
            for rule, num_targets in counts.items()
        }
        fitting = [rule for rule, residual in residuals.items() if residual <= self.tolerance]
        fitting_masked = fitting
        are_indistinguishable = _num_shares(fitting, counts) > 1
        if len(fitting) > 1 and not are_indistinguishable:
            fitting_masked = self._fitting_without_last_labels(batches["A+B"], fitting)
            are_indistinguishable = not fitting_masked
        if not fitting or are_indistinguishable:
            losses = {group: result.loss for group, result in results.items()}
            self._check_state(batches["A+B"], ALL_ROWS, is_additive=False)
            cause = causes.likely_cause(self.model, losses)
            if fitting:
                message = _several_rules_message(fitting)
            else:
                message = _no_rule_message(self.model, cause, residuals, counts, losses)
            raise _loss_not_additive(message, cause)
        rule = fitting_masked[0]
        loss = UserLoss(self.loss_fn) if is_sum else HeadMean(rule)
        return loss, residuals[rule]

    def _fitting_without_last_labels(self, batch: Batch, rules: list[str]) -> list[str]:
        """Return the counting rules that still fit if the last sample has no labels.

        Rules that count labels then give group A another share of the targets than rules that count
        samples or tokens.

        Args:
            batch: The probe batch. Its labels are integers, as more than one rule applies.
            rules: The names of the counting rules to test.
        """
        labels = batch["labels"].clone()
        labels[-1] = self.ignored_label
        masked = {**batch, "labels": labels}
        batches = {}
        results = {}
        for group, rows in GROUP_ROWS.items():
            batches[group] = take_rows(masked, rows, self.sample_entries)
            results[group] = self._probe(batches[group], rows)
        counts = self._count_targets(batches, results)
        return [
            rule
            for rule in rules
            if additivity_error(list(results.values()), counts[rule], False) <= self.tolerance
        ]

    def _count_targets(
        self, batches: dict[str, Batch], results: dict[str, ProbeResult]
    ) -> dict[str, list[float]]:
        """Count the targets of A, B and A+B by each counting rule that may apply to the head.

        Args:
            batches: The probe batches: two groups of samples, "A" and "B", and both together,
                "A+B".
            results: Their losses and gradients, with the numbers of targets from `loss_fn`.

        Returns:
            For each rule, the three numbers of targets. With a `loss_fn` there is one rule, the
            numbers that it returned.
        """
        if self.loss_fn is not None:
            return {UserLoss.name: [results[group].num_targets for group in GROUP_ROWS]}
        rules = applicable_rules(self._model_arguments(batches["A+B"]), self.ignored_label)
        return {
            rule: [
                COUNTING_RULES[rule](batches[group], len(rows))
                for group, rows in GROUP_ROWS.items()
            ]
            for rule in rules
        }

    def _sum_of_groups(self, batches: dict[str, Batch]) -> ProbeResult:
        """Compute loss and gradient of a window with two micro-batches, the groups A and B.

        Uses `loss`, the rule under test.

        Args:
            batches: The probe batches: two groups of samples, "A" and "B", and both together,
                "A+B".
        """
        return self._probe_window([batches["A"], batches["B"]], [GROUP_ROWS["A"], GROUP_ROWS["B"]])

    def _probe_window(
        self, batches: Sequence[Batch], positions: Sequence[np.ndarray]
    ) -> ProbeResult:
        """Compute loss and gradient of a window of micro-batches by `loss`, as in training.

        Args:
            batches: The micro-batches.
            positions: For each micro-batch, the positions of its samples, which key their dropout.
        """
        loss, gradients = self.loss_and_gradients(self.loss, batches, positions)
        return ProbeResult(loss, 0.0, gradients)

    def cover_values(self) -> None:
        """Test the proven loss on labels and weights that the probe samples happen not to have.

        A loss with class weights or sample weights looks like a plain mean if all probe samples
        have the same class or weight. Compares the loss of a batch with that of its two parts, for
        batches with all classes and with extreme weights. Values that raise an error are skipped.

        Raises:
            LossNotAdditive: If the loss of a batch differs from that of its two parts.
        """
        original = self._separated_batch()
        data = self.collate(self.candidates)
        # A head reads the arguments of the forward only; a loss_fn may read any entry.
        read_entries = set(self.sample_entries)
        if self.loss_fn is None:
            read_entries &= self._model_arguments(original).keys()
        variants = [
            *self._with_all_classes(original),
            *with_extreme_values(original, data, read_entries),
        ]
        for batch in variants:
            changed = [name for name in self.sample_entries if batch[name] is not original[name]]
            split_rows = [GROUP_ROWS["A"], GROUP_ROWS["B"]]
            parts = [take_rows(batch, rows, self.sample_entries) for rows in split_rows]
            try:
                loss = self._proven_loss([batch], [ALL_ROWS])
                loss_of_parts = self._proven_loss(parts, split_rows)
            except (IndexError, RuntimeError, ValueError):
                continue  # values that the model does not support
            if not np.isfinite(loss):
                continue  # values that the model does not support
            error = abs(loss_of_parts - loss) / max(abs(loss), 1e-12)
            if not error <= self.tolerance:  # also if it is NaN: a part without targets
                raise LossNotAdditive(
                    f"the loss of a batch is not the mean over its targets ({self.loss.name}) when "
                    f"samples differ in {changed[0]!r}: {loss:.4g} for a batch, "
                    f"{loss_of_parts:.4g} from its two parts. Likely cause: the loss is weighted "
                    f"by {changed[0]!r} (class weights, sample weights). Remedy: pass the sum and "
                    "what it is divided by, loss_fn(outputs, batch) -> ((weights * losses).sum(), "
                    "weights.sum())."
                )

    def _with_all_classes(self, batch: Batch) -> Iterator[Batch]:
        """Yield copies of a probe batch whose labels together contain all classes of the head.

        Runs one forward to see the number of classes. If the head returns no logits, yields one
        copy with the same labels in another order; nothing if its labels are no integers. Special
        tokens are not used as labels where a sample has several labels.
        """
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
            return
        engine = self._engine(self.loss, speed_ups=())
        engine.begin(self._window([batch], [ALL_ROWS]), training=False)
        with torch.no_grad(), engine.scope(), engine.micro_batch(0) as on_device:
            classes = num_classes(engine.forward(on_device), labels)
        if classes is None:
            yield with_sorted_labels(batch, self.ignored_label)
            return
        excluded = special_tokens(self.model) if labels.dim() > 1 else []
        yield from with_other_labels(batch, classes, excluded)

    def width_matters(self) -> bool | None:
        """Find out whether padding a sample to a larger width changes its loss or its gradient.

        Compares up to `NUM_WIDTHS` samples alone (unpadded) with the same samples padded to the
        width of the longest one.

        Returns:
            None if that is unknown: all samples have the same length, the shorter ones have no
            targets, or the collate function is random.
        """
        shorter = self.candidates[:-1]
        if not shorter:
            return None
        with_targets = np.flatnonzero(
            targets_per_sample(self.collate(shorter), len(shorter), self.ignored_label)
        )
        if not len(with_targets) or self.is_collate_random:
            return None
        evenly_spaced = np.unique(np.linspace(0, len(with_targets) - 1, NUM_WIDTHS).astype(int))
        samples = [shorter[i] for i in with_targets[evenly_spaced]]
        padded_batch = self.collate([*samples, self.samples_by_length[-1]])
        found_padding = False
        # One by one: at some lengths padding may have no effect (pooling, top-k).
        for i, sample in enumerate(samples):
            unpadded = self.collate([sample])
            padded = take_rows(padded_batch, np.array([i]), self.sample_entries)
            if same_shapes(unpadded, padded):
                continue
            found_padding = True
            try:
                error = relative_error(self._probe_sample(unpadded), self._probe_sample(padded))
            except (RuntimeError, ValueError, LossNotAdditive):
                return True  # the model does not support a batch of this small width
            if error > TOLERANCE:
                return True
        return False if found_padding else None

    def check_unpadded(self) -> None:
        """Check that a batch with padding equals the sum of its samples, one of them unpadded.

        Called if padding changes a sample's loss: then all micro-batches of a window are padded to
        one width, and the longest sample alone has no padding. Some models treat a batch without
        padding differently. Nothing is checked with a `loss_fn` or a random collate function.

        Raises:
            LossNotAdditive: If the losses or gradients of the longest and the shortest sample do
                not sum to those of both together.
        """
        if self.loss_fn is not None or self.is_collate_random:
            return
        batch = self.collate([self.samples_by_length[0], self.samples_by_length[-1]])
        if not any(self.loss.count(batch, 2)):
            return
        rows = np.arange(2)
        split_rows = [rows[:1], rows[1:]]
        parts = [take_rows(batch, part, self.sample_entries) for part in split_rows]
        split = self._probe_window(parts, split_rows)
        together = self._probe_window([batch], [rows])
        error = relative_error(split, together)
        if not error <= self.tolerance:
            raise LossNotAdditive(
                "the model treats a batch without padding differently from one with padding "
                f"(relative error {error:.1e}), so a sample's loss depends on whether its "
                "micro-batch is padded. Likely cause: an argument that the model's processor "
                "returns is missing (token_type_ids), or the attention mask is omitted when all "
                "ones. Remedy: pass it, or pad every batch in the collate function to one width, "
                "larger than the longest sample."
            )

    def _without_router(self) -> AbstractContextManager[None]:
        """Return a context in which the load-balancing loss of a mixture of experts is zero.

        A no-op if the head adds none.
        """
        return nullcontext() if self.router is None else self.router.patched()

    def _separated_batch(self) -> Batch:
        """Return the probe batch with some labels masked, so that counting rules give different
        numbers of targets.

        Also masks targets of a second mean (answer positions, sentence labels), if the loss is then
        still finite. With a `loss_fn` nothing is masked: it counts its own targets, and may not
        support ignored labels.
        """
        batch = self.probe_batch(self.ignored_label)
        if self.loss_fn is not None:
            return batch
        batch = separating_labels(batch, NUM_PROBE_SAMPLES, self.ignored_label)
        separated = separating_means(batch, NUM_PROBE_SAMPLES)
        try:
            is_finite = np.isfinite(self._batch_loss(separated, ALL_ROWS))
        except (IndexError, RuntimeError):  # this head does not support positions beyond the text
            return batch
        return separated if is_finite else batch

    def _probe_sample(self, batch: Batch) -> ProbeResult:
        """Compute loss and gradient of a batch with one sample.

        Uses the head's own loss. If the loss is a sum of several means, a single sample may have no
        targets of one of them, and the head returns NaN: then the proven loss is used.
        """
        position = np.arange(1)
        if self.loss.num_means > 1:
            return self._probe_window([batch], [position])
        return self._probe(batch, position)

    def _measure_tolerance(self, batch: Batch, positions: np.ndarray, result: ProbeResult) -> float:
        """Measure rounding errors by reversing the order of the samples of a batch.

        The reversed batch has the same mean loss, summed in another order.

        Args:
            batch: A probe batch.
            positions: The positions of its samples, which key their dropout.
            result: Loss and gradient of the batch.

        Returns:
            The maximum relative error that counts as rounding.

        Raises:
            LossNotAdditive: If the order of the samples changes more than rounding.
        """
        rounding = relative_error(self._probe_reversed(batch, positions), result)
        if rounding <= MAX_ROUNDING:
            return max(TOLERANCE, ROUNDING_FACTOR * rounding)
        self._raise_order_matters(batch, positions, result.loss, rounding)

    def _raise_order_matters(
        self, batch: Batch, positions: np.ndarray, loss: float, error: float
    ) -> NoReturn:
        """Raise the error for a loss that depends on the order of the samples in a batch.

        Args:
            batch: A probe batch.
            positions: The positions of its samples, which key their dropout.
            loss: Its loss.
            error: The relative error of loss or gradient of the reversed batch.

        Raises:
            LossNotAdditive: Always, with the most likely cause.
        """
        problem = (
            "the loss or its gradient depends on the order of the samples in a batch "
            f"(relative error {error:.1e}, limit {MAX_ROUNDING:.0e}). "
        )
        if np.isnan(loss):
            raise LossNotAdditive(
                f"{problem}Likely cause: the loss is NaN, a mean over no targets."
            )
        self._check_state(batch, positions, is_additive=False)
        cause = causes.repeated_rows_cause(self.dropout)
        if cause is not None and self._is_order_irrelevant_without_dropout(batch, positions):
            raise _loss_not_additive(f"{problem}Cause: {cause}.", cause)
        cause = causes.likely_cause(self.model, None)
        raise _loss_not_additive(
            f"{problem}Likely cause: {cause}. Low precision can be a cause, too.", cause
        )

    def _probe_reversed(self, batch: Batch, positions: np.ndarray) -> ProbeResult:
        """Compute loss and gradient of a batch with its samples in reverse order.

        Samples keep their dropout masks.

        Args:
            batch: A probe batch.
            positions: The positions of its samples, which key their dropout.
        """
        reverse = np.arange(len(positions))[::-1].copy()
        reversed_batch = take_rows(batch, reverse, self.sample_entries)
        return self._probe(reversed_batch, positions[reverse])

    def _is_order_irrelevant_without_dropout(self, batch: Batch, positions: np.ndarray) -> bool:
        """Whether loss and gradient of the reversed batch are the same if nothing is dropped.

        Then the dropout masks are the reason why the order of the samples matters.
        """

        def keep_all(key: int, shape: torch.Size, drop_probability: float) -> Tensor:
            """Stand in for `KeyedDropout._draw`: return a mask that keeps all elements."""
            return torch.ones(shape, dtype=torch.bool, device=self.device)

        def drop_nothing(key: int, input: Tensor, drop_probability: float) -> Tensor:
            """Stand in for `KeyedDropout._dropped`: return the input itself."""
            return input

        with override(self.dropout, _draw=keep_all, _dropped=drop_nothing):
            result = self._probe(batch, positions)
            error = relative_error(self._probe_reversed(batch, positions), result)
        return error <= MAX_ROUNDING

    def _check_state(self, batch: Batch, positions: np.ndarray, *, is_additive: bool) -> None:
        """Check that training forwards change no buffers in a way that depends on the split.

        A buffer that is updated in each training forward (a running mean, the vectors of a spectral
        norm, a counter of steps) ends with other values if a window has more micro-batches. Nothing
        is checked if the model has a BatchNorm in training mode, which is reported by itself.

        Args:
            batch: A probe batch.
            positions: The positions of its samples, which key their dropout.
            is_additive: Whether the loss is additive. If so, a buffer that the loss does not read
                now gets a warning only. If not, this looks for the reason: counters are skipped,
                and running statistics of norm layers, which training forwards do not read.

        Raises:
            LossNotAdditive: If such buffers affect the loss, or may be the reason why it is not
                additive.
        """
        if causes.batch_norm_cause(self.model) is not None:
            return
        names = self._changed_float_buffers(batch, positions, is_additive=is_additive)
        counters = self._changed_counters(batch, positions) if is_additive else []
        if counters and self._reads_buffers(counters, batch, positions):
            cause = causes.changed_buffers_cause(self.model, counters)
            raise _loss_not_additive(f"{cause}, which the loss depends on.", cause)
        if not names:
            return
        cause = causes.changed_buffers_cause(self.model, names)
        if is_additive and not self._reads_buffers(names, batch, positions):
            warnings.warn(
                f"hf_ga: the loss does not depend on them now, but {cause} if a later forward "
                "reads them.",
                stacklevel=2,
            )
        else:
            raise _loss_not_additive(
                f"{cause}. Keep them unchanged in training forwards: most modules do after "
                "module.eval().",
                cause,
            )

    def _changed_float_buffers(
        self, batch: Batch, positions: np.ndarray, *, is_additive: bool
    ) -> list[str]:
        """Return the names of floating-point buffers whose values depend on the split of a window.

        These are the vectors of spectral norms, and all buffers that have other values after a
        window of one micro-batch than after one of two.

        Args:
            batch: A probe batch.
            positions: The positions of its samples, which key their dropout.
            is_additive: Whether the loss is additive. If not, running statistics of norm layers are
                skipped.
        """
        names = causes.power_iteration_buffers(self.model)
        changed = [
            name
            for name in causes.changed_float_buffers(self.model, self._initial_buffers)
            if is_additive or not causes.is_norm_statistic(self.model, name)
        ]
        for name in self._split_dependent(changed, batch, positions):
            if name not in names:
                names.append(name)
        return names

    def _changed_counters(self, batch: Batch, positions: np.ndarray) -> list[str]:
        """Return the names of integer and bool buffers whose values depend on the split of a
        window. Counters of norm layers are skipped.

        Args:
            batch: A probe batch.
            positions: The positions of its samples, which key their dropout.
        """
        changed = causes.changed_integer_buffers(self.model, self._initial_buffers)
        return self._split_dependent(changed, batch, positions)

    def _split_dependent(
        self, buffer_names: list[str], batch: Batch, positions: np.ndarray
    ) -> list[str]:
        """Return those of some buffers whose values depend on the split of a window.

        Compares their values after a window of one micro-batch and after the same window in two
        micro-batches, up to rounding.

        Args:
            buffer_names: Names of the buffers to compare.
            batch: The samples of the window.
            positions: Their positions, which key their dropout.
        """
        if not buffer_names:
            return []
        split_rows = [np.arange(NUM_IN_A), np.arange(NUM_IN_A, len(positions))]
        parts = [take_rows(batch, rows, self.sample_entries) for rows in split_rows]
        split_positions = [positions[rows] for rows in split_rows]
        after_two = self._buffers_after(buffer_names, parts, split_positions)
        after_one = self._buffers_after(buffer_names, [batch], [positions])
        return [
            name
            for name in buffer_names
            if not torch.allclose(
                after_two[name].cpu().double(),
                after_one[name].cpu().double(),
                rtol=TOLERANCE,
                atol=TOLERANCE,
            )
        ]

    def _reads_buffers(self, buffer_names: list[str], batch: Batch, positions: np.ndarray) -> bool:
        """Whether the loss of a batch depends on some buffers, in training or in evaluation mode.

        Changes their values and compares the losses; the values are restored afterwards. False for
        buffers that only record something, like the observers of quantization-aware training.

        Args:
            buffer_names: Names of the buffers.
            batch: A probe batch.
            positions: The positions of its samples, which key their dropout.
        """
        losses_before = self._losses_in_both_modes(batch, positions)
        for change in BUFFER_CHANGES:
            with restored_buffers(self.model):
                for name in buffer_names:
                    buffer = self.model.get_buffer(name)
                    buffer.copy_(change(buffer))
                try:
                    losses = self._losses_in_both_modes(batch, positions)
                except (IndexError, RuntimeError):  # the model uses the buffer as an index
                    return True
            for before, after in zip(losses_before, losses, strict=True):
                is_same = abs(before - after) <= TOLERANCE * abs(before)
                if not is_same:  # also if one is NaN
                    return True
        return False

    @torch.no_grad()
    def _losses_in_both_modes(self, batch: Batch, positions: np.ndarray) -> list[float]:
        """Return the loss of a batch in training mode and in evaluation mode.

        Modes and buffers are restored afterwards.

        Args:
            batch: A probe batch.
            positions: The positions of its samples, which key their dropout.
        """
        losses = []
        with restored_buffers(self.model), restored_modes(self.model):
            for is_training in (True, False):
                if not is_training:
                    self.model.eval()
                engine = self._engine(BatchLoss(self.loss_fn), speed_ups=())
                engine.begin(self._window([batch], [positions]), training=False)
                with engine.scope(), engine.micro_batch(0) as on_device:
                    losses.append(float(engine.mean(engine.forward(on_device))))
        return losses

    def _buffers_after(
        self, buffer_names: list[str], batches: list[Batch], positions: list[np.ndarray]
    ) -> dict[str, Tensor]:
        """Run a training window, and return copies of some buffers as they are after it.

        All buffers of the model are restored afterwards.

        Args:
            buffer_names: Names of the buffers to return.
            batches: The micro-batches of the window.
            positions: For each micro-batch, the positions of its samples, which key their dropout.
        """
        with restored_buffers(self.model):
            self.loss_and_gradients(BatchLoss(self.loss_fn), batches, positions)
            return {name: self.model.get_buffer(name).clone() for name in buffer_names}


def _loss_not_additive(message: str, cause: str) -> LossNotAdditive:
    """Build a LossNotAdditive exception whose `cause` another error message can quote."""
    error = LossNotAdditive(message)
    error.cause = cause
    return error


def _num_shares(rules: list[str], counts: dict[str, list[float]]) -> int:
    """Return how many different shares of the targets of A+B some counting rules give to group A.

    Args:
        rules: The names of the counting rules.
        counts: For each counting rule, the numbers of targets of A, B and A+B.
    """
    shares = set()
    for rule in rules:
        num_in_a, _, num_in_both = counts[rule]
        if num_in_both:
            shares.add(round(num_in_a / num_in_both, 9))
    return len(shares)


def _several_rules_message(fitting: list[str]) -> str:
    """Build the error message for counting rules that all fit but make different updates.

    Args:
        fitting: Names of these rules.
    """
    return (
        "several counting rules fit and cannot be distinguished on these samples: "
        f"{', '.join(fitting)}. Give "
        "prove_targets more samples of different lengths, or pass loss_fn."
    )


def _no_rule_message(
    model: nn.Module,
    cause: str,
    residuals: dict[str, float],
    counts: dict[str, list[float]],
    losses: dict[str, float],
) -> str:
    """Build the error message for a loss that fits no counting rule.

    Args:
        model: The model.
        cause: The likely cause. If it is `causes.UNKNOWN`, the message adds remedies for weighted
            losses and for losses that compare samples.
        residuals: For each counting rule, its relative error.
        counts: For each counting rule, the numbers of targets of A, B and A+B.
        losses: The losses of A, B and A+B.
    """
    remedy = "pass loss_fn(outputs, batch) -> (sum of the loss over the targets, number of targets)"
    if "loss_fn" in residuals:
        remedy = (
            "make sure that loss_fn returns the sum of the loss over the targets, not their mean"
        )
    remedy += "."
    if cause == causes.UNKNOWN:
        cause = causes.weighted_loss_cause(model)
        remedy += " For a loss that compares samples, pass whole_batch, which gets all of a window."
        remedy += f" With weights, return their sum in place of the number:{WEIGHTED_FORM}"
    losses_text = ", ".join(f"{group} {loss:.4g}" for group, loss in losses.items())
    counts_text = "; ".join(
        f"{rule}: {counts[rule]} targets in A, B, A+B, relative error {residuals[rule]:.1e}"
        for rule in residuals
    )
    return (
        "the loss of a batch is not the mean over its targets by any counting rule. Likely "
        f"cause: {cause}. "
        f"Remedy: {remedy} (Of two groups of samples and both together: losses {losses_text}; "
        f"{counts_text}.)"
    )
