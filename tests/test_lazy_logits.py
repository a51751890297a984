"""No full logits: loss and gradient are the head's own, only rows with a target reach the layer, what needs logits gets them."""

import copy
import dataclasses
from contextlib import contextmanager

import helpers as h
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from heads.one_head import Head, build_head
from hf_ga.speed.pieces import TypedHead, mean_or_sum, rows_of_piece
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hf_ga
from hf_ga.parallel.prepare import enable_fp16_on_cpu
from hf_ga.run import evaluation
from hf_ga.run.losses import make_loss_fn
from hf_ga.speed import pieces
from hf_ga.speed.lazy_logits import LazyHead, LazyLogits

HEADS = [  # class, kind, model type: softmax caps, scales, biases inside and outside of the layer, ties, several projections
    ("gpt2", "GPT2LMHeadModel", "causal LM"),
    ("llama", "LlamaForCausalLM", "causal LM"),
    ("gemma2", "Gemma2ForCausalLM", "causal LM"),
    ("cohere", "CohereForCausalLM", "causal LM"),
    ("opt", "OPTForCausalLM", "causal LM"),
    ("gpt_neox", "GPTNeoXForCausalLM", "causal LM"),
    ("bloom", "BloomForCausalLM", "causal LM"),
    ("bert", "BertForMaskedLM", "masked LM"),
    ("roberta", "RobertaForMaskedLM", "masked LM"),
    ("distilbert", "DistilBertForMaskedLM", "masked LM"),
    ("electra", "ElectraForMaskedLM", "masked LM"),
    ("albert", "AlbertForMaskedLM", "masked LM"),
    ("deberta", "DebertaForMaskedLM", "masked LM"),
    ("xlnet", "XLNetLMHeadModel", "causal LM with all labels"),
    ("t5", "T5ForConditionalGeneration", "seq2seq"),
    ("bart", "BartForConditionalGeneration", "seq2seq"),
]
SAMPLES = h.token_samples(12)


# How a plain head is computed: what a CPU does, what a GPU does with torch 2.13, and what is right for every head.
WAYS = ["in cache", "by torch", "in pieces"]


@contextmanager
def computed(way):
    with pytest.MonkeyPatch.context() as patch:
        if way != "in cache":
            patch.setattr(pieces, "IN_CACHE_ON", ())
            patch.setattr(pieces, "HAS_CHUNKED_LOSS", way == "by torch" and pieces.HAS_CHUNKED_LOSS)
        yield


@pytest.fixture(params=WAYS)
def way(request):
    with computed(request.param):
        yield request.param


@pytest.fixture
def no_values(monkeypatch):
    """Logits may not be made."""

    def refuse(logits):
        raise AssertionError("the logits were made")

    monkeypatch.setattr(LazyLogits, "values", refuse)


def in_pieces(model: nn.Module, rows: int = 3) -> LazyHead:
    head = LazyHead(model)
    head.piece_rows = rows
    return head


def loss_and_gradient(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), h.gradients(model)


# -- the models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "name", "kind"), HEADS, ids=[name for _, name, _ in HEADS])
def test_loss_and_gradient_are_the_heads_own(model_type, name, kind, no_values):
    """Against the plain forward, in each way."""
    model, samples, collate = build_head(Head(model_type, name, kind.split(" with")[0]), 0.0)
    batch = {k: v for k, v in collate(samples).items() if isinstance(v, torch.Tensor)}
    labels = batch["labels"][:, 1:] if kind == "causal LM" else batch["labels"]
    loss, plain = loss_and_gradient(model, batch)
    for way in WAYS:
        head = in_pieces(model)
        with computed(way), head.active():
            lazy_loss, lazy = loss_and_gradient(model, batch)
            assert head.rows == [int((labels != h.IGNORED).sum())]
        assert lazy_loss == pytest.approx(loss, rel=1e-6), way
        assert h.relative_error(lazy, plain) <= 2e-6, way
        assert "forward" not in vars(head.layer), "something was left behind"


