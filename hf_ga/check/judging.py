"""The truth of one window, and the verdict on what an arm left of it."""

from contextlib import nullcontext

import numpy as np

from hf_ga.check.reference import (
    Gradients,
    MakeOptimizer,
    Truth,
    difference_norms,
    in_float64,
    norms,
    one_step,
    plain_backward,
    taken_gradients,
    total,
)
from hf_ga.check.report import Row
from hf_ga.check.subjects import Outcome, Subject, clip
from hf_ga.exact.window import Window

UPDATE_TIMES, UPDATE_FLOOR = 3.0, 1e-5  # for arms that are judged by the weights: an optimizer may amplify rounding


def judge(row: Row, outcome: Outcome, truth: Truth, subject: Subject, optimizer: MakeOptimizer) -> None:
    """Fill a row with the distances between an arm's outcome and the truth, and say whether it passed."""
    by_update = outcome.update is not None and len(outcome.missing) == len(outcome.gradients)
    row.judged_by = "weights after one step" if by_update else "gradient"
    update = outcome.update or one_step(subject.model, outcome.gradients, optimizer)
    size = total(norms(truth.update))
    row.update_error = _ratio(total(difference_norms(update, truth.update)), size)
    if outcome.loss is not None:
        row.loss, row.loss_error = outcome.loss, _ratio(abs(outcome.loss - truth.loss), abs(truth.loss))
    if by_update:
        own = _ratio(truth.update_error, size)
        row.error, row.own_error, row.limit, row.worst_share = row.update_error, own, UPDATE_TIMES * own + UPDATE_FLOOR, 0.0
        _angles(row, update, truth.update, size)
        row.passed = row.error <= row.limit
        return
    errors, limits = difference_norms(outcome.gradients, truth.gradients), truth.parameter_limits(subject.precision)
    shares = {name: _ratio(errors[name], limit) for name, limit in limits.items()}
    row.worst_parameter = max(shares, key=lambda name: np.nan_to_num(shares[name], nan=np.inf))
    row.worst_share = shares[row.worst_parameter]
    row.error, row.own_error = _ratio(total(errors), truth.norm), _ratio(truth.error, truth.norm)
    row.limit = _ratio(truth.limit(), truth.norm)
    row.parameter_errors = {name: _ratio(error, truth.norm) for name, error in errors.items()}
    row.parameter_limits = {name: _ratio(limit, truth.norm) for name, limit in limits.items()}
    _angles(row, outcome.gradients, truth.gradients, truth.norm)
    # A NaN fails each of these comparisons.
    right_loss = outcome.loss is None or abs(outcome.loss - truth.loss) <= truth.loss_limit(subject.precision)
    row.passed = row.error <= row.limit and row.worst_share <= 1.0 and right_loss


def find_truth(subject: Subject, window: Window, optimizer: MakeOptimizer) -> Truth:
    """The full batch in the checked precision, and in float64; where that cannot be, in reverse order."""
    whole = window.split([np.arange(window.num_samples)])
    loss, gradients = _full(subject, whole, subject.precision)
    right_loss, right = _in_float64(subject, whole) or (loss, gradients)
    if subject.without_float64:
        loss, gradients = _full(subject, window.split([np.arange(window.num_samples)[::-1]]), subject.precision)
    for values in (gradients, right):
        clip(values, subject.max_grad_norm)
    errors = difference_norms(gradients, right)
    update = one_step(subject.model, right, optimizer)
    own = total(difference_norms(one_step(subject.model, gradients, optimizer), update))
    return Truth(
        loss=right_loss,
        loss_error=abs(loss - right_loss),
        gradients=right,
        norm=total(norms(right)),
        errors=errors,
        error=total(errors),
        is_float64=subject.without_float64 is None,
        update=update,
        update_error=own,
    )


def _in_float64(subject: Subject, whole: Window) -> tuple[float, Gradients] | None:
    """None where it does not fit or the model cannot compute in float64; then the subject is told why."""
    if subject.without_float64:
        return None
    try:
        return _full(subject, whole, "float64")
    except (RuntimeError, NotImplementedError, TypeError) as error:  # a kernel without float64, or out of memory after all
        taken_gradients(subject.model)
        subject.without_float64 = f"float64 is not possible here ({' '.join(str(error).split())[:160]})"
        return None


def _full(subject: Subject, whole: Window, precision: str) -> tuple[float, Gradients]:
    with in_float64(subject.model) if precision == "float64" else nullcontext():
        return plain_backward(subject.model, whole, whole.micro_batches[0], subject.places, subject.loss_fn, precision)[:2]


def _angles(row: Row, values: Gradients, right: Gradients, size: float) -> None:
    own = total(norms(values))
    row.norm_ratio = _ratio(own, size)
    row.cosine = _ratio(sum(float((values[n].to(r.dtype) * r).sum()) for n, r in right.items()), own * size)


def _ratio(value: float, of: float) -> float:
    return value / of if of else (0.0 if value == 0 else float("inf"))
