"""Compiled layers: the same update as the plain model, and no compilation for every window."""

import copy
import functools
import shutil

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from torch._dynamo.utils import counters

import hf_ga

MODELS = ["GPT-2", pytest.param("BERT", marks=pytest.mark.slow("long"))]
LAYERS = {"GPT-2": lambda model: model.transformer.h, "BERT": lambda model: model.bert.encoder.layer}
BUILDERS = {"GPT-2": (h.gpt2, h.token_samples), "BERT": (h.bert_classifier, h.class_samples)}


@pytest.fixture
def backend(request, monkeypatch):
    """The compiler behind torch's tracing: its own needs a C++ compiler and half a minute; "aot_eager" runs the traced graphs."""
    torch._dynamo.reset()
    counters.clear()
    if request.param == "inductor" and shutil.which("g++") is None:
        pytest.skip("torch's own compiler for CPUs needs g++, which is not here")
    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(plain, backend=request.param))
    yield request.param
    torch._dynamo.reset()


def windows_of(data):
    return hf_ga.WindowLoader(
        data,
        h.pad_right,
        accelerator=Accelerator(cpu=True),
        per_device_batch_size=3,
        global_batch_size=8,
        lengths=[len(s["input_ids"]) for s in data],
    )


def train(model, data, rule, wrong=1.0):
    """Weights after an epoch; `wrong` scales what the control learns from."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * wrong)
    shapes = set()
    for window in windows_of(data):
        shapes |= {m.batch["input_ids"].shape for m in window.micro_batches}
        hf_ga.train_step(Accelerator(cpu=True), model, optimizer, window, targets=rule)
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]), shapes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's tracing looks at it
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow("long"))], indirect=True)
@pytest.mark.parametrize("name", MODELS)
def test_the_update_is_the_same_and_compiled_a_bounded_number_of_times(name, backend):
    build, make_samples = BUILDERS[name]
    model, data = build(), make_samples(48)
    plain = copy.deepcopy(model)
    rule, others_rule = (hf_ga.prove_targets(m, data, h.pad_right) for m in (model, plain))
    start = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    for layer in LAYERS[name](model):
        layer.compile(dynamic=True)
    compiled, shapes = train(model, data, rule)
    first = counters["stats"]["unique_graphs"]
    expected, _ = train(plain, data, others_rule)
    moved = (expected - start).norm()
    assert (compiled - expected).norm() < 1e-5 * moved
    control, _ = train(copy.deepcopy(build()), data, others_rule, wrong=1.001)
    assert (control - expected).norm() > 1e-4 * moved, "a thousandth more would be seen"
    assert 1 <= first <= 4 < len(shapes), "one for all lengths and layers, besides those of a single sample or position"
    assert not counters["graph_break"]
    train(model, data, rule)
    assert counters["stats"]["unique_graphs"] == first, "another epoch compiles nothing"


def test_a_compiled_model_with_dropout_is_refused():
    model, data = h.gpt2(dropout=0.1), h.token_samples(12)
    rule, window = hf_ga.prove_targets(model, data, h.pad_right), next(iter(windows_of(data)))
    model.transformer.h[0].compile()
    with pytest.raises(hf_ga.ConfigError, match="compiled and draws dropout"):
        hf_ga.backward_window(Accelerator(cpu=True), model, window, targets=rule)
