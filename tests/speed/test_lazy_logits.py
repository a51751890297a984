"""No full logits: loss and gradient are the head's own, only rows with a target reach the layer,
what needs logits gets them.
"""

import copy
from contextlib import nullcontext

import helpers as h
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from heads.one_head import Head, build_head
from peak_memory import peak_bytes
from torch import nn
from tried import later, tried
from windows import one_window, window_gradient

from hf_ga.finetuning.run.losses import WeightedCrossEntropy
from hf_ga.speed import chunked_loss, lazy_logits
from hf_ga.speed.chunked_loss import (
    OutputProjection,
    choose_rows_per_chunk,
    chunked_cross_entropy,
)
from hf_ga.speed.lazy_logits import ChunkedLoss, LazyLogits
from hf_ga.speed.speed_up import acting

NO_CALL = None  # this speed-up does not look at it

HEADS = [  # class, kind, model type: softmax caps, scales, biases inside and outside of the layer, ties, several projections
    ("gpt2", "GPT2LMHeadModel", "causal LM"),
    ("gemma2", "Gemma2ForCausalLM", "causal LM"),
    ("cohere", "CohereForCausalLM", "causal LM"),
    ("bloom", "BloomForCausalLM", "causal LM"),
    ("bert", "BertForMaskedLM", "masked LM"),
    ("electra", "ElectraForMaskedLM", "masked LM"),
    ("xlnet", "XLNetLMHeadModel", "causal LM with all labels"),
    ("t5", "T5ForConditionalGeneration", "seq2seq"),
    ("bart", "BartForConditionalGeneration", "seq2seq"),
]
SAMPLES = h.token_samples(12)


@pytest.fixture
def no_values(monkeypatch):
    """Logits may not be made."""

    def refuse(logits):
        raise AssertionError("the logits were made")

    monkeypatch.setattr(LazyLogits, "materialize", refuse)


def chunked(model, rows=3):
    """The speed-up for a model, without a trial, in chunks of so many rows."""
    speed_up = ChunkedLoss()
    speed_up.attach(model, None)
    speed_up.rows_per_chunk = rows
    return speed_up


def loss_and_gradient(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), h.gradients(model)


@pytest.mark.parametrize(("model_type", "name", "kind"), HEADS, ids=[name for _, name, _ in HEADS])
def test_loss_and_gradient_are_the_heads_own(model_type, name, kind, no_values):
    model, samples, collate = build_head(Head(model_type, name, kind.split(" with")[0]), 0.0)
    batch = {k: v for k, v in collate(samples).items() if isinstance(v, torch.Tensor)}
    labels = batch["labels"][:, 1:] if kind == "causal LM" else batch["labels"]
    loss, plain = loss_and_gradient(model, batch)
    head = chunked(model)
    with acting([head], NO_CALL):
        lazy_loss, lazy = loss_and_gradient(model, batch)
        assert head._num_rows == [int((labels != h.IGNORED).sum())]
    assert lazy_loss == pytest.approx(loss, rel=1e-6)
    assert h.relative_error(lazy, plain) <= 2e-6
    assert "forward" not in vars(head.output_layer), "something was left behind"


