"""Why a training step under test differs from the full batch.

Read: the divisors of the loss, calls of BatchNorm and of random functions in the forward, calls
of torch's clipping, padding from hf_ga's trial of the loss. Tried, as a step is a black box: with
which weights it summed its micro-batches. For that it runs once more, with constant random numbers,
one padded width, and without clipping.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_ga.check.causes.divisors import count_usual, format_numbers, read_divisors
from hf_ga.check.causes.switches import ConstantDraws, unclipped
from hf_ga.check.causes.weights import (
    Hypothesis,
    best_match,
    clipping_cause,
    fitted_weights,
    half_precision,
    list_hypotheses,
)
from hf_ga.check.gradients import Gradients, gradient_norms, relative_error, total_norm
from hf_ga.check.layouts import CheckedLayout
from hf_ga.check.reference import plain_backward
from hf_ga.check.steps import CheckContext, StepFunction, device_of
from hf_ga.check.verdict.rows import Cause, ReportRow
from hf_ga.engine.look.recorder import widths_of
from hf_ga.engine.whole.router import WindowRouter
from hf_ga.loading.window import Window
from hf_ga.parallel.processes import call_on_main

# Maximum number of gradient elements, over all micro-batches, that a trial keeps in memory; of
# larger models every `stride`-th element is compared.
MAX_ELEMENTS = 16_000_000
# Weights explain a gradient up to this relative error.
MATCH = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}
BATCH_NORM = Cause(
    "BatchNorm", "BatchNorm normalises by the statistics of the micro-batch, not of the window"
)


def explain(
    context: CheckContext,
    rows: list[ReportRow],
    layouts: list[CheckedLayout],
    step: StepFunction | None,
) -> None:
    """Write the causes into the failed rows of a training step, in place: into a few, which show
    different mistakes.

    Args:
        context: The model and the settings of the check.
        rows: The report rows of this step.
        layouts: The layout of each row.
        step: The step function. None: hf_ga's own step.
    """
    num_processes = context.accelerator.num_processes
    kinds = set()
    for row, layout in zip(rows, layouts, strict=True):
        # The first row of each kind: in a short last window or not, of even or uneven sizes, with
        # as many micro-batches on each process or not.
        sizes = row.micro_batches
        is_short = len(sizes) < row.accumulation_steps
        kind = (is_short, max(sizes) - min(sizes) > 1, len(sizes) % num_processes > 0)
        has_raised = row.refused is not None and step is not None
        # Random numbers of a refused step are a cause already.
        if row.passed or has_raised or row.causes or kind in kinds:
            continue
        kinds.add(kind)
        if context.has_batch_norm and row.refused is not None:
            row.causes = [BATCH_NORM]
        elif row.refused is None and row.share <= 1:
            text = (
                "the gradient is correct, but the number that the step returns is not the mean loss"
            )
            row.causes = [Cause("reported loss", text)]
        else:
            row.causes = _causes_in(context, layout, step, row.refused)


def _causes_in(
    context: CheckContext,
    layout: CheckedLayout,
    step: StepFunction | None,
    refused: str | None,
) -> list[Cause]:
    """Run the step in a layout; return all causes, the same on all processes.

    `refused` is why hf_ga's own step was refused there, which alone is explained then.
    """
    trials: list[ConstantDraws | None] = [None]
    if step is not None:
        # A step of hf_ga draws the numbers of the reference, also where torch's are constant.
        trials = [ConstantDraws(device_of(context.model)), None]
    found_first = None
    for draws in trials:
        trial = Trial(context, layout, step, draws, refused)
        found, is_explained = call_on_main(context.accelerator, trial.causes)
        if is_explained:
            return found
        found_first = found_first or found
    return found_first


class Trial:
    """One run of the step, and the correct gradients to compare it with. All gradients are flat
    float32 vectors of the same elements.

    Attributes:
        has_several_widths: Whether the micro-batches were padded to one width.
        refused: Why hf_ga's own step, which is not run then, refuses the model in this layout.
        clipped: See `unclipped`.
        reference: Gradient of the full batch.
        step_gradient: Gradient that the step left.
        micro_batch_gradients: For each micro-batch, the gradient of its own mean loss.
        missing: Names of the parameters that should have a gradient but have a zero one. The
            vectors above do not contain them.
        terms: What the terms of the loss divide by, the one closest to the full batch first.
        residual: Relative error of the sum that this term gives.
    """

    def __init__(
        self,
        context: CheckContext,
        layout: CheckedLayout,
        step: StepFunction | None,
        draws: ConstantDraws | None,
        refused: str | None,
    ) -> None:
        """Compute the gradients of the step, of the full batch and of each micro-batch; `draws` in
        place of the random numbers of the step, unless they are None.
        """
        self.context = context
        self.layout = layout
        self.draws = draws
        self.match_limit = MATCH[context.precision]
        window = layout.collate_window(context)
        self.has_several_widths = _has_several_widths(window)
        if self.has_several_widths:
            window = window.padded_to_window()
        self.window = window
        (whole,) = window.split([np.arange(window.num_samples)]).micro_batches
        _, reference = plain_backward(context, whole, draws=draws)
        step_gradients = reference
        self.refused = refused
        if refused is None:
            with unclipped() as self.clipped, nullcontext() if draws is None else draws.scope():
                _, step_gradients = layout.run(context, step, window)
        self.missing = _parameters_without_gradient(step_gradients, reference)
        names = [name for name in reference if name not in self.missing]
        num_elements = sum(reference[name].numel() for name in names)
        stride = -(-len(layout.offsets) * num_elements // MAX_ELEMENTS) or 1
        self.reference = _flatten(reference, names, stride)
        self.step_gradient = _flatten(step_gradients, names, stride)
        self.micro_batch_gradients = []
        for micro_batch in window.micro_batches:
            _, gradients = plain_backward(context, micro_batch, draws=draws)
            flat = _flatten(gradients, names, stride)
            # The mean over no targets is NaN; its weight is 0.
            self.micro_batch_gradients.append(flat.nan_to_num(nan=0.0))
        terms = read_divisors(context, window)
        self.terms = sorted(terms, key=lambda term: self._error_of_sum(term.shares))
        self.residual = self._error_of_sum(self.terms[0].shares)

    def causes(self) -> tuple[list[Cause], bool]:
        """Return the causes; if there is none, one named "unknown". And whether known weights
        explain the gradient of the step.
        """
        if self.refused is not None:
            return self._additivity_causes() or [Cause("unknown", self.refused)], True
        if not self.step_gradient.any():
            text = "the step left no gradient in any parameter: leave it in .grad, without updating"
            return [Cause("no gradients", text)], True
        if not self.step_gradient.isfinite().all():
            return [Cause("not finite", "the step left a gradient that is NaN or infinite")], True
        match, error = self._match()
        is_explained = error <= self.match_limit
        found = [
            *self._additivity_causes(),
            *match.causes,
            *self._precision_causes(error),
            *self._clipping_causes(),
        ]
        if self.missing:
            text = f"no gradient reaches {', '.join(self.missing[:4])}"
            found.append(Cause("frozen parameter", text))
        if self.draws is not None:
            found += _causes_of_draws(self.context.draws.places | self.draws.places)
        facts = self.context.facts
        is_known = facts is not None and facts.pad_to_window
        is_what_is_left = is_explained and not found
        if self.has_several_widths and (is_known or is_what_is_left):
            text = "the loss of a sample depends on the width to which its micro-batch is padded"
            found.append(Cause("padding width", text))
        return list(dict.fromkeys(found)) or [self._unknown()], is_explained

    def _unknown(self) -> Cause:
        """Return the cause of a gradient that no known mistake explains."""
        scale = float(self.step_gradient.double().norm() / self.reference.double().norm())
        error = relative_error(self.step_gradient, self.reference)
        text = (
            "no known cause: with all suspects switched off, the gradient has a relative error of "
            f"{error:.1e}, its norm is x{scale:.3g} of the reference's"
        )
        return Cause("unknown", text)

    def _match(self) -> tuple[Hypothesis, float]:
        """Find the weights of the step, and the relative error that they leave: those of known
        mistakes, then the same with clipping after every micro-batch, then any.
        """
        counts = count_usual(self.window)
        steps = self.layout.accumulation_steps
        num_processes = self.context.accelerator.num_processes
        # Of a sum of several means, the step may have weighted by any of their divisors.
        is_additive = self.residual <= self.match_limit
        known = []
        for term in self.terms[:1] if is_additive else self.terms:
            known += list_hypotheses(term.values, counts, steps, num_processes)
        candidates = [known]
        if len(self.layout.offsets) > 1:  # a single one that is clipped just has another weight
            norm = float(self.step_gradient.double().norm())
            candidates.append([hypothesis.clipped(norm) for hypothesis in known])
        gradients = self.micro_batch_gradients
        candidates.append([fitted_weights(self.step_gradient, gradients, self.terms[0])])
        matches = [best_match(self.step_gradient, gradients, some) for some in candidates]
        for match, error in matches:
            if error <= self.match_limit:
                return match, error
        closest, error = matches[0]
        return closest if self._is_imprecise(error) else Hypothesis(closest.weights), error

    def _is_imprecise(self, error: float) -> bool:
        """Whether low precision may be what known weights do not explain: not where the
        micro-batches' gradients do not add up to the window's in any precision.
        """
        is_whole_batch = self.context.settings.whole_batch is not None
        return self.match_limit < error <= MATCH["bf16"] and not is_whole_batch

    def _precision_causes(self, error: float) -> list[Cause]:
        """Return the cause that several processes add up their gradients in half precision, or that
        the step computes in low precision.
        """
        name = half_precision(self.step_gradient)
        if self.context.accelerator.num_processes > 1 and name is not None:
            text = (
                f"the processes add up their gradients in {name} (FSDP's reduce_dtype, or a "
                "communication hook of DDP)"
            )
            evidence = f"every element is a {name} number, relative error {error:.1e}"
            return [Cause(f"{name} reduction", text, evidence)]
        if not self._is_imprecise(error):
            return []
        text = (
            f"the sum of the micro-batches' gradients has a relative error of {error:.1e}: "
            "computed in low precision"
        )
        return [Cause("precision", text)]

    def _additivity_causes(self) -> list[Cause]:
        """Return why no weights of the micro-batches give the full batch's gradient."""
        context = self.context
        terms = self.terms
        if self.residual <= self.match_limit:
            return []
        if context.has_batch_norm:
            return [BATCH_NORM]
        text = "the loss of the window is not a weighted mean of its micro-batches' losses"
        evidence = f"residual {self.residual:.1e}"
        if context.settings.whole_batch is not None:
            negatives = "each micro-batch compares its own samples only (in-batch negatives)"
            return [Cause("cross-batch loss", f"{text}: {negatives}", evidence)]
        if context.settings.loss_fn is None and WindowRouter([context.model]).is_on:
            balancing = "the router's auxiliary loss is a product of means over the micro-batch"
            return [Cause("auxiliary loss", balancing, evidence)]
        if any(not np.allclose(term.shares, terms[0].shares) for term in terms):
            means = "it is a sum of several means, each over its own targets"
            divisors = "; ".join(f"{term.name}: {format_numbers(term.values)}" for term in terms)
            return [Cause("several means", f"{text}: {means}", f"{evidence}, divisors {divisors}")]
        if self._error_of_sum(np.ones(len(self.layout.offsets))) <= self.match_limit:
            constant = "the loss divides by a constant, so that of the window is their sum"
            divisors = f"it divides by {format_numbers(terms[0].values)}"
            return [Cause("constant divisor", f"{text}: {constant}", divisors)]
        pairs = "it compares samples (in-batch negatives), or is no sum of means"
        return [Cause("cross-batch loss", f"{text} even with all suspects off: {pairs}", evidence)]

    def _error_of_sum(self, weights: np.ndarray) -> float:
        """Return the relative error of a weighted sum of the micro-batches' gradients, compared
        with the full batch's gradient.
        """
        weighted_sum = Hypothesis(weights).gradient(self.micro_batch_gradients)
        return relative_error(weighted_sum, self.reference)

    def _clipping_causes(self) -> list[Cause]:
        """Return causes from calls of torch's clipping."""
        found = []
        for max_norms in self.clipped.values():
            max_norm = max_norms[-1]
            if len(max_norms) > 1:
                found.append(clipping_cause(max_norm))
            elif len(self.clipped) > 1 or max_norm != self.context.max_grad_norm:
                text = (
                    f"the step clips once per window, {len(self.clipped)} group(s) of parameters "
                    f"to a norm of {max_norm:.3g}, but the reference all of them to "
                    f"{self.context.max_grad_norm}: pass max_grad_norm"
                )
                found.append(Cause("clipping", text))
        return found


def _causes_of_draws(places: Mapping[str, str]) -> list[Cause]:
    """Return a cause for each random function that was called (name -> where): the step draws other
    numbers.
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
    widths = [widths_of(micro_batch.batch) for micro_batch in window.micro_batches]
    return any(width != widths[0] for width in widths)


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


def _flatten(gradients: Gradients, names: list[str], stride: int) -> Tensor:
    """Concatenate every `stride`-th element of the named gradients into one float32 vector."""
    if not names:
        return torch.empty(0)
    return torch.cat([gradients[name].flatten()[::stride].float() for name in names])
