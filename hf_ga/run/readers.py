"""Readers of predictions and references for metrics: logits and labels, entities, answers from spans, generated texts."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import nn

from hf_ga.data.data import PreparedData
from hf_ga.data.spans import read_answers
from hf_ga.exact.batches import IGNORED_LABEL, MicroBatch
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.evaluation import Reader
from hf_ga.run.generation import generated_targets
from hf_ga.run.metrics import ANSWER_METRICS, ENTITY_METRICS, METRICS, TEXT_METRICS, predictions_and_references


def make_reader(
    config: FinetuneConfig, accelerator: Accelerator, model: nn.Module, data: PreparedData, split: str
) -> Reader | None:
    """The reader for a task's evaluation of a split; None if only the loss is measured."""

    def read_entities(outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch) -> tuple[list[list[str]], list[list[str]]]:
        labels, names = micro_batch.batch["labels"].numpy(), np.asarray(data.labels)
        predicted, counted = outputs.logits.float().argmax(-1).cpu().numpy(), labels != IGNORED_LABEL
        predictions, references = (
            [names[row[own]].tolist() for row, own in zip(ids, counted, strict=True)] for ids in (predicted, labels)
        )
        return predictions, references

    def read_spans(outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch) -> tuple[list[str], list[list[str]]]:
        samples = [data.splits[split][int(i)] for i in micro_batch.sample_ids]
        return [answer.text for answer in read_answers(outputs, samples)], [sample["answers"] for sample in samples]

    def generate(outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch) -> tuple[list[str], list[str]]:
        limits = {"max_new_tokens": config.max_new_tokens, "num_beams": config.num_beams}
        with accelerator.autocast():  # for the whole generation: only the model's forward has autocast already
            made = generated_targets(model, data.tokenizer, batch, **limits)
        return made, [data.splits[split][int(i)]["target"] for i in micro_batch.sample_ids]

    if data.task.labels == "tags" and are_entities(data.labels):
        return Reader(ENTITY_METRICS, read_entities)
    if data.task.labels == "answers":
        return Reader(ANSWER_METRICS, read_spans)
    if config.predict_with_generate:
        return Reader(TEXT_METRICS, generate, predicts_tokens=True)
    return logits_reader(data.task.metrics) if data.task.metrics else None


def logits_reader(metrics: Sequence[str]) -> Reader:
    """A reader for metrics of `METRICS` that compare logits and labels; see `predictions_and_references`."""

    def read(outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return predictions_and_references(outputs.logits.float().cpu().numpy(), micro_batch.batch["labels"].numpy())

    return Reader({name: METRICS[name] for name in metrics}, read)


def are_entities(labels: list[str]) -> bool:
    """Whether tags mark entities by B (begin) and I (inside).

    >>> are_entities(["O", "B-PER", "I-PER"]), are_entities(["NOUN", "VERB"])
    (True, False)
    """
    return "O" in labels and len(labels) > 1 and all(re.fullmatch("O|[BI]-.+", label) for label in labels)
