"""Losses of whole windows with sharded models, with gradient checkpointing, and where one rank fails
in the first pass.
"""

from functools import partial

import helpers as h
import pairs
import pytest
import torch
from accelerate import Accelerator
from forked import on_ranks, without_errors
from processes import make_accelerator, whole_gradients

import hf_ga


def gradient(accelerator, returns_scale=True, checkpointing=False, number=20, fails=None):
    """Of a window of pairs in micro-batches of 3."""
    model = pairs.embedder(returns_scale=returns_scale)
    if checkpointing:
        model.encoder.gradient_checkpointing_enable()
    windows = hf_ga.WindowLoader(
        pairs.pair_samples(number),
        pairs.collate_pairs,
        accelerator=accelerator,
        per_device_batch_size=3,
        global_batch_size=number,
        seed=pairs.SEED,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    whole_batch = pairs.info_nce(model)
    prepared, _ = hf_ga.prepare(accelerator, model, optimizer, windows, whole_batch=whole_batch)
    (window,) = windows
    if fails == accelerator.process_index:
        model.register_forward_pre_hook(fail)
    result = hf_ga.backward_window(accelerator, prepared, window)
    return whole_gradients(prepared), result.loss


def fail(module, args):
    raise ValueError("this rank fails")


def test_gradient_checkpointing():
    plain, loss = gradient(Accelerator(cpu=True))
    found, checkpointed_loss = gradient(Accelerator(cpu=True), checkpointing=True)
    assert checkpointed_loss == loss
    assert h.relative_error(found, plain) < 1e-6


def sharded(kind, **options):
    return gradient(make_accelerator(kind), **options)


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize("number", [20, 1], ids=["20 pairs", "a rank without samples"])
def test_shards(number):
    expected, expected_loss = gradient(Accelerator(cpu=True), number=number)
    work = partial(sharded, "fsdp2", number=number)
    for found, loss in without_errors(on_ranks(work, 2, "fsdp2")):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        if number > 1:
            assert h.relative_error(found, expected) < 2e-6


@pytest.mark.slow("starts processes")
def test_fsdp1_is_refused():
    """It gathers parameters for one backward of a forward, and a whole window needs two."""
    for said in on_ranks(partial(sharded, "fsdp1"), 2, "fsdp1"):
        assert "whole_batch does not support FSDP1" in said


@pytest.mark.slow("starts processes")
def test_a_parameter_in_the_loss_is_refused_under_fsdp():
    for found in on_ranks(partial(sharded, "fsdp2", returns_scale=False), 2, "fsdp2"):
        assert "return them among its outputs" in found


@pytest.mark.slow("starts processes")
def test_all_ranks_end_where_one_fails_in_the_first_pass():
    first, second = on_ranks(partial(sharded, "ddp", fails=1), 2)
    assert "ProcessFailed: process 1 failed: ValueError: this rank fails" in first
    assert second == "ValueError: this rank fails"
