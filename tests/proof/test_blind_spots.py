"""Cases in which a proof on too similar samples would accept a wrong rule, or a slice that is none
would prove anything.
"""

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from steps import backward_window
from torch import nn
from torch.nn import functional as F
from windows import one_window

import hf_ga
from hf_ga.exact.batches import take_rows
from hf_ga.exact.entries import Entries
from hf_ga.proof.coverage import special_tokens

WINDOW = 16


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
        return {"loss": F.cross_entropy(self.head(x), labels, weight=torch.tensor([1.0, 10.0]))}


def two_classes():
    """Whose outputs are logits."""
    model = nn.Sequential(nn.Linear(4, 2))
    model.forward = lambda x: model[0](x)
    return model


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


def window_of(samples, size=8):
    return one_window(samples, size, stack, global_batch_size=WINDOW)


def test_most_rows_cut_at_one_length():
    """Probe rows of one length would make the samples a right count of a mean over tokens."""
    samples = [{"idx": list(range(1, 1 + (20 if i % 3 else 2 + i % 11)))} for i in range(32)]
    with pytest.raises(hf_ga.LossNotAdditive, match="not the mean over its targets"):
        hf_ga.prove_targets(TokenMean(), samples, pad_tokens)


def test_class_weights():
    """Probe rows of one class would hide that the classes weigh differently."""
    with pytest.raises(hf_ga.LossNotAdditive, match="not the mean over its targets"):
        hf_ga.prove_targets(Weighted(), features(), stack)


def test_pixels_are_counted():
    """Labels with two axes beyond the samples: every pixel that is not ignored is a target."""

    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(1, 3, 1)

        def forward(self, x, labels):
            return {"loss": F.cross_entropy(self.head(x), labels)}

    def collate(samples):
        return {name: torch.stack([s[name] for s in samples]) for name in ("x", "labels")}

    samples = [{"x": torch.randn(1, 5, 5), "labels": torch.randint(0, 3, (5, 5))} for _ in range(8)]
    samples[0]["labels"][:4] = -100
    assert hf_ga.prove_targets(Segmenter(), samples, collate).name == "labels"


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (
            lambda samples: {"x": torch.stack([s["x"] for s in samples], 1)},
            "samples in the first dim",
        ),
        (lambda samples: {"batch": stack(samples)}, "nested dict"),
        (lambda samples: {"x": object()}, "one row per sample"),
        (lambda samples: (stack(samples)["x"], stack(samples)["labels"]), "must return a dict"),
    ],
    ids=["time first", "nested", "object", "tuple"],
)
def test_batches_that_cannot_be_cut(collate, message):
    """A slice that leaves everything as it is would make any loss additive."""
    with pytest.raises(hf_ga.DataError, match=message):
        hf_ga.prove_targets(Weighted(), features(), collate)


def test_entries_of_samples_and_rows():
    def collate(samples):
        return {
            "x": torch.zeros(len(samples), 2),
            "names": ["a"] * len(samples),
            "table": torch.arange(3),
        }

    entries = Entries(collate, {}).of_samples
    assert entries == {"x", "names"}
    taken = take_rows(
        collate([{}] * 3), [0, 2], entries
    )  # a table of 3 rows in a batch of 3 samples stays whole
    assert (len(taken["x"]), len(taken["names"]), len(taken["table"])) == (2, 2, 3)


def test_another_mode_than_in_the_proof():
    """BatchNorm that was frozen when the rule was proven and trains now: refused with the rule,
    found without it.
    """
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model.forward = lambda x, labels: {
        "loss": F.cross_entropy(model[2](model[1](model[0](x))), labels)
    }
    model.train()[1].eval()
    samples = features()
    rule = hf_ga.prove_targets(model, samples, stack)
    window = window_of(samples)
    backward_window(Accelerator(), model, window, rule=rule)
    backward_window(Accelerator(), model, window)
    model.train()
    with pytest.raises(hf_ga.ConfigError, match="modes"):
        backward_window(Accelerator(), model, window, rule=rule)
    with pytest.raises(hf_ga.LossNotAdditive, match="normalises by the statistics"):
        backward_window(Accelerator(), model, window)


