"""`hf_ga.backward` on one process: the gradient of the whole batch for every size of micro-batches.

The oracle is one forward and backward of the whole batch in float64, in plain PyTorch.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import cases
import helpers as h
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cases import CASES, NUM_SAMPLES, gradient
from memory_limits import Device
from torch import nn

import hf_ga
from hf_ga.batch.call import MAX_SAMPLES
from hf_ga.draws.dropout.masks import sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.engine.look.choice import NUM_FIRST_WINDOWS
from hf_ga.errors import ConfigError, DataError, LossNotAdditive, OutOfMemory
from hf_ga.parallel.prepare import enable_fp16_on_cpu

SIZES = (1, 3, 8, NUM_SAMPLES, "auto")


def of_all_sizes(case: cases.Case, dropout: float) -> Iterator[tuple]:
    """For each size of micro-batches the gradient and the loss, by the same step of one model."""
    model = case.build(dropout)
    for size in SIZES:
        model.zero_grad()
        settings = {"loss_fn": case.loss_fn, "seed": cases.SEED, "step": 0}
        loss = hf_ga.backward(model, case.batch(), micro_batch_size=size, **settings)
        yield size, h.gradients(model), float(loss)


@pytest.mark.parametrize("name", CASES)
def test_every_size_gives_the_gradient_of_the_whole_batch(name):
    case = CASES[name]
    model = case.build(0.0)
    truth = h.full_batch_gradient(model, case.batch(), loss_fn=case.loss_fn)
    loss = float(h.mean_loss(model, case.batch(), case.loss_fn).detach())
    for size, found, found_loss in of_all_sizes(case, 0.0):
        assert h.relative_error(found, truth) < 1e-6, size
        assert found_loss == pytest.approx(loss, rel=1e-6), size
    assert h.relative_error(cases.naive_gradient(case, 3), truth) > 1e-3


@pytest.mark.parametrize("name", ["GPT-2", "T5", "own loss"])
def test_every_size_draws_the_same_dropout(name):
    case = CASES[name]
    whole, loss = gradient(case, 0.1, NUM_SAMPLES)
    for size, found, found_loss in of_all_sizes(case, 0.1):
        assert h.relative_error(found, whole) < 1e-6, size
        assert found_loss == pytest.approx(loss, rel=1e-6), size
    other, _ = gradient(case, 0.1, NUM_SAMPLES, step=1)
    assert h.relative_error(other, whole) > 1e-2


@pytest.mark.parametrize("name", ["GPT-2", "BERT classes", "T5"])
def test_dropout_is_keyed_by_step_and_place_in_the_batch(name):
    """One forward and backward of the whole batch in float64, with the masks of these keys."""
    case = CASES[name]
    model = case.build(0.1)
    hf_ga.backward(model, case.batch(), micro_batch_size=3, seed=cases.SEED, step=7)
    found = h.gradients(model)
    truth = copy.deepcopy(model).double()
    truth.zero_grad()
    places = np.arange(NUM_SAMPLES)
    draws = KeyedDraws()
    with draws.scope():
        keys = sample_keys(cases.SEED, 0, 7 * MAX_SAMPLES + places)
        draws.begin(keys, window_key(cases.SEED, 0, 7))
        h.mean_loss(truth, case.batch()).backward()
    assert h.relative_error(found, h.gradients(truth)) < 1e-6
    without, _ = gradient(case, 0.0, NUM_SAMPLES)
    assert h.relative_error(without, h.gradients(truth)) > 1e-2


def test_a_loop_of_updates_is_the_same_for_every_size():
    def train(size):
        model = h.gpt2(0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for rows in torch.arange(NUM_SAMPLES).split(7):  # the last batch has 6 samples
            batch = {name: value[rows] for name, value in CASES["GPT-2"].batch().items()}
            loss = hf_ga.backward(model, batch, micro_batch_size=size)
            optimizer.step()
            optimizer.zero_grad()
        return model, float(loss)

    (one, loss), (other, other_loss) = train(2), train("auto")
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-5)
    assert loss == pytest.approx(other_loss, rel=1e-5)


def test_gradients_are_added_to_those_that_are_there():
    case = CASES["GPT-2"]
    model = case.build(0.0)
    once, _ = gradient(case, 0.0, 3)
    for _ in range(2):
        hf_ga.backward(model, case.batch(), micro_batch_size=3)
    twice = {name: 2 * g for name, g in once.items()}
    assert h.relative_error(h.gradients(model), twice) < 1e-6


def shapes_of_forwards(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of the token batches that get a gradient, filled as forwards run."""
    shapes = []

    def note(module, args, kwargs):
        if torch.is_grad_enabled():
            shapes.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return shapes


