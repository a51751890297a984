"""Models and batches for the tests of `hf_ga.backward`."""

from collections.abc import Callable
from dataclasses import dataclass

import helpers as h
import numpy as np
import torch
import transformers as tf
from torch import nn

import hf_ga

NUM_SAMPLES = 20
SEED = 3


@dataclass(frozen=True)
class Case:
    """Attributes: build: Dropout -> model. batch: Gives the collated batch."""

    build: Callable[[float], nn.Module]
    batch: Callable[[], dict]
    loss_fn: Callable | None = None


def collated(make: Callable[[int], list[dict]]) -> Callable[[], dict]:
    return lambda: h.pad_right(make(NUM_SAMPLES))


def answers() -> dict:
    """Question answering: some starts lie beyond the text, which the head leaves out."""
    batch = h.pad_right(h.token_samples(NUM_SAMPLES))
    del batch["labels"]
    lengths = batch["attention_mask"].sum(1).numpy()
    rng = np.random.default_rng(5)
    beyond = batch["input_ids"].shape[1]
    starts = torch.tensor(rng.integers(0, lengths))
    starts[::4] = beyond
    return {**batch, "start_positions": starts, "end_positions": torch.tensor(lengths - 1)}


def summaries() -> dict:
    """The texts of a T5: targets have a width of their own."""
    batch = h.pad_right(h.token_samples(NUM_SAMPLES))
    return {**batch, "labels": batch["labels"].flip(0)[:, :9].contiguous()}


CASES = {
    "GPT-2": Case(h.gpt2, collated(h.token_samples)),
    "BERT classes": Case(h.bert_classifier, collated(h.class_samples)),
    "BERT masked LM": Case(h.bert_masked_lm, collated(h.token_samples)),
    "BERT answers": Case(h.bert_question_answering, answers),
    "BERT tags": Case(h.bert_token_classifier, collated(h.tag_samples)),
    "T5": Case(h.t5, summaries),
    "own loss": Case(h.plain_tagger, collated(h.weighted_samples), h.weighted_token_loss),
}


def gradient(case: Case, dropout: float, size: int | str, **more) -> tuple[h.Gradients, float]:
    """What `hf_ga.backward` adds to a new model, and the loss that it returns."""
    model = case.build(dropout)
    settings = {"loss_fn": case.loss_fn, "seed": SEED, **more}
    loss = hf_ga.backward(model, case.batch(), micro_batch_size=size, **settings)
    return h.gradients(model), float(loss)


def naive_gradient(case: Case, size: int) -> h.Gradients:
    """The usual loop: the losses of the micro-batches divided by their number."""
    model = case.build(0.0)
    rows = torch.arange(NUM_SAMPLES).split(size)
    for part in rows:
        batch = {name: value[part] for name, value in case.batch().items()}
        (h.mean_loss(model, batch, case.loss_fn) / len(rows)).backward()
    return h.gradients(model)


@h.seeded
def resnet() -> nn.Module:
    config = tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=3, layer_type="basic"
    )
    return tf.ResNetForImageClassification(config)
