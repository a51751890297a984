"""All arms of the benchmark by name: ways of training with hf_ga and Trainer. In the benchmark,
only this file uses internals of hf_ga, to disable speed-ups.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from common import collate
from torch.utils.data import DataLoader

import hf_ga
from benchmark.measuring import BenchmarkRun
from benchmark.setting import SEED, make_accelerator
from benchmark.trainers import full_rows, train_with_trainer
from hf_ga.engine.look.trial import try_loss
from hf_ga.engine.speed_ups import candidates
from hf_ga.order.plan import Plan, plan_window
from hf_ga.parallel.backend import LocalBackend
from hf_ga.speed.cudnn_attention import without_cudnn_attention
from hf_ga.training import LossSettings, loop_of, remember

DEFAULT = "hf_ga"
OWN_LOOP = "hf_ga, own loop"
EXACT_TRAINER = "ExactTrainer"
ACCELERATE_LOOP = "hf_ga.Accelerator"
TRAINER = "Trainer"
GROUPED = "Trainer, group_by_length"
REBALANCED = "Trainer, batch_rebalance"
WITHOUT_CUDNN = ", cuDNN attention off"  # behind the name of an arm of Trainer
COMPILED = "hf_ga, compiled layers"
FULL_ROWS = "limit: full rows"
COMPILED_FULL_ROWS = "limit: full rows, compiled"
PLAN = "plan by length"
CHUNKED = "chunked loss"
NATIVE = "native dropout in place of keyed"
ANY_ORDER = "any order of sums, in place of one (same_bits)"
Arm = Callable[[BenchmarkRun], None]
SPEED_UPS = (PLAN, CHUNKED, "lean forward", "packing", "fused attention")


def train_like_finetune(run: BenchmarkRun, disabled: str = "") -> None:
    """Train as `hf_ga.finetune` does, for the benchmark; with one feature disabled for the
    ablation.

    Args:
        run: The measured run of the benchmark.
        disabled: The feature to disable: one of `SPEED_UPS`; `NATIVE` trains with torch's own
            dropout instead of keyed dropout; `ANY_ORDER` sums gradients in one fixed order
            (`same_bits`) instead of any order. "": nothing is disabled.
    """
    setting = run.setting
    loader_arguments: dict[str, Any] = {"lengths": setting.lengths}
    if disabled == PLAN:
        planner = partial(_plan_by_number, micro_batch_size=setting.micro_batch_size)
        loader_arguments = {"planner": planner}
    if disabled == ANY_ORDER:
        loader_arguments["canonical_micro_batch"] = setting.micro_batch_size
    given = LossSettings(allow_split_dependent_randomness=disabled == NATIVE)
    loop = loop_of(run.model, LocalBackend(next(run.model.parameters()).device), given)
    speed_ups = [speed_up for speed_up in candidates(run.model) if speed_up.name != disabled]
    loop.engine.speed_ups.candidates = lambda model: speed_ups
    try_loss(loop, setting.samples[:64], collate)
    native = loop.engine.draws.suspended() if disabled == NATIVE else nullcontext()
    with native:
        own_loop(run, loader_arguments, given)


def _plan_by_number(lengths: Sequence[int], num_processes: int, micro_batch_size: int) -> Plan:
    """Split a window into micro-batches evenly by the number of samples, and ignore their lengths:
    a planner for `hf_ga.WindowLoader`.
    """
    return plan_window(len(lengths), num_processes, micro_batch_size)


def own_loop(
    run: BenchmarkRun,
    loader_arguments: dict[str, Any] | None = None,
    given: LossSettings | None = None,
) -> None:
    """Train with a loop over `hf_ga.train_step`, as in the README, until the benchmark is over.

    Args:
        run: The measured run of the benchmark.
        loader_arguments: More arguments for `WindowLoader`. None: none, as in the README.
        given: Its loss settings. None: those of `hf_ga.prepare`.
    """
    setting = run.setting
    accelerator = make_accelerator(setting)
    windows = hf_ga.WindowLoader(
        setting.samples,
        run.collate,
        accelerator=accelerator,
        per_device_batch_size=setting.micro_batch_size,
        global_batch_size=setting.window_size,
        seed=SEED,
        **(loader_arguments or {}),
    )
    model, optimizer = accelerator.prepare(run.model, run.optimizer())
    if given is not None:
        remember(accelerator, model, given)
    while True:  # until `step_done` raises
        for window in windows:
            result = hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
            result.loss  # noqa: B018 - synchronizes with the device
            run.step_done()


def compiled_loop(run: BenchmarkRun) -> None:
    """Train as `own_loop` does, with compiled layers."""
    hf_ga.compile_layers(run.model)
    own_loop(run)


def accelerate_loop(run: BenchmarkRun) -> None:
    """Train with the loop of Accelerate's documentation, but with `hf_ga.Accelerator`, until the
    benchmark is over.
    """
    setting = run.setting
    accelerator = hf_ga.Accelerator(
        cpu=setting.device == "cpu",
        mixed_precision=setting.mixed_precision,
        gradient_accumulation_steps=setting.accumulation_steps,
    )
    loader = DataLoader(
        setting.samples, setting.micro_batch_size, shuffle=True, collate_fn=run.collate
    )
    model, optimizer, loader = accelerator.prepare(run.model.train(), run.optimizer(), loader)
    while True:  # until `step_done` raises
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                run.step_done()


def without_cudnn(run: BenchmarkRun, loop: Arm) -> None:
    """Train with a loop that torch's choice of cuDNN's attention does not slow down."""
    with without_cudnn_attention():
        loop(run)


def with_cudnn_off(names: Sequence[str], device: str) -> dict[str, Arm]:
    """Return arms of Trainer by name and, on a GPU, also without cuDNN's attention; a CPU has none.

    Args:
        names: Keys of `SPEED`.
        device: "cpu" or "cuda".
    """
    arms = {name: SPEED[name] for name in names}
    if device == "cuda":
        for name in names:
            arms[name + WITHOUT_CUDNN] = partial(without_cudnn, loop=SPEED[name])
    return arms


def speed_arms(device: str) -> dict[str, Arm]:
    """Return the arms whose speed is compared: hf_ga, and all modes of Trainer."""
    return SPEED | with_cudnn_off((TRAINER, GROUPED, REBALANCED), device)


def peer_arms(device: str) -> dict[str, Arm]:
    """Return the arms that the GPU report has time for, each of which loads the GPU libraries. A
    CPU leaves out those that compile, for minutes.
    """
    arms = with_cudnn_off((TRAINER, REBALANCED), device)
    arms |= {name: SPEED[name] for name in (ACCELERATE_LOOP, DEFAULT)}
    arms[FULL_ROWS] = full_rows
    if device == "cuda":
        arms[COMPILED] = compiled_loop
        arms[COMPILED_FULL_ROWS] = partial(full_rows, backend="inductor")
    return arms


# Name of the arm -> training loop.
SPEED: dict[str, Arm] = {
    TRAINER: train_with_trainer,
    GROUPED: partial(train_with_trainer, strategy="group_by_length"),
    REBALANCED: partial(train_with_trainer, strategy="batch_rebalance"),
    EXACT_TRAINER: partial(train_with_trainer, trainer_class=hf_ga.ExactTrainer),
    ACCELERATE_LOOP: accelerate_loop,
    OWN_LOOP: own_loop,
    DEFAULT: train_like_finetune,
}
ABLATION: dict[str, Arm] = {DEFAULT: train_like_finetune} | {
    name: partial(train_like_finetune, disabled=name) for name in (*SPEED_UPS, NATIVE, ANY_ORDER)
}
