"""The checker convicts every usual mistake by its name, and acquits the right method in the same
check.
"""

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hf_ga
from hf_ga.check.arms import accelerate_arm, trainer_arm
from hf_ga.check.causes.weights import best_match, half_precision, list_hypotheses
from hf_ga.check.verdict.rows import OURS

EVEN = {"even": [4, 3, 3, 2]}
SHORT = ["short last window"]
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def names(report, arm):
    return {cause.name for cause in report.causes(arm)}


def texts(report, arm):
    return " | ".join(report.reasons(arm))


def check(model, samples, layouts=EVEN, **more):
    return hf_ga.check_equivalence(model, samples, helpers.pad_right, layouts, **more)


def weighted(weight, loss=helpers.mean_loss):
    """A plain loop in which micro-batch k's loss counts `weight(n_k, N, K, GA)`; targets are
    counted by hand.
    """

    def step(model, micro_batches, accumulation_steps):
        counts = [helpers.num_targets(model, batch) for batch in micro_batches]
        for batch, n in zip(micro_batches, counts, strict=True):
            (
                loss(model, batch) * weight(n, sum(counts), len(counts), accumulation_steps)
            ).backward()

    return step


right = weighted(lambda n, total, k, ga: n / total)


def assert_only(report, arm, *causes, says=""):
    """The arm failed for these causes and no other; hf_ga's own arm passed."""
    assert report.arm(OURS).passed, report
    assert not report.arm(arm).passed
    assert names(report, arm) == set(causes), report
    assert says in texts(report, arm), report


def accumulating(dtype):
    """Micro-batches' gradients are added up in a type of their own."""

    def step(model, micro_batches, accumulation_steps):
        total = sum(helpers.num_targets(model, batch) for batch in micro_batches)
        sums = [torch.zeros_like(p, dtype=dtype) for p in model.parameters()]
        for batch in micro_batches:
            (helpers.mean_loss(model, batch) * helpers.num_targets(model, batch) / total).backward()
            for added, parameter in zip(sums, model.parameters(), strict=True):
                added += parameter.grad.to(dtype)
                parameter.grad = None
        for added, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = added.float()

    return step


def noisy(model, micro_batches, accumulation_steps):
    right(model, micro_batches, accumulation_steps)
    for parameter in model.parameters():
        parameter.grad += 0.01 * torch.randn_like(parameter)


def shifted(model, micro_batches, accumulation_steps):
    right(model, micro_batches, accumulation_steps)
    for parameter in model.parameters():
        parameter.grad += 0.01


def in_low_precision(model, micro_batches, accumulation_steps):
    right(model.to(torch.bfloat16), micro_batches, accumulation_steps)


