"""`hf_ga.backward(whole_batch=...)`: in-batch negatives over the batches of all ranks.

The oracle is one forward and backward of all pairs, in plain PyTorch.
"""

import copy

import helpers as h
import pairs
import pytest
import torch
import torch.distributed as dist
from forked import on_two_ranks, without_errors

import hf_ga
from hf_ga.errors import ConfigError

NUM_PAIRS = 18


def batch_of(share: slice = slice(None)) -> dict:
    return pairs.collate_pairs(pairs.pair_samples(NUM_PAIRS)[share])


def gradient(size, dropout: float = 0.1, share: slice = slice(None)) -> tuple[h.Gradients, float]:
    model = pairs.embedder(dropout)
    loss = hf_ga.backward(
        model, batch_of(share), micro_batch_size=size, whole_batch=pairs.info_nce(model), seed=3
    )
    return h.gradients(model), float(loss)


def full_batch_gradient() -> h.Gradients:
    """In float64, without dropout."""
    model = pairs.embedder(0.0).double()
    batch = batch_of()
    del batch["label"]
    pairs.info_nce(model)(model(**batch), batch).backward()
    return h.gradients(model)


def test_every_size_contrasts_all_pairs():
    truth = full_batch_gradient()
    for size in (1, 5, NUM_PAIRS, "auto"):
        found, _ = gradient(size, dropout=0.0)
        assert h.relative_error(found, truth) < 1e-6, size
        assert found["log_scale"].item() == pytest.approx(truth["log_scale"].item(), rel=1e-5)
    own_negatives = copy.deepcopy(truth)
    for name in own_negatives:
        own_negatives[name].zero_()
    for start in range(0, NUM_PAIRS, 6):
        part, _ = gradient("auto", dropout=0.0, share=slice(start, start + 6))
        own_negatives = {name: own_negatives[name] + part[name] / 3 for name in part}
    assert h.relative_error(own_negatives, truth) > 0.1


def test_every_size_draws_the_same_dropout():
    whole, loss = gradient(NUM_PAIRS)
    for size in (1, 5, "auto"):
        found, found_loss = gradient(size)
        assert h.relative_error(found, whole) < 1e-6, size
        assert found_loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("number", [0, 3], ids=["none on the first rank", "3 on the first rank"])
def test_the_pairs_of_all_ranks_are_contrasted(number):
    whole, loss = gradient(NUM_PAIRS)

    def work():
        dist.init_process_group("gloo")
        model = pairs.embedder()
        rest = batch_of(slice(number, NUM_PAIRS))
        first = batch_of(slice(number)) if number else {n: value[:0] for n, value in rest.items()}
        batch = rest if dist.get_rank() else first
        settings = {"micro_batch_size": 4, "whole_batch": pairs.info_nce(model), "seed": 3}
        loss = hf_ga.backward(model, batch, **settings)
        return h.gradients(model), float(loss), batch["positive"].shape[1]

    ranks = without_errors(on_two_ranks(work))
    for found, found_loss, _ in ranks:
        assert h.relative_error(found, whole) < 1e-6
        assert found_loss == pytest.approx(loss, rel=1e-6)
    (*_, width), (*_, other) = ranks
    assert number == 0 or width != other


def test_the_hardest_samples():
    def hardest(outputs, batch):
        losses = torch.nn.functional.cross_entropy(
            outputs.logits, batch["labels"], reduction="none"
        )
        return losses.topk(5).values.mean()

    batch = h.pad_right(h.class_samples(20))
    model = h.bert_classifier()
    truth = copy.deepcopy(model).double()
    hardest(truth(**batch), batch).backward()
    for size in (3, 20):
        model.zero_grad()
        hf_ga.backward(model, batch, micro_batch_size=size, whole_batch=hardest)
        assert h.relative_error(h.gradients(model), h.gradients(truth)) < 1e-6


def test_two_losses_are_refused():
    model = pairs.embedder()
    with pytest.raises(ConfigError, match="two losses"):
        hf_ga.backward(
            model,
            batch_of(),
            micro_batch_size=4,
            loss_fn=h.weighted_token_loss,
            whole_batch=pairs.info_nce(model),
        )
