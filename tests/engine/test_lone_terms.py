"""A term of the loss that one process leaves out is warned of there."""

import logging

import pytest
import torch
import torch.nn.functional as F
from forked import on_two_ranks, outcome, without_errors
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hf_ga
from hf_ga.engine.checks.lone_terms import NUM_WINDOWS, LoneTerms
from hf_ga.engine.sums.agreement import present_terms


def test_a_term_that_is_missing_for_long_is_warned_of_once(caplog):
    terms = LoneTerms()
    for _ in range(NUM_WINDOWS - 1):
        terms.note(["a"], ["a", "b"])
    terms.note(["a", "b"], ["a", "b"])  # it was missing by chance
    for _ in range(NUM_WINDOWS - 1):
        terms.note(["a"], ["a", "b"])
        terms.note([], ["a", "b"])  # a process without samples
    assert not caplog.records
    for _ in range(3):
        terms.note(["a"], ["a", "b"])
    (record,) = caplog.records
    assert "this process had no part of a term" in record.message


def test_terms_that_any_process_has():
    assert present_terms(["a", "b"], [2.0, 1, 1, 0, 0, 0, 9, 9, 9]) == ["a"]


def second_mean(out, y):
    """Over targets, of which a rank may have none."""
    return F.cross_entropy(-out, y)


def mean_of_all(out, y):
    return out.pow(2).mean()


def warnings_of(ranks: tuple[int, ...], term=second_mean):
    """Train on two ranks, of which some add a second term; return the warnings of this one."""

    def work() -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("hf_ga.engine.checks.lone_terms").addHandler(handler)
        torch.manual_seed(0)
        accelerator = hf_ga.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(4, 3)
        number = 4 * (NUM_WINDOWS + 1)
        data = TensorDataset(torch.randn(number, 4), torch.arange(number) % 3)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 1)
        )
        for x, y in loader:
            with accelerator.accumulate(model):
                out = model(x)
                loss = F.cross_entropy(out, y)
                if accelerator.process_index in ranks:
                    loss = loss + term(out, y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return said

    return work


@pytest.mark.parametrize(("ranks", "counts"), [((0,), [0, 1]), ((1,), [1, 0]), ((0, 1), [0, 0])])
def test_a_term_of_one_rank_is_warned_of_on_the_other(ranks, counts):
    assert [len(said) for said in without_errors(on_two_ranks(warnings_of(ranks)))] == counts


def test_a_mean_over_the_samples_of_one_rank_only_is_refused():
    said = on_two_ranks(lambda: outcome(warnings_of((0,), mean_of_all)))
    assert all("some micro-batches lack this sum" in str(text) for text in said), said
