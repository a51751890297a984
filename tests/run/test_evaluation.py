"""Evaluation: the mean over all targets of a split, the same for every batch size and number of processes."""

import json

import evaluation_worker
import helpers
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from evaluation_worker import louder, ragged
from forked import run_script
from torch.nn import functional as F

from hf_ga.run.evaluation import EVALUATION_WINDOW
from hf_ga.training import prove_targets

BATCH_SIZES = [1, 7, 1000]


def evaluated(*args, **more):
    return evaluation_worker.evaluated(Accelerator(cpu=True), *args, **more)


@torch.no_grad()
def by_hand(model, samples) -> tuple[float, int]:
    """Sum and number of the losses of all targets, in float64, one sample at a time."""
    model = helpers.copy.deepcopy(model).double().eval()
    total, count = 0.0, 0
    for sample in samples:
        batch = helpers.pad_right([sample])
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        causal = isinstance(model, helpers.CAUSAL)
        labels = batch["labels"][:, 1:] if causal else batch["labels"]
        logits = logits[:, :-1] if causal else logits
        losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="none", ignore_index=-100)
        total, count = total + float(losses.sum()), count + int((labels != -100).sum())
    return total, count


def mean_of_means(model, samples, batch_size) -> float:
    """The usual mistake: batches count alike, whatever their targets."""
    model, means = model.eval(), []
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
    rule = prove_targets(model, samples[1:33], helpers.pad_right)
    total, count = by_hand(model, samples)
    for batch_size in BATCH_SIZES:
        results = evaluated(model, samples, batch_size, rule)
        assert results["num_targets"] == count
        assert results["loss"] == pytest.approx(total / count, rel=1e-6)
        assert results["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-5)
    assert head != "gpt2" or abs(mean_of_means(model, samples, 7) * count / total - 1) > 1e-4


def test_head_whose_loss_depends_on_the_width():
    """XLNet's summary is the last column: all samples of an evaluation window are padded to its longest, for every batch size."""
    model, samples = helpers.xlnet_classifier(), helpers.class_samples(EVALUATION_WINDOW + 40)
    rule = prove_targets(model, samples[:32], helpers.pad_right)
    assert rule.pad_to_window
    total = 0.0
    reference = helpers.copy.deepcopy(model).double().eval()
    for start in (0, EVALUATION_WINDOW):
        batch = helpers.pad_right(samples[start : start + EVALUATION_WINDOW])
        with torch.no_grad():
            logits = reference(**{k: v for k, v in batch.items() if k != "labels"}).logits
        total += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
    for batch_size in (7, 1000):
        assert evaluated(model, samples, batch_size, rule)["loss"] == pytest.approx(total / len(samples), rel=1e-6)
    narrow = by_hand(model, samples)[0] / len(samples)  # the control: each sample at its own width
    assert abs(narrow / (total / len(samples)) - 1) > 1e-5


def test_own_loss_function_counts_by_weights():
    model, samples = helpers.plain_tagger(), helpers.weighted_samples(20)
    rule = prove_targets(model, samples, helpers.pad_right, loss_fn=helpers.weighted_token_loss)
    total = weight = 0.0
    for sample in samples:
        with torch.no_grad():
            logits = helpers.copy.deepcopy(model).double()(torch.tensor([sample["input_ids"]]))[0]
        losses = F.cross_entropy(logits, torch.tensor(sample["targets"]), reduction="none")
        total += float((losses * torch.tensor(sample["weights"])).sum())
        weight += sum(sample["weights"])
    for batch_size in BATCH_SIZES:
        results = evaluated(model, samples, batch_size, rule)
        assert results["loss"] == pytest.approx(total / weight, rel=1e-6)
        assert results["num_targets"] == pytest.approx(weight, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_mode_weights_and_random_states_stay(training):
    model, samples = helpers.gpt2(dropout=0.5), ragged(11)
    rule = prove_targets(model, samples[1:4] * 4, helpers.pad_right)
    model.train(training)
    model.transformer.h[0].eval()  # a part that the user has frozen in evaluation mode
    modes = {name: module.training for name, module in model.named_modules()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = helpers.global_random_states()
    first, second = (evaluated(model, samples, 3, rule) for _ in range(2))
    assert first == second  # no dropout
    assert helpers.global_random_states() == states
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_leaves_the_training_mode(monkeypatch):
    model, samples = helpers.gpt2(), ragged(11)
    rule = prove_targets(model, samples[1:4] * 4, helpers.pad_right)
    monkeypatch.setattr(model, "forward", lambda input_ids, labels=None: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluated(model, samples, 3, rule)
    assert model.training


def test_a_split_without_targets_has_no_loss():
    model, samples = helpers.gpt2(), ragged(9)
    rule = prove_targets(model, samples[1:4] * 4, helpers.pad_right)
    results = evaluated(model, [helpers.without_targets(s) for s in samples], 4, rule)
    assert results["num_targets"] == 0 and np.isnan(results["loss"])


@pytest.fixture(scope="module")
def on_processes(tmp_path_factory):
    """(number of processes, index of one) -> what it measured, case by case; see the worker for the cases."""
    folder = tmp_path_factory.mktemp("evaluated")
    run_script(evaluation_worker.__file__, folder, job=None)
    found = {tuple(map(int, file.stem.split("-"))): json.loads(file.read_text()) for file in folder.glob("*-*.json")}
    assert found.keys() == {(count, index) for count in evaluation_worker.PROCESSES for index in range(count)}
    return found


@pytest.mark.slow("starts processes")
def test_all_processes_get_the_very_same_numbers(on_processes):
    """Bit for bit those of one process, which the tests above compute by hand: of every head, of texts, of fewer samples than
    processes, of none with a target.
    """
    for name in evaluation_worker.CASES:
        alone = on_processes[1, 0][name]
        assert all(repr(found[name]) == repr(alone) for found in on_processes.values()), name
        assert (len(alone) >= 3 and alone["num_targets"] > 0) or name == "no targets"