def test_in_float64_it_is_the_head_to_rounding(way, no_values):
    model, batch = h.bert_masked_lm().double(), h.pad_right(SAMPLES)
    loss, plain = loss_and_gradient(model, batch)
    with in_pieces(model).active():
        lazy_loss, lazy = loss_and_gradient(model, batch)
    # BERT's head hands over its logits as they are, but the loss function of transformers casts them to float32.
    assert lazy_loss == pytest.approx(loss, rel=1e-6)
    assert h.relative_error(lazy, plain) < 1e-6
    x, target = torch.randn(11, 16, dtype=torch.float64, requires_grad=True), torch.arange(11)
    head = TypedHead(torch.randn(40, 16, dtype=torch.float64), torch.randn(40, dtype=torch.float64), torch.float64)
    whole = F.cross_entropy(F.linear(x, head.weight, head.bias), target)
    lazy = mean_or_sum(head, x, target, 4, mean=True)
    assert float(lazy.detach()) == pytest.approx(float(whole.detach()), rel=1e-14)
    difference = torch.autograd.grad(lazy, x)[0] - torch.autograd.grad(whole, x)[0]
    assert difference.abs().max() < 1e-15


@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("bias",), ("hidden", "weight", "bias"), ()], ids=str)
def test_what_needs_no_gradient_gets_none(trained, way):
    """Frozen heads, frozen bodies, evaluation."""
    shapes = {"hidden": (7, 8), "weight": (20, 8), "bias": (20,)}
    tensors = {name: torch.randn(shape).double().requires_grad_(name in trained) for name, shape in shapes.items()}
    target, total = torch.arange(7), []
    for rows in (2, 7):
        for tensor in tensors.values():
            tensor.grad = None
        head = TypedHead(tensors["weight"], tensors["bias"], torch.float64)
        loss = mean_or_sum(head, tensors["hidden"], target, rows, mean=True)
        assert loss.requires_grad == bool(trained)
        if trained:
            (loss * 3.0).backward()  # the weight of a micro-batch in its window
        total.append([loss.detach(), *(t.grad for t in tensors.values() if t.grad is not None)])
        assert len(total[-1]) == 1 + len(trained)
        with torch.no_grad():
            assert mean_or_sum(head, tensors["hidden"], target, rows, mean=True) == loss
    for one, several in zip(*total, strict=True):
        torch.testing.assert_close(one, several, rtol=1e-10, atol=1e-14)


# -- what cross entropy is asked ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4, 100])
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
def test_options_of_cross_entropy(options, rows):
    hidden, target = torch.randn(3, 5, 16), torch.randint(0, 40, (3, 5))
    target[:, 0] = target[1] = options.get("ignore_index", h.IGNORED)
    results = []
    for lazy in (False, True):
        model = OneLayer(lambda logits: F.cross_entropy(logits.view(-1, 40), target.view(-1), **options))
        head = in_pieces(model, rows)
        x = hidden.clone().requires_grad_()
        if lazy:
            with head.active():
                loss = model(x)
                assert head.rows == ([] if options.get("reduction") == "none" else [8])
        else:
            loss = model(x)
        loss.sum().backward()
        results.append((loss.detach(), x.grad, *(p.grad for p in model.parameters())))
    for lazy, plain in zip(*results, strict=True):
        torch.testing.assert_close(lazy, plain, rtol=1e-5, atol=1e-6)


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
    target = torch.full((5,), h.IGNORED)
    model = OneLayer(lambda logits: F.cross_entropy(logits, target))
    with LazyHead(model).active():
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
    "softmax": lambda x: x.softmax(-1).log(),
    "of classes": lambda x: torch.cat([x[..., :20], x[..., 20:]], -1),
    "written to": lambda x: written(x),
    "in place": lambda x: x.mul_(0.5),
    "among others": lambda x: torch.stack([x, x]).mean(0),
    "masked": lambda x: x.masked_fill(torch.arange(40) == 7, -5.0),
    "operators": lambda x: -((1 - x) ** 2),
    "transposed": lambda x: x.transpose(1, 2).transpose(1, 2),
    "one row": lambda x: x[torch.tensor([0, 1])],
    "keyword": lambda x: torch.add(input=x, other=x),
}
SCALE = nn.Parameter(torch.tensor(2.0))


def written(x):
    x[..., 3] = -4.0
    return x


