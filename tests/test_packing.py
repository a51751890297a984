"""Packed tokens: the same losses, gradients and dropout masks as padded samples, and refusal where that is not so.

Two oracles: plain PyTorch on the padded full batch in float64 (without dropout), and the padded run with the same keyed dropout in
float64. Negative controls: attention that does not keep samples apart, masks of another column, a kernel that ignores boundaries.
"""

import copy
from dataclasses import replace
from itertools import pairwise

import helpers
import hf_ga.exact.dropped_attention
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from accelerate import Accelerator
from helpers import IGNORED, VOCABULARY, WIDTH, num_targets, pad_right, relative_error, seeded, token_samples
from hf_ga.exact.packed_tokens import PackedTokens, packed_keep_masks
from hf_ga.proof.packing_proof import find_stack, prove_packing
from hf_ga.proof.proof import Prover
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import AttentionInterface
from transformers.pytorch_utils import Conv1D

import hf_ga
import hf_ga.speed.packing
from hf_ga.errors import ConfigError, UnkeyedRandomness
from hf_ga.exact import keyed
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.masks import keep_mask, sample_keys, window_key
from hf_ga.speed.packing import Packing

CPU = torch.device("cpu")
NUM_SAMPLES = 6
SPLITS = ([[0, 1, 2, 3, 4, 5]], [[4, 0], [1, 2, 3], [5]], [[3, 5, 1, 0], [2, 4]])
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT_LIKE = {**SIZES, "intermediate_size": 32, "max_position_embeddings": 40}
ANOTHER = 1e-3  # relative: no rounding

# --------------------------------------------------------------------------------------------------------- models and samples


def _with_dropout(dropout):
    return {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}


@seeded
def roberta(dropout=0.0):
    return tf.RobertaForMaskedLM(tf.RobertaConfig(**BERT_LIKE, **_with_dropout(dropout), pad_token_id=0))


@seeded
def eager_bert(dropout=0.0):
    return tf.BertForMaskedLM(tf.BertConfig(**BERT_LIKE, **_with_dropout(dropout), attn_implementation="eager"))


@seeded
def albert(dropout=0.0):
    """One layer that is called three times."""
    sizes = {**BERT_LIKE, "embedding_size": 8, "num_hidden_layers": 3}
    return tf.AlbertForMaskedLM(tf.AlbertConfig(**sizes, **_with_dropout(dropout)))


@seeded
def modern_bert(dropout=0.0):
    """Every third layer sees all, the others a window of 4 tokens on each side; their rotary positions differ."""
    rates = {"attention_dropout": dropout, "mlp_dropout": dropout, "embedding_dropout": dropout}
    sizes = {**SIZES, "intermediate_size": 32, "num_hidden_layers": 4, "pad_token_id": 0, "local_attention": 8}
    return tf.ModernBertForMaskedLM(tf.ModernBertConfig(**sizes, **rates, attn_implementation="sdpa"))


@seeded
def gpt2_classifier(dropout=0.0):
    """Pools the last token that is not padding."""
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32, "pad_token_id": 0}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return tf.GPT2ForSequenceClassification(tf.GPT2Config(**sizes, **rates, num_labels=helpers.NUM_CLASSES))


@seeded
def convolutional_bert():
    return tf.ConvBertForMaskedLM(tf.ConvBertConfig(**BERT_LIKE, embedding_size=WIDTH, conv_kernel_size=3, **_with_dropout(0.0)))


@seeded
def mamba():
    return tf.MambaForCausalLM(tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, state_size=4))


@seeded
def mpnet():
    """Its relative positions are a bias that is computed for whole batches."""
    return tf.MPNetForMaskedLM(tf.MPNetConfig(**BERT_LIKE, **_with_dropout(0.0)))


@seeded
def deberta():
    more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    return tf.DebertaV2ForMaskedLM(tf.DebertaV2Config(**BERT_LIKE, **more, **_with_dropout(0.0)))


@seeded
def bloom():
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=2))


