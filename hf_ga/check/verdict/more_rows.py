"""Two more rows of a report: the gradient of a window that several pipeline stages compute, and
`same_bits`: the gradient must have the same bits for every per-device batch size.
"""

import copy
from collections import ChainMap

from accelerate.utils import gather_object, send_to_device

from hf_ga.check.gradients import Gradients, take_gradients
from hf_ga.check.steps import CheckContext, run_hf_ga_step
from hf_ga.check.verdict.judging import compute_reference, judged
from hf_ga.check.verdict.rows import OURS, Cause, ReportRow
from hf_ga.errors import ConfigError, LossNotAdditive, ProcessFailed, UnkeyedRandomness
from hf_ga.recovery.checkpoint import state_sha256

MULTIPLES = (1, 2, 4)  # per-device batch sizes, in chunks
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
        # Here: only pipelines need the models of transformers, which take seconds to import.
        from hf_ga.pipeline.pipeline import prepare_pipeline

        model = copy.deepcopy(context.model)
        windows = context.loader(num_samples, per_device_batch_size=batch_size)
        pipeline = prepare_pipeline(context.accelerator, model, windows, num_stages=num_stages)
        (window,) = windows
        loss = pipeline.backward_window(window).loss
        own_sizes = [len(micro_batch) for micro_batch in window.micro_batches]
        # All stages of a replica compute the same micro-batches, so only first stages count them.
        row.micro_batches = gather_object(own_sizes if pipeline.stage == 0 else [])
        row.accumulation_steps = len(row.micro_batches)
        gradients = take_gradients(pipeline.model)
        on_host = {name: gradient.cpu() for name, gradient in gradients.items()}
        gathered = dict(ChainMap(*gather_object([on_host])))
        return loss, send_to_device(gathered, context.accelerator.device)

    reference = compute_reference(context, num_samples)
    # Raised on all processes: as ProcessFailed on those where nothing failed.
    refusals = (ConfigError, LossNotAdditive, UnkeyedRandomness, ProcessFailed)
    return judged(context, row, run, reference, refusals)


def same_bits_row(context: CheckContext, chunk_size: int) -> ReportRow:
    """Return the row "bits": the window's gradient in chunks of `chunk_size` samples, with
    per-device batch sizes of 1, 2 and 4 chunks, has one hash and loss.
    """
    results = {}  # batch size -> hash of the gradients, loss
    for batch_size in [chunk_size * multiple for multiple in MULTIPLES]:
        window = context.first_samples_window(
            len(context.samples),
            per_device_batch_size=batch_size,
            canonical_micro_batch=chunk_size,
        )
        loss, gradients = run_hf_ga_step(context, window)
        results[batch_size] = (state_sha256(gradients), loss)
    sizes = [len(micro_batch) for micro_batch in window.micro_batches]
    row = ReportRow(OURS, "bits", sizes, len(sizes), loss=loss)
    row.passed = len(set(results.values())) == 1
    if row.passed:
        row.error = row.worst_share = 0.0
        return row
    text = (
        "a kernel of the model gives other bits when it runs again: call "
        "torch.use_deterministic_algorithms(True)"
    )
    seen = [f"per-device batch size {size}: {digest[:12]}" for size, (digest, _) in results.items()]
    row.causes.append(Cause("not deterministic", text, ", ".join(seen)))
    return row
