"""Fused optimizers make the update of torch's plain loop, and take over its checkpoints."""

import copy

import pytest
import torch

from hf_ga.finetuning.run.optimizers import FUSED, OPTIMIZERS, build_optimizer


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))


def trained(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain(model, name, weight_decay=0.1):
    """The named optimizer as torch's loop over parameters, with the same groups, written down here
    again.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    options = {} if name == "adafactor" else {"foreach": False}
    return OPTIMIZERS[name](groups, lr=1e-2, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_that_of_the_plain_loop(name):
    ours = small_model()
    theirs = small_model()
    optimizer = build_optimizer(ours, name, 1e-2, 0.1)
    assert bool(optimizer.param_groups[0].get("fused")) == (name in FUSED)
    one = trained(ours, optimizer, 5)
    other = trained(theirs, plain(theirs, name), 5)
    assert (one - other).norm() <= 1e-6 * other.norm()
    undecayed = small_model()
    assert (
        trained(undecayed, plain(undecayed, name, 0.0), 5) - other
    ).norm() > 1e-4 * other.norm(), "control"


@pytest.mark.parametrize("earlier", ["plain", "fused"])
@pytest.mark.parametrize("name", FUSED)
def test_a_checkpoint_goes_on_bit_for_bit(name, earlier):
    """Of the fused optimizer, and of the plain loop, which wrote those of earlier versions. The
    control forgets its state.
    """
    straight = small_model()
    optimizer = (
        plain(straight, name) if earlier == "plain" else build_optimizer(straight, name, 1e-2, 0.1)
    )
    trained(straight, optimizer, 3)
    resumed = copy.deepcopy(straight)
    forgetful = copy.deepcopy(straight)
    again, fresh = (build_optimizer(model, name, 1e-2, 0.1) for model in (resumed, forgetful))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = trained(straight, optimizer, 3, seed=1)
    assert torch.equal(trained(resumed, again, 3, seed=1), expected)
    assert not torch.equal(trained(forgetful, fresh, 3, seed=1), expected)
