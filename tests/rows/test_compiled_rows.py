"""Compiled layers on rows of fixed length: the gradient of padded samples, few graphs, the masks of
keyed dropout.
"""

from functools import cache

import helpers as h
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from documented_loop import reset_states
from forked import on_two_ranks, without_errors
from processes import make_accelerator
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

import hf_ga
from hf_ga.draws.dropout.dropout_site import DropoutSite
from hf_ga.draws.dropout.masks import sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.loading.batches import MicroBatch
from hf_ga.order.length_plan import PARTS_OF_LIMIT, row_length
from hf_ga.rows.compiled_rows import CompiledRows
from hf_ga.rows.packed_attention import PackedAttention
from hf_ga.rows.packed_tokens import PackedMasks, PackedTokens
from hf_ga.rows.row_attention import RowAttention
from hf_ga.speed.speed_up import Call

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile reads `.grad`
NUM_SAMPLES = 8 * 8
CLOSE = 2e-6
DROPOUT = 0.1


@pytest.fixture(autouse=True)
def _fresh_states():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    reset_states()


def qwen2():
    """The first layer attends to all tokens, the second one to the last four."""
    config = tf.Qwen2Config(
        **h.LLAMA_SIZES,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        attention_dropout=DROPOUT,
    )
    return tf.Qwen2ForCausalLM(config)


def modern_bert():
    """The second layer attends to the two tokens on either side."""
    config = tf.ModernBertConfig(
        **h.SIZES,
        intermediate_size=2 * h.WIDTH,
        local_attention=4,
        global_attn_every_n_layers=2,
        num_labels=h.NUM_CLASSES,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        cls_token_id=1,
        sep_token_id=1,
    )
    return tf.ModernBertForSequenceClassification(config)


MODELS = {
    "GPT-2": (lambda: h.gpt2(DROPOUT), h.token_samples),
    "GPT-2 without dropout": (lambda: h.gpt2(0.0), h.token_samples),
    "BERT": (lambda: h.bert_classifier(DROPOUT), h.class_samples),
    "Qwen2": (qwen2, h.token_samples),
    "ModernBERT": (modern_bert, h.class_samples),
}


def train(
    name,
    monkeypatch,
    *,
    backend=None,
    checkpointing=False,
    accelerator=None,
    collate=h.pad_right,
):
    """Returns: (gradient of each window, lengths of rows, number of graphs after each window)."""
    build, make_samples = MODELS[name]
    if accelerator is None:
        reset_states()
        accelerator = Accelerator()
    model = h.seeded(build)()
    if checkpointing:
        model.gradient_checkpointing_enable()
    if backend is not None:
        hf_ga.compile_layers(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = make_samples(NUM_SAMPLES)
    loader = hf_ga.WindowLoader(
        samples,
        collate,
        accelerator=accelerator,
        per_device_batch_size=4,
        global_batch_size=8,
        lengths=[len(sample["input_ids"]) for sample in samples],
    )
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows=loader)
    lengths = []
    begin = RowAttention.begin
    monkeypatch.setattr(
        RowAttention, "begin", lambda self, *a: (lengths.append(a[1]), begin(self, *a))
    )
    gradients = []

    def whole_gradients():
        found = h.gradients(accelerator.unwrap_model(model))
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}

    optimizer.optimizer.register_step_pre_hook(lambda *_: gradients.append(whole_gradients()))
    num_graphs = []
    for window in loader:
        hf_ga.train_step(accelerator, model, optimizer, window)
        num_graphs.append(counters["stats"]["unique_graphs"])
    return gradients, lengths, num_graphs


@cache
def plain_gradients(name):
    """Of a run without compiled layers, which has no rows of fixed length."""
    with pytest.MonkeyPatch.context() as patch:
        gradients, lengths, _ = train(name, patch)
    assert not lengths
    return gradients


def assert_plain(gradients, name):
    for ours, expected in zip(gradients, plain_gradients(name), strict=True):
        assert h.relative_error(ours, expected) < CLOSE


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("GPT-2", "aot_eager"),  # which also traces the backward
        ("Qwen2", "eager"),
        ("ModernBERT", "eager"),
    ],
)
def test_gradients_are_those_of_padded_samples(name, backend, monkeypatch):
    gradients, lengths, num_graphs = train(name, monkeypatch, backend=backend)
    assert_plain(gradients, name)
    assert lengths
    kinds_of_layers = 2 if name in ("Qwen2", "ModernBERT") else 1
    assert 0 < num_graphs[-1] <= len(set(lengths)) * kinds_of_layers
    assert len(set(lengths)) <= len(PARTS_OF_LIMIT)
    assert num_graphs[5] == num_graphs[-1], "compiled again"
    assert not counters["graph_break"]


