"""Heads of many kinds: every split of a window is the full batch, or is refused with its cause."""

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from splits import assert_every_split_is_exact
from torch import nn
from windows import one_window, window_gradient

import hf_ga


class Head(nn.Module):
    """Embedding and a linear layer; `loss(features, labels, mask)` is given by the test. Features:
    (samples, tokens, classes).
    """

    def __init__(self, loss, norm=None):
        super().__init__()
        self.embedding = nn.Embedding(h.VOCABULARY, h.WIDTH)
        self.norm = norm or nn.Identity()
        self.linear = nn.Linear(h.WIDTH, h.NUM_CLASSES)
        self.loss = loss

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.embedding(input_ids)
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return {"loss": self.loss(self.linear(hidden), labels, attention_mask)}


def pooled(features, mask):
    return (features * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def own_mean_over_samples(features, labels, mask):
    """Per sample a mean over its tokens, then a mean over samples: long and short samples weigh the
    same.
    """
    losses = F.cross_entropy(
        features.transpose(1, 2), labels, reduction="none", ignore_index=h.IGNORED
    )
    return (losses.sum(1) / (labels != h.IGNORED).sum(1).clamp(min=1)).mean()


def own_mean_of_positive_labels(features, labels, mask):
    """Ignores labels of 0 and -100, but counts a sample that has no others."""
    labels = labels.clamp(min=0)
    losses = F.cross_entropy(features.transpose(1, 2), labels, reduction="none", ignore_index=0)
    return (losses.sum(1) / (labels > 0).sum(1).clamp(min=1)).mean()


def mean_over_samples(features, labels, mask):
    return F.cross_entropy(pooled(features, mask), labels)


def summed(features, labels, mask):
    return F.cross_entropy(pooled(features, mask), labels, reduction="sum")


def contrastive(features, labels, mask):
    """Each sample must find itself among all samples of the batch."""
    pools = F.normalize(pooled(features, mask), dim=-1)
    return F.cross_entropy(pools @ pools.T * 5, torch.arange(len(pools)))


def two_means(features, labels, mask):
    """A mean over samples plus a mean over tokens."""
    return mean_over_samples(features, labels, mask) + (features[mask.bool()] ** 2).mean()


def no_loss(features, labels, mask):
    return None


@h.seeded
def head(loss, norm=None):
    return Head(loss, norm)


def with_labels(make_label):
    """Samples that carry what `make_label(sample)` returns."""
    return lambda n: [{**s, **make_label(s)} for s in h.token_samples(n)]


def regression_samples(n):
    return with_labels(lambda s: {"labels": sum(s["input_ids"]) / 100})(n)


def question_samples(n):
    samples = with_labels(
        lambda s: {"start_positions": 1, "end_positions": len(s["input_ids"]) - 1}
    )(n)
    return [{k: v for k, v in s.items() if k != "labels"} for s in samples]


def completion_samples(n):
    """The prompt, column 0 with it, is no target in any sample."""
    return with_labels(lambda s: {"labels": [h.IGNORED] * 2 + s["input_ids"][2:]})(n)


def equal_length_samples(n):
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(2, h.VOCABULARY, (n, 8), generator=rng).tolist()
    return [{"input_ids": i, "attention_mask": [1] * 8, "labels": i} for i in ids]


def equal_length_tag_samples(n):
    return [
        {**s, "labels": [label % h.NUM_CLASSES for label in s["labels"]]}
        for s in equal_length_samples(n)
    ]


def two_targets_each(n):
    """In column 0 and two more, so that the samples of group A have a third of all labels."""
    columns = range(3)
    return [
        {
            **s,
            "labels": [
                v % h.NUM_CLASSES if i in columns else h.IGNORED
                for i, v in enumerate(s["input_ids"])
            ],
        }
        for s in h.token_samples(n)
    ]


def few_targets(n):
    return [s if i < 2 else h.without_targets(s) for i, s in enumerate(h.token_samples(n))]


def frozen_batch_norm():
    """The usual remedy for BatchNorm: frozen statistics. In training the model runs so, and so must
    the trial.
    """
    model = head(mean_over_samples, nn.BatchNorm1d(h.WIDTH))
    model.norm.eval()
    return model


class Criterion(nn.Module):
    """A head that weighs its classes."""

    def __init__(self):
        super().__init__()
        self.bert = h.bert_classifier()
        self.criterion = nn.CrossEntropyLoss(torch.tensor([0.1, 1.0, 9.0]))

    def forward(self, input_ids, attention_mask, labels):
        logits = self.bert(input_ids=input_ids, attention_mask=attention_mask).logits
        return h.tf.modeling_outputs.SequenceClassifierOutput(
            loss=self.criterion(logits, labels), logits=logits
        )


# name: (model, samples)
RIGHT = {
    "GPT-2, completion only": (h.gpt2, completion_samples),
    "GPT-2, equal lengths": (h.gpt2, equal_length_samples),
    "GPT-2, one sample": (h.gpt2, lambda n: h.token_samples(1)),
    "GPT-2, few samples with targets": (h.gpt2, few_targets),
    "BERT masked LM": (h.bert_masked_lm, h.token_samples),
    "BERT masked LM, column 0 ignored": (h.bert_masked_lm, completion_samples),
    "T5": (h.t5, h.token_samples),
    "BERT classes": (h.bert_classifier, h.class_samples),
    "BERT classes, one column": (
        h.bert_classifier,
        with_labels(lambda s: {"labels": [s["input_ids"][0] % 3]}),
    ),
    "BERT regression": (
        lambda: h.bert_classifier(num_labels=1),
        regression_samples,
    ),
    "BERT question answering": (
        h.bert_question_answering,
        question_samples,
    ),
    "BatchNorm in evaluation mode": (frozen_batch_norm, h.class_samples),
    "own mean over samples": (lambda: head(own_mean_over_samples), h.tag_samples),
    "own mean over samples, positive labels": (
        lambda: head(own_mean_of_positive_labels),
        h.tag_samples,
    ),
    "own mean over samples, equal lengths": (
        lambda: head(own_mean_over_samples),
        equal_length_tag_samples,
    ),
    "own mean over samples, two targets each": (
        lambda: head(own_mean_over_samples),
        two_targets_each,
    ),
    "BERT tokens, two targets each": (
        h.bert_token_classifier,
        two_targets_each,
    ),
    "a mean over samples and one over tokens": (lambda: head(two_means), h.class_samples),
    "class weights": (Criterion, h.class_samples),
    "XLNet classes": (h.xlnet_classifier, h.class_samples),
    "FNet": (h.fnet_masked_lm, h.token_samples),
}


@pytest.mark.parametrize("name", RIGHT)
def test_every_split_is_the_full_batch(name):
    build, make_samples = RIGHT[name]
    assert_every_split_is_exact(build, make_samples(12))


def mean_instead_of_sum(outputs, batch):
    total, count = h.weighted_token_loss(outputs, batch)
    return total / count, count


NO_SUM = (hf_ga.ConfigError, r"loss_fn must return \(sum of the loss")
WRONG = {
    "one target too many in every batch": (
        lambda o, b: (h.weighted_token_loss(o, b)[0], len(o) + 1),
        hf_ga.LossNotAdditive,
        None,
    ),
    "mean": (mean_instead_of_sum, hf_ga.LossNotAdditive, None),
    "no count": (lambda o, b: o.sum(), *NO_SUM),
    "vector": (lambda o, b: (o.sum(1), 1), *NO_SUM),
    "float": (lambda o, b: (1.0, 1), *NO_SUM),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_fn_is_refused(name):
    """It must return a sum and a count. Control: the right one is not refused."""
    loss_fn, error, message = WRONG[name]
    window = one_window(h.weighted_samples(8), 3)
    window_gradient(h.plain_tagger(), window, loss_fn=h.weighted_token_loss)
    with pytest.raises(error, match=message):
        window_gradient(h.plain_tagger(), window, loss_fn=loss_fn)


class MaskSkipped(nn.Module):
    """Sees the padding's positions, but only where there is some: in a batch without padding every
    token sees all others.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(h.VOCABULARY, h.WIDTH)
        self.linear = nn.Linear(h.WIDTH, h.NUM_CLASSES)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.embedding(input_ids)
        hidden = (
            hidden.cumsum(1)
            if not attention_mask.all()
            else hidden.sum(1, keepdim=True).expand_as(hidden)
        )
        return {"loss": F.cross_entropy(self.linear(hidden[:, 2]), labels)}


OTHER_SAMPLES = r"so its loss depends on the other samples of its micro-batch \(BatchNorm"
# name: (model, what the message must say)
REFUSED = {
    "a batch without padding": (MaskSkipped, OTHER_SAMPLES),
    "BatchNorm": (lambda: head(mean_over_samples, nn.BatchNorm1d(h.WIDTH)), OTHER_SAMPLES),
    "contrastive": (lambda: head(contrastive), OTHER_SAMPLES),
    "sum": (lambda: head(summed), "the loss is a sum, not a mean.*num_targets"),
    "no loss": (lambda: head(no_loss), "without one. Let it return.*labels, or pass loss_fn"),
    "the first sample's": (
        lambda: head(lambda x, y, mask: F.cross_entropy(pooled(x, mask)[:1], y[:1])),
        OTHER_SAMPLES,
    ),
}


SIZES = {
    "a batch without padding": (1,),  # larger micro-batches have some
    "sum": (3, 5),  # of a single sample, it is a mean, too
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_cause(name):
    build, cause = REFUSED[name]
    for size in SIZES.get(name, (1, 3, 5)):
        with pytest.raises(hf_ga.LossNotAdditive, match=cause):
            window_gradient(build(), one_window(h.class_samples(12), size))
