"""A row for pipeline stages: the gradient of a window that several stages compute together."""

import copy

import torch
from accelerate.utils import gather_object
from torch import Tensor

from hf_ga.check.gradients import Gradients
from hf_ga.check.judging import compute_reference, judge
from hf_ga.check.rows import Row
from hf_ga.check.subjects import Subject
from hf_ga.errors import ConfigError
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.pipeline import Pipeline, prepare_pipeline
from hf_ga.parallel.processes import broadcast_from_main
from hf_ga.training import prove_targets

ARM = "hf_ga, pipeline"
MICRO_BATCHES = 4  # of each replica


def pipeline_row(subject: Subject, num_stages: int) -> Row:
    """Compare the gradient of all samples, computed in stages, with that of the full batch.

    All processes must call it.

    Args:
        subject: The model, which is cut as a copy.
        num_stages: The number of processes is a multiple of it.
    """
    num_samples = len(subject.samples)
    num_replicas = subject.accelerator.num_processes // num_stages
    size = max(1, num_samples // (MICRO_BATCHES * max(1, num_replicas)))
    sizes = [size] * (num_samples // size)
    row = Row(ARM, f"{num_stages} stages", sizes, len(sizes))
    reference = compute_reference(subject, subject.window(num_samples))
    try:
        loss, gradients = _of_stages(subject, num_stages, size)
    except ConfigError as error:  # the same on all processes
        row.refused = str(error)
    else:
        judge(row, loss, gradients, reference)
    return broadcast_from_main(subject.accelerator, row)


def _of_stages(subject: Subject, num_stages: int, size: int) -> tuple[float, Gradients]:
    """Compute loss and gradients of all samples in stages, in micro-batches of `size`."""
    model = copy.deepcopy(subject.model)
    rule = prove_targets(model, subject.samples, subject.collate_fn, **subject.proof_arguments)
    windows = WindowLoader(
        subject.samples,
        subject.collate_fn,
        accelerator=subject.accelerator,
        per_device_batch_size=size,
        global_batch_size=len(subject.samples),
        seed=subject.seed,
        shuffle=False,
    )
    pipeline = prepare_pipeline(subject.accelerator, model, windows, rule, num_stages=num_stages)
    (window,) = windows
    loss = pipeline.backward_window(window).loss
    gradients: Gradients = {}
    for of_stage in gather_object([_own_gradients(pipeline)]):
        gradients |= {name: gradient.to(subject.accelerator.device) for name, gradient in of_stage}
    return loss, gradients


def _own_gradients(pipeline: Pipeline) -> list[tuple[str, Tensor]]:
    """Take the gradients of this stage's parameters, on the host."""
    return [
        (name, torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu())
        for name, p in pipeline.model.named_parameters()
        if p.requires_grad
    ]
