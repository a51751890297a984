"""The report row for pipeline stages: the gradient of a window that several stages compute
together.
"""

import copy

from accelerate.utils import gather_object

from hf_ga.check.gradients import Gradients, take_gradients
from hf_ga.check.steps import CheckContext
from hf_ga.check.verdict.judging import compute_reference, judged
from hf_ga.check.verdict.rows import ReportRow
from hf_ga.errors import ConfigError
from hf_ga.loading.window import Window
from hf_ga.pipeline.pipeline import Pipeline, prepare_pipeline

ARM = "hf_ga, pipeline"  # name of this training step in the report
MICRO_BATCHES_PER_REPLICA = 4


def pipeline_row(context: CheckContext, num_stages: int) -> ReportRow:
    """Return the row of the gradient that `num_stages` stages compute, the same on all processes;
    refused if the model or a setting is unsupported in a pipeline. A collective.
    """
    num_samples = len(context.samples)
    num_replicas = max(1, context.accelerator.num_processes // num_stages)
    batch_size = max(1, num_samples // (MICRO_BATCHES_PER_REPLICA * num_replicas))
    row = ReportRow(ARM, f"{num_stages} stages", micro_batches=[], accumulation_steps=0)

    def run() -> tuple[float, Gradients]:
        """Compute the gradient; its errors are raised on all processes."""
        settings = context.settings
        if settings.loss_fn is not None or settings.whole_batch is not None:
            raise ConfigError(
                "unsupported loss in a pipeline: only that of the model's own head is supported, "
                "so omit loss_fn and whole_batch, or use FSDP."
            )
        model = copy.deepcopy(context.model)
        windows = context.loader(num_samples, per_device_batch_size=batch_size)
        pipeline = prepare_pipeline(context.accelerator, model, windows, num_stages=num_stages)
        (window,) = windows
        loss = pipeline.backward_window(window).loss
        row.micro_batches = _gather_micro_batch_sizes(pipeline, window)
        row.accumulation_steps = len(row.micro_batches)
        return loss, _gather_gradients(pipeline, context)

    reference = compute_reference(context, context.first_samples_window(num_samples))
    return judged(context, row, run, reference)


def _gather_micro_batch_sizes(pipeline: Pipeline, window: Window) -> list[int]:
    """Return the sizes of the micro-batches over all replicas. A collective."""
    local_sizes = [len(micro_batch) for micro_batch in window.micro_batches]
    # All stages of a replica compute the same micro-batches, so only first stages count them.
    counted_here = local_sizes if pipeline.stage == 0 else []
    return gather_object(counted_here)


def _gather_gradients(pipeline: Pipeline, context: CheckContext) -> Gradients:
    """Return the gradients of all stages by parameter name. A collective."""
    own = {name: gradient.cpu() for name, gradient in take_gradients(pipeline.model).items()}
    return {
        name: gradient.to(context.accelerator.device)
        for stage_gradients in gather_object([own])
        for name, gradient in stage_gradients.items()
    }
