"""Running out of memory: the same update in smaller micro-batches, no sample lost or seen twice,
one clear error at the end.

Memory runs out on command (`Device`): torch's own error, in a forward or in the middle of a
backward. The oracle is the undisturbed run or, for gradients, one forward and backward of the whole
window.
"""

import random
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import helpers as h
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from memory_limits import ERRORS, Device, of_sample
from runs import lines_of, relative_distance, train
from steps import backward_window, train_step

import hf_ga
from hf_ga.engine import speed_ups
from hf_ga.engine.window_engine import WindowEngine
from hf_ga.errors import OutOfMemory
from hf_ga.finetuning.run import build
from hf_ga.loading.memory import is_out_of_memory
from hf_ga.parallel.prepare import enable_fp16_on_cpu
from hf_ga.recovery.checkpoint import list_checkpoints

SAMPLES, WINDOW, MICRO_BATCH, SEED = 53, 24, 8, 3  # windows of 24, 24 and 5
EARLIER = 2.0**-8  # gradients that the caller had
CASES = {  # model, samples, own loss
    "GPT-2": (lambda: h.gpt2(0.1), h.token_samples, None),
    "own loss": (lambda: h.plain_tagger(0.1), h.weighted_samples, h.weighted_token_loss),
    "router": (lambda: h.mixtral(0.5), h.token_samples, None),
    "one width": (lambda: h.xlnet_classifier(0.1), h.class_samples, None),
}


