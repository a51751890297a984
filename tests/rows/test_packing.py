"""Packed tokens: the same losses, gradients and dropout masks as padded samples, and refusal where
that is not so.

Two oracles: plain PyTorch on the padded full batch in float64 (without dropout), and the padded run
    with the same keyed dropout in
float64. Negative control: masks of another column.
"""

import copy
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import helpers
import numpy as np
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from helpers import (
    IGNORED,
    SIZES,
    VOCABULARY,
    WIDTH,
    num_targets,
    pad_right,
    relative_error,
    seeded,
    token_samples,
)
from steps import backward_window
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from transformers import AttentionInterface
from tried import later, tried
from windows import one_window, window_gradient

import hf_ga
from hf_ga.draws.dropout.dropout_site import DropoutSite
from hf_ga.draws.dropout.masks import keep_mask, sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import ConfigError, UnkeyedRandomness
from hf_ga.loading.batches import MicroBatch
from hf_ga.rows.packed_tokens import PackedMasks, PackedTokens
from hf_ga.rows.packing import Packing, padded_sides
from hf_ga.speed.speed_up import Call, acting

CPU = torch.device("cpu")
NUM_SAMPLES = 6
SPLITS = ([[0, 1, 2, 3, 4, 5]], [[4, 0], [1, 2, 3], [5]], [[3, 5, 1, 0], [2, 4]])
BERT_LIKE = {**SIZES, "intermediate_size": 32, "max_position_embeddings": 40}


@seeded
def bert_like(family, dropout=0.0, **more):
    config = getattr(tf, f"{family}Config")
    head = getattr(tf, f"{family}ForMaskedLM")
    return head(
        config(
            **BERT_LIKE, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **more
        )
    )


@seeded
def modern_bert(dropout=0.0):
    """Every third layer sees all, the others a window of 4 tokens on each side; their rotary
    positions differ.
    """
    rates = {"attention_dropout": dropout, "mlp_dropout": dropout, "embedding_dropout": dropout}
    sizes = {
        **SIZES,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "pad_token_id": 0,
        "local_attention": 8,
    }
    return tf.ModernBertForMaskedLM(
        tf.ModernBertConfig(**sizes, **rates, attn_implementation="sdpa")
    )


@seeded
def gpt2_classifier(dropout=0.0):
    """Pools the last token that is not padding."""
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = tf.GPT2Config(
        **SIZES, **rates, n_positions=32, pad_token_id=0, num_labels=helpers.NUM_CLASSES
    )
    return tf.GPT2ForSequenceClassification(config)


class Mixing(nn.Module):
    """Two layers, each of which does something with the hidden states behind a linear map."""

    def __init__(self, act=lambda x: x) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(MixingLayer(act) for _ in range(2))

    def forward(self, input_ids, attention_mask, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )


class MixingLayer(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = act

    def forward(self, hidden_states):
        return self.act(self.linear(hidden_states)).tanh()


def drawn_for_each_sample(x):
    return x * nn.functional.dropout(torch.ones_like(x[:, :1, :1]), 0.5)


mixing = seeded(Mixing)
# Layers that look beyond a token in another way than through transformers' attention interface with
# a mask of its own.
UNSUPPORTED = {
    "a bias computed for whole batches": lambda: bert_like("MPNet"),
    "ALiBi": seeded(
        lambda: tf.BloomForCausalLM(
            tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=2)
        )
    ),
    "Fourier mixing": helpers.fnet_masked_lm,
}
MODELS = {
    "gpt2": (helpers.gpt2, "tokens"),
    "llama": (helpers.llama, "tokens"),
    "masked lm": (helpers.bert_masked_lm, "tokens"),
    "token classes": (helpers.bert_token_classifier, "tags"),
    "classes": (helpers.bert_classifier, "classes"),
    "last tokens": (gpt2_classifier, "classes"),
    "eager": (partial(bert_like, "Bert", attn_implementation="eager"), "tokens"),
    "albert": (
        partial(bert_like, "Albert", embedding_size=8),
        "tokens",
    ),  # one layer that is called twice
    "modern bert": (modern_bert, "tokens"),
}


def samples_of(kind, count=NUM_SAMPLES):
    """Of 4 to 11 tokens, one has a single one. One third is of full length, so that some rows are
    without padding.
    """
    make = {"tokens": token_samples, "tags": helpers.tag_samples, "classes": helpers.class_samples}[
        kind
    ]
    samples = make(count)
    samples[2] = {k: v[:1] if isinstance(v, list) else v for k, v in samples[2].items()}
    return samples