def texts(lengths: list[int]) -> dict:
    samples = [{"input_ids": list(range(2, 2 + n)), "attention_mask": [1] * n} for n in lengths]
    batch = h.pad_right(samples)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def trained_shapes(model, batch, **settings):
    """Of the micro-batches of a call that is not rehearsed."""
    for _ in range(NUM_FIRST_WINDOWS + 1):  # in the last one, speed-ups are tried
        hf_ga.backward(model, batch, micro_batch_size=2, **settings)
    shapes = shapes_of_forwards(model)
    hf_ga.backward(model, batch, micro_batch_size=2, **settings)
    return shapes


def test_padding_that_a_micro_batch_does_not_need_is_cut():
    batch = texts([3, 12, 4, 11])
    assert trained_shapes(h.bert_masked_lm(), batch) == [(2, 4), (2, 12)]


def test_padding_stays_where_the_loss_depends_on_it():
    batch = {**texts([3, 12, 4, 11]), "labels": torch.tensor([0, 1, 2, 0])}
    model = h.xlnet_classifier()
    truth = h.full_batch_gradient(model, batch)
    assert trained_shapes(model, batch) == [(2, 12), (2, 12)]
    model.zero_grad()
    hf_ga.backward(model, batch, micro_batch_size=2)
    assert h.relative_error(h.gradients(model), truth) < 1e-6