@pytest.fixture(autouse=True, scope="module")
def _without_rehearsals(undisturbed):
    """They make forwards of their own, as trials of speed-ups do, and forwards are counted here.
    The undisturbed run, which other files use, comes before.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowEngine, "can_rehearse", lambda self: False)
        patch.setattr(speed_ups, "candidates", lambda model: [])
        yield


def accelerator_in(precision: str = "no") -> Accelerator:
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    enable_fp16_on_cpu(accelerator)
    return accelerator


def windows_of(
    accelerator: Accelerator, samples: list[dict], collate=h.pad_right, **more
) -> hf_ga.WindowLoader:
    options = {
        "planner": h.by_number(MICRO_BATCH),
        "global_batch_size": WINDOW,
        "seed": SEED,
        **more,
    }
    return hf_ga.WindowLoader(samples, collate, accelerator=accelerator, **options)


def gradient_of_window(
    case: str, fits: float, earlier: float | None = None, **how
) -> tuple[h.Gradients, hf_ga.StepResult, Device]:
    """Of the first window, by `backward_window`, added to `earlier` where the caller has
    gradients.
    """
    build, make_samples, loss_fn = CASES[case]
    accelerator = accelerator_in()
    model = build()
    samples = make_samples(SAMPLES)
    device = Device(model, fits, **how)
    # Without a rehearsal it is not found out.
    width = {"pad_to_window": case == "one width"}
    window = next(iter(windows_of(accelerator, samples, **width)))
    for parameter in model.parameters():
        parameter.grad = None if earlier is None else torch.full_like(parameter, earlier)
    result = backward_window(accelerator, model, window, loss_fn=loss_fn)
    return h.gradients(model), result, device


@pytest.mark.parametrize(("case", "backward"), [(case, case != "GPT-2") for case in CASES])
def test_gradient_of_a_window_in_which_memory_ran_out(case, backward):
    """That of the window as planned, with the same dropout, added to what the caller had."""
    whole, undisturbed, untouched = gradient_of_window(case, np.inf)
    retried, result, device = gradient_of_window(case, 30, EARLIER, backward=backward)
    assert result.retries == len(device.failures) >= 1
    assert max(n for n, _ in device.failures) > 1
    assert (
        undisturbed.retries == 0 and device.take() >= untouched.take()
    )  # all samples in the last try; a router's more than once
    used = [
        name for name, gradient in whole.items() if gradient.norm()
    ]  # the others keep what was there before
    assert (
        h.relative_error({n: retried[n] - EARLIER for n in used}, {n: whole[n] for n in used})
        < 2e-6
    )
    assert (result.loss, result.num_targets) == (
        pytest.approx(undisturbed.loss, rel=1e-6),
        pytest.approx(undisturbed.num_targets),
    )


def third_of_three():
    """Memory runs out in the last micro-batch only: the gradients of the others are there
    already.
    """
    calls = []
    return lambda: calls.append(1) or len(calls) == 3


def test_buffers_count_no_sample_twice():
    """As those of BatchNorm do: what a failed try wrote into them is undone."""

    def count(module, args, batch):
        module.seen += len(batch["input_ids"])

    accelerator = accelerator_in()
    model = h.gpt2()
    samples = h.token_samples(SAMPLES)
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    model.register_forward_pre_hook(count, with_kwargs=True)
    device = Device(model, 60, chosen=third_of_three())
    window = next(iter(windows_of(accelerator, samples)))
    result = backward_window(accelerator, model, window)
    assert result.retries == len(device.failures) == 1
    assert model.seen == WINDOW


def run_of_steps(
    precision: str,
    chosen,
    *,
    micro_batch: int = MICRO_BATCH,
    kind: str = "list",
    backward: bool = False,
):
    """An epoch of updates. Returns the losses, retries by window, the device, and whether each
    window saw its samples once.
    """
    accelerator = accelerator_in(precision)
    model = h.gpt2(0.1)
    samples = h.token_samples(SAMPLES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    device = Device(model, 20, chosen=chosen, backward=backward)
    if kind == "stream":
        options = {
            "per_device_batch_size": micro_batch,
            "global_batch_size": WINDOW,
            "seed": SEED,
            "num_workers": 1,
        }
        windows = hf_ga.StreamLoader(
            Dataset.from_list(samples).to_iterable_dataset(),
            h.pad_right,
            accelerator=accelerator,
            **options,
        )
    else:
        more = {"num_workers": 2} if kind == "workers" else {}
        windows = windows_of(accelerator, samples, planner=h.by_number(micro_batch), **more)
    losses = []
    retries = []
    once = []
    for window in windows:
        result = train_step(accelerator, model, optimizer, window, max_grad_norm=0.5)
        losses.append(result.loss)
        retries.append(result.retries)
        once.append(
            device.take() == Counter(of_sample(samples[i]["input_ids"]) for i in window.sample_ids)
        )
    return np.array(losses), retries, device, once


def at_random(seed: int, share: float = 0.25):
    rng = random.Random(seed)
    return lambda: rng.random() < share


@pytest.mark.parametrize(
    ("kind", "seed"), [("workers", 4), pytest.param("stream", 7, marks=pytest.mark.slow("a run"))]
)
def test_run_with_failures_at_random_is_the_undisturbed_one(kind, seed):
    """Loss by loss, in forwards and backwards; every window sees each of its samples once."""
    expected, *_ = run_of_steps("no", lambda: False, kind="stream" if kind == "stream" else "list")
    losses, retries, device, once = run_of_steps(
        "no", at_random(seed), kind=kind, backward=seed % 2 == 0
    )
    assert sum(retries) == len(device.failures) >= 2
    assert all(once)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_fp16():
    """No further from the undisturbed run than another split is: its rounding depends on the
    split.
    """
    expected, _, _, _ = run_of_steps("fp16", lambda: False)
    other, _, _, _ = run_of_steps("fp16", lambda: False, micro_batch=3)
    losses, retries, _, once = run_of_steps("fp16", at_random(4), backward=True)
    assert sum(retries) >= 2
    assert all(once)
    assert np.abs(losses - expected).max() <= 3 * np.abs(other - expected).max() + 1e-6


def test_a_single_sample_that_does_not_fit():
    """It is named; the caller's gradients are there as before, and smaller windows can be
    computed.
    """
    accelerator = accelerator_in()
    model = h.gpt2(0.1)
    samples = h.token_samples(SAMPLES)
    samples[5] = {name: (values * 9)[:30] for name, values in samples[5].items()}
    device = Device(model, 25, backward=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, EARLIER)
    windows = list(windows_of(accelerator, samples))
    bad = next(window for window in windows if 5 in window.sample_ids)
    with pytest.raises(
        OutOfMemory,
        match=r"sample 5 with 30 tokens \(30 with padding\) does not fit into the memory of "
        r"process 0.*max_length",
    ):
        backward_window(accelerator, model, bad)
    assert all((p.grad == EARLIER).all() for p in model.parameters())
    assert device.failures[-1] == (
        1,
        30,
    )
    good = next(window for window in windows if window is not bad)
    assert backward_window(accelerator, model, good).num_targets > 0


def test_other_errors_are_no_lack_of_memory():
    with pytest.raises(RuntimeError) as real:  # torch's allocator of the CPU
        torch.empty(2**60, dtype=torch.uint8)
    assert all(map(is_out_of_memory, [real.value, *ERRORS.values()]))
    assert not any(
        map(
            is_out_of_memory,
            [RuntimeError("shapes cannot be multiplied"), ValueError("out of memory.")],
        )
    )


@contextmanager
def small_device(fits: float, **how):
    """Whole runs meet a `Device` behind the trial. Yields the list of devices."""
    prepare = build.prepare_with
    devices = []

    def prepared(accelerator, model, optimizer, settings):
        devices.append(Device(model, fits, **how))
        return prepare(accelerator, model, optimizer, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "prepare_with", prepared)
        yield devices


@pytest.fixture(scope="module")
def short_of_memory(place):
    """Its summary, and what it printed of memory."""
    with small_device(60), redirect_stdout(StringIO()) as printed:
        summary = train(place, place / "short", per_device_eval_batch_size=2)
    return summary, [line for line in printed.getvalue().splitlines() if "out of memory" in line]


def test_a_run_on_a_small_device(place, undisturbed, short_of_memory):
    """Retries in metrics.jsonl where there were any, the limit in summary.json, the losses of the
    undisturbed run.
    """
    lines = lines_of(place / "short")
    expected = lines_of(place / "undisturbed")
    assert [line.get("retries", 0) > 0 for line in lines] == [True] + [False] * 7
    assert not any("retries" in line for line in expected)
    assert undisturbed[0]["most_tokens_in_a_micro_batch"] is None
    summary, said = short_of_memory
    assert 24 <= summary["most_tokens_in_a_micro_batch"] <= 60
    assert len(said) == 1
    assert "tokens (padding included) in a micro-batch; the update is the same" in said[0]
    for name in ("loss", "eval_loss", "grad_norm"):
        found, right = ([line[name] for line in run if name in line] for run in (lines, expected))
        assert found == pytest.approx(right, rel=1e-5)
        assert found
    assert (
        0 < relative_distance(place / "short", place / "undisturbed") < 1e-6
    )  # in other parts, so rounded otherwise


def test_a_resumed_run_cuts_as_the_one_that_never_stopped(place, tmp_path, short_of_memory):
    """Bit for bit: the checkpoint holds the limit, so nothing fails again."""
    with small_device(60):
        resumed = train(
            place,
            tmp_path / "out",
            resume_from_checkpoint=str(place / "short" / "checkpoint-6"),
            per_device_eval_batch_size=2,
        )
    assert resumed["weights_sha256"] == short_of_memory[0]["weights_sha256"]
    assert not any("retries" in line for line in lines_of(tmp_path / "out"))


def test_a_run_with_a_sample_that_does_not_fit(place, tmp_path):
    """One line, with the checkpoint to go on from."""
    saved = tmp_path / "out" / "checkpoint-3"

    def is_chosen() -> bool:
        # A thread writes the checkpoint: the first forward after that may be an evaluation's.
        return torch.is_grad_enabled() and saved.exists()

    with small_device(23, chosen=is_chosen), pytest.raises(OutOfMemory) as caught:
        train(place, tmp_path / "out")
    assert "24 tokens (24 with padding) does not fit into the memory of process 0" in str(
        caught.value
    )
    # A thread writes checkpoints: the run may have gone on for some steps until the first was there.
    *_, last = list_checkpoints(tmp_path / "out")
    assert str(caught.value).endswith(
        f"Then resume from {last} with --resume_from_checkpoint auto."
    )
