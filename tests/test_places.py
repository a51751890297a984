"""Keyed dropout inside real models: any split of a window has the gradient of the full batch, with dropout on.

The models are tiny and untrained; the samples are ragged, so their micro-batches are padded to different widths. Where a claim
is that two gradients agree, native dropout (torch's own, no `KeyedDropout`) is shown to fail the same comparison.
"""

import math
import random
from collections import defaultdict
from functools import cache
from itertools import combinations
from types import SimpleNamespace

import hf_ga.exact.masks_ahead
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_ga.errors import UnkeyedRandomness
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.masks import sample_keys, window_key

SIGMAS = 4.0
VOCABULARY = 100
LENGTHS = [5, 9, 3, 12, 7, 8]
EVERYONE = list(range(len(LENGTHS)))
SPLITS = {
    "even": [[0, 1, 2], [3, 4, 5]],
    "uneven": [[2, 0, 4, 5], [1, 3]],
    "one by one": [[i] for i in EVERYONE],
    "by length": [[2, 0], [4, 5], [1, 3]],
}
SAME, DIFFERENT = 1e-5, 0.05  # relative differences of gradients: rounding, and another mask


# -------------------------------------------------------------------------------------------------------------------- models


class PlainModule(nn.Module):
    """Every way in which torch itself draws dropout, in a module that is no transformers model."""

    supports_gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.with_weights = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.without_weights = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.time_first = nn.MultiheadAttention(32, 4, dropout=0.1)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.shared = nn.Dropout(0.1)  # used twice
        self.inplace = nn.Dropout(0.1, inplace=True)
        self.features_1d, self.features_2d, self.features_3d = nn.Dropout1d(0.1), nn.Dropout2d(0.1), nn.Dropout3d(0.1)
        self.head = nn.Linear(32, 2)

    def forward(self, input_ids, attention_mask, labels):
        padding = attention_mask == 0
        x = self.shared(self.embed(input_ids))
        x = x + self.with_weights(x, x, x, key_padding_mask=padding)[0]
        x = x + self.without_weights(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        y = x.transpose(0, 1)
        x = x + self.time_first(y, y, y, key_padding_mask=padding)[0].transpose(0, 1)
        x = self.layer(x, src_key_padding_mask=padding)
        x = self.features_1d(self.shared(x))
        x = self.features_2d(x.unflatten(-1, (4, 8))).flatten(-2)
        x = self.features_3d(x.unflatten(-1, (2, 4, 4))).flatten(-3)
        x = F.dropout(self.inplace(x * 1), 0.1, self.training) + torch.dropout(x, 0.1, self.training)
        weights = attention_mask.unsqueeze(-1) / attention_mask.sum(1)[:, None, None]
        logits = self.head((x * weights).sum(1))
        return SimpleNamespace(loss=F.cross_entropy(logits, labels))


def bert(config, model, implementation):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return model(config(vocab_size=VOCABULARY, **sizes, attn_implementation=implementation))


def gpt2(size=32):
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCABULARY, n_embd=size, n_layer=2, n_head=4, n_positions=64))


def gpt_neox():
    config = tf.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        hidden_dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip
    return tf.GPTNeoXForCausalLM(config)


def llama():
    config = tf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, attention_dropout=0.1,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config)


def t5():
    config = tf.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64, decoder_start_token_id=0)
    return tf.T5ForConditionalGeneration(config)


def albert():
    config = tf.AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return tf.AlbertForSequenceClassification(config)


def deberta():
    config = tf.DebertaV2Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8,
        norm_rel_ebd="layer_norm", initializer_range=0.2,  # so that the position tables matter at initialisation
    )  # fmt: skip
    return tf.DebertaV2ForSequenceClassification(config)


def distilbert():
    config = tf.DistilBertConfig(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64, dropout=0.1)
    return tf.DistilBertForSequenceClassification(config)


MODELS = {
    "bert sdpa": lambda: bert(tf.BertConfig, tf.BertForSequenceClassification, "sdpa"),
    "bert eager": lambda: bert(tf.BertConfig, tf.BertForMaskedLM, "eager"),
    "roberta": lambda: bert(tf.RobertaConfig, tf.RobertaForMaskedLM, "sdpa"),
    "distilbert": distilbert,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "llama": llama,
    "t5": t5,
    "albert": albert,
    "deberta": deberta,
    "plain module": PlainModule,
}
CHECKPOINTING = {"all kept": None, "non-reentrant": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}
SUPPORTED = [
    pytest.param(name, checkpointing, id=f"{name}, {checkpointing}")
    for name in MODELS
    for checkpointing in CHECKPOINTING
    if checkpointing == "all kept" or name not in ("albert", "plain module")  # these two have no checkpointing
    # Without hf_ga too: its normalised position table is shared by the layers, and each layer would run its backward.
    if (name, checkpointing) != ("deberta", "reentrant")
]
CAUSAL = ("gpt2", "gpt_neox", "llama")
CLASSIFIERS = ("bert sdpa", "distilbert", "albert", "deberta", "plain module")


