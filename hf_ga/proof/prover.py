"""Finds out what a model's loss averages over, whether it depends on padding, and which speed-ups
leave it unchanged.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.batches import Batch, take_rows
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
)
from hf_ga.proof.prober import BatchLoss, Prober
from hf_ga.proof.probes import (
    NUM_IN_A,
    NUM_PROBE_SAMPLES,
    TOLERANCE,
    Probe,
    applicable_rules,
    relative_error,
    residual_of,
    same_shapes,
    separating_labels,
    separating_means,
    targets_per_row,
)

# A correct rule's residual is rounding: at most TOLERANCE, or 20 times the relative error of
# reordering the samples. Above MAX_ROUNDING, correct and wrong rules are indistinguishable.
TIMES_ROUNDING = 20.0
MAX_ROUNDING = 5e-4
NUM_WIDTHS = 8  # number of short samples to pad
# Two short samples with few targets, and the longest.
TRIAL_ROWS = np.array([0, 1, NUM_PROBE_SAMPLES - 1])
ALL_ROWS = np.arange(NUM_PROBE_SAMPLES)
# Other values of a buffer: one near it, and one beyond the steps at which a schedule may change.
OTHER_VALUES = (lambda value: 2 * value + 1, lambda value: value + 10**6)
# What to return where classes, samples or targets have weights.
WEIGHTED_FORM = """
    losses = torch.nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")
    return (weights * losses).sum(), weights.sum()  # with weights = class_weights[batch["labels"]]