@pytest.fixture
def products(monkeypatch):
    """Rows are added to weights here as on a GPU. Returns how many rows each product had."""
    monkeypatch.setattr(chunked_loss, "PADDED_DEVICES", ("cpu",))
    num_rows = []
    linear = F.linear

    def noted(x, weight, bias=None):
        num_rows.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", noted)
    return num_rows


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"class_weights": torch.linspace(0, 2, 70).double()},
        {"logit_ops": [lambda x: 5.0 * torch.tanh(x / 5.0), lambda x: x + torch.arange(70.0)]},
    ],
    ids=lambda options: "-".join(options) or "none",
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_rows_added_for_the_products_change_nothing(has_bias, options, products):
    """In float64, in chunks of 3; all logits are negative, so a logit of 0 would count most."""
    hidden = torch.rand(7, 8).double().requires_grad_()
    weight = (-torch.rand(70, 8).double()).requires_grad_()
    bias = (-torch.rand(70).double()).requires_grad_() if has_bias else None
    target = torch.arange(7)
    logits = hidden @ weight.T + (bias if has_bias else 0)
    for logit_op in options.get("logit_ops", []):
        logits = logit_op(logits)
    smoothing = options.get("label_smoothing", 0.0)
    true = F.cross_entropy(logits, target, options.get("class_weights"), label_smoothing=smoothing)
    head = OutputProjection(weight, bias, torch.float64, **options)
    loss = chunked_cross_entropy(head, hidden, target, 3, mean=True)
    assert products == [128, 128, 128]
    torch.testing.assert_close(loss, true, rtol=1e-13, atol=0)
    trained = [hidden, weight, *([bias] if has_bias else [])]
    ours = torch.autograd.grad(loss, trained)
    for gradient, reference in zip(ours, torch.autograd.grad(true, trained), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-15)
    with torch.no_grad():
        assert chunked_cross_entropy(head, hidden, target, 3, mean=True) == loss


def test_where_no_rows_are_added(monkeypatch):
    """To as many as are needed, and not on a CPU."""
    for num_classes, devices in ((128, ("cpu",)), (70, chunked_loss.PADDED_DEVICES)):
        monkeypatch.setattr(chunked_loss, "PADDED_DEVICES", devices)
        weight = torch.rand(num_classes, 8)
        assert OutputProjection(weight, None, torch.float32).for_products(weight) is weight


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_window_with_added_rows(dtype, products):
    """GPT-2, whose weight is that of the embedding, too; alone and in autocast, whose rounding the
    products of both have.
    """
    model = h.gpt2()
    batch = h.pad_right(SAMPLES)
    num_classes = len(model.lm_head.weight)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert num_classes % chunked_loss.ROW_MULTIPLE, "control: rows are missing"
    found = []
    for devices in (("cpu",), ()):
        chunked_loss.PADDED_DEVICES = devices
        products.clear()
        autocast = torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)
        with autocast, acting([chunked(model, 5)], NO_CALL):
            found.append(loss_and_gradient(model, batch))
        padded_rows = num_classes + -num_classes % chunked_loss.ROW_MULTIPLE
        assert (padded_rows in products) == bool(devices)
    (loss, gradients), (plain_loss, plain) = found
    tolerance = 2e-6 if dtype is None else 1e-2
    assert loss == pytest.approx(plain_loss, rel=tolerance)
    assert h.relative_error(gradients, plain) <= tolerance


@pytest.mark.parametrize(
    "trained", [("hidden",), ("weight",), ("bias",), ("hidden", "weight", "bias"), ()], ids=str
)
def test_it_is_the_definition_and_what_needs_no_gradient_gets_none(trained):
    """In float64, in chunks of 2 and in one. Frozen heads, frozen bodies, evaluation."""
    shapes = {"hidden": (7, 8), "weight": (20, 8), "bias": (20,)}
    tensors = {
        name: torch.randn(shape).double().requires_grad_(name in trained)
        for name, shape in shapes.items()
    }
    target = torch.arange(7)
    wanted = [tensors[name] for name in trained]
    head = OutputProjection(tensors["weight"], tensors["bias"], torch.float64)
    whole = F.cross_entropy(F.linear(*tensors.values()), target)
    for rows in (2, 7):
        loss = chunked_cross_entropy(head, tensors["hidden"], target, rows, mean=True)
        torch.testing.assert_close(loss, whole, rtol=1e-14, atol=0)
        assert loss.requires_grad == bool(trained)
        if trained:
            gradients = (
                torch.autograd.grad(x * 3.0, wanted, retain_graph=True) for x in (loss, whole)
            )  # 3: a weight in a window
            for ours, true in zip(*gradients, strict=True):
                torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-15)
        with torch.no_grad():
            assert chunked_cross_entropy(head, tensors["hidden"], target, rows, mean=True) == loss


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"ignore_index": 3},
        {"label_smoothing": 0.1},
        {"weight": torch.linspace(0, 2, 40)},
        {"weight": torch.linspace(0, 2, 40), "label_smoothing": 0.2},
        {"weight": torch.linspace(0, 2, 40), "reduction": "sum"},
        {"reduction": "none"},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_options_of_cross_entropy(options):
    hidden = torch.randn(3, 5, 16)
    target = torch.randint(0, 40, (3, 5))
    target[:, 0] = target[1] = options.get("ignore_index", h.IGNORED)
    use = lambda logits: F.cross_entropy(logits.view(-1, 40), target.view(-1), **options)  # noqa: E731
    *plain, _ = one_layer(use, hidden, lazy=False)
    *lazy, rows = one_layer(use, hidden, lazy=True)
    assert rows == ([] if options.get("reduction") == "none" else [8])
    for ours, true in zip(lazy, plain, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-5, atol=1e-6)


