"""All arms by name. In the benchmark, only this file uses internals of hf_ga, to disable
speed-ups.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import hf_ga
from benchmark.lap import Lap
from benchmark.trainers import train
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.plan import plan_window
from hf_ga.training import Given, default_speed_ups, remember

DEFAULT = "hf_ga"
OWN_LOOP = "hf_ga, own loop"
EXACT_TRAINER = "ExactTrainer"
ACCELERATE_LOOP = "hf_ga.Accelerator"
TRAINER = "Trainer"
GROUPED = "Trainer, group_by_length"
REBALANCED = "Trainer, batch_rebalance"
PLAN = "plan by length"
CHUNKED = "chunked loss"
NATIVE = "native dropout in place of keyed"
ANY_ORDER = "any order of sums, in place of one (same_bits)"
SPEED_UPS = (PLAN, CHUNKED, "lean forward", "packing", "fused attention")


def default(lap: Lap, left_out: str = "") -> None:
    """Train like `finetune`.

    Args:
        lap: The arm's turn.
        left_out: One of `SPEED_UPS` that is not used; `NATIVE` for torch's dropout instead of keyed
            dropout; `ANY_ORDER` for the same bits.
    """
    setting = lap.setting
    loading: dict[str, Any] = {"lengths": [len(sample["input_ids"]) for sample in setting.samples]}
    if left_out == PLAN:
        loading = {"planner": partial(_planned_by_number, size=setting.micro_batch_size)}
    speed_ups = [speed_up for speed_up in default_speed_ups(lap.model) if speed_up.name != left_out]
    loss = hf_ga.prove_targets(
        lap.model, setting.samples[:64], setting.collate, speed_ups=speed_ups
    )
    if left_out == NATIVE:
        loss = replace(loss, dropout=_NativeDropout(lap.model))
    if left_out == ANY_ORDER:
        loading["canonical_micro_batch"] = setting.micro_batch_size
    given = Given(allow_split_dependent_randomness=left_out == NATIVE, rule=loss)
    own_loop(lap, loading, given)


def _planned_by_number(lengths: Sequence[int], processes: int, size: int) -> Any:
    """Plan a window by the number of samples, without their lengths."""
    return plan_window(len(lengths), processes, size)


class _NativeDropout(KeyedDropout):
    """A stand-in for keyed dropout that keeps torch's own."""

    @contextmanager
    def scope(self, model: nn.Module) -> Iterator[None]:
        """Change nothing."""
        yield

    def needs_mask(self, *_: Any) -> bool:
        """Return False: no dropout is keyed."""
        return False


def own_loop(lap: Lap, loading: dict[str, Any] | None = None, given: Given | None = None) -> None:
    """Train by the README's loop: dataset, collate function and batch size only.

    Args:
        lap: The arm's turn.
        loading: More arguments of the loader.
        given: What `prepare` is given about the model.
    """
    setting = lap.setting
    accelerator = Accelerator(cpu=setting.device == "cpu", mixed_precision=setting.mixed_precision)
    windows = hf_ga.WindowLoader(
        setting.samples,
        lap.collate,
        accelerator=accelerator,
        per_device_batch_size=setting.micro_batch_size,
        global_batch_size=setting.window_size,
        seed=setting.seed,
        **(loading or {}),
    )
    model, optimizer = accelerator.prepare(lap.model, lap.optimizer())
    if given is not None:
        remember(accelerator, model, given)
    while True:  # until the lap ends
        for window in windows:
            result = hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
            result.loss  # noqa: B018 - synchronizes with the device
            lap.step_done()


def accelerate_loop(lap: Lap) -> None:
    """Train by the loop of Accelerate's documentation, with hf_ga's Accelerator."""
    setting = lap.setting
    accelerator = hf_ga.Accelerator(
        cpu=setting.device == "cpu",
        mixed_precision=setting.mixed_precision,
        gradient_accumulation_steps=setting.window_size // setting.micro_batch_size,
    )
    loader = DataLoader(
        setting.samples, setting.micro_batch_size, shuffle=True, collate_fn=lap.collate
    )
    model, optimizer, loader = accelerator.prepare(lap.model.train(), lap.optimizer(), loader)
    while True:  # until the lap ends
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                lap.step_done()


SPEED: dict[str, Callable[[Lap], None]] = {
    TRAINER: train,
    GROUPED: partial(train, strategy="group_by_length"),
    REBALANCED: partial(train, strategy="batch_rebalance"),
    EXACT_TRAINER: partial(train, trainer_class=hf_ga.ExactTrainer),
    ACCELERATE_LOOP: accelerate_loop,
    OWN_LOOP: own_loop,
    DEFAULT: default,
}
ABLATION = {DEFAULT: default} | {
    name: partial(default, left_out=name) for name in (*SPEED_UPS, NATIVE, ANY_ORDER)
}
