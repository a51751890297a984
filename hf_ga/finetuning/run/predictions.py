"""Predictions for the rows of a file: one JSON object per line, the row with an added `prediction`,
in the file's order.
"""

import json
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object, send_to_device
from torch import nn
from tqdm.auto import tqdm

from hf_ga.exact.forward import argument_filter, callable_module, restored_modes
from hf_ga.finetuning.data.choices import collate_choices
from hf_ga.finetuning.data.collation import collate_ids
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.data.spans import Span, best_answer, by_question, read_spans
from hf_ga.finetuning.run.readers import generated_targets
from hf_ga.finetuning.run.run import Setup
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.processes import print_on_main

Prediction = dict[str, Any]


def write_predictions(setup: Setup, model: nn.Module) -> None:
    """Predict the rows of `predict_file`, if any, to predictions.jsonl. The processes share the
    batches; the main process writes.

    A prediction is None for a row without text, else it contains

    - text classification: `label`, `score`
    - multi-label: `labels` (probability above 0.5), `scores`
    - regression: `value`
    - token classification: `tags` (one per word, None for truncated words)
    - question answering: `answer` ("" if no answer is the most likely), `score`, and its characters
      `start` and `end`
    - multiple choice: `choice` (0-based index), `score`
    - seq2seq: `text`

    Args:
        setup: What the parts of the run share.
        model: The prepared model.
    """
    if setup.unlabelled is None:
        return
    accelerator = setup.accelerator
    rows, named, samples = setup.unlabelled
    windows = [0] * len(samples)
    if "window_index" in samples.column_names:
        windows = samples["window_index"][:]
    samples_of_row = by_question(windows, range(len(samples)))
    row_of = [row for row, group in enumerate(samples_of_row) for _ in group]
    own = _batches_of_process(setup, np.asarray(samples["length"][:]))
    found: dict[int, Prediction | Span] = {}
    bar = tqdm(
        total=sum(map(len, own)),
        desc="predicting",
        unit="sample",
        disable=not accelerator.is_main_process,
    )
    with torch.no_grad(), restored_modes(model), accelerator.autocast(), bar:
        model.eval()
        for ids in own:
            of_samples = [samples[i] for i in ids]
            of_rows = [named[row_of[i]] for i in ids]
            of_batch = _of_batch(setup, model, of_samples, of_rows)
            found |= zip(ids, of_batch, strict=True)
            bar.update(len(ids))
    # The windows of a question may be on several processes.
    found = dict(gather_object(list(found.items())))
    predictions = [_of_row([found[i] for i in group if i in found]) for group in samples_of_row]
    path = setup.output_dir / "predictions.jsonl"
    if accelerator.is_main_process:
        with path.open("w", encoding="utf-8") as file:
            for row, prediction in zip(rows, predictions, strict=True):
                content = {**row, "prediction": prediction}
                file.write(json.dumps(content, default=str, ensure_ascii=False) + "\n")
    print_on_main(accelerator, f"{len(rows)} rows predicted: {path}")


def _batches_of_process(setup: Setup, lengths: np.ndarray) -> list[list[int]]:
    """Return this process's batches of indices of samples, in the order of falling length.

    Args:
        setup: What the parts of the run share.
        lengths: Tokens of each sample. Those without any are in no batch.
    """
    size = setup.config.per_device_eval_batch_size
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    batches = [order[start : start + size].tolist() for start in range(0, len(order), size)]
    accelerator = setup.accelerator
    if is_sharded(accelerator):
        # Each forward is a collective, so all processes need equally many batches: some repeat one.
        missing = -len(batches) % accelerator.num_processes
        batches += batches[:1] * missing
    return batches[accelerator.process_index :: accelerator.num_processes]


def _of_batch(
    setup: Setup, model: nn.Module, samples: list[dict], rows: list[dict]
) -> list[Prediction] | list[Span]:
    """Predict a batch: one prediction, or span of a question's window, for each sample.

    Args:
        setup: What the parts of the run share.
        model: The prepared model in evaluation mode.
        samples: The samples of the batch.
        rows: The row of each sample.
    """
    data = setup.data
    kind = data.task.labels
    collate = collate_choices if kind == "choice" else collate_ids
    on_host = collate(samples, data.tokenizer.pad_token_id)
    batch = send_to_device(on_host, setup.accelerator.device)
    if kind == "target":
        return [{"text": text} for text in generated_targets(setup, model, batch)]
    arguments = argument_filter(model)(batch)
    outputs = callable_module(model)(**arguments)
    if kind == "answers":
        return read_spans(outputs, samples)
    logits = outputs.logits.float().cpu()
    return [
        _prediction(data, of_sample, sample, row)
        for of_sample, sample, row in zip(logits, samples, rows, strict=True)
    ]


def _of_row(found: list[Prediction] | list[Span]) -> Prediction | None:
    """Choose the prediction of a row from those of its samples: several for the windows of a
    question, none for an empty row.
    """
    if not found:
        return None
    if isinstance(found[0], Span):
        return best_answer(found)
    return found[0]


def _prediction(data: PreparedData, logits: torch.Tensor, sample: dict, row: dict) -> Prediction:
    """Turn the logits of one sample into its prediction, see `write_predictions`."""
    kind = data.task.labels
    if kind == "number":
        return {"value": float(logits[0])}
    if kind == "classes":
        probabilities = logits.sigmoid()
        scores = {
            name: round(float(p), 6) for name, p in zip(data.labels, probabilities, strict=True)
        }
        return {"labels": [name for name, p in scores.items() if p > 0.5], "scores": scores}
    if kind == "tags":
        return {"tags": _tags_of_words(data, logits, sample, row)}
    probability, best = logits.softmax(-1).max(-1)
    score = round(probability.item(), 6)
    if kind == "choice":
        return {"choice": best.item(), "score": score}
    return {"label": data.labels[int(best)], "score": score}


def _tags_of_words(
    data: PreparedData, logits: torch.Tensor, sample: dict, row: dict
) -> list[str | None]:
    """Return the tag of each word of a row, None for truncated words."""
    tags: list[str | None] = [None] * len(row["tokens"])
    # A label is the index of a word at the word's first token, and negative elsewhere.
    for token, word in enumerate(sample["label"]):
        if word >= 0:
            best = int(logits[token].argmax())
            tags[word] = data.labels[best]
    return tags