class Mixing(nn.Module):
    """Layers whose output for a token depends on its left neighbour, in the batch as in a packed row."""

    def __init__(self, across: bool = True, draws: str = "") -> None:
        super().__init__()
        self.across, self.draws = across, draws
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(MixingLayer(across, draws) for _ in range(2))

    def forward(self, input_ids, attention_mask, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class MixingLayer(nn.Module):
    def __init__(self, across: bool, draws: str) -> None:
        super().__init__()
        self.across, self.draws, self.linear = across, draws, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states):
        x = self.linear(hidden_states)
        if self.across:
            x = x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        if self.draws == "samples":  # one draw for each sample
            x = x * nn.functional.dropout(torch.ones_like(x[:, :1, :1]), 0.5, self.training)
        return x.tanh()


@seeded
def mixing(**settings):
    return Mixing(**settings)


MODELS = {
    "gpt2": (helpers.gpt2, "tokens"),
    "llama": (helpers.llama, "tokens"),
    "masked lm": (helpers.bert_masked_lm, "tokens"),
    "token classes": (helpers.bert_token_classifier, "tags"),
    "classes": (helpers.bert_classifier, "classes"),
    "last tokens": (gpt2_classifier, "classes"),
    "eager": (eager_bert, "tokens"),
    "roberta": (roberta, "tokens"),
    "albert": (albert, "tokens"),
    "modern bert": (modern_bert, "tokens"),
}


def samples_of(kind, count=NUM_SAMPLES):
    """Of 4 to 11 tokens, one has a single one. One third is of full length, so that some rows are without padding."""
    make = {"tokens": token_samples, "tags": helpers.tag_samples, "classes": helpers.class_samples}[kind]
    samples = make(count)
    samples[2] = {k: v[:1] if isinstance(v, list) else v for k, v in samples[2].items()}
    return samples


def pad_left(samples):
    flipped = [{k: v[::-1] if isinstance(v, list) else v for k, v in s.items()} for s in samples]
    return {k: v.flip(1) if v.dim() > 1 else v for k, v in pad_right(flipped).items()}


def asked(model, samples, one_width=None, collate=pad_right):
    """What the proof says: (packing or None, why not)."""
    prover = Prover(model, samples, collate, None)
    with prover.untouched():
        prover.places.find(prover.forward_copies, False)
        with prover.places.active():
            prover.find_router()
            name, _ = prover.prove_rule()
            return prove_packing(prover, prover.width_matters(name) is not False if one_width is None else one_width)


def packing_of(model, sample):
    """Without a proof; packs whatever has padding."""
    places = KeyedDropout(model)
    places.find(lambda count: model(**pad_right([sample] * count)))
    packing = Packing(places, find_stack(model))
    packing.gain = 1.0
    return packing


def window_gradient(packing, samples, split, dtype=torch.float32, padded=False, collate=pad_right):
    """(gradients, value) of the mean loss over all targets, micro-batch by micro-batch, dropout keyed by sample."""
    model = packing.places.model.to(dtype)
    model.zero_grad()
    packing.gain = np.inf if padded else 1.0
    total, value = num_targets(model, collate(samples)), 0.0
    with packing.places.active(), packing.active():
        for rows in split:
            batch = collate([samples[i] for i in rows])
            if count := num_targets(model, batch):
                packing.set_batch(batch, CPU)
                packing.places.set_keys(sample_keys(3, 0, np.array(rows)), window_key(3, 0, 0))
                outputs = model(**batch)
                loss = (outputs if isinstance(outputs, torch.Tensor) else outputs.loss) * (count / total)
                loss.backward()
                value += float(loss.detach())
    gradients = helpers.gradients(model)
    model.to(torch.float32)
    return gradients, value