def pad_left(samples):
    flipped = [{k: v[::-1] if isinstance(v, list) else v for k, v in s.items()} for s in samples]
    return {k: v.flip(1) if v.dim() > 1 else v for k, v in pad_right(flipped).items()}


def asked(model, samples, collate=pad_right):
    """What the trial says: (packing or None, why not)."""
    found = tried(model, samples, collate, speed_ups=[Packing()])
    return (found.used or [None])[0], found.left_out.get("packing", "")


def packing_of(model, sample):
    """Without a trial; packs whatever has padding. The draws know padded micro-batches."""
    draws = KeyedDraws()
    packing = Packing()
    assert not packing.attach(model, draws)
    packing._min_padding_ratio = 1.0
    with draws.scope(), torch.no_grad():
        for count in (2, 3):
            draws.begin(sample_keys(3, 0, np.arange(count)), window_key(3, 0, 0))
            model(**pad_right([sample] * count))
    return packing


def call_of(batch, rows=None):
    rows = np.arange(len(batch["attention_mask"])) if rows is None else np.array(rows)
    return Call(MicroBatch(batch, rows, rows), batch, sample_keys(3, 0, rows))


@contextmanager
def packed(packing, call):
    """As training uses it."""
    draws = packing._dropout
    with draws.scope():
        draws.begin(call.keys, window_key(3, 0, 0))
        with acting([packing], replace(call, keys=draws.keys)):
            yield


def packed_gradient(
    model, packing, samples, split, dtype=torch.float32, padded=False, collate=pad_right
):
    """(gradients, value) of the mean loss over all targets, micro-batch by micro-batch, dropout
    keyed by sample.
    """
    model.to(dtype).zero_grad()
    packing._min_padding_ratio = np.inf if padded else 1.0
    total = num_targets(model, collate(samples))
    value = 0.0
    for rows in split:
        batch = collate([samples[i] for i in rows])
        count = num_targets(model, batch)
        if not count:
            continue
        with packed(packing, call_of(batch, rows)):
            outputs = model(**batch)
            loss = (outputs if isinstance(outputs, torch.Tensor) else outputs.loss) * (
                count / total
            )
            loss.backward()
            value += float(loss.detach())
    gradients = helpers.gradients(model)
    model.to(torch.float32)
    return gradients, value


@pytest.mark.parametrize(
    ("name", "dropout"),
    [*((name, 0.1) for name in MODELS), ("gpt2", 0.0)],
)
def test_loss_and_gradient_are_those_of_padded_samples(name, dropout):
    build, kind = MODELS[name]
    model = build(dropout)
    samples = samples_of(kind)
    packing = packing_of(model, samples[0])
    if dropout:
        truth, value = packed_gradient(
            model, packing, samples, SPLITS[0], torch.float64, padded=True
        )
    else:
        truth = helpers.full_batch_gradient(model, pad_right(samples))
        value = float(helpers.mean_loss(model, pad_right(samples)).detach())
    full, _ = packed_gradient(model, packing, samples, SPLITS[0], padded=True)
    for split in SPLITS:
        gradients, loss = packed_gradient(model, packing, samples, split)
        helpers.assert_promise_1(gradients, full, truth)
        assert loss == pytest.approx(value, rel=1e-6)
    exact, _ = packed_gradient(model, packing, samples, SPLITS[1], torch.float64)
    if name not in (
        "gpt2",
        "llama",
        "modern bert",
    ):  # which compute in float32 inside (loss, rotary positions)
        assert relative_error(exact, truth) < 1e-12
    accepted, why = asked(build(dropout), samples_of(kind, 24))
    assert accepted is not None, why


@pytest.mark.parametrize("inner", [(5,), (3, 7), (1,), (2, 1, 4)])
def test_masks_are_those_of_padded_samples_bit_for_bit(inner):
    mask = pad_right(samples_of("tokens"))["attention_mask"]
    tokens = PackedTokens.of(mask, CPU)
    keys = sample_keys(1, 2, np.arange(len(mask)))
    key = 2**64 - 5
    site = DropoutSite("x", key, torch.Size((*mask.shape, *inner)), 0)
    masks = PackedMasks(tokens, keys)
    drawn = masks.mask(site, torch.Size((*tokens.packed_shape, *inner)), 0.3)
    whole = keep_mask(keys, key, (*mask.shape, *inner), 0, 0.3)
    assert torch.equal(drawn[0], whole[mask.bool()])
    assert not torch.equal(drawn[0], whole.roll(1, 1)[mask.bool()]), (
        "control: the masks of another column"
    )