@pytest.mark.parametrize("name", [*HANDED_ON, *MADE])
def test_what_heads_do_with_logits(name, monkeypatch):
    made, values = [], LazyLogits.values
    monkeypatch.setattr(LazyLogits, "values", lambda logits: made.append(1) or values(logits))
    hidden, results = torch.randn(2, 3, 16), []

    def use(logits):
        return F.cross_entropy((HANDED_ON | MADE)[name](logits).reshape(-1, 40), LABELS.reshape(-1))

    for lazy in (False, True):
        SCALE.grad = None
        model = OneLayer(use)
        head = in_pieces(model, 2)
        x = hidden.clone().requires_grad_()
        if lazy:
            with head.active():
                loss = model(x)
                assert head.rows == ([4] if name in HANDED_ON else [])
        else:
            loss = model(x)
        loss.backward()
        results.append((loss.detach(), x.grad, SCALE.grad, *(p.grad for p in model.parameters())))
    assert bool(made) == (name in MADE)
    for plain, lazy in zip(*results, strict=True):
        if name in MADE:
            assert (plain is None and lazy is None) or torch.equal(plain, lazy)
        else:
            torch.testing.assert_close(lazy, plain, rtol=1e-5, atol=1e-7)


def test_what_logits_are_is_known_without_them(no_values):
    seen = []

    def look(logits):
        seen.append((logits.shape, logits.size(-1), logits.dtype, logits.device, logits.dim(), len(logits), logits.requires_grad))
        return logits.view(-1, logits.size(-1)).shape

    model, x = OneLayer(look), torch.randn(2, 3, 16)
    with LazyHead(model).active():
        assert model(x) == (6, 40)
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
    facts = ((2, 3, 40), 40, torch.float32, torch.device("cpu"), 3, 2, False)
    assert seen == [facts, (*facts[:2], torch.bfloat16, *facts[3:])]


def test_what_was_set_when_the_layer_was_called_counts():
    """Metrics under no_grad, a look at the logits after autocast: the values are those the layer would have given."""
    model, x = OneLayer(lambda logits: logits), torch.randn(2, 16)
    with LazyHead(model).active():
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        with torch.no_grad():
            assert not logits.argmax(-1).requires_grad
        assert logits.sum().requires_grad
        assert logits.exp().dtype == torch.bfloat16
        with torch.no_grad():
            logits = model(x)
        assert not logits.exp().requires_grad


# -- which layers -----------------------------------------------------------------------------------------------------------------


def test_layers_that_are_left_alone(monkeypatch):
    model = h.bert_masked_lm()
    assert LazyHead(model).layer is model.cls.predictions.decoder
    monkeypatch.setattr("hf_ga.speed.lazy_logits.UNITS", (tf.BertForMaskedLM,))
    assert LazyHead(model).layer is not None, "the root has its parameters until the end of its forward"
    monkeypatch.setattr("hf_ga.speed.lazy_logits.UNITS", (type(model.cls),))
    assert LazyHead(model).layer is None, "FSDP shards it again before the loss"
    model = h.gpt2()
    assert LazyHead(model).layer is model.lm_head
    assert LazyHead(nn.Linear(2, 2)).layer is None
    assert LazyHead(h.bert_classifier()).layer is None
    with model.lm_head.register_forward_hook(lambda *args: None):
        assert LazyHead(model).layer is None, "somebody looks at the logits"
    model.lm_head.forward = model.lm_head.forward
    assert LazyHead(model).layer is None, "somebody has wrapped it"
    other = h.gpt2()
    nn.utils.parametrizations.weight_norm(other.lm_head)
    assert LazyHead(other).layer is None, "another type of layer"


# -- memory -----------------------------------------------------------------------------------------------------------------------


