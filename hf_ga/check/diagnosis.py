"""Why a training step under test differs from the full batch: with all suspects switched off, match
its gradient against those of the micro-batches, whose divisors are read from the loss; then switch
the suspects on, one at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hf_ga.check.divisors import Divisors, count_usual, read_divisors
from hf_ga.check.gradients import (
    Gradients,
    gradient_norms,
    relative_error,
    relative_errors,
    total_norm,
)
from hf_ga.check.hypotheses import (
    Hypothesis,
    Split,
    best_match,
    fit_micro_batch_weights,
    format_numbers,
    half_precision,
    list_hypotheses,
)
from hf_ga.check.layouts import CheckedLayout
from hf_ga.check.reference import plain_backward
from hf_ga.check.rows import Cause, ReportRow
from hf_ga.check.steps import CheckContext, StepFunction
from hf_ga.check.switches import SUSPECTS, Suspect
from hf_ga.engine.rehearsal import widths_of
from hf_ga.engine.router import WindowRouter
from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.window import Window

# Maximum number of gradient elements, over all micro-batches, that a trial keeps in memory; of
# larger models every `stride`-th element is compared.
MAX_ELEMENTS = 16_000_000
# A hypothesis explains a gradient up to this relative error.
MATCH = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}
# A suspect whose effect on the relative error is smaller is not a cause.
EFFECT = {"fp32": 5e-6, "bf16": 2e-2, "fp16": 3e-3}


@dataclass
class Trial:
    """One run of the training step under test with some suspects switched off, and the correct
    gradients to compare it with. All gradients are flat float32 vectors of the same elements.

    Attributes:
        reference: Gradient of the full batch.
        step_gradient: Gradient that the training step left.
        micro_batch_gradients: For each micro-batch, the gradient of its own mean loss.
        missing_parameters: Names of the parameters that should have a gradient but have a zero
            one. The vectors above do not contain them.
    """

    reference: Tensor
    step_gradient: Tensor
    micro_batch_gradients: list[Tensor]
    missing_parameters: list[str]

    def additivity_error(self, divisors: Divisors) -> float:
        """Compute the relative error of the sum of the micro-batches' gradients, each weighted by
        its share of what the loss divides by, compared with the full batch's gradient.
        """
        correct = Hypothesis(divisors.shares)
        return relative_error(correct.gradient(self.micro_batch_gradients), self.reference)

    def error_of_sum(self) -> float:
        """Compute the relative error of the micro-batches' gradients, added up as they are,
        compared with the full batch's gradient.
        """
        summed = Hypothesis(np.ones(len(self.micro_batch_gradients)))
        return relative_error(summed.gradient(self.micro_batch_gradients), self.reference)

    def match_error(self, hypothesis: Hypothesis) -> float:
        """Compute the relative error with which a hypothesis explains the step's gradient."""
        return relative_error(hypothesis.gradient(self.micro_batch_gradients), self.step_gradient)


def explain(
    context: CheckContext,
    rows: list[ReportRow],
    layouts: Mapping[str, CheckedLayout],
    step: StepFunction | None,
) -> None:
    """Diagnose why a training step failed the equivalence check, and write the causes into `rows`,
    in place. Of the failed rows only a few, which show different mistakes, are diagnosed.

    Args:
        context: The model and the settings of the check.
        rows: The report rows of this step. Passed rows stay unchanged, and so do the rows of a
            user's step that raised.
        layouts: The layouts of the check by name.
        step: The step function. None: hf_ga's own step.
    """
    failed = [row for row in rows if not row.passed and (row.refused is None or step is None)]
    for row in _rows_to_diagnose(failed, context.accelerator.num_processes):
        if row.refused is None and row.share <= 1:
            text = (
                "the gradient is correct, but the number that the step returns is not the mean loss"
            )
            row.causes = [Cause("reported loss", text)]
        else:
            row.causes = Diagnosis(context, layouts[row.layout], step, row.refused).causes()


