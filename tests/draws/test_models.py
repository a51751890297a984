"""Keyed dropout inside of real models: any split of a window has the gradient of the full batch.

The models are tiny and untrained; the samples are ragged, so their micro-batches are padded to
different widths. Where a claim is that two gradients agree, torch's own dropout is shown to fail the
same comparison.
"""

import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from draws_of_splits import micro_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_ga.draws.generators import moved_generators, random_states
from hf_ga.draws.keyed import KeyedDraws

VOCABULARY = 100
LENGTHS = [5, 9, 3, 12, 7, 8]
EVERYONE = list(range(len(LENGTHS)))
SPLITS = {
    "uneven": [[2, 0, 4, 5], [1, 3]],
    "one by one": [[i] for i in EVERYONE],
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
CHECKPOINTING = {
    "all kept": None,
    "non-reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}
CHECKPOINTED = ("gpt2", "t5")
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
        self.draws = KeyedDraws()
        self.gradient(SPLITS["uneven"])  # shows which dims hold samples

    def batch_of(self, ids):
        rows = [self.samples[i] for i in ids]
        input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        labels = (
            torch.tensor([i % 2 for i in ids])
            if self.name in CLASSIFIERS
            else input_ids.where(mask == 1, -100)
        )
        return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}

    def num_targets(self, ids):
        if self.name in CLASSIFIERS:
            return len(ids)
        return sum(LENGTHS[i] - (self.name in CAUSAL) for i in ids)

    def add_gradient(self, ids):
        loss = self.model(**self.batch_of(ids)).loss
        (loss * self.num_targets(ids) / self.num_targets(EVERYONE)).backward()

    def gradient(self, parts, epoch=0):
        self.model.zero_grad()
        for ids in parts:
            with micro_batch(ids, self.draws, epoch):
                self.add_gradient(ids)
        return flat_gradient(self.model)

    def native(self, parts):
        torch.manual_seed(0)
        self.model.zero_grad()
        for ids in parts:
            self.add_gradient(ids)
        return flat_gradient(self.model)


def flat_gradient(model):
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in model.parameters()
    ]
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


@cache
def reference_of(name):
    """The keyed gradient of the full batch, nothing recomputed."""
    return Bench(name).gradient([EVERYONE])


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
        split: relative(bench.gradient(parts), reference) for split, parts in SPLITS.items()
    }
    differences["full batch"] = relative(bench.gradient([EVERYONE]), reference)
    assert moved_generators(before) == []
    assert max(differences.values()) <= SAME, differences
    assert relative(bench.gradient([EVERYONE], epoch=1), reference) > DIFFERENT, (
        "another epoch draws other masks"
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


def repeated_gradient(kind, use_reentrant, sizes=(6,)):
    """The keyed gradient of the mean over 6 samples, in consecutive micro-batches of the given
    sizes.
    """
    torch.manual_seed(0)
    model = Repeated(kind, use_reentrant).train()
    inputs = torch.randn(6, 5, 16)
    draws = KeyedDraws()
    for ids in torch.arange(6).split(sizes):
        with micro_batch(ids.tolist(), draws):
            (model(inputs[ids].requires_grad_()) * len(ids) / 6).backward()
    return flat_gradient(model)


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1,) * 6], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["one block", "one input", "functional"])
def test_shared_blocks_draw_the_same_when_run_again(kind, use_reentrant, sizes):
    """Catches counting draws while `backward()` runs them again: they come in reverse order."""
    reference = repeated_gradient(kind, None)
    assert relative(repeated_gradient(kind, use_reentrant, sizes), reference) <= SAME
    assert relative(repeated_gradient(kind, None, sizes), reference) <= SAME


def test_inplace_dropout_is_as_precise_as_its_input():
    """Catches a scale in float32 for float64 activations (the float64 reference of promise 1)."""
    model = nn.Sequential(nn.Tanh(), nn.Dropout(0.1, inplace=True))
    with micro_batch(range(4)):
        out = model(torch.ones(4, 64, dtype=torch.float64))
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, math.tanh(1) / 0.9), rtol=1e-15, atol=0)


def test_dropout1d_of_two_axes_drops_rows():
    """Catches masks of another shape than torch's: of a 2-D input dropout1d drops whole rows
    (unbatched channels).
    """
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout1d(0.5))
    x = torch.ones(32, 8)
    with micro_batch(range(32)):
        ours = model(x) != 0
    for kept in (ours, model(x) != 0):
        assert all(row.all() or not row.any() for row in kept)
        assert 0 < kept.float().mean() < 1
