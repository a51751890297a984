"""Why an arm differs: suspects are switched off together, then on again one at a time; the rest is read from the numbers."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_ga.check.hypotheses import (
    Hypothesis,
    best_match,
    combined,
    distance,
    fitted_weights,
    hypotheses,
    rounded_sum,
    with_clipping,
)
from hf_ga.check.layouts import CheckedLayout
from hf_ga.check.reference import Gradients, MakeOptimizer, norms, one_step, plain_backward, total
from hf_ga.check.report import Cause, Row
from hf_ga.check.subjects import Outcome, Step, Subject, run_ours, run_step
from hf_ga.check.switches import SWITCHES, ClipCounter
from hf_ga.exact.loss import COUNTING_RULES
from hf_ga.exact.window import Window

CLIPPING, PADDING = "clipping per micro-batch", "padding width"
# All names that a cause may have.
CAUSES = (
    *(name for name, _, _ in SWITCHES),
    *("normalisation", "last window", "labels counted unshifted", "accumulation precision", "precision", "frozen parameter"),
    *("cross-batch loss", "several means", "clipping", "randomness", "no gradients", "not finite", "reported loss", "unknown"),
)
MOST_ELEMENTS = 16_000_000  # of all micro-batches' gradients together that are looked at: every so many
MATCH = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}  # a hypothesis explains a gradient up to this
EFFECT = {"fp32": 5e-6, "bf16": 2e-2, "fp16": 3e-3}  # a switch that changes less is no cause
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Trial:
    """An arm in one window with some suspects on: flat vectors of the gradients' elements.

    Attributes:
        truth: of the full batch. arm: what the arm left. parts: gradient of each micro-batch's own mean loss.
        counts: rule -> targets of each micro-batch. clips: calls of torch's clipping.
    """

    truth: Tensor
    arm: Tensor
    parts: list[Tensor]
    counts: dict[str, np.ndarray]
    clips: int
    frozen: dict[str, float]

    def additivity(self, rule: str) -> float:
        """How far the weighted parts are from the truth."""
        n = self.counts[rule]
        return distance(self.truth, combined(self.parts, n / n.sum()))


def explain(
    subject: Subject, rows: list[Row], layouts: Mapping[str, CheckedLayout], step: Step | None, optimizer: MakeOptimizer
) -> None:
    """Write the causes into some rows that failed: the one with the fewest micro-batches, the most uneven, the short window."""
    failed = [row for row in rows if not row.passed and (row.refused is None or step is None)]
    full = [row for row in failed if len(row.micro_batches) == row.accumulation_steps]
    short = [row for row in failed if len(row.micro_batches) < row.accumulation_steps]
    simple = sorted(full, key=lambda row: (len(row.micro_batches), _unevenness(row)))[:1]
    uneven = [row for row in full if _unevenness(row) > 1 and row not in simple]
    for row in [*simple, *sorted(uneven, key=_unevenness)[-1:], *short[:1]]:
        if row.judged_by == "gradient" and row.refused is None and row.share <= 1:
            row.causes = [
                Cause("reported loss", "the gradient is right, but the number that the step returns is not the mean loss")
            ]
            continue
        row.causes = Diagnosis(subject, layouts[row.layout], step, row.refused, optimizer).causes()


class Diagnosis:
    """One arm in one layout.

    Args:
        step: None for hf_ga's own. refused: the message, where hf_ga refused; then the plain sum of the micro-batches, rightly
            weighted, is looked at in its place.
    """

    def __init__(
        self, subject: Subject, layout: CheckedLayout, step: Step | None, refused: str | None, optimizer: MakeOptimizer
    ) -> None:
        self.subject, self.layout, self.step, self.refused, self.optimizer = subject, layout, step, refused, optimizer
        self.window = layout.window(subject.samples, subject.collate_fn, subject.accelerator, subject.seed)
        not_suspected = set() if step is not None else {CLIPPING} if refused else {CLIPPING, PADDING, "dropout"}
        applicable = [name for name, applies, _ in SWITCHES if applies(subject, self.window)]
        self.suspects = [name for name in applicable if name not in not_suspected]

    def causes(self) -> list[Cause]:
        """Everything that was found; one of the name "unknown" if nothing was."""
        if self.refused and self.subject.places is not None and self.subject.places.unkeyed:
            return [Cause("randomness", self.refused)]
        quiet = self._trial(on=())
        if not quiet.arm.any():
            return [Cause("no gradients", "the step left no gradient in any parameter")]
        if not quiet.arm.isfinite().all():
            return [Cause("not finite", "the step left a gradient that is NaN or infinite")]
        rule = min(quiet.counts, key=quiet.additivity)
        found = _frozen(quiet.frozen)
        additive = quiet.additivity(rule)
        if additive > MATCH[self.subject.precision]:
            found.append(self._not_additive(additive))
        match, error, by_numbers = self._match(quiet, rule)
        found += by_numbers
        for name in self.suspects:
            found += self._with_one(name, rule, match, max(error, additive), quiet.frozen)
        return found or [Cause("unknown", _unknown(quiet))]

    def _with_one(self, name: str, rule: str, match: Hypothesis, before: float, frozen: Collection[str]) -> list[Cause]:
        """The cause of that name, if with it alone switched on the arm or the model itself goes wrong."""
        trial = self._trial(on=(name,), leave_out=frozen)
        off_arm = distance(trial.arm, match.gradient(trial.parts))
        off_model = trial.additivity(rule)
        if name == CLIPPING:
            return self._clipping(trial.clips, off_arm, before)
        off = max(off_arm, off_model)
        if not off > max(EFFECT[self.subject.precision], 5 * before):
            return []
        return [Cause(name, _TEXTS[name], f"error with it {off:.1e}, without {before:.1e}")]

    def _clipping(self, calls: int, off: float, before: float) -> list[Cause]:
        if not off > max(EFFECT[self.subject.precision], 5 * before):
            return []
        num = len(self.layout.offsets)
        if calls > 1:
            return [Cause(CLIPPING, f"gradients are clipped {calls} times in a window of {num} micro-batches, not once at its end")]
        if self.subject.max_grad_norm:
            return []
        return [Cause("clipping", "the step clips once a window, as is right, but the truth is not clipped: give max_grad_norm")]

    def _match(self, trial: Trial, rule: str) -> tuple[Hypothesis, float, list[Cause]]:
        """The weights that the arm gave its micro-batches, how well they match, and what they mean."""
        candidates = hypotheses(trial.counts, rule, self.layout.accumulation_steps)
        match, error = best_match(trial.arm, trial.parts, candidates)
        tolerance = MATCH[self.subject.precision]
        if error <= tolerance:
            return match, error, list(match.causes)
        if low := _low_precision(trial, candidates, match, error):
            return match, error, low
        clipped, left = best_match(trial.arm, trial.parts, with_clipping(candidates, float(trial.arm.double().norm())))
        if left <= tolerance:
            return clipped, left, list(clipped.causes)
        weights, left = fitted_weights(trial.arm, trial.parts)
        n = trial.counts[rule]
        if left <= tolerance:
            factors = ", ".join(f"{w:.3g}" for w in (weights * n.sum() / np.maximum(n, 1))[:8])
            text = f"the micro-batches weigh x({factors}) of what is right"
            return Hypothesis(weights), left, [Cause("normalisation", text)]
        if error <= MATCH["bf16"]:
            text = f"only up to {error:.1e} is the gradient a sum of the micro-batches' gradients: as if computed in low precision"
            return match, error, [*match.causes, Cause("precision", text)]
        return match, error, []

    def _not_additive(self, residual: float) -> Cause:
        text, seen = "the loss of the window is no weighted mean of its micro-batches' losses", f"residual {residual:.1e}"
        if self.subject.rule is not None:
            return Cause("several means", f"{text}: it is a sum of several means, each over targets of its own", seen)
        text += ", with all else switched off: it goes across samples (in-batch negatives)"
        return Cause("cross-batch loss", text, seen)

    def _trial(self, on: Collection[str], leave_out: Collection[str] = ()) -> Trial:
        subject = self.subject
        with ExitStack() as stack:
            for name, _, off in SWITCHES:
                if name in self.suspects and name not in on:
                    stack.enter_context(off(subject))
            window = self.window if PADDING in on or PADDING not in self.suspects else self.window.padded_to_window()
            places = subject.places if "dropout" in on or "dropout" not in self.suspects else None
            whole = window.split([np.arange(window.num_samples)])
            truth = plain_backward(subject.model, whole, whole.micro_batches[0], places, subject.loss_fn, subject.precision)[1]
            counter = stack.enter_context(ClipCounter(is_off=CLIPPING not in on))
            arm = None if self.refused else self._arm(window, truth)
            frozen = {} if arm is None else _frozen_parameters(arm, truth)
            names = [name for name in truth if name not in frozen and name not in leave_out]
            stride = -(-len(self.layout.offsets) * sum(truth[name].numel() for name in names) // MOST_ELEMENTS) or 1
            parts, counted = [], []
            for micro_batch in window.micro_batches:
                _, gradients, count = plain_backward(subject.model, window, micro_batch, places, subject.loss_fn, subject.precision)
                parts.append(_flat(gradients, names, stride))
                counted.append(count)
        counts = _counts(window) if counted[0] is None else {"loss_fn": np.array(counted)}
        flat_truth = _flat(truth, names, stride)
        arm_vector = flat_truth if arm is None else _flat(arm, names, stride)
        return Trial(flat_truth, arm_vector, parts, counts, counter.calls, frozen)

    def _arm(self, window: Window, truth: Gradients) -> Gradients:
        """The arm's gradients; of one that updates by itself, taken from its update where the optimizer is linear (SGD)."""
        if self.step is None:
            return run_ours(self.subject, window).gradients
        outcome: Outcome = run_step(self.step, self.subject, window, self.layout.accumulation_steps)
        if outcome.update is None or len(outcome.missing) < len(outcome.gradients):
            return outcome.gradients
        expected = one_step(self.subject.model, truth, self.optimizer)
        rate = total(norms(expected)) / total(norms(truth))
        return {name: -change / rate for name, change in outcome.update.items()}