def one_layer(use, hidden, lazy):
    """Loss, gradients, and how many rows reached the layer in each call that was replaced."""
    model = OneLayer(use)
    x = hidden.clone().requires_grad_()
    head = chunked(model)
    with acting([head], NO_CALL) if lazy else nullcontext():
        loss = model(x)
        rows = list(head._num_rows)
    loss.sum().backward()
    return loss.detach(), x.grad, *(p.grad for p in model.parameters()), rows


class OneLayer(nn.Module):
    """An output layer with a bias, and whatever is done with its logits."""

    def __init__(self, use):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.lm_head = nn.Linear(16, 40)
        self.use = use

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, x):
        return self.use(self.lm_head(x))


def test_without_targets_the_loss_is_the_heads_nan():
    model = OneLayer(lambda logits: F.cross_entropy(logits, torch.full((5,), h.IGNORED)))
    with acting([chunked(model)], NO_CALL):
        assert model(torch.randn(5, 16)).isnan()


LABELS = torch.tensor([[1, 2, h.IGNORED], [4, h.IGNORED, 6]])
HANDED_ON = {
    "as they are": lambda x: x,
    "upcast": lambda x: x.float(),
    "to a type": lambda x: x.to(torch.float64),
    "to a device": lambda x: x.to(x.device).to(torch.device("cpu")),
    "sliced": lambda x: x[:, 0:][..., :3, :].contiguous(),
    "soft cap": lambda x: torch.tanh(x / 5.0) * 5.0,
    "scaled": lambda x: 0.25 * x,
    "constant bias": lambda x: x + torch.linspace(0, 1, 40)[None],
}
MADE = {
    "a scale that is trained": lambda x: x * SCALE,
    "written to": lambda x: written(x),
    "in place": lambda x: x.mul_(0.5),
    "among others": lambda x: torch.stack([x, x]).mean(0),
    "one row": lambda x: x[torch.tensor([0, 1])],
    "keyword": lambda x: torch.add(input=x, other=x),
}
SCALE = nn.Parameter(torch.tensor(2.0))


def written(x):
    x[..., 3] = -4.0
    return x


@pytest.mark.parametrize("name", [*HANDED_ON, *MADE])
def test_what_heads_do_with_logits(name, monkeypatch):
    made = []
    values = LazyLogits.materialize
    monkeypatch.setattr(LazyLogits, "materialize", lambda logits: made.append(1) or values(logits))
    hidden = torch.randn(2, 3, 16)
    found = []

    def use(logits):
        return F.cross_entropy((HANDED_ON | MADE)[name](logits).reshape(-1, 40), LABELS.reshape(-1))

    for lazy in (False, True):
        SCALE.grad = None
        *numbers, rows = one_layer(use, hidden, lazy)
        found.append([*numbers, SCALE.grad])
    assert rows == ([4] if name in HANDED_ON else [])
    assert bool(made) == (name in MADE)
    for plain, ours in zip(*found, strict=True):
        if name in MADE:
            assert (plain is None and ours is None) or torch.equal(plain, ours)
        else:
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)