class MeanOverColumns(nn.Module):
    """Its loss divides by all columns, also those without tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(20, 4)

    def forward(self, input_ids, attention_mask):
        squares = self.embedding(input_ids).pow(2).sum(2)
        return SimpleNamespace(loss=(squares * attention_mask).mean())


@pytest.mark.parametrize("size", [4, 2, "auto"])
def test_columns_without_tokens_stay_where_the_loss_counts_them(size):
    batch = {name: F.pad(value, (0, 5)) for name, value in texts([3, 12, 4, 11]).items()}
    del batch["labels"]
    model = MeanOverColumns()
    expected = model(**batch).loss.item()
    truth = h.full_batch_gradient(model, batch)
    assert hf_ga.backward(model, batch, micro_batch_size=size).item() == pytest.approx(expected)
    assert h.relative_error(h.gradients(model), truth) < 1e-6


@pytest.mark.parametrize(
    ("build", "shapes"),
    [(h.gpt2, [(2, 4), (2, 12)]), (h.bert_masked_lm, [(2, 12), (2, 12)])],
    ids=["no token looks at padding", "all tokens do"],
)
def test_padding_without_a_mask(build, shapes):
    batch = texts([3, 12, 4, 11])
    del batch["attention_mask"]
    model = build()
    truth = h.full_batch_gradient(model, batch)
    assert trained_shapes(model, batch) == shapes
    model.zero_grad()
    hf_ga.backward(model, batch, micro_batch_size=2)
    assert h.relative_error(h.gradients(model), truth) < 1e-6


def test_a_batch_that_is_computed_again_counts_once_in_buffers():
    """It is padded on trial; the forward counts the samples that it saw with gradients."""
    batch = texts([3, 12, 4, 11])
    del batch["attention_mask"]
    model = h.bert_masked_lm()
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def count(module, args, kwargs):
        module.seen += len(kwargs["input_ids"])

    model.register_forward_pre_hook(count, with_kwargs=True)
    hf_ga.backward(model, batch, micro_batch_size=2)
    assert int(model.seen) == 4


@pytest.mark.parametrize("name", ["GPT-2", "BERT answers"])
@pytest.mark.parametrize("size", ["auto", 8])
def test_when_memory_runs_out_the_gradient_is_the_same(name, size):
    case = CASES[name]
    model = case.build(0.1)
    batch = case.batch()
    whole, _ = gradient(case, 0.1, NUM_SAMPLES)
    hf_ga.backward(model, batch, micro_batch_size=NUM_SAMPLES)  # tried with enough memory
    model.zero_grad()
    device = Device(model, fits=40)
    hf_ga.backward(model, batch, micro_batch_size=size, seed=cases.SEED, step=0)
    assert device.failures
    assert h.relative_error(h.gradients(model), whole) < 1e-6

    device.failures.clear()
    hf_ga.backward(model, batch, micro_batch_size=size)
    assert device.failures == [], "what fits was not remembered"


def test_a_sample_that_does_not_fit_is_named():
    model = h.gpt2()
    batch = CASES["GPT-2"].batch()
    hf_ga.backward(model, batch, micro_batch_size="auto")
    model.zero_grad()
    Device(model, fits=3)
    with pytest.raises(OutOfMemory, match="tokens"):
        hf_ga.backward(model, batch, micro_batch_size="auto")
    assert all(p.grad is None for p in model.parameters())


def test_the_seed_is_that_of_torch_unless_given():
    case = CASES["GPT-2"]

    def with_seed(number):
        torch.manual_seed(number)
        return gradient(case, 0.1, 8, seed=None)[0]

    first = with_seed(5)
    assert h.relative_error(with_seed(5), first) == 0
    assert h.relative_error(with_seed(6), first) > 1e-2
    assert h.relative_error(gradient(case, 0.1, 8, seed=5)[0], first) == 0


def test_steps_are_counted_and_can_be_resumed():
    case = CASES["GPT-2"]

    def gradients_of(model, number, **more):
        found = []
        for _ in range(number):
            model.zero_grad()
            hf_ga.backward(model, case.batch(), micro_batch_size=8, seed=1, **more)
            found.append(h.gradients(model))
            more = {}
        return found

    whole = gradients_of(case.build(0.1), 4)
    resumed = gradients_of(case.build(0.1), 2, step=2)
    assert h.relative_error(whole[1], whole[0]) > 1e-2
    for found, expected in zip(resumed, whole[2:], strict=True):
        assert h.relative_error(found, expected) < 1e-6


def test_copies_of_the_model_start_anew_and_nothing_keeps_it():
    model = h.gpt2(0.1)
    hf_ga.backward(model, CASES["GPT-2"].batch(), micro_batch_size=8)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.zero_grad()
        hf_ga.backward(twin, CASES["GPT-2"].batch(), micro_batch_size=8, seed=cases.SEED)
        assert h.relative_error(h.gradients(twin), gradient(CASES["GPT-2"], 0.1, 8)[0]) < 1e-6
    gone = weakref.ref(model)
    del model, twin
    gc.collect()
    assert gone() is None


def test_the_first_calls_and_new_kinds_of_batches_are_rehearsed():
    """One forward more, of five samples. A new kind of batch is computed as planned, then with a
    rehearsal, and again as planned.
    """
    model = h.bert_classifier()
    batch = CASES["BERT classes"].batch()
    sizes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )

    def forwards(batch):
        sizes.clear()
        hf_ga.backward(model, batch, micro_batch_size=4)
        return len(sizes)

    assert [forwards(batch) for _ in range(3)] == [6, 6, 6]
    forwards(batch)  # tries speed-ups
    assert forwards(batch) == 5
    other = {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}
    assert forwards(other) == 5 + 6 + 5
    assert forwards(other) == 5
    assert forwards(batch) == 5


class Weighted(nn.Module):
    """A loss of its own: class 2 has a weight, and some batches do not have it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, input, labels):
        weight = torch.tensor([1.0, 1.0, 5.0], dtype=input.dtype)
        return SimpleNamespace(loss=F.cross_entropy(self.layer(input), labels, weight=weight))


def test_a_loss_with_weights_is_exact():
    model = Weighted().train()
    for classes in (2, 3):
        batch = {"input": torch.randn(12, 4), "labels": torch.arange(12) % classes}
        model.zero_grad()
        truth = h.full_batch_gradient(model, batch)
        hf_ga.backward(model, batch, micro_batch_size=5)
        assert h.relative_error(h.gradients(model), truth) < 1e-6


