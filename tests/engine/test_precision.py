"""bf16 and fp16 autocast against float64, frozen parameters of any type, parameters in another type
for a while, refusals.
"""

import copy

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import ROUNDING, SCALE, autocast_gradient, divided
from steps import backward_window
from torch import nn
from windows import one_window, window_gradient

import hf_ga
import hf_ga.model.precision
from hf_ga.model.forward import run_forward
from hf_ga.model.precision import at_least_float32
from hf_ga.parallel.prepare import enable_fp16_on_cpu

pytestmark = pytest.mark.usefixtures("own_accelerator_state")
ACCUMULATION = 16


def make_accelerator(precision="no", enable=True):
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    if enable:
        enable_fp16_on_cpu(accelerator)
    return accelerator


def gradient_in(precision, model, window, loss_fn=None):
    """The gradient of a prepared copy, without the loss scale."""
    accelerator = make_accelerator(precision)
    prepared = accelerator.prepare(copy.deepcopy(model))
    backward_window(accelerator, prepared, window, loss_fn=loss_fn)
    return divided(h.gradients(prepared), SCALE if precision == "fp16" else 1.0)


CASES = {
    "token classification": (h.bert_token_classifier, h.tag_samples, None),
    "GPT-2, tied weights": (h.gpt2, h.token_samples, None),
    "plain module, weighted loss_fn": (h.plain_tagger, h.weighted_samples, h.weighted_token_loss),
}

# How a loss is read and how it is scaled have nothing to do with each other: each case has one
# precision, and one case has both.
CASES_AND_PRECISIONS = [
    ("token classification", "bf16"),
    ("token classification", "fp16"),
    ("GPT-2, tied weights", "bf16"),
    ("plain module, weighted loss_fn", "fp16"),
]


def references(case, precision, num_samples):
    """The model, its samples, the gradients of one full batch in float64 and under autocast, both
    in plain PyTorch.
    """
    build, make_samples, loss_fn = CASES[case]
    model = build()
    samples = make_samples(num_samples)
    whole = h.pad_right(samples)
    full = autocast_gradient(precision, model, [whole], [1.0], loss_fn)
    return (
        model,
        samples,
        loss_fn,
        h.full_batch_gradient(model, whole, torch.float64, loss_fn),
        full,
    )


@pytest.mark.parametrize(("case", "precision"), CASES_AND_PRECISIONS)
def test_accumulation_is_the_full_batch_under_autocast(case, precision):
    model, samples, loss_fn, grads64, full = references(case, precision, 4 * ACCUMULATION)
    window = one_window(samples, 4)
    assert len(window.micro_batches) == ACCUMULATION
    grads = gradient_in(precision, model, window, loss_fn)
    h.assert_promise_1(grads, full, grads64, ROUNDING[precision])
    batches, weights = plain_shares(model, window, loss_fn)
    plain = autocast_gradient(precision, model, batches, weights, loss_fn)
    # What it costs is what accumulation under autocast costs, up to other roundings.
    assert h.relative_error(grads, grads64) <= 1.3 * h.relative_error(plain, grads64)
    naive = autocast_gradient(precision, model, batches, [1 / 12] * ACCUMULATION, loss_fn)
    with pytest.raises(AssertionError, match="all parameters"):  # a wrong divisor
        h.assert_promise_1(naive, full, grads64, ROUNDING[precision])


def plain_shares(model, window, loss_fn):
    """A window's micro-batches and the weights of their means."""
    batches = [m.batch for m in window.micro_batches]
    counts = [h.num_targets(model, batch, loss_fn) for batch in batches]
    return batches, [count / sum(counts) for count in counts]


