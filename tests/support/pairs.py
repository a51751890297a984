"""Pairs of texts, a model that embeds them with a learned temperature, and losses of whole batches,
for the tests of whole-window losses.
"""

import copy
from functools import partial

import helpers as h
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from tried import keyed

SEED = 3
LOG_SCALE = 2.0  # of the similarities at the beginning


class Embedder(nn.Module):
    """Embeds anchors and positives by one BERT, the mean of its last hidden states.

    Args:
        returns_scale: The temperature is among the outputs (open_clip), not used by the loss.
    """

    def __init__(self, dropout: float, returns_scale: bool) -> None:
        super().__init__()
        sizes = {**h.SIZES, "intermediate_size": 32, "max_position_embeddings": 32}
        config = tf.BertConfig(
            **sizes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
        )
        self.encoder = tf.BertModel(config, add_pooling_layer=False)
        self.log_scale = nn.Parameter(torch.full((1,), LOG_SCALE))  # FSDP has no scalars
        self.returns_scale = returns_scale

    def embed(self, ids, mask):
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        mask = mask.unsqueeze(-1)
        return (hidden * mask).sum(1) / mask.sum(1)

    def forward(self, anchor, anchor_mask, positive, positive_mask):
        outputs = {
            "anchor": self.embed(anchor, anchor_mask),
            "positive": self.embed(positive, positive_mask),
        }
        return {**outputs, "scale": self.log_scale.exp()} if self.returns_scale else outputs


def embedder(dropout: float = 0.1, returns_scale: bool = False) -> Embedder:
    return h.seeded(partial(Embedder, dropout, returns_scale))()


def pair_samples(number: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (number, 2), generator=generator).tolist()

    def text(length):
        return torch.randint(3, h.VOCABULARY, (length,), generator=generator).tolist()

    return [
        {"anchor": text(a), "positive": text(b), "label": i % 5} for i, (a, b) in enumerate(lengths)
    ]


def collate_pairs(samples: list[dict]) -> dict[str, torch.Tensor]:
    batch = {"label": torch.tensor([sample["label"] for sample in samples])}
    for name in ("anchor", "positive"):
        rows = [torch.tensor(sample[name]) for sample in samples]
        batch[name] = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        batch[f"{name}_mask"] = (batch[name] != 0).long()
    return batch


def contrast(anchor, positive, scale):
    """InfoNCE with in-batch negatives in both directions."""
    anchor = F.normalize(anchor, dim=-1)
    positive = F.normalize(positive, dim=-1)
    similarities = scale * anchor @ positive.T
    target = torch.arange(len(anchor))
    return (F.cross_entropy(similarities, target) + F.cross_entropy(similarities.T, target)) / 2


def info_nce(model: Embedder):
    """The loss of all pairs; the temperature is a parameter of the model, or among its outputs."""

    def whole_batch(outputs, batch):
        scale = outputs["scale"] if "scale" in outputs else model.log_scale.exp()
        return contrast(outputs["anchor"], outputs["positive"], scale)

    return whole_batch


def full_batch_gradient(model, window, whole_batch) -> h.Gradients:
    """One float64 forward and backward of all samples of a window, with the window's dropout.

    Args:
        whole_batch: Makes the loss function of a model.
    """
    model = copy.deepcopy(model).double().train()
    request = window.request
    batch = window.whole_batch(torch.device("cpu"))
    arguments = {name: value for name, value in batch.items() if name != "label"}
    with keyed(request.seed, request.epoch, request.positions, request.index):
        outputs = model(**arguments)
    whole_batch(model)(outputs, batch).backward()
    return h.gradients(model)
