"""Why a training step under test differs from the full batch.

Read: the divisors of the loss, the random functions of the forward, BatchNorm and clipping where
they are called, padding from hf_ga's trial of the loss. Tried, as a step is a black box: with which
weights it summed its micro-batches. For that it runs once more, with what was read switched off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_ga.check.causes.divisors import (
    Divisors,
    count_usual,
    format_numbers,
    read_divisors,
)
from hf_ga.check.causes.switches import Calls, ConstantDraws, switched_off
from hf_ga.check.causes.weights import (
    Hypothesis,
    Split,
    best_match,
    clipping_cause,
    fitted_weights,
    half_precision,
    list_hypotheses,
)
from hf_ga.check.gradients import Gradients, gradient_norms, relative_error, total_norm
from hf_ga.check.layouts import CheckedLayout
from hf_ga.check.oracle.reference import plain_backward
from hf_ga.check.steps import CheckContext, StepFunction, device_of
from hf_ga.check.verdict.rows import Cause, ReportRow
from hf_ga.engine.look.rehearsal import widths_of
from hf_ga.engine.whole.router import WindowRouter
from hf_ga.errors import UnkeyedRandomness
from hf_ga.loading.window import Window
from hf_ga.parallel.processes import broadcast_from_main

# Maximum number of gradient elements, over all micro-batches, that a trial keeps in memory; of
# larger models every `stride`-th element is compared.
MAX_ELEMENTS = 16_000_000
# Weights explain a gradient up to this relative error.
MATCH = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}


def explain(
    context: CheckContext,
    rows: list[ReportRow],
    layouts: Mapping[str, CheckedLayout],
    step: StepFunction | None,
) -> None:
    """Write the causes into the failed rows of a training step, in place: into a few, which show
    different mistakes.

    Args:
        context: The model and the settings of the check.
        rows: The report rows of this step.
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
        elif row.refused and isinstance(context.refusal, UnkeyedRandomness):
            row.causes = [Cause("randomness", row.refused)]
        else:
            row.causes = Diagnosis(context, layouts[row.layout], step, row.refused).causes()


def _rows_to_diagnose(failed: list[ReportRow], num_processes: int) -> list[ReportRow]:
    """Choose the first row of each kind: in a short last window or not, of even or uneven sizes,
    with as many micro-batches on each process or not.
    """
    of_kind: dict[tuple[bool, ...], ReportRow] = {}
    for row in failed:
        sizes = row.micro_batches
        kind = (
            len(sizes) < row.accumulation_steps,
            max(sizes) - min(sizes) > 1,
            len(sizes) % num_processes > 0,
        )
        of_kind.setdefault(kind, row)
    return list(of_kind.values())


@dataclass
class Trial:
    """One run of the step, with what was read switched off, and the correct gradients to compare it
    with. All gradients are flat float32 vectors of the same elements.

    Attributes:
        reference: Gradient of the full batch.
        step_gradient: Gradient that the step left.
        micro_batch_gradients: For each micro-batch, the gradient of its own mean loss.
        missing_parameters: Names of the parameters that should have a gradient but have a zero
            one. The vectors above do not contain them.
        terms: What the terms of the loss divide by, the one closest to the full batch first.
        calls: What was called of what is switched off.
    """

    reference: Tensor
    step_gradient: Tensor
    micro_batch_gradients: list[Tensor]
    missing_parameters: list[str]
    terms: list[Divisors]
    calls: Calls

    def error_of_sum(self, weights: np.ndarray) -> float:
        """Return the relative error of a weighted sum of the micro-batches' gradients, compared
        with the full batch's gradient.
        """
        weighted_sum = Hypothesis(weights).gradient(self.micro_batch_gradients)
        return relative_error(weighted_sum, self.reference)

    def best_match(self, hypotheses: Sequence[Hypothesis]) -> tuple[Hypothesis, float]:
        """Return the weights that explain the step's gradient best, with their relative error."""
        return best_match(self.step_gradient, self.micro_batch_gradients, hypotheses)


