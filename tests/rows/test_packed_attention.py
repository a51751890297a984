"""Packing with the attention kernels, end to end: loss and gradient of padded samples with the same
dropout masks, and the usual way where the kernels cannot compute what a model asks for.

On a CPU the kernels run in Triton's interpreter.
"""

from functools import partial
from types import SimpleNamespace

import helpers as h
import numpy as np
import pytest
import torch
import transformers as tf
from helpers import LLAMA_SIZES, SIZES, VOCABULARY, WIDTH, pad_right, seeded
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from tried import tried

from hf_ga.draws.dropout.masks import sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.loading.batches import MicroBatch
from hf_ga.rows.compiling import compile_layers
from hf_ga.rows.options import AttentionOptions
from hf_ga.rows.packed_attention import (
    PackedAttention,
    PackedSamples,
    attention_options,
    is_plain_mask,
)
from hf_ga.rows.packing import Packing, find_layer_stack
from hf_ga.rows.row_attention import RowAttention
from hf_ga.speed.speed_up import Call, acting

pytest.importorskip("triton", reason="the kernels need Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WITHOUT_FLOAT64 = (tf.GptOssForCausalLM,)
SPLIT = ([4, 0], [1, 2, 3], [5])
ONE_LAYER = {"num_hidden_layers": 1}


@seeded
def mistral(dropout, **more):
    """A token attends to 4 tokens."""
    sizes = {**LLAMA_SIZES, **more}
    return tf.MistralForCausalLM(
        tf.MistralConfig(**sizes, attention_dropout=dropout, sliding_window=4)
    )


@seeded
def gpt_oss(dropout):
    """Attention with sinks, which the kernels do not know."""
    config = tf.GptOssConfig(
        **LLAMA_SIZES,
        head_dim=8,
        attention_dropout=dropout,
        num_local_experts=2,
        num_experts_per_tok=1,
        attn_implementation="eager",
    )
    return tf.GptOssForCausalLM(config)


@seeded
def gpt2_classifier(dropout):
    """Pools the last token that is not padding, on whichever side that is."""
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = tf.GPT2Config(
        **{**SIZES, **ONE_LAYER}, **rates, n_positions=32, pad_token_id=0, num_labels=3
    )
    return tf.GPT2ForSequenceClassification(config)


class TwoDraws(nn.Module):
    """A layer that draws dropout again in the module whose attention it is."""

    is_causal = True

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden_states, attention_mask):
        projected = self.project(hidden_states).unflatten(-1, (3, 2, WIDTH // 2))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attend = AttentionInterface().get_interface("sdpa", None)
        attended, _ = attend(self, query, key, value, attention_mask, dropout=0.1)
        return hidden_states + nn.functional.dropout(attended.flatten(2), 0.1)


@seeded
class LayerOfTwoDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([TwoDraws()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, attention_mask, labels):
        width = input_ids.shape[1]
        earlier = torch.ones(width, width, dtype=torch.bool, device=input_ids.device).tril()
        mask = earlier & attention_mask.bool()[:, None, None]
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        logits = self.head(hidden).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=h.IGNORED)
        return SimpleNamespace(loss=loss)


MODELS = {
    "GPT-2": (h.gpt2, h.token_samples),
    "BERT": (h.bert_classifier, h.class_samples),
    "Llama": (h.llama, h.token_samples),
    "Mistral": (mistral, h.token_samples),
}


def samples_of(make, count=6):
    """Of 4 to 11 tokens, and one of a single token."""
    samples = make(count)
    samples[2] = {k: v[:1] if isinstance(v, list) else v for k, v in samples[2].items()}
    return samples


def pad_left(samples):
    flipped = [{k: v[::-1] if isinstance(v, list) else v for k, v in s.items()} for s in samples]
    return {k: v.flip(1) if v.dim() > 1 else v for k, v in pad_right(flipped).items()}


class Windows:
    """A model's windows, in which each micro-batch is computed as in training."""

    def __init__(self, model, samples, use_kernel=True, collate=pad_right):
        self.model = model.to(DEVICE)
        self.samples = samples
        self.collate = collate
        self.draws = KeyedDraws()
        self.packing = Packing(use_kernel=use_kernel)
        reason = self.packing.attach(model, self.draws)
        assert not reason
        self.packing._min_padding_ratio = 1.0 if use_kernel else np.inf
        with self.draws.scope(), torch.no_grad():
            for count in (2, 3):
                self.begin(np.arange(count))
                self.probe(count)

    def begin(self, rows):
        keys = sample_keys(3, 0, rows).to(DEVICE)
        self.draws.begin(keys, window_key(3, 0, 0).to(DEVICE))
        return self.draws.keys

    def probe(self, count):
        """Uncompiled, as a trial."""
        batch = self.collate([self.samples[0]] * count)
        with torch.compiler.set_stance("force_eager"):
            return self.model(**{name: x.to(DEVICE) for name, x in batch.items()})

    @property
    def num_calls(self):
        return self.packing._attention.num_calls

    def gradient(self, split=SPLIT, dtype=torch.float32, autocast=None):
        """(Gradients, value) of the mean loss over all targets. autocast: a half precision."""
        model = self.model.to(dtype)
        model.zero_grad()
        total = h.num_targets(model, self.collate(self.samples))
        value = 0.0
        with self.draws.scope():
            for rows in map(np.array, split):
                batch = self.collate([self.samples[row] for row in rows])
                count = h.num_targets(model, batch)
                if not count:
                    continue
                on_device = {name: x.to(DEVICE) for name, x in batch.items()}
                call = Call(MicroBatch(batch, rows, rows), on_device, self.begin(rows))
                with acting([self.packing], call):
                    with torch.autocast(DEVICE.type, autocast, enabled=autocast is not None):
                        loss = model(**on_device).loss * (count / total)
                    loss.backward()
                value += float(loss.detach())
        gradients = {name: x.cpu() for name, x in h.gradients(model).items()}
        model.to(torch.float32)
        return gradients, value


def padded_gradients(model, samples, collate=pad_right):
    """Without packing: in float64, its value, and in float32. A model that has no float64 must be
    equal to float32 within the floor of promise 1.
    """
    windows = Windows(model, samples, use_kernel=False, collate=collate)
    full, value = windows.gradient()
    truth = full
    if not isinstance(model, WITHOUT_FLOAT64):
        truth, value = windows.gradient(dtype=torch.float64)
    assert windows.num_calls == 0
    return truth, value, full


@pytest.mark.parametrize(
    ("name", "dropout", "more"),
    [
        ("GPT-2", 0.1, {}),  # two layers: each draws its own masks
        ("GPT-2", 0.0, ONE_LAYER),
        *((name, 0.1, ONE_LAYER) for name in ("BERT", "Mistral")),
    ],
)
def test_loss_and_gradient_are_those_of_padded_samples(name, dropout, more):
    """Negative control: the masks of other samples."""
    build, make = MODELS[name]
    model = build(dropout, **more)
    samples = samples_of(make)
    truth, value, full = padded_gradients(model, samples)
    windows = Windows(model, samples)
    gradients, loss = windows.gradient()
    num_layers = len(windows.packing._layers)
    # Without dropout a micro-batch without padding is not packed.
    assert windows.num_calls == num_layers * (3 if dropout else 2)
    h.assert_promise_1(gradients, full, truth)
    assert loss == pytest.approx(value, rel=1e-6)
    if dropout:
        other, _ = Windows(model, [*samples[1:], samples[0]], use_kernel=False).gradient()
        with pytest.raises(AssertionError, match="all parameters"):
            h.assert_promise_1(other, full, truth)


def test_under_autocast_it_computes_in_half_precision():
    build, make = MODELS["GPT-2"]
    model = build(0.1, **ONE_LAYER)
    samples = samples_of(make)
    truth, value, _ = padded_gradients(model, samples)
    full, _ = Windows(model, samples, use_kernel=False).gradient(autocast=torch.bfloat16)
    windows = Windows(model, samples)
    gradients, loss = windows.gradient(autocast=torch.bfloat16)
    assert windows.num_calls == len(SPLIT)
    h.assert_promise_1(gradients, full, truth, h.ROUNDING["bf16"])
    assert loss == pytest.approx(value, rel=h.ROUNDING["bf16"])
    assert h.relative_error(gradients, truth) > 1e-4, "it was computed in float32"


@pytest.mark.slow("runs the kernels in Triton's interpreter")
@pytest.mark.parametrize(
    ("name", "more", "autocast"),
    [
        ("GPT-2", {}, None),
        ("BERT", ONE_LAYER, None),
        ("Mistral", ONE_LAYER, None),
        ("Llama", ONE_LAYER, torch.bfloat16),
    ],
)
def test_compiled_rows_use_the_kernels(name, more, autocast, monkeypatch):
    build, make = MODELS[name]
    model = build(0.1, **more)
    samples = samples_of(make)
    truth, value, full = padded_gradients(model, samples)
    if autocast is not None:
        full, _ = Windows(model, samples, use_kernel=False).gradient(autocast=autocast)
    compile_layers(model, backend="eager")
    calls = []
    in_kernels = RowAttention._in_kernels
    monkeypatch.setattr(
        RowAttention, "_in_kernels", lambda *a: (calls.append(1), in_kernels(*a))[1]
    )
    gradients, loss = Windows(model, samples).gradient(autocast=autocast)
    num_layers = len(find_layer_stack(model))
    assert len(calls) == 2 * num_layers * len(SPLIT)  # forward, and again in the backward
    rounding = [h.ROUNDING["bf16"]] if autocast else []
    h.assert_promise_1(gradients, full, truth, *rounding)
    assert loss == pytest.approx(value, rel=h.ROUNDING["bf16"] if autocast else 1e-6)
    torch._dynamo.reset()


def test_a_trial_uses_it():
    build, make = MODELS["GPT-2"]
    packing = Packing(use_kernel=True)
    model = build(0.1, **ONE_LAYER).to(DEVICE)
    found = tried(model, samples_of(make, 12), pad_right, speed_ups=[packing])
    assert found.used == [packing], found.left_out
    assert packing._attention.num_calls > 0


@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_samples_of_one_length_have_no_padding(name):
    """And so no mask, by which causal attention is told from the other."""
    build, make = MODELS[name]
    model = build(0.1, **ONE_LAYER)
    samples = [
        {k: v[:4] if isinstance(v, list) else v for k, v in sample.items()} for sample in make(6)
    ]
    truth, _, full = padded_gradients(model, samples)
    windows = Windows(model, samples)
    gradients, _ = windows.gradient()
    assert windows.num_calls == len(SPLIT)
    h.assert_promise_1(gradients, full, truth)


def test_gradient_checkpointing_draws_the_same_masks_again():
    build, make = MODELS["Llama"]
    model = build(0.1, **ONE_LAYER)
    samples = samples_of(make)
    truth, _, full = padded_gradients(model, samples)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    windows = Windows(model, samples)
    gradients, _ = windows.gradient()
    assert windows.num_calls == 2 * len(SPLIT)
    h.assert_promise_1(gradients, full, truth)


def test_attention_counts_as_one_draw_of_its_module():
    model = LayerOfTwoDraws()
    samples = samples_of(h.token_samples)
    truth, _, full = padded_gradients(model, samples)
    windows = Windows(model, samples)
    gradients, _ = windows.gradient()
    assert windows.num_calls == len(SPLIT)
    h.assert_promise_1(gradients, full, truth)


def test_left_padding_is_padded_again():
    """Also after right padding, whose masks were found to be plain."""
    model = gpt2_classifier(0.1)
    samples = samples_of(h.class_samples)
    truth, _, full = padded_gradients(model, samples, pad_left)
    windows = Windows(model, samples)
    windows.gradient()
    num_calls = windows.num_calls
    assert num_calls == len(SPLIT)
    windows.collate = pad_left
    gradients, _ = windows.gradient()
    h.assert_promise_1(gradients, full, truth)
    # Without padding (the last micro-batch of a single sample) there is no side.
    assert windows.num_calls == num_calls + 1


@pytest.mark.parametrize("build", [gpt_oss, partial(h.bert_masked_lm, attn_implementation="eager")])
def test_other_attention_functions_are_padded_again(build):
    model = build(0.1)
    samples = samples_of(h.token_samples)
    truth, _, full = padded_gradients(model, samples)
    windows = Windows(model, samples)
    gradients, _ = windows.gradient()
    assert windows.packing._was_packed
    assert windows.num_calls == 0
    h.assert_promise_1(gradients, full, truth)


def test_a_mask_that_says_more_than_the_arguments_is_padded_again(monkeypatch):
    """Only where it does: for the longest samples."""
    model = h.gpt2(0.1, **ONE_LAYER)
    samples = samples_of(h.token_samples)
    lengths = [len(sample["input_ids"]) for sample in samples]

    original = tf.models.gpt2.modeling_gpt2.create_causal_mask

    def create_chunked_mask(*args, **kwargs):
        mask = original(*args, **kwargs)
        if mask is not None and mask.shape[-1] > 8:
            mask = mask.clone()
            mask[..., 8:, :8] = False
        return mask

    monkeypatch.setattr(tf.models.gpt2.modeling_gpt2, "create_causal_mask", create_chunked_mask)
    truth, _, full = padded_gradients(model, samples)
    windows = Windows(model, samples)
    gradients, _ = windows.gradient()
    plain = [rows for rows in SPLIT if max(lengths[row] for row in rows) <= 8]
    assert windows.num_calls == len(plain) < len(SPLIT)
    h.assert_promise_1(gradients, full, truth)


def real(*values):
    return torch.tensor(values, dtype=torch.bool).view(1, 1, len(values), -1)


@pytest.mark.parametrize(
    ("mask", "kind", "expected"),
    [
        (real([1, 0, 0], [1, 1, 0], [1, 1, 1]), (True, None), True),
        (real([1, 0, 0], [1, 1, 0], [1, 1, 1]), (False, None), False),
        (real([1, 0, 0], [1, 1, 0], [0, 1, 0]), (True, None), True),
        (real([1, 0, 0], [1, 1, 0], [0, 1, 0]), (False, None), False),
        (real([1, 1, 0], [1, 1, 0], [0, 0, 0]), (False, None), True),
        (real([1, 1, 1], [1, 1, 0], [0, 0, 0]), (False, None), False),
        (real([1, 0, 0], [0, 1, 0], [0, 0, 0]), (True, 1), True),
        (real([1, 0, 0], [1, 1, 0], [0, 0, 0]), (True, 1), False),
        (real([1, 0, 0], [1, 1, 0], [0, 0, 0]), (True, 2), True),
    ],
)
def test_plain_masks_by_hand(mask, kind, expected):
    """A sample of two tokens and one of padding, whose row says nothing."""
    lengths = torch.tensor([2])
    assert is_plain_mask(mask, lengths, *kind) == expected
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert is_plain_mask(added, lengths, *kind) == expected
    assert not is_plain_mask(added + 0.1, lengths, *kind), "a bias"
    assert not is_plain_mask(mask.expand(1, 2, 3, 3), lengths, *kind), "a mask for each head"


@pytest.mark.parametrize(
    ("options", "is_understood"),
    [
        ({"dropout": 0.1, "position_ids": torch.ones(1, 3)}, True),
        ({"use_cache": True, "encoder_hidden_states": None}, True),
        ({"softcap": 2.0}, False),
        ({"dropout": 1.0}, False),
        ({"position_bias": torch.ones(1, 2, 3, 3)}, False),
        ({"temperature": 2.0}, False),
        ({"sliding_window": 2}, True),
    ],
)
def test_only_known_arguments_are_understood(options, is_understood):
    module = nn.Identity()
    query = torch.ones(1, 2, 3, 8)
    assert attention_options(module, query, options) is None, "causal or not?"
    module.is_causal = True
    found = attention_options(module, query, options)
    assert (found is not None) == is_understood


@pytest.mark.parametrize("function", [sdpa_attention_forward, pad_right])
def test_only_the_function_of_transformers_is_computed(monkeypatch, function):
    """The attention of a user's own function is computed on padded samples."""
    tried = []
    monkeypatch.setattr("hf_ga.rows.packed_attention.attention_options", lambda *_: tried.append(1))
    attention = PackedAttention(KeyedDraws(), True)
    attention.start_micro_batch(PackedSamples.of(torch.ones(1, 3), torch.zeros(1).long()))
    query = torch.ones(1, 2, 3, 8)
    assert attention.attend(function, nn.Identity(), query, query, query, None, {}) is None
    assert len(tried) == (function is sdpa_attention_forward)


def test_a_window_on_both_sides_is_not_for_kernels():
    """Those of the kernels end at the token itself. The control: no window."""
    attention = PackedAttention(KeyedDraws(), True)
    attention.start_micro_batch(PackedSamples.of(torch.ones(1, 3), torch.zeros(1).long()))
    for window in (None, 2):
        options = AttentionOptions(0.0, 1.0, is_causal=False, sliding_window=window)
        assert attention.matches_mask(nn.Identity(), None, options) == (window is None)
