"""Predictions for the rows of a file: one JSON object a line, the row with `prediction` beside its columns, in the file's order."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from hf_ga.data.chat import prompts
from hf_ga.data.choices import collate_choices
from hf_ga.data.collation import collate_ids
from hf_ga.data.data import PreparedData, prepare_unlabelled
from hf_ga.data.spans import read_answers
from hf_ga.errors import OutOfMemory
from hf_ga.exact.forward import argument_filter, callable_module, restored_modes
from hf_ga.exact.memory import is_out_of_memory
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.generation import continuations, generated_targets

Prediction = dict[str, Any]


@dataclass(frozen=True)
class Unlabelled:
    """Rows to predict: as they are, their columns under the names of the roles, as samples, and for a causal LM as prompts.

    Attributes:
        tokenizer: of prompts: it pads and cuts at the left, and is saved nowhere.
    """

    rows: Dataset
    named: Dataset
    samples: Dataset
    prompts: list[str] | None
    tokenizer: PreTrainedTokenizerBase

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row (of prompts, characters); 0 where there is nothing to predict from."""
        return np.asarray(self.samples["length"] if self.prompts is None else [len(text) for text in self.prompts])


def read_unlabelled(config: FinetuneConfig, data: PreparedData) -> Unlabelled | None:
    """The rows of `predict_file`, if it is given.

    Raises:
        DataError: the file is missing, lacks a column or has a malformed row.
    """
    if config.predict_file is None:
        return None
    rows, named, samples = prepare_unlabelled(config, data, config.predict_file)
    tokenizer = copy.deepcopy(data.tokenizer)
    tokenizer.padding_side = tokenizer.truncation_side = "left"  # what is generated follows the end of the text
    asked = prompts(named[:], tokenizer) if data.task.pipeline == "text-generation" else None
    return Unlabelled(rows, named, samples, asked, tokenizer)


def write_predictions(
    config: FinetuneConfig, accelerator: Accelerator, model: nn.Module, data: PreparedData, unlabelled: Unlabelled, path: Path
) -> int:
    """Predict rows and write them to `path`. Returns how many. The processes share the batches; the main process writes.

    A prediction holds: text classification `label`, `score`; multi-label `labels` (probability above 0.5), `scores`; regression
    `value`; token classification `tags` (one for each word), masked LM `tokens` (one for each mask token of the text), both with
    None for what was cut off; question answering `answer` ("" where none is likelier than any), `score`, and its characters `start`
    and `end`; multiple choice `choice` (its number, from 0), `score`; seq2seq `text`; causal LM `completion`. It is None for a row
    without text.
    """
    rows, lengths = unlabelled.rows, unlabelled.lengths
    order = np.argsort(-lengths, kind="stable")
    order, size = order[lengths[order] > 0], config.per_device_eval_batch_size
    batches = [order[start : start + size].tolist() for start in range(0, len(order), size)]
    own = _of_process(accelerator, batches)
    predictions: dict[int, Prediction] = {}
    bar = tqdm(total=sum(map(len, own)), desc="predicting", unit="row", disable=not accelerator.is_main_process)
    of_rows = partial(_of_rows, config, accelerator, model, data, unlabelled)
    with torch.no_grad(), restored_modes(model), accelerator.autocast(), bar:
        model.eval()
        for ids in own:
            predictions |= zip(ids, _in_parts(accelerator, of_rows, ids), strict=True)
            bar.update(len(ids))
    predictions = dict(gather_object(list(predictions.items())))
    if accelerator.is_main_process:
        with path.open("w", encoding="utf-8") as file:
            for index, row in enumerate(rows):
                prediction = predictions.get(index)
                file.write(json.dumps({**row, "prediction": prediction}, default=str, ensure_ascii=False) + "\n")
    return len(rows)


def _in_parts(accelerator: Accelerator, of_rows: Callable[[list[int]], list[Prediction]], ids: list[int]) -> list[Prediction]:
    """Of these rows; where they do not fit into memory together, of their halves.

    Raises:
        OutOfMemory: a single row does not fit or, under FSDP, a batch.
    """
    try:
        return of_rows(ids)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if len(ids) == 1 or is_sharded(accelerator):
            raise OutOfMemory(
                f"predictions need memory for one row at a time (under FSDP for a batch), but row {', '.join(map(str, ids))} of "
                "predict_file does not fit: lower max_length, max_new_tokens or per_device_eval_batch_size."
            ) from error
    clear_device_cache(garbage_collection=True)  # now that no traceback holds its tensors
    half = len(ids) // 2
    return [*_in_parts(accelerator, of_rows, ids[:half]), *_in_parts(accelerator, of_rows, ids[half:])]


