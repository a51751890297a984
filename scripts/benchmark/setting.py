"""What is measured: model, data, batch, precision. A setting is plain values, so that a process of its own can be told it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

Sample = dict[str, Any]
# Name of a model -> the task of `hf_ga.data.tasks` whose samples it learns.
TASKS = {"gpt": "causal-lm", "bert": "text-classification", "bert-mlm": "masked-lm"}
# Layers, width and heads. `base` is GPT-2-small and BERT-base.
SIZES = {"tiny": (2, 32, 2), "small": (4, 256, 4), "base": (12, 768, 12)}
BASE_VOCABULARY = {"gpt": 50257, "bert": 30522, "bert-mlm": 30522}
EMBEDDED_VOCABULARY = 4000  # of the embedded tokenizer


@dataclass(frozen=True)
class Setting:
    """Everything that all arms have in common.

    Attributes:
        model: a key of `TASKS`. size: a key of `SIZES`. vocabulary: rows of the embedding. num_labels: of a classifier.
        device: "cpu" or "cuda". num_threads: of torch. mixed_precision: "no" or "bf16".
        dropout: of all places that the model has. window_size: samples in an optimizer step. micro_batch_size: in a micro-batch.
        warmup_windows: windows that run before the clock does. pad_token_id: what fills short rows.
    """

    model: str = "gpt"
    size: str = "small"
    vocabulary: int = EMBEDDED_VOCABULARY
    num_labels: int = 2
    device: str = "cpu"
    num_threads: int = 1
    mixed_precision: str = "no"
    dropout: float = 0.1
    micro_batch_size: int = 8
    window_size: int = 64
    max_length: int = 256
    learning_rate: float = 1e-3
    max_grad_norm: float = 1.0
    warmup_windows: int = 1
    pad_token_id: int = 0
    seed: int = 0

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a window where all have the same number of samples."""
        return self.window_size // self.micro_batch_size


def build_model(setting: Setting) -> PreTrainedModel:
    """The model with new weights, the same in every process, in training mode on its device."""
    torch.manual_seed(setting.seed)
    model = _build(setting).to(setting.device).train()
    if model.loss_type is None:  # GPT-2's class name tells transformers no loss, and it warns
        model.loss_type = "ForCausalLM"
    return model


def _build(setting: Setting) -> PreTrainedModel:
    layers, width, heads = SIZES[setting.size]
    shared: dict[str, Any] = {"vocab_size": setting.vocabulary, "pad_token_id": setting.pad_token_id}
    if setting.model == "gpt":
        drops = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), setting.dropout)
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 1)
        positions = max(256, setting.max_length)
        return GPT2LMHeadModel(
            GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=positions, **drops, **ends, **shared)
        )
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max(256, setting.max_length),
        hidden_dropout_prob=setting.dropout,
        attention_probs_dropout_prob=setting.dropout,
        num_labels=setting.num_labels,
        **shared,
    )
    return BertForMaskedLM(config) if setting.model == "bert-mlm" else BertForSequenceClassification(config)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(of the body, of the head): what every token, and what every target, is multiplied with.

    Embeddings are looked up, not multiplied, so they count as neither; a head that shares them (a language model's) counts as a
    head. A pooler belongs to the head: it reads one token a sample.
    """
    if isinstance(model, GPT2LMHeadModel):
        body, head = [model.transformer.h, model.transformer.ln_f], [model.lm_head]
    elif isinstance(model, BertForMaskedLM):
        body, head = [model.bert.encoder], [model.cls]
    else:
        body, head = [model.bert.encoder], [model.bert.pooler, model.classifier]
    return tuple(sum(p.numel() for module in modules for p in module.parameters()) for modules in (body, head))


def useful_flops(num_body: int, num_head: int, real_tokens: int, targets: int) -> int:
    """6 x body parameters x real tokens + 6 x head parameters x targets: a multiplication and an addition in the forward, and
    twice that in the backward (Kaplan et al. 2020, section 2.1, without attention's products of tokens with tokens).

    >>> useful_flops(10, 3, 100, 5)
    6090
    """
    return 6 * (num_body * real_tokens + num_head * targets)