def test_draws_that_belong_to_samples_are_not_packed():
    model = mixing(drawn_for_each_sample)
    samples = samples_of("tokens", 24)
    packing, why = asked(model, samples)
    assert packing is None
    assert "UnkeyedRandomness: dropout of shape [1, 1, 1]" in why
    with pytest.raises(UnkeyedRandomness, match="does not hold an equal number of rows"):
        packed_gradient(model, packing_of(model, samples[0]), samples[:NUM_SAMPLES], SPLITS[0])
    packing, why = asked(mixing(), samples)
    assert packing is not None, f"the same without its draw: {why}"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_layers_that_look_beyond_a_token_in_another_way_are_refused(name):
    """They fail on packed tokens, compute something else, or take no attention mask."""
    model = UNSUPPORTED[name]()
    samples = token_samples(24)
    packing, why = asked(model, samples)
    assert packing is None
    assert "Error: " in why or "it changes loss or gradient" in why or "no attention mask" in why
    gradients, _ = window_gradient(model, later(one_window(samples, 5)))
    truth = helpers.full_batch_gradient(UNSUPPORTED[name](), pad_right(samples))
    assert relative_error(gradients, truth) < 1e-6


class Wrapped(nn.Module):
    """Hands on what it gets, without names: the second value that it gets is no `kwargs`."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


def test_other_obstacles_are_told():
    samples = token_samples(24)
    wrapped = helpers.bert_masked_lm()
    wrapped.bert.encoder.layer = nn.ModuleList(map(Wrapped, wrapped.bert.encoder.layer))
    assert asked(wrapped, samples) == (None, "its layers take arguments without names")
    assert asked(helpers.t5(), samples) == (None, "its configuration has is_encoder_decoder")
    assert "router" in asked(helpers.mixtral(0.1), samples)[1]
    assert "no attention mask" in asked(helpers.plain_tagger(), helpers.plain_samples(24))[1]
    no_stack = mixing()
    no_stack.layers = nn.Sequential(*no_stack.layers)
    assert "no stack" in asked(no_stack, samples)[1]
    same = [{k: v[:4] for k, v in s.items()} for s in samples]
    assert "no padding" in asked(helpers.bert_masked_lm(), same)[1]
    spans = [
        {**{k: v for k, v in s.items() if k != "labels"}, "start_positions": 1, "end_positions": 2}
        for s in samples
    ]
    assert "it changes loss or gradient" in asked(helpers.bert_question_answering(), spans)[1], (
        "a softmax over padding"
    )


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gpt2", "layers"),
        ("gpt2", "reentrant"),
        ("llama", "layers"),
        ("masked lm", "wrapped"),
        ("masked lm", "reentrant"),
    ],
)
def test_gradient_checkpointing_computes_packed_tokens_again(name, how):
    build, kind = MODELS[name]
    model = build(0.1)
    samples = samples_of(kind)
    packing = packing_of(model, samples[0])
    truth, _ = packed_gradient(model, packing, samples, SPLITS[1], torch.float64, padded=True)
    full, _ = packed_gradient(model, packing, samples, SPLITS[1])
    names = list(full)
    layers = packing._layers
    norm = next(
        m
        for n, m in layers.named_modules()
        if isinstance(m, nn.LayerNorm) or n.endswith("input_layernorm")
    )
    if how == "wrapped":
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    rows = []
    norm.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:2]))
    gradients, _ = packed_gradient(model, packing, samples, SPLITS[1])
    helpers.assert_promise_1(dict(zip(names, gradients.values(), strict=True)), full, truth)
    real = [sum(len(samples[i]["input_ids"]) for i in rows_) for rows_ in SPLITS[1]]
    assert sorted(rows) == sorted([(1, number) for number in real] * 2)


def is_packed(packing, batch):
    with packed(packing, call_of(batch)):
        return packing._tokens is not None


def test_left_padding_packs_where_padding_predicts_nothing():
    samples = samples_of("classes")
    model = gpt2_classifier(0.1)
    packing = packing_of(model, samples[0])
    truth, _ = packed_gradient(
        model, packing, samples, SPLITS[0], torch.float64, padded=True, collate=pad_left
    )
    full, _ = packed_gradient(model, packing, samples, SPLITS[0], padded=True, collate=pad_left)
    gradients, _ = packed_gradient(model, packing, samples, SPLITS[0], collate=pad_left)
    helpers.assert_promise_1(gradients, full, truth)
    accepted, why = asked(gpt2_classifier(), samples_of("classes", 24), pad_left)
    assert accepted is not None, why
    refused, why = asked(helpers.bert_classifier(), samples_of("classes", 24), pad_left)
    assert refused is None and "it changes loss or gradient" in why, (
        "it pools the first column, which is padding"
    )
    batch = pad_left(samples_of("tokens"))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    packing = packing_of(helpers.gpt2(), token_samples(1)[0])
    assert not is_packed(packing, batch), "the last padding predicts the first token"


def row(*values):
    return torch.tensor([values])


@pytest.mark.parametrize(
    ("mask", "sides"),
    [
        (row(1, 1, 1), set()),
        (row(1, 1, 0), {"right"}),
        (row(0, 1, 1), {"left"}),
        (row(1, 0, 1), {"inside"}),
        (row(0, 1, 0), {"inside"}),
        (torch.cat([row(1, 0, 0), row(0, 1, 1)]), {"right", "left"}),
    ],
)
def test_sides_by_hand(mask, sides):
    assert padded_sides(mask) == sides


@pytest.mark.parametrize(
    ("build", "triples"),
    [
        (helpers.bert_classifier, [1]),
        (helpers.bert_classifier, [0, 1, 2, 3]),
        (helpers.gpt2, [1, 3]),
        (helpers.llama, [0, 1, 2, 3]),
    ],
)
def test_other_paddings_than_the_proofs_are_exact(build, triples):
    """The trial sees padding on the right. The shortest row of these micro-batches has it on the
    left: they are computed without packing, the others with it.
    """
    is_classifier = build is helpers.bert_classifier
    plain = samples_of("classes" if is_classifier else "tokens", 12)
    samples = [{**sample, "row": index} for index, sample in enumerate(plain)]
    rows = [
        min(range(3 * i, 3 * i + 3), key=lambda row: len(plain[row]["input_ids"])) for i in triples
    ]

    def collate(part):
        batch = helpers.pad_right([{k: v for k, v in s.items() if k != "row"} for s in part])
        for place, sample in enumerate(part):
            if sample["row"] in rows:
                real = int(batch["attention_mask"][place].sum())
                shift = batch["attention_mask"].shape[1] - real
                for name, value in batch.items():
                    if value.dim() == 2:
                        batch[name][place] = value[place].roll(shift)
        return batch

    model = build(0.0)
    accelerator = Accelerator()
    found = {}
    for speed_ups in (None, []):
        tried(model, plain, helpers.pad_right, speed_ups)
        windows = hf_ga.WindowLoader(
            samples,
            collate,
            accelerator=accelerator,
            planner=helpers.by_number(3),
            global_batch_size=12,
            shuffle=False,
        )
        (window,) = windows
        model.zero_grad()
        # Not rehearsed: that would find that such rows depend on the width of their batch.
        backward_window(accelerator, model, later(window))
        found[speed_ups is None] = helpers.gradients(model)
    errors = [
        (found[True][name] - value).norm() / max(value.norm(), 1e-6)
        for name, value in found[False].items()
    ]
    assert max(errors) < 1e-4


def test_what_gains_nothing_stays_padded():
    packing = packing_of(helpers.bert_masked_lm(), token_samples(1)[0])
    mask = torch.ones(4, 20, dtype=torch.long)
    mask[0, 18:] = 0  # 80 padded tokens for 78 real ones
    for gain, expected in [(Packing()._min_padding_ratio, False), (1.0, True), (1.2, False)]:
        packing._min_padding_ratio = gain
        assert is_packed(packing, {"attention_mask": mask}) == expected
    packing._min_padding_ratio = 1.0
    for other in (mask[:, :18], mask.float() * 0.5, torch.zeros_like(mask), mask[None]):
        assert not is_packed(packing, {"attention_mask": other})
    packing.before(
        replace(
            call_of({"attention_mask": mask}),
            micro_batch=MicroBatch({}, np.arange(4), np.arange(4)),
        )
    )
    assert packing._tokens is None, "no mask"


def test_nothing_is_left_behind():
    model = helpers.gpt2()
    samples = samples_of("tokens")
    packing = packing_of(model, samples[0])
    batch = pad_right(samples)
    original = AttentionInterface.get_interface
    packed_gradient(model, packing, samples, SPLITS[0])
    with pytest.raises(RuntimeError, match="stop"), packed(packing, call_of(batch)):
        assert AttentionInterface.get_interface is not original
        raise RuntimeError("stop")
    assert AttentionInterface.get_interface is original
    assert packing._tokens is None
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(**batch).logits, copy.deepcopy(model)(**batch).logits)


def test_a_path_that_depends_on_the_data_is_an_error():
    model = mixing()
    samples = samples_of("tokens")
    packing = packing_of(model, samples[0])
    with (
        packed(packing, call_of(pad_right(samples))),
        pytest.raises(ConfigError, match="packed layers received hidden states of shape"),
    ):
        model.layers[0](torch.zeros(2, 3, WIDTH))
