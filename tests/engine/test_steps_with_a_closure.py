"""Optimizers that cannot step with the gradient of a window are refused before any work."""

import copy

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from steps import train_step
from windows import one_window

import hf_ga
from hf_ga.model.precision import check_step


class OfMyOwn(torch.optim.SGD):
    """Calls its closure twice, as sharpness-aware minimisation does."""

    def step(self, closure):
        closure()
        return super().step(closure)


REFUSED = {
    torch.optim.LBFGS: "LBFGS computes the loss several times .* such as AdamW",
    OfMyOwn: "OfMyOwn computes the loss several times",
    torch.optim.SparseAdam: "SparseAdam needs sparse gradients",
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("prepared", [False, True])
def test_they_are_refused_before_any_work(kind, prepared):
    model = h.gpt2()
    before = copy.deepcopy(model.state_dict())
    accelerator = Accelerator()
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(hf_ga.ConfigError, match=REFUSED[kind]):
        hf_ga.prepare(accelerator, model, optimizer)
    if prepared:
        optimizer = accelerator.prepare(optimizer)
    window = one_window(h.token_samples(4), 2)
    with pytest.raises(hf_ga.ConfigError, match=REFUSED[kind]):
        train_step(accelerator, model, optimizer, window)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_closure_that_may_be_left_out_is_accepted(kind):
    model = torch.nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # replaces the step of this object
    check_step(optimizer)
    check_step(Accelerator().prepare(optimizer))
