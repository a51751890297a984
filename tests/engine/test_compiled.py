"""Compiled layers draw the keyed numbers of eager ones: no graph keeps those that it was traced
with. A model that is compiled as a whole is refused.
"""

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import TorchDynamoPlugin
from documented_loop import reset_states
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hf_ga
from hf_ga.draws.dropout.masks import sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import LossNotAdditive

pytestmark = pytest.mark.filterwarnings(  # torch.compile reads the attribute
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
WIDTHS = [5, 9, 5, 12]  # of the micro-batches


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    torch._dynamo.reset()
    reset_states()


def gradient(model, loss_of):
    """Of micro-batches of three samples in different widths, whose draws are keyed."""
    draws = KeyedDraws()
    for index, width in enumerate(WIDTHS):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(h.VOCABULARY, (3, width), generator=generator)
        with draws.scope():
            draws.begin(sample_keys(0, 0, range(3 * index, 3 * index + 3)), window_key(0, 0, 0))
            loss_of(model, ids).backward()
    return h.gradients(model)


def check(build, compile_it, loss_of):
    expected = gradient(build(0.1), loss_of)
    model = build(0.1)
    compile_it(model)
    assert h.relative_error(gradient(model, loss_of), expected) < 1e-6
    without_dropout = gradient(build(0.0), loss_of)
    assert h.relative_error(without_dropout, expected) > 1e-2  # the control


@h.seeded
def small(dropout):
    return nn.Sequential(nn.Embedding(h.VOCABULARY, 8), nn.Dropout(dropout), nn.Linear(8, 8))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_draws_what_an_eager_one_draws(backend):
    check(small, lambda m: m.compile(backend=backend), lambda m, ids: m(ids).square().mean())


@pytest.mark.slow("compiles the layers of a transformer")
def test_a_teacher_in_evaluation_mode_may_be_one_graph():
    teacher = small(0.1).eval()
    ids = torch.arange(6).view(2, 3)
    expected = teacher(ids)
    teacher.compile(backend="eager", fullgraph=True)
    with KeyedDraws().scope():
        assert torch.equal(teacher(ids), expected)


def test_compiled_layers_draw_what_eager_ones_draw():
    """With "eager": rows/test_compiled_dropout.py."""
    check(
        h.gpt2,
        lambda model: hf_ga.compile_layers(model, backend="aot_eager"),
        lambda model, ids: model(input_ids=ids, labels=ids).loss,
    )


def train(prepare, build=h.gpt2, make_samples=h.token_samples, **options):
    """Two windows of two micro-batches in `hf_ga.Accelerator`."""
    reset_states()
    accelerator = hf_ga.Accelerator(gradient_accumulation_steps=2, **options)
    model = prepare(build(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make_samples(16), 4, collate_fn=h.pad_right)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    gradients = []
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            accelerator.backward(getattr(outputs, "loss", outputs))
            if accelerator.sync_gradients:
                of_window = h.gradients(model).items()
                gradients.append({name.replace("_orig_mod.", ""): g for name, g in of_window})
            optimizer.step()
            optimizer.zero_grad()
    return gradients


def compiled_layers(model):
    hf_ga.compile_layers(model, backend="aot_eager")
    return model


@pytest.mark.slow("compiles layers for several shapes")
def test_a_loop_with_compiled_layers_has_the_gradients_of_an_eager_one():
    expected = train(lambda model: model)
    regions = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    for found in (train(compiled_layers), train(lambda model: model, dynamo_plugin=regions)):
        for ours, eager in zip(found, expected, strict=True):
            assert h.relative_error(ours, eager) < 1e-6


class TwoHeads(nn.Module):
    """Scores and a value of each token."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.scores = nn.Linear(8, 3)
        self.value = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x)
        return self.scores(hidden), self.value(hidden)


def gradients_of_two_means(batch_size, *, is_compiled):
    """Of a mean over labels and one over all tokens, in a window of 16 samples of two tokens: two
    buffers.
    """
    reset_states()
    torch.manual_seed(0)
    model = TwoHeads()
    if is_compiled:
        model.compile(backend="aot_eager")
    accelerator = hf_ga.Accelerator(cpu=True, gradient_accumulation_steps=16 // batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.arange(32).view(16, 2) % 3
    labels[::3] = -100
    loader = DataLoader(TensorDataset(torch.randn(16, 2, 3), labels), batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            scores, values = model(x)
            loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
            accelerator.backward(loss + values.square().mean())
    return h.gradients(model)


@pytest.mark.slow("compiles a whole model")
def test_the_backward_of_a_compiled_model_runs_once_for_each_mean():
    """torch would let it write into what its forward saved, and refuse to run it twice."""
    full = gradients_of_two_means(16, is_compiled=False)
    for batch_size in (8, 4):
        split = gradients_of_two_means(batch_size, is_compiled=True)
        assert h.relative_error(split, full) < 1e-6


def compiled_in_place(model):
    model.compile(backend="aot_eager")
    return model


@pytest.mark.slow("compiles a whole model")
def test_a_loss_in_a_compiled_graph_is_refused():
    small_model = (h.plain_tagger, h.plain_samples)
    with pytest.raises(LossNotAdditive, match="Compile the layers"):
        train(compiled_in_place, *small_model)
    with pytest.raises(LossNotAdditive, match="Compile the layers"):
        train(lambda model: model, *small_model, dynamo_backend="aot_eager")