class Bench:
    """One model in training mode with ragged samples, and the gradient of their mean loss for any split."""

    def __init__(self, name, checkpointing="all kept"):
        torch.manual_seed(0)
        self.name, self.model = name, MODELS[name]().train()
        if kwargs := CHECKPOINTING[checkpointing]:
            assert self.model.supports_gradient_checkpointing
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(kwargs))
        self.samples = [torch.randint(2, VOCABULARY, (length,)) for length in LENGTHS]
        self.places = KeyedDropout(self.model)
        self.places.find(lambda num_samples: self.forward([3] * num_samples))

    def collate(self, ids):
        padding = 1 if self.name == "roberta" else 0
        rows = [self.samples[i] for i in ids]
        input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        labels = torch.tensor([i % 2 for i in ids]) if self.name in CLASSIFIERS else input_ids.where(mask == 1, -100)
        return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}

    def count_targets(self, ids):
        if self.name in CLASSIFIERS:
            return len(ids)
        return sum(LENGTHS[i] - (self.name in CAUSAL) for i in ids)

    def forward(self, ids):
        return self.model(**self.collate(ids))

    def set_keys(self, ids, seed=0, index=0):
        positions = np.array(EVERYONE) + index * len(EVERYONE)
        self.places.set_keys(sample_keys(seed, 0, positions)[ids], window_key(seed, 0, index))

    def accumulated(self, parts, seed=0, keyed=True):
        self.model.zero_grad()
        for ids in parts:
            if keyed:
                self.set_keys(ids, seed)
            (self.forward(ids).loss * self.count_targets(ids) / self.count_targets(EVERYONE)).backward()
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.model.parameters()]
        return torch.cat([grad.flatten() for grad in grads]).double()

    def keyed(self, parts, seed=0):
        with self.places.active():
            return self.accumulated(parts, seed)

    def native(self, parts):
        torch.manual_seed(0)
        return self.accumulated(parts, keyed=False)

    def without_dropout(self):
        self.model.eval()
        try:
            return self.accumulated([EVERYONE], keyed=False)
        finally:
            self.model.train()


@cache
def bench_of(name):
    return Bench(name)


@cache
def reference_of(name):
    """The keyed gradient of the full batch, nothing recomputed."""
    return bench_of(name).keyed([EVERYONE])


def relative(gradient, reference):
    return ((gradient - reference).norm() / reference.norm()).item()


# ------------------------------------------------------------------------------------------------------------------ gradients


# The probe runs without gradients, about which torch's reentrant checkpointing warns.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("name", "checkpointing"), SUPPORTED)
def test_every_split_has_the_gradient_of_the_full_batch(name, checkpointing):
    """Catches masks that depend on the split, on padding, or on whether checkpointing runs a layer again."""
    bench, reference = Bench(name, checkpointing), reference_of(name)
    before = random_states()
    differences = {split: relative(bench.keyed(parts), reference) for split, parts in SPLITS.items()}
    differences["full batch"] = relative(bench.keyed([EVERYONE]), reference)
    assert moved_generators(before) == []
    assert max(differences.values()) <= SAME, differences
    assert relative(bench.keyed([EVERYONE], seed=1), reference) > DIFFERENT, "another seed draws other masks"


@pytest.mark.parametrize("name", MODELS)
def test_native_dropout_fails_the_same_comparison(name):
    """The control of the test above, and that there is dropout at all."""
    bench, reference = bench_of(name), reference_of(name)
    full = bench.native([EVERYONE])
    differences = {split: relative(bench.native(parts), full) for split, parts in SPLITS.items()}
    assert min(differences.values()) > DIFFERENT, differences
    assert relative(reference, bench.without_dropout()) > DIFFERENT


@pytest.mark.parametrize("name", ["bert sdpa", "gpt2"])
def test_keyed_dropout_is_as_strong_as_native(name):
    """Catches too weak a dropout (a place left out, a mask shared by samples), which all comparisons of splits would pass."""
    bench, clean = bench_of(name), bench_of(name).without_dropout()
    draws = 60
    keyed = np.array([relative(bench.keyed([EVERYONE], seed), clean) for seed in range(draws)])
    torch.manual_seed(0)
    native = np.array([relative(bench.accumulated([EVERYONE], keyed=False), clean) for _ in range(draws)])
    ratio = keyed.mean() / native.mean()
    error = ratio * math.hypot(*(d.std() / math.sqrt(draws) / d.mean() for d in (keyed, native)))
    print(f"{name}: distance to dropout 0: keyed {keyed.mean():.3f}, native {native.mean():.3f}, {ratio:.3f} +- {error:.3f}")
    assert error < 0.04, "the means must be precise enough to tell 10 %"
    assert abs(ratio - 1) < 0.1