def _of_rows(
    config: FinetuneConfig, accelerator: Accelerator, model: nn.Module, data: PreparedData, unlabelled: Unlabelled, ids: list[int]
) -> list[Prediction]:
    if unlabelled.prompts is not None:
        return _completions(config, model, data, unlabelled.tokenizer, [unlabelled.prompts[i] for i in ids])
    samples, named = ([dataset[i] for i in ids] for dataset in (unlabelled.samples, unlabelled.named))
    return _of_batch(config, accelerator, model, data, samples, named)


def _of_process(accelerator: Accelerator, batches: list[list[int]]) -> list[list[int]]:
    """The batches of this process, dealt out in turn. Under FSDP, where each forward is a collective, a process that has
    fewer does one of them again.
    """
    count = accelerator.num_processes
    own = batches[accelerator.process_index :: count]
    missing = -(-len(batches) // count) - len(own)
    return own + batches[:1] * missing if is_sharded(accelerator) else own


def _of_batch(
    config: FinetuneConfig, accelerator: Accelerator, model: nn.Module, data: PreparedData, samples: list[dict], rows: list[dict]
) -> list[Prediction]:
    kind = data.task.labels
    collate = collate_choices if kind == "choice" else collate_ids
    batch = send_to_device(collate(samples, data.tokenizer.pad_token_id), accelerator.device)
    if kind == "target":
        limits = {"max_new_tokens": config.max_new_tokens, "num_beams": config.num_beams}
        return [{"text": text} for text in generated_targets(model, data.tokenizer, batch, **limits)]
    outputs = callable_module(model)(**argument_filter(model)(batch))
    if kind == "answers":
        answers = read_answers(outputs, samples)
        return [{"answer": a.text, "score": a.score, "start": a.start, "end": a.end} for a in answers]
    logits = outputs.logits.float().cpu()
    make = _MAKERS[kind]
    return [make(data, of_sample, sample, row) for of_sample, sample, row in zip(logits, samples, rows, strict=True)]


def _completions(
    config: FinetuneConfig, model: nn.Module, data: PreparedData, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> list[Prediction]:
    made = continuations(
        model,
        tokenizer,
        texts,
        add_special_tokens=not (data.tokenizer.chat_template and data.has_conversations),
        max_length=config.sequence_length,
        max_new_tokens=config.max_new_tokens,
        num_beams=config.num_beams,
    )
    return [{"completion": text} for text in made]


def _one_label(data: PreparedData, logits: torch.Tensor, sample: dict, row: dict) -> Prediction:
    probabilities = logits.softmax(-1)
    best = int(probabilities.argmax())
    return {"label": data.labels[best], "score": round(float(probabilities[best]), 6)}


def _choice(data: PreparedData, logits: torch.Tensor, sample: dict, row: dict) -> Prediction:
    probabilities = logits.softmax(-1)
    best = int(probabilities.argmax())
    return {"choice": best, "score": round(float(probabilities[best]), 6)}


def _label_set(data: PreparedData, logits: torch.Tensor, sample: dict, row: dict) -> Prediction:
    scores = {name: round(float(p), 6) for name, p in zip(data.labels, logits.sigmoid(), strict=True)}
    return {"labels": [name for name, p in scores.items() if p > 0.5], "scores": scores}


def _number(data: PreparedData, logits: torch.Tensor, sample: dict, row: dict) -> Prediction:
    return {"value": float(logits[0])}


def _tags(data: PreparedData, logits: torch.Tensor, sample: dict, row: dict) -> Prediction:
    """The sample's `label` holds, at the first piece of each word, the word's number."""
    tags: list[str | None] = [None] * len(row["tokens"])
    for piece, word in enumerate(sample["label"]):
        if word >= 0:
            tags[word] = data.labels[int(logits[piece].argmax())]
    return {"tags": tags}


def _masks(data: PreparedData, logits: torch.Tensor, sample: dict, row: dict) -> Prediction:
    masked = [i for i, token in enumerate(sample["input_ids"]) if token == data.tokenizer.mask_token_id]
    cut_off = row["text"].count(data.tokenizer.mask_token) - len(masked)
    return {"tokens": [data.tokenizer.decode([int(logits[i].argmax())]).strip() for i in masked] + [None] * cut_off}


_MAKERS: dict[str, Callable[..., Prediction]] = {
    "class": _one_label,
    "classes": _label_set,
    "number": _number,
    "tags": _tags,
    "choice": _choice,
    "none": _masks,
}