def _rows_to_diagnose(failed: list[ReportRow], num_processes: int) -> list[ReportRow]:
    """Choose, from the failed rows of a training step, at most four that show different mistakes:
    the one with the fewest micro-batches, the most uneven one, a short last window, and one whose
    number of micro-batches is no multiple of the processes.
    """
    full = [row for row in failed if len(row.micro_batches) == row.accumulation_steps]
    short = [row for row in failed if len(row.micro_batches) < row.accumulation_steps]
    simplest = sorted(full, key=lambda row: (len(row.micro_batches), _unevenness(row)))[:1]
    uneven = [row for row in full if _unevenness(row) > 1 and row not in simplest]
    most_uneven = sorted(uneven, key=_unevenness)[-1:]
    indivisible = [row for row in full if len(row.micro_batches) % num_processes]
    chosen = [*simplest, *most_uneven, *short[:1], *indivisible[:1]]
    # A row may be chosen for several reasons; diagnose it once.
    return list({row.layout: row for row in chosen}.values())


class Diagnosis:
    """Finds out why the gradient of one training step differs from the full batch's in one layout
    of the equivalence check.

    Args:
        context: The model and the settings of the check.
        layout: The layout in which the step failed.
        step: The step function. None: hf_ga's own step.
        refused: Why hf_ga's own step refuses the model, which alone is diagnosed then: the step's
            gradient is replaced by the full batch's. None: the step ran.
    """

    def __init__(
        self,
        context: CheckContext,
        layout: CheckedLayout,
        step: StepFunction | None,
        refused: str | None,
    ) -> None:
        self.context = context
        self.layout = layout
        self.step = step
        self.refused = refused
        self.match_limit = MATCH[context.precision]
        self.min_effect = EFFECT[context.precision]
        excluded = {"clipping"} if step is None else set()
        self.own_window = layout.collate_window(context)
        self.window = self.own_window
        if step is None and not refused:
            excluded |= {"dropout"}  # keyed by sample; and hf_ga pads where it must
        elif _has_several_widths(self.own_window):
            self.window = self.own_window.padded_to_window()
        self.suspects = [
            suspect
            for suspect in SUSPECTS
            if suspect.applies(context) and suspect.name not in excluded
        ]

    def causes(self) -> list[Cause]:
        """Find all causes why the training step's gradient differs from the full batch's; if none
        is found, return one cause named "unknown".
        """
        if self.refused and self.context.refuses_draws:
            return [Cause("randomness", self.refused)]
        baseline = self._run_trial()
        if not baseline.step_gradient.any():
            text = "the step left no gradient in any parameter: leave it in .grad, without updating"
            return [Cause("no gradients", text)]
        if not baseline.step_gradient.isfinite().all():
            return [Cause("not finite", "the step left a gradient that is NaN or infinite")]
        with self._switched_off():
            terms = read_divisors(self.context, self.window)
        divisors = min(terms, key=baseline.additivity_error)
        residual = baseline.additivity_error(divisors)
        match, error = self._match(baseline, terms, divisors)
        found = [
            *self._additivity_causes(baseline, residual, terms),
            *match.causes,
            *self._reduction_causes(baseline, error),
        ]
        if baseline.missing_parameters:
            names = ", ".join(baseline.missing_parameters[:4])
            found.append(Cause("frozen parameter", f"no gradient reaches {names}"))
        found += self._padding_causes(divisors)
        for suspect in self.suspects:
            found += self._causes_of_suspect(suspect, divisors, match, max(error, residual))
        if error > self.match_limit:
            found += self._random_causes()
        return found or [Cause("unknown", _describe_unexplained(baseline))]

    def _causes_of_suspect(
        self, suspect: Suspect, divisors: Divisors, match: Hypothesis, error_without: float
    ) -> list[Cause]:
        """Run the training step with one suspect switched on, and return it as a cause if the error
        of the step, or of the model itself, grows.

        Args:
            suspect: The suspect; all others are switched off.
            divisors: What the loss divides by in the micro-batches.
            match: The micro-batch weights that explain the step with all suspects off.
            error_without: The relative error that is left with all suspects off.
        """
        try:
            trial = self._run_trial(suspect.name)
        except ValueError as failure:
            # BatchNorm raises for a micro-batch of one sample, which has no statistics.
            if suspect.name != "BatchNorm":
                raise
            return [Cause(suspect.name, suspect.text, f"a micro-batch fails with it: {failure}")]
        error = max(trial.match_error(match), trial.additivity_error(divisors))
        has_effect = error > max(self.min_effect, 5 * error_without)
        if not has_effect:
            return []
        if suspect.name == "clipping":
            norm = float(trial.step_gradient.double().norm())
            clipped = Hypothesis(match.weights).clipped(norm)
            if trial.match_error(clipped) <= self.match_limit:
                return list(clipped.causes)
            if self.context.max_grad_norm:
                return []
        evidence = f"relative error with it {error:.1e}, without {error_without:.1e}"
        return [Cause(suspect.name, suspect.text, evidence)]

    def _match(
        self, trial: Trial, terms: Sequence[Divisors], divisors: Divisors
    ) -> tuple[Hypothesis, float]:
        """Find the weights with which the step, with all suspects off, summed its micro-batches.

        Args:
            trial: The step with all suspects off.
            terms: What each term of the loss divides by.
            divisors: Of these, the one whose weights come closest to the full batch.

        Returns:
            The weights with the mistakes that explain them, and the relative error that is left.
        """
        if self.refused:  # there is no step
            return Hypothesis(divisors.shares), 0.0
        # Of a sum of several means, the step may have weighted by any of their divisors.
        possible = terms if trial.additivity_error(divisors) > self.match_limit else [divisors]
        matches = [self._match_weights(trial, term) for term in possible]
        return min(matches, key=lambda found: (found[1] > self.match_limit, len(found[0].causes)))

    def _match_weights(self, trial: Trial, divisors: Divisors) -> tuple[Hypothesis, float]:
        """Try known mistakes first, then the same with clipping after every micro-batch, then any
        weights (least squares); if none explains the gradient, take the closest known mistake.
        """
        split = Split(
            divisors.values,
            count_usual(self.window),
            self.layout.accumulation_steps,
            self.context.accelerator.num_processes,
        )
        known = list_hypotheses(split)
        match, error = best_match(trial.step_gradient, trial.micro_batch_gradients, known)
        if error <= self.match_limit:
            return match, error
        norm = float(trial.step_gradient.double().norm())
        clipped, clipped_error = best_match(
            trial.step_gradient,
            trial.micro_batch_gradients,
            [hypothesis.clipped(norm) for hypothesis in known],
        )
        if clipped_error <= self.match_limit:
            return clipped, clipped_error
        fitted, fit_error = _fit_hypothesis(trial, divisors)
        if fit_error <= self.match_limit:
            return fitted, fit_error
        return self._without_exact_match(trial, match, error), error

    def _without_exact_match(self, trial: Trial, closest: Hypothesis, error: float) -> Hypothesis:
        """Return the closest known mistake, with low precision as a cause where that can be the
        reason for the error that it leaves; otherwise without causes.
        """
        # Low precision is no explanation where the micro-batches' gradients do not add up to the
        # window's in any precision.
        is_too_large = error > MATCH["bf16"] or self.context.settings.whole_batch is not None
        if is_too_large or self._random_causes():
            return replace(closest, causes=())
        if self._reduction_causes(trial, error):
            return closest
        text = (
            f"the sum of the micro-batches' gradients has a relative error of {error:.1e}: "
            "computed in low precision"
        )
        return replace(closest, causes=(*closest.causes, Cause("precision", text)))

    def _reduction_causes(self, trial: Trial, error: float) -> list[Cause]:
        """Return the cause that several processes all-reduced their gradients in half precision, if
        bf16 or fp16 represents every element of the gradient exactly.
        """
        name = half_precision(trial.step_gradient)
        if self.context.accelerator.num_processes == 1 or name is None:
            return []
        text = (
            f"the processes add up their gradients in {name} (FSDP's reduce_dtype, or a "
            "communication hook of DDP)"
        )
        evidence = f"every element is a {name} number, relative error {error:.1e}"
        return [Cause(f"{name} reduction", text, evidence)]

    def _additivity_causes(
        self, trial: Trial, residual: float, terms: Sequence[Divisors]
    ) -> list[Cause]:
        """Return why no weighted sum of the micro-batches' gradients is the full batch's gradient,
        if the correctly weighted sum has too large a relative error.
        """
        if residual <= self.match_limit:
            return []
        settings = self.context.settings
        text = "the loss of the window is not a weighted mean of its micro-batches' losses"
        evidence = f"residual {residual:.1e}"
        if settings.whole_batch is not None:
            negatives = "each micro-batch compares its own samples only (in-batch negatives)"
            return [Cause("cross-batch loss", f"{text}: {negatives}", evidence)]
        if settings.loss_fn is None and WindowRouter([self.context.model]).is_on:
            balancing = "the router's auxiliary loss is a product of means over the micro-batch"
            return [Cause("auxiliary loss", balancing, evidence)]
        if any(not np.allclose(term.shares, terms[0].shares) for term in terms):
            means = "it is a sum of several means, each over its own targets"
            divisors = "; ".join(f"{term.name}: {format_numbers(term.values)}" for term in terms)
            return [Cause("several means", f"{text}: {means}", f"{evidence}, divisors {divisors}")]
        if trial.error_of_sum() <= self.match_limit:
            constant = "the loss divides by a constant, so that of the window is their sum"
            divisors = f"it divides by {format_numbers(terms[0].values)}"
            return [Cause("constant divisor", f"{text}: {constant}", divisors)]
        pairs = "it compares samples (in-batch negatives), or is no sum of means"
        return [Cause("cross-batch loss", f"{text} even with all suspects off: {pairs}", evidence)]

    def _padding_causes(self, divisors: Divisors) -> list[Cause]:
        """Return the cause that padding changes the loss, if it changes the gradient of the
        narrowest micro-batch that has targets.
        """
        if self.window is self.own_window:
            return []
        sizes = [_width(micro_batch) for micro_batch in self.own_window.micro_batches]
        narrowest = int(np.argmin(np.where(divisors.values, sizes, np.inf)))
        with self._switched_off():
            narrow, wide = [
                self._gradients_of(window, window.micro_batches[narrowest], dropout=False)
                for window in (self.own_window, self.window)
            ]
        error = total_norm(relative_errors(narrow, wide))
        if error <= self.min_effect:
            return []
        text = "the loss of a sample depends on the width to which its micro-batch is padded"
        evidence = f"padded to the window's width, the gradient of one differs by {error:.1e}"
        return [Cause("padding width", text, evidence)]

    def _random_causes(self) -> list[Cause]:
        """Return a cause for each random function, other than dropout, that the reference called:
        a step with draws of its own has other numbers.
        """
        return [
            Cause("randomness", f"{function} ({place}) draws other numbers in each split")
            for function, place in self.context.draws.places.items()
            if "dropout" not in function
        ]

    @contextmanager
    def _switched_off(self, switched_on: str | None = None) -> Iterator[None]:
        """Run the block with all suspects switched off but one."""
        with ExitStack() as stack:
            for suspect in self.suspects:
                if suspect.name != switched_on:
                    stack.enter_context(suspect.switched_off())
            yield

    def _gradients_of(self, window: Window, micro_batch: MicroBatch, *, dropout: bool) -> Gradients:
        """Return the gradient of the mean loss of some samples."""
        _, gradients = plain_backward(self.context, window, micro_batch, dropout=dropout)
        return gradients

    def _run_trial(self, switched_on: str | None = None) -> Trial:
        """Compute the gradients of the diagnosed step, of the full batch and of each micro-batch,
        with all suspects switched off but one.
        """
        window = self.window
        whole = window.split([np.arange(window.num_samples)])
        off = {suspect.name for suspect in self.suspects} - {switched_on}
        gradients_of = partial(self._gradients_of, dropout="dropout" not in off)
        with self._switched_off(switched_on):
            reference = gradients_of(whole, whole.micro_batches[0])
            step_gradients = reference
            if not self.refused:
                _, step_gradients = self.layout.run(self.context, self.step, window)
            missing = _parameters_without_gradient(step_gradients, reference)
            names = [name for name in reference if name not in missing]
            stride = _element_stride(reference, names, len(self.layout.offsets))
            micro_batch_gradients = [
                _flatten(gradients_of(window, micro_batch), names, stride)
                for micro_batch in window.micro_batches
            ]
        return Trial(
            reference=_flatten(reference, names, stride),
            step_gradient=_flatten(step_gradients, names, stride),
            micro_batch_gradients=micro_batch_gradients,
            missing_parameters=missing,
        )