def test_logits_know_what_they_are_and_become_what_the_layer_would_have_given(monkeypatch):
    """Shape and type without any number; then metrics under no_grad, and a look at the logits after
    autocast.
    """
    model = OneLayer(lambda logits: logits)
    x = torch.randn(2, 3, 16)
    with acting([chunked(model)], NO_CALL):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        with monkeypatch.context() as patch:
            patch.setattr(LazyLogits, "materialize", None)
            assert (logits.shape, logits.size(-1), logits.dim(), len(logits)) == (
                (2, 3, 40),
                40,
                3,
                2,
            )
            assert (logits.dtype, logits.device) == (torch.bfloat16, torch.device("cpu"))
            assert logits.view(-1, logits.size(-1)).shape == (6, 40)
        with torch.no_grad():
            assert not logits.argmax(-1).requires_grad
        assert logits.sum().requires_grad
        assert logits.exp().dtype == torch.bfloat16
        with torch.no_grad():
            logits = model(x)
        assert logits.dtype == torch.float32
        assert not logits.exp().requires_grad


def layer_of(model):
    return chunked(model).output_layer


def test_layers_that_are_left_alone(monkeypatch):
    model = h.bert_masked_lm()
    assert layer_of(model) is model.cls.predictions.decoder
    monkeypatch.setattr(lazy_logits, "FSDPModule", tf.BertForMaskedLM)
    assert layer_of(model) is not None, "the root has its parameters until the end of its forward"
    monkeypatch.setattr(lazy_logits, "FSDPModule", (tf.BertForMaskedLM, type(model.cls)))
    assert layer_of(model) is None, "FSDP shards it again before the loss"
    model = h.gpt2()
    assert layer_of(model) is model.lm_head
    assert layer_of(nn.Linear(2, 2)) is None
    assert layer_of(h.bert_classifier()) is None
    with model.lm_head.register_forward_hook(lambda *args: None):
        assert layer_of(model) is None, "somebody looks at the logits"
    model.lm_head.forward = model.lm_head.forward
    assert layer_of(model) is None, "somebody has wrapped it"
    other = h.gpt2()
    nn.utils.parametrizations.weight_norm(other.lm_head)
    assert layer_of(other) is None, "another type of layer"


def test_memory_is_that_of_a_chunk():
    hidden = torch.randn(600, 16, requires_grad=True)
    weight = torch.randn(5000, 16, requires_grad=True)
    target = torch.randint(0, 5000, (600,))
    rows = 13
    head = OutputProjection(weight, None, torch.float32)
    lazy = peak_bytes(
        lambda: chunked_cross_entropy(head, hidden, target, rows, mean=True).backward()
    )
    plain = peak_bytes(lambda: F.cross_entropy(F.linear(hidden, weight), target).backward())
    logits = 600 * 5000 * 4
    gradients = (hidden.numel() + weight.numel()) * 4
    assert plain > 2 * logits
    assert lazy < 4 * (rows * 5000 * 4) + 4 * gradients < logits / 4
    on_gpu = torch.empty(4096, 256, device="meta"), torch.empty(16384, 4096, device="meta")
    assert choose_rows_per_chunk(on_gpu[0], 50_000) == chunked_loss.CHUNK_BYTES // 200_000
    assert choose_rows_per_chunk(on_gpu[1], 128_000) == 16384 * 4096 // 128_000, (
        "not smaller than the hidden states"
    )