def test_batch_norm_is_found_where_draws_are_allowed_to_depend_on_the_split():
    """Only the module that draws is quiet in the proof, not everything that behaves otherwise in
    training.
    """

    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x) if self.training else x

    layers = nn.ModuleList([nn.Linear(4, 8), Noisy(), nn.BatchNorm1d(8), nn.Linear(8, 2)])
    for kept in (layers, nn.ModuleList([layers[0], layers[1], layers[3]])):
        model = nn.Sequential(*kept)
        model.forward = lambda x, labels, model=model: {
            "loss": F.cross_entropy(nn.Sequential.forward(model, x), labels)
        }
        if kept is layers:
            with pytest.raises(hf_ga.LossNotAdditive, match="normalises"):
                hf_ga.prove_targets(model, features(), stack, allow_split_dependent_randomness=True)
        else:
            assert (
                hf_ga.prove_targets(
                    model, features(), stack, allow_split_dependent_randomness=True
                ).name
                == "labels"
            )


def test_another_loss_function_is_proven_anew():
    """`prepare` may be called again with another loss; the loader's rule is of the earlier one.
    With the same loss, the rule is kept.
    """

    def summed(outputs, batch):
        loss = F.cross_entropy(outputs, batch["labels"], reduction="sum")
        return loss, len(batch["labels"])

    def averaged(outputs, batch):
        return F.cross_entropy(outputs, batch["labels"]), len(batch["labels"])

    model = two_classes()
    window = window_of(features())
    backward_window(Accelerator(), model, window, loss_fn=summed)
    rule = window.state.rules[model]
    backward_window(Accelerator(), model, window, loss_fn=summed)
    assert window.state.rules[model] is rule
    with pytest.raises(hf_ga.LossNotAdditive):
        backward_window(Accelerator(), model, window, loss_fn=averaged)


def test_a_frozen_parameter_keeps_a_gradient_of_its_own():
    """Only what is trained is divided by the targets."""
    model = two_classes()
    model[0].bias.grad = torch.ones(2)
    model[0].bias.requires_grad_(False)

    def loss_fn(outputs, batch):
        return F.cross_entropy(outputs, batch["labels"], reduction="sum"), 0.5 * len(
            batch["labels"]
        )

    backward_window(Accelerator(), model, window_of(features()), loss_fn=loss_fn)
    assert model[0].bias.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Weighted().to(torch.float16), "must be float32"),
        (Weighted().requires_grad_(False), "trainable"),
    ],
    ids=["fp16", "nothing trainable"],
)
def test_models_that_cannot_be_trained(model, why):
    with pytest.raises(hf_ga.ConfigError, match=why):
        hf_ga.prove_targets(model, features(), stack)


@pytest.mark.parametrize("eos", [3, [3, 7]], ids=["one", "several"])
def test_a_model_with_several_end_tokens_is_proven(eos):
    """Llama 3 and GLM have several; no label of the proof is a special token."""
    model = h.gpt2()
    model.config.eos_token_id = eos
    assert special_tokens(model)[-1] == (3 if eos == 3 else 7)
    samples = h.token_samples(32)
    assert hf_ga.prove_targets(model, samples, h.pad_right).name == "shifted labels"


def with_labels(make_label):
    """Samples whose labels are `make_label(label)` of each label that is not -100, and of 0 for
    -100.
    """
    samples = h.plain_samples(16)
    return [{**s, "labels": [make_label(max(v, 0)) for v in s["labels"]]} for s in samples]


