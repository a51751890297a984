"""A model in pipeline stages, trained, stopped and compared with one process that holds it whole."""

import os
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import helpers as h
import numpy as np
import pytest
import torch
import transformers as tf
from forked import on_ranks, without_errors
from processes import SEED, make_accelerator, make_windows
from torch import Tensor, nn
from tried import keyed

import hf_ga
from hf_ga.order.order import epoch_order
from hf_ga.recovery.checkpoint import load_checkpoint
from hf_ga.recovery.latest import find_checkpoint
from hf_ga.recovery.saving import save_checkpoint

WINDOW = 16
NUM_WINDOWS = 3
LAST = 5
MICRO_BATCH = 3
DROPOUT = 0.1
FLOOR = 1e-6  # of the norm of all weights, or of the whole gradient
NUM_LAYERS = 3


def build_gpt2() -> nn.Module:
    return h.gpt2(DROPOUT, num_hidden_layers=NUM_LAYERS)


@h.seeded
def build_llama() -> nn.Module:
    sizes = {**h.LLAMA_SIZES, "num_hidden_layers": NUM_LAYERS}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, attention_dropout=DROPOUT))


def build_masked_lm() -> nn.Module:
    return h.bert_masked_lm(DROPOUT, num_hidden_layers=NUM_LAYERS)


def build_classifier() -> nn.Module:
    return h.bert_classifier(DROPOUT, num_hidden_layers=NUM_LAYERS)


def build_frozen_llama() -> nn.Module:
    """The first of two stages has no trainable parameter."""
    model = build_llama()
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    return model