_TEXTS = {
    "dropout": "dropout masks are not those of the full batch: they depend on the split",
    "BatchNorm": "BatchNorm normalises by the statistics of the micro-batch, not of the window",
    "auxiliary loss": "the router's auxiliary loss is a product of means over the micro-batch",
    PADDING: "the loss of a sample depends on the width to which its micro-batch is padded",
}


def _unevenness(row: Row) -> int:
    return max(row.micro_batches) - min(row.micro_batches)


def _counts(window: Window) -> dict[str, np.ndarray]:
    """Targets of each micro-batch by every rule that can be applied."""
    counts = {}
    first = window.micro_batches[0].batch
    labels, ids = first.get("labels"), first.get("input_ids")
    countable = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() > 0
    applicable = {
        "samples": True,
        "labels": countable,
        "shifted labels": countable and labels.dim() > 1,
        "attended tokens": isinstance(first.get("attention_mask"), Tensor),
    }
    for name, rule in COUNTING_RULES.items():
        if applicable.get(name):
            found = np.array([rule(m.batch, len(m)) for m in window.micro_batches], dtype=float)
            if found.sum():
                counts[name] = found
    if isinstance(ids, Tensor):
        counts["tokens with padding"] = np.array([m.batch["input_ids"].numel() for m in window.micro_batches], dtype=float)
    return counts


