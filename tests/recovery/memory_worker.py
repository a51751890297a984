"""A device whose memory runs out on command, for test_memory.py; and what two processes do with it, for `pairs_worker.py` and

accelerate launch ... tests/recovery/memory_worker.py CONFIG.json FIRST_FAILING_FORWARD
"""

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from processes import h, make_accelerator, make_windows, prepare, save
from torch import nn

import hf_ga
from hf_ga.errors import HfGaError
from hf_ga.run import build as building
from hf_ga.run.cli import finetune_main

SAMPLES, WINDOW, MICRO_BATCH, LONG = 53, 24, 8, 40  # LONG: a sample that is longer than the others
ERRORS = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
}


class Device:
    """Lets a forward of `model` on more than `fits` padded tokens fail, where `chosen()`; in the middle of its backward, if asked.

    Attributes:
        failures: shapes of the micro-batches that failed. seen: tokens of the samples that went forward since the last failure or
            `take`.
    """

    def __init__(
        self,
        model: nn.Module,
        fits: float,
        *,
        backward: bool = False,
        error: str = "gpu",
        chosen: Callable[[], bool] = lambda: True,
    ) -> None:
        self.fits, self.backward, self.error, self.chosen = fits, backward, ERRORS[error], chosen
        self.failures: list[tuple[int, ...]] = []
        self.seen: list[tuple[int, ...]] = []
        model.register_forward_pre_hook(self._check, with_kwargs=True)

    def take(self) -> Counter:
        """How often each sample was seen."""
        seen, self.seen = self.seen, []
        return Counter(seen)

    def _check(self, module: nn.Module, args: tuple, batch: dict) -> None:
        ids = batch["input_ids"]
        self.seen += [of_sample(row.tolist()) for row in ids]
        if ids.numel() <= self.fits or not self.chosen():
            return
        self.failures.append(tuple(ids.shape))
        if not torch.is_grad_enabled():  # an evaluation, of which the other batches count
            self._fail(len(ids))
        if not self.backward:
            self._fail()
        parameters = list(module.parameters())
        handle = parameters[len(parameters) // 2].register_hook(lambda gradient: (handle.remove(), self._fail()))

    def _fail(self, lost: int = 0) -> None:
        del self.seen[-lost:]
        raise self.error


def of_sample(tokens: list[int]) -> tuple[int, ...]:
    """Without padding, which is token 0."""
    return tuple(token for token in tokens if token)


def run(folder: Path) -> None:
    run_windows(folder)
    run_long_sample(folder)


def run_windows(folder: Path) -> None:
    """Two epochs of updates while memory runs out on either process at random, and at first on both. A router's forwards are done
    twice.
    """
    accelerator, model, samples = make_accelerator("ddp"), h.mixtral(0.5), h.token_samples(SAMPLES)
    rng, results = random.Random(accelerator.process_index), []
    wrapped, optimizer, rule = prepare(accelerator, "ddp", model, samples)
    device = Device(model, 20, chosen=lambda: not results or rng.random() < 0.2)
    windows = make_windows(accelerator, samples, global_batch_size=WINDOW)
    for window in (window for _ in range(2) for window in windows):
        results.append(hf_ga.train_step(accelerator, wrapped, optimizer, window, targets=rule, max_grad_norm=0.5))
    facts = {"losses": [r.loss for r in results], "retries": [r.retries for r in results], "failed": len(device.failures)}
    save(accelerator, folder, "windows", None, **facts, limit=windows.state.max_elements)


def run_long_sample(folder: Path) -> None:
    """The last sample of the window, so one of the last process, does not fit alone. After that both go on with the same window."""
    accelerator, model, samples = make_accelerator("ddp"), h.gpt2(0.1), h.token_samples(16)
    wrapped, _, rule = prepare(accelerator, "ddp", model, samples)
    (window,) = make_windows(accelerator, samples, global_batch_size=16, planner=h.by_number(MICRO_BATCH))
    long = int(window.sample_ids[-1])
    samples[long] = {name: (values * 9)[:30] for name, values in samples[long].items()}
    (window,) = make_windows(accelerator, samples, global_batch_size=16, planner=h.by_number(MICRO_BATCH))
    device, said = Device(model, 25), "nothing"
    try:
        hf_ga.backward_window(accelerator, wrapped, window, targets=rule)
    except HfGaError as error:
        said = f"{type(error).__name__}: {error}"
    device.fits = 30
    result = hf_ga.backward_window(accelerator, wrapped, window, targets=rule)
    save(accelerator, folder, "long", None, said=said, sample=long, loss=result.loss, limit=window.state.max_elements)


def run_finetune(config: Path, first_failing: int) -> None:
    """A run that runs out of memory on process 1, from one of its forwards on."""
    original, calls = building.prepare, []

    def prepared(accelerator, model, optimizer):
        if accelerator.process_index == 1:
            Device(model, 0, chosen=lambda: calls.append(1) or len(calls) >= first_failing)
        return original(accelerator, model, optimizer)

    building.prepare = prepared
    sys.exit(finetune_main([str(config)]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_finetune(Path(sys.argv[1]), int(sys.argv[2]))
