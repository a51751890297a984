"""Data that hides what a loss divides by, or depends on: exact in every split, or refused."""

from functools import partial

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from splits import assert_every_split_is_exact
from steps import backward_window
from torch import nn
from torch.nn import functional as F
from windows import one_window, window_gradient

import hf_ga


class TokenMean(nn.Module):
    """A mean over the tokens whose target is not 0, under a name that no rule reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)

    def forward(self, idx, targets):
        return {
            "loss": F.cross_entropy(
                self.head(self.embedding(idx)).flatten(0, 1), targets.flatten(), ignore_index=0
            )
        }


class Weighted(nn.Module):
    """Class weights: the mean divides by the sum of the weights, not by the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x, labels):
        return {
            "loss": F.cross_entropy(self.head(x), labels, weight=torch.tensor([1.0, 10.0]).to(x))
        }


def pad_tokens(samples):
    rows = nn.utils.rnn.pad_sequence(
        [torch.tensor(sample["idx"]) for sample in samples], batch_first=True
    )
    return {"idx": rows, "targets": rows}


def stack(samples):
    return {
        "x": torch.stack([s["x"] for s in samples]),
        "labels": torch.tensor([s["y"] for s in samples]),
    }


def features(count=64, minority=8):
    return [{"x": torch.randn(4), "y": int(i % minority == 0)} for i in range(count)]


def with_labels(make_label):
    """Samples whose labels are `make_label(label)` of each label that is not -100, and of 0 for
    -100.
    """
    samples = h.plain_samples(16)
    return [{**s, "labels": [make_label(max(v, 0)) for v in s["labels"]]} for s in samples]


def without_one(skipped_class, returns_logits=True):
    """A classifier whose loss averages over the samples of all other classes."""

    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x, labels):
            logits = self.head(x)
            losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
            is_target = (labels != skipped_class) & (labels >= 0)
            loss = {"loss": losses[is_target].mean()}
            return {**loss, "logits": logits} if returns_logits else loss

    return h.seeded(Skipping)()


class CausalTagger(h.PositiveTagger):
    """Each token predicts the label of the next one."""

    def forward(self, input_ids, labels):
        ignored = torch.zeros_like(labels[:, :1])
        return super().forward(input_ids, torch.cat([labels[:, 1:], ignored], 1))


class UnlessZero(h.PositiveTagger):
    """Skips labels of 0, and counts labels of -100 as targets whose loss is 0."""

    def forward(self, input_ids, labels):
        logits = self.output(torch.tanh(self.embedding(input_ids))).flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
        return {"loss": losses[labels.flatten() != 0].mean()}


class Ignores255(h.PositiveTagger):
    def forward(self, input_ids, labels):
        logits = self.output(torch.tanh(self.embedding(input_ids))).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, labels.flatten(), ignore_index=255)}


