"""`Accelerator.window_loss` is the mean loss of the whole window for every split; a prepared
scheduler on several processes is pointed out.
"""

import logging
from functools import partial

import accelerate
import helpers as h
import pytest
import torch
from documented_loop import FULL_BATCH, LAYOUTS, TWO_STEPS, UNEVEN, reset_states
from forked import on_two_ranks, without_errors
from torch.utils.data import DataLoader

from hf_ga import Accelerator

NUM_SAMPLES = 21  # a window of 16 and one of 5, whose texts have unequal lengths


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


def losses_of_windows(layout) -> list[float]:
    """The losses of one epoch without updates."""
    accelerator = layout.make(Accelerator)
    model = h.gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    samples = h.token_samples(NUM_SAMPLES)
    loader = DataLoader(samples, layout.per_device_batch_size, collate_fn=h.pad_right)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    assert accelerator.window_loss is None
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                losses.append(accelerator.window_loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def expected_losses() -> list[float]:
    """One forward of each window in float64: the head's mean over all targets."""
    model = h.gpt2().double().train()
    samples = h.token_samples(NUM_SAMPLES)
    windows = [samples[:16], samples[16:]]
    return [model(**h.pad_right(window)).loss.item() for window in windows]


@pytest.mark.parametrize("layout", [FULL_BATCH, TWO_STEPS, UNEVEN], ids=str)
def test_the_loss_of_a_window_is_that_of_the_full_batch(layout):
    assert losses_of_windows(layout) == pytest.approx(expected_losses(), rel=1e-6)


def test_the_mean_of_the_losses_of_micro_batches_is_another():
    """The control."""
    model = h.gpt2()
    samples = h.token_samples(16)
    halves = [samples[:8], samples[8:]]
    mean = sum(model(**h.pad_right(half)).loss.item() for half in halves) / 2
    assert mean != pytest.approx(expected_losses()[0], rel=1e-4)


def test_the_loss_of_a_window_is_the_same_on_two_ranks():
    found = without_errors(on_two_ranks(partial(losses_of_windows, LAYOUTS[2][1])))
    for losses in found:
        assert losses == pytest.approx(expected_losses(), rel=1e-6)


def losses_of_own_sums(layout, mixed_precision: str = "no") -> list[float]:
    """The losses of one epoch in a loop that passes a sum and its number of targets."""
    accelerator = layout.make(Accelerator, mixed_precision=mixed_precision)
    model = h.gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    samples = h.token_samples(NUM_SAMPLES)
    loader = DataLoader(samples, layout.per_device_batch_size, collate_fn=h.pad_right)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            logits = model(**batch).logits[:, :-1].float()
            targets = batch["labels"][:, 1:]
            total = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum"
            )
            accelerator.backward(total, num_targets=(targets != -100).sum())
            if accelerator.sync_gradients:
                losses.append(accelerator.window_loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("layout", [TWO_STEPS, UNEVEN], ids=str)
def test_the_loss_of_a_window_of_own_sums(layout):
    assert losses_of_own_sums(layout) == pytest.approx(expected_losses(), rel=1e-6)


def test_the_loss_of_a_window_of_own_sums_on_two_ranks():
    found = without_errors(on_two_ranks(partial(losses_of_own_sums, LAYOUTS[2][1])))
    for losses in found:
        assert losses == pytest.approx(expected_losses(), rel=1e-6)


def test_the_loss_scale_of_fp16_is_not_in_the_loss_of_a_window():
    losses = losses_of_own_sums(TWO_STEPS, mixed_precision="fp16")
    assert losses == pytest.approx(expected_losses(), rel=1e-3)


def logged_about_schedulers(**options) -> list[str]:
    """What is logged when a scheduler is prepared."""
    accelerator = Accelerator(cpu=True, **options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("hf_ga.accelerator.accelerator")
    logger.addHandler(handler)
    try:
        accelerator.prepare(optimizer, scheduler)
    finally:
        logger.removeHandler(handler)
    return messages


def test_one_process_logs_nothing_about_schedulers():
    assert logged_about_schedulers() == []


def test_two_processes_log_how_often_a_scheduler_steps():
    main, other = without_errors(on_two_ranks(logged_about_schedulers))
    assert len(main) == 1
    assert "steps 2 times at every update" in main[0]
    assert other == []


def test_a_scheduler_that_steps_by_itself_is_not_pointed_out():
    work = partial(logged_about_schedulers, step_scheduler_with_optimizer=False)
    assert without_errors(on_two_ranks(work)) == [[], []]


def test_processes_that_do_not_know_of_each_other_are_refused_at_once(monkeypatch):
    reset_states()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", 1)
    with pytest.raises(ValueError, match="2 processes were launched, but Accelerate sees 1"):
        Accelerator(cpu=True)