def test_a_number_of_targets_that_does_not_add_up_is_refused():
    model = nn.Linear(4, 3).train()

    def loss_fn(outputs, batch):
        weights = torch.where(batch["labels"] == 2, 5.0, 1.0)
        losses = F.cross_entropy(outputs, batch["labels"], reduction="none")
        mean = (weights * losses).sum() / weights.sum()
        return mean * len(losses), len(losses)

    batch = {"input": torch.randn(12, 4), "labels": torch.arange(12) % 3}
    with pytest.raises(LossNotAdditive, match="two halves together"):
        hf_ga.backward(model, batch, micro_batch_size=4, loss_fn=loss_fn)
    assert all(p.grad is None for p in model.parameters())


def test_the_autocast_of_the_loop_is_used_for_forwards():
    case = CASES["GPT-2"]
    model = case.build(0.0)
    batch = case.batch()
    truth = h.full_batch_gradient(model, batch)
    full = h.autocast_gradient("bf16", model, [batch], [1.0])
    with torch.autocast("cpu", torch.bfloat16):
        hf_ga.backward(model, batch, micro_batch_size=3)
    found = h.gradients(model)
    h.assert_promise_1(found, full, truth, h.ROUNDING["bf16"])
    assert h.relative_error(found, truth) > 1e-4  # so it was not float32


def test_a_loop_within_one_autocast_uses_the_updated_weights():
    """torch keeps casts of the weights until the outermost autocast ends."""

    def losses(around_loop, around_call):
        model = h.gpt2()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        with around_loop:
            for _ in range(2):
                with around_call:
                    loss = hf_ga.backward(model, CASES["GPT-2"].batch(), micro_batch_size=3)
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss))
        return found

    in_bf16 = torch.autocast("cpu", torch.bfloat16)
    assert losses(in_bf16, nullcontext()) == losses(nullcontext(), in_bf16)


def accelerator_in(precision: str) -> Accelerator:
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    enable_fp16_on_cpu(accelerator)
    return accelerator


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_an_accelerator_gives_precision_and_loss_scale(precision):
    case = CASES["GPT-2"]
    batch = case.batch()
    accelerator = accelerator_in(precision)
    plain = case.build(0.0)
    model = accelerator.prepare(case.build(0.0))
    hf_ga.backward(model, batch, micro_batch_size=3, accelerator=accelerator)
    scale = h.SCALE if precision == "fp16" else 1.0
    found = h.divided(h.gradients(model), scale)
    full = h.autocast_gradient(precision, plain, [batch], [1.0])
    h.assert_promise_1(found, full, h.full_batch_gradient(plain, batch), h.ROUNDING[precision])


def without(batch: dict, name: str) -> dict:
    return {key: value for key, value in batch.items() if key != name}


def divided(outputs, batch):
    losses = F.cross_entropy(outputs.logits, batch["labels"], reduction="sum")
    return losses / len(batch["labels"]), len(batch["labels"])


def detached(outputs, batch):
    total = F.cross_entropy(outputs.logits, batch["labels"], reduction="sum")
    return total.detach(), len(batch["labels"])