# ---------------------------------------------------------------------------------------------- shared modules run again


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x):
        return torch.tanh(self.dropout(self.linear(x)))


class Repeated(nn.Module):
    """The same block four times (no transformers model with shared layers supports checkpointing), recomputed if asked.

    kind: "one block" recomputes single calls; "one input" calls the block twice on the same tensor; "functional" recomputes a
    function that draws by itself, outside any module that runs again.
    """

    def __init__(self, kind, use_reentrant=None):
        super().__init__()
        self.block, self.head, self.kind, self.use_reentrant = Block(), nn.Linear(16, 1), kind, use_reentrant

    def run(self, function, x):
        if self.use_reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.use_reentrant)

    def drawing_by_itself(self, x):
        return F.dropout(self.block.linear(x), 0.3, self.training)

    def forward(self, x):
        for _ in range(4):
            if self.kind == "one block":
                x = self.run(self.block, x)
            elif self.kind == "one input":
                x = self.run(self.block, x) - self.run(self.block, x)
            else:
                x = self.run(self.drawing_by_itself, x)
        return self.head(x).mean()


def repeated_gradient(kind, use_reentrant, sizes=(6,)):
    """The keyed gradient of the mean over 6 samples, in consecutive micro-batches of the given sizes."""
    torch.manual_seed(0)
    model = Repeated(kind, use_reentrant).train()
    inputs, keys = torch.randn(6, 5, 16), sample_keys(0, 0, np.arange(6))
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(inputs[:1].repeat(num_samples, 1, 1)))
    assert len(places.places) == (8 if kind == "one input" else 4)
    with places.active():
        for x, part in zip(inputs.split(sizes), keys.split(sizes), strict=True):
            places.set_keys(part, window_key(0, 0, 0))
            (model(x.clone().requires_grad_()) * len(x) / 6).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1,) * 6], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_shared_blocks_draw_the_same_when_run_again(use_reentrant, sizes):
    """Catches counting calls while `backward()` runs them again: they come in reverse order."""
    reference = repeated_gradient("one block", None)
    assert relative(repeated_gradient("one block", use_reentrant, sizes), reference) <= SAME
    assert relative(repeated_gradient("one block", None, sizes), reference) <= SAME


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_shared_blocks_with_equal_inputs_are_refused_when_run_again(use_reentrant):
    """Catches taking the first of several calls that cannot be told apart. Kept, they are fine, and draw two masks."""
    assert repeated_gradient("one input", None).norm() > 0
    with pytest.raises(UnkeyedRandomness, match=r"runs block again.*8 times, and 2 of these calls had the same inputs"):
        repeated_gradient("one input", use_reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_function_that_draws_by_itself_is_keyed_or_refused_when_run_again(use_reentrant):
    """Catches a silent fall back to native dropout (reentrant: a gradient off by 30 %), whose masks are not the forward's."""
    try:
        gradient = repeated_gradient("functional", use_reentrant)
    except UnkeyedRandomness:
        return
    assert relative(gradient, repeated_gradient("functional", None)) <= SAME


def test_inplace_dropout_is_as_precise_as_its_input():
    """Catches a scale in float32 for float64 activations (the float64 reference of promise 1)."""
    model = nn.Sequential(nn.Tanh(), nn.Dropout(0.1, inplace=True)).train()
    x = torch.ones(4, 64, dtype=torch.float64)
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(x[:num_samples]))
    with places.active():
        places.set_keys(sample_keys(0, 0, np.arange(4)), window_key(0, 0, 0))
        out = model(x)
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, math.tanh(1) / 0.9), rtol=1e-15, atol=0)


# --------------------------------------------------------------------------------------------------------------------- places