def _low_precision(trial: Trial, candidates: list[Hypothesis], match: Hypothesis, error: float) -> list[Cause]:
    """Whether the arm's gradient is the same sum accumulated in bfloat16 or float16."""
    for name, dtype in LOW.items():
        for candidate in (match, *candidates):
            plain = distance(trial.arm, combined(trial.parts, candidate.weights))
            if plain < 0.1 and distance(trial.arm, rounded_sum(trial.parts, candidate.weights, dtype)) < 0.2 * plain:
                text = f"gradients of the micro-batches are added up in {name} (error {plain:.1e})"
                return [*candidate.causes, Cause("accumulation precision", text)]
        if torch.equal(trial.arm.to(dtype).to(trial.arm.dtype), trial.arm) and error < 0.1:
            text = f"every element of the gradient is a {name} number: it is computed or added up in {name} (error {error:.1e})"
            return [*match.causes, Cause("accumulation precision", text)]
    return []


def _frozen_parameters(arm: Gradients, truth: Gradients) -> dict[str, float]:
    """Names without a gradient that should have one -> their share of the norm."""
    sizes, own = norms(truth), norms(arm)
    whole = total(sizes)
    return {name: size / whole for name, size in sizes.items() if own[name] == 0 and size > 1e-6 * whole}


def _frozen(shares: dict[str, float]) -> list[Cause]:
    if not shares:
        return []
    names = ", ".join(sorted(shares, key=lambda name: -shares[name])[:3])
    names += f" and {len(shares) - 3} more" if len(shares) > 3 else ""
    return [Cause("frozen parameter", f"no gradient reaches {names} ({total(shares):.1%} of the gradient's norm)")]


def _unknown(trial: Trial) -> str:
    scale = float(trial.arm.double().norm() / trial.truth.double().norm())
    return (
        f"none of {', '.join(CAUSES[:10])} explains it: with all that can be switched off the gradient is still "
        f"{distance(trial.arm, trial.truth):.1e} off, its norm x{scale:.3g} of the right one"
    )


def _flat(gradients: Gradients, names: list[str], stride: int) -> Tensor:
    return torch.cat([gradients[name].detach().flatten()[::stride].float() for name in names]) if names else torch.empty(0)