BATCH = CASES["BERT classes"].batch
BAD = {  # error, what it says, batch, settings
    "no dict": (DataError, "must be a dict", lambda: tuple(BATCH().values()), {}),
    "no tensor": (DataError, "no tensor with a sample dimension", lambda: {"labels": 3}, {}),
    "no samples": (
        DataError,
        "no samples",
        lambda: {name: value[:0] for name, value in BATCH().items()},
        {},
    ),
    "unequal axes": (
        DataError,
        "input_ids 20, labels 19",
        lambda: {**BATCH(), "labels": BATCH()["labels"][1:]},
        {},
    ),
    "nested": (DataError, "nested dict", lambda: {"inputs": BATCH()}, {}),
    "size 0": (ConfigError, "at least 1", BATCH, {"micro_batch_size": 0}),
    "size 2.5": (ConfigError, "an integer", BATCH, {"micro_batch_size": 2.5}),
    "size as text": (ConfigError, "'whole'", BATCH, {"micro_batch_size": "whole"}),
    "step": (ConfigError, "step must be", BATCH, {"step": -1}),
    "no labels": (LossNotAdditive, "give it labels", lambda: without(BATCH(), "labels"), {}),
    "divided": (LossNotAdditive, "is a mean, or compares", BATCH, {"loss_fn": divided}),
    "detached": (LossNotAdditive, "needs no gradient", BATCH, {"loss_fn": detached}),
    "no pair": (ConfigError, "loss_fn must return", BATCH, {"loss_fn": lambda o, b: o.logits}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(name):
    error, message, batch, settings = BAD[name]
    model = h.bert_classifier()
    with pytest.raises(error, match=message):
        hf_ga.backward(model, batch(), **{"micro_batch_size": 4, **settings})
    assert all(p.grad is None for p in model.parameters())


def test_a_model_in_evaluation_mode_is_refused():
    with pytest.raises(ConfigError, match=r"model\.train\(\)"):
        hf_ga.backward(h.bert_classifier().eval(), BATCH(), micro_batch_size=4)


def test_a_call_without_gradients_is_refused():
    with torch.no_grad(), pytest.raises(ConfigError, match="no_grad"):
        hf_ga.backward(h.bert_classifier(), BATCH(), micro_batch_size=4)


def test_data_parallel_is_refused():
    with pytest.raises(ConfigError, match="one process for each device"):
        hf_ga.backward(nn.DataParallel(h.bert_classifier()), BATCH(), micro_batch_size=4)


def test_batch_normalisation_is_refused():
    model = cases.resnet()
    batch = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.arange(8) % 3}
    with pytest.raises(LossNotAdditive, match="BatchNorm"):
        hf_ga.backward(model, batch, micro_batch_size=4)


def test_fp16_needs_an_accelerator():
    model = h.bert_classifier()
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(ConfigError, match="loss scale"),
    ):
        hf_ga.backward(model, BATCH(), micro_batch_size=4)
    accelerator = accelerator_in("fp16")
    model = accelerator.prepare(model)
    with pytest.raises(ConfigError, match="pass accelerator="):
        hf_ga.backward(model, BATCH(), micro_batch_size=4)


def test_our_own_accelerator_is_refused():
    AcceleratorState._reset_state()
    accelerator = hf_ga.Accelerator(cpu=True)
    model = accelerator.prepare(h.bert_classifier())
    with pytest.raises(ConfigError, match=r"accelerate\.Accelerator"):
        hf_ga.backward(model, BATCH(), micro_batch_size=4, accelerator=accelerator)


def test_two_precisions_are_refused():
    accelerator = accelerator_in("no")
    model = accelerator.prepare(h.bert_classifier())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigError, match="omit accelerator"),
    ):
        hf_ga.backward(model, BATCH(), micro_batch_size=4, accelerator=accelerator)


def test_a_batch_without_targets_adds_nothing():
    model = h.bert_classifier()
    batch = BATCH()
    hf_ga.backward(model, batch, micro_batch_size=4)
    model.zero_grad()
    batch["labels"] = torch.full_like(batch["labels"], h.IGNORED)
    loss = hf_ga.backward(model, batch, micro_batch_size=4)
    assert float(loss) == 0
    assert all(p.grad is None for p in model.parameters())


