"""prove_targets: the right rule for each kind of head, refusal of losses that are no single mean,
nothing left behind.
"""

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hf_ga
from hf_ga.proof.sites import LARGE


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
    the proof.
    """
    model = with_batch_norm()
    model.norm.eval()
    return model


# name: (model, samples, rule, whether the padding width matters: True, False, None for "cannot be
# told")
RIGHT = {
    "GPT-2": (h.gpt2, h.token_samples, "shifted labels", False),
    "GPT-2, completion only": (h.gpt2, completion_samples, "shifted labels", False),
    "GPT-2, equal lengths": (h.gpt2, equal_length_samples, "shifted labels", None),
    "GPT-2, one sample": (h.gpt2, lambda n: h.token_samples(1), "shifted labels", None),
    "GPT-2, few samples with targets": (h.gpt2, few_targets, "shifted labels", False),
    "BERT masked LM": (h.bert_masked_lm, h.token_samples, "labels", False),
    "BERT masked LM, few samples with targets": (h.bert_masked_lm, few_targets, "labels", False),
    "BERT masked LM, column 0 ignored": (h.bert_masked_lm, completion_samples, "labels", False),
    "BERT tokens": (h.bert_token_classifier, h.tag_samples, "labels", False),
    "T5": (h.t5, h.token_samples, "labels", False),
    "XLNet LM": (h.xlnet_lm, h.token_samples, "labels", False),
    "BERT classes": (h.bert_classifier, h.class_samples, "labels", False),
    "BERT classes, one column": (
        h.bert_classifier,
        with_labels(lambda s: {"labels": [s["input_ids"][0] % 3]}),
        "labels",
        False,
    ),
    "BERT regression": (
        lambda: h.bert_classifier(num_labels=1),
        regression_samples,
        "samples",
        False,
    ),
    "BERT question answering": (
        h.bert_question_answering,
        question_samples,
        "start and end positions",
        True,
    ),
    "BatchNorm in evaluation mode": (frozen_batch_norm, h.class_samples, "labels", False),
    "own mean over samples": (lambda: head(own_mean_over_samples), h.tag_samples, "samples", False),
    "own mean over samples, positive labels": (
        lambda: head(own_mean_of_positive_labels),
        h.tag_samples,
        "samples",
        False,
    ),
    "own mean over samples, equal lengths": (
        lambda: head(own_mean_over_samples),
        equal_length_tag_samples,
        "samples",
        None,
    ),
    "own mean over samples, two targets each": (
        lambda: head(own_mean_over_samples),
        two_targets_each,
        "samples",
        False,
    ),
    "BERT tokens, two targets each": (
        h.bert_token_classifier,
        two_targets_each,
        "labels",
        False,
    ),
    "XLNet classes": (h.xlnet_classifier, h.class_samples, "labels", True),
    "FNet": (h.fnet_masked_lm, h.token_samples, "labels", True),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_rule(name):
    build, make_samples, rule_name, width_matters = RIGHT[name]
    rule = hf_ga.prove_targets(build(), make_samples(16), h.pad_right)
    assert (rule.name, rule.width_matters) == (rule_name, width_matters)
    assert rule.pad_to_window == (width_matters is not False)
    assert rule.residual < 1e-5


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
    right = hf_ga.prove_targets(
        h.plain_tagger(), h.weighted_samples(8), h.pad_right, loss_fn=h.weighted_token_loss
    )
    assert right.name == "loss_fn"
    assert right.width_matters is False
    with pytest.raises(error, match=message):
        hf_ga.prove_targets(h.plain_tagger(), h.weighted_samples(8), h.pad_right, loss_fn=loss_fn)


# name: (model, samples, what the message must say)
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


REFUSED = {
    "a batch without padding": (
        MaskSkipped,
        h.class_samples,
        "treats a batch without padding differently",
    ),
    "BatchNorm": (
        lambda: head(mean_over_samples, nn.BatchNorm1d(h.WIDTH)),
        h.class_samples,
        r"norm \(BatchNorm1d\)",
    ),
    "contrastive": (
        lambda: head(contrastive),
        h.class_samples,
        r"in-batch.*Remedy: pass loss_fn.*losses A .*targets in A, B, A\+B",
    ),
    "sum": (lambda: head(summed), h.class_samples, "the loss is a sum, not a mean"),
    "two means": (lambda: head(two_means), h.class_samples, "a sum of several means"),
    "no loss": (
        lambda: head(no_loss),
        h.class_samples,
        "without one. Let it return.*labels, or pass loss_fn",
    ),
    # Every way of counting fits:
    "no sample's": (
        lambda: head(lambda x, y, mask: 1 + 0 * x.sum()),
        h.class_samples,
        "several counting rules fit",
    ),
    "the first sample's": (
        lambda: head(lambda x, y, mask: F.cross_entropy(pooled(x, mask)[:1], y[:1])),
        h.class_samples,
        "depends on the order of the samples",
    ),
    "no samples": (h.gpt2, lambda n: [], "needs samples"),
    "no such class": (
        h.bert_classifier,
        lambda n: [{**s, "labels": 9} for s in h.class_samples(n)],
        "label that is not a class",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_its_cause(name):
    build, make_samples, cause = REFUSED[name]
    with pytest.raises(hf_ga.LossNotAdditive, match=f"(?s){cause}"):
        hf_ga.prove_targets(build(), make_samples(16), h.pad_right)


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


def test_weights_are_refused_with_the_form_that_is_exact():
    """The two lines of the message, as a function, are proven on the same model."""
    samples = h.class_samples(16)
    with pytest.raises(
        hf_ga.LossNotAdditive, match=r"criterion \(CrossEntropyLoss\) has weights"
    ) as error:
        hf_ga.prove_targets(Criterion(), samples, h.pad_right)
    lines = [line for line in str(error.value).splitlines() if line.startswith("    ")]
    assert len(lines) == 2
    code = "\n".join(["def loss_fn(outputs, batch):", "    weights = W[batch['labels']]", *lines])
    names = {"torch": torch, "W": torch.tensor([0.1, 1.0, 9.0])}
    exec(code, names)
    rule = hf_ga.prove_targets(Criterion(), samples, h.pad_right, loss_fn=names["loss_fn"])
    assert rule.name == "loss_fn"


FROZEN = (
    "embedding",
    "bert.encoder",
    "transformer.layer.0",
)  # one module of each of the models below


@h.seeded
def with_batch_norm():
    return Head(mean_over_samples, nn.BatchNorm1d(h.WIDTH))


@pytest.mark.parametrize(
    "build", [lambda: h.bert_classifier(0.1), lambda: h.xlnet_classifier(0.1), with_batch_norm]
)
@pytest.mark.parametrize("mode", ["train", "one module in eval"])
def test_the_model_stays_as_found(build, mode):
    """Also when the proof ends in a refusal (BatchNorm, whose running statistics a forward
    moves).
    """
    model = build()
    samples = h.class_samples(8)
    model(**h.pad_right(samples))["loss"].backward()  # so that there are gradients
    if mode == "one module in eval":
        next(m for name, m in model.named_modules() if name in FROZEN).eval()
    before = h.everything(model)
    if build is not with_batch_norm:
        hf_ga.prove_targets(model, samples, h.pad_right)
    else:
        with pytest.raises(hf_ga.LossNotAdditive):
            hf_ga.prove_targets(model, samples, h.pad_right)
    assert h.everything(model) == before
    model.train()(**h.pad_right(samples))["loss"].backward()
    assert h.everything(model) != before, "control: a plain forward and backward"


def nan_gradient(features, labels, mask):
    """A finite loss whose gradient is NaN: the derivative of a root at 0."""
    return mean_over_samples(features, labels, mask) + torch.sqrt((features * 0).sum().abs())


def test_a_nan_gradient_is_no_proof():
    with pytest.raises(hf_ga.LossNotAdditive):
        hf_ga.prove_targets(head(nan_gradient), h.class_samples(8), h.pad_right)


def test_a_collate_function_that_draws_is_not_taken_for_a_model_that_does():
    def mask_few(samples):
        batch = h.pad_right(samples)
        kept = (torch.rand(batch["input_ids"].shape) < 0.15) & (batch["attention_mask"] > 0)
        return {**batch, "labels": batch["input_ids"].masked_fill(~kept, h.IGNORED)}

    for seed in range(5):
        torch.manual_seed(seed)
        before = h.global_random_states()
        rule = hf_ga.prove_targets(h.bert_masked_lm(0.1), h.token_samples(32), mask_few)
        assert rule.name == "labels"
        assert h.global_random_states() == before


@pytest.mark.parametrize("short_have_targets", [True, False])
def test_a_proof_probes_short_samples_if_they_have_targets(short_have_targets):
    """Its memory is below the training's then. Control: if only long samples have targets, it takes
    those, and still proves.
    """
    short = h.token_samples(32)
    long = [
        {name: (values * 8)[:30] for name, values in sample.items()}
        for sample in h.token_samples(32)
    ]
    samples = (
        short if short_have_targets else [h.without_targets(sample) for sample in short]
    ) + long
    model = h.gpt2()
    sizes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    assert hf_ga.prove_targets(model, samples, h.pad_right).name == "shifted labels"
    widths = [
        width for rows, width in sizes if rows > LARGE
    ]  # so many of the longest are run to find the places of dropout
    assert (max(widths) <= 12) == short_have_targets