def test_micro_batches_with_targets_at_the_padding_run_eagerly(monkeypatch):
    """They have many shapes."""
    num_padded = []

    def collate(samples):
        batch = h.pad_right(samples)
        is_padding = batch["attention_mask"] == 0
        if is_padding.any() and samples[0]["input_ids"][0] % 2:
            batch["labels"][is_padding] = 7
            num_padded.append(len(samples))
        return batch

    name = "GPT-2 without dropout"
    plain, _, _ = train(name, monkeypatch, collate=collate)
    gradients, lengths, num_graphs = train(name, monkeypatch, backend="eager", collate=collate)
    for ours, expected in zip(gradients, plain, strict=True):
        assert h.relative_error(ours, expected) < CLOSE
    assert num_padded
    assert 0 < num_graphs[-1] <= len(set(lengths))


def test_checkpointed_layers(monkeypatch):
    """Where transformers checkpoints within a layer's forward, they are not run on rows."""
    gradients, _, _ = train("GPT-2", monkeypatch, backend="aot_eager", checkpointing=True)
    assert_plain(gradients, "GPT-2")


@pytest.mark.parametrize(
    "backend",
    ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow("compiles C++"))],
)
def test_masks_are_bit_for_bit_those_of_packed_tokens(backend):
    """One graph for another micro-batch, and for the draws of another layer."""
    draws = KeyedDraws()
    rows = CompiledRows(torch.nn.ModuleList(), draws, PackedAttention(draws, False))
    drop = torch.compile(rows._drop, dynamic=False, fullgraph=True, backend=backend)
    for first_position, lengths in ((0, [5, 9, 2, 7]), (4, [3, 30, 8, 1])):
        positions = range(first_position, first_position + 4)
        keys = sample_keys(0, 0, positions)
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        with draws.scope():
            draws.begin(keys, window_key(0, 0, 0))
            tokens = PackedTokens.of(mask.long(), keys.device)
            empty = MicroBatch({}, torch.arange(4).numpy(), torch.arange(4).numpy())
            rows.begin(Call(empty, keys=draws.keys), tokens, None)
            for first_draw in (0, 5):
                draws._micro_batch.num_draws = first_draw
                rows._begin_layer(torch.nn.Identity(), {})
                dropped = drop(torch.ones(1, rows.length, 24), 0.3)
                rows._end_layer()
                site = DropoutSite("", draws.site_key(first_draw), torch.Size((4, 30, 24)), 0)
                shape = torch.Size((1, len(tokens.index), 24))
                expected = PackedMasks(tokens, draws.keys).mask(site, shape, 0.3)
                assert torch.equal(dropped[:, : len(tokens.index)] != 0, expected)
                assert draws.num_draws == first_draw + 1
    assert counters["stats"]["unique_graphs"] == 1


def test_a_layer_that_cannot_be_compiled_runs_as_it_is(monkeypatch, caplog):
    def refuse(*_):
        raise RuntimeError("no such backend")

    gradients, lengths, _ = train("GPT-2", monkeypatch, backend=refuse)
    assert_plain(gradients, "GPT-2")
    assert lengths
    assert sum("the layers are not compiled" in text for text in caplog.messages) == 1


def test_row_lengths_are_few():
    numbers = range(1, 2001)
    assert {row_length(number, 2000) for number in numbers} == {512, 1024, 2048}
    assert all(row_length(number, 2000) >= number for number in numbers)
    assert row_length(3000, 2000) == 4096  # one sample that is longer than the limit
    assert {row_length(number, None) for number in numbers} == {2**n for n in range(6, 12)}


@pytest.mark.slow("compiles on two processes")
@pytest.mark.parametrize(("kind", "backend"), [("ddp", "eager"), ("fsdp2", "aot_eager")])
def test_two_processes(kind, backend, monkeypatch):
    """Each rank computes rows of its own."""

    def work():
        gradients, lengths, _ = train(
            "BERT", monkeypatch, backend=backend, accelerator=make_accelerator(kind)
        )
        return gradients, lengths

    for gradients, lengths in without_errors(on_two_ranks(work, kind, limit=120)):
        assert lengths
        assert_plain(gradients, "BERT")
