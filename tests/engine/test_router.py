"""Mixtures of experts with a balancing loss: any split of a window is the full batch, with the
choices of the whole window.
"""

import copy

import helpers as h
import pytest
import torch
import transformers as tf
from torch.nn import functional as F
from transformers.models.mixtral import modeling_mixtral
from windows import one_window, window_gradient

from hf_ga.errors import LossNotAdditive

COEFFICIENT = 0.5  # large, so that an error of the balancing loss shows


SIZES = {
    "vocab_size": h.VOCABULARY,
    "hidden_size": h.WIDTH,
    "intermediate_size": 2 * h.WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": COEFFICIENT,
}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
    "GraniteMoe": {"num_local_experts": 4},
}


@h.seeded
def mixture(family="Mixtral", dropout=0.0):
    config = getattr(tf, f"{family}Config")(**SIZES, **FAMILIES[family], attention_dropout=dropout)
    return getattr(tf, f"{family}ForCausalLM")(config)


NO_ROUTER_LOSS = pytest.mark.xfail(
    h.BEFORE_5_23, reason="its forward fails in transformers 5.17", raises=AttributeError
)
NO_ROUTER_LOGITS = pytest.mark.xfail(
    h.BEFORE_5_23, reason="its forward fails in transformers 5.17", raises=(TypeError, ValueError)
)
NAMES = [pytest.param(name, marks=[NO_ROUTER_LOSS] * (name == "GraniteMoe")) for name in FAMILIES]


def full_gradient(model, batch, dtype):
    """One plain forward and backward. In float64 the mean is taken from the logits, which the head
    casts to float32.
    """
    model = copy.deepcopy(model).to(dtype)
    model.set_experts_implementation("eager")  # the others have no float64
    outputs = model(**batch)
    targets = F.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1),
        batch["labels"][:, 1:].flatten(),
        ignore_index=h.IGNORED,
    )
    (targets + COEFFICIENT * outputs.aux_loss).backward()
    return h.gradients(model)


def router_part(gradients):
    return {name: g for name, g in gradients.items() if ".gate." in name or "router" in name}


@pytest.mark.parametrize("family", NAMES)
def test_any_split_is_the_full_batch(family):
    """Control, by the router's gradient: the right weights of the mean loss, each micro-batch's own
    balancing loss.
    """
    samples = h.token_samples(12)
    batch = h.pad_right(samples)
    full, full64 = (
        full_gradient(mixture(family), batch, dtype) for dtype in (torch.float32, torch.float64)
    )
    loss = float(mixture(family)(**batch).loss.detach())
    for micro_batch_size in (1, 5):
        gradients, result = window_gradient(mixture(family), one_window(samples, micro_batch_size))
        h.assert_promise_1(gradients, full, full64)
        assert result.loss == pytest.approx(loss, rel=1e-6)
    naive = mixture(family)
    for rows in torch.arange(12).split(3):
        part = {k: v[rows] for k, v in batch.items()}
        (naive(**part).loss * h.num_targets(naive, part) / h.num_targets(naive, batch)).backward()
    assert h.relative_error(router_part(h.gradients(naive)), router_part(full64)) > 3e-2


def test_a_micro_batch_without_targets_is_still_balanced():
    samples = h.token_samples(8)
    samples[2:4] = [h.without_targets(s) for s in samples[2:4]]
    gradients, _ = window_gradient(mixture(), one_window(samples, 2, shuffle=False))
    batch = h.pad_right(samples)
    full, full64 = (
        full_gradient(mixture(), batch, dtype) for dtype in (torch.float32, torch.float64)
    )
    h.assert_promise_1(gradients, full, full64)
    rest = h.pad_right(samples[:2] + samples[4:])
    assert (
        h.relative_error(
            router_part(full_gradient(mixture(), rest, torch.float64)), router_part(full64)
        )
        > 1e-2
    )


def test_dropout_is_the_same_in_both_passes():
    """With dropout the layouts agree with each other, and not with dropout 0."""
    samples = h.token_samples(12)
    whole, _ = window_gradient(mixture(dropout=0.3), one_window(samples, 12))
    for micro_batch_size in (1, 4):
        assert (
            h.relative_error(
                window_gradient(mixture(dropout=0.3), one_window(samples, micro_batch_size))[0],
                whole,
            )
            < 2e-6
        )
    assert h.relative_error(window_gradient(mixture(), one_window(samples, 12))[0], whole) > 1e-2


def test_without_attention_mask_padding_is_routed_too():
    """Then the padded width matters, and micro-batches are padded alike."""
    samples = [{k: v for k, v in s.items() if k != "attention_mask"} for s in h.token_samples(12)]
    window = one_window(samples, 3)
    gradients, _ = window_gradient(mixture(), window)
    assert window.state.pad_to_window
    full, full64 = (
        full_gradient(mixture(), h.pad_right(samples), dtype)
        for dtype in (torch.float32, torch.float64)
    )
    h.assert_promise_1(gradients, full, full64)


def test_a_head_that_adds_no_balancing_loss_gets_its_own_function_back():
    before = modeling_mixtral.load_balancing_loss_func
    model = mixture()
    model.router_aux_loss_coef = 0.0
    samples = h.token_samples(12)
    found, _ = window_gradient(model, one_window(samples, 4))
    assert modeling_mixtral.load_balancing_loss_func is before
    model.zero_grad()
    model(**h.pad_right(samples)).loss.backward()
    assert h.relative_error(found, h.gradients(model)) < 1e-6


@h.seeded
def switch():
    more = {
        "d_model": h.WIDTH,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_experts": 4,
        "expert_capacity": 64,
    }
    more |= {
        "router_jitter_noise": 0.0,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    }
    config = tf.SwitchTransformersConfig(
        vocab_size=h.VOCABULARY, **more, decoder_start_token_id=0, dropout_rate=0.0
    )
    return tf.SwitchTransformersForConditionalGeneration(config)


@NO_ROUTER_LOGITS
def test_a_balancing_loss_of_each_sample_is_read():
    """That of Switch Transformers is a mean over samples. It knows the switch as an argument only,
    not in its configuration.
    """

    def collate(samples):
        return {**h.pad_right(samples), "output_router_logits": True}

    samples = h.token_samples(8)
    model = switch()
    outputs = model(**collate(samples))
    outputs.loss.backward()
    plain = switch()(**h.pad_right(samples)).loss
    assert abs(float((outputs.loss - plain).detach())) > 1e-2, "control: the loss is in it"
    found, _ = window_gradient(switch(), one_window(samples, 3, collate))
    assert h.relative_error(found, h.gradients(model)) < 1e-6


def test_a_balancing_loss_of_other_arithmetic_is_refused(monkeypatch):
    """The same name and arguments, another result: what is not the known loss is not believed."""

    def of_other_arithmetic(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return sum(logits.softmax(-1).mean(0).square().sum() for logits in gate_logits)

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", of_other_arithmetic)
    with pytest.raises(LossNotAdditive, match="differs from that of Switch Transformer"):
        window_gradient(mixture(), one_window(h.token_samples(8), 4))