class OneWeight(nn.Module):
    """Gradient of a sample: its x."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.linear(x[:, None]).mean()


def test_256_and_fifteen_ones_by_hand():
    """bf16 has no number between 256 and 258: accumulated in it, the ones are lost."""
    values = [256.0] + [1.0] * (ACCUMULATION - 1)
    grads = gradient_in("bf16", OneWeight(), one_window([{"x": x} for x in values], 1))
    assert grads["linear.weight"].item() == 271 / 16
    in_bf16 = torch.zeros((), dtype=torch.bfloat16)
    for x in values:
        in_bf16 += x / 16
    assert in_bf16.item() == 256 / 16


@pytest.mark.parametrize(("case", "precision"), CASES_AND_PRECISIONS[2:])
def test_accumulation_is_the_full_batch_with_dropout(case, precision):
    """Two inexact arms: at most three times the full batch's own error apart. Control: native
    masks, all else right.
    """
    build, make_samples, loss_fn = CASES[case]
    model = build(dropout=0.1)
    samples = make_samples(4 * ACCUMULATION)
    small = one_window(samples, 4)
    whole = one_window(samples, len(samples))
    split, full = (gradient_in(precision, model, window, loss_fn) for window in (small, whole))
    full64 = gradient_in("no", copy.deepcopy(model).double(), in_float64(whole), loss_fn)
    error = h.relative_error(full, full64)
    apart = h.relative_error(split, full)
    assert apart <= 3 * error + h.FLOOR
    torch.manual_seed(1)
    batch = h.pad_right(samples)
    native = autocast_gradient(precision, model, [batch], [1.0], loss_fn)
    assert h.relative_error(native, full) > 3 * error + h.FLOOR


def in_float64(window):
    """The same window, its floating-point inputs (weights of a loss) in float64."""
    window.batches[:] = [
        {k: v.double() if v.is_floating_point() else v for k, v in b.items()}
        for b in window.batches
    ]
    return window


def test_a_model_that_was_not_prepared_is_not_left_in_float32():
    """Whether the head's loss or an own one is used."""
    samples = h.plain_samples(16)
    model = h.plain_tagger()
    window = one_window(samples, 4)
    found = []
    for prepared in (False, True):
        accelerator = make_accelerator("bf16")
        copied = copy.deepcopy(model)
        backward_window(accelerator, accelerator.prepare(copied) if prepared else copied, window)
        found.append(h.gradients(copied))
    exact = h.full_batch_gradient(model, h.pad_right(samples))
    assert h.relative_error(found[0], found[1]) == 0
    assert h.relative_error(found[0], exact) > 1e-3


def test_losses_come_in_float32_at_least():
    for dtype, wanted in {
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
        torch.float64: torch.float64,
    }.items():
        assert at_least_float32(torch.ones((), dtype=dtype)).dtype == wanted
        model = nn.Identity()
        loss, _ = run_forward(model, {"input": torch.ones(1, dtype=dtype)}, None)
        total, _ = run_forward(
            model, {"input": torch.ones(3, dtype=dtype)}, lambda out, batch: (out.sum(), 3)
        )
        assert (loss.dtype, total.dtype) == (wanted, wanted)


def frozen_base(dtype):
    """A BERT in half precision under a trainable head."""
    model = h.bert_token_classifier()
    model.bert.to(dtype).requires_grad_(False)
    return model


def frozen_matrices(dtype):
    """The gradient of the embeddings goes through frozen matrices. Layer norms stay float32:
    torch's on a CPU mixes no types.
    """
    model = h.bert_token_classifier()
    for module in model.bert.encoder.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype).requires_grad_(False)
    return model


class QuantisedTagger(nn.Module):
    """With a frozen matrix of 8-bit integers and a scale per row in half precision, as quantised
    models have them.
    """

    def __init__(self, dtype):
        super().__init__()
        self.embedding = nn.Embedding(h.VOCABULARY, h.WIDTH)
        self.head = nn.Linear(h.WIDTH, h.NUM_CLASSES)
        weight = torch.randn(h.WIDTH, h.WIDTH)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(dtype))

    def forward(self, input_ids, labels):
        matrix = self.weight.to(self.scale.dtype) * self.scale
        hidden = F.linear(self.embedding(input_ids).to(matrix.dtype), matrix).to(
            self.head.weight.dtype
        )
        return F.cross_entropy(
            self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=h.IGNORED
        )