def _has_several_widths(window: Window) -> bool:
    """Whether the micro-batches of a window are padded to different widths."""
    first, *others = [widths_of(micro_batch.batch) for micro_batch in window.micro_batches]
    return any(widths != first for widths in others)


def _width(micro_batch: MicroBatch) -> int:
    """Return how many elements a sample has, with padding."""
    return sum(shape.numel() for shape in widths_of(micro_batch.batch))


def _fit_hypothesis(trial: Trial, divisors: Divisors) -> tuple[Hypothesis, float]:
    """Fit micro-batch weights to a training step's gradient by least squares, and describe them as
    factors of the correct weights.

    Args:
        trial: The step with all suspects off.
        divisors: What the loss divides by in the micro-batches.

    Returns:
        The fitted weights with a cause that shows them, and their relative error.
    """
    weights, error = fit_micro_batch_weights(trial.step_gradient, trial.micro_batch_gradients)
    shares = divisors.shares
    factors = np.divide(weights, shares, out=np.zeros_like(weights), where=shares != 0)
    shown = ", ".join(f"{factor:.3g}" for factor in factors[:8])
    text = f"micro-batches are weighted by x({shown}) of n_k / N"
    return Hypothesis(weights, (Cause("normalisation", text),)), error


def _parameters_without_gradient(gradients: Gradients, reference: Gradients) -> list[str]:
    """Return the names of the parameters for which a training step left a zero gradient, although
    the norm of their reference gradient is above 1e-6 of the norm over all parameters.
    """
    reference_norms = gradient_norms(reference)
    threshold = 1e-6 * total_norm(reference_norms)
    return [
        name
        for name, norm in reference_norms.items()
        if norm > threshold and not gradients[name].any()
    ]


