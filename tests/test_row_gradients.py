"""Embeddings whose gradients are the rows that were used: the same gradient, in tables at the end, and only where nobody minds."""

import contextlib
from types import SimpleNamespace

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils import parametrize

import hf_ga
from hf_ga.exact import gradients
from hf_ga.speed.row_gradients import add_rows, row_gradients

CPU = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
PADDING = 1
WINDOWS = {
    "bert": (h.bert_classifier, h.class_samples, None),
    "tied": (h.gpt2, h.token_samples, None),
    "routed": (lambda: h.mixtral(router_coefficient=0.1), h.token_samples, None),
    "own loss": (h.plain_tagger, h.weighted_samples, h.weighted_token_loss),
}


@pytest.fixture
def layouts(monkeypatch):
    """The layouts that gradients of the embeddings' own parameters had behind each backward."""
    seen = []

    def watched(tables):
        seen.append([own.grad.layout for _, own in tables])
        add_rows(tables)

    monkeypatch.setattr(gradients, "add_rows", watched)
    return seen


def table(**options):
    torch.manual_seed(0)
    return nn.Embedding(50, 6, dtype=torch.float64, **options)


def added(embedding, context):
    """The gradient of four batches of ids, some of which occur more than once in a batch; each use has a weight of its own."""
    torch.manual_seed(1)
    with context as tables:
        for _ in range(4):
            vectors = embedding(torch.randint(0, 9, (3, 7)))
            (vectors * torch.randn_like(vectors)).sum().backward()
            add_rows(tables)
    return embedding.weight.grad


@pytest.mark.parametrize("options", [{}, {"padding_idx": PADDING}], ids=["plain", "padding"])
def test_rows_are_the_table(options):
    """Against the dense gradient. Control: without `add_rows` the gradient of the embedding's own parameter is no table."""
    embedding, control = table(**options), table(**options)
    weight = embedding.weight
    rows = added(embedding, row_gradients(CPU, embedding))
    assert not rows.is_sparse and not embedding.sparse and embedding.weight is weight
    torch.testing.assert_close(rows, added(table(**options), contextlib.nullcontext([])), rtol=1e-14, atol=1e-14)
    assert bool((rows[PADDING] == 0).all()) == bool(options) and not rows[9:].any() and rows[0].any()
    with row_gradients(CPU, control):
        assert added(control, contextlib.nullcontext([])).is_sparse


def backward_window(name):
    build, samples, loss_fn = WINDOWS[name]
    model = build()
    loader = hf_ga.WindowLoader(
        samples(12), h.pad_right, accelerator=Accelerator(cpu=True), per_device_batch_size=3, global_batch_size=12
    )
    hf_ga.backward_window(Accelerator(cpu=True), model, next(iter(loader)), loss_fn=loss_fn)
    return model


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_give_tables(name, layouts, monkeypatch):
    """Each backward leaves rows, whether a table is an output layer's too or not; nothing of it stays. Control: without."""
    model = backward_window(name)
    rows = h.gradients(model)
    assert all(p.grad is None or p.grad.layout is torch.strided for p in model.parameters())
    assert not any(m.sparse for m in model.modules() if isinstance(m, nn.Embedding))
    tables = sum(isinstance(m, nn.Embedding) for m in model.modules())
    assert layouts == [[torch.sparse_coo] * tables] * 4
    monkeypatch.setattr(gradients, "row_gradients", lambda accelerator, model: contextlib.nullcontext([]))
    assert h.relative_error(rows, h.gradients(backward_window(name))) < 1e-6
    assert layouts[4] == [], "control: no table was asked for rows"


def test_a_tied_table_gets_both_parts():
    """Of the output layer and of the rows that went in: against float64. Control: the first part alone is another gradient."""
    model, batch = backward_window("tied"), h.pad_right(h.token_samples(12))
    truth, full = h.full_batch_gradient(model, batch), h.full_batch_gradient(model, batch, torch.float32)
    h.assert_promise_1(h.gradients(model), full, truth)
    name, inputs = "transformer.wte.weight", model.transformer.wte
    inputs.weight = nn.Parameter(inputs.weight.detach().clone())
    assert h.relative_error({name: h.full_batch_gradient(model, batch)[name]}, {name: truth[name]}) > 0.01


