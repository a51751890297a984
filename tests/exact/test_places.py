"""Keyed dropout inside real models: any split of a window has the gradient of the full batch, with
dropout on.

The models are tiny and untrained; the samples are ragged, so their micro-batches are padded to
different widths. Where a claim is that two gradients agree, native dropout (torch's own) is shown
to fail the same comparison.
"""

import math
import random
from collections import defaultdict
from contextlib import suppress
from functools import cache
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_ga.errors import UnkeyedRandomness
from hf_ga.exact import dropout as dropout_module
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.masks import keep_mask, sample_keys, window_key
from hf_ga.proof.sites import find_dropout_sites

# The probe runs without gradients, about which torch's reentrant checkpointing warns.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
SIGMAS = 4.0
VOCABULARY = 100
LENGTHS = [5, 9, 3, 12, 7, 8]
EVERYONE = list(range(len(LENGTHS)))
SPLITS = {
    "uneven": [[2, 0, 4, 5], [1, 3]],
    "one by one": [[i] for i in EVERYONE],
    "by length": [[2, 0], [4, 5], [1, 3]],
}
SAME, DIFFERENT = 1e-5, 0.05  # relative differences of gradients: rounding, and another mask


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
        self.features_1d = nn.Dropout1d(0.1)
        self.features_2d = nn.Dropout2d(0.1)
        self.features_3d = nn.Dropout3d(0.1)
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
        x = F.dropout(self.inplace(x * 1), 0.1, self.training) + torch.dropout(
            x, 0.1, self.training
        )
        weights = attention_mask.unsqueeze(-1) / attention_mask.sum(1)[:, None, None]
        logits = self.head((x * weights).sum(1))
        return SimpleNamespace(loss=F.cross_entropy(logits, labels))


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "d_ff": 64,
    "decoder_start_token_id": 0,
}
ALBERT = {
    **SIZES,
    "num_hidden_layers": 3,
    "embedding_size": 16,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
DEBERTA = {
    **SIZES,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "initializer_range": 0.2,  # so that the position tables matter at initialisation
}
MODELS = {
    "bert sdpa": lambda: tf.BertForSequenceClassification(tf.BertConfig(**SIZES)),
    "bert eager": lambda: tf.BertForMaskedLM(tf.BertConfig(**SIZES, attn_implementation="eager")),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**SIZES, num_key_value_heads=2, attention_dropout=0.1)
    ),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=VOCABULARY, **T5)),
    "albert": lambda: tf.AlbertForSequenceClassification(tf.AlbertConfig(**ALBERT)),
    "deberta": lambda: tf.DebertaV2ForSequenceClassification(tf.DebertaV2Config(**DEBERTA)),
    "plain module": PlainModule,
}
# Counted in the models' code: embeddings, each layer's attention and residuals, heads.
SITES = {
    "bert sdpa": 8,
    "bert eager": 7,
    "gpt2": 7,
    "llama": 2,
    "t5": 24,
    "albert": 8,
    "deberta": 10,
    "plain module": 15,
}
CHECKPOINTING = {
    "all kept": None,
    "non-reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}
CHECKPOINTED = ("bert sdpa", "gpt2", "llama", "t5")
SUPPORTED = [
    *((name, "all kept") for name in MODELS),
    *((name, how) for name in CHECKPOINTED for how in ("non-reentrant", "reentrant")),
    # Not reentrant, without hf_ga neither: its normalised position table is shared by the layers,
    # and each would run its backward.
    ("deberta", "non-reentrant"),
]
CAUSAL = ("gpt2", "llama")
CLASSIFIERS = ("bert sdpa", "albert", "deberta", "plain module")


class Bench:
    """One model in training mode with ragged samples, and the gradient of their mean loss for any
    split.
    """

    def __init__(self, name, checkpointing="all kept"):
        torch.manual_seed(0)
        self.name = name
        self.model = MODELS[name]().train()
        if kwargs := CHECKPOINTING[checkpointing]:
            assert self.model.supports_gradient_checkpointing
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(kwargs))
        self.samples = [torch.randint(2, VOCABULARY, (length,)) for length in LENGTHS]
        self.dropout = find_dropout_sites(
            self.model, lambda num_samples: self.forward([3] * num_samples)
        )

    def collate(self, ids):
        rows = [self.samples[i] for i in ids]
        input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        labels = (
            torch.tensor([i % 2 for i in ids])
            if self.name in CLASSIFIERS
            else input_ids.where(mask == 1, -100)
        )
        return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}

    def count_targets(self, ids):
        if self.name in CLASSIFIERS:
            return len(ids)
        return sum(LENGTHS[i] - (self.name in CAUSAL) for i in ids)

    def forward(self, ids):
        return self.model(**self.collate(ids))

    def set_keys(self, ids, seed=0, index=0):
        positions = np.array(EVERYONE) + index * len(EVERYONE)
        self.dropout.set_keys(sample_keys(seed, 0, positions)[ids], window_key(seed, 0, index))

    def accumulated(self, parts, seed=0, keyed=True):
        self.model.zero_grad()
        for ids in parts:
            if keyed:
                self.set_keys(ids, seed)
            (
                self.forward(ids).loss * self.count_targets(ids) / self.count_targets(EVERYONE)
            ).backward()
        grads = [
            p.grad if p.grad is not None else torch.zeros_like(p) for p in self.model.parameters()
        ]
        return torch.cat([grad.flatten() for grad in grads]).double()

    def keyed(self, parts, seed=0):
        with self.dropout.scope(self.model):
            return self.accumulated(parts, seed)

    def native(self, parts):
        torch.manual_seed(0)
        return self.accumulated(parts, keyed=False)