def count_native_draws(bench, monkeypatch):
    """Calls of torch's dropout functions that draw, in one training forward without `KeyedDropout`."""
    draws = []

    def counting(original, probability_of):
        def function(*args, **kwargs):
            if probability_of(args, kwargs) > 0:
                draws.append(original)
            return original(*args, **kwargs)

        return function

    def of_dropout(args, kwargs):
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return kwargs.get("p", args[1] if len(args) > 1 else 0.5) if training else 0

    def of_attention(args, kwargs):
        return kwargs.get("dropout_p", args[4] if len(args) > 4 else 0)

    with monkeypatch.context() as patch:
        for owner, name in [(F, "dropout"), (F, "dropout1d"), (F, "dropout2d"), (F, "dropout3d"), (torch, "dropout")]:
            patch.setattr(owner, name, counting(getattr(owner, name), of_dropout))
        attention = F.scaled_dot_product_attention
        patch.setattr(F, "scaled_dot_product_attention", counting(attention, of_attention))
        bench.forward(EVERYONE)
    return len(draws)


def captured_masks(bench, monkeypatch, num_windows=1):
    """The masks of full-batch forwards: place -> (drop probability, [mask of every window])."""
    masks = defaultdict(lambda: [None, []])

    def capturing(keys, places, shape, axis, drop_probability):
        drawn = original(keys, places, shape, axis, drop_probability)
        for place, kept in zip(places, drawn, strict=True):
            masks[place][0] = drop_probability
            masks[place][1].append(kept)
        return drawn

    original = hf_ga.exact.masks_ahead.keep_masks
    with monkeypatch.context() as patch, bench.places.active(), torch.no_grad():
        patch.setattr("hf_ga.exact.masks_ahead.keep_masks", capturing)
        for index in range(num_windows):
            bench.set_keys(EVERYONE, index=index)
            bench.forward(EVERYONE)
    return masks


@pytest.mark.parametrize("name", MODELS)
def test_every_draw_is_a_place(name, monkeypatch):
    """Catches a draw that is not keyed, and two draws (shared layers, a module used twice) that share a place."""
    bench = bench_of(name)
    num_draws = count_native_draws(bench, monkeypatch)
    assert num_draws > 0
    assert len(bench.places.places) == num_draws
    masks = captured_masks(bench, monkeypatch)
    assert set(masks) == set(bench.places.places)
    assert all(len(drawn) == 1 for _, drawn in masks.values()), "each place draws once a forward"


@pytest.mark.parametrize("name", MODELS)
def test_every_place_keeps_its_share_and_has_masks_of_its_own(name, monkeypatch):
    """Catches a wrong probability at a place, and places with equal masks (also of shared layers)."""
    masks = captured_masks(bench_of(name), monkeypatch, num_windows=4)
    by_shape = defaultdict(list)
    for p, drawn in masks.values():
        kept = torch.stack(drawn).double()
        spread = math.sqrt(p * (1 - p) / kept.numel())
        assert p in (0.1, 0.2)  # DistilBERT has 0.2 before its classifier
        assert abs(kept.mean().item() - (1 - p)) < SIGMAS * spread
        by_shape[kept.shape].append((kept - (1 - p)) / math.sqrt(p * (1 - p)))
    for alike in by_shape.values():
        for first, second in combinations(alike, 2):
            assert abs((first * second).mean().item()) * math.sqrt(first.numel()) < SIGMAS


def test_sample_axes():
    """Catches the largest or the first axis taken for the sample axis: time-first attention, and a table without samples."""
    axes = {place.name: place.axis for place in bench_of("deberta").places.places.values()}
    tables = {f"deberta.encoder.layer.{layer}.attention.self.pos_dropout" for layer in (0, 1)}
    assert {name for name, axis in axes.items() if axis is None} == tables
    assert {axis for name, axis in axes.items() if name not in tables} == {0}

    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.dropout = nn.Embedding(VOCABULARY, 8), nn.Dropout(0.1)

        def forward(self, input_ids):
            return self.dropout(self.embed(input_ids.T)).mean()

    model = TimeFirst().train()
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(torch.ones(num_samples, 3, dtype=torch.long)))
    assert [place.axis for place in places.places.values()] == [1]