"""
GROUPS = {"A": ALL_ROWS[:NUM_IN_A], "B": ALL_ROWS[NUM_IN_A:], "A+B": ALL_ROWS}


class Prover(Prober):
    """Runs the parts of a proof.

    Args:
        model: See `targets.prove`, as the others.

    Attributes:
        router: The model's balancing loss, if the head adds one.
        left_out: Names of the speed-ups that are not used, and why.
        structure: Of the batch that the speed-ups were tried on.
        tolerance: Of relative errors, as measured by `prove_loss`.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Sequence[Any],
        collate_fn: Callable,
        loss_fn: LossFunction | None,
    ) -> None:
        super().__init__(model, samples, collate_fn, loss_fn)
        self.router: Router | None = None
        self.left_out: dict[str, str] = {}
        self.structure: frozenset | None = None
        self.tolerance = TOLERANCE

    def find_router(self) -> None:
        """Find out whether the head adds a router's balancing loss, and its weight."""
        router = Router(self.model)
        if self.loss_fn is not None or not router.owners:
            return
        with router.patched():
            self._probe(self._rows_with_targets(), ALL_ROWS)
            router.find_coefficients()
        self.router = router if any(router.coefficients) else None

    def choose_speed_ups(self, candidates: Sequence[SpeedUp]) -> None:
        """Try each speed-up on top of those that passed; those that pass are used from then on.

        A speed-up passes if loss and gradient of three samples are the same with it, up to
        rounding.
        """
        separated = self._separated(self._rows_with_targets())
        batch = take_rows(separated, TRIAL_ROWS, self.entries)
        with self._without_router():
            plain = self._probe(batch, TRIAL_ROWS)
            tolerance = self._tolerance(batch, TRIAL_ROWS, plain)
            for speed_up in candidates:
                reason = self._try(speed_up, batch, plain, tolerance)
                if reason is None:
                    self.speed_ups.append(speed_up)
                else:
                    self.left_out[speed_up.name] = reason
        self.structure = structure_of(self._accepted(put_together(batch)))

    def _try(self, speed_up: SpeedUp, batch: Batch, plain: Probe, tolerance: float) -> str | None:
        """Return the reason why a speed-up fails. None: it passes."""
        reads_logits = (
            self.loss_fn is not None or find_sum_of_means(self._accepted(batch)) is not None
        )
        is_routed = self.router is not None
        reason = speed_up.attach(
            self.model, self.dropout, reads_logits=reads_logits, has_router=is_routed
        )
        if reason is not None:
            return reason
        self.speed_ups.append(speed_up)
        try:
            error = relative_error(self._probe(batch, TRIAL_ROWS), plain)
            reason = speed_up.verdict()
        except Exception as failure:  # any error of a forward that does not support it
            return f"{type(failure).__name__}: {failure}"
        finally:
            self.speed_ups.remove(speed_up)
        if reason is not None:
            return reason
        if not error <= tolerance:  # also where it is NaN
            return f"it changes loss or gradient (relative error {error:.0e})"
        return None

    def prove_loss(self) -> float:
        """Find the loss whose terms of A and B sum to the loss of A+B.

        Returns:
            The relative error of the sum.

        Raises:
            LossNotAdditive: If there is none, or several different ones.
        """
        whole = self._separated(self._rows_with_targets())
        batches = {name: take_rows(whole, rows, self.entries) for name, rows in GROUPS.items()}
        with self._without_router():
            probes = {name: self._probe(batch, GROUPS[name]) for name, batch in batches.items()}
            self.tolerance = self._tolerance(whole, ALL_ROWS, probes["A+B"])
            found = self._sum_of_means(batches, probes["A+B"])
            if found is None:
                found = self._one_mean(batches, probes)
            self.loss, residual = found
        if self.router is not None:
            self.loss = WithRouter(self.loss, self.router)
            residual = relative_error(self._added_up(batches), self._probe(whole, ALL_ROWS))
            if not residual <= self.tolerance:
                raise LossNotAdditive(
                    "the router's auxiliary loss differs from that of Switch Transformer "
                    f"(relative error {residual:.1e}). Set output_router_logits=False (no load "
                    "balancing), or pass loss_fn."
                )
        self._check_state(whole, ALL_ROWS, is_additive=True)
        return residual

    def _sum_of_means(self, batches: dict[str, Batch], whole: Probe) -> tuple[Loss, float] | None:
        """Recognise a head by its labels, if `sums_of_means.py` reproduces its loss."""
        name = find_sum_of_means(self._accepted(batches["A+B"])) if self.loss_fn is None else None
        if name is None:
            return None
        self.loss = SumOfMeans(name)
        try:
            residual = relative_error(self._added_up(batches), whole)
        except LossNotAdditive:  # not the outputs of this kind of head
            return None
        if residual > self.tolerance:
            return None
        return self.loss, residual

    def _one_mean(self, batches: dict[str, Batch], probes: dict[str, Probe]) -> tuple[Loss, float]:
        """Find the loss whose one mean fits.

        Two rules that count other numbers, but give A the same share of A+B, make the same update.

        Raises:
            LossNotAdditive: If no counting rule fits, or several different ones.
        """
        is_sum = self.loss_fn is not None
        counts = self._counts(batches, probes)
        residuals = {
            rule: residual_of(list(probes.values()), numbers, is_sum)
            for rule, numbers in counts.items()
        }
        fitting = [rule for rule, residual in residuals.items() if residual <= self.tolerance]
        shares_of_a = set()
        for rule in fitting:
            of_a, _, of_whole = counts[rule]
            if of_whole:
                shares_of_a.add(round(of_a / of_whole, 9))
        if not fitting or len(shares_of_a) > 1:
            losses = {name: probe.loss for name, probe in probes.items()}
            self._check_state(batches["A+B"], ALL_ROWS, is_additive=False)
            cause = causes.likely_cause(self.model, losses)
            message = _no_single_rule(self.model, cause, fitting, residuals, counts, losses)
            raise _not_additive(message, cause)
        rule = fitting[0]
        loss = UserLoss(self.loss_fn) if is_sum else HeadMean(rule)
        return loss, residuals[rule]

    def _counts(
        self, batches: dict[str, Batch], probes: dict[str, Probe]
    ) -> dict[str, list[float]]:
        """Count the targets of A, B and A+B by each counting rule that may apply."""
        if self.loss_fn is not None:
            return {UserLoss.name: [probes[name].number for name in GROUPS]}
        rules = applicable_rules(self._accepted(batches["A+B"]))
        return {
            rule: [COUNTING_RULES[rule](batches[name], len(GROUPS[name])) for name in GROUPS]
            for rule in rules
        }

    def _added_up(self, batches: dict[str, Batch]) -> Probe:
        """Compute the sum of the terms of A and B and of their gradients, as in training."""
        return self._sum_of_terms([batches["A"], batches["B"]], [GROUPS["A"], GROUPS["B"]])

    def _sum_of_terms(self, batches: Sequence[Batch], rows: Sequence[np.ndarray]) -> Probe:
        """Compute loss and gradient of a window of micro-batches, by the rule to be proven."""
        loss, gradients = self.compute(self.loss, batches, rows)
        return Probe(loss, 0.0, gradients)

    def cover_values(self) -> None:
        """Test the loss that was found on labels and weights that the probe samples do not have.

        Raises:
            LossNotAdditive: If it does not hold for them.
        """
        whole = self._separated(self._rows_with_targets())
        seen = self.collate(self.candidates)
        names = self.entries if self.loss_fn is not None else self._accepted(whole).keys()
        variants = [
            *self._with_all_classes(whole),
            *with_extreme_values(whole, seen, self.entries & set(names)),
        ]
        for batch in variants:
            changed = [name for name in self.entries if batch[name] is not whole[name]]
            parts = [take_rows(batch, GROUPS[name], self.entries) for name in ("A", "B")]
            try:
                together = self._value([batch], [ALL_ROWS])
                apart = self._value(parts, [GROUPS["A"], GROUPS["B"]])
            except (IndexError, RuntimeError, ValueError):
                continue  # values that the model does not support
            error = abs(apart - together) / max(abs(together), 1e-12)
            if np.isfinite(error) and error > self.tolerance:
                raise LossNotAdditive(
                    f"the loss of a batch is not the mean over its targets ({self.loss.name}) when "
                    f"samples differ in {changed[0]!r}: {together:.4g} for a batch, {apart:.4g} "
                    f"from its two parts. Likely cause: the loss is weighted by {changed[0]!r} "
                    "(class weights, sample weights). Remedy: pass the sum and what it is divided "
                    "by, loss_fn(outputs, batch) -> ((weights * losses).sum(), weights.sum())."
                )

    def _with_all_classes(self, whole: Batch) -> Iterator[Batch]:
        """Yield probe batches with labels of all classes, for a head that classifies."""
        labels = whole.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
            return
        engine = self._engine(self.loss, speed_ups=())
        engine.begin(self._window([whole], [ALL_ROWS]), training=False)
        with torch.no_grad(), engine.scope(), engine.micro_batch(0) as on_device:
            classes = num_classes(engine.forward(on_device), labels)
        if classes is None:
            return
        special = special_tokens(self.model) if labels.dim() > 1 else []
        yield from with_other_labels(whole, classes, special)

    def width_matters(self) -> bool | None:
        """Find out whether padding short samples to a long one's width changes their loss or
        gradient.

        Returns:
            None if that is unknown: samples of one length, or a random collate function.
        """
        shorter = self.candidates[:-1]
        if not shorter:
            return None
        has_targets = targets_per_row(self.collate(shorter), len(shorter)) > 0
        useful = np.flatnonzero(has_targets)
        if not len(useful) or self.collate_draws:
            return None
        spread = np.unique(np.linspace(0, len(useful) - 1, NUM_WIDTHS).astype(int))
        picked = [shorter[i] for i in useful[spread]]
        whole = self.collate([*picked, self.by_length[-1]])
        shapes_differ = False
        # One by one: at some lengths padding may have no effect (pooling, top-k).
        for i, sample in enumerate(picked):
            narrow = self.collate([sample])
            wide = take_rows(whole, np.array([i]), self.entries)
            if same_shapes(narrow, wide):
                continue
            shapes_differ = True
            try:
                error = relative_error(self._probe_alone(narrow), self._probe_alone(wide))
            except (RuntimeError, ValueError, LossNotAdditive):
                return True  # the model does not support such a narrow batch
            if error > TOLERANCE:
                return True
        return False if shapes_differ else None

    def check_unpadded(self) -> None:
        """Check that the longest sample alone (unpadded) and a padded one sum to both together.
        Called if padding matters.

        Raises:
            LossNotAdditive: If they do not, so that even one width for all micro-batches of a
                window is not exact.
        """
        if self.loss_fn is not None or self.collate_draws:
            return
        whole = self.collate([self.by_length[0], self.by_length[-1]])
        if not any(self.loss.count(whole, 2)):
            return
        both = np.arange(2)
        rows = [both[:1], both[1:]]
        parts = [take_rows(whole, row, self.entries) for row in rows]
        error = relative_error(self._sum_of_terms(parts, rows), self._sum_of_terms([whole], [both]))
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
        return nullcontext() if self.router is None else self.router.patched()

    def _separated(self, batch: Batch) -> Batch:
        """Mask labels so that counting rules differ, and those of a second mean if the head
        supports ignoring them.

        A loss function counts its own targets and may not support ignored labels: then nothing is
        masked.
        """
        if self.loss_fn is not None:
            return batch
        batch = separating_labels(batch, NUM_PROBE_SAMPLES)
        separated = separating_means(batch, NUM_PROBE_SAMPLES)
        try:
            is_finite = self._loss_is_finite(separated, ALL_ROWS)
        except (IndexError, RuntimeError):  # this head does not support positions beyond the text
            return batch
        return separated if is_finite else batch

    def _probe_alone(self, batch: Batch) -> Probe:
        """Probe one sample.

        If it lacks targets of some mean, the head's loss is NaN: compute the terms instead.
        """
        if self.loss.num_means > 1:
            return self._sum_of_terms([batch], [np.arange(1)])
        return self._probe(batch, np.arange(1))

    def _tolerance(self, batch: Batch, rows: np.ndarray, probe: Probe) -> float:
        """Measure rounding errors: the same samples in reverse order have the same mean, summed in
        another order.

        Args:
            batch: A probe batch.
            rows: The positions of its samples.
            probe: Of the batch.

        Returns:
            A limit of relative errors.

        Raises:
            LossNotAdditive: If the order of the samples matters.
        """
        rounding = relative_error(self._probe_reversed(batch, rows), probe)
        if rounding <= MAX_ROUNDING:
            return max(TOLERANCE, TIMES_ROUNDING * rounding)
        depends = (
            "the loss or its gradient depends on the order of the samples in a batch "
            f"(relative error {rounding:.1e}, limit {MAX_ROUNDING:.0e}). "
        )
        if np.isnan(probe.loss):
            raise LossNotAdditive(
                f"{depends}Likely cause: the loss is NaN, a mean over no targets."
            )
        self._check_state(batch, rows, is_additive=False)
        apart = causes.apart(self.dropout)
        if apart is not None and self._is_due_to_masks(batch, rows):
            raise _not_additive(f"{depends}Cause: {apart}.", apart)
        cause = causes.likely_cause(self.model, None)
        raise _not_additive(
            f"{depends}Likely cause: {cause}. Low precision can be a cause, too.", cause
        )

    def _probe_reversed(self, batch: Batch, rows: np.ndarray) -> Probe:
        """Probe a batch with its samples in reverse order."""
        reverse = np.arange(len(rows))[::-1].copy()
        return self._probe(take_rows(batch, reverse, self.entries), rows[reverse])

    def _is_due_to_masks(self, batch: Batch, rows: np.ndarray) -> bool:
        """Whether the order of the samples does not matter without dropout."""

        def keep_all(key: int, shape: torch.Size, drop_probability: float) -> Tensor:
            return torch.ones(shape, dtype=torch.bool, device=self.device)

        def drop_nothing(key: int, input: Tensor, drop_probability: float) -> Tensor:
            return input

        with override(self.dropout, _draw=keep_all, _dropped=drop_nothing):
            probe = self._probe(batch, rows)
            rounding = relative_error(self._probe_reversed(batch, rows), probe)
        return rounding <= MAX_ROUNDING

    def _check_state(self, batch: Batch, rows: np.ndarray, *, is_additive: bool) -> None:
        """Check that what training forwards write to buffers does not depend on the split.

        Args:
            batch: A probe batch.
            rows: The positions of its samples.
            is_additive: Whether the loss is. If not, the running values of norms are not the
                cause: training forwards do not read them.

        Raises:
            LossNotAdditive: If it does.
        """
        if causes.normalisation(self.model) is not None:
            return
        names = causes.power_iterations(self.model)
        changed = [
            name
            for name in causes.changed_buffers(self.model, self._buffers)
            if is_additive or not causes.is_running_statistic(self.model, name)
        ]
        names += [n for n in self._split_dependent(changed, batch, rows) if n not in names]
        counters = causes.changed_counters(self.model, self._buffers) if is_additive else []
        counters = self._split_dependent(counters, batch, rows)
        if counters and self._depends_on(counters, batch, rows):
            cause = causes.state(self.model, counters)
            raise _not_additive(f"{cause}, which the loss depends on.", cause)
        if not names:
            return
        cause = causes.state(self.model, names)
        if is_additive and not self._depends_on(names, batch, rows):
            warnings.warn(
                f"hf_ga: the loss does not depend on them now, but {cause} if a later forward "
                "reads them.",
                stacklevel=2,
            )
        else:
            raise _not_additive(
                f"{cause}. Keep them unchanged in training forwards: most modules do after "
                "module.eval().",
                cause,
            )

    def _split_dependent(self, names: list[str], batch: Batch, rows: np.ndarray) -> list[str]:
        """Return those of the named buffers that have other values after a batch in two parts."""
        if not names:
            return []
        ends = [np.arange(NUM_IN_A), np.arange(NUM_IN_A, len(rows))]
        parts = [take_rows(batch, part, self.entries) for part in ends]
        split = self._buffers_after(names, parts, [rows[part] for part in ends])
        whole = self._buffers_after(names, [batch], [rows])
        return [
            name
            for name in names
            if not torch.allclose(
                split[name].cpu().double(),
                whole[name].cpu().double(),
                rtol=TOLERANCE,
                atol=TOLERANCE,
            )
        ]

    def _depends_on(self, names: list[str], batch: Batch, rows: np.ndarray) -> bool:
        """Whether the loss of a batch depends on the values of buffers, in training or in
        evaluation mode. Observers that only record (I-BERT's) change nothing.
        """
        before = self._losses_in_both_modes(batch, rows)
        for other in OTHER_VALUES:
            with restored_buffers(self.model):
                for name in names:
                    buffer = self.model.get_buffer(name)
                    buffer.copy_(other(buffer))
                try:
                    after = self._losses_in_both_modes(batch, rows)
                except (IndexError, RuntimeError):  # it is an index
                    return True
            is_same = [abs(a - b) <= TOLERANCE * abs(a) for a, b in zip(before, after, strict=True)]
            if not all(is_same):
                return True
        return False

    @torch.no_grad()
    def _losses_in_both_modes(self, batch: Batch, rows: np.ndarray) -> list[float]:
        """Compute the loss of a batch in training mode, then in evaluation mode."""
        losses = []
        with restored_buffers(self.model), restored_modes(self.model):
            for is_training in (True, False):
                if not is_training:
                    self.model.eval()
                engine = self._engine(BatchLoss(self.loss_fn), speed_ups=())
                engine.begin(self._window([batch], [rows]), training=False)
                with engine.scope(), engine.micro_batch(0) as on_device:
                    losses.append(float(engine.mean(engine.forward(on_device))))
        return losses

    def _buffers_after(
        self, names: list[str], batches: list[Batch], rows: list[np.ndarray]
    ) -> dict[str, Tensor]:
        """Return buffers after a window of these micro-batches."""
        with restored_buffers(self.model):
            self.compute(BatchLoss(self.loss_fn), batches, rows)
            return {name: self.model.get_buffer(name).clone() for name in names}