# ------------------------------------------------------------------------------------------------------ the same update


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_are_those_of_padded_samples(name, dropout):
    build, kind = MODELS[name]
    model, samples = build(dropout), samples_of(kind)
    packing = packing_of(model, samples[0])
    if dropout:
        truth, value = window_gradient(packing, samples, SPLITS[0], torch.float64, padded=True)
    else:
        truth = helpers.full_batch_gradient(model, pad_right(samples))
        value = float(helpers.mean_loss(model, pad_right(samples)).detach())
    full, _ = window_gradient(packing, samples, SPLITS[0], padded=True)
    for split in SPLITS:
        gradients, loss = window_gradient(packing, samples, split)
        helpers.assert_promise_1(gradients, full, truth)
        assert loss == pytest.approx(value, rel=1e-6)
    exact, _ = window_gradient(packing, samples, SPLITS[1], torch.float64)
    if name not in ("gpt2", "llama", "modern bert"):  # which compute in float32 inside (loss, rotary positions)
        assert relative_error(exact, truth) < 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_the_proof_accepts(name):
    build, kind = MODELS[name]
    packing, why = asked(build(0.0), samples_of(kind, 24))
    assert packing is not None, why
    assert packing.plain == (name != "modern bert"), "a kernel may compute full and causal attention, not windows"
    with_dropout, why = asked(build(0.1), samples_of(kind, 24))
    assert with_dropout is not None, why
    assert not with_dropout.plain, "kernels know no dropout, so nothing is proven of them"
    assert with_dropout.dropped == (name != "modern bert") and not packing.dropped


@pytest.mark.parametrize("build", [helpers.gpt2, helpers.bert_masked_lm])
def test_under_autocast_packing_is_no_further_off_than_padding(build):
    model, samples = build(0.1), samples_of("tokens")
    packing = packing_of(model, samples[0])
    truth, _ = window_gradient(packing, samples, SPLITS[0], torch.float64, padded=True)
    with torch.autocast("cpu", torch.bfloat16):
        padded, _ = window_gradient(packing, samples, SPLITS[0], padded=True)
        gradients, _ = window_gradient(packing, samples, SPLITS[0])
    assert relative_error(gradients, truth) <= 2 * relative_error(padded, truth)
    assert relative_error(padded, truth) > 1e-4, "autocast was on"


def test_linear_layers_see_real_tokens_only():
    model, samples = helpers.gpt2(0.1), samples_of("tokens")
    packing = packing_of(model, samples[0])
    rows = {}
    for name, module in model.named_modules():
        if isinstance(module, Conv1D | nn.LayerNorm | nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: rows.setdefault(name, []).append(args[0][..., 0].numel()))
    real, batch = sum(len(s["input_ids"]) for s in samples), pad_right(samples)["input_ids"]
    window_gradient(packing, samples, SPLITS[0])
    window_gradient(packing, samples, SPLITS[0], padded=True)
    inside = {name: seen for name, seen in rows.items() if ".h." in name}
    assert len(inside) == 2 * 6, "two norms and four linear maps in each of two layers"
    assert all(seen == [real, batch.numel()] for seen in inside.values())
    assert real < 0.8 * batch.numel()
    assert rows["lm_head"] == [batch.numel()] * 2, "heads stay padded"


# --------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("inner", [(5,), (3, 7), (1,), (2, 1, 4)])
def test_masks_are_those_of_padded_samples_bit_for_bit(monkeypatch, inner, on_device):
    """`on_device`: as torch draws them where keys are not on a CPU."""
    if on_device:
        monkeypatch.setattr("hf_ga.exact.packed_tokens.seeds_of", keyed._seeds_on_device)
    mask = pad_right(samples_of("tokens"))["attention_mask"]
    tokens, keys = PackedTokens.of(mask, CPU), sample_keys(1, 2, np.arange(len(mask)))
    places = [12345, 2**64 - 5]
    packed = packed_keep_masks(keys, places, tokens, torch.Size((*tokens.packed_shape, *inner)), 0.3)
    assert packed.shape == (2, *tokens.packed_shape, *inner)
    for place, drawn in zip(places, packed, strict=True):
        whole = keep_mask(keys, place, (*mask.shape, *inner), 0, 0.3)
        assert torch.equal(drawn[0], whole[mask.bool()])
        if len(drawn.unique()) > 1 and drawn.numel() > 50:
            assert not torch.equal(drawn[0], whole.roll(1, 1)[mask.bool()]), "the masks of another column"


