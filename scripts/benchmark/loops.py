"""The arms that are loops: Accelerate's own documentation, and hf_ga."""

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from hf_ga.proof.known_rules import proven_rule
from torch import nn
from torch.utils.data import DataLoader

import hf_ga
from benchmark.lap import Lap, Refused
from benchmark.meters import forwards_and_backwards
from benchmark.setting import SIZES
from hf_ga.exact.costs import cost_model


def accelerate_loop(lap: Lap) -> None:
    """`with accelerator.accumulate(model)`, the mean loss of every micro-batch, clipping where gradients are synchronised."""
    accelerator = make_accelerator(lap)
    model, optimizer = accelerator.prepare(lap.model, lap.optimizer())

    def steps(samples: list[Any]) -> Iterator[None]:
        loader = DataLoader(samples, batch_size=lap.setting.micro_batch_size, shuffle=True, collate_fn=lap.collate)
        for batch in accelerator.prepare(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), lap.setting.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield

    for _ in steps(lap.warmup_samples):
        pass
    with forwards_and_backwards(lap.stopwatch, model), lap.measured():
        for _ in steps(lap.samples):
            lap.step_done()


def unsorted(lap: Lap) -> None:
    """A loader that is told no lengths: micro-batches as they come."""
    _hf_ga(lap)


def by_length(lap: Lap) -> None:
    """A loader that is told the lengths, and the width of the model, as `finetune` does."""
    _hf_ga(lap, **_lengths(lap))


def packed(lap: Lap) -> None:
    """The model's layers compute real tokens only (`--padding_free`), and the plan knows."""
    _hf_ga(lap, padding_free=True, **_lengths(lap, packed=True))


def _lengths(lap: Lap, packed: bool = False) -> dict[str, Any]:
    cost = cost_model(lap.setting.device, SIZES[lap.setting.size][1], packed=packed)
    return {"lengths": [len(sample["input_ids"]) for sample in lap.samples], "cost": cost}


def _hf_ga(lap: Lap, padding_free: bool = False, **loading: Any) -> None:
    accelerator = make_accelerator(lap)
    windows = hf_ga.WindowLoader(
        lap.samples,
        lap.collate,
        accelerator=accelerator,
        per_device_batch_size=lap.setting.micro_batch_size,
        seed=lap.setting.seed,
        **loading,
    )
    model, optimizer = accelerator.prepare(lap.model, lap.optimizer())

    def train(window: hf_ga.Window) -> None:
        result = hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=lap.setting.max_grad_norm)
        result.loss  # noqa: B018 - waits for the device, as `finetune` does in every step

    for window in warmup_windows(windows, lap.setting.warmup_windows):
        if padding_free:
            _pack(lap.model, window)
        train(window)
    windows.set_epoch(0)
    with forwards_and_backwards(lap.stopwatch, model), lap.measured():
        for window in windows:
            train(window)
            lap.step_done()


def _pack(model: nn.Module, window: hf_ga.Window) -> None:
    """The loader keeps the rule, so all windows are packed.

    Raises:
        Refused: the model is not one whose layers can be packed.
    """
    rule = proven_rule(model, window, None, False, padding_free=True)
    if rule.packing is None:
        raise Refused(rule.not_packed)


def warmup_windows(windows: hf_ga.WindowLoader, count: int) -> Iterator[hf_ga.Window]:
    """The first windows of another epoch."""
    windows.set_epoch(1)
    for _, window in zip(range(count), windows, strict=False):
        yield window


def make_accelerator(lap: Lap) -> Accelerator:
    """As the setting wants it."""
    return Accelerator(
        cpu=lap.setting.device == "cpu",
        mixed_precision=lap.setting.mixed_precision,
        gradient_accumulation_steps=lap.setting.accumulation_steps,
    )
