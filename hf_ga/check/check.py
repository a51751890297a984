"""check_equivalence(): does every split of a window give the full batch's gradient with this model,
and if not, why?
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from tqdm.auto import tqdm

from hf_ga.check.causes.diagnosis import explain
from hf_ga.check.layouts import CheckedLayout, choose_layouts
from hf_ga.check.reference import begin_draws, mean_loss
from hf_ga.check.steps import (
    DTYPES,
    CheckContext,
    StepFunction,
    device_of,
    make_accelerator,
    own_accelerate_state,
    working_copy,
)
from hf_ga.check.verdict.judging import compute_reference, judged
from hf_ga.check.verdict.more_rows import pipeline_row, same_bits_row
from hf_ga.check.verdict.report import EquivalenceReport
from hf_ga.check.verdict.rows import OURS, ReportRow
from hf_ga.draws.generators import moved_generators, preserved_random_states, random_states
from hf_ga.engine.look.trial import LossFacts
from hf_ga.engine.whole.whole_window import WholeBatchLoss
from hf_ga.errors import ConfigError, LossNotAdditive, UnkeyedRandomness
from hf_ga.loading.batches import as_batch, sample_length
from hf_ga.loading.fetch import Collate
from hf_ga.model.forward import LossFunction, force_eager, restored_state, unwrapped
from hf_ga.parallel.backend import check_supported
from hf_ga.parallel.fsdp import backend_for, is_sharded
from hf_ga.parallel.prepare import prepare
from hf_ga.parallel.processes import check_agreement, raise_on_all_ranks
from hf_ga.recovery.checkpoint import state_sha256
from hf_ga.recovery.versions import versions
from hf_ga.training import LossSettings, remember, try_before

# Batch sizes of the forwards in which random draws are looked for. The dim of a draw that holds the
# samples changes with them.
BATCH_SIZES = (2, 3)


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
    """Check whether every way to split one window into micro-batches (a layout) has the gradient of
    the full batch in float64 (promise 1), for hf_ga's training step and for yours.

    Works on a copy of the model and restores all other state. On several processes all must call it
    with the same arguments: each computes the reference, and process r takes micro-batches r, r +
    num_processes, ... of each layout, under DDP or FSDP.

    Args:
        model: Not wrapped, on any device; if it is in evaluation mode, the copy is put into
            training mode.
        samples: The samples of one window: at least 8, ideally of very different lengths.
        collate_fn: List of samples -> model arguments.
        layouts: "auto" (even, uneven, one by one, sorted by length, short last window), some of
            these names, or {name: sizes of the micro-batches}.
        steps: name -> another training step to check, `step(model, micro_batches)`: it receives a
            copy of the model and the window's collated micro-batches (dicts on the model's device),
            and leaves the window's gradient in `.grad`. It may return the window's mean loss. If it
            declares the arguments `accumulation_steps` (micro-batches of a full window on one
            process) or `precision`, it receives them too. On several processes it selects its own
            micro-batches, as the loader that Accelerate prepares does, and may return (loss or
            None, `take_gradients(prepared)`). See `hf_ga.check.arms`.
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets); overrides the head's own
            loss.
        whole_batch: (outputs, batch) -> the loss of all samples together, a scalar; see
            `hf_ga.prepare`. If it is a module, a copy of it is used.
        precision: "fp32", "bf16" or "fp16", by autocast.
        seed: Seed of dropout masks and of a step's own random draws.
        max_grad_norm: L2 norm to which the reference and hf_ga clip the window's gradient once.
            None: no clipping.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample; the
            check switches them off.
        same_bits: Also compare the bits of gradients that are computed in chunks of this many
            samples.
        pipeline_stages: On several processes, also compare the gradient that this many pipeline
            stages compute together (`hf_ga.prepare_pipeline`).

    Returns:
        The report: verdicts, relative errors and causes for each training step and layout.

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
        # Called for its errors: it raises if same_bits is unsupported by this wrapper.
        backend_for(accelerator, same_bits=same_bits is not None)
        _check_has_weights(model, accelerator)
        checked_layouts = choose_layouts(layouts, lengths, accelerator.num_processes)
        model_copy, whole_batch = working_copy(unwrapped(model), whole_batch)
        if accelerator.num_processes > 1:
            weights = state_sha256(model_copy.state_dict())[:12]
            check_agreement(
                accelerator,
                "samples and weights",
                f"{len(lengths)} samples of length {lengths.sum()}, {weights}",
            )
        context = CheckContext(
            model=model_copy,
            samples=list(samples),
            collate_fn=collate_fn,
            accelerator=accelerator,
            precision=precision,
            seed=seed,
            max_grad_norm=max_grad_norm,
            settings=LossSettings(loss_fn, whole_batch, allow_split_dependent_randomness),
        )
        _prepare_own_step(context)
        rows = _run_and_explain_all(context, checked_layouts, steps or {})
        facts = _describe_check(context)
        if same_bits is not None and context.refusal is None:
            # Behind hf_ga's own rows, one for each layout.
            rows.insert(len(checked_layouts), same_bits_row(context, same_bits))
        if pipeline_stages is not None and context.refusal is None:
            rows.append(pipeline_row(context, pipeline_stages))
    settings = {
        "precision": precision,
        "seed": seed,
        "max_grad_norm": max_grad_norm,
        "num_samples": len(samples),
    }
    return EquivalenceReport(type(model_copy).__name__, rows, facts, settings, versions())