def test_draws_that_belong_to_samples_are_not_packed():
    model, samples = mixing(across=False, draws="samples"), samples_of("tokens", 24)
    packing, why = asked(model, samples)
    assert packing is None and "cannot be tied to tokens" in why
    packing = packing_of(model, samples[0])
    with pytest.raises(UnkeyedRandomness, match="Compute this model padded"):
        window_gradient(packing, samples[:NUM_SAMPLES], SPLITS[0])
    packing, why = asked(mixing(across=False), samples)
    assert packing is not None, f"the same without its draw: {why}"


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("build", [convolutional_bert, mamba, mpnet, deberta, bloom, mixing, helpers.xlnet_lm])
def test_layers_that_look_beyond_a_token_in_another_way_are_refused(build):
    packing, why = asked(build(), token_samples(24), one_width=False)
    assert packing is None
    assert "cannot take packed tokens" in why or "packed tokens change" in why


def test_fourier_mixing_is_refused_and_so_is_what_depends_on_padding():
    assert "packed tokens change" in asked(helpers.fnet_masked_lm(), token_samples(24), one_width=False)[1]
    assert asked(helpers.fnet_masked_lm(), token_samples(24)) == (None, "padding matters to it")
    spans = [{**{k: v for k, v in s.items() if k != "labels"}, "start_positions": 1, "end_positions": 2} for s in token_samples(24)]
    assert asked(helpers.bert_question_answering(), spans) == (None, "padding matters to it"), "a softmax over padding"


def test_other_obstacles_are_told():
    samples = token_samples(24)
    assert asked(helpers.t5(), samples) == (None, "its configuration has is_encoder_decoder")
    assert "router" in asked(helpers.mixtral(0.1), samples)[1]
    assert "no stack" in asked(helpers.plain_tagger(), helpers.plain_samples(24))[1]
    same = [{k: v[:4] for k, v in s.items()} for s in samples]
    assert "no padding" in asked(helpers.bert_masked_lm(), same, one_width=False)[1]


def test_attention_that_forgets_to_keep_samples_apart_is_refused(monkeypatch):
    def together(tokens, original, module, heads, mask, **more):
        return original(module, *heads, None, **more)

    samples = token_samples(24)
    monkeypatch.setattr(hf_ga.speed.packing, "padded_attention", together)
    for build in (helpers.gpt2, helpers.bert_masked_lm):
        packing, why = asked(build(), samples)
        assert packing is None and "packed tokens change" in why


# ------------------------------------------------------------------------------------ attention with dropout, sample by sample


def counted(monkeypatch):
    """Calls of attention that computed one sample after the other."""
    calls, original = [], hf_ga.speed.packing.separate_attention
    monkeypatch.setattr(
        hf_ga.speed.packing, "separate_attention", lambda *args, **more: (calls.append(args), original(*args, **more))[1]
    )
    return calls


@pytest.mark.parametrize(
    ("name", "collate"), [("last tokens", pad_left), *((name, pad_right) for name in MODELS if name != "modern bert")]
)
def test_attention_sample_by_sample_is_that_of_padded_samples(name, collate, monkeypatch):
    build, kind = MODELS[name]
    samples, calls = samples_of(kind), counted(monkeypatch)
    packing = packing_of(build(0.1), samples[0])
    monkeypatch.setattr(hf_ga.exact.dropped_attention, "WEIGHTS_OF_SAMPLE", 0)
    truth, value = window_gradient(packing, samples, SPLITS[0], torch.float64, padded=True, collate=collate)
    full, _ = window_gradient(packing, samples, SPLITS[0], padded=True, collate=collate)
    window_gradient(packing, samples, SPLITS[1], collate=collate)
    assert not calls, "not proven"
    packing.dropped = True
    splits = SPLITS[:1] if collate is pad_left else SPLITS  # there GPT-2's positions depend on the batch's width
    for split in splits:
        gradients, loss = window_gradient(packing, samples, split, collate=collate)
        helpers.assert_promise_1(gradients, full, truth)
        assert loss == pytest.approx(value, rel=1e-6)
    assert calls
    exact, _ = window_gradient(packing, samples, splits[-1], torch.float64, collate=collate)
    if name not in ("gpt2", "llama"):  # which compute in float32 inside
        assert relative_error(exact, truth) < 1e-12
    original = PackedTokens.spans.func
    monkeypatch.setattr(
        PackedTokens, "spans", property(lambda self: [(a, b, 0 if c else self.width - b + a) for a, b, c in original(self)])
    )
    wrong, _ = window_gradient(packing, samples, SPLITS[0], torch.float64, collate=collate)
    assert relative_error(wrong, truth) > 1e-4, "control: masks of other columns"