def test_dropout1d_of_two_axes_drops_rows(monkeypatch):
    """Catches masks of another shape than torch's: of a 2-D input dropout1d drops whole rows (unbatched channels)."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout1d(0.5)).train()
    native = model(torch.ones(32, 8)) != 0
    assert all(row.all() or not row.any() for row in native)
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(torch.ones(num_samples, 8)))
    with places.active():
        places.set_keys(sample_keys(0, 0, np.arange(32)), window_key(0, 0, 0))
        kept = model(torch.ones(32, 8)) != 0
    assert all(row.all() or not row.any() for row in kept)


# -------------------------------------------------------------------------------------------------------------- drawn together


class Draws:
    """Counts the calls of `keep_masks` in a `with` block, and what each drew."""

    def __init__(self, monkeypatch, at_once=None):
        self.monkeypatch, self.at_once, self.calls = monkeypatch, at_once, []

    def __enter__(self):
        original, self.patch = hf_ga.exact.masks_ahead.keep_masks, self.monkeypatch.context()
        patch = self.patch.__enter__()

        def counted(keys, places, shape, *more):
            self.calls.append((len(places), math.prod(shape)))
            return original(keys, places, shape, *more)

        patch.setattr("hf_ga.exact.masks_ahead.keep_masks", counted)
        if self.at_once is not None:
            patch.setattr("hf_ga.exact.masks_ahead.DRAWN_TOGETHER", self.at_once)
        return self.calls

    def __exit__(self, *error):
        return self.patch.__exit__(*error)


@pytest.mark.parametrize("name", MODELS)
def test_masks_drawn_together_are_those_drawn_alone(name, monkeypatch):
    bench = bench_of(name)
    with Draws(monkeypatch, at_once=1) as alone:
        expected = bench.keyed([EVERYONE])
    with Draws(monkeypatch) as together:
        assert torch.equal(bench.keyed([EVERYONE]), expected)
    assert [number for number, _ in alone] == [1] * len(bench.places.places)
    assert sum(number for number, _ in together) == len(alone), "none is drawn in vain"
    kinds = {(*place.shapes, place.axis, place.drop_probability) for place in bench.places.places.values()}
    assert len(together) == len(kinds) < len(alone)
    assert not bench.places.ahead._waiting, "none is kept"


@pytest.mark.parametrize(("limit", "at_once"), [(3_000, {1}), (4_700, {1, 2})])
def test_masks_drawn_together_are_no_more_than_a_limit(limit, at_once, monkeypatch):
    """6 x 12 x 32 elements behind linear layers, 6 x 4 x 12 x 12 of attention, 6 x 32 before the classifier."""
    bench = bench_of("bert sdpa")
    with Draws(monkeypatch, at_once=limit) as calls:
        gradient = bench.keyed([EVERYONE])
    assert torch.equal(gradient, reference_of("bert sdpa"))
    assert {size for _, size in calls} == {2304, 3456, 192} and {number for number, _ in calls} == at_once


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_what_is_run_again_draws_its_own_masks_only(checkpointing, monkeypatch):
    """The last layer is run again first: masks of the layers behind one would be drawn in vain."""
    bench = Bench("bert sdpa", checkpointing)
    with Draws(monkeypatch) as calls:
        assert relative(bench.keyed([EVERYONE]), reference_of("bert sdpa")) < 1e-6
    in_layers = sum(".layer." in place.name for place in bench.places.places.values())
    assert in_layers == 6 and calls[-in_layers:] == [(1, size) for _, size in calls[-in_layers:]]
    assert sum(number for number, _ in calls) == len(bench.places.places) + in_layers


class Even(Bench):
    """Samples of one length, so that micro-batches have one shape; their keys are told of at once, or one by one."""

    def __init__(self, *more):
        super().__init__(*more)
        self.samples = [sample.repeat(6)[:6] for sample in self.samples]

    def in_pairs(self, at_once):
        """The gradient of all samples in micro-batches of two."""
        keys, shared, pairs = sample_keys(0, 0, np.array(EVERYONE)), window_key(0, 0, 0), torch.tensor(EVERYONE).split(2)
        self.model.zero_grad()
        with self.places.active():
            for i, ids in enumerate(pairs):
                if at_once:
                    self.places.set_keys(keys[2 * i :], shared, 2)
                else:
                    self.places.set_keys(keys[2 * i : 2 * i + 2], shared)
                self.forward(ids.tolist()).loss.backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("name", "checkpointing"), SUPPORTED)
def test_masks_of_samples_yet_to_come_are_those_drawn_for_them(name, checkpointing, monkeypatch):
    bench = Even(name, checkpointing)
    with Draws(monkeypatch) as one_by_one:
        expected = bench.in_pairs(at_once=False)
    with Draws(monkeypatch) as ahead:
        assert torch.equal(bench.in_pairs(at_once=True), expected)
    drawn, drawn_ahead = (sum(number * size for number, size in calls) for calls in (one_by_one, ahead))
    assert len(ahead) < len(one_by_one) and drawn_ahead == drawn, "in fewer calls, and none in vain"
    assert not bench.places.ahead._waiting, "none is kept"


@pytest.mark.parametrize(("limit", "forwards"), [(1, {1}), (10 * 2 * 6 * 32, {1, 2}), (1 << 22, {3})])
def test_masks_of_samples_yet_to_come_are_no_more_than_a_limit(limit, forwards, monkeypatch):
    """2 x 6 x 32 elements at five places alike, in three micro-batches."""
    bench = Even("bert sdpa")
    expected = bench.in_pairs(at_once=False)
    with Draws(monkeypatch, at_once=limit) as calls:
        assert torch.equal(bench.in_pairs(at_once=True), expected)
    assert {size // (2 * 6 * 32) for _, size in calls if not size % (2 * 6 * 32)} == forwards
    assert limit == 1 or max(number * size for number, size in calls) <= limit


def test_a_probability_that_changed_since_the_probe(monkeypatch):
    """The masks of its place are drawn anew, the others' stay what they were."""
    bench = Bench("bert sdpa")
    layer = bench.model.bert.encoder.layer[1].output.dropout
    layer.p = 0.4
    with Draws(monkeypatch, at_once=1):
        expected = bench.keyed([EVERYONE])
    assert torch.equal(bench.keyed([EVERYONE]), expected)
    layer.p = 0.1
    assert not torch.equal(bench.keyed([EVERYONE]), expected), "control"


