"""A BERT in training mode: its gradient is that of the full batch in every split."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from draws_of_splits import SPLITS, micro_batch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertForSequenceClassification,
)
from transformers.masking_utils import sdpa_mask

from hf_ga.draws.keyed import KeyedDraws

LENGTHS = torch.tensor([9, 5, 7, 12, 3, 8, 12, 6])
TOKENS = torch.randint(1, 50, (8, 12), generator=torch.Generator().manual_seed(0))


def own_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    """As CONTRIBUTING.md says: it calls sdpa, and is registered together with its masks."""
    output = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.transpose(1, 2), None


AttentionInterface.register("own_attention", own_attention)
AttentionMaskInterface.register("own_attention", sdpa_mask)


def tiny_bert(attention):
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.2,
        attention_probs_dropout_prob=0.2,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config).double().train()


def batch_of(samples):
    """The samples padded to the longest one, and their labels."""
    width = int(LENGTHS[samples].max())
    mask = torch.arange(width) < LENGTHS[samples, None]
    inputs = TOKENS[samples, :width] * mask
    labels = torch.tensor(samples) % 2
    return {"input_ids": inputs, "attention_mask": mask.long(), "labels": labels}


def gradient(model, split, draws=None):
    """Gradient of the mean loss of 8 samples; without `draws`, with torch's own dropout."""
    model.zero_grad()
    for samples in split:
        with contextlib.nullcontext() if draws is None else micro_batch(samples, draws):
            loss = model(**batch_of(samples)).loss
            (loss * len(samples) / 8).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("attention", ["eager", "sdpa", "own_attention"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_is_that_of_the_full_batch(attention, checkpointing):
    model = tiny_bert(attention)
    full = gradient(model, [list(range(8))], KeyedDraws())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for split in SPLITS.values():
        before = torch.get_rng_state()
        difference = (gradient(model, split, KeyedDraws()) - full).norm() / full.norm()
        assert difference < 1e-12
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_torch_s_own_dropout_depends_on_the_split(attention):
    model = tiny_bert(attention)
    torch.manual_seed(1)
    full = gradient(model, [list(range(8))])
    torch.manual_seed(1)
    difference = (gradient(model, SPLITS["halves"]) - full).norm() / full.norm()
    assert difference > 0.01