@pytest.mark.parametrize("why", ["short samples", "holes", "autocast", "evaluation"])
def test_attention_is_computed_sample_by_sample_where_that_gains(why, monkeypatch):
    samples, calls = samples_of("tokens"), counted(monkeypatch)
    packing = packing_of(helpers.bert_masked_lm(0.1), samples[0])
    packing.dropped = True
    weights = 2 * (sum(len(s["input_ids"]) for s in samples) / len(samples)) ** 2 / torch.get_num_threads()
    monkeypatch.setattr(hf_ga.exact.dropped_attention, "WEIGHTS_OF_SAMPLE", weights * (1.01 if why == "short samples" else 0.99))
    if why == "evaluation":
        packing.places.model.eval()

    def with_a_hole(samples):
        batch = pad_right(samples)
        batch["attention_mask"][0, 1] = 0
        batch["labels"][0, 1:3] = IGNORED
        return batch

    with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
        window_gradient(packing, samples, SPLITS[0], collate=with_a_hole if why == "holes" else pad_right)
    assert not calls
    monkeypatch.setattr(hf_ga.exact.dropped_attention, "WEIGHTS_OF_SAMPLE", weights * 0.99)
    packing.places.model.train()
    window_gradient(packing, samples, SPLITS[0])
    assert len(calls) == 2, "control: one for each layer"


@pytest.mark.parametrize("wrong", ["sees all samples", "fails"])
def test_attention_sample_by_sample_is_proven(wrong, monkeypatch):
    """One that is wrong is not taken, and the layers are packed all the same."""

    def together(tokens, places, module, heads, **more):
        if wrong == "fails":
            raise RuntimeError("no such heads")
        return F.scaled_dot_product_attention(*heads).transpose(1, 2), None

    monkeypatch.setattr(hf_ga.speed.packing, "separate_attention", together)
    packing, why = asked(helpers.bert_masked_lm(0.1), token_samples(24))
    assert packing is not None and not packing.dropped, why


# ------------------------------------------------------------------------------------------------------------ the kernel


def kernel(seen, separate=True):
    """`varlen_attn` by its documentation, from nothing but its arguments; computed as one masked matrix, in another way than the
    proof's reference. Not separate: a kernel that ignores the boundaries.
    """

    def run(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        seen.append((query.shape, cu_seq_q.tolist(), max_q, scale, window_size))
        assert query.shape == key.shape == value.shape and cu_seq_q is cu_seq_k and cu_seq_q.dtype == torch.int32
        assert max_q == max_k == max(b - a for a, b in pairwise(cu_seq_q.tolist())) and cu_seq_q[-1] == len(query)
        owner = torch.bucketize(torch.arange(len(query)), cu_seq_q[1:], right=True)
        allowed = owner[:, None] == owner[None, :] if separate else torch.ones(len(query), len(query), dtype=torch.bool)
        if window_size == (-1, 0):
            allowed = allowed.tril()
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), value)

    return run


