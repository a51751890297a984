"""Compiled layers: the same update as the plain model, and no compilation for every window."""

import copy
import functools
import gc
import weakref

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from steps import backward_window, train_step
from torch._dynamo import trace_rules
from torch._dynamo.utils import counters
from windows import one_window, window_gradient

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


def train(model, data, wrong=1.0):
    """Weights after an epoch; `wrong` scales what the control learns from."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * wrong)
    shapes = set()
    for window in windows_of(data):
        shapes |= {m.batch["input_ids"].shape for m in window.micro_batches}
        train_step(Accelerator(cpu=True), model, optimizer, window)
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]), shapes


@pytest.mark.slow("compiles layers")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's tracing looks at it
def test_the_update_is_the_same_and_compiled_a_bounded_number_of_times():
    model = h.gpt2()
    data = h.token_samples(32)
    plain = copy.deepcopy(model)
    start = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    for layer in model.transformer.h:
        layer.compile(dynamic=True)
    compiled, shapes = train(model, data)
    first = counters["stats"]["unique_graphs"]
    expected, _ = train(plain, data)
    moved = (expected - start).norm()
    assert (compiled - expected).norm() < 1e-5 * moved
    control, _ = train(h.gpt2(), data, wrong=1.001)
    assert (control - expected).norm() > 1e-4 * moved, "a thousandth more would be seen"
    assert 1 <= first <= 4 < len(shapes), (
        "one for all lengths and layers, besides those of a single sample or position"
    )
    assert not counters["graph_break"]
    train(model, data)
    assert counters["stats"]["unique_graphs"] == first, "another epoch compiles nothing"


def gradient(model, data):
    model.zero_grad()
    backward_window(Accelerator(cpu=True), model, next(iter(windows_of(data))))
    return h.gradients(model)


def compile_forward(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)


def compile_in_place(model, backend):
    model.compile(backend=backend)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("how", "dropout"), [(compile_in_place, 0.1), (compile_forward, 0.0)])
def test_a_model_that_was_compiled_before_its_proof(how, dropout):
    """It is tested as written, and trains compiled."""
    data = h.token_samples(12)
    model = tagger(dropout)
    how(model, "eager")
    expected = gradient(tagger(dropout), data)
    assert h.relative_error(gradient(model, data), expected) < 1e-6
    assert counters["stats"]["unique_graphs"], "the step ran compiled"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_wrappers_of_torch_compile_are_refused_by_name(dropout):
    data = h.token_samples(12)
    wrapped = torch.compile(tagger(dropout), backend="eager")
    said = r"the model is wrapped .* compile it in place \(hf_ga\.compile_layers"
    with pytest.raises(hf_ga.ConfigError, match=said):
        gradient(wrapped, data)
    with pytest.raises(hf_ga.ConfigError, match=said):
        hf_ga.backward(wrapped, h.pad_right(data), micro_batch_size=4)
    assert not counters["stats"]["unique_graphs"], "before any work"
    model = h.gpt2(dropout=dropout)
    model.transformer.h[1] = torch.compile(model.transformer.h[1], backend="eager")
    with pytest.raises(hf_ga.ConfigError, match=r"transformer\.h\.1 is wrapped by torch\.compile"):
        gradient(model, data)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning",
)
@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("inductor", marks=pytest.mark.slow("compiles C++"))],
)
def test_a_compiled_function_in_the_model_draws_keyed_dropout(backend):
    """It is compiled anew, in parts, or not at all."""

    @torch.compile(backend=backend)
    def dropped(x, p):
        return torch.nn.functional.dropout(x * 2, p) / 2

    class Dropped(torch.nn.Module):
        def forward(self, x):
            return dropped(x, 0.2)

    data = h.token_samples(12)
    plain = tagger(0.2)
    expected = gradient(plain, data)
    model = copy.deepcopy(plain)
    model.dropout = Dropped()
    with torch.no_grad():  # compiled before, with dropout of torch's own
        inputs = h.pad_right(data[:2])
        model(inputs["input_ids"], inputs["labels"])
    assert h.relative_error(gradient(model, data), expected) < 1e-6
    native = copy.deepcopy(plain)
    torch.manual_seed(1)
    inputs = h.pad_right(data[:8])
    native(inputs["input_ids"], inputs["labels"]).backward()
    assert h.relative_error(h.gradients(native), expected) > 1e-2


TABLES = (
    torch.overrides.get_testing_overrides,
    torch.overrides._get_overridable_functions,
    trace_rules.get_torch_obj_rule_map,
)


def test_torch_keeps_tables_of_its_functions():
    """torch.compile makes them when it needs them first, and keeps them: they need names, and the
    functions of a window must not keep its model.
    """
    data = h.token_samples(12)
    model = tagger(0.2)
    window_gradient(model, one_window(data, 4))
    draws = (
        vars(model)["_hf_ga_train_step"]
        .get(model, None, None, None, allow_split_dependent_randomness=False)
        .engine.draws
    )
    for table in TABLES:
        table.cache_clear()
    with draws.scope():
        for table in TABLES:
            assert table()
        assert torch.nn.functional.dropout.__name__ == "dropout"
    freed = weakref.ref(model)
    del model, draws
    gc.collect()
    assert freed() is None
    for table in TABLES:
        table.cache_clear()


@h.seeded
def tagger(dropout):
    return Tagger(dropout)


class Tagger(torch.nn.Module):
    """Small, so that it compiles in a moment."""

    def __init__(self, dropout):
        super().__init__()
        self.embedding = torch.nn.Embedding(h.VOCABULARY, 8)
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(8, h.VOCABULARY)

    def forward(self, input_ids, labels):
        logits = self.head(self.dropout(self.embedding(input_ids)).tanh())
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=h.IGNORED
        )