def peak_bytes(function) -> int:
    """The most memory that tensors had at a time, above what they had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:  # torch 2.11 warns else
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        top = max(top, level)
    return top


def test_memory_is_that_of_a_piece(way, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 18)
    hidden, weight = torch.randn(600, 16, requires_grad=True), torch.randn(5000, 16, requires_grad=True)
    target, logits = torch.randint(0, 5000, (600,)), 600 * 5000 * 4
    rows = rows_of_piece(hidden, 5000)
    assert rows == (1 << 18) // (4 * 5000)
    head = TypedHead(weight, None, torch.float32)
    lazy = peak_bytes(lambda: mean_or_sum(head, hidden, target, rows, mean=True).backward())
    plain = peak_bytes(lambda: F.cross_entropy(F.linear(hidden, weight), target).backward())
    gradients = (hidden.numel() + weight.numel()) * 4
    assert plain > 2 * logits
    alive = 2.5 if way == "in cache" else 4  # tensors of the size of a piece
    assert lazy < alive * (1 << 18) + 4 * gradients < logits / 4


def test_a_plain_head_on_a_cpu_is_computed_in_even_pieces_that_fit_its_cache(monkeypatch):
    rows, cross_entropy = [], pieces._cross_entropy
    monkeypatch.setattr(pieces, "_cross_entropy", lambda logits, target: rows.append(len(logits)) or cross_entropy(logits, target))
    hidden, weight, target = torch.randn(600, 4), torch.randn(7, 4), torch.randint(0, 7, (600,))
    mean_or_sum(TypedHead(weight, None, torch.float32), hidden, target, 10_000, mean=True)
    assert rows == [200, 200, 200]
    mean_or_sum(TypedHead(weight, None, torch.float32, class_weights=torch.ones(7)), hidden, target, 10_000, mean=True)
    mean_or_sum(TypedHead(weight, None, torch.float32, label_smoothing=0.1), hidden, target, 10_000, mean=True)
    assert len(rows) == 3, "others are computed by the head's own operations"


def test_the_gradient_of_a_piece_lies_where_its_logits_did():
    """And is right there: softmax in place, against float64 and autograd."""
    logits, target = 8 * torch.randn(70, 5000), torch.randint(0, 5000, (70,))
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, reduction="sum")
    expected.backward()
    address = logits.data_ptr()
    results = []
    assert peak_bytes(lambda: results.extend(pieces._cross_entropy(logits, target))) < logits.numel() * 4 / 10
    loss, gradient = results
    assert gradient.data_ptr() == address
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    assert (gradient.double() - exact.grad).norm() < 1e-6 * exact.grad.norm()


def test_a_piece_is_not_smaller_than_the_hidden_states():
    assert rows_of_piece(torch.empty(4096, 256), 50_000) == (32 << 20) // 200_000
    assert rows_of_piece(torch.empty(16384, 4096), 128_000) == 16384 * 4096 // 128_000


# -- half precision ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_as_exact_as_the_head(dtype):
    """Loss and gradients against float64; fp16 with a loss scale, without which its gradients would be lost."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(300, 32), torch.randn(700, 32), torch.randn(700)
    target, scale = torch.randint(0, 700, (300,)), 2.0**14 if dtype == torch.float16 else 1.0

    def compute(loss_of, kind):
        leaves = [t.to(kind, copy=True).requires_grad_() for t in (hidden, weight, bias)]
        loss = loss_of(*leaves)
        (loss * scale).backward()
        return float(loss.detach()), torch.cat([leaf.grad.double().flatten() / scale for leaf in leaves])

    def plain(x, w, b):
        return F.cross_entropy(F.linear(x, w, b), target)

    def lazy(x, w, b):
        return mean_or_sum(TypedHead(w, b, dtype), x, target, 16, mean=True)

    loss, truth = compute(plain, torch.float64)
    with torch.autocast("cpu", dtype):
        own, lazies = compute(plain, torch.float32), compute(lazy, torch.float32)
    assert abs(lazies[0] - loss) <= 2 * abs(own[0] - loss) + 1e-5 * loss
    assert (lazies[1] - truth).norm() <= 1.2 * (own[1] - truth).norm()
    assert (own[1] - truth).norm() < 0.02 * truth.norm(), "the comparison says something"


def test_fp16_gradients_are_computed_with_the_loss_scale_on():
    """Probabilities below fp16's smallest number: with the scale they count, without they would be 0."""
    x, w = torch.ones(40, 4), torch.zeros(4000, 4)
    w[:, 0] = -5.0
    w[0] = 2.5
    target, grads = torch.zeros(40, dtype=torch.long), []
    for scale in (1.0, 2.0**16):
        weight = w.clone().requires_grad_()
        loss = mean_or_sum(TypedHead(weight, None, torch.float16), x, target, 8, mean=True)
        (loss * scale).backward()
        grads.append(weight.grad[1:] / scale)
    assert not grads[0].any()
    exact = w.double().requires_grad_()
    F.cross_entropy(F.linear(x.double(), exact), target).backward()
    torch.testing.assert_close(grads[1].double(), exact.grad[1:], rtol=0.05, atol=0)


# -- the proof --------------------------------------------------------------------------------------------------------------------


def proven(model, samples=SAMPLES):
    return hf_ga.prove_targets(model, samples, h.pad_right)