@pytest.mark.parametrize("name", ["gpt2", "llama", "masked lm", "classes"])
def test_a_kernel_gets_what_it_needs(name, monkeypatch):
    build, kind = MODELS[name]
    model, samples, seen = build(0.0), samples_of(kind), []
    packing = packing_of(model, samples[0])
    truth, full = (window_gradient(packing, samples, SPLITS[0], dtype, padded=True)[0] for dtype in (torch.float64, torch.float32))
    monkeypatch.setattr(hf_ga.speed.packing, "kernel_takes", lambda query, value: True)
    monkeypatch.setattr(hf_ga.speed.packing, "varlen_attn", kernel(seen))
    window_gradient(packing, samples, SPLITS[1])
    assert not seen, "not proven plain"
    packing.plain = True
    gradients, _ = window_gradient(packing, samples, SPLITS[0])
    helpers.assert_promise_1(gradients, full, truth)
    lengths = [len(s["input_ids"]) for s in samples]
    heads = (sum(lengths), 2, WIDTH // 2)  # key heads are repeated
    expected = (heads, [0, *np.cumsum(lengths).tolist()], max(lengths), (WIDTH // 2) ** -0.5)
    assert seen == [(*expected, (-1, 0 if name in ("gpt2", "llama") else -1))] * 2
    monkeypatch.setattr(hf_ga.speed.packing, "varlen_attn", kernel(seen, separate=False))
    wrong, _ = window_gradient(packing, samples, SPLITS[0])
    assert relative_error(wrong, truth) > ANOTHER


def test_a_kernel_is_not_asked_for_dropout_windows_or_on_a_cpu(monkeypatch):
    seen = []
    monkeypatch.setattr(hf_ga.speed.packing, "varlen_attn", kernel(seen))
    samples = samples_of("tokens")
    packing = packing_of(helpers.gpt2(), samples[0])
    packing.plain = True
    window_gradient(packing, samples, SPLITS[0])
    assert not seen, "FlashAttention is for CUDA"
    monkeypatch.setattr(hf_ga.speed.packing, "kernel_takes", lambda query, value: True)
    for model in (helpers.gpt2(0.1), modern_bert()):
        packing = packing_of(model, samples[0])
        packing.plain = True
        window_gradient(packing, samples, SPLITS[0])
    assert {window for *_, window in seen} <= {(-1, -1)} and len(seen) == 2, "ModernBERT's two layers that see all"


def test_a_sliding_window_longer_than_the_samples_is_not_plain():
    config = tf.MistralConfig(**SIZES, intermediate_size=32, num_key_value_heads=1, sliding_window=100)
    torch.manual_seed(0)
    packing, why = asked(tf.MistralForCausalLM(config).train(), token_samples(24))
    assert packing is not None, why
    assert not packing.plain


# -------------------------------------------------------------------------------------------------- checkpointing, padding


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("how", ["layers", "reentrant", "wrapped"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "masked lm"])
def test_gradient_checkpointing_computes_packed_tokens_again(name, how, separate, monkeypatch):
    build, kind = MODELS[name]
    model, samples = build(0.1), samples_of(kind)
    packing = packing_of(model, samples[0])
    packing.dropped = separate
    monkeypatch.setattr(hf_ga.exact.dropped_attention, "WEIGHTS_OF_SAMPLE", 0)
    truth, _ = window_gradient(packing, samples, SPLITS[1], torch.float64, padded=True)
    full, _ = window_gradient(packing, samples, SPLITS[1])
    names = list(full)
    if how == "wrapped":
        for i, layer in enumerate(packing.layers):
            packing.layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    rows = []
    norm = next(m for n, m in packing.layers.named_modules() if isinstance(m, nn.LayerNorm) or n.endswith("input_layernorm"))
    norm.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:2]))
    gradients, _ = window_gradient(packing, samples, SPLITS[1])
    helpers.assert_promise_1(dict(zip(names, gradients.values(), strict=True)), full, truth)
    real = [sum(len(samples[i]["input_ids"]) for i in rows_) for rows_ in SPLITS[1]]
    assert sorted(rows) == sorted([(1, number) for number in real[:-1]] * 2 + [(1, real[-1])] * 2)


def test_left_padding_packs_where_padding_predicts_nothing():
    samples = samples_of("classes")
    packing = packing_of(gpt2_classifier(0.1), samples[0])
    truth, _ = window_gradient(packing, samples, SPLITS[0], torch.float64, padded=True, collate=pad_left)
    full, _ = window_gradient(packing, samples, SPLITS[0], padded=True, collate=pad_left)
    gradients, _ = window_gradient(packing, samples, SPLITS[0], collate=pad_left)
    helpers.assert_promise_1(gradients, full, truth)
    accepted, why = asked(gpt2_classifier(), samples_of("classes", 24), one_width=False, collate=pad_left)
    assert accepted is not None, why
    refused, why = asked(helpers.bert_classifier(), samples_of("classes", 24), one_width=False, collate=pad_left)
    assert refused is None and "packed tokens change" in why, "it pools the first column, which is padding"
    packing = packing_of(helpers.gpt2(), token_samples(1)[0])
    with packing.places.active(), packing.active():
        batch = pad_left(samples_of("tokens"))
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        packing.set_batch(batch, CPU)
        assert packing.places.packed is None, "the last padding predicts the first token"