@cache
def bench_of(name):
    return Bench(name)


@cache
def reference_of(name):
    """The keyed gradient of the full batch, nothing recomputed."""
    return bench_of(name).keyed([EVERYONE])


def relative(gradient, reference):
    return ((gradient - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize(("name", "checkpointing"), SUPPORTED)
def test_every_split_has_the_gradient_of_the_full_batch(name, checkpointing):
    """Catches masks that depend on the split, on padding, or on whether checkpointing runs a layer
    again.
    """
    bench = Bench(name, checkpointing)
    reference = reference_of(name)
    before = random_states()
    differences = {
        split: relative(bench.keyed(parts), reference) for split, parts in SPLITS.items()
    }
    differences["full batch"] = relative(bench.keyed([EVERYONE]), reference)
    assert moved_generators(before) == []
    assert max(differences.values()) <= SAME, differences
    assert relative(bench.keyed([EVERYONE], seed=1), reference) > DIFFERENT, (
        "another seed draws other masks"
    )
    if checkpointing == "all kept":
        full = bench.native([EVERYONE])
        assert min(relative(bench.native(parts), full) for parts in SPLITS.values()) > DIFFERENT, (
            "control: native dropout"
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return torch.tanh(self.dropout(self.linear(x)))


class Repeated(nn.Module):
    """The same block four times (no transformers model with shared layers supports checkpointing),
    recomputed if asked.

    kind: "one block" recomputes single calls; "one input" calls the block twice on the same tensor;
        "functional" recomputes a
    function that draws by itself, outside any module that runs again.
    """

    def __init__(self, kind, use_reentrant=None):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(16, 1)
        self.kind = kind
        self.use_reentrant = use_reentrant

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


def keyed(model, x):
    """A model of one input, its dropout, and a function that runs it with the masks of as many
    samples as `x` has.
    """
    model = model.train()
    dropout = find_dropout_sites(
        model, lambda num_samples: model(x[:1].repeat(num_samples, *[1] * (x.dim() - 1)))
    )

    def run():
        dropout.set_keys(sample_keys(0, 0, np.arange(len(x))), window_key(0, 0, 0))
        return model(x)

    return dropout, run


def repeated_gradient(kind, use_reentrant, sizes=(6,)):
    """The keyed gradient of the mean over 6 samples, in consecutive micro-batches of the given
    sizes.
    """
    torch.manual_seed(0)
    model = Repeated(kind, use_reentrant)
    inputs = torch.randn(6, 5, 16)
    keys = sample_keys(0, 0, np.arange(6))
    dropout, _ = keyed(model, inputs)
    assert len(dropout.sites) == (8 if kind == "one input" else 4)
    with dropout.scope(model):
        for x, part in zip(inputs.split(sizes), keys.split(sizes), strict=True):
            dropout.set_keys(part, window_key(0, 0, 0))
            (model(x.clone().requires_grad_()) * len(x) / 6).backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1,) * 6], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_shared_blocks_draw_the_same_when_run_again(use_reentrant, sizes):
    """Catches counting calls while `backward()` runs them again: they come in reverse order."""
    reference = repeated_gradient("one block", None)
    assert relative(repeated_gradient("one block", use_reentrant, sizes), reference) <= SAME
    assert relative(repeated_gradient("one block", None, sizes), reference) <= SAME


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_cannot_be_identified_is_refused_when_run_again(use_reentrant):
    """Catches taking the first of several calls that cannot be told apart, and a silent fall back
    to native dropout (reentrant: a gradient off by 30 %), whose masks are not the forward's. Kept,
    both are fine.
    """
    assert repeated_gradient("one input", None).norm() > 0
    with pytest.raises(
        UnkeyedRandomness,
        match=r"recomputes block, .*8 times, and 2 of these calls had the same inputs",
    ):
        repeated_gradient("one input", use_reentrant)
    reference = repeated_gradient("functional", None)
    with suppress(UnkeyedRandomness):
        assert relative(repeated_gradient("functional", use_reentrant), reference) <= SAME


class InAWorkspace(nn.Module):
    """Two texts by one block, whose input is written into memory that calls share in turn."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.memory = [torch.empty(6, 5, 16) for _ in range(2)]
        self.num_calls = 0

    def encode(self, x):
        self.num_calls += 1
        memory = self.memory[self.num_calls % 2]
        return self.block(torch.mul(x, 2.0, out=memory[: len(x)]))

    def forward(self, x):
        first, second = (checkpoint(self.encode, y, use_reentrant=False) for y in (x, -x))
        return (first * second).mean()


def test_a_call_is_not_known_by_the_address_of_its_input():
    """Run again, the second call writes to where the first one had its input, and must not get the
    first one's masks.
    """
    torch.manual_seed(0)
    model = InAWorkspace()
    dropout, run = keyed(model, torch.randn(6, 5, 16))
    with (
        dropout.scope(model),
        pytest.raises(UnkeyedRandomness, match="0 of these calls had the same inputs"),
    ):
        run().backward()


def test_inplace_dropout_is_as_precise_as_its_input():
    """Catches a scale in float32 for float64 activations (the float64 reference of promise 1)."""
    model = nn.Sequential(nn.Tanh(), nn.Dropout(0.1, inplace=True))
    dropout, run = keyed(model, torch.ones(4, 64, dtype=torch.float64))
    with dropout.scope(model):
        out = run()
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, math.tanh(1) / 0.9), rtol=1e-15, atol=0)


def drawn_masks(bench, monkeypatch, num_windows):
    """The masks of full-batch forwards: site -> (drop probability, [mask of every window])."""
    masks = defaultdict(lambda: [None, []])

    def recorded(keys, site, shape, sample_dim, drop_probability):
        kept = keep_mask(keys, site, shape, sample_dim, drop_probability)
        masks[site][0] = drop_probability
        masks[site][1].append(kept)
        return kept

    with monkeypatch.context() as patch, bench.dropout.scope(bench.model), torch.no_grad():
        patch.setattr(dropout_module, "keep_mask", recorded)
        for index in range(num_windows):
            bench.set_keys(EVERYONE, index=index)
            bench.forward(EVERYONE)
    return masks


@pytest.mark.parametrize("name", MODELS)
def test_every_draw_is_a_site_with_its_probability_and_masks_of_its_own(name, monkeypatch):
    """Catches a draw that is not keyed, a wrong probability, and two draws (shared layers, a module
    used twice) of equal masks.
    """
    bench = bench_of(name)
    assert len(bench.dropout.sites) == SITES[name]
    masks = drawn_masks(bench, monkeypatch, num_windows=4)
    by_shape = defaultdict(list)
    assert set(masks) == set(bench.dropout.sites)
    for p, drawn in masks.values():
        assert len(drawn) == 4, "each site draws once a forward"
        kept = torch.stack(drawn).double()
        assert p == 0.1
        assert abs(kept.mean().item() - (1 - p)) < SIGMAS * math.sqrt(p * (1 - p) / kept.numel())
        by_shape[kept.shape].append((kept - (1 - p)) / math.sqrt(p * (1 - p)))
    for alike in by_shape.values():
        for first, second in combinations(alike, 2):
            assert abs((first * second).mean().item()) * math.sqrt(first.numel()) < SIGMAS


class Drawing(nn.Module):
    """A module that does `draw`."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.draw(x)


def test_sample_axes():
    """Catches the largest or the first axis taken for the sample axis: time-first attention, and a
    table without samples.
    """
    axes = {site.name: site.sample_dim for site in bench_of("deberta").dropout.sites.values()}
    tables = {f"deberta.encoder.layer.{layer}.attention.self.pos_dropout" for layer in (0, 1)}
    assert {name for name, axis in axes.items() if axis is None} == tables
    assert {axis for name, axis in axes.items() if name not in tables} == {0}
    dropout, _ = keyed(nn.Sequential(Drawing(lambda x: x.mT), nn.Dropout(0.1)), torch.ones(2, 5))
    assert [site.sample_dim for site in dropout.sites.values()] == [1]


def test_dropout1d_of_two_axes_drops_rows():
    """Catches masks of another shape than torch's: of a 2-D input dropout1d drops whole rows
    (unbatched channels).
    """
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout1d(0.5))
    x = torch.ones(32, 8)
    dropout, run = keyed(model, x)
    with dropout.scope(model):
        ours = run() != 0
    for kept in (ours, model(x) != 0):
        assert all(row.all() or not row.any() for row in kept)
        assert 0 < kept.float().mean() < 1


