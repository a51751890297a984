"""`hf_ga.backward` on several ranks, each with a batch of its own: the gradient is that of all these
batches together, in plain PyTorch in float64 on one process.
"""

import cases
import helpers as h
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from cases import CASES, NUM_SAMPLES, SEED, gradient
from forked import on_ranks, on_two_ranks, without_errors
from memory_limits import Device
from torch import nn
from torch.distributed.fsdp import fully_shard

import hf_ga

SHARES = [slice(0, 13), slice(13, NUM_SAMPLES)]  # 13 and 7 samples


def share_of(batch: dict, share: slice) -> dict:
    return {name: value[share] for name, value in batch.items()}


def narrow(batch: dict) -> dict:
    """As a rank's own collate function makes it: as wide as its longest sample."""
    width = int(batch["attention_mask"].sum(1).max())
    full = batch["attention_mask"].shape[1]
    return {
        name: value[:, :width] if value.dim() > 1 and value.shape[1] == full else value
        for name, value in batch.items()
    }


def join_group() -> int:
    """A process group without Accelerate. Returns the rank."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def on_rank(case, dropout, size, wrap=lambda model: model, shares=SHARES, cut=lambda batch: batch):
    """Gradient and loss of this rank; its random generators differ from other ranks'."""
    rank = join_group()
    torch.manual_seed(SEED + rank)
    model = wrap(case.build(dropout))
    batch = cut(share_of(case.batch(), shares[rank]))
    loss = hf_ga.backward(model, batch, micro_batch_size=size, loss_fn=case.loss_fn)
    return h.gradients(getattr(model, "module", model)), float(loss)


@pytest.mark.parametrize("name", ["GPT-2", "T5", "BERT answers", "own loss"])
def test_two_ranks_have_the_gradient_of_both_batches_together(name):
    case = CASES[name]
    batch = case.batch()
    model = case.build(0.0)
    truth = h.full_batch_gradient(model, batch, loss_fn=case.loss_fn)
    loss = float(h.mean_loss(model, batch, case.loss_fn).detach())
    found = without_errors(on_two_ranks(lambda: on_rank(case, 0.0, 3)))
    for gradients, found_loss in found:
        assert h.relative_error(gradients, truth) < 1e-6
        assert found_loss == pytest.approx(loss, rel=1e-6)
    parts = [
        h.full_batch_gradient(model, share_of(batch, share), loss_fn=case.loss_fn)
        for share in SHARES
    ]
    usual = {name: (parts[0][name] + parts[1][name]) / 2 for name in truth}  # DDP's mean of means
    assert h.relative_error(usual, truth) > 1e-3


@pytest.mark.parametrize("name", ["GPT-2", "T5", "own loss"])
def test_ranks_draw_the_dropout_of_one_process(name):
    case = CASES[name]
    whole, loss = gradient(case, 0.1, NUM_SAMPLES)
    found = without_errors(on_two_ranks(lambda: on_rank(case, 0.1, "auto")))
    for gradients, found_loss in found:
        assert h.relative_error(gradients, whole) < 1e-6
        assert found_loss == pytest.approx(loss, rel=1e-6)


def test_a_model_under_ddp_and_batches_of_other_widths():
    case = CASES["GPT-2"]
    short_last = torch.argsort(case.batch()["attention_mask"].sum(1), descending=True, stable=True)
    ordered = share_of(case.batch(), short_last)
    by_length = cases.Case(case.build, lambda: ordered)
    whole, _ = gradient(by_length, 0.1, NUM_SAMPLES)

    def work():
        return on_rank(by_length, 0.1, 3, nn.parallel.DistributedDataParallel, cut=narrow)

    for gradients, _ in without_errors(on_two_ranks(work)):
        assert h.relative_error(gradients, whole) < 1e-6


def test_the_router_s_shares_are_those_of_all_ranks():
    case = cases.Case(lambda dropout: h.mixtral(0.5), CASES["GPT-2"].batch)
    whole, _ = gradient(case, 0.0, NUM_SAMPLES)
    for gradients, _ in without_errors(on_two_ranks(lambda: on_rank(case, 0.0, 3))):
        assert h.relative_error(gradients, whole) < 1e-6


def test_a_rank_without_samples_takes_part():
    case = CASES["BERT answers"]
    whole, _ = gradient(case, 0.1, NUM_SAMPLES)
    shares = [slice(0, 0), slice(0, NUM_SAMPLES)]
    found = without_errors(on_two_ranks(lambda: on_rank(case, 0.1, 8, shares=shares)))
    for gradients, _ in found:
        assert h.relative_error(gradients, whole) < 1e-6