def test_a_table_that_is_also_multiplied():
    """By a function, so that no module tells of it: rows and a whole table in one backward, against the dense way."""
    found = []
    for context in (row_gradients(CPU, embedding := table()), contextlib.nullcontext([])):
        embedding.weight.grad = None
        with context as tables:
            for ids in (torch.tensor([[1, 2, 1]]), torch.tensor([[2, 5]])):
                (embedding(ids) @ embedding.weight.T).square().sum().backward()
                add_rows(tables)
        found.append(embedding.weight.grad)
        assert tables == [] or tables[0][0] is embedding.weight
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)
    assert not found[0].is_sparse and found[0].all(), "the product reaches all rows"


def hooked(embedding):
    embedding.weight.register_hook(lambda gradient: gradient)
    return embedding


def watched(embedding):
    embedding.weight.register_post_accumulate_grad_hook(lambda weight: None)
    return embedding


def computed(embedding):
    parametrize.register_parametrization(embedding, "weight", nn.Identity())
    return embedding


def compiled(embedding):
    embedding.compile()
    return embedding


def wrapped(embedding):
    outer = nn.Module()
    outer.base_layer = embedding
    return outer


@pytest.mark.parametrize(
    "module",
    [
        table(scale_grad_by_freq=True),
        table().requires_grad_(False),
        table().bfloat16(),
        hooked(table()),
        watched(table()),
        computed(table()),
        compiled(table()),
        wrapped(table()),
    ],
    ids=["frequency", "frozen", "bfloat16", "hook", "hook behind", "computed", "compiled", "wrapped"],
)
def test_tables_that_stay_dense(module):
    with row_gradients(CPU, nn.Sequential(module)) as tables:
        assert tables == [] and not any(m.sparse for m in module.modules() if isinstance(m, nn.Embedding))


@pytest.mark.parametrize(
    "accelerator",
    [SimpleNamespace(num_processes=2, device=CPU.device), SimpleNamespace(num_processes=1, device=torch.device("cuda"))],
    ids=["processes", "gpu"],
)
def test_one_process_on_a_cpu_only(accelerator):
    with row_gradients(accelerator, embedding := table()) as tables:
        assert tables == [] and not embedding.sparse
    weight = embedding.weight
    with row_gradients(CPU, embedding) as tables:
        assert tables[0][0] is weight and tables[0][1] is embedding.weight and embedding.sparse, "control"
        assert embedding.weight.data_ptr() == weight.data_ptr(), "no second table"


def test_what_was_asked_for_stays():
    """Somebody's own sparse embedding is left alone, and after an error nothing is left behind."""
    model = nn.ModuleList([table(sparse=True), table()])
    weight = model[1].weight
    with pytest.raises(KeyError), row_gradients(CPU, model) as tables:
        assert len(tables) == 1 and tables[0][0] is weight
        raise KeyError
    assert model[0].sparse and not model[1].sparse and model[1].weight is weight


def test_a_table_of_two_embeddings():
    """Both add their rows to it, each with its own padding. Control: the second one's part is not zero."""
    found = []
    for rows in (True, False):
        first, second = table(padding_idx=PADDING), table()
        second.weight = first.weight
        model, ids = nn.ModuleList([first, second]), torch.tensor([[0, PADDING, 2, 0]])
        with row_gradients(CPU, model) if rows else contextlib.nullcontext([]) as tables:
            assert len(tables) == rows
            for _ in range(2):
                (first(ids) * 2 + second(ids) * 3).sum().backward()
                add_rows(tables)
        assert second.weight is first.weight
        found.append(first.weight.grad)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0][PADDING].tolist() == [6.0] * 6 and found[0][0].tolist() == [20.0] * 6


def test_a_loss_of_all_parameters():
    """A tied table is one parameter to a loss that goes through them. Control: what it would be if the embedding had another."""
    found = []
    for rows in (True, False):
        embedding, output = table(), nn.Linear(6, 50, bias=False, dtype=torch.float64)
        output.weight = embedding.weight
        model, ids = nn.ModuleList([embedding, output]), torch.tensor([[0, 2, 0]])
        with row_gradients(CPU, model) if rows else contextlib.nullcontext([]) as tables:
            penalty = sum(p.square().sum() for p in model.parameters())
            (output(embedding(ids)).square().sum() + penalty).backward()
            add_rows(tables)
        found.append(output.weight.grad)
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(found[0], found[0] + 2 * output.weight)
