"""The samples that all arms train on: documentation strings of the standard library, tokenised once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from benchmark.setting import TASKS, Sample, Setting
from hf_ga.data.collation import collate_causal, collate_labels, collate_masked
from hf_ga.data.data import prepare_data
from hf_ga.exact.batches import IGNORED_LABEL
from hf_ga.exact.hashing import Stream, extend_key, make_key
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.models import load_tokenizer

MASKED_SHARE = 0.15
SHORTEST_SHARE = 0.9  # of samples of nearly one length


def ragged_samples(setting: Setting, count: int) -> tuple[list[Sample], int]:
    """The first `count` training samples of the model's task as plain lists, and the number of labels.

    A sample has `id`, `input_ids` and, as its task needs, `label` or `labels`; masks of a masked LM are drawn once, so that all
    arms learn the same targets.
    """
    config = FinetuneConfig(task=TASKS[setting.model], max_length=setting.max_length)
    data = prepare_data(config, load_tokenizer(config))
    rows = data.splits["train"]
    rows = rows.select(range(min(count, len(rows))))
    kept = [name for name in ("input_ids", "label") if name in rows.column_names]
    samples = [{"id": i, **{name: row[name] for name in kept}} for i, row in enumerate(rows)]
    if setting.model == "bert-mlm":
        samples = [_masked(sample, data.collate, data.tokenizer.pad_token_id) for sample in samples]
    return samples, len(data.labels)


def uniform_samples(samples: Sequence[Sample], longest: int, shortest_share: float = SHORTEST_SHARE) -> list[Sample]:
    """As many samples, whose lengths lie within 10 % of each other: 0.9 x longest to longest, spread evenly, in mixed order.

    Tokens and labels are those of the given samples, repeated where they are too few.
    """
    ids = np.concatenate([sample["input_ids"] for sample in samples])
    labels = np.concatenate([sample.get("labels", sample["input_ids"]) for sample in samples])
    lengths = np.linspace(np.ceil(shortest_share * longest), longest, len(samples)).astype(int)
    lengths = np.random.default_rng(0).permutation(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    cut = [np.arange(start, start + length) % len(ids) for start, length in zip(starts, lengths, strict=True)]
    made = [{**sample, "id": i, "input_ids": ids[at].tolist()} for i, (sample, at) in enumerate(zip(samples, cut, strict=True))]
    if "labels" in samples[0]:
        made = [{**sample, "labels": labels[at].tolist()} for sample, at in zip(made, cut, strict=True)]
    return made


def collate_function(setting: Setting) -> Callable[[Sequence[Sample]], dict[str, Tensor]]:
    """Samples -> arguments of the setting's model."""
    collate = collate_labels if setting.model == "bert" else collate_causal  # masked samples have their labels
    return partial(collate, pad_token_id=setting.pad_token_id)


def count_targets(setting: Setting, samples: Sequence[Sample]) -> int:
    """Elements that the loss averages over in one epoch."""
    if setting.model == "gpt":
        return sum(len(sample["input_ids"]) - 1 for sample in samples)
    if setting.model == "bert":
        return len(samples)
    return sum(label != IGNORED_LABEL for sample in samples for label in sample["labels"])


def _masked(sample: Sample, collate: partial, pad_token_id: int) -> dict[str, Any]:
    """BERT's masks, by the sample's number."""
    key = extend_key(make_key(Stream.SAMPLE, 0, 0), np.array([sample["id"]]))[0]
    assert collate.func is collate_masked
    batch = collate([{"input_ids": sample["input_ids"], "mask_key": key}])
    return {"id": sample["id"], "input_ids": batch["input_ids"][0].tolist(), "labels": batch["labels"][0].tolist()}