class TwoPaths(nn.Module):
    """Two dropouts of the same shape, each of which can be left out."""

    def __init__(self):
        super().__init__()
        self.drops, self.used = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)]), (0, 1)

    def forward(self, x):
        for index in self.used:
            x = self.drops[index](x)
        return x


def test_masks_that_nobody_took_are_not_those_of_the_next_samples():
    model, x, shared = TwoPaths().train(), torch.ones(8, 40), window_key(0, 0, 0)
    ours, others = sample_keys(0, 0, np.arange(16)).split(8)
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(torch.ones(num_samples, 40)))

    def drawn(keys, *used):
        model.used = used
        places.set_keys(keys, shared)
        return model(x)

    with places.active():
        expected = drawn(ours, 1)
        drawn(others, 0)
        assert len(places.ahead._waiting) == 1, "the second one's, for the others"
        assert torch.equal(drawn(ours, 1), expected)
        assert not torch.equal(drawn(others, 1), expected), "control"
        drawn(others, 0)
    assert not places.ahead._waiting


class Tables(TwoPaths):
    """Dropout of tables that all samples share."""

    def forward(self, x):
        return x + super().forward(torch.ones(1, 40))


def test_masks_of_samples_yet_to_come_are_not_those_of_others():
    """Where a forward leaves a place out, where other samples come instead, and in another window."""
    model, keys = TwoPaths().train(), sample_keys(0, 0, np.arange(12))
    places, x, shared = KeyedDropout(model), torch.ones(4, 40), window_key(0, 0, 0)
    places.find(lambda num_samples: model(torch.ones(num_samples, 40)))

    def drawn(model, *keys, used=(0, 1)):
        model.used = used
        places.set_keys(*keys)
        return model(x)

    with places.active():
        expected = [drawn(model, part, shared) for part in keys.split(4)]
        drawn(model, keys, shared, 4)
        drawn(model, keys[4:], shared, 4, used=(0,))
        assert torch.equal(drawn(model, keys[8:], shared, 4), expected[2]), "the second one's are those of the last samples"
        drawn(model, keys, shared, 4)
        assert torch.equal(drawn(model, keys[8:], shared, 4), expected[2]), "samples were left out"
        assert torch.equal(drawn(model, keys, shared, 4), expected[0]), "others, again"
        assert not torch.equal(expected[0], expected[1]), "control"
        drawn(model, keys, shared, 4)
        assert len(places.ahead._waiting) == 2
        places.set_keys(keys[8:], shared, 4)
        assert not places.ahead._waiting, "those of samples that were left out are dropped"
    model = Tables().train()
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(torch.ones(num_samples, 40)))
    with places.active():
        windows = [window_key(0, 0, index) for index in range(2)]
        expected = [drawn(model, keys, window, used=(1,)) for window in windows]
        drawn(model, keys, windows[0], used=(0,))
        assert places.ahead._waiting, "the second table's"
        assert torch.equal(drawn(model, keys, windows[1], used=(1,)), expected[1])
        assert not torch.equal(*expected), "control"


# ------------------------------------------------------------------------------------------------------------------- refusals