def updating(model, micro_batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in micro_batches:
        model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# Arms of one check of a masked LM: the step, its cause, and what the text contains.
MISTAKES = {
    "not divided": (
        weighted(lambda n, total, k, ga: 1),
        "normalisation",
        "x4.00: the loss is divided by the micro-batch's own",
    ),
    "mean of means": (weighted(lambda n, total, k, ga: 1 / k), "normalisation", "mean of means"),
    "divided twice": (
        weighted(lambda n, total, k, ga: n / total / k),
        "normalisation",
        "are weighted by x(0.25, 0.25, 0.25, 0.25)",
    ),
    "a sum": (weighted(lambda n, total, k, ga: n), "normalisation", "the loss is a sum"),
    "odd": (
        weighted(lambda n, total, k, ga: n**2 / total**2),
        "normalisation",
        "are weighted by x(",
    ),
    "added up in bf16": (accumulating(torch.bfloat16), "precision", "computed in low precision"),
    "added up in fp16": (accumulating(torch.float16), "precision", "computed in low precision"),
    "noise": (noisy, "randomness", "randn_like ("),
    "another gradient": (shifted, "unknown", "no known cause"),
    "does nothing": (lambda model, micro_batches: None, "no gradients", "in .grad"),
    "updates": (updating, "no gradients", "in .grad"),
}


@pytest.fixture(scope="module")
def mistakes():
    steps = {name: step for name, (step, _, _) in MISTAKES.items()}
    others = {
        "right": right,
        "added up in float32": accumulating(torch.float32),
        "computed in bf16": in_low_precision,
    }
    return check(helpers.bert_masked_lm(), helpers.token_samples(12), steps=steps | others)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_weights_are_named(mistake, mistakes):
    _, cause, says = MISTAKES[mistake]
    assert_only(mistakes, mistake, cause, says=says)


def test_right_steps_pass_beside_them(mistakes):
    assert mistakes.arm("right").passed
    assert mistakes.arm("added up in float32").passed
    assert "precision" in names(mistakes, "computed in bf16")


def test_a_short_last_window_divided_by_the_full_accumulation_is_named():
    steps = {
        "wrong": weighted(lambda n, total, k, ga: n / total * k / ga),
        "both": weighted(lambda n, total, k, ga: 1 / ga),
        "right": right,
    }
    report = check(helpers.gpt2(), helpers.token_samples(18), SHORT, steps=steps)
    assert_only(
        report, "wrong", "last window", says="x0.5: the last window has 2 of 4 micro-batches"
    )
    assert_only(report, "both", "last window", "normalisation", says="mean of means")
    assert report.arm("right").passed


def test_dropout_that_is_not_keyed_or_switched_off_is_named():
    def in_evaluation_mode(model, micro_batches, accumulation_steps):
        right(model.eval(), micro_batches, accumulation_steps)

    report = check(
        helpers.gpt2(0.1),
        helpers.token_samples(12),
        steps={"native": right, "off": in_evaluation_mode},
    )
    assert_only(report, "native", "dropout")
    assert_only(report, "off", "dropout")


def test_a_loss_over_positive_labels_is_counted_by_them():
    """Label 0 is padding. Control: the sum over labels other than 0 passes."""

    def weighted_by(weight):
        def step(model, micro_batches):
            counts = [int((batch["labels"] > 0).sum()) for batch in micro_batches]
            for batch, n in zip(micro_batches, counts, strict=True):
                (model(**batch).loss * weight(n / sum(counts), len(counts))).backward()

        return step

    report = hf_ga.check_equivalence(
        helpers.positive_tagger(),
        helpers.plain_samples(12),
        helpers.pad_with_zeros,
        EVEN,
        steps={
            "mean of means": weighted_by(lambda share, k: 1 / k),
            "right": weighted_by(lambda share, k: share),
        },
    )
    assert_only(report, "mean of means", "normalisation", says="mean of means")
    assert report.arm("right").passed


def bag_samples(count):
    """Of one length, so that padding plays no part."""
    return [
        {"input_ids": s["input_ids"][:4], "labels": s["labels"]}
        for s in helpers.class_samples(count)
    ]


def loop(model, micro_batches):
    total = sum(len(batch["labels"]) for batch in micro_batches)
    for batch in micro_batches:
        (model(**batch)["loss"] * len(batch["labels"]) / total).backward()


def test_batch_norm_is_named_also_where_hf_ga_refuses_it():
    model = helpers.bert_classifier()
    norm = nn.BatchNorm1d(helpers.WIDTH)
    model.classifier = nn.Sequential(norm, model.classifier)
    report = check(model, bag_samples(12), steps={"step": loop})
    assert names(report, OURS) == names(report, "step") == {"BatchNorm"}
    assert report.arm(OURS).rows[0].refused
    assert not report.passed
    report = check(model, bag_samples(12), steps={"step": lambda model, micro_batches: None})
    assert names(report, "step") == {"no gradients"}
    assert names(check(model, bag_samples(12), ["one by one"]), OURS) == {
        "BatchNorm"
    }  # torch fails on one sample
    norm.requires_grad_(False)  # a frozen one that is still in training mode
    model.bert.requires_grad_(False)
    assert names(check(model, bag_samples(12), steps={"step": loop}), OURS) == {"BatchNorm"}
    norm.eval()
    assert check(model, bag_samples(12), steps={"step": loop}).passed


class DrawsForMany(nn.Module):
    """Draws a factor of its loss, in large micro-batches only."""

    def __init__(self):
        super().__init__()
        self.model = helpers.bert_classifier()

    def forward(self, **batch):
        outputs = self.model(**batch)
        if len(batch["labels"]) > 8:
            outputs.loss = outputs.loss * torch.rand(7).sum()
        return outputs


def test_a_refusal_in_one_layout_is_a_row_of_the_report():
    """The trial of the model has fewer samples."""
    report = check(DrawsForMany(), helpers.class_samples(24), {"large": [12, 12]})
    (row,) = report.arm(OURS).rows
    assert "factor in the loss" in row.refused
    assert row.causes


def test_a_step_that_keys_its_draws_is_not_accused_of_dropout():
    """The control: with another seed it is."""

    def halved(seed):
        def step(model, micro_batches):
            (batch,) = micro_batches
            hf_ga.backward(model, batch, micro_batch_size=4, seed=seed)
            for parameter in model.parameters():
                parameter.grad /= 2

        return step

    report = check(
        helpers.gpt2(0.1),
        helpers.token_samples(12),
        {"one batch": [12]},
        steps={"same": halved(0), "other": halved(1)},
    )
    assert_only(report, "same", "normalisation", says="weighted by x(0.5)")
    assert_only(report, "other", "dropout")


class InBatchNegatives(nn.Module):
    """Each sample's first token must find the mean of its others, among those of the whole
    batch.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(helpers.VOCABULARY, 8, padding_idx=0)
        self.query = nn.Linear(8, 8)

    def forward(self, input_ids, labels):
        vectors = self.embedding(input_ids)
        queries = self.query(vectors[:, 0])
        scores = queries @ vectors[:, 1:].sum(1).T
        return {"loss": F.cross_entropy(scores, torch.arange(len(scores))), "queries": queries}


def test_a_loss_across_samples_is_named():
    model = helpers.seeded(InBatchNegatives)()
    report = check(model, bag_samples(12), steps={"step": loop})
    assert names(report, OURS) == names(report, "step") == {"cross-batch loss"}
    own = check(
        model,
        bag_samples(12),
        loss_fn=lambda out, batch: (out["queries"].square().sum(), len(out["queries"])),
    )
    assert own.passed  # a loss of each sample by itself


class OtherLoss(nn.Module):
    """A classifier's logits with another loss.

    Args:
        loss: (logits, labels) -> loss.
    """

    def __init__(self, loss):
        super().__init__()
        self.inner = helpers.bert_classifier()
        self.loss = loss

    def forward(self, labels, **inputs):
        return {"loss": self.loss(self.inner(**inputs).logits, labels)}


def weighted_by(count):
    """A loop in which micro-batch k counts `count(its labels)` / the count of all."""

    def step(model, micro_batches):
        counts = [count(batch["labels"]) for batch in micro_batches]
        for batch, n in zip(micro_batches, counts, strict=True):
            (model(**batch)["loss"] * n / sum(counts)).backward()

    return step


def of_class_weights(labels):
    return float(CLASS_WEIGHTS[labels].sum())


def test_weights_of_classes_are_read():
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)
    steps = {"samples": weighted_by(len), "right": weighted_by(of_class_weights)}
    report = check(OtherLoss(loss), helpers.class_samples(12), steps=steps)
    assert_only(report, "samples", "normalisation", says="weighted by samples, which the loss")
    assert report.arm("right").passed


def two_means(logits, labels):
    """The second one is over samples of one class only."""
    is_zero = labels == 0
    second = (logits[:, 0].square() * is_zero).sum() / is_zero.sum().clamp(min=1)
    return F.cross_entropy(logits, labels) + second


@pytest.mark.parametrize("count", [len, lambda labels: int((labels == 0).sum())])
def test_a_sum_of_several_means_has_no_right_weights(count):
    """Whichever of them a step weights by."""
    steps = {"step": weighted_by(count)}
    report = check(OtherLoss(two_means), helpers.class_samples(12), steps=steps)
    assert_only(report, "step", "several means", says="(cross entropy): 4, 3, 3, 2")


def test_a_constant_divisor_is_named():
    """hf_ga refuses it: a window has another sum than 100 of its micro-batches."""

    def loss(logits, labels):
        return F.cross_entropy(logits, labels, reduction="sum") / 100

    steps = {"mean": weighted_by(lambda labels: 1), "sum": summed}
    report = check(OtherLoss(loss), helpers.class_samples(12), steps=steps)
    assert "a constant" in report.arm(OURS).rows[0].refused
    assert names(report, OURS) == names(report, "mean") == {"constant divisor"}, report
    assert "it divides by 100, 100, 100, 100" in texts(report, "mean")
    assert report.arm("sum").passed


def summed(model, micro_batches):
    for batch in micro_batches:
        model(**batch)["loss"].backward()


def test_the_routers_loss_is_named():
    own_loss = weighted(
        lambda n, total, k, ga: n / total, loss=lambda model, batch: model(**batch).loss
    )
    report = check(helpers.mixtral(0.1), helpers.token_samples(12), steps={"step": own_loss})
    assert_only(report, "step", "auxiliary loss")


def sums_divided_by(count):
    """The sum of a causal head's loss over all micro-batches, divided by a count of labels."""

    def step(model, micro_batches, accumulation_steps):
        total = sum(int((count(batch["labels"]) != -100).sum()) for batch in micro_batches)
        for batch in micro_batches:
            logits = model(**batch).logits[:, :-1].flatten(0, 1)
            labels = batch["labels"][:, 1:].flatten()
            (F.cross_entropy(logits, labels, reduction="sum") / total).backward()

    return step


def in_autocast(model, micro_batches, accumulation_steps):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        right(model, micro_batches, accumulation_steps)


def test_labels_counted_unshifted_and_autocast_are_named():
    """Trainer, too, counts column 0 of GPT-2, which is never predicted."""
    samples = helpers.token_samples(12)
    steps = {
        "wrong": sums_divided_by(lambda labels: labels),
        "right": sums_divided_by(lambda labels: labels[:, 1:]),
    }
    report = check(
        helpers.gpt2(), samples, steps=steps | {"Trainer": trainer_arm(), "autocast": in_autocast}
    )
    all_labels = sum(v != -100 for s in samples for v in s["labels"])
    predicted = sum(v != -100 for s in samples for v in s["labels"][1:])
    said = f"x{predicted / all_labels:.4g}: the window has {predicted} targets"
    assert_only(report, "wrong", "labels counted unshifted", says=said)
    assert_only(report, "Trainer", "labels counted unshifted", says=said)
    assert_only(report, "autocast", "precision")
    assert report.arm("right").passed


def test_width_dependent_padding_is_named():
    report = check(helpers.fnet_masked_lm(0.0), helpers.token_samples(12), steps={"step": right})
    assert_only(report, "step", "padding width")
    equal = [s for s in helpers.token_samples(60) if len(s["input_ids"]) == 9][:8]
    assert len(equal) == 8
    assert check(
        helpers.fnet_masked_lm(0.0), equal, {"even": [2, 3, 3]}, steps={"step": right}
    ).passed


def test_width_is_what_is_left_where_hf_ga_refuses_the_model():
    """It refuses numbers of numpy, so it has not tried what padding does."""

    def draw(module, args, outputs):
        if module.training:
            np.random.rand()

    models = {"FNet": helpers.fnet_masked_lm(0.0), "BERT": helpers.bert_masked_lm()}
    for model in models.values():
        model.cls.register_forward_hook(draw)
    report = check(models["FNet"], helpers.token_samples(12), steps={"step": right})
    assert report.arm(OURS).rows[0].refused
    assert names(report, "step") == {"padding width"}
    report = check(models["BERT"], helpers.token_samples(12), steps={"step": right})
    assert report.arm("step").passed


def clipping(clip, every):
    def step(model, micro_batches, accumulation_steps):
        total = sum(helpers.num_targets(model, batch) for batch in micro_batches)
        for i, batch in enumerate(micro_batches, 1):
            (helpers.mean_loss(model, batch) * helpers.num_targets(model, batch) / total).backward()
            if every or i == len(micro_batches):
                clip(model)

    return step


def torch_clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_groups(model):
    parameters = list(model.parameters())
    nn.utils.clip_grad_norm_(parameters[:8], 0.05)
    nn.utils.clip_grad_norm_(parameters[8:], 0.05)


def own_clip(model):
    grads = [p.grad for p in model.parameters()]
    norm = torch.stack([g.norm() for g in grads]).norm()
    for grad in grads:
        grad.mul_(min(1.0, 0.05 / (float(norm) + 1e-6)))


def test_clipping_every_micro_batch_is_named():
    """By torch's function, which is a suspect, and by hand, which is read from the numbers."""
    model = helpers.bert_classifier()
    samples = helpers.class_samples(12)
    steps = {"torch": clipping(torch_clip, every=True), "own": clipping(own_clip, every=True)}
    right_steps = {
        "torch, once": clipping(torch_clip, every=False),
        "own, once": clipping(own_clip, every=False),
    }
    report = check(model, samples, steps=steps | right_steps, max_grad_norm=0.05)
    for arm in steps:
        assert_only(report, arm, "clipping per micro-batch", says="micro-batch")
    assert all(report.arm(arm).passed for arm in right_steps)


def test_clipping_where_the_truth_does_not_and_a_frozen_parameter_are_named():
    def frozen(model, micro_batches, accumulation_steps):
        model.bert.encoder.layer[0].output.dense.weight.requires_grad_(False)
        right(model, micro_batches, accumulation_steps)

    steps = {
        "clips once": clipping(torch_clip, every=False),
        "in groups": clipping(clip_groups, every=False),
        "frozen": frozen,
    }
    report = check(helpers.bert_classifier(), helpers.class_samples(12), steps=steps)
    assert_only(report, "clips once", "clipping", says="pass max_grad_norm")
    assert_only(report, "in groups", "clipping", says="2 group(s) of parameters to a norm of 0.05")
    assert_only(
        report, "frozen", "frozen parameter", says="bert.encoder.layer.0.output.dense.weight"
    )
    whole = helpers.bert_classifier()
    whole.bert.encoder.layer[0].output.dense.weight.requires_grad_(
        False
    )  # frozen for all: nothing to convict
    assert check(whole, helpers.class_samples(12), steps={"step": right}).passed


def test_several_mistakes_at_once_are_all_named():
    report = check(
        helpers.fnet_masked_lm(0.1),
        helpers.token_samples(12),
        steps={"step": weighted(lambda n, total, k, ga: 1)},
    )
    assert_only(report, "step", "normalisation", "dropout", "padding width", says="x4.00")


def test_trainer_and_accelerate_are_convicted_in_one_table():
    steps = {"Trainer": trainer_arm(), "accelerate": accelerate_arm()}
    report = check(
        helpers.bert_classifier(0.1),
        helpers.class_samples(18),
        ["even", "short last window"],
        steps=steps,
    )
    assert report.arm(OURS).passed
    assert names(report, "Trainer") == {"normalisation", "dropout"}
    assert "x4.00" in texts(report, "Trainer")
    assert names(report, "accelerate") == {"normalisation", "last window", "dropout"}


# Targets of each micro-batch, dealt out to two processes in turn; the weights that a loop gives
# them; what is wrong.
AVERAGE = "average of local means"
MEANS = "mean of means"
REPEATS = "even_batches"
OF_TWO_PROCESSES = {
    "right": ([9, 3], [9 / 12, 3 / 12], ()),
    "one each": ([9, 3], [1 / 2, 1 / 2], (AVERAGE,)),
    "equal": ([6, 6], [1 / 2, 1 / 2], ()),
    "right on each": ([9, 4, 3, 2], [9 / 24, 4 / 12, 3 / 24, 2 / 12], (AVERAGE,)),
    "equal processes": ([9, 4, 3, 8], [1 / 4] * 4, (MEANS,)),
    "uneven processes": ([9, 4, 9, 4], [1 / 4] * 4, (AVERAGE,)),
    "all uneven": ([9, 4, 3, 2], [1 / 4] * 4, (MEANS, AVERAGE)),
    "not divided by GA": ([9, 4, 3, 2], [1 / 2] * 4, ("x2.00", AVERAGE)),
    "summed over processes": ([9, 4, 3, 2], [1] * 4, ("x4.00", AVERAGE)),
    "another count of each": (
        [9, 4],
        [9 / 22, 4 / 16],
        ("x0.6842: the window has 13 targets, but 19 are counted (tokens)", AVERAGE),
    ),
    "repeated": ([6, 2, 4], [12 / 18, 2 / 18, 4 / 18], (REPEATS,)),
    "repeated, of a plain loop": ([6, 2, 4], [2 / 4, 1 / 4, 1 / 4], (MEANS, AVERAGE, REPEATS)),
}


@pytest.mark.parametrize("case", OF_TWO_PROCESSES)
def test_weights_of_two_processes_are_named(case):
    """Worked by hand."""
    targets, weights, causes = OF_TWO_PROCESSES[case]
    n = np.array(targets, dtype=float)
    parts = list(torch.eye(len(targets)))
    counts = {"samples": n}
    if case == "another count of each":
        counts["tokens"] = np.array([11.0, 8.0])
    match, error = best_match(
        torch.tensor(weights), parts, list_hypotheses(n, counts, 4 if len(n) > 2 else 2, 2)
    )
    said = [f"{cause.name}: {cause.text}" for cause in match.causes]
    assert error < 1e-6 and len(said) == len(causes), said
    assert all(part in text for part, text in zip(causes, said, strict=True)), said


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_sum_in_half_precision_is_recognised(dtype, name):
    """Not one in float32 of numbers that were computed in half precision."""
    one, two = torch.randn(2, 500).to(dtype)
    assert half_precision((one + two).float()) == name
    assert half_precision(one.float() + two.float()) is None
