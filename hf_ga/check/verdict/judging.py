"""Promise 1: the reference of one window, and the verdict on the gradient of an arm (a training
step under test).

The relative error of an arm's gradient, ||g - g64|| / ||g64|| over all parameters together, is at
most twice that of the full batch in the same precision, plus 1e-6; the same for each parameter,
with the floor relative to the norm over all parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hf_ga.check.gradients import (
    Gradients,
    clip,
    gradient_norms,
    ratio,
    relative_errors,
    total_norm,
)
from hf_ga.check.reference import plain_backward
from hf_ga.check.steps import CheckContext
from hf_ga.check.verdict.rows import Cause, ReportRow
from hf_ga.errors import ConfigError, HfGaError, UnkeyedRandomness
from hf_ga.parallel.processes import broadcast_from_main

TIMES_OWN_ERROR = 2.0
FLOOR = 1e-6
# With a larger error of its own, the full batch in the checked precision shows nothing.
MAX_OWN_ERRORS = {"fp32": 1e-2, "bf16": 0.5, "fp16": 0.5}
# Under autocast the gradient of each micro-batch is rounded: one rounding of the norm for a single
# parameter, and for the loss.
PARAMETER_FLOORS = {"fp32": FLOOR, "bf16": 2.0**-8, "fp16": 2.0**-11}


@dataclass(frozen=True)
class Reference:
    """The correct loss and gradient of one window, and the largest errors with which a step passes.

    Attributes:
        loss: Mean loss of the full batch in float64.
        gradients: Gradients of the full batch in float64.
        own_error: Relative error of the full batch in the checked precision, over all parameters
            together.
        limits: For each parameter, the largest norm of its difference that passes, divided by the
            norm of the gradient over all parameters.
        loss_limit: The largest relative error of the loss that passes.
    """

    loss: float
    gradients: Gradients
    own_error: float
    limits: dict[str, float]
    loss_limit: float


def compute_reference(context: CheckContext, num_samples: int) -> Reference:
    """Compute the full batch of the first samples in float64, and in the checked precision, whose
    error sets the limits. Both are clipped to the check's `max_grad_norm`.

    Raises:
        ConfigError: If the model cannot run in float64, memory runs out, or the gradient in the
            checked precision has little to do with that in float64.
    """
    window = context.first_samples_window(num_samples)
    (whole,) = window.split([np.arange(num_samples)]).micro_batches
    loss, gradients = plain_backward(context, whole)
    try:
        loss64, gradients64 = plain_backward(context, whole, "float64")
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            "the reference needs one forward and backward of all samples in float64, but this "
            f"failed: {' '.join(str(error).split())}. Pass fewer samples if memory ran out; "
            "convert a loss_fn's float32 tensors (.to(logits)); check on a CPU "
            "(ACCELERATE_USE_CPU=true) if the device has no float64."
        ) from error
    for values in (gradients, gradients64):
        clip(values, context.max_grad_norm)
    errors = relative_errors(gradients, gradients64)
    own_error = total_norm(errors)
    if not own_error <= MAX_OWN_ERRORS[context.precision]:
        raise ConfigError(
            f"the gradient of the full batch in {context.precision} has a relative error of "
            f"{own_error:.1e} against float64, so a wrong one could not be told from it: the model "
            "rounds, chooses what is nearly equal, or draws other numbers in float64. Turn that "
            "off for the check."
        )
    floor = PARAMETER_FLOORS[context.precision]
    limits = {name: TIMES_OWN_ERROR * error + floor for name, error in errors.items()}
    loss_limit = TIMES_OWN_ERROR * ratio(abs(loss - loss64), abs(loss64)) + floor
    return Reference(
        loss=loss64,
        gradients=gradients64,
        own_error=own_error,
        limits=limits,
        loss_limit=loss_limit,
    )


def judged(
    context: CheckContext,
    row: ReportRow,
    run: Callable[[], tuple[float | None, Gradients]],
    reference: Reference,
    refusals: tuple[type[Exception], ...],
) -> ReportRow:
    """Run a training step, and compare its loss and gradients with the reference.

    Args:
        context: The settings of the check.
        row: What the report says of the step so far.
        run: Returns the loss of the step (None: it is not compared) and its gradients.
        reference: The correct ones.
        refusals: Errors of the step with which the row is marked as refused.

    Returns:
        The row of the main process, on all processes: they must diagnose the same rows.
    """
    try:
        loss, gradients = run()
    except refusals as error:
        is_own_error = isinstance(error, HfGaError)
        row.refused = str(error) if is_own_error else f"raised {type(error).__name__}: {error}"
        if UnkeyedRandomness in refusals and isinstance(error, UnkeyedRandomness):
            row.causes = [Cause("randomness", row.refused)]
    else:
        _write_verdict(row, loss, gradients, reference)
    return broadcast_from_main(context.accelerator, row)


def _write_verdict(
    row: ReportRow, loss: float | None, gradients: Gradients, reference: Reference
) -> None:
    """Compare a step's loss (None: not compared) and gradients with the reference, and write the
    relative errors, the limits and the verdict into `row`.
    """
    if loss is not None:
        row.loss = loss
        row.loss_error = ratio(abs(loss - reference.loss), abs(reference.loss))
    row.parameter_errors = relative_errors(gradients, reference.gradients)
    row.error = total_norm(row.parameter_errors)
    row.own_error = reference.own_error
    row.limit = TIMES_OWN_ERROR * row.own_error + FLOOR
    shares = {
        name: ratio(error, reference.limits[name]) for name, error in row.parameter_errors.items()
    }
    row.worst_parameter = max(shares, key=lambda name: np.nan_to_num(shares[name], nan=np.inf))
    row.worst_share = shares[row.worst_parameter]
    row.norm_ratio = ratio(
        total_norm(gradient_norms(gradients)), total_norm(gradient_norms(reference.gradients))
    )
    # A NaN fails each of these comparisons.
    loss_passed = row.loss_error is None or row.loss_error <= reference.loss_limit
    row.passed = row.error <= row.limit and row.worst_share <= 1.0 and loss_passed
