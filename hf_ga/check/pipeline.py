"""The report row for pipeline stages: the gradient of a window that several stages compute
together.
"""

import copy

import torch
from accelerate.utils import gather_object
from torch import Tensor

from hf_ga.check.gradients import Gradients
from hf_ga.check.judging import compute_reference, write_verdict
from hf_ga.check.rows import ReportRow
from hf_ga.check.steps import CheckContext
from hf_ga.errors import ConfigError, LossNotAdditive, ProcessFailed, UnkeyedRandomness
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.processes import broadcast_from_main
from hf_ga.pipeline.pipeline import Pipeline, prepare_pipeline

ARM = "hf_ga, pipeline"  # name of this training step in the report
MICRO_BATCHES_PER_REPLICA = 4


def pipeline_row(context: CheckContext, num_stages: int) -> ReportRow:
    """Check pipeline parallelism in an equivalence check: let `num_stages` stages compute the
    gradient of all samples, and compare it with that of the full batch in float64.

    All processes must call it. Each replica (copy of the model, split into stages) has about four
    micro-batches.

    Args:
        context: The model and the settings of the check. A copy of the model is split into stages.
        num_stages: Stages of the pipeline; the number of processes must be a multiple of it.

    Returns:
        The row of the report, the same on all processes; refused if the model or a setting is
        unsupported in a pipeline.
    """
    num_samples = len(context.samples)
    num_replicas = max(1, context.accelerator.num_processes // num_stages)
    batch_size = max(1, num_samples // (MICRO_BATCHES_PER_REPLICA * num_replicas))
    row = ReportRow(ARM, f"{num_stages} stages", micro_batches=[], accumulation_steps=0)
    reference = compute_reference(context, context.first_samples_window(num_samples))
    try:
        _check_loss(context)
        pipeline, window = _prepare_stages(context, num_stages, batch_size)
        loss = pipeline.backward_window(window).loss
    # Raised on all processes: as ProcessFailed on those where nothing failed.
    except (ConfigError, LossNotAdditive, UnkeyedRandomness, ProcessFailed) as error:
        row.refused = str(error)
    else:
        row.micro_batches = _gather_micro_batch_sizes(pipeline, window)
        row.accumulation_steps = len(row.micro_batches)
        write_verdict(row, loss, _gather_gradients(pipeline, context), reference)
    return broadcast_from_main(context.accelerator, row)


def _check_loss(context: CheckContext) -> None:
    """Check that the loss of the equivalence check is that of the model's head, which is the only
    one that a pipeline supports.

    Raises:
        ConfigError: If it is another loss.
    """
    settings = context.settings
    if settings.loss_fn is not None or settings.whole_batch is not None:
        raise ConfigError(
            "unsupported loss in a pipeline: only that of the model's own head is supported, so "
            "omit loss_fn and whole_batch, or use FSDP."
        )


def _prepare_stages(
    context: CheckContext, num_stages: int, batch_size: int
) -> tuple[Pipeline, Window]:
    """Split a copy of the model of an equivalence check into pipeline stages.

    Args:
        context: The model and the settings of the check.
        num_stages: Stages of the pipeline.
        batch_size: Per-device batch size of the window.

    Returns:
        The pipeline with this process's stage, and one window of all samples.
    """
    model = copy.deepcopy(context.model)
    windows = WindowLoader(
        context.samples,
        context.collate_fn,
        accelerator=context.accelerator,
        per_device_batch_size=batch_size,
        global_batch_size=len(context.samples),
        seed=context.seed,
        shuffle=False,
    )
    pipeline = prepare_pipeline(context.accelerator, model, windows, num_stages=num_stages)
    (window,) = windows
    return pipeline, window


def _gather_micro_batch_sizes(pipeline: Pipeline, window: Window) -> list[int]:
    """Return the number of samples in each micro-batch of the window over all replicas of the
    pipeline, for a row of the equivalence check's report. All processes must call it.
    """
    local_sizes = [len(micro_batch) for micro_batch in window.micro_batches]
    # All stages of a replica compute the same micro-batches, so only first stages count them.
    counted_here = local_sizes if pipeline.stage == 0 else []
    return gather_object(counted_here)


def _gather_gradients(pipeline: Pipeline, context: CheckContext) -> Gradients:
    """Return the gradients of the parameters of all pipeline stages, by name, on the accelerator's
    device, to compare them in the equivalence check. All processes must call it.
    """
    gradients: Gradients = {}
    for stage_gradients in gather_object([_stage_gradients(pipeline)]):
        for name, gradient in stage_gradients:
            gradients[name] = gradient.to(context.accelerator.device)
    return gradients


def _stage_gradients(pipeline: Pipeline) -> list[tuple[str, Tensor]]:
    """Copy the gradients of the trainable parameters of this pipeline stage to the CPU, for the
    equivalence check; zeros for parameters without a gradient.

    Returns:
        Pairs of a parameter's name in the whole model and its gradient.
    """
    gradients = []
    for name, parameter in pipeline.model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            gradient = torch.zeros_like(parameter, device="cpu")
        else:
            gradient = parameter.grad.cpu()
        gradients.append((name, gradient))
    return gradients