@pytest.mark.parametrize("build", [h.gpt2, h.bert_masked_lm], ids=["shifted", "with a bias"])
def test_a_proven_head_trains_without_logits(build, no_values):
    rule = proven(build(0.1))
    assert rule.lazy_head is not None and rule.lazy_head.counted and rule.lazy_head.piece_rows is None
    assert str(rule).endswith(", no full logits")
    rule.lazy_head.layer.register_forward_hook(lambda *args: None)  # from now on somebody watches it
    assert str(rule).endswith(", full logits (its output layer is wrapped or watched)")


def test_the_proof_itself_runs_in_pieces(monkeypatch):
    sizes = []

    def watched(head, hidden, target, rows, *, mean):
        sizes.append((rows, len(hidden)))
        return mean_or_sum(head, hidden, target, rows, mean=mean)

    monkeypatch.setattr("hf_ga.speed.lazy_logits.mean_or_sum", watched)
    assert proven(h.gpt2()).lazy_head is not None
    assert len(sizes) >= 4
    assert all(rows == 3 for rows, _ in sizes)
    assert sum(number > 3 for _, number in sizes) >= 4


def forgets_the_bias(head, *args, mean):
    return mean_or_sum(dataclasses.replace(head, bias=None), *args, mean=mean)


def loses_the_last_piece(head, hidden, target, rows, *, mean):
    return mean_or_sum(head, hidden[:-1], target[:-1], rows, mean=mean)


def forgets_the_mean(head, *args, mean):
    return mean_or_sum(head, *args, mean=False)


@pytest.mark.parametrize("wrong", [forgets_the_bias, loses_the_last_piece, forgets_the_mean])
def test_a_wrong_way_is_noticed(wrong, monkeypatch):
    """The controls: then the head is proven and trained with its logits."""
    model = h.bert_masked_lm()
    with torch.no_grad():
        model.cls.predictions.bias.normal_()
    assert proven(model).lazy_head is not None
    monkeypatch.setattr("hf_ga.speed.lazy_logits.mean_or_sum", wrong)
    rule = proven(model)
    assert rule.lazy_head is None
    assert rule.name == "labels"
    assert "full logits (off by" in str(rule)


def test_rows_without_a_target_that_count_are_noticed(monkeypatch):
    def all_rows(head, hidden, target, ignore_index):
        head.rows.append(len(target))
        return hidden, target.clamp(min=0)

    monkeypatch.setattr(LazyHead, "rows_with_target", all_rows)
    assert "off by" in proven(h.gpt2()).full_logits


class OwnHead(nn.Module):
    """A language model whose loss does with its logits what the test says."""

    def __init__(self, use):
        super().__init__()
        self.embedding, self.lm_head, self.use = nn.Embedding(h.VOCABULARY, 16), nn.Linear(16, h.VOCABULARY), use

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, labels):
        return {"loss": self.use(self.lm_head(self.embedding(input_ids)), labels)}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2.0


def of_doubled(logits, labels):
    return F.cross_entropy(Doubled.apply(logits).flatten(0, 1), labels.flatten())


def by_hand(logits, labels):
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(picked * (labels != h.IGNORED)).sum() / (labels != h.IGNORED).sum()


def type_is_asked(logits, labels):
    assert type(logits) is torch.Tensor, "not one of ours"
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("use", "why"),
    [(of_doubled, "another than a cross entropy"), (by_hand, "another than a cross entropy"), (type_is_asked, "AssertionError")],
    ids=["own autograd function", "no cross entropy", "fails on ours"],
)
def test_heads_that_need_their_logits_get_them(use, why):
    rule = hf_ga.prove_targets(h.seeded(OwnHead)(use), h.plain_samples(12), h.pad_right)
    assert rule.lazy_head is None
    assert why in rule.full_logits
    assert rule.name == "labels"


def test_an_own_loss_gets_its_logits():
    rule = hf_ga.prove_targets(h.gpt2(), SAMPLES, h.pad_right, loss_fn=make_loss_fn(0.1, None, shifted=True))
    assert rule.lazy_head is None
    assert "logits" not in str(rule)