class Segmenter(nn.Module):
    """Every pixel that is not ignored is a target."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(1, 3, 1)

    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.head(x), labels)}


def pixels():
    samples = [{"x": torch.randn(1, 5, 5), "labels": torch.randint(0, 3, (5, 5))} for _ in range(8)]
    samples[0]["labels"][:4] = h.IGNORED
    return samples


def collate_pixels(samples):
    return {name: torch.stack([s[name] for s in samples]) for name in ("x", "labels")}


def of_one_length():
    """Most are cut at one length."""
    return [{"idx": list(range(1, 1 + (20 if i % 3 else 2 + i % 11)))} for i in range(16)]


def selected(losses, is_target):
    return losses[is_target].mean()


def other_class():
    return [{**sample, "y": 1 - sample["y"]} for sample in features(24)]


MANY_ZEROS = partial(with_labels, lambda label: label % 3)
NO_ZEROS = partial(with_labels, lambda label: label % 39 + 1)
MOSTLY_ZEROS = partial(with_labels, lambda label: label // 30)
PLAIN = partial(with_labels, lambda label: label)


def tagger(mean):
    return partial(h.positive_tagger, mean)


# name: (model, samples, collate function)
EXACT = {
    "rows of one length": (TokenMean, of_one_length, pad_tokens),
    "class weights": (Weighted, partial(features, 24), stack),
    "pixels": (Segmenter, pixels, collate_pixels),
    "ignored zeros, many": (tagger(None), MANY_ZEROS, h.pad_with_zeros),
    "ignored zeros, none": (tagger(None), NO_ZEROS, h.pad_with_zeros),
    "ignored zeros, mostly": (tagger(None), MOSTLY_ZEROS, h.pad_with_zeros),
    "selected, many zeros": (tagger(selected), MANY_ZEROS, h.pad_with_zeros),
    "selected, mostly zeros": (tagger(selected), MOSTLY_ZEROS, h.pad_with_zeros),
    "selected, -100 for padding": (tagger(selected), PLAIN, h.pad_right),
    "a skipped class": (partial(without_one, 0), partial(features, 24), stack),
    "the other class skipped": (partial(without_one, 1), other_class, stack),
    "a skipped class, without logits": (partial(without_one, 1, False), other_class, stack),
    "causal, zeros ignored": (
        partial(h.seeded(CausalTagger), selected),
        lambda: [{**s, "labels": s["input_ids"]} for s in h.plain_samples(16)],
        h.pad_right,
    ),
    "unless zero": (h.seeded(UnlessZero), PLAIN, h.pad_right),
    "another ignored label": (h.seeded(Ignores255), PLAIN, h.pad_with_zeros),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_split_is_the_full_batch(name):
    build, make_samples, collate = EXACT[name]
    samples = make_samples()
    assert_every_split_is_exact(h.seeded(build), samples, collate)


# name: (mean over the positive labels, sizes of micro-batches, message)
OTHER_MEANS = {
    "zeros count, too": (
        lambda losses, is_target: losses.sum() / is_target.sum(),
        (1, 3),
        "follows neither",
    ),
    "of all labels if none is positive": (
        lambda losses, is_target: losses[is_target].mean() if is_target.any() else losses.mean(),
        (1,),
        "a sample has this term of the loss among some samples",
    ),
}


@pytest.mark.parametrize("name", OTHER_MEANS)
def test_means_that_are_none_are_refused(name):
    mean, sizes, message = OTHER_MEANS[name]
    for size in sizes:
        window = one_window(MOSTLY_ZEROS(), size, h.pad_with_zeros)
        with pytest.raises(hf_ga.LossNotAdditive, match=message):
            window_gradient(h.positive_tagger(mean), window)


def test_a_function_of_a_mean_is_refused():
    model = Weighted()
    plain = model.forward
    model.forward = lambda x, labels: {"loss": plain(x, labels)["loss"].sqrt()}
    with pytest.raises(hf_ga.LossNotAdditive, match="SqrtBackward0"):
        window_gradient(model, one_window(features(16), 3, stack))


def test_batch_norm_that_trains_later_is_refused():
    """In evaluation mode it is right."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model.forward = lambda x, labels: {
        "loss": F.cross_entropy(model[2](model[1](model[0](x))), labels)
    }
    model.train()[1].eval()
    window = one_window(features(16), 8, stack)
    window_gradient(model, window)
    model.train()
    with pytest.raises(hf_ga.LossNotAdditive, match="BatchNorm"):
        window_gradient(model, window)


def test_batch_norm_is_found_where_draws_may_depend_on_the_split():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x) if self.training else x

    model = nn.Sequential(nn.Linear(4, 8), Noisy(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model.forward = lambda x, labels: {
        "loss": F.cross_entropy(nn.Sequential.forward(model, x), labels)
    }
    with pytest.raises(hf_ga.LossNotAdditive, match="BatchNorm"):
        window_gradient(
            model, one_window(features(16), 8, stack), allow_split_dependent_randomness=True
        )


def test_a_frozen_parameter_keeps_a_gradient_of_its_own():
    """Only what is trained is divided by the targets."""
    model = nn.Sequential(nn.Linear(4, 2))
    model.forward = lambda x: model[0](x)
    model[0].bias.grad = torch.ones(2)
    model[0].bias.requires_grad_(False)

    def loss_fn(outputs, batch):
        return F.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)

    backward_window(Accelerator(), model, one_window(features(16), 8, stack), loss_fn=loss_fn)
    assert model[0].bias.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Weighted().to(torch.float16), "must be float32"),
        (Weighted().to(torch.bfloat16), "must be float32"),
        (Weighted().requires_grad_(False), "trainable"),
        (nn.Embedding(4, 2, sparse=True), "sparse"),
        (nn.Embedding(4, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.EmbeddingBag(4, 2, scale_grad_by_freq=True, mode="sum"), "scale_grad_by_freq"),
    ],
    ids=["fp16", "bf16", "nothing trainable", "sparse", "by frequency", "by frequency in bags"],
)
def test_models_that_cannot_be_trained(model, why):
    with pytest.raises(hf_ga.ConfigError, match=why):
        window_gradient(model, one_window(features(16), 8, stack))
