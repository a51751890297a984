"""check_equivalence(): does every split of a window give the full batch's gradient with this model,
and if not, why?
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from hf_ga.check.diagnosis import explain
from hf_ga.check.judging import Reference, compute_reference, judge
from hf_ga.check.layouts import CheckedLayout, choose_layouts
from hf_ga.check.pipeline import pipeline_row
from hf_ga.check.reference import find_dropout
from hf_ga.check.report import EquivalenceReport
from hf_ga.check.rows import OURS, Row
from hf_ga.check.same_bits import bits_row
from hf_ga.check.subjects import (
    DTYPES,
    StepFunction,
    Subject,
    make_accelerator,
    own_accelerate_state,
    working_copy,
)
from hf_ga.errors import ConfigError, LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.backend import check_supported
from hf_ga.exact.batches import sample_length
from hf_ga.exact.fetch import Collate
from hf_ga.exact.forward import LossFunction, unwrapped
from hf_ga.exact.generators import preserved_random_states
from hf_ga.exact.whole_window import WholeBatchLoss
from hf_ga.parallel.fsdp import backend_for, is_sharded
from hf_ga.parallel.prepare import prepare
from hf_ga.parallel.processes import (
    broadcast_from_main,
    check_agreement,
    raise_on_all_ranks,
)
from hf_ga.recovery.checkpoint import state_sha256
from hf_ga.recovery.versions import versions
from hf_ga.training import prove_targets


def check_equivalence(
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Collate,
    layouts: str | Sequence[str] | Mapping[str, Sequence[int]] = "auto",
    steps: Mapping[str, StepFunction] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    whole_batch: WholeBatchLoss | None = None,
    precision: str = "fp32",
    seed: int = 0,
    max_grad_norm: float | None = None,
    allow_split_dependent_randomness: bool = False,
    same_bits: int | None = None,
    pipeline_stages: int | None = None,
) -> EquivalenceReport:
    """Compare the gradient of every layout of one window with that of the full batch in float64
    (promise 1).

    Works on a copy of the model and restores all other state. On several processes all must call it
    with the same arguments: each computes the reference, and process r takes micro-batches r, r +
    num_processes, ... of each layout, under DDP or FSDP.

    Args:
        model: Not wrapped, on any device; if it is in evaluation mode, the copy is put into
            training mode.
        samples: One window of at least 8, ideally of very different lengths.
        collate_fn: List of samples -> model arguments.
        layouts: "auto" (even, uneven, one by one, sorted by length, short last window), some of
            these names, or {name: sizes of the micro-batches}.
        steps: name -> another `step(model, micro_batches)`: it receives a copy of the model and the
            window's collated micro-batches (dicts on the model's device), and leaves the window's
            gradient in `.grad`. It may return the window's mean loss. If it declares the arguments
            `accumulation_steps` (micro-batches of a full window on one process) or `precision`, it
            receives them too. On several processes it takes its own part of the micro-batches, as
            the loader that Accelerate prepares does, and may return (loss or None,
            `take_gradients(prepared)`). See `hf_ga.check.arms`.
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets); overrides the head's own
            loss.
        whole_batch: (outputs, batch) -> the loss of all samples together, a scalar; see
            `hf_ga.prepare`. If it is a module, a copy of it is used.
        precision: "fp32", "bf16" or "fp16", by autocast.
        seed: of dropout masks and of a step's own random draws.
        max_grad_norm: the reference, and hf_ga, clip the window's gradient once to this L2 norm.
        allow_split_dependent_randomness: accept random draws that cannot be tied to a sample; the
            check switches them off.
        same_bits: also compare the bits of gradients that are computed in chunks of so many
            samples.
        pipeline_stages: on several processes, also compare the gradient that so many pipeline
            stages compute together (`hf_ga.prepare_pipeline`).

    Raises:
        ConfigError: If an argument is bad, or the full batch cannot be computed in float64.

    Example:
        report = check_equivalence(model, [dataset[i] for i in range(64)], collate_fn)
        assert report.passed, report
    """
    if precision not in DTYPES:
        raise ConfigError(f"precision must be one of {', '.join(DTYPES)}, got {precision!r}.")
    lengths = np.array([sample_length(sample) for sample in samples])
    with preserved_random_states(), own_accelerate_state(), torch.enable_grad():
        accelerator = make_accelerator(model, precision)
        check_supported(accelerator)
        backend_for(accelerator, same_bits=same_bits is not None)
        with raise_on_all_ranks(accelerator):
            if any(parameter.is_meta for parameter in model.parameters()):
                raise ConfigError(
                    "check_equivalence computes a reference on every process, but process "
                    f"{accelerator.process_index} has no weights (they are on the meta device): "
                    "load them on all processes."
                )
        checked = choose_layouts(layouts, lengths, accelerator.num_processes)
        copied, whole_batch = working_copy(unwrapped(model), whole_batch)
        if accelerator.num_processes > 1:
            weights = state_sha256(copied.state_dict())[:12]
            check_agreement(
                accelerator,
                "samples and weights",
                f"{len(lengths)} samples of length {lengths.sum()}, {weights}",
            )
        proof = {
            "loss_fn": loss_fn,
            "whole_batch": whole_batch,
            "allow_split_dependent_randomness": allow_split_dependent_randomness,
        }
        subject = Subject(
            copied, list(samples), collate_fn, accelerator, precision, seed, max_grad_norm, proof
        )
        _prove(subject)
        rows = _rows(subject, checked, steps or {})
        facts = _facts(subject)
        if same_bits is not None and not subject.refused:
            rows.insert(len(checked), bits_row(subject, same_bits))
        if pipeline_stages is not None and not subject.refused:
            rows.append(pipeline_row(subject, pipeline_stages))
    shown = {
        "precision": precision,
        "seed": seed,
        "max_grad_norm": max_grad_norm,
        "num_samples": len(samples),
    }
    return EquivalenceReport(type(copied).__name__, rows, facts, shown, versions())


def _rows(
    subject: Subject, layouts: list[CheckedLayout], steps: Mapping[str, StepFunction]
) -> list[Row]:
    """Run all arms in all layouts, window by window, to keep only one reference in memory."""
    found: dict[tuple[str, str], Row] = {}
    arms: dict[str, StepFunction | None] = {OURS: None, **steps}
    hidden = not subject.accelerator.is_main_process
    with tqdm(
        total=len(layouts) * len(arms),
        unit="layout",
        delay=5,
        leave=False,
        dynamic_ncols=True,
        disable=hidden,
    ) as bar:
        for num_samples in dict.fromkeys(sum(layout.sizes) for layout in layouts):
            members = [layout for layout in layouts if sum(layout.sizes) == num_samples]
            reference = compute_reference(subject, members[0].window(subject))
            for arm, step in arms.items():
                for layout in members:
                    bar.set_postfix_str(f"{arm}, {layout.name}", refresh=False)
                    row = _row(subject, arm, step, layout, reference)
                    found[arm, layout.name] = broadcast_from_main(
                        subject.accelerator, row
                    )  # all processes explain the same rows
                    bar.update()
    rows = [found[arm, layout.name] for arm in arms for layout in layouts]
    for arm, step in arms.items():
        explain(
            subject,
            [row for row in rows if row.arm == arm],
            {layout.name: layout for layout in layouts},
            step,
        )
    return rows


def _row(
    subject: Subject,
    arm: str,
    step: StepFunction | None,
    layout: CheckedLayout,
    reference: Reference,
) -> Row:
    """Run one arm in one layout, and judge it."""
    row = Row(arm, layout.name, layout.sizes, layout.accumulation_steps)
    if step is None and subject.refused:
        row.refused = subject.refused
        return row
    try:
        outcome = layout.run(subject, step, layout.window(subject))
    except (LossNotAdditive, UnkeyedRandomness) as error:
        row.refused = str(error)
    except Exception as error:
        if step is None:
            raise
        row.refused = f"raised {type(error).__name__}: {error}"  # keep the other arms' results
    else:
        judge(row, *outcome, reference)
    return row


def _prove(subject: Subject) -> None:
    """Find the dropout sites and prove the loss; if the model is unsupported, store the reason in
    the subject.

    Random draws that depend on the split cannot be compared: put their modules into evaluation
    mode.
    """
    subject.dropout = find_dropout(subject)
    if subject.proof_arguments["allow_split_dependent_randomness"]:
        _set_evaluation_mode(subject.dropout.unkeyed)
    several = subject.accelerator.num_processes > 1
    trained = copy.deepcopy(subject.model) if several else subject.model
    try:
        subject.rule = prove_targets(
            trained, subject.samples, subject.collate_fn, **subject.proof_arguments
        )
    except (LossNotAdditive, UnkeyedRandomness) as error:
        subject.refused = str(error)
        _set_evaluation_mode(subject.dropout.unkeyed)
    else:
        optimizer = torch.optim.SGD(trained.parameters())  # FSDP2 needs one
        subject.prepared = (
            prepare(subject.accelerator, trained, optimizer)[0] if several else trained
        )


def _set_evaluation_mode(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.training = False


def _facts(subject: Subject) -> list[str]:
    """Describe how the check was run."""
    sizes = [p.numel() for p in subject.model.parameters() if p.requires_grad]
    counted = str(subject.rule) if subject.rule else "hf_ga found no counting rule for the targets"
    num_sites = len(subject.dropout.sites)
    accelerator = subject.accelerator
    wrapper = (
        f"FSDP{accelerator.state.fsdp_plugin.fsdp_version}" if is_sharded(accelerator) else "DDP"
    )
    processes = (
        f"{accelerator.num_processes} processes under {wrapper}: micro-batches are dealt out to "
        "them in turn"
    )
    return [
        f"window of {len(subject.samples)} samples, {len(sizes)} trainable tensors with "
        f"{sum(sizes):,} weights",
        "reference: one forward and backward of all samples at once, in float64",
        "limit: twice the relative error of the full batch in the same precision, plus 1e-6; the "
        "same for each parameter",
        f"{counted}; keyed dropout at {num_sites} sites",
        *([processes] if accelerator.num_processes > 1 else []),
    ]
