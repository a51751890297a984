"""Why an arm differs: switch all suspects off, then on one at a time; match the remaining error
against known mistakes.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hf_ga.check.gradients import Gradients, norms, relative_error, total
from hf_ga.check.hypotheses import (
    Hypothesis,
    best_match,
    fitted_weights,
    half_precision,
    hypotheses,
)
from hf_ga.check.layouts import CheckedLayout
from hf_ga.check.reference import plain_backward
from hf_ga.check.rows import Cause, Row
from hf_ga.check.subjects import StepFunction, Subject
from hf_ga.check.switches import SWITCHES, Switch
from hf_ga.exact.loss import COUNTING_RULES, WithRouter
from hf_ga.exact.window import Window
from hf_ga.proof.probes import applicable_rules

MOST_ELEMENTS = 16_000_000  # compared over all micro-batches' gradients; larger ones are strided
# A hypothesis explains a gradient up to this relative error.
MATCH = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}
# A switch with a smaller effect is not a cause.
EFFECT = {"fp32": 5e-6, "bf16": 2e-2, "fp16": 3e-3}


@dataclass
class Trial:
    """An arm in one window with some suspects on; gradients as flat vectors.

    Attributes:
        reference: Gradient of the full batch.
        arm: The arm's gradient.
        parts: Gradients of the micro-batches' own mean losses.
        counts: For each counting rule, the targets of each micro-batch.
        frozen: Parameters that should have a gradient but have none. The gradients above are
            without them.
    """

    reference: Tensor
    arm: Tensor
    parts: list[Tensor]
    counts: dict[str, np.ndarray]
    frozen: list[str]

    def additivity(self, rule: str) -> float:
        """Compute the relative error of the correctly weighted sum of the parts."""
        n = self.counts[rule]
        return relative_error(Hypothesis(n / n.sum()).gradient(self.parts), self.reference)


def explain(
    subject: Subject,
    rows: list[Row],
    layouts: Mapping[str, CheckedLayout],
    step: StepFunction | None,
) -> None:
    """Write the causes of differences into some failed rows of an arm.

    Args:
        subject: The model and the settings of the check.
        rows: Those of the arm.
        layouts: By name.
        step: The arm's step. None: hf_ga.
    """
    failed = [row for row in rows if not row.passed and (row.refused is None or step is None)]
    for row in _telling_rows(failed, subject.accelerator.num_processes):
        if row.refused is None and row.share <= 1:
            text = (
                "the gradient is correct, but the number that the step returns is not the mean loss"
            )
            row.causes = [Cause("reported loss", text)]
        else:
            row.causes = Diagnosis(subject, layouts[row.layout], step, row.refused).causes()


def _telling_rows(failed: list[Row], num_processes: int) -> list[Row]:
    """Choose the rows that show different mistakes: the one with the fewest micro-batches, the most
    uneven, a short window, one whose micro-batches cannot be dealt out evenly.
    """
    full = [row for row in failed if len(row.micro_batches) == row.accumulation_steps]
    short = [row for row in failed if len(row.micro_batches) < row.accumulation_steps]
    simple = sorted(full, key=lambda row: (len(row.micro_batches), _unevenness(row)))[:1]
    uneven = [row for row in full if _unevenness(row) > 1 and row not in simple]
    indivisible = [row for row in full if len(row.micro_batches) % num_processes]
    chosen = [*simple, *sorted(uneven, key=_unevenness)[-1:], *short[:1], *indivisible[:1]]
    return list({row.layout: row for row in chosen}.values())  # each once


class Diagnosis:
    """One arm in one layout.

    Args:
        subject: The model and the settings of the check.
        layout: The layout.
        step: The arm's step. None: hf_ga.
        refused: The error message if hf_ga does not support the model. Then the correctly weighted
            sum of the micro-batches replaces its gradient.
    """

    def __init__(
        self,
        subject: Subject,
        layout: CheckedLayout,
        step: StepFunction | None,
        refused: str | None,
    ) -> None:
        self.subject = subject
        self.layout = layout
        self.step = step
        self.refused = refused
        self.window = layout.window(subject)
        innocent = {"clipping"} if step is None else set()
        if step is None and not refused:
            innocent |= {"padding width", "dropout"}  # proven, and keyed
        self.suspects = [
            s for s in SWITCHES if s.applies(subject, self.window) and s.name not in innocent
        ]
        self.match = MATCH[subject.precision]
        self.effect = EFFECT[subject.precision]

    def causes(self) -> list[Cause]:
        """Find all causes, or return one named "unknown"."""
        if self.refused and self.subject.dropout.unkeyed:
            return [Cause("randomness", self.refused)]
        quiet = self._trial()
        if not quiet.arm.any():
            return [
                Cause(
                    "no gradients",
                    "the step left no gradient in any parameter: leave it in .grad, without "
                    "updating",
                )
            ]
        if not quiet.arm.isfinite().all():
            return [Cause("not finite", "the step left a gradient that is NaN or infinite")]
        rule = min(quiet.counts, key=quiet.additivity)
        residual = quiet.additivity(rule)
        match, error = self._weights(quiet, rule)
        found = [*self._not_additive(residual), *match.causes, *self._reduced_in(quiet, error)]
        if quiet.frozen:
            found.append(
                Cause("frozen parameter", f"no gradient reaches {', '.join(quiet.frozen[:4])}")
            )
        for suspect in self.suspects:
            found += self._with_one(suspect, rule, match, max(error, residual))
        return found or [Cause("unknown", _unknown(quiet))]

    def _with_one(
        self, suspect: Switch, rule: str, match: Hypothesis, before: float
    ) -> list[Cause]:
        """Return the suspect, if the arm or the model itself fails with this suspect alone switched
        on.
        """
        try:
            trial = self._trial(suspect.name)
        except ValueError as failure:
            if suspect.name != "BatchNorm":  # which has no statistics of a single sample
                raise
            return [Cause(suspect.name, suspect.text, f"a micro-batch fails with it: {failure}")]
        error = max(relative_error(match.gradient(trial.parts), trial.arm), trial.additivity(rule))
        if not error > max(self.effect, 5 * before):
            return []
        if suspect.name == "clipping":
            clipped = Hypothesis(match.weights).clipped(float(trial.arm.double().norm()))
            if relative_error(clipped.gradient(trial.parts), trial.arm) <= self.match:
                return list(clipped.causes)
            if self.subject.max_grad_norm:
                return []
        return [
            Cause(
                suspect.name,
                suspect.text,
                f"relative error with it {error:.1e}, without {before:.1e}",
            )
        ]

    def _weights(self, trial: Trial, rule: str) -> tuple[Hypothesis, float]:
        """Find the weights that the arm gave its micro-batches, with the causes, and the relative
        error that they leave.
        """
        candidates = hypotheses(
            trial.counts,
            rule,
            self.layout.accumulation_steps,
            self.subject.accelerator.num_processes,
        )
        match, error = best_match(trial.arm, trial.parts, candidates)
        if error <= self.match:
            return match, error
        norm = float(trial.arm.double().norm())
        clipped, left = best_match(
            trial.arm, trial.parts, [candidate.clipped(norm) for candidate in candidates]
        )
        if left <= self.match:
            return clipped, left
        weights, left = fitted_weights(trial.arm, trial.parts)
        if left <= self.match:
            n = trial.counts[rule]
            factors = weights * n.sum() / np.maximum(n, 1)
            shown = ", ".join(f"{factor:.3g}" for factor in factors[:8])
            text = f"micro-batches are weighted by x({shown}) of n_k / N"
            return Hypothesis(weights, (Cause("normalisation", text),)), left
        # Low precision is no explanation where the parts do not add up in any precision.
        if error > MATCH["bf16"] or self.subject.whole_batch is not None:
            return replace(match, causes=()), error
        if self._reduced_in(trial, error):
            return match, error
        text = (
            f"the sum of the micro-batches' gradients has a relative error of {error:.1e}: "
            "computed in low precision"
        )
        return replace(match, causes=(*match.causes, Cause("precision", text))), error

    def _reduced_in(self, trial: Trial, error: float) -> list[Cause]:
        """Find out whether the processes added up their gradients in half precision: then it can
        hold every element of the sum.
        """
        name = half_precision(trial.arm)
        if self.subject.accelerator.num_processes == 1 or name is None:
            return []
        text = (
            f"the processes add up their gradients in {name} (FSDP's reduce_dtype, or a "
            "communication hook of DDP)"
        )
        seen = f"every element is a {name} number, relative error {error:.1e}"
        return [Cause(f"{name} reduction", text, seen)]

    def _not_additive(self, residual: float) -> list[Cause]:
        """Why no weights of the micro-batches' gradients give that of the window."""
        if residual <= self.match:
            return []
        text = "the loss of the window is not a weighted mean of its micro-batches' losses"
        seen = f"residual {residual:.1e}"
        rule = self.subject.rule
        if rule is None:
            pairs = "it depends on pairs of samples (in-batch negatives)"
            return [Cause("cross-batch loss", f"{text} even with all suspects off: {pairs}", seen)]
        if self.subject.whole_batch is not None:
            own = "each micro-batch compares its own samples only (in-batch negatives)"
            return [Cause("cross-batch loss", f"{text}: {own}", seen)]
        if isinstance(rule.loss, WithRouter):
            balancing = "the router's auxiliary loss is a product of means over the micro-batch"
            return [Cause("auxiliary loss", balancing, seen)]
        means = "it is a sum of several means, each over its own targets"
        return [Cause("several means", f"{text}: {means}", seen)]

    def _trial(self, on: str | None = None) -> Trial:
        """Run the arm and its parts with all suspects except `on` switched off."""
        subject = self.subject
        off = {s.name: s for s in self.suspects if s.name != on}
        with ExitStack() as stack:
            for switch in off.values():
                stack.enter_context(switch.off())
            window = self.window.padded_to_window() if "padding width" in off else self.window
            keyed = "dropout" not in off
            whole = window.split([np.arange(window.num_samples)])
            _, reference, _ = plain_backward(subject, whole, whole.micro_batches[0], keyed=keyed)
            arm = reference
            if not self.refused:
                _, arm = self.layout.run(subject, self.step, window)
            frozen = _frozen(arm, reference)
            names = [name for name in reference if name not in frozen]
            num_elements = sum(reference[name].numel() for name in names)
            stride = -(-len(self.layout.offsets) * num_elements // MOST_ELEMENTS) or 1
            parts = []
            counted = []
            for micro_batch in window.micro_batches:
                _, gradients, count = plain_backward(subject, window, micro_batch, keyed=keyed)
                parts.append(_flat(gradients, names, stride))
                counted.append(count)
        return Trial(
            reference=_flat(reference, names, stride),
            arm=_flat(arm, names, stride),
            parts=parts,
            counts=_counts(window) if counted[0] is None else {"loss_fn": np.array(counted)},
            frozen=frozen,
        )


def _frozen(arm: Gradients, reference: Gradients) -> list[str]:
    """Return the names of the parameters for which an arm has no gradient, although they should
    have one.
    """
    sizes = norms(reference)
    least = 1e-6 * total(sizes)
    return [name for name, size in sizes.items() if size > least and not arm[name].any()]


def _unevenness(row: Row) -> int:
    return max(row.micro_batches) - min(row.micro_batches)


def _counts(window: Window) -> dict[str, np.ndarray]:
    """Count the targets of each micro-batch by every rule that applies."""
    first = window.micro_batches[0].batch
    rules = {name: COUNTING_RULES[name] for name in applicable_rules(first)}
    if isinstance(first.get("input_ids"), Tensor):
        rules["tokens with padding"] = lambda batch, num_samples: batch["input_ids"].numel()
    found = {
        name: np.array([rule(m.batch, len(m)) for m in window.micro_batches], dtype=float)
        for name, rule in rules.items()
    }
    return {name: counts for name, counts in found.items() if counts.sum()}


def _unknown(trial: Trial) -> str:
    scale = float(trial.arm.double().norm() / trial.reference.double().norm())
    return (
        "no known cause: with all suspects switched off, the gradient has a relative error of "
        f"{relative_error(trial.arm, trial.reference):.1e}, its norm is x{scale:.3g} of the "
        "reference's"
    )


def _flat(gradients: Gradients, names: list[str], stride: int) -> Tensor:
    """Join every `stride`-th element of each of these gradients, one after the other."""
    if not names:
        return torch.empty(0)
    return torch.cat([gradients[name].flatten()[::stride].float() for name in names])