def test_fp16_gradients_are_computed_with_the_loss_scale_on():
    """Probabilities below fp16's smallest number: with the scale they count, without they would be
    0.
    """
    x = torch.ones(40, 4)
    w = torch.zeros(4000, 4)
    w[:, 0] = -5.0
    w[0] = 2.5
    target = torch.zeros(40, dtype=torch.long)
    grads = []
    for scale in (1.0, 2.0**16):
        weight = w.clone().requires_grad_()
        loss = chunked_cross_entropy(
            OutputProjection(weight, None, torch.float16), x, target, 8, mean=True
        )
        (loss * scale).backward()
        grads.append(weight.grad[1:] / scale)
    assert not grads[0].any()
    exact = w.double().requires_grad_()
    F.cross_entropy(F.linear(x.double(), exact), target).backward()
    torch.testing.assert_close(grads[1].double(), exact.grad[1:], rtol=0.05, atol=0)


def tried_on(model, *speed_ups, samples=SAMPLES, **more):
    return tried(model, samples, speed_ups=list(speed_ups) or [ChunkedLoss()], **more)


class OwnHead(nn.Module):
    """A language model whose loss does with its logits what the test says."""

    def __init__(self, use):
        super().__init__()
        self.embedding = nn.Embedding(h.VOCABULARY, 16)
        self.lm_head = nn.Linear(16, h.VOCABULARY)
        self.use = use

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, labels):
        return self.use(self.lm_head(self.embedding(input_ids)), labels)


def by_hand(logits, labels):
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(picked * (labels != h.IGNORED)).sum() / (labels != h.IGNORED).sum()


NEED_LOGITS = {
    "not a cross entropy": lambda: (h.seeded(OwnHead)(by_hand), {"samples": h.plain_samples(12)}),
    "reads other outputs than the loss": lambda: (
        h.gpt2(),
        {"loss_fn": WeightedCrossEntropy(0.1, shifted=True)},
    ),
}


@pytest.mark.parametrize("why", NEED_LOGITS)
def test_heads_and_losses_that_need_logits_get_them(why):
    model, options = NEED_LOGITS[why]()
    samples = options.pop("samples", SAMPLES)
    plain, _ = window_gradient(copy.deepcopy(model), one_window(samples, 5), **options)
    found = tried_on(model, samples=samples, **options)
    assert not found.used
    assert why in found.left_out["chunked loss"]
    grads, _ = window_gradient(model, later(one_window(samples, 5)), **options)
    assert h.relative_error(grads, plain) <= 1e-6


def test_a_cross_entropy_needs_no_logits(no_values):
    """The control: the same model with another loss."""

    def cross_entropy(logits, labels):
        return F.cross_entropy(logits.view(-1, h.VOCABULARY), labels.view(-1))

    samples = h.plain_samples(12)
    model = h.seeded(OwnHead)(cross_entropy)
    assert tried_on(model, samples=samples).used
    grads, _ = window_gradient(model, later(one_window(samples, 5)))
    full = h.full_batch_gradient(h.seeded(OwnHead)(cross_entropy), h.pad_right(samples))
    assert h.relative_error(grads, full) <= 1e-6


@pytest.mark.parametrize("build", [h.gpt2, h.bert_masked_lm], ids=["gpt2", "bert"])
def test_with_dropout_and_checkpointing_it_is_the_step_with_logits(build):
    """The same masks: the dropout sites do not move."""
    model = build(0.1)
    grads, plain = window_gradient(model, one_window(SAMPLES, 5))  # a rehearsed window uses none
    assert tried_on(model).used[0].rows_per_chunk is None, "that of the trial"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for micro_batch in (5, 12):
        lazy, result = window_gradient(model, later(one_window(SAMPLES, micro_batch)))
        assert result.loss == pytest.approx(plain.loss, rel=1e-6)
        assert h.relative_error(lazy, grads) <= 1e-6
    assert h.relative_error(lazy, h.full_batch_gradient(build(), h.pad_right(SAMPLES))) > 0.05, (
        "dropout was on"
    )
