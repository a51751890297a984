"""What metrics compare for heads whose predictions are texts: answers that are read off spans, and texts that are generated."""

from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn

from hf_ga.data.data import PreparedData
from hf_ga.data.spans import read_answers
from hf_ga.exact.batches import MicroBatch
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.evaluation import Reader
from hf_ga.run.generation import generated_targets
from hf_ga.run.text_metrics import ANSWER_METRICS, TEXT_METRICS


def make_reader(
    config: FinetuneConfig, accelerator: Accelerator, model: nn.Module, data: PreparedData, split: str
) -> Reader | None:
    """The reader for a task's evaluation of a split; None where logits and labels are compared as they are."""
    if data.task.labels == "answers":
        return Reader(ANSWER_METRICS, partial(_answers, data, split))
    if config.predict_with_generate:
        return Reader(TEXT_METRICS, partial(_texts, config, accelerator, model, data, split), predicts_tokens=True)
    return None


def _answers(
    data: PreparedData, split: str, outputs: Any, batch: dict[str, Any], micro_batch: MicroBatch
) -> tuple[list[str], list[list[str]]]:
    samples = [data.splits[split][int(i)] for i in micro_batch.sample_ids]
    return [answer.text for answer in read_answers(outputs, samples)], [sample["answers"] for sample in samples]


def _texts(
    config: FinetuneConfig,
    accelerator: Accelerator,
    model: nn.Module,
    data: PreparedData,
    split: str,
    outputs: Any,
    batch: dict[str, Any],
    micro_batch: MicroBatch,
) -> tuple[list[str], list[str]]:
    limits = {"max_new_tokens": config.max_new_tokens, "num_beams": config.num_beams}
    with accelerator.autocast():  # around the whole search: only the model's own forward is under it already
        made = generated_targets(model, data.tokenizer, batch, **limits)
    return made, [data.splits[split][int(i)]["target"] for i in micro_batch.sample_ids]
