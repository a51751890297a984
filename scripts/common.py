"""What the scripts share: models with random weights, samples of different lengths, a timer, and
tables.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from hf_ga.finetuning.data.formats import corpus

Sample = dict[str, Any]
NUM_CLASSES = 15  # of the classifier: packages of the standard library with enough docstrings
MODELS = ("gpt", "bert")  # a causal language model, and a classifier
# Random token ids are from 5 to below this one: of any vocabulary, without special tokens.
END_ID = 4000


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer; the defaults are those of GPT-2-small.

    Attributes:
        kind: "gpt" (GPT-2, a causal language model) or "bert" (BERT, a sequence classifier).
        layers: Number of layers.
        width: Hidden size.
        heads: Number of attention heads.
        words: Vocabulary size.
    """

    kind: str
    layers: int = 12
    width: int = 768
    heads: int = 12
    words: int = 50257


def build_model(
    shape: Shape, dropout: float = 0.1, positions: int = 1024, **arguments: Any
) -> PreTrainedModel:
    """Build a GPT-2 or BERT in training mode with random weights, drawn from torch's generator.

    Args:
        shape: The sizes of the model.
        dropout: Dropout probability at all sites.
        positions: Maximum number of tokens of a sample.
        arguments: More arguments of the config, which replace those that follow from the others.
    """
    if shape.kind == "gpt":
        sizes = {
            "vocab_size": shape.words,
            "n_layer": shape.layers,
            "n_embd": shape.width,
            "n_head": shape.heads,
            "n_positions": positions,
            "embd_pdrop": dropout,
            "resid_pdrop": dropout,
            "attn_pdrop": dropout,
            "bos_token_id": 1,
            "eos_token_id": 1,
        }
        model = GPT2LMHeadModel(GPT2Config(**(sizes | arguments)))
        # transformers finds the loss by the class name, but not for GPT-2, and would warn.
        model.loss_type = "ForCausalLM"
        return model.train()
    sizes = {
        "vocab_size": shape.words,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "intermediate_size": 4 * shape.width,
        "max_position_embeddings": positions,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    return BertForSequenceClassification(BertConfig(**(sizes | arguments))).train()


def collate(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Collate samples into a right-padded batch with labels: the class of each sample for a
    classifier, otherwise the token ids, -100 at padding.
    """
    ids = [torch.tensor(sample["input_ids"]) for sample in samples]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }
    if "label" in samples[0]:
        return batch | {"labels": torch.tensor([sample["label"] for sample in samples])}
    return batch | {"labels": pad_sequence(ids, batch_first=True, padding_value=-100)}


def docstring_samples(kind: str, max_length: int, count: int) -> list[Sample]:
    """Tokenize the first docstrings of hf_ga's corpus (Python's standard library) for a model.

    Args:
        kind: "gpt": the token ids end with the end-of-text token. "bert": they begin with the
            classification token, and the label is the package that the docstring is from.
        max_length: Maximum number of tokens of a sample; longer ones are truncated.
        count: Maximum number of samples.
    """
    rows = corpus.load_stdlib()["train"].to_list()
    tokenizer = corpus.load_stdlib_tokenizer()
    if kind == "gpt":
        texts = [row["text"] for row in rows[:count]]
        return [
            {"id": i, "input_ids": [*ids, tokenizer.eos_token_id][:max_length]}
            for i, ids in enumerate(tokenizer(texts)["input_ids"])
        ]
    num_rows = Counter(row["package"] for row in rows)
    packages = sorted(name for name in num_rows if num_rows[name] >= corpus.MIN_ROWS_PER_LABEL)
    rows = [row for row in rows if row["package"] in packages]
    samples = []
    for i, row in enumerate(rows[:count]):
        ids = [tokenizer.cls_token_id, *tokenizer(row["text"])["input_ids"]][:max_length]
        samples.append({"id": i, "input_ids": ids, "label": packages.index(row["package"])})
    return samples


def random_samples(kind: str, max_length: int, count: int) -> list[Sample]:
    """Make samples of random tokens, whose lengths are spread widely: log-normal, from 8 tokens to
    `max_length`. With 1,024 they have 240 tokens on average.

    Args:
        kind: "gpt" or "bert", whose samples have a label of four.
        max_length: Maximum number of tokens of a sample.
        count: Number of samples.
    """
    generator = np.random.default_rng(0)
    median = 180 / 1024 * max_length
    lengths = generator.lognormal(math.log(median), 0.8, count).astype(int).clip(8, max_length)
    samples = []
    for i, length in enumerate(lengths):
        sample = {"id": i, "input_ids": generator.integers(5, END_ID, length).tolist()}
        if kind == "bert":
            sample["label"] = i % 4
        samples.append(sample)
    return samples


# Name of the lengths -> function that makes the samples.
SAMPLES = {"docstrings": docstring_samples, "lognormal": random_samples}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """Concatenate all elements of tensors by name, such as gradients, to one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def seconds_of(function: Callable[[], object]) -> float:
    """Measure the seconds of calling a function, with its work on a GPU, if there is one."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], alignment: str = "---:") -> str:
    """Format a Markdown table; "|" in cells is escaped.

    Args:
        header: Titles of the columns.
        rows: The cells of each row.
        alignment: Alignment of all columns but the first one, in Markdown; numbers are right.
    """
    lines = []
    for cells in (header, ["---"] + [alignment] * (len(header) - 1), *rows):
        escaped = [str(cell).replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)
