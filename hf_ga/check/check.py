"""check_equivalence(): is every split of a window the full batch, for this model, and if not, why?"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from hf_ga.check.diagnosis import explain
from hf_ga.check.judging import find_truth, judge
from hf_ga.check.layouts import CheckedLayout, choose_layouts
from hf_ga.check.reference import DTYPES, MakeOptimizer, Memory, Truth, device_of, measure_memory
from hf_ga.check.report import OURS, EquivalenceReport, Row
from hf_ga.check.subjects import (
    Step,
    Subject,
    check_one_process,
    make_accelerator,
    own_accelerate_state,
    run_ours,
    run_step,
    working_copy,
)
from hf_ga.errors import ConfigError, HfGaError, LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.batches import as_batch, sample_length
from hf_ga.exact.fetch import Collate
from hf_ga.exact.forward import LossFunction, run_forward, unwrapped
from hf_ga.exact.generators import preserved_random_states
from hf_ga.exact.window import Window
from hf_ga.proof.sites import find_dropout_sites
from hf_ga.recovery.versions import versions
from hf_ga.training import prove_targets

QUICK_SAMPLES, QUICK_LAYOUTS = 16, ("uneven", "one by one", "short last window")


def check_equivalence(
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Collate,
    layouts: str | Sequence[str] | Mapping[str, Sequence[int]] = "auto",
    loss_fn: LossFunction | None = None,
    precision: str = "fp32",
    seed: int = 0,
    *,
    step: Step | None = None,
    steps: Mapping[str, Step] | None = None,
    quick: bool = False,
    parameters: str | Sequence[str] | None = None,
    max_memory_gib: float | None = None,
    optimizer: MakeOptimizer | None = None,
    max_grad_norm: float | None = None,
    allow_split_dependent_randomness: bool = False,
) -> EquivalenceReport:
    """Compare the gradient of every layout of one window with that of the full batch, and with float64, by promise 1.

    The model and everything else is left as found: all work is done on a copy of it.

    Args:
        model: on its device; if it is in evaluation mode, its copy is put into training mode.
        samples: of one window, at least 8; best of very different lengths. collate_fn: list of samples -> model arguments.
        layouts: "auto" (even, uneven, one by one, sorted by length, short last window), some of these names, or
            {name: sizes of the micro-batches}.
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets); wins over the head's own loss.
        precision: "fp32", "bf16" or "fp16", by autocast.
        step: somebody else's `step(model, micro_batches)`: it gets a copy of the model and the collated micro-batches of a window
            (dicts on the model's device), and leaves the window's gradient in `.grad`, or makes the update; a number that it
            returns is taken for the window's mean loss. If it names the arguments `accumulation_steps` (micro-batches of a
            full window) or `precision`, it gets these too. steps: several, by name; see `hf_ga.check.arms`.
        quick: check a window of 16 samples, from the shortest to the longest; "auto" is then uneven, one by one, short last window.
        parameters: name patterns (`*.layer.0.*`); only the gradients of these parameters are computed and compared.
        max_memory_gib: what the references may take. Default: 70 % of what is free. Where float64 does not fit, the full batch
            in the checked precision is the reference, and the report says so.
        optimizer: list of parameters -> optimizer of the compared step. Default: AdamW with a rate of 1e-3.
        max_grad_norm: the truth, and hf_ga, clip the window's gradient once to this L2 norm.
        allow_split_dependent_randomness: see `prove_targets`.

    Raises:
        ConfigError: bad arguments, several processes, or a full batch that does not fit the memory limit.

    Example:
        report = check_equivalence(model, [dataset[i] for i in range(64)], collate_fn)
        print(report)
        assert report.passed
    """
    samples = list(samples)
    _check_arguments(precision, max_memory_gib, samples)
    check_one_process()
    if quick:
        samples, layouts = _spread(samples, QUICK_SAMPLES), QUICK_LAYOUTS if layouts == "auto" else layouts
    chosen = choose_layouts(layouts, np.array([sample_length(sample) for sample in samples]))
    arms = ({"step": step} if step is not None else {}) | dict(steps or {})
    with preserved_random_states(), own_accelerate_state(), torch.enable_grad():
        copied = working_copy(unwrapped(model), _matching(unwrapped(model), parameters))
        accelerator = make_accelerator(copied, precision)
        subject = Subject(
            copied, samples, collate_fn, loss_fn, precision, seed, accelerator, max_grad_norm, allow_split_dependent_randomness
        )
        refusal = _prove(subject)
        memory = _memory(subject, max_memory_gib)
        rows = _rows(subject, chosen, arms, refusal, optimizer or _adamw)
        facts = _facts(subject, memory, quick)
    settings = {"precision": precision, "seed": seed, "num_samples": len(samples), "quick": quick, "parameters": parameters}
    settings["bytes"] = {"full batch": memory.full_batch, "in float64": memory.float64, "limit": memory.available}
    return EquivalenceReport(type(unwrapped(model)).__name__, rows, facts, settings, versions())


def _rows(
    subject: Subject,
    layouts: list[CheckedLayout],
    steps: Mapping[str, Step],
    refusal: HfGaError | None,
    optimizer: MakeOptimizer,
) -> list[Row]:
    """All arms in all layouts, window by window: only one truth is kept at a time."""
    found: dict[tuple[str, str], Row] = {}
    arms: dict[str, Step | None] = {OURS: None, **steps}
    with tqdm(total=len(layouts) * len(arms), unit="layout", delay=5, leave=False, dynamic_ncols=True) as bar:
        for key in dict.fromkeys(layout.window_key for layout in layouts):
            members = [layout for layout in layouts if layout.window_key == key]
            truth = find_truth(subject, _window(subject, members[0]), optimizer)
            for arm, step in arms.items():
                for layout in members:
                    bar.set_postfix_str(f"{arm}, {layout.name}", refresh=False)
                    found[arm, layout.name] = _row(subject, arm, step, layout, truth, refusal, optimizer)
                    bar.update()
    rows = [found[arm, layout.name] for arm in arms for layout in layouts]
    for arm, step in arms.items():
        explain(subject, [row for row in rows if row.arm == arm], {layout.name: layout for layout in layouts}, step, optimizer)
    return rows


def _row(
    subject: Subject,
    arm: str,
    step: Step | None,
    layout: CheckedLayout,
    truth: Truth,
    refusal: HfGaError | None,
    optimizer: MakeOptimizer,
) -> Row:
    row = Row(arm, layout.name, layout.sizes, layout.accumulation_steps)
    if step is None and refusal is not None:
        row.refused = str(refusal)
        return row
    try:
        window = _window(subject, layout)
        outcome = run_ours(subject, window) if step is None else run_step(step, subject, window, layout.accumulation_steps)
    except (LossNotAdditive, UnkeyedRandomness) as error:
        row.refused = str(error)
        return row
    except Exception as error:
        if step is None:
            raise
        row.refused = f"raised {type(error).__name__}: {error}"  # the other arms' figures shall not be lost
        return row
    judge(row, outcome, truth, subject, optimizer)
    return row


def _prove(subject: Subject) -> HfGaError | None:
    """Find the rule and the places where the model draws; returns the error where hf_ga refuses the model."""
    arguments = {"loss_fn": subject.loss_fn, "allow_split_dependent_randomness": subject.allow_split_dependent_randomness}
    try:
        subject.rule = prove_targets(subject.model, subject.samples, subject.collate_fn, **arguments)
        if subject.rule.dropout.unkeyed:  # allowed to depend on the split, so it must not be drawn where splits are compared
            for module in subject.rule.dropout.unkeyed:
                module.training = False
            subject.rule = prove_targets(subject.model, subject.samples, subject.collate_fn, **arguments)
    except (LossNotAdditive, UnkeyedRandomness) as error:
        longest = max(subject.samples, key=sample_length)
        subject.places = find_dropout_sites(
            subject.model, lambda count: _forward(subject, [longest] * count), allow_split_dependent_randomness=True
        )
        for module in subject.places.unkeyed:  # what cannot be keyed cannot be compared
            module.training = False
        return error
    subject.places = subject.rule.dropout
    return None


def _memory(subject: Subject, max_memory_gib: float | None) -> Memory:
    pair = as_batch(subject.collate_fn([max(subject.samples, key=sample_length)] * 2))
    memory = measure_memory(subject.model, pair, len(subject.samples), subject.loss_fn, max_memory_gib)
    if memory.full_batch > memory.available:
        raise ConfigError(
            f"the full batch of {len(subject.samples)} samples must fit the memory limit, but needs about "
            f"{_gib(memory.full_batch)} of {_gib(memory.available)}: pass fewer samples (quick=True takes {QUICK_SAMPLES}), name "
            "some parameters, or raise max_memory_gib."
        )
    if memory.float64 > memory.available:
        subject.without_float64 = "float64 does not fit the memory limit"
    return memory


def _facts(subject: Subject, memory: Memory, quick: bool) -> list[str]:
    numbers = [p.numel() for p in subject.model.parameters() if p.requires_grad]
    limits = (
        f"memory: full batch about {_gib(memory.full_batch)}, in float64 {_gib(memory.float64)}, limit {_gib(memory.available)}"
    )
    truth = "reference: one forward and backward of all samples at once, in float64"
    if subject.without_float64:
        own = "its own error is that of the same samples in reverse order"
        truth = f"reference: the full batch in {subject.precision}, as {subject.without_float64}; {own}"
    places = len(subject.places.sites) if subject.places else 0
    counted = str(subject.rule) if subject.rule else "targets: hf_ga found no rule for them"
    drawn = f"dropout keyed at {places} sites" if places else "no dropout is drawn"
    window = (
        f"window of {len(subject.samples)} samples{' (quick)' if quick else ''}, {len(numbers)} tensors, {sum(numbers):,} weights"
    )
    return [window, truth, limits, f"{counted}; {drawn}"]


def _window(subject: Subject, layout: CheckedLayout) -> Window:
    return layout.window(subject.samples, subject.collate_fn, subject.accelerator, subject.seed)


def _forward(subject: Subject, samples: list[Any]) -> None:
    batch = as_batch(subject.collate_fn(samples))
    device = device_of(subject.model)
    run_forward(subject.model, {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}, subject.loss_fn)


def _spread(samples: list[Any], count: int) -> list[Any]:
    """Some samples over the whole range of lengths, in the order in which they came."""
    by_length = sorted(range(len(samples)), key=lambda i: sample_length(samples[i]))
    picked = np.unique(np.linspace(0, len(samples) - 1, min(count, len(samples))).astype(int))
    return [samples[i] for i in sorted(by_length[j] for j in picked)]


def _matching(model: nn.Module, patterns: str | Sequence[str] | None) -> list[str] | None:
    if patterns is None:
        return None
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = [name for name in trainable if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        raise ConfigError(
            f"parameters must match some trainable parameter, but {patterns} match none of this {type(model).__name__}."
        )
    return names


def _check_arguments(precision: str, max_memory_gib: float | None, samples: list[Any]) -> None:
    if precision not in DTYPES:
        raise ConfigError(f"precision must be one of {', '.join(DTYPES)}, got {precision!r}.")
    if max_memory_gib is not None and not max_memory_gib > 0:
        raise ConfigError(f"max_memory_gib must be greater than 0, got {max_memory_gib}.")


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=parameters[0].device.type in ("cpu", "cuda"))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