def _not_additive(message: str, cause: str) -> LossNotAdditive:
    error = LossNotAdditive(message)
    error.cause = cause
    return error


def _no_single_rule(
    model: nn.Module,
    cause: str,
    fitting: list[str],
    residuals: dict[str, float],
    counts: dict[str, list],
    losses: dict[str, float],
) -> str:
    """Describe that no counting rule fits, or more than one."""
    if fitting:
        return (
            "several counting rules fit and cannot be distinguished on these samples: "
            f"{', '.join(fitting)}. Give "
            "prove_targets more samples of different lengths, or pass loss_fn."
        )
    remedy = "pass loss_fn(outputs, batch) -> (sum of the loss over the targets, number of targets)"
    if "loss_fn" in residuals:
        remedy = (
            "make sure that loss_fn returns the sum of the loss over the targets, not their mean"
        )
    remedy += "."
    if cause == causes.UNKNOWN:
        cause = causes.weights(model)
        remedy += " For a loss that compares samples, pass whole_batch, which gets all of a window."
        remedy += f" With weights, return their sum in place of the number:{WEIGHTED_FORM}"
    shown = ", ".join(f"{name} {loss:.4g}" for name, loss in losses.items())
    numbers = "; ".join(
        f"{rule}: {counts[rule]} targets in A, B, A+B, relative error {residuals[rule]:.1e}"
        for rule in residuals
    )
    return (
        "the loss of a batch is not the mean over its targets by any counting rule. Likely "
        f"cause: {cause}. "
        f"Remedy: {remedy} (Of two groups of samples and both together: losses {shown}; "
        f"{numbers}.)"
    )
