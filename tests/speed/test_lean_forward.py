"""Forwards of a window are the model's own function with less work: against the formula as
transformers writes it out.
"""

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from transformers.activations import NewGELUActivation
from tried import later, tried
from windows import one_window, window_gradient

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.speed.lean_forward import LeanForward
from hf_ga.speed.speed_up import acting

NO_CALL = None  # these speed-ups do not look at it


def attached(model):
    speed_up = LeanForward()
    speed_up.attach(model, KeyedDraws())
    return speed_up


def value_and_gradient(activation, x):
    x = x.clone().requires_grad_()
    out = activation(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    return out.detach(), gradient


def test_the_activation_is_the_same_function():
    """In float64, far into both tails; the other GELU, by the error function, is told from it."""
    x = torch.linspace(-30, 30, 10_001, dtype=torch.float64)
    written_out = value_and_gradient(NewGELUActivation(), x)
    with acting([attached(torch.nn.Linear(1, 1))], NO_CALL):
        fused = value_and_gradient(NewGELUActivation(), x)
    for ours, theirs, other in zip(fused, written_out, value_and_gradient(F.gelu, x), strict=True):
        assert (ours - theirs).abs().max() < 1e-12
        assert (other - theirs).abs().max() > 1e-4


def test_no_cache_inside_and_nothing_left_behind():
    model = h.gpt2()
    original = NewGELUActivation.forward
    batch = {k: v for k, v in h.pad_right(h.token_samples(2)).items() if k != "labels"}
    assert model.config.use_cache and model(**batch).past_key_values is not None, (
        "control: its own forward keeps one"
    )
    with pytest.raises(KeyError), acting([attached(model)], NO_CALL):
        assert model(**batch).past_key_values is None
        assert NewGELUActivation.forward is not original
        raise KeyError
    assert model.config.use_cache
    assert NewGELUActivation.forward is original
    model.config.use_cache = False
    with acting([attached(model)], NO_CALL):
        pass
    assert not model.config.use_cache


def test_a_window_has_the_same_gradient_and_keeps_less():
    """Of what forwards keep for the backward pass: bytes."""
    found = []
    for speed_ups in ([LeanForward()], []):
        model = h.gpt2(dropout=0.1)
        samples = h.token_samples(8)
        kept = []
        assert tried(model, samples, speed_ups=speed_ups).used == speed_ups
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t.nbytes) or t, lambda t: t
        ):
            gradients, _ = window_gradient(model, later(one_window(samples, 3)))
        found.append((gradients, sum(kept)))
    assert 0 < h.relative_error(found[0][0], found[1][0]) < 1e-6, (
        "another rounding, or nothing was replaced"
    )
    assert found[0][1] < 0.9 * found[1][1]
