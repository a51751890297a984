"""Forwards of a window are the model's own function with less work: against the formula as transformers writes it out."""

import contextlib
import inspect

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import pytorch_utils
from transformers.activations import NewGELUActivation

import hf_ga
from hf_ga.speed.lean_forward import lean_forwards


def value_and_gradient(activation, x):
    x = x.clone().requires_grad_()
    out = activation(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    return out.detach(), gradient


def test_the_activation_is_the_same_function():
    """In float64, far into both tails; the other GELU, by the error function, is told from it."""
    x = torch.linspace(-30, 30, 10_001, dtype=torch.float64)
    written_out = value_and_gradient(NewGELUActivation(), x)
    with lean_forwards(torch.nn.Linear(1, 1)):
        fused = value_and_gradient(NewGELUActivation(), x)
    for ours, theirs, other in zip(fused, written_out, value_and_gradient(F.gelu, x), strict=True):
        assert (ours - theirs).abs().max() < 1e-12
        assert (other - theirs).abs().max() > 1e-4


def test_no_cache_inside_and_nothing_left_behind():
    model, original = h.gpt2(), NewGELUActivation.forward
    batch = {k: v for k, v in h.pad_right(h.token_samples(2)).items() if k != "labels"}
    assert model.config.use_cache and model(**batch).past_key_values is not None, "control: its own forward keeps one"
    with pytest.raises(KeyError), lean_forwards(model):
        assert model(**batch).past_key_values is None and NewGELUActivation.forward is not original
        raise KeyError
    assert model.config.use_cache and NewGELUActivation.forward is original
    model.config.use_cache = False
    with lean_forwards(model):
        pass
    assert not model.config.use_cache


def window_gradients(monkeypatch, *, lean):
    """Gradients of a window, and the bytes that its forwards kept for the backward pass."""
    if not lean:
        monkeypatch.setattr("hf_ga.training.lean_forwards", lambda model: contextlib.nullcontext())
    model, kept = h.gpt2(dropout=0.1), []
    loader = hf_ga.WindowLoader(
        h.token_samples(8), h.pad_right, accelerator=Accelerator(cpu=True), per_device_batch_size=3, global_batch_size=8
    )
    window = next(iter(loader))
    hf_ga.backward_window(Accelerator(cpu=True), model, window)
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        hf_ga.backward_window(Accelerator(cpu=True), model, window)
    return h.gradients(model), sum(kept)


def test_a_window_has_the_same_gradient_and_keeps_less(monkeypatch):
    ours, kept = window_gradients(monkeypatch, lean=True)
    theirs, kept_by_own = window_gradients(monkeypatch, lean=False)
    assert 0 < h.relative_error(ours, theirs) < 1e-6, "another rounding, or nothing was replaced"
    assert kept < 0.9 * kept_by_own


@pytest.mark.parametrize("chunk_size", [0, 2])
def test_feed_forwards_look_at_no_signature_unless_cut(chunk_size, monkeypatch):
    model, looks = h.bert_classifier(), []
    for layer in model.bert.encoder.layer:
        layer.chunk_size_feed_forward = chunk_size
    batch = {"input_ids": torch.arange(2, 10).view(2, 4)}
    monkeypatch.setattr(pytorch_utils.inspect, "signature", lambda f, look=inspect.signature: looks.append(f) or look(f))

    def looks_in_layers():
        looks.clear()
        logits = model(**batch).logits
        return logits, sum(getattr(f, "__name__", "") == "feed_forward_chunk" for f in looks)

    expected, in_own_forward = looks_in_layers()
    with lean_forwards(model):
        logits, found = looks_in_layers()
    assert torch.equal(logits, expected)
    assert in_own_forward == len(model.bert.encoder.layer) and found == (in_own_forward if chunk_size else 0)
    assert looks_in_layers()[1] == in_own_forward, "nothing is left behind"