def mean_over_positions(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    """A loss function that divides by all positions, with those of padding."""
    logits = logits[:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / labels.numel()


def weighted_mean(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    """A loss function with class weights, whose mean divides by the sum of the weights."""
    weight = torch.linspace(0.01, 5, logits.shape[-1], dtype=logits.dtype)
    logits = logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), weight=weight)


def build_gpt2_with(loss_function: Callable[..., Tensor]) -> nn.Module:
    model = build_gpt2()
    model.loss_function = loss_function
    return model


def build_gpt2_with_bf16() -> nn.Module:
    """Frozen weights in bf16, which compute under autocast only."""
    model = build_gpt2()
    for layer in model.transformer.h:
        layer.mlp.c_fc.to(torch.bfloat16).requires_grad_(False)
    return model


def noisy_weight(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """A forward hook of a layer: all samples of the window share its noise, of 8 numbers."""
    return output * (1 + 0.5 * torch.randn(8)[3])


def build_noisy_gpt2() -> nn.Module:
    """The shape of its noise allows two rows for each of four samples."""
    model = build_gpt2()
    model.transformer.h[2].register_forward_hook(noisy_weight)
    return model


MODELS = {
    "GPT-2": build_gpt2,
    "Llama": build_llama,
    "frozen Llama": build_frozen_llama,
    "BERT masked LM": build_masked_lm,
    "BERT classifier": build_classifier,
}
# The first one needs micro-batches that are padded to their window.
OWN_LOSSES = {"GPT-2 over positions": mean_over_positions, "weighted GPT-2": weighted_mean}
BUILDERS = {
    **MODELS,
    **{name: partial(build_gpt2_with, function) for name, function in OWN_LOSSES.items()},
    "GPT-2 with bf16": build_gpt2_with_bf16,
    "noisy GPT-2": build_noisy_gpt2,
}


def samples_of(name: str) -> list[dict]:
    """Ragged ones for some windows and a short last one; every fifth has no targets."""
    num_samples = WINDOW * (NUM_WINDOWS - 1) + LAST
    if name == "BERT classifier":
        return h.class_samples(num_samples)
    samples = h.token_samples(num_samples)
    return [h.without_targets(s) if i % 5 == 0 else s for i, s in enumerate(samples)]


def windows_of(accelerator: Any, samples: list[dict]) -> hf_ga.WindowLoader:
    sizes = {"per_device_batch_size": MICRO_BATCH, "global_batch_size": WINDOW}
    return make_windows(accelerator, samples, **sizes)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def weights_of(model: nn.Module) -> h.Gradients:
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


@cache
def alone(name: str) -> tuple[h.Gradients, list[tuple]]:
    """Weights and results of all windows on one process, by `hf_ga.train_step`."""
    accelerator = make_accelerator("ddp")
    model = BUILDERS[name]()
    windows = windows_of(accelerator, samples_of(name))
    model, optimizer = hf_ga.prepare(accelerator, model, build_optimizer(model), windows)
    results = [
        hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
        for window in windows
    ]
    return weights_of(model), [numbers_of(result) for result in results]


def numbers_of(result: hf_ga.StepResult) -> tuple:
    return result.loss, result.num_targets, result.grad_norm


def full_gradient(
    name: str, samples: list[dict], window_size: int, shuffle: bool = True
) -> h.Gradients:
    """The gradient of the first window in float64: one plain forward and backward, under the
    dropout of its samples.
    """
    model = BUILDERS[name]().double()
    ids = epoch_order(len(samples), SEED, 0, shuffle)[:window_size]
    with keyed(SEED, 0, np.arange(window_size)):
        batch = h.pad_right([samples[i] for i in ids])
        loss = model(**batch).loss if name in OWN_LOSSES else h.mean_loss(model, batch)
        loss.backward()
    return h.gradients(model)


@cache
def full_batch(name: str) -> h.Gradients:
    """`full_gradient` of the first of the windows that are trained on."""
    return full_gradient(name, samples_of(name), WINDOW)


def make_pipeline(
    name: str,
    num_stages: int,
    schedule: str,
    samples: list[dict] | None = None,
    precision: str = "no",
) -> tuple[hf_ga.Pipeline, hf_ga.WindowLoader]:
    accelerator = make_accelerator("ddp", mixed_precision=precision)
    model = BUILDERS[name]()
    windows = windows_of(accelerator, samples or samples_of(name))
    pipeline = hf_ga.prepare_pipeline(
        accelerator, model, windows, num_stages=num_stages, schedule=schedule
    )
    return pipeline, windows


def train(
    name: str,
    num_stages: int,
    schedule: str,
    spoil: Callable[[hf_ga.Pipeline], None] = lambda pipeline: None,
) -> tuple[h.Gradients, h.Gradients, list[tuple]]:
    """The gradient of the first window, then weights and results of all windows, of this rank."""
    pipeline, windows = make_pipeline(name, num_stages, schedule)
    spoil(pipeline)
    pipeline.backward_window(next(iter(windows)))
    gradient = h.gradients(pipeline.model)
    pipeline.model.zero_grad()
    windows.set_epoch(0)
    optimizer = build_optimizer(pipeline.model)
    results = [pipeline.train_step(optimizer, window, max_grad_norm=1.0) for window in windows]
    return gradient, weights_of(pipeline.model), [numbers_of(result) for result in results]


def put_together(parts: list[h.Gradients]) -> h.Gradients:
    """Of all stages; copies of a tied weight must have the same bits."""
    whole: h.Gradients = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


def errors_of(name: str, found: list[Any]) -> tuple[float, float]:
    """Relative errors of the gradient and of the weights after all windows."""
    gradients, weights, _ = zip(*found, strict=True)
    of_gradient = h.relative_error(put_together(gradients), full_batch(name))
    return of_gradient, h.relative_error(put_together(weights), alone(name)[0])


def assert_trains_as_one_process(
    name: str, num_stages: int, schedule: str, num_replicas: int = 1
) -> None:
    """Gradient of a ragged window, and three updates of which the last one is of a short window."""
    alone(name)  # before the ranks are forked
    work = partial(train, name, num_stages, schedule)
    found = without_errors(on_ranks(work, num_stages * num_replicas))
    of_gradient, of_weights = errors_of(name, found)
    assert of_gradient < FLOOR
    assert of_weights < FLOOR
    for *_, results in found:
        for result, expected in zip(results, alone(name)[1], strict=True):
            assert result == pytest.approx(expected, rel=1e-5)


def first_gradient(precision: str, num_stages: int | None, name: str = "GPT-2") -> h.Gradients:
    """Of a model under autocast; num_stages: None for one process with the whole model."""
    if num_stages is not None:
        pipeline, windows = make_pipeline(name, num_stages, "1f1b", precision=precision)
        pipeline.backward_window(next(iter(windows)))
        return h.gradients(pipeline.model)
    accelerator = make_accelerator("ddp", mixed_precision=precision)
    model = BUILDERS[name]()
    windows = windows_of(accelerator, samples_of(name))
    model, _ = hf_ga.prepare(accelerator, model, build_optimizer(model), windows)
    hf_ga.backward_window(accelerator, model, next(iter(windows)))
    return h.gradients(model)


def train_on(
    step: Callable[[hf_ga.Window], Any],
    windows: hf_ga.WindowLoader,
    save: Callable[[int], Any] = lambda number: None,
) -> None:
    """The rest of the epoch, with what saves a checkpoint after each window."""
    for window in windows:
        step(window)
        save(window.index + 1)


def stages_with(folder: Path, num_stages: int, stop_after: int | None = None) -> h.Gradients:
    """Train stages from the newest checkpoint if there is one, and save one after each window.

    stop_after: kill this rank after so many windows, before it saves.
    """
    pipeline, windows = make_pipeline("GPT-2", num_stages, "1f1b")
    accelerator = pipeline._backend.accelerator
    optimizer = build_optimizer(pipeline.model)
    if (checkpoint := find_checkpoint(accelerator, folder, "auto")) is not None:
        windows.load_state_dict(load_checkpoint(checkpoint, pipeline.model, optimizer)["windows"])

    def save(step: int) -> None:
        if step == stop_after:
            os.kill(os.getpid(), signal.SIGKILL)
        state = {"windows": windows.state_dict()}
        save_checkpoint(accelerator, folder, pipeline.model, optimizer, state, step=step, keep=1)

    train_on(partial(pipeline.train_step, optimizer, max_grad_norm=1.0), windows, save)
    return weights_of(pipeline.model)


def one_process_with(folder: Path, with_moments: bool = True) -> h.Gradients:
    """Train the whole model on from the newest checkpoint. Its own weights are zeros."""
    accelerator = make_accelerator("ddp")
    model = MODELS["GPT-2"]()
    with torch.no_grad():
        torch._foreach_zero_(list(model.parameters()))
    optimizer = build_optimizer(model)
    windows = windows_of(accelerator, samples_of("GPT-2"))
    state = load_checkpoint(find_checkpoint(accelerator, folder, "auto"), model, optimizer)
    windows.load_state_dict(state["windows"])
    optimizer = optimizer if with_moments else build_optimizer(model)
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
    train_on(partial(hf_ga.train_step, accelerator, model, optimizer, max_grad_norm=1.0), windows)
    return weights_of(model)


def kill_two_stages(folder: Path) -> None:
    """Two stages that are killed after the third window; they saved the second."""
    said = on_ranks(partial(stages_with, folder, 2, stop_after=3), 2)
    assert all("EOFError" in one for one in said), said