class Drawing(nn.Module):
    """A module that draws random numbers in a way that cannot be keyed."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.draw(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


UNKEYED = {
    "nn.LSTM": (Recurrent, r"1\.lstm \(LSTM\) draws from torch"),
    "alpha_dropout": (lambda: Drawing(lambda x: F.alpha_dropout(x, 0.1, True)), r"1 \(Drawing\) draws from torch"),
    "gumbel_softmax": (lambda: Drawing(F.gumbel_softmax), r"1 \(Drawing\) draws from torch"),
    "torch.rand": (lambda: Drawing(lambda x: x * torch.rand(())), r"1 \(Drawing\) draws from torch"),
    "numpy": (lambda: Drawing(lambda x: x * np.random.rand()), r"1 \(Drawing\) draws from numpy"),
    "random": (lambda: Drawing(lambda x: x * random.random()), r"1 \(Drawing\) draws from random"),
}


def drawing_model(name):
    """Keyed dropout, the module that cannot be keyed, more keyed dropout."""
    return nn.Sequential(nn.Linear(8, 8), UNKEYED[name][0](), nn.Dropout(0.1), nn.Linear(8, 8)).train()


@pytest.mark.parametrize("name", UNKEYED)
def test_randomness_that_cannot_be_keyed_is_refused(name):
    """Catches silent acceptance, and blaming the module that comes after; `allow_split_dependent_randomness` keys what can be
    keyed.
    """
    model = drawing_model(name)
    places = KeyedDropout(model)
    before = random_states()
    with pytest.raises(UnkeyedRandomness, match=UNKEYED[name][1]) as error:
        places.find(lambda num_samples: model(torch.ones(num_samples, 5, 8)))
    assert str(error.value).count("draws from") == 1, "only the module that draws is named"
    assert moved_generators(before) == [], "the probe must not move the user's generators"
    assert places.is_empty
    places.find(lambda num_samples: model(torch.ones(num_samples, 5, 8)), allow_split_dependent_randomness=True)
    assert [place.name for place in places.places.values()] == ["2"]
    with places.active():
        places.set_keys(sample_keys(0, 0, np.arange(4)), window_key(0, 0, 0))
        assert model(torch.ones(4, 5, 8)).isfinite().all()


def test_a_mask_without_a_single_sample_axis_is_refused():
    """Catches taking the first axis that changed: here the shape grows with the square of the samples."""
    model = nn.Sequential(Drawing(lambda x: F.dropout(x @ x.T, 0.1, True))).train()
    with pytest.raises(UnkeyedRandomness, match=r"0 draws a mask whose sample axis cannot be told.*\[2, 2\] to \[3, 3\]"):
        KeyedDropout(model).find(lambda num_samples: model(torch.ones(num_samples, 8)))


def test_a_place_that_the_probe_did_not_reach_is_refused():
    """Catches a silent fall back to native dropout where a model's path depends on its data."""
    model = nn.Sequential(Drawing(lambda x: F.dropout(x, 0.1, True) if x.sum() > 0 else x)).train()
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(-torch.ones(num_samples, 8)))
    # Nothing was found, so no hooks are set: such a model is taken for one without dropout.
    assert places.is_empty
    model = nn.Sequential(Drawing(lambda x: F.dropout(x, 0.1, True) if x.sum() > 0 else x), nn.Dropout(0.1)).train()
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(-torch.ones(num_samples, 8)))
    with places.active():
        places.set_keys(sample_keys(0, 0, np.arange(2)), window_key(0, 0, 0))
        with pytest.raises(UnkeyedRandomness, match="did not reach"):
            model(torch.ones(2, 8))


def test_no_dropout_needs_no_places():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.ReLU()).train()
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(torch.ones(num_samples, 8)))
    assert places.is_empty


# --------------------------------------------------------------------------------------------------------- nothing left behind

PATCHED = [
    (F, "dropout"), (F, "dropout1d"), (F, "dropout2d"), (F, "dropout3d"), (F, "scaled_dot_product_attention"),
    (torch, "dropout"),
]  # fmt: skip
ORIGINALS = [getattr(owner, name) for owner, name in PATCHED]


def assert_nothing_left(model):
    for (owner, name), original in zip(PATCHED, ORIGINALS, strict=True):
        assert getattr(owner, name) is original, name
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_always_called)
        assert not any(hooks), f"{module} keeps {hooks}"
        assert not module._forward_pre_hooks_with_kwargs