def test_shared_entries_and_lists_are_kept():
    """A number is shared by all samples; a list has one entry for each."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)
            self.seen = []

        def forward(self, x, names, factor):
            self.seen.append(([len(name) for name in names], x[:, 0].tolist()))
            return SimpleNamespace(logits=self.layer(x) * factor)

    def loss_fn(outputs, batch):
        total = F.cross_entropy(outputs.logits, batch["labels"], reduction="sum")
        return total, len(batch["labels"])

    names = ["a" * (1 + i % 4) for i in range(NUM_SAMPLES)]
    batch = {
        "x": torch.tensor([[len(name), i] for i, name in enumerate(names)]).float(),
        "names": names,
        "factor": 0.1,
        "labels": torch.arange(NUM_SAMPLES) % 3,
    }
    model = Named().train()
    logits = model(batch["x"], names, 0.1).logits
    F.cross_entropy(logits, batch["labels"]).backward()
    expected = h.gradients(model)
    model.zero_grad()
    hf_ga.backward(model, batch, micro_batch_size=3, loss_fn=loss_fn)
    assert h.relative_error(h.gradients(model), expected) < 1e-6
    model.seen.clear()
    hf_ga.backward(model, batch, micro_batch_size=3, loss_fn=loss_fn)
    assert len(model.seen) == 8  # with a rehearsal
    assert all(of_names == of_x for of_names, of_x in model.seen)


def test_axes_of_one_width_by_chance_are_told_apart():
    """The targets of a T5 are as long as its texts in the first batch only."""
    batch = cases.summaries()
    width = batch["input_ids"].shape[1]
    equal = {**batch, "labels": F.pad(batch["labels"], (0, width - 9), value=h.IGNORED)}
    model = h.t5()
    for each in (equal, batch, equal):
        truth = h.full_batch_gradient(model, each)
        model.zero_grad()
        hf_ga.backward(model, each, micro_batch_size=3)
        assert h.relative_error(h.gradients(model), truth) < 1e-6
    memory = vars(model)["_hf_ga_backward"]
    (axes,) = memory.axes.values()
    assert axes == {
        "attention_mask": ("attention_mask", True),
        "input_ids": ("attention_mask", False),
        "labels": ("labels", True),
    }
    assert len(memory.states) == 2


class OfWeightedTokens(nn.Module):
    """The squares of scores, weighted; each depends on all tokens, of which none are padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, input_ids, mask_of_loss):
        tokens = self.embedding(input_ids)
        scores = self.head(tokens + tokens.mean(1, keepdim=True)).squeeze(-1)
        return {"loss": (scores.square() * mask_of_loss).sum(1).mean()}


def test_weights_that_are_zeros_and_ones_by_chance_are_no_mask():
    model = OfWeightedTokens()
    for step in range(NUM_FIRST_WINDOWS + 2):
        weights = torch.rand(6, 5)
        if step > NUM_FIRST_WINDOWS:
            weights = (torch.arange(5) < 3).float().expand(6, 5)
        batch = {"input_ids": torch.randint(20, (6, 5)), "mask_of_loss": weights}
        model(**batch)["loss"].backward()
        truth = h.gradients(model)
        model.zero_grad()
        hf_ga.backward(model, batch, micro_batch_size=2, step=step)
        assert h.relative_error(h.gradients(model), truth) < 1e-6, step
        model.zero_grad()


class Adversarial(nn.Module):
    """Scores inputs that are moved along the gradient of their own loss (FGM), and zeroes the
    gradients that this backward leaves in the parameters, as tutorials do; or does not.
    """

    def __init__(self, zeroes):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.zeroes = zeroes

    def forward(self, x, y):
        moved = x.detach().clone().requires_grad_(True)
        (self.layers(moved).squeeze(-1) - y).square().sum().backward()
        if self.zeroes:
            self.zero_grad()
        return self.layers(x + 0.1 * moved.grad.sign()).squeeze(-1)


@pytest.mark.parametrize("zeroes", [True, False])
def test_a_backward_within_the_forward_leaves_the_sums_alone(zeroes):
    def loss_fn(outputs, batch):
        return (outputs - batch["y"]).square().sum(), len(batch["y"])

    model = Adversarial(zeroes)
    for step in range(12):  # rehearsed windows and others
        batch = {"x": torch.randn(6, 5).double(), "y": torch.randn(6).double()}
        outputs = model(**batch)
        model.zero_grad()
        total, number = loss_fn(outputs, batch)
        (total / number).backward()
        truth = h.gradients(model)
        model.zero_grad()
        hf_ga.backward(model, batch, micro_batch_size=2, loss_fn=loss_fn, step=step)
        assert h.relative_error(h.gradients(model), truth) < 1e-12, step


class Keeping(nn.Module):
    """Keeps its last output in an attribute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.last = self.layer(x).tanh()
        return self.last


def test_outputs_that_a_module_keeps_are_freed_with_it():
    def loss_fn(outputs, batch):
        return outputs.square().sum(), len(outputs)

    model = Keeping()
    outputs = []
    for step in range(4):
        batch = {"x": torch.randn(6, 4)}
        hf_ga.backward(model, batch, micro_batch_size=3, loss_fn=loss_fn, step=step)
        outputs.append(weakref.ref(model.last))
    gc.collect()
    assert [output() is not None for output in outputs] == [False, False, False, True]
