"""Evaluation: the mean over all targets of a split, the same for every batch size and number of
processes.
"""

from functools import partial
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from forked import on_two_ranks
from torch.nn import functional as F

from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.finetuning.run.scores.evaluation import (
    EVALUATION_WINDOW,
    Reader,
    evaluate_samples,
    evaluation_windows,
)
from hf_ga.finetuning.run.scores.metrics import METRICS, compute
from hf_ga.finetuning.run.scores.readers import read_logits, user_metrics_reader

BATCH_SIZES = [1, 7, 1000]


def louder(model, factor=3):
    """Outputs that differ much from sample to sample."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor if parameter.dim() > 1 else 1)
    return model


def ragged(count):
    """Every fourth without a target: its first label is not predicted."""
    samples = helpers.token_samples(count, ignored_share=0.3)
    none = [[s["labels"][0]] + [helpers.IGNORED] * (len(s["labels"]) - 1) for s in samples]
    return [{**s, "labels": none[i]} if i % 4 == 0 else s for i, s in enumerate(samples)]


def evaluated(model, samples, batch_size, reader=None, accelerator=None, loss_fn=None):
    accelerator = accelerator or Accelerator(cpu=True)
    make_windows = partial(
        evaluation_windows,
        samples,
        helpers.pad_right,
        accelerator=accelerator,
        batch_size=batch_size,
        lengths=[len(s["input_ids"]) for s in samples],
    )
    return evaluate_samples(accelerator, model, make_windows, loss_fn=loss_fn, reader=reader)


@torch.no_grad()
def by_hand(model, samples) -> tuple[float, int]:
    """Sum and number of the losses of all targets, in float64, one sample at a time."""
    model = helpers.copy.deepcopy(model).double().eval()
    total = 0.0
    count = 0
    for sample in samples:
        batch = helpers.pad_right([sample])
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        causal = isinstance(model, helpers.CAUSAL)
        labels = batch["labels"][:, 1:] if causal else batch["labels"]
        logits = logits[:, :-1] if causal else logits
        losses = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            reduction="none",
            ignore_index=-100,
        )
        total = total + float(losses.sum())
        count = count + int((labels != -100).sum())
    return total, count


def mean_of_means(model, samples, batch_size) -> float:
    """The usual mistake: batches count alike, whatever their targets."""
    model = model.eval()
    means = []
    for start in range(0, len(samples), batch_size):
        with torch.no_grad():
            loss = float(model(**helpers.pad_right(samples[start : start + batch_size])).loss)
        means += [loss] if np.isfinite(loss) else []
    return float(np.mean(means))


@pytest.mark.parametrize("head", ["gpt2", "bert_masked_lm", "bert_classifier"])
def test_loss_is_the_mean_over_all_targets(head):
    """The control: the mean of the batches' means is another number."""
    model = louder(getattr(helpers, head)(dropout=0.5))
    samples = helpers.class_samples(53) if head == "bert_classifier" else ragged(53)
    total, count = by_hand(model, samples)
    for batch_size in BATCH_SIZES:
        results = evaluated(model, samples, batch_size)
        assert results["num_targets"] == count
        assert results["loss"] == pytest.approx(total / count, rel=1e-6)
    assert head != "gpt2" or abs(mean_of_means(model, samples, 7) * count / total - 1) > 1e-4


def test_head_whose_loss_depends_on_the_width():
    """XLNet's summary is the last column: all samples of an evaluation window are padded to its
    longest, for every batch size.
    """
    model = helpers.xlnet_classifier()
    samples = helpers.class_samples(EVALUATION_WINDOW + 40)
    total = 0.0
    reference = helpers.copy.deepcopy(model).double().eval()
    for start in (0, EVALUATION_WINDOW):
        batch = helpers.pad_right(samples[start : start + EVALUATION_WINDOW])
        with torch.no_grad():
            logits = reference(**{k: v for k, v in batch.items() if k != "labels"}).logits
        total += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
    for batch_size in (7, 1000):
        assert evaluated(model, samples, batch_size)["loss"] == pytest.approx(
            total / len(samples), rel=1e-6
        )
    narrow = by_hand(model, samples)[0] / len(samples)  # the control: each sample at its own width
    assert abs(narrow / (total / len(samples)) - 1) > 1e-5