def test_accelerate_s_ranks():
    case = CASES["BERT classes"]
    whole, _ = gradient(case, 0.1, NUM_SAMPLES)

    def work():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(case.build(0.1))
        batch = share_of(case.batch(), SHARES[accelerator.process_index])
        hf_ga.backward(model, batch, micro_batch_size=3, accelerator=accelerator, seed=SEED)
        return h.gradients(model.module)

    for gradients in without_errors(on_two_ranks(work)):
        assert h.relative_error(gradients, whole) < 1e-6


def test_memory_that_runs_out_on_one_rank():
    case = CASES["GPT-2"]
    whole, _ = gradient(case, 0.1, NUM_SAMPLES, step=1)

    def work():
        rank = join_group()
        model = case.build(0.1)
        batch = share_of(case.batch(), SHARES[rank])
        hf_ga.backward(model, batch, micro_batch_size="auto", seed=SEED)
        model.zero_grad()
        device = Device(model, fits=40 if rank else 10**6)
        hf_ga.backward(model, batch, micro_batch_size="auto", seed=SEED)
        return h.gradients(model), len(device.failures)

    (first, fails), (second, others) = without_errors(on_two_ranks(work))
    assert (fails, others > 0) == (0, True)
    for gradients in (first, second):
        assert h.relative_error(gradients, whole) < 1e-6


def fails(change) -> list[str]:
    """What each of two ranks raises if the second one's call is changed."""

    def work():
        rank = join_group()
        model = h.bert_classifier(0.1)
        batch = share_of(CASES["BERT classes"].batch(), SHARES[rank])
        settings = {"model": model, "batch": batch, "micro_batch_size": 4}
        hf_ga.backward(**{**settings, **(change(settings) if rank else {})})

    return on_two_ranks(work)


def test_a_model_in_evaluation_mode_on_one_rank_is_refused_on_all():
    for found in fails(lambda settings: {"model": settings["model"].eval()}):
        assert found.startswith(
            "ConfigError: the batches of ranks 0 and 1 have different entries, or"
        )


def test_a_bad_batch_of_one_rank_is_raised_on_all():
    def change(settings):
        return {"batch": {**settings["batch"], "labels": settings["batch"]["labels"][1:]}}

    first, second = fails(change)
    assert first.startswith("ProcessFailed: process 1 failed: DataError")
    assert second.startswith("DataError: the entries of the batch have different numbers of rows")


def test_ranks_at_other_steps_are_refused():
    for found in fails(lambda settings: {"step": 4}):
        assert found.startswith("ConfigError: ranks are at different steps (0, 4)")


def test_ranks_with_other_entries_are_refused():
    def change(settings):
        ids = settings["batch"]["input_ids"]
        return {"batch": {**settings["batch"], "token_type_ids": torch.zeros_like(ids)}}

    for found in fails(change):
        assert found.startswith("ConfigError: the batches of ranks 0 and 1 have different entries")


def test_widths_that_a_loss_depends_on_must_be_equal():
    batch = CASES["BERT classes"].batch()
    order = torch.argsort(batch["attention_mask"].sum(1))
    case = cases.Case(h.xlnet_classifier, lambda: share_of(batch, order))
    for found in on_two_ranks(lambda: on_rank(case, 0.0, 4, cut=narrow)):
        assert found.startswith("ConfigError: the loss depends on the padded length")


def refused(make) -> list[str]:
    """What two ranks raise for a model that `make(rank)` wraps."""

    def work():
        model = make(join_group())
        hf_ga.backward(model, CASES["BERT classes"].batch(), micro_batch_size=4)

    return on_two_ranks(work)


def test_sharded_parameters_are_refused():
    for found in refused(lambda rank: fully_shard(h.bert_classifier())):
        assert found.startswith("ConfigError: hf_ga.backward does not support sharded parameters")


def test_a_part_of_the_ranks_is_refused():
    def make(rank):
        groups = [dist.new_group([rank]) for rank in range(2)]
        return nn.parallel.DistributedDataParallel(h.bert_classifier(), process_group=groups[rank])

    for found in refused(make):
        assert found.startswith("ConfigError: the model's DistributedDataParallel has 1 ranks")


@pytest.mark.slow("three ranks")
def test_three_ranks():
    case = CASES["BERT masked LM"]
    whole, _ = gradient(case, 0.1, NUM_SAMPLES)
    shares = [slice(0, 3), slice(3, 3), slice(3, NUM_SAMPLES)]
    found = without_errors(on_ranks(lambda: on_rank(case, 0.1, 4, shares=shares), 3))
    for gradients, _ in found:
        assert h.relative_error(gradients, whole) < 1e-6
