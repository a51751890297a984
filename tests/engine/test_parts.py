"""Heads whose loss is a sum of means: any split of a window is the full batch, and one weight for
all parts is not.
"""

import copy
from functools import partial

import helpers as h
import numpy as np
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from splits import full_batch
from windows import one_window, window_gradient

from hf_ga.finetuning.run.scores.evaluation import evaluate_samples, evaluation_windows

SIZES = {
    "vocab_size": h.VOCABULARY,
    "hidden_size": h.WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIZES |= {"intermediate_size": 2 * h.WIDTH, "max_position_embeddings": 32}
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout_prob": 0.0,
}


@h.seeded
def pre_training(family, **more):
    config = getattr(tf, f"{family}Config")(**SIZES, **NO_DROPOUT, **more)
    return getattr(tf, f"{family}ForPreTraining")(config)


def answers(n):
    """Answers of which some begin, and others end, behind the text, one of them right behind it:
    the heads leave these out.
    """
    rng = np.random.default_rng(3)
    samples = h.token_samples(n)
    width = max(len(sample["input_ids"]) for sample in samples)
    for i, sample in enumerate(samples):
        del sample["labels"]
        sample["start_positions"] = (
            (width if i == 5 else 900) if i % 4 == 1 else int(rng.integers(0, 4))
        )
        sample["end_positions"] = 900 if i % 3 == 1 else int(rng.integers(0, 4))
    return samples


def sentence_pairs(n, name="next_sentence_label"):
    return [
        {**s, name: h.IGNORED if i % 5 == 2 else i % 2} for i, s in enumerate(h.token_samples(n))
    ]