class Diagnosis:
    """Finds the causes in one layout of the check.

    Args:
        context: The model and the settings of the check.
        layout: The layout in which the step failed.
        step: The step function. None: hf_ga's own step.
        refused: Why hf_ga's own step refuses the model, which alone is diagnosed then: the full
            batch's gradient takes the place of the step's. None: the step ran.
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
        # Of hf_ga's own step, draws are keyed, and windows padded where it matters.
        self.is_own = step is None and refused is None
        self.window = layout.collate_window(context)
        self.has_several_widths = not self.is_own and _has_several_widths(self.window)
        if self.has_several_widths:
            self.window = self.window.padded_to_window()

    def causes(self) -> list[Cause]:
        """Return all causes, the same on all processes; if none is found, one named "unknown"."""
        if self.is_own:
            found, _ = self._explain(None)
            return found
        found, is_explained = self._explain(ConstantDraws(device_of(self.context.model)))
        if not is_explained and self.context.draws.places:
            # A step of hf_ga draws the numbers of the reference, also where torch's are constant.
            found_with_draws, is_explained = self._explain(None)
            if is_explained:
                return found_with_draws
        return found

    def _explain(self, draws: ConstantDraws | None) -> tuple[list[Cause], bool]:
        """Run the step; return the causes, and whether known weights explain its gradient."""
        accelerator = self.context.accelerator
        trial = self._run_trial(draws)
        result = self._causes_in(trial, draws) if accelerator.is_main_process else None
        return broadcast_from_main(accelerator, result)

    def _causes_in(self, trial: Trial, draws: ConstantDraws | None) -> tuple[list[Cause], bool]:
        """Return what `_explain` does."""
        if not trial.step_gradient.any():
            text = "the step left no gradient in any parameter: leave it in .grad, without updating"
            return [Cause("no gradients", text)], True
        if not trial.step_gradient.isfinite().all():
            return [Cause("not finite", "the step left a gradient that is NaN or infinite")], True
        match, error = self._match(trial)
        is_explained = error <= self.match_limit
        found = [
            *self._additivity_causes(trial),
            *match.causes,
            *self._reduction_causes(trial, error),
            *_frozen_causes(trial),
            *self._causes_of_calls(trial.calls),
        ]
        if draws is not None:
            found += _causes_of_draws(self.context.draws.places | draws.places)
        is_what_is_left = is_explained and not found and not self.refused
        found += self._padding_causes(is_what_is_left=is_what_is_left)
        found = list(dict.fromkeys(found))
        return found or [Cause("unknown", _describe_unexplained(trial))], is_explained

    def _run_trial(self, draws: ConstantDraws | None) -> Trial:
        """Compute the gradients of the step, of the full batch and of each micro-batch."""
        context = self.context
        window = self.window
        whole = window.split([np.arange(window.num_samples)])
        with switched_off(draws) as calls:
            _, reference = plain_backward(context, whole, whole.micro_batches[0], draws=draws)
            step_gradients = reference
            if not self.refused:
                _, step_gradients = self.layout.run(context, self.step, window)
            missing = _parameters_without_gradient(step_gradients, reference)
            names = [name for name in reference if name not in missing]
            stride = _element_stride(reference, names, len(self.layout.offsets))
            micro_batch_gradients = []
            for micro_batch in window.micro_batches:
                _, gradients = plain_backward(context, window, micro_batch, draws=draws)
                micro_batch_gradients.append(_flatten(gradients, names, stride))
            terms = read_divisors(context, window)
        trial = Trial(
            reference=_flatten(reference, names, stride),
            step_gradient=_flatten(step_gradients, names, stride),
            micro_batch_gradients=micro_batch_gradients,
            missing_parameters=missing,
            terms=terms,
            calls=calls,
        )
        trial.terms.sort(key=lambda term: trial.error_of_sum(term.shares))
        return trial

    def _match(self, trial: Trial) -> tuple[Hypothesis, float]:
        """Find the weights of the step, and the relative error that they leave: those of known
        mistakes, then the same with clipping after every micro-batch, then any.
        """
        terms = trial.terms
        if self.refused:  # there is no step
            return Hypothesis(terms[0].shares), 0.0
        # Of a sum of several means, the step may have weighted by any of their divisors.
        is_additive = trial.error_of_sum(terms[0].shares) <= self.match_limit
        counts = count_usual(self.window)
        steps = self.layout.accumulation_steps
        num_processes = self.context.accelerator.num_processes
        known = []
        for term in terms[:1] if is_additive else terms:
            known += list_hypotheses(Split(term.values, counts, steps, num_processes))
        closest, error = trial.best_match(known)
        if error <= self.match_limit:
            return closest, error
        others = [[fitted_weights(trial.step_gradient, trial.micro_batch_gradients, terms[0])]]
        if len(self.layout.offsets) > 1:  # a single one that is clipped just has another weight
            norm = float(trial.step_gradient.double().norm())
            others.insert(0, [hypothesis.clipped(norm) for hypothesis in known])
        for hypotheses in others:
            match, match_error = trial.best_match(hypotheses)
            if match_error <= self.match_limit:
                return match, match_error
        # Low precision is no explanation where the micro-batches' gradients do not add up to the
        # window's in any precision.
        if error > MATCH["bf16"] or self.context.settings.whole_batch is not None:
            return replace(closest, causes=()), error
        if self._reduction_causes(trial, error):
            return closest, error
        text = (
            f"the sum of the micro-batches' gradients has a relative error of {error:.1e}: "
            "computed in low precision"
        )
        return replace(closest, causes=(*closest.causes, Cause("precision", text))), error

    def _reduction_causes(self, trial: Trial, error: float) -> list[Cause]:
        """Return the cause that several processes add up their gradients in half precision."""
        name = half_precision(trial.step_gradient)
        if self.context.accelerator.num_processes == 1 or name is None:
            return []
        text = (
            f"the processes add up their gradients in {name} (FSDP's reduce_dtype, or a "
            "communication hook of DDP)"
        )
        evidence = f"every element is a {name} number, relative error {error:.1e}"
        return [Cause(f"{name} reduction", text, evidence)]

    def _additivity_causes(self, trial: Trial) -> list[Cause]:
        """Return why no weights of the micro-batches give the full batch's gradient, if the correct
        ones do not.
        """
        terms = trial.terms
        residual = trial.error_of_sum(terms[0].shares)
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
        if trial.error_of_sum(np.ones(len(self.layout.offsets))) <= self.match_limit:
            constant = "the loss divides by a constant, so that of the window is their sum"
            divisors = f"it divides by {format_numbers(terms[0].values)}"
            return [Cause("constant divisor", f"{text}: {constant}", divisors)]
        pairs = "it compares samples (in-batch negatives), or is no sum of means"
        return [Cause("cross-batch loss", f"{text} even with all suspects off: {pairs}", evidence)]

    def _causes_of_calls(self, calls: Calls) -> list[Cause]:
        """Return causes from calls of BatchNorm and of torch's clipping."""
        found = []
        if calls.batch_statistics and len(self.layout.offsets) > 1:
            text = "BatchNorm normalises by the statistics of the micro-batch, not of the window"
            found.append(Cause("BatchNorm", text))
        for max_norms in calls.clipped.values():
            max_norm = max_norms[-1]
            if len(max_norms) > 1:
                found.append(clipping_cause(max_norm))
            elif len(calls.clipped) > 1 or max_norm != self.context.max_grad_norm:
                text = (
                    f"the step clips once per window, {len(calls.clipped)} group(s) of parameters "
                    f"to a norm of {max_norm:.3g}, but the reference all of them to "
                    f"{self.context.max_grad_norm}: pass max_grad_norm"
                )
                found.append(Cause("clipping", text))
        return found

    def _padding_causes(self, *, is_what_is_left: bool) -> list[Cause]:
        """Return the cause that padding changes the loss: hf_ga's trial of the loss found it, or
        the step is right with one width, and nothing else was switched off.
        """
        facts = self.context.facts
        is_known = facts is not None and facts.pad_to_window
        if not self.has_several_widths or not (is_known or is_what_is_left):
            return []
        text = "the loss of a sample depends on the width to which its micro-batch is padded"
        return [Cause("padding width", text)]