@pytest.mark.parametrize(
    "mean",
    [None, lambda losses, is_target: losses[is_target].mean()],
    ids=["ignore_index=0", "selected"],
)
@pytest.mark.parametrize(
    "make_label",
    [lambda label: label % 3, lambda label: label % 39 + 1, lambda label: label // 30],
    ids=["many zeros", "no zeros", "hardly anything else"],
)
def test_a_head_that_ignores_labels_of_0_counts_positive_labels(mean, make_label):
    """With any labels: without zeros, all labels would fit as well; with some, the samples may have
    the same share by chance. Control: a head to which 0 is a class.
    """
    samples = with_labels(make_label)
    rule = hf_ga.prove_targets(h.positive_tagger(mean), samples, h.pad_with_zeros)
    assert (rule.name, rule.width_matters) == ("positive labels", False)
    assert hf_ga.prove_targets(h.plain_tagger(), samples, h.pad_right).name == "labels"


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


def test_a_classifier_that_ignores_a_class():
    """On the probe batch group A has one of three targets and two of six samples, so "samples" fits
    by chance. Class 0 has a rule of its own. Class 1 has none: a part of class 1 only has a loss of
    NaN, and without logits, which show the classes, the sorted labels do not fit.
    """
    samples = features()
    exchanged = [{**sample, "y": 1 - sample["y"]} for sample in samples]
    assert hf_ga.prove_targets(without_one(0), exchanged, stack).name == "positive labels"
    assert hf_ga.prove_targets(without_one(0), samples, stack).name == "positive labels"
    with pytest.raises(hf_ga.LossNotAdditive, match="nan from its two parts"):
        hf_ga.prove_targets(without_one(1), samples, stack)
    with pytest.raises(hf_ga.LossNotAdditive, match=r"not the mean over its targets \(samples\)"):
        hf_ga.prove_targets(without_one(1, returns_logits=False), samples, stack)


@pytest.mark.parametrize(
    "mean",
    [
        lambda losses, is_target: losses.sum() / is_target.sum(),
        lambda losses, is_target: losses[is_target].mean() if is_target.any() else losses.mean(),
    ],
    ids=["of all labels", "of all labels if none is positive"],
)
def test_a_loss_over_positive_labels_that_zeros_add_to_is_refused(mean):
    """By its counts alone, the second would pass."""
    with pytest.raises(hf_ga.LossNotAdditive, match="not the mean over its targets"):
        hf_ga.prove_targets(h.positive_tagger(mean), with_labels(lambda v: v), h.pad_with_zeros)


class CausalTagger(h.PositiveTagger):
    """Each token predicts the label of the next one."""

    def forward(self, input_ids, labels):
        ignored = torch.zeros_like(labels[:, :1])
        return super().forward(input_ids, torch.cat([labels[:, 1:], ignored], 1))


def test_a_causal_head_that_ignores_labels_of_0_is_refused():
    """No rule counts its targets, although "shifted labels" does where no label is 0."""
    model = h.seeded(CausalTagger)(lambda losses, is_target: losses[is_target].mean())
    samples = [{**s, "labels": s["input_ids"]} for s in h.plain_samples(16)]
    with pytest.raises(hf_ga.LossNotAdditive, match="not the mean over its targets"):
        hf_ga.prove_targets(model, samples, h.pad_right)


class UnlessZero(h.PositiveTagger):
    """Skips labels of 0, and counts labels of -100 as targets whose loss is 0."""

    def forward(self, input_ids, labels):
        logits = self.output(torch.tanh(self.embedding(input_ids))).flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
        return {"loss": losses[labels.flatten() != 0].mean()}


def test_labels_of_minus_100_are_tested_if_the_samples_have_some():
    """Controls: padded with 0, the same head is right; a head that ignores both is right."""
    samples = with_labels(lambda label: label)
    ignores_both = h.positive_tagger(lambda losses, is_target: losses[is_target].mean())
    assert hf_ga.prove_targets(ignores_both, samples, h.pad_right).name == "positive labels"
    rule = hf_ga.prove_targets(h.seeded(UnlessZero)(), samples, h.pad_with_zeros)
    assert rule.name == "positive labels"
    with pytest.raises(hf_ga.LossNotAdditive, match="not the mean over its targets"):
        hf_ga.prove_targets(h.seeded(UnlessZero)(), samples, h.pad_right)


def test_a_head_that_ignores_another_label_is_refused():
    """It does not support labels of -100. If they were masked with 0 instead, every label would
    count as a target, also those of 255 that the samples have elsewhere.
    """

    class Ignores255(h.PositiveTagger):
        def forward(self, input_ids, labels):
            logits = self.output(torch.tanh(self.embedding(input_ids))).flatten(0, 1)
            return {"loss": F.cross_entropy(logits, labels.flatten(), ignore_index=255)}

    with pytest.raises(hf_ga.LossNotAdditive, match="ignores a label other than -100 and 0"):
        hf_ga.prove_targets(h.seeded(Ignores255)(), with_labels(lambda v: v), h.pad_with_zeros)