def _unevenness(row: ReportRow) -> int:
    """Return how many samples the largest micro-batch of a row has more than the smallest."""
    return max(row.micro_batches) - min(row.micro_batches)


def _describe_unexplained(trial: Trial) -> str:
    """Describe a gradient that no known mistake explains: its relative error, and its norm as a
    multiple of the reference's.
    """
    scale = float(trial.step_gradient.double().norm() / trial.reference.double().norm())
    return (
        "no known cause: with all suspects switched off, the gradient has a relative error of "
        f"{relative_error(trial.step_gradient, trial.reference):.1e}, its norm is x{scale:.3g} of "
        "the reference's"
    )


def _element_stride(gradients: Gradients, names: list[str], num_copies: int) -> int:
    """Return the stride (keep every `stride`-th element) with which the named gradients of
    `num_copies` micro-batches have at most about `MAX_ELEMENTS` elements together; at least 1.
    """
    num_elements = sum(gradients[name].numel() for name in names)
    return -(-num_copies * num_elements // MAX_ELEMENTS) or 1


def _flatten(gradients: Gradients, names: list[str], stride: int) -> Tensor:
    """Concatenate every `stride`-th element of the named gradients into one float32 vector, in the
    order of `names`.
    """
    if not names:
        return torch.empty(0)
    return torch.cat([gradients[name].flatten()[::stride].float() for name in names])