def test_own_loss_function_counts_by_weights():
    model = helpers.plain_tagger()
    samples = helpers.weighted_samples(20)
    total = weight = 0.0
    for sample in samples:
        with torch.no_grad():
            logits = helpers.copy.deepcopy(model).double()(torch.tensor([sample["input_ids"]]))[0]
        losses = F.cross_entropy(logits, torch.tensor(sample["targets"]), reduction="none")
        total += float((losses * torch.tensor(sample["weights"])).sum())
        weight += sum(sample["weights"])
    for batch_size in BATCH_SIZES:
        results = evaluated(model, samples, batch_size, loss_fn=helpers.weighted_token_loss)
        assert results["loss"] == pytest.approx(total / weight, rel=1e-6)
        assert results["num_targets"] == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_mode_weights_and_random_states_stay(training):
    model = helpers.gpt2(dropout=0.5)
    samples = ragged(11)
    model.train(training)
    model.transformer.h[0].eval()  # a part that the user has frozen in evaluation mode
    modes = {name: module.training for name, module in model.named_modules()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = helpers.global_random_states()
    first, second = (evaluated(model, samples, 3) for _ in range(2))
    assert first == second  # no dropout
    assert helpers.global_random_states() == states
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_leaves_the_training_mode(monkeypatch):
    model = helpers.gpt2()
    samples = ragged(11)
    monkeypatch.setattr(model, "forward", lambda input_ids, labels=None: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluated(model, samples, 3)
    assert model.training


def test_a_split_without_targets_has_no_loss():
    model = helpers.gpt2()
    samples = ragged(9)
    results = evaluated(model, [helpers.without_targets(s) for s in samples], 4)
    assert results["num_targets"] == 0
    assert np.isnan(results["loss"])


# name -> (model, samples, metrics)
CASES = {
    "causal LM": (lambda: louder(helpers.gpt2()), partial(ragged, 53), ()),
    "router": (lambda: helpers.mixtral(router_coefficient=0.5), partial(ragged, 53), ()),
    "width": (helpers.xlnet_classifier, partial(helpers.class_samples, 300), ("accuracy",)),
    "classes": (
        lambda: louder(helpers.bert_classifier(), 4),
        partial(helpers.class_samples, 53),
        ("accuracy", "f1"),
    ),
    "tags": (
        lambda: louder(helpers.bert_token_classifier()),
        partial(helpers.tag_samples, 53),
        ("accuracy", "f1"),
    ),
    "own metrics": (
        lambda: louder(helpers.bert_token_classifier()),
        partial(helpers.tag_samples, 53),
        (),
    ),
    "own loss": (helpers.plain_tagger, partial(helpers.weighted_samples, 20), ()),
    "one sample": (lambda: louder(helpers.gpt2()), lambda: ragged(53)[1:2], ()),
    "no targets": (
        lambda: louder(helpers.gpt2()),
        lambda: [helpers.without_targets(s) for s in ragged(5)],
        (),
    ),
}


def weighted_by_place(prediction):
    """Any other order, padding or value changes it."""
    return {
        name: float(np.dot(part.ravel(), np.arange(part.size)))
        for name, part in zip("pl", prediction, strict=True)
    }


def measured(accelerator, name):
    make, samples_of, metrics = CASES[name]
    model = make()
    samples = samples_of()
    loss_fn = helpers.weighted_token_loss if name == "own loss" else None
    scores = {metric: METRICS[metric] for metric in metrics}
    reader = Reader(partial(compute, scores), read_logits) if metrics else None
    if name == "own metrics":
        own = {"compute_metrics": weighted_by_place, "preprocess_logits_for_metrics": None}
        reader = user_metrics_reader(SimpleNamespace(config=FinetuneConfig(), **own), model)
    return evaluated(accelerator.prepare(model), samples, 7, reader, accelerator, loss_fn)


@pytest.mark.slow("starts processes")
def test_all_processes_get_the_very_same_numbers():
    """Bit for bit those of one process, which the tests above compute by hand: of every head, of
    fewer samples than processes, of none with a target.
    """

    def work():
        accelerator = Accelerator(cpu=True)
        return {name: measured(accelerator, name) for name in CASES}

    first, second = on_two_ranks(work)
    alone = work()
    for name in CASES:
        assert repr(first[name]) == repr(second[name]) == repr(alone[name]), name
        assert alone[name]["num_targets"] > 0 or name == "no targets"