@pytest.mark.parametrize("stage", ["find", "forward", "backward", "outside"])
def test_active_leaves_nothing_behind_after_an_error(stage):
    """Catches hooks and patched functions that outlive an exception; the next forward must work, and as before."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("on purpose")

    failing = False

    def fail(x):
        if failing and stage == "backward":
            return Failing.apply(x)
        if failing and stage != "outside":
            raise RuntimeError("on purpose")
        return x

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.5), Drawing(fail)), nn.Dropout(0.5)).train()
    places, keys = KeyedDropout(model), (sample_keys(0, 0, np.arange(4)), window_key(0, 0, 0))

    def masked():
        with places.active():
            places.set_keys(*keys)
            return model(torch.ones(4, 8))

    if stage == "find":
        failing = True
        with pytest.raises(RuntimeError, match="on purpose"):
            places.find(lambda num_samples: model(torch.ones(num_samples, 8)))
        assert_nothing_left(model)
        failing = False
    places.find(lambda num_samples: model(torch.ones(num_samples, 8)))
    assert_nothing_left(model)
    before = masked()
    failing = True
    with pytest.raises(RuntimeError, match="on purpose"), places.active():
        places.set_keys(*keys)
        model(torch.ones(4, 8)).sum().backward()
        raise RuntimeError("on purpose")
    assert_nothing_left(model)
    failing = False
    assert torch.equal(masked(), before)
    assert_nothing_left(model)


def test_an_error_in_one_forward_does_not_change_the_next():
    """Catches a call stack that keeps the frames of a failed forward: out of memory is met inside `active`, then retried."""
    failing = False

    def fail(x):
        if failing:
            raise RuntimeError("on purpose")
        return x

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.5), Drawing(fail)), nn.Dropout(0.5)).train()
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(torch.ones(num_samples, 8)))
    with places.active():
        places.set_keys(sample_keys(0, 0, np.arange(4)), window_key(0, 0, 0))
        before = model(torch.ones(4, 8))
        failing = True
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.ones(4, 8))
        failing = False
        assert torch.equal(model(torch.ones(4, 8)), before)


def test_find_restores_buffers_gradients_and_generators():
    """Catches a probe that moves BatchNorm's running statistics (and its count), gradients or generators."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)).train()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    inputs = torch.randn(3, 8)
    before = random_states()
    KeyedDropout(model).find(lambda num_samples: model(inputs[:num_samples]))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert moved_generators(before) == []
    model(torch.randn(4, 8))
    assert not torch.equal(model[1].running_mean, buffers["1.running_mean"]), "a plain forward does move them"


def hooked_modules(model, places):
    with places.active():
        return [name for name, module in model.named_modules() if module._forward_hooks]


def test_only_the_model_and_modules_that_draw_are_hooked():
    """Catches hooks on every module, which would cost time in each forward."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))).train()
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(torch.ones(num_samples, 8)))
    assert hooked_modules(model, places) == ["", "1.1"]
    without = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)).train()
    places = KeyedDropout(without)
    places.find(lambda num_samples: without(torch.ones(num_samples, 8)))
    assert hooked_modules(without, places) == []


def test_where_a_module_draws_in_several_calls_those_on_the_way_to_it_are_hooked_too():
    """Catches places of a shared block that cannot be told apart, and hooks on modules without dropout."""
    model = Repeated("one block", use_reentrant=None).train()
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(torch.ones(num_samples, 4, 16)))
    hooked = hooked_modules(model, places)
    assert len(places.places) > len({place.name for place in places.places.values()}), "a module that draws in several calls"
    names = {name for place in places.places.values() for name in on_the_way(place.name)}
    assert set(hooked) == names and len(hooked) < len(list(model.modules()))


def on_the_way(name):
    parts = name.split(".")
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


@pytest.mark.parametrize("name", ["gpt2", "bert sdpa", "distilbert"])
def test_masks_are_the_same_whether_the_way_to_a_place_is_hooked_or_not(name, monkeypatch):
    """Catches path keys that depend on which modules have hooks: a run that is resumed would draw other masks."""
    short = Bench(name)
    assert short.places._path_keys
    expected = captured_masks(short, monkeypatch)
    monkeypatch.setattr(KeyedDropout, "_found_path_keys", lambda *_: {})
    long = Bench(name)
    assert not long.places._path_keys
    found = captured_masks(long, monkeypatch)
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[place][1][0], mask) for place, (_, [mask]) in expected.items())


class Again(nn.Module):
    """Calls its dropout as often as it is told."""

    def __init__(self):
        super().__init__()
        self.drop, self.times = nn.Dropout(0.5), 1

    def forward(self, x):
        for _ in range(self.times):
            x = self.drop(x)
        return x


def test_a_second_call_and_a_call_from_outside_are_refused():
    """Catches a module that draws the masks of its only call once more: dropout of two calls would be the same."""
    model = Again().train()
    places = KeyedDropout(model)
    places.find(lambda num_samples: model(torch.ones(num_samples, 8)))
    with places.active():
        places.set_keys(sample_keys(0, 0, np.arange(4)), window_key(0, 0, 0))
        with pytest.raises(UnkeyedRandomness, match="did not reach"):
            model.drop(torch.ones(4, 8))
        first = model(torch.ones(4, 8))
        assert torch.equal(model(torch.ones(4, 8)), first), "the next forward calls it for the first time again"
        model.times = 2
        with pytest.raises(UnkeyedRandomness, match="did not reach"):
            model(torch.ones(4, 8))
        model.times = 1
        assert torch.equal(model(torch.ones(4, 8)), first)