# -- a step -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_accelerator_state():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def gradient_of(model, micro_batch, precision="no", rule=None, samples=SAMPLES):
    """Of one window, and its loss."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    enable_fp16_on_cpu(accelerator)
    (window,) = hf_ga.WindowLoader(
        samples, h.pad_right, accelerator=accelerator, global_batch_size=len(samples), per_device_batch_size=micro_batch, seed=1
    )
    prepared = model if rule else accelerator.prepare(copy.deepcopy(model))
    rule = rule or proven(prepared)
    prepared.zero_grad()
    result = hf_ga.backward_window(accelerator, prepared, window, targets=rule)
    scale = accelerator.scaler.get_scale() if accelerator.scaler is not None else 1.0
    return float(result.loss), {name: g / scale for name, g in h.gradients(prepared).items()}, window


def with_logits(rule):
    return dataclasses.replace(rule, lazy_head=None)


@pytest.mark.parametrize("build", [h.gpt2, h.llama, h.bert_masked_lm, h.t5], ids=["gpt2", "llama", "bert", "t5"])
def test_any_split_is_the_full_batch(build, no_values):
    """Promise 1, against float64 and the full batch in plain PyTorch."""
    model, whole = build(), h.pad_right(SAMPLES)
    rule, truth = proven(model), h.full_batch_gradient(model, whole)
    assert rule.lazy_head.counted
    for micro_batch in (12, 5, 1):
        _, grads, window = gradient_of(model, micro_batch, rule=rule)
        h.assert_promise_1(grads, h.full_batch_gradient(model, whole, torch.float32), truth)
    naive = h.naive_gradient(model, [m.batch for m in window.micro_batches], 12)
    assert h.relative_error(naive, truth) > 1e-3


@pytest.mark.parametrize("build", [h.gpt2, h.bert_masked_lm], ids=["gpt2", "bert"])
def test_with_dropout_it_is_the_step_with_logits(build):
    """The same masks: the places of dropout do not move."""
    model = build(0.1)
    rule = proven(model)
    loss, grads, _ = gradient_of(model, 5, rule=with_logits(rule))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for micro_batch in (5, 12):
        lazy_loss, lazy, _ = gradient_of(model, micro_batch, rule=rule)
        assert lazy_loss == pytest.approx(loss, rel=1e-6)
        assert h.relative_error(lazy, grads) <= 1e-6
    plain = h.full_batch_gradient(build(), h.pad_right(SAMPLES))
    assert h.relative_error(lazy, plain) > 0.05, "dropout was on"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("build", [h.gpt2, h.bert_masked_lm], ids=["gpt2", "bert"])
def test_a_step_under_autocast_is_as_exact_as_with_logits(build, precision, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 0)  # several pieces: as much memory as the hidden states
    model = build()
    truth = h.full_batch_gradient(model, h.pad_right(SAMPLES))
    lazy_loss, lazy, _ = gradient_of(model, 6, precision)
    with monkeypatch.context() as patch:
        patch.setattr(LazyHead, "layer", None)  # then none is found
        loss, grads, _ = gradient_of(model, 6, precision)
    assert lazy_loss == pytest.approx(loss, rel=1e-3)
    assert 0 < h.relative_error(lazy, truth) <= 1.3 * h.relative_error(grads, truth)


def test_another_number_of_targets_than_counted_is_an_error():
    model, batch = h.gpt2(), h.pad_right(SAMPLES)
    head, number = LazyHead(model), int((batch["labels"][:, 1:] != h.IGNORED).sum())
    head.counted = True
    for told in (number, number + 1, number - 1):
        with head.active():
            head.expect((told,))
            if told == number:
                model(**batch).loss.backward()
            else:
                with pytest.raises(RuntimeError, match="another number of targets"):
                    model(**batch)


def test_evaluation_without_logits(monkeypatch):
    """The loss alone: the same number, and the logits are not made; a metric gets them."""
    model, accelerator = h.gpt2(), Accelerator(cpu=True)
    rule, results = proven(model), []
    made, values = [], LazyLogits.values
    monkeypatch.setattr(LazyLogits, "values", lambda logits: made.append(1) or values(logits))
    for of in (rule, dataclasses.replace(rule, lazy_head=None)):
        windows = evaluation.evaluation_windows(
            SAMPLES, h.pad_right, accelerator=accelerator, batch_size=5, lengths=[len(s["labels"]) for s in SAMPLES], rule=of
        )
        results.append(evaluation.evaluate(accelerator, model, windows, of))
    assert not made
    assert results[0] == pytest.approx(results[1], rel=1e-6)