def _check_has_weights(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise ConfigError on all processes if one of them has parameters on the meta device: each
    computes the reference itself.
    """
    with raise_on_all_ranks(accelerator):
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError(
                "check_equivalence computes a reference on every process, but process "
                f"{accelerator.process_index} has no weights (they are on the meta device): "
                "load them on all processes."
            )


def _run_and_explain_all(
    context: CheckContext, layouts: list[CheckedLayout], steps: Mapping[str, StepFunction]
) -> list[ReportRow]:
    """Run hf_ga's own step and the user's in all layouts, and find the causes of failures. Return
    the rows, ordered by step, hf_ga's own first; the same on all processes.
    """
    arms: dict[str, StepFunction | None] = {OURS: None, **steps}
    rows: dict[str, list[ReportRow]] = {arm: [] for arm in arms}
    is_shown = context.accelerator.is_main_process
    num_samples = None
    for layout in tqdm(layouts, unit="layout", delay=5, leave=False, disable=not is_shown):
        if layout.num_samples != num_samples:  # layouts with the same samples share a reference
            num_samples = layout.num_samples
            reference = compute_reference(context, num_samples)
        for arm, step in arms.items():
            row = ReportRow(arm, layout.name, layout.sizes, layout.accumulation_steps)
            run = partial(layout.run, context, step, layout.collate_window(context))
            # An error in one of the user's steps must not lose the results of the others.
            refusals = (LossNotAdditive, UnkeyedRandomness) if arm == OURS else (Exception,)
            rows[arm].append(judged(context, row, run, reference, refusals))
    for arm, step in arms.items():
        explain(context, rows[arm], layouts, step)
    return [row for rows_of_arm in rows.values() for row in rows_of_arm]


def _prepare_own_step(context: CheckContext) -> None:
    """Find the model's random draws, try its loss, and prepare it for hf_ga's own step. Writes what
    was found into `context`: `facts` and `prepared`, or why hf_ga refuses the model.
    """
    settings = context.settings
    # The reference needs the unwrapped model, so DDP or FSDP wraps a copy.
    on_several_processes = context.accelerator.num_processes > 1
    unkeyed = look_at_forwards(context)
    if settings.allow_split_dependent_randomness:
        _set_evaluation_mode(unkeyed)
    trained = copy.deepcopy(context.model) if on_several_processes else context.model
    try:
        context.facts = try_before(
            context.accelerator, trained, context.samples, context.collate_fn, settings
        )
    except (LossNotAdditive, UnkeyedRandomness) as error:
        context.refusal = error
        _set_evaluation_mode(unkeyed)
        return
    context.prepared = trained
    remember(context.accelerator, trained, settings)
    if on_several_processes:
        optimizer = torch.optim.SGD(trained.parameters())  # FSDP2 needs one
        context.prepared, _ = prepare(context.accelerator, trained, optimizer)


def _set_evaluation_mode(modules: Iterable[nn.Module]) -> None:
    """Put modules into evaluation mode, whose random draws depend on the split and could not be
    compared; but not their submodules (unlike `Module.eval`).
    """
    for module in modules:
        module.training = False


def _describe_check(context: CheckContext) -> list[str]:
    """Describe for the report how the check was run, one fact a line."""
    num_weights = [p.numel() for p in context.model.parameters() if p.requires_grad]
    facts = [
        f"window of {len(context.samples)} samples, {len(num_weights)} trainable tensors with "
        f"{sum(num_weights):,} weights",
        "reference: one forward and backward of all samples at once, in float64",
        "limit: twice the relative error of the full batch in the same precision, plus 1e-6; the "
        "same for each parameter",
        _describe_loss(context.facts),
    ]
    accelerator = context.accelerator
    if accelerator.num_processes > 1:
        wrapper = "DDP"
        if is_sharded(accelerator):
            wrapper = f"FSDP{accelerator.state.fsdp_plugin.fsdp_version}"
        facts.append(
            f"{accelerator.num_processes} processes under {wrapper}: micro-batches are assigned "
            "to them round-robin"
        )
    return facts


def _describe_loss(facts: LossFacts | None) -> str:
    """Describe what hf_ga read of the loss and of random draws, and which speed-ups it uses."""
    if facts is None:
        return "loss: refused by hf_ga"
    padding = ", padded to the window's longest sample" if facts.pad_to_window else ""
    draws = ", ".join(facts.draws) or "none"
    speed_ups = ", ".join(facts.speed_ups.names) or "none"
    return f"loss: {'; '.join(facts.terms)}{padding}; keyed draws: {draws}; speed-ups: {speed_ups}"


def look_at_forwards(context: CheckContext) -> list[nn.Module]:
    """Run forwards of copies of the longest sample, in which `context.draws` learn which dim of
    each draw holds the samples.

    Returns:
        The innermost modules with random draws that cannot be tied to samples.
    """
    longest = max(context.samples, key=sample_length)
    with (
        context.draws.scope(),
        restored_state(context.model),
        force_eager(),
        _drawing_modules(context.model) as found,
    ):
        for num_samples in BATCH_SIZES:
            batch = as_batch(context.collate_fn([longest] * num_samples))
            begin_draws(context, np.arange(num_samples))
            mean_loss(context, send_to_device(batch, device_of(context.model)))
    return list(dict.fromkeys(found))


@contextmanager
def _drawing_modules(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Give a list of the innermost modules whose forwards in the block move a global random
    generator, which keyed draws do not.
    """
    found: list[nn.Module] = []
    running: list[tuple[dict[str, bytes], int]] = []  # states and length of `found` before

    def before(module: nn.Module, args: tuple) -> None:
        """Note where the generators stand."""
        running.append((random_states(), len(found)))

    def after(module: nn.Module, args: tuple, outputs: Any) -> None:
        """Keep a module that has moved one, unless one of its submodules has."""
        states, num_found = running.pop()
        if len(found) == num_found and moved_generators(states):
            found.append(module)

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield found