CASES = {
    "BERT, answers": (h.bert_question_answering, answers),
    "BERT pre-training": (
        lambda: pre_training("Bert"),
        sentence_pairs,
    ),
    "FNet pre-training": (
        lambda: pre_training("FNet"),
        sentence_pairs,
    ),
    "ALBERT pre-training": (
        lambda: pre_training("Albert", embedding_size=8),
        lambda n: sentence_pairs(n, "sentence_order_label"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_any_split_is_the_full_batch(name):
    build, make_samples = CASES[name]
    samples = make_samples(16)
    full, full64 = (
        h.full_batch_gradient(build(), h.pad_right(samples), dtype)
        for dtype in (torch.float32, torch.float64)
    )
    loss = float(build()(**h.pad_right(samples)).loss.detach())
    for micro_batch_size in (1, 5):
        model = build()
        window = one_window(samples, micro_batch_size)
        gradients, result = window_gradient(model, window)
        h.assert_promise_1(gradients, full, full64)
        assert result.loss == pytest.approx(loss, rel=1e-6)
    naive, whole = build(), h.pad_right(samples)  # one weight for all parts: the samples
    for rows in torch.arange(16).split(4):
        (naive(**{k: v[rows] for k, v in whole.items()}).loss / 4).backward()
    assert h.relative_error(h.gradients(naive), full64) > 1e-2, "control"


def test_a_head_that_knows_no_ignored_positions():
    """XLM's own way of answering fails on positions behind the text."""
    sizes = {
        "vocab_size": h.VOCABULARY,
        "emb_dim": h.WIDTH,
        "n_layers": 1,
        "n_heads": 2,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(0)
    model = tf.XLMForQuestionAnswering(
        tf.XLMConfig(**sizes, dropout=0.0, attention_dropout=0.0)
    ).train()
    samples = [
        {**s, "start_positions": 1, "end_positions": i % 3} for i, s in enumerate(answers(8))
    ]
    model.zero_grad()
    full = h.full_batch_gradient(model, h.pad_right(samples))
    found, _ = window_gradient(model, one_window(samples, 3))
    assert h.relative_error(found, full) < 1e-6


class TwoTasks(torch.nn.Module):
    """Looks like a pre-training head, but weighs its second mean in another way."""

    def __init__(self):
        super().__init__()
        self.bert = pre_training("Bert")

    def forward(self, input_ids, attention_mask, labels=None, next_sentence_label=None):
        outputs = self.bert(input_ids, attention_mask)
        heads = (
            (outputs.prediction_logits, labels),
            (outputs.seq_relationship_logits, next_sentence_label),
        )
        first, second = (
            torch.nn.functional.cross_entropy(x.flatten(0, -2), y.flatten()) for x, y in heads
        )
        return {**outputs, "loss": first + 2 * second}


def test_another_sum_of_means_is_read():
    samples = sentence_pairs(16)
    full, full64 = (
        full_batch(TwoTasks(), h.pad_right(samples), dtype)
        for dtype in (torch.float32, torch.float64)
    )
    for size in (1, 3):
        h.assert_promise_1(window_gradient(TwoTasks(), one_window(samples, size))[0], full, full64)


class MaskedMean(torch.nn.Module):
    """A mean over all samples, of which some are no targets."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(h.VOCABULARY, 1)

    def forward(self, input_ids, attention_mask, labels):
        scores = self.embedding(input_ids[:, :1]).flatten()
        return {"loss": (scores.pow(2) * (input_ids[:, 0] % 2)).mean(), "logits": scores}


EVALUATED = {
    "BERT, answers": CASES["BERT, answers"],
    "BERT pre-training": CASES["BERT pre-training"],
    "balanced experts": (partial(h.mixtral, 0.5), h.token_samples),
    "masked mean": (h.seeded(MaskedMean), h.token_samples),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_the_validation_loss_does_not_depend_on_the_batch_size(name):
    """Each mean over all its targets of the split; the mean over batches of 3 is another number."""
    build, make_samples, *_ = EVALUATED[name]
    samples = make_samples(16)
    model = build()
    accelerator = Accelerator()
    losses = []
    for size in (1, 3, 16):
        lengths = [len(s["input_ids"]) for s in samples]
        make_windows = partial(
            evaluation_windows,
            samples,
            h.pad_right,
            accelerator=accelerator,
            batch_size=size,
            lengths=lengths,
        )
        losses.append(evaluate_samples(accelerator, model, make_windows)["loss"])
    whole = h.pad_right(samples)
    if name == "balanced experts":
        model.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad():
        expected = float(copy.deepcopy(model).double().eval()(**whole)["loss"])
        parts = [
            float(model.eval()(**{k: v[i : i + 3] for k, v in whole.items()})["loss"])
            for i in range(0, 15, 3)
        ]
    assert losses == pytest.approx([expected] * 3, rel=1e-6)
    assert np.mean(parts) != pytest.approx(expected, rel=1e-4)


class MaskedAnswers(torch.nn.Module):
    """Never answers in the padding, so its softmax does not see how wide that is; the ignored
    positions still do.
    """

    def __init__(self):
        super().__init__()
        self.bert = h.bert_question_answering()

    def forward(self, input_ids, attention_mask, start_positions, end_positions):
        outputs = self.bert(input_ids, attention_mask)
        loss = 0.0
        width = input_ids.shape[1]
        for name, positions in (("start_logits", start_positions), ("end_logits", end_positions)):
            outputs[name] = outputs[name].masked_fill(attention_mask == 0, -30.0)
            loss = (
                loss
                + torch.nn.functional.cross_entropy(
                    outputs[name], positions.clamp(0, width), ignore_index=width
                )
                / 2
            )
        outputs["loss"] = loss
        return outputs


def test_one_width_decides_which_positions_are_behind_the_text():
    """A position behind its own text, but not behind the longest of the window, counts: in every
    split.
    """
    samples = answers(8)
    model = MaskedAnswers().train()
    longest = max(len(s["input_ids"]) for s in samples)
    next(s for s in samples if len(s["input_ids"]) < longest)["start_positions"] = longest - 1
    gradients, _ = window_gradient(model, one_window(samples, 1))
    full = [
        h.full_batch_gradient(model, h.pad_right(samples), dtype)
        for dtype in (torch.float32, torch.float64)
    ]
    h.assert_promise_1(gradients, *full)