def test_what_gains_nothing_stays_padded():
    packing = packing_of(helpers.bert_masked_lm(), token_samples(1)[0])
    mask = torch.ones(4, 20, dtype=torch.long)
    mask[0, 18:] = 0  # 80 padded tokens for 78 real ones
    with packing.places.active(), packing.active():
        for gain, is_packed in [(None, False), (1.0, True), (1.2, False)]:
            packing.gain = gain
            packing.set_batch({"attention_mask": mask}, CPU)
            assert (packing.places.packed is not None) == is_packed
        packing.gain = 1.0
        for other in (mask[:, :18], mask.float() * 0.5, torch.zeros_like(mask), mask[None]):
            packing.set_batch({"attention_mask": other}, CPU)
            assert packing.places.packed is None
        packing.set_batch({}, CPU)
        assert packing.places.packed is None


def test_nothing_is_left_behind():
    model, samples = helpers.gpt2(), samples_of("tokens")
    packing, batch = packing_of(model, samples[0]), pad_right(samples)
    before = AttentionInterface.get_interface
    window_gradient(packing, samples, SPLITS[0])
    with pytest.raises(RuntimeError, match="stop"), packing.places.active(), packing.active():
        packing.set_batch(batch, CPU)
        raise RuntimeError("stop")
    assert AttentionInterface.get_interface is before and packing.places.packed is None
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    packing.set_batch(batch, CPU)
    assert packing.places.packed is None, "not active"
    assert torch.equal(model(**batch).logits, copy.deepcopy(model)(**batch).logits)


def test_a_path_that_depends_on_the_data_is_an_error():
    model, samples = mixing(across=False), samples_of("tokens")
    packing = packing_of(model, samples[0])
    with packing.places.active(), packing.active(), pytest.raises(ConfigError, match="packed layers got hidden states of shape"):
        packing.set_batch(pad_right(samples), CPU)
        model.layers[0](torch.zeros(2, 3, WIDTH))


# ---------------------------------------------------------------------------------------------------------- whole windows


@pytest.mark.parametrize("own_loss", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "masked lm", "classes"])
def test_a_window_is_the_same_packed_and_padded(name, own_loss, monkeypatch):
    build, kind = MODELS[name]
    samples, packed_shapes = samples_of(kind, 12), []
    spread = PackedTokens.spread
    monkeypatch.setattr(PackedTokens, "spread", lambda self, x: (packed_shapes.append(x.shape[:2]), spread(self, x))[1])

    def gradient(packed, size):
        nonlocal model
        model, accelerator = build(0.1), Accelerator(cpu=True)
        rule = hf_ga.prove_targets(model, samples, pad_right, loss_fn=sum_loss if own_loss else None, padding_free=True)
        assert rule.packing is not None and "no padding between layers" in str(rule)
        rule.packing.gain = 1.0
        rule = rule if packed else replace(rule, packing=None)
        packed_shapes.clear()
        windows = hf_ga.WindowLoader(samples, pad_right, accelerator=accelerator, per_device_batch_size=size, global_batch_size=12)
        result = hf_ga.backward_window(
            accelerator, model, next(iter(windows)), targets=rule, loss_fn=sum_loss if own_loss else None
        )
        assert bool(packed_shapes) == packed
        return helpers.gradients(model), float(result.loss)

    def sum_loss(outputs, batch):
        count = num_targets(model, batch)
        return outputs.loss * count, count

    model = None
    truth, value = gradient(False, 12)
    for size in (4, 6):
        gradients, loss = gradient(True, size)
        assert relative_error(gradients, truth) < 1e-6 and loss == pytest.approx(value, rel=1e-6)
