"""Keyed dropout in compiled layers: the masks of the uncompiled model, and few graphs."""

import copy
import gc
import weakref
from functools import partial

import helpers as h
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from steps import backward_window
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from tried import keyed

import hf_ga

ROUNDING = 5e-6  # of float32: compiled and uncompiled code add in other orders
MOST_GRAPHS = (
    30  # of a stack of layers: each dropout ends one; with padding, without, single samples
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's tracing looks at it


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# -- small layers that draw in every way


class Layer(nn.Module):
    """Draws by modules, by functions (twice in one call), in attention, and for whole samples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(h.WIDTH, h.WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Dropout(0.1)

    def forward(self, x):
        if x.shape[1] == 13:  # an error in compiled code
            raise ValueError("thirteen")
        heads = self.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
        p = 0.1 if self.training else 0.0
        attended = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p, is_causal=True)
        x = x + self.dropout(attended.transpose(1, 2).flatten(2))
        x = F.dropout(x.tanh(), 0.1, self.training)
        return self.last(F.dropout(x * 2, 0.1, self.training))


class Layers(nn.Module):
    """Two layers in a list, one more that no `compile_layers` finds."""

    def __init__(self, run=lambda layer, x: layer(x)):
        super().__init__()
        self.embedding = nn.Embedding(h.VOCABULARY, h.WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Sequential(Layer(), nn.Linear(h.WIDTH, h.VOCABULARY))
        self.run = run

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for layer in [*self.layers, self.head[0]]:
            x = self.run(layer, x)
        logits = self.head[1](x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=h.IGNORED)


layers = h.seeded(Layers)


def windows_of(data, seed=0, size=4):
    return hf_ga.WindowLoader(
        data,
        h.pad_right,
        accelerator=Accelerator(cpu=True),
        per_device_batch_size=size,
        global_batch_size=8,
        lengths=[len(sample["input_ids"]) for sample in data],
        seed=seed,
    )


def gradients_of(model, data, **options):
    """Of each window, weights unchanged."""
    found = []
    for window in windows_of(data, **options):
        model.zero_grad()
        backward_window(Accelerator(cpu=True), model, window)
        found.append(h.gradients(model))
    return found


def compiled(model, backend="eager"):
    """By default as traced by torch.compile: what "aot_eager" and "inductor" make of it takes
    longer.
    """
    hf_ga.compile_layers(model, backend=backend)
    return model


def assert_same(found, expected):
    errors = [h.relative_error(*pair) for pair in zip(found, expected, strict=True)]
    assert max(errors) < ROUNDING, errors


@pytest.mark.slow("compiles layers")
def test_the_gradients_of_ragged_windows_and_the_graphs():
    data = h.plain_samples(24)
    expected = gradients_of(layers(), data)
    model = compiled(layers(), "aot_eager")
    assert_same(gradients_of(model, data), expected)
    first = counters["stats"]["unique_graphs"]
    assert 1 <= first <= MOST_GRAPHS
    assert_same(gradients_of(model, data), expected)
    assert counters["stats"]["unique_graphs"] == first, "another epoch compiles nothing"
    other_seed = gradients_of(model, data, seed=1)[0]
    window = next(iter(windows_of(data, seed=1)))
    assert h.relative_error(other_seed, full_gradient(layers(), data, window, seed=0)) > 1e-2
    assert h.relative_error(other_seed, full_gradient(layers(), data, window, seed=1)) < ROUNDING


def full_gradient(model, data, window, seed, dtype=torch.float64):
    """The whole window as one batch of an uncompiled model, with dropout keyed by the seed."""
    model = model.to(dtype)
    model.zero_grad()
    batch = {}
    for micro_batch in window.split([np.arange(window.num_samples)]).micro_batches:
        batch = micro_batch.batch
    with keyed(seed, window.epoch, window.request.positions, window.index):
        h.mean_loss(model, batch).backward()
    return h.gradients(model)


def test_layers_that_were_compiled_with_dropout_of_torch():
    """Before and after the window they draw torch's own, in the window keyed masks."""
    data = h.plain_samples(8)
    batch = h.pad_right(data[:4])
    expected = gradients_of(layers(), data)
    model = compiled(layers())
    model(**batch).backward()
    assert_same(gradients_of(model, data), expected)
    native = []
    for _ in range(2):
        model.zero_grad()
        model(**batch).backward()
        native.append(h.gradients(model))
    assert h.relative_error(*native) > 1e-2
    model.eval()
    assert torch.equal(model(**batch), layers().eval()(**batch))


@pytest.mark.parametrize(
    "use_reentrant", [False, pytest.param(True, marks=pytest.mark.slow("compiles layers"))]
)
def test_checkpointing_around_compiled_layers(use_reentrant):
    """The layer that is not compiled runs again, too, after forwards that end early."""
    data = h.plain_samples(8)
    expected = gradients_of(layers(), data)
    again = partial(checkpoint, use_reentrant=use_reentrant)
    assert_same(gradients_of(compiled(layers(again)), data), expected)
    assert counters["stats"]["unique_graphs"] >= 1


def test_a_whole_compiled_model():
    data = h.plain_samples(8)
    expected = gradients_of(layers(), data)
    model = layers()
    model.compile(backend="eager", dynamic=True)
    assert_same(gradients_of(model, data), expected)
    first = counters["stats"]["unique_graphs"]
    assert first >= 1
    assert_same(gradients_of(model, data), expected)
    assert counters["stats"]["unique_graphs"] == first, "another epoch compiles nothing"


def test_uncompiled_forwards_of_compiled_layers():
    """A trial compiles nothing and draw the same masks."""
    data = h.plain_samples(8)
    expected = gradients_of(layers(), data)
    model = compiled(layers())
    with torch.compiler.set_stance("force_eager"):
        assert_same(gradients_of(model, data), expected)
    assert not counters["stats"]["unique_graphs"]


def test_an_error_in_a_compiled_layer_leaves_nothing_behind():
    data = h.plain_samples(8)
    expected = gradients_of(layers(), data)
    model = compiled(layers())
    long = {"input_ids": [1] * 13, "labels": [1] * 13}
    before = h.everything(model)
    with pytest.raises(ValueError, match="thirteen"), keyed(0, 0, np.arange(2)):
        model(**h.pad_right([long, long]))
    after = h.everything(model)
    assert {**before, "random": None} == {**after, "random": None}
    assert_same(gradients_of(model, data), expected)


@pytest.mark.slow("compiles layers")
def test_a_trained_model_is_freed():
    model = compiled(layers())
    gradients_of(model, h.plain_samples(8))
    freed = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert freed() is None


@pytest.mark.slow("compiles layers")
def test_a_layer_that_one_forward_calls_twice():
    """Its calls have masks of their own."""
    data = h.plain_samples(8)
    expected = gradients_of(layers(twice), data)
    assert_same(gradients_of(compiled(layers(twice)), data), expected)
    assert counters["stats"]["unique_graphs"] >= 1


def twice(layer, x):
    return layer(layer(x))


class CheckpointedInside(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_checkpointing_within_compiled_layers():
    """torch runs them uncompiled, with the same masks in both passes."""
    data = h.plain_samples(8)
    expected = gradients_of(layers(), data)
    model = layers()
    for layer in model.layers:
        layer.__class__ = CheckpointedInside
    assert_same(gradients_of(compiled(model), data), expected)


def test_a_model_without_repeated_layers_is_refused():
    with pytest.raises(hf_ga.ConfigError, match="PlainTagger has no list of equal layers"):
        hf_ga.compile_layers(h.plain_tagger())


# -- models of transformers


MODELS = {
    "gpt2": partial(h.gpt2, 0.1, num_hidden_layers=3),
    "bert": partial(h.bert_masked_lm, 0.1, num_hidden_layers=3),
    "llama": partial(h.llama, 0.1),
    "small layers": layers,
}


def test_what_the_compiler_draws_is_its_own():
    """It traces patterns with dropout when it compiles first, within the window."""

    def drawing(graph, example_inputs):
        torch.randperm(len(example_inputs))
        return graph.forward

    data = h.plain_samples(8)
    model = layers()
    hf_ga.compile_layers(model, backend=drawing)
    assert_same(gradients_of(model, data), gradients_of(layers(), data))
    assert counters["stats"]["unique_graphs"] >= 1


@pytest.mark.slow("compiles C++")
@pytest.mark.parametrize(
    ("name", "backend", "num_windows"),
    [
        ("gpt2", "aot_eager", 21),
        ("bert", "aot_eager", 11),
        ("llama", "aot_eager", 11),
        ("small layers", "inductor", 11),
    ],
)
def test_many_windows(name, backend, num_windows):
    """Every tenth one is compared with one float64 batch, all with the uncompiled run."""
    build = MODELS[name]
    make_samples = h.plain_samples if name == "small layers" else h.token_samples
    data = make_samples(8 * num_windows)
    model = compiled(build(), backend)
    plain = build()
    found = gradients_of(model, data)
    first = counters["stats"]["unique_graphs"]
    assert 1 <= first <= MOST_GRAPHS
    assert_same(found, gradients_of(plain, data))
    for index, window in enumerate(windows_of(data)):
        if index % 10 == 0:
            full, exact, other = (
                full_gradient(copy.deepcopy(plain), data, window, seed, dtype)
                for seed, dtype in ((0, torch.float32), (0, torch.float64), (1, torch.float64))
            )
            h.assert_promise_1(found[index], full, exact)
            assert h.relative_error(found[index], other) > 1e-2
    assert len(found) == num_windows
    gradients_of(model, data[:40])
    assert counters["stats"]["unique_graphs"] == first, "later windows compile nothing"
