"""Compiled layers: the same update as the plain model, and no compilation for every window."""

import copy
import functools

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from steps import backward_window, train_step
from torch._dynamo.utils import counters

import hf_ga


@pytest.fixture(autouse=True)
def _traced_graphs_only(monkeypatch):
    """torch's own compiler would need a C++ compiler and half a minute; "aot_eager" runs the traced
    graphs.
    """
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        functools.partialmethod(torch.nn.Module.compile, backend="aot_eager"),
    )
    yield
    torch._dynamo.reset()


def windows_of(data):
    sizes = {
        "per_device_batch_size": 3,
        "global_batch_size": 8,
        "lengths": [len(s["input_ids"]) for s in data],
    }
    return hf_ga.WindowLoader(data, h.pad_right, accelerator=Accelerator(cpu=True), **sizes)


def train(model, data, rule, wrong=1.0):
    """Weights after an epoch; `wrong` scales what the control learns from."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * wrong)
    shapes = set()
    for window in windows_of(data):
        shapes |= {m.batch["input_ids"].shape for m in window.micro_batches}
        train_step(Accelerator(cpu=True), model, optimizer, window, rule=rule)
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]), shapes


@pytest.mark.slow("compiles layers")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's tracing looks at it
def test_the_update_is_the_same_and_compiled_a_bounded_number_of_times():
    model, data = h.gpt2(), h.token_samples(32)
    plain = copy.deepcopy(model)
    rule, others_rule = (hf_ga.prove_targets(m, data, h.pad_right) for m in (model, plain))
    start = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    for layer in model.transformer.h:
        layer.compile(dynamic=True)
    compiled, shapes = train(model, data, rule)
    first = counters["stats"]["unique_graphs"]
    expected, _ = train(plain, data, others_rule)
    moved = (expected - start).norm()
    assert (compiled - expected).norm() < 1e-5 * moved
    control, _ = train(h.gpt2(), data, others_rule, wrong=1.001)
    assert (control - expected).norm() > 1e-4 * moved, "a thousandth more would be seen"
    assert 1 <= first <= 4 < len(shapes), (
        "one for all lengths and layers, besides those of a single sample or position"
    )
    assert not counters["graph_break"]
    train(model, data, rule)
    assert counters["stats"]["unique_graphs"] == first, "another epoch compiles nothing"


def test_a_compiled_model_with_dropout_is_refused():
    model, data = h.gpt2(dropout=0.1), h.token_samples(12)
    rule, window = hf_ga.prove_targets(model, data, h.pad_right), next(iter(windows_of(data)))
    model.transformer.h[0].compile()
    with pytest.raises(hf_ga.ConfigError, match="compiled and draws dropout"):
        backward_window(Accelerator(cpu=True), model, window, rule=rule)
