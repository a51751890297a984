"""Promise 1: the reference of one window, and the verdict on an arm's gradient.

The relative error of an arm's gradient, ||g - g64|| / ||g64|| over all parameters together, is at
most twice that of the full batch in the same precision, plus 1e-6; the same for each parameter,
with the floor relative to the norm over all parameters.
"""

from dataclasses import dataclass

import numpy as np

from hf_ga.check.gradients import Gradients, clip, norms, ratio, relative_errors, total
from hf_ga.check.reference import plain_backward
from hf_ga.check.rows import Row
from hf_ga.check.subjects import Subject
from hf_ga.errors import ConfigError
from hf_ga.exact.window import Window

TIMES_OWN_ERROR = 2.0
FLOOR = 1e-6
# Under autocast the gradient of each micro-batch is rounded: one rounding of the norm for a single
# parameter, and for the loss.
PARAMETER_FLOORS = {"fp32": FLOOR, "bf16": 2.0**-8, "fp16": 2.0**-11}


@dataclass(frozen=True)
class Reference:
    """The correct result of one window, and the relative errors that an arm may have.

    Attributes:
        loss: Of the full batch in float64.
        gradients: Of the full batch in float64.
        own_error: Relative error of the full batch in the checked precision, over all parameters
            together.
        limits: Of the relative error of each parameter, relative to the norm over all.
        loss_limit: Of the relative error of the loss.
    """

    loss: float
    gradients: Gradients
    own_error: float
    limits: dict[str, float]
    loss_limit: float


def compute_reference(subject: Subject, window: Window) -> Reference:
    """Compute the full batch in the checked precision and in float64.

    Raises:
        ConfigError: If the model cannot run in float64, or memory runs out.
    """
    whole = window.split([np.arange(window.num_samples)])
    loss, gradients, _ = plain_backward(subject, whole, whole.micro_batches[0])
    try:
        right_loss, right, _ = plain_backward(subject, whole, whole.micro_batches[0], "float64")
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            "the reference needs one forward and backward of all samples in float64, but this "
            f"failed: {' '.join(str(error).split())}. Pass fewer samples if memory ran out; "
            "convert a loss_fn's float32 tensors (.to(logits)); check on a CPU "
            "(ACCELERATE_USE_CPU=true) if the device has no float64."
        ) from error
    for values in (gradients, right):
        clip(values, subject.max_grad_norm)
    errors = relative_errors(gradients, right)
    floor = PARAMETER_FLOORS[subject.precision]
    limits = {name: TIMES_OWN_ERROR * error + floor for name, error in errors.items()}
    loss_limit = TIMES_OWN_ERROR * ratio(abs(loss - right_loss), abs(right_loss)) + floor
    return Reference(right_loss, right, total(errors), limits, loss_limit)


def judge(row: Row, loss: float | None, gradients: Gradients, reference: Reference) -> None:
    """Write an arm's relative errors and its verdict into its row."""
    if loss is not None:
        row.loss = loss
        row.loss_error = ratio(abs(loss - reference.loss), abs(reference.loss))
    row.parameter_errors = relative_errors(gradients, reference.gradients)
    row.error = total(row.parameter_errors)
    row.own_error = reference.own_error
    row.limit = TIMES_OWN_ERROR * row.own_error + FLOOR
    shares = {
        name: ratio(error, reference.limits[name]) for name, error in row.parameter_errors.items()
    }
    row.worst_parameter = max(shares, key=lambda name: np.nan_to_num(shares[name], nan=np.inf))
    row.worst_share = shares[row.worst_parameter]
    row.norm_ratio = ratio(total(norms(gradients)), total(norms(reference.gradients)))
    # A NaN fails each of these comparisons.
    right_loss = row.loss_error is None or row.loss_error <= reference.loss_limit
    row.passed = row.error <= row.limit and row.worst_share <= 1.0 and right_loss
