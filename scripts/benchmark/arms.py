"""All arms by name. Of the benchmark, only this file knows hf_ga's internals: how a speed-up is left out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from accelerate import Accelerator

import hf_ga
from benchmark.lap import Lap
from benchmark.setting import SIZES
from benchmark.trainers import exact_trainer, train
from hf_ga.exact.costs import cost_model
from hf_ga.exact.places import KeyedPlaces

DEFAULT, OWN_LOOP, EXACT_TRAINER = "hf_ga", "hf_ga, loop of one's own", "ExactTrainer"
TRAINER, GROUPED, REBALANCED = "Trainer", "Trainer, group_by_length", "Trainer, batch_rebalance"
PLAN, PACKING, CHUNKED, LEAN = "plan by length", "packing", "chunked loss", "lean forward"
SPEED_UPS = (PLAN, PACKING, CHUNKED, LEAN)
NATIVE = "native dropout in place of keyed"


def own_loop(lap: Lap) -> None:
    """The README's loop: dataset, collate function and batch size only."""
    _hf_ga(lap)


def default(lap: Lap, left_out: str = "") -> None:
    """As `finetune` trains; one of `SPEED_UPS` can be left out, or native dropout taken in place of keyed."""
    width = SIZES[lap.setting.size][1]
    packed = lap.setting.device == "cpu" and left_out != PACKING
    lengths = [len(sample["input_ids"]) for sample in lap.setting.samples]
    plan = {} if left_out == PLAN else {"lengths": lengths, "cost": cost_model(lap.setting.device, width, packed=packed)}
    rule = hf_ga.prove_targets(lap.model, lap.setting.samples[:64], lap.setting.collate, padding_free=packed)
    if left_out == CHUNKED:
        rule = replace(rule, lazy_head=None)
    if left_out == NATIVE:
        rule = replace(rule, places=_NativeDropout(lap.model))
        if rule.packing is not None:
            rule.packing.places = rule.places
    lean = mock.patch("hf_ga.training.lean_forwards", lambda model: nullcontext()) if left_out == LEAN else nullcontext()
    with lean:
        _hf_ga(lap, plan, targets=rule, allow_unkeyed=left_out == NATIVE)


class _NativeDropout(KeyedPlaces):
    """Leaves torch's own dropout where it is."""

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def is_keyed(self, *_: Any) -> bool:
        return False


def _hf_ga(lap: Lap, loading: dict[str, Any] | None = None, **step: Any) -> None:
    """The loop of both. loading: of the loader. step: of `train_step`."""
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
    while True:  # until the lap is over
        for window in windows:
            hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0, **step).loss  # noqa: B018 - waits for the device
            lap.step_done()


TRAINERS: dict[str, Callable[[Lap], None]] = {
    TRAINER: partial(train, strategy="random"),
    GROUPED: partial(train, strategy="group_by_length"),
    REBALANCED: partial(train, strategy="batch_rebalance"),
}
SPEED = TRAINERS | {EXACT_TRAINER: exact_trainer, OWN_LOOP: own_loop, DEFAULT: default}
ABLATION = {DEFAULT: default} | {name: partial(default, left_out=name) for name in (*SPEED_UPS, NATIVE)}