UNKEYED = {
    "nn.LSTM": (
        lambda: nn.Sequential(
            nn.LSTM(8, 8, num_layers=2, dropout=0.1, batch_first=True), Drawing(lambda x: x[0])
        ),
        r"1\.0 \(LSTM\) draws from torch",
    ),
    "alpha_dropout": (
        lambda: Drawing(lambda x: F.alpha_dropout(x, 0.1, True)),
        r"1 \(Drawing\) draws from torch",
    ),
    "torch.rand": (
        lambda: Drawing(lambda x: x * torch.rand(())),
        r"1 \(Drawing\) draws from torch",
    ),
    "numpy": (lambda: Drawing(lambda x: x * np.random.rand()), r"1 \(Drawing\) draws from numpy"),
    "random": (lambda: Drawing(lambda x: x * random.random()), r"1 \(Drawing\) draws from random"),
}


@pytest.mark.parametrize("name", UNKEYED)
def test_randomness_that_cannot_be_keyed_is_refused(name):
    """Catches silent acceptance, and blaming the module that comes after; where it is allowed, the
    rest is keyed.
    """
    model = nn.Sequential(
        nn.Linear(8, 8), UNKEYED[name][0](), nn.Dropout(0.1), nn.Linear(8, 8)
    ).train()
    before = random_states()

    def forward(num_samples):
        return model(torch.ones(num_samples, 5, 8))

    with pytest.raises(UnkeyedRandomness, match=UNKEYED[name][1]) as error:
        find_dropout_sites(model, forward)
    assert str(error.value).count("draws from") == 1, "only the module that draws is named"
    assert "allow_split_dependent_randomness" in str(error.value)
    assert moved_generators(before) == [], "finding must not move the user's generators"
    dropout = find_dropout_sites(model, forward, allow_split_dependent_randomness=True)
    assert [site.name for site in dropout.sites.values()] == ["2"]
    assert len(dropout.unkeyed) == 1
    with dropout.scope(model):
        dropout.set_keys(sample_keys(0, 0, np.arange(4)), window_key(0, 0, 0))
        assert forward(4).isfinite().all()


def test_a_mask_without_a_single_sample_axis_is_refused():
    """Catches taking the first axis that changed: here the shape grows with the square of the
    samples.
    """
    with pytest.raises(
        UnkeyedRandomness, match=r"0 draws a mask without a single sample axis.*\[2, 2\].*\[3, 3\]"
    ):
        keyed(nn.Sequential(Drawing(lambda x: F.dropout(x @ x.T, 0.1, True))), torch.ones(2, 8))


class Again(nn.Module):
    """Calls its dropout so many times."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.times = 1

    def forward(self, x):
        for _ in range(self.times):
            x = self.drop(x)
        return x


def test_a_site_that_was_not_found_is_refused():
    """Catches the masks of a module's only call drawn once more, and native dropout where a model's
    path depends on its data.
    """
    model = Again()
    dropout, run = keyed(model, torch.ones(4, 8))
    with dropout.scope(model):
        first = run()
        for wrong in (
            lambda: model.drop(torch.ones(4, 8)),
            lambda: setattr(model, "times", 2) or run(),
        ):
            with pytest.raises(UnkeyedRandomness, match="did not reach"):
                wrong()
            model.times = 1
            assert torch.equal(run(), first), "the next forward is as if nothing had happened"