def _causes_of_draws(places: Mapping[str, str]) -> list[Cause]:
    """Return a cause for each random function that was called: the step draws other numbers.

    Args:
        places: Function -> where it was called.
    """
    found = []
    for function, place in places.items():
        if "dropout" in function:
            text = "dropout masks are not those of the full batch: they depend on the split"
            found.append(Cause("dropout", text, f"drawn in {Path(place).name}"))
        else:
            found.append(
                Cause("randomness", f"{function} ({place}) draws other numbers in each split")
            )
    return found


def _has_several_widths(window: Window) -> bool:
    """Whether the micro-batches of a window are padded to different widths."""
    first, *others = [widths_of(micro_batch.batch) for micro_batch in window.micro_batches]
    return any(widths != first for widths in others)


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


def _frozen_causes(trial: Trial) -> list[Cause]:
    """Return the cause that parameters got no gradient."""
    if not trial.missing_parameters:
        return []
    names = ", ".join(trial.missing_parameters[:4])
    return [Cause("frozen parameter", f"no gradient reaches {names}")]


def _describe_unexplained(trial: Trial) -> str:
    """Describe a gradient that no known mistake explains."""
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
    """Concatenate every `stride`-th element of the named gradients into one float32 vector."""
    if not names:
        return torch.empty(0)
    return torch.cat([gradients[name].flatten()[::stride].float() for name in names])
