"""The trial of a loss before training: every one of its samples is compared with its rehearsal."""

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_ga.training import LossSettings, try_before

LENGTHS = range(3, 11)  # as many samples as a trial has
MARK = 39  # a token


class DividingByTheWidth(nn.Module):
    """Divides by the padded width where a row has the mark, else by the number of tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(h.VOCABULARY, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask, labels):
        mask = attention_mask.unsqueeze(-1)
        number = mask.sum(1)
        is_marked = (input_ids == MARK).any(1, keepdim=True)
        number = torch.where(is_marked, float(input_ids.shape[1]), number.float())
        logits = self.head((self.embedding(input_ids) * mask).sum(1) / number)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def needs_padding(marked: int | None) -> bool:
    samples = [
        {"input_ids": [1] * length, "attention_mask": [1] * length, "labels": length % 3}
        for length in LENGTHS
    ]
    if marked is not None:
        samples[marked]["input_ids"][0] = MARK
    model = h.seeded(DividingByTheWidth)()
    facts = try_before(Accelerator(cpu=True), model, samples, h.pad_right, LossSettings())
    assert facts.is_width_tried
    return facts.pad_to_window


@pytest.mark.parametrize("marked", range(len(LENGTHS) - 2))
def test_padding_that_matters_for_one_sample_only(marked):
    """Not one of the two longest, whose micro-batch is as wide as the window."""
    assert needs_padding(marked)


def test_control_without_such_a_sample():
    assert not needs_padding(None)
