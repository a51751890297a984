"""Promise 1: the reference of one window, and the verdict on what an arm left.

The relative error of an arm's gradient, ||g - g64|| / ||g64|| over all parameters together, is at most twice that of the full batch
in the same precision, plus 1e-6; for each parameter likewise, with the floor taken of the norm over all parameters.
"""

from dataclasses import dataclass

import numpy as np

from hf_ga.check.gradients import Gradients, clip, norms, one_step, ratio, relative_errors, take_gradients, total
from hf_ga.check.reference import plain_backward
from hf_ga.check.rows import Row
from hf_ga.check.subjects import Outcome, Subject
from hf_ga.exact.window import Window

TIMES_OWN_ERROR, FLOOR = 2.0, 1e-6
# Under autocast the gradient of each micro-batch is rounded: one rounding of the norm for a single parameter, and for the loss.
PARAMETER_FLOORS = {"fp32": FLOOR, "bf16": 2.0**-8, "fp16": 2.0**-11}
# Without float64 two inexact runs are compared, and the own error is that of the same samples in reverse order.
TIMES_WITHOUT_FLOAT64, FLOOR_WITHOUT_FLOAT64 = 3.0, 1e-5
UPDATE_TIMES, UPDATE_FLOOR = 3.0, 1e-5  # for arms that are judged by the weights: an optimizer may amplify rounding


@dataclass(frozen=True)
class Reference:
    """The right result of one window, and the relative errors of the full batch in the checked precision.

    Attributes:
        loss, gradients: of the full batch in float64 (or as trained where that is not possible).
        update: what one optimizer step adds to each parameter.
        loss_error, errors, update_error: of the full batch; errors: by parameter, relative to the norm over all.
        times, floor: the limit of a relative error is times x the full batch's own + floor.
        parameter_floor: the same for a single parameter and for the loss.
    """

    loss: float
    gradients: Gradients
    update: Gradients
    loss_error: float
    errors: dict[str, float]
    update_error: float
    times: float
    floor: float
    parameter_floor: float


def compute_reference(subject: Subject, window: Window) -> Reference:
    """The full batch in the checked precision and in float64; where that is not possible, in reverse order."""
    settings, whole = subject.settings, window.split([np.arange(window.num_samples)])
    loss, gradients, _ = plain_backward(subject, whole, whole.micro_batches[0])
    right_loss, right = _in_float64(subject, whole) or (loss, gradients)
    if subject.without_float64:
        backwards = window.split([np.arange(window.num_samples)[::-1]])
        loss, gradients, _ = plain_backward(subject, backwards, backwards.micro_batches[0])
    for values in (gradients, right):
        clip(values, settings.max_grad_norm)
    update = one_step(subject.model, right, settings.optimizer)
    own_update = one_step(subject.model, gradients, settings.optimizer)
    times, floor = (TIMES_WITHOUT_FLOAT64, FLOOR_WITHOUT_FLOAT64) if subject.without_float64 else (TIMES_OWN_ERROR, FLOOR)
    return Reference(
        loss=right_loss,
        gradients=right,
        update=update,
        loss_error=ratio(abs(loss - right_loss), abs(right_loss)),
        errors=relative_errors(gradients, right),
        update_error=total(relative_errors(own_update, update)),
        times=times,
        floor=floor,
        parameter_floor=max(floor, PARAMETER_FLOORS[settings.precision]),
    )


def judge(row: Row, outcome: Outcome, reference: Reference, subject: Subject) -> None:
    """Write an arm's relative errors into its row, and whether it passed."""
    update = outcome.update or one_step(subject.model, outcome.gradients, subject.settings.optimizer)
    row.update_error = total(relative_errors(update, reference.update))
    if outcome.loss is not None:
        row.loss, row.loss_error = outcome.loss, ratio(abs(outcome.loss - reference.loss), abs(reference.loss))
    if outcome.update is not None:
        row.judged_by, row.error, row.own_error = "weights after one step", row.update_error, reference.update_error
        row.limit, row.worst_share = UPDATE_TIMES * row.own_error + UPDATE_FLOOR, 0.0
        row.norm_ratio = _norm_ratio(update, reference.update)
        row.passed = row.error <= row.limit
        return
    row.parameter_errors = relative_errors(outcome.gradients, reference.gradients)
    row.error, row.own_error = total(row.parameter_errors), total(reference.errors)
    row.limit = reference.times * row.own_error + reference.floor
    limits = {name: reference.times * error + reference.parameter_floor for name, error in reference.errors.items()}
    shares = {name: ratio(error, limits[name]) for name, error in row.parameter_errors.items()}
    row.worst_parameter = max(shares, key=lambda name: np.nan_to_num(shares[name], nan=np.inf))
    row.worst_share = shares[row.worst_parameter]
    row.norm_ratio = _norm_ratio(outcome.gradients, reference.gradients)
    loss_limit = reference.times * reference.loss_error + reference.parameter_floor
    # A NaN fails each of these comparisons.
    right_loss = row.loss_error is None or row.loss_error <= loss_limit
    row.passed = row.error <= row.limit and row.worst_share <= 1.0 and right_loss


def _norm_ratio(values: Gradients, right: Gradients) -> float:
    return ratio(total(norms(values)), total(norms(right)))


def _in_float64(subject: Subject, whole: Window) -> tuple[float, Gradients] | None:
    """None, and the reason in the subject, where it does not fit or the model cannot compute in float64."""
    if subject.without_float64:
        return None
    try:
        return plain_backward(subject, whole, whole.micro_batches[0], "float64")[:2]
    except (RuntimeError, NotImplementedError, TypeError) as error:  # a kernel without float64, or out of memory after all
        take_gradients(subject.model)
        subject.without_float64 = f"float64 is not possible here ({' '.join(str(error).split())[:160]})"
        return None