def plain_tags(num_samples):
    return [{name: s[name] for name in ("input_ids", "labels")} for s in h.tag_samples(num_samples)]


# (builder, samples, precision of the accelerator, type of what is frozen)
FROZEN = {
    "fp16 base, fp16 autocast": (frozen_base, h.tag_samples, "fp16", torch.float16),
    "bf16 matrices, bf16 autocast": (frozen_matrices, h.tag_samples, "bf16", torch.bfloat16),
    "int8 with bf16 scales, bf16 autocast": (QuantisedTagger, plain_tags, "bf16", torch.bfloat16),
    "int8 with fp16 scales, no autocast": (QuantisedTagger, plain_tags, "no", torch.float16),
}


def frozen_tensors(model):
    return {
        n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if not t.requires_grad
    }


@pytest.mark.parametrize("case", FROZEN)
def test_frozen_parameters_of_any_type(case):
    build, make_samples, precision, dtype = FROZEN[case]
    model = build(dtype)
    samples = make_samples(32)
    whole = h.pad_right(samples)
    window = one_window(samples, 2)
    grads64 = h.full_batch_gradient(model, whole)
    full = autocast_gradient(precision, model, [whole], [1.0])
    accelerator = make_accelerator(precision)
    prepared = accelerator.prepare(model)
    before = {
        name: (t, t.data_ptr(), t.dtype, t.detach().clone())
        for name, t in frozen_tensors(model).items()
    }
    assert dtype in {t.dtype for t in frozen_tensors(model).values()}

    backward_window(accelerator, prepared, window)
    for name, tensor in frozen_tensors(model).items():
        object_before, address, dtype_before, value = before[name]
        assert tensor is object_before
        assert tensor.data_ptr() == address
        assert tensor.dtype == dtype_before
        assert torch.equal(tensor, value)
        assert tensor.grad is None
    grads = divided(h.gradients(model), SCALE if precision == "fp16" else 1.0)
    h.assert_promise_1(grads, full, grads64, ROUNDING[precision])


class Features(nn.Module):
    """A frozen layer that is fed inputs of its own half precision."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(3, 4).to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.frozen(x).float()).square().mean()


def test_inputs_in_half_precision():
    samples = [{"x": torch.randn(3).to(torch.bfloat16)} for _ in range(8)]
    model = h.seeded(Features)()
    model(**h.pad_right(samples)).backward()
    full = h.gradients(model)
    found, _ = window_gradient(model, one_window(samples, 3))
    assert h.relative_error(found, full) < 1e-6


def test_enabling_twice_keeps_the_scaler():
    accelerator = make_accelerator("fp16")
    scaler = accelerator.scaler
    enable_fp16_on_cpu(accelerator)
    assert accelerator.scaler is scaler


def fp16_without_scaler():
    accelerator = make_accelerator("fp16")
    accelerator.scaler = None
    return accelerator


def fp8():
    accelerator = make_accelerator("bf16")
    accelerator.state._mixed_precision = "fp8"
    return accelerator


REFUSED = {
    "fp16 on a CPU": (
        lambda: make_accelerator("fp16", enable=False),
        h.bert_classifier,
        r"fp16 is not supported on the device cpu.*bf16 or no.*enable_fp16_on_cpu",
    ),
    "fp16 without a scaler": (
        fp16_without_scaler,
        h.bert_classifier,
        r"scaler None.*enable_fp16_on_cpu",
    ),
    "fp8": (fp8, h.bert_classifier, r"mixed precision fp8 is not supported"),
    "bf16 weights": (
        make_accelerator,
        lambda: h.bert_classifier().to(torch.bfloat16),
        r"float32, but some are torch\.bfloat16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    build_accelerator, build_model, message = REFUSED[name]
    window = one_window(h.class_samples(8), 4)
    accelerator = build_accelerator()
    model = build_model()
    with pytest.raises(hf_ga.ConfigError, match=message):
        backward_window(accelerator, model, window)
    assert all(p.grad is None for p in model.parameters())
