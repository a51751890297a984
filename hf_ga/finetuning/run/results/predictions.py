"""Predict the rows of `predict_file` with the trained model, and write predictions.jsonl: each row
with an added `prediction`, one JSON object per line, in the order of the file.
"""

import json
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from tqdm.auto import tqdm

from hf_ga.finetuning.data.encoding.spans import Span, best_answer, by_question, read_spans
from hf_ga.finetuning.run.run import Setup
from hf_ga.finetuning.run.scores.evaluation import (
    evaluation_mode,
    evaluation_windows,
    run_forwards,
)
from hf_ga.finetuning.run.scores.readers import generated_targets
from hf_ga.loading.batches import MicroBatch
from hf_ga.model.forward import argument_filter, callable_module
from hf_ga.parallel.fsdp import backend_for
from hf_ga.parallel.processes import print_on_main

Prediction = dict[str, Any]
# The index of a sample and its prediction; in question answering, its best span.
Predicted = tuple[int, Prediction | Span]


def write_predictions(setup: Setup, model: nn.Module) -> None:
    """Predict the rows of `predict_file` and write them to predictions.jsonl. No-op without the
    flag.

    All processes must call it. Each predicts a part of the batches, and the main process writes.
    The prediction of a row without text is None, that of another row contains, by task:

    - text classification: `label`, `score`
    - multi-label: `labels` (probability above 0.5), `scores`
    - regression: `value`
    - token classification: `tags` (one per word, None for truncated words)
    - question answering: `answer` ("" if no answer is the most likely), `score`, and its characters
      `start` and `end`
    - multiple choice: `choice` (0-based index), `score`
    - seq2seq: `text`

    Args:
        setup: The setup of the run.
        model: The prepared model.
    """
    if setup.unlabelled is None:
        return
    rows, samples = setup.unlabelled
    # Also the windows of one question may be on several processes.
    found = dict(gather_object(_predict_samples(setup, model)))
    predictions = [found.get(i) for i in range(len(samples))]  # None: an empty row
    if "window_index" in samples.column_names:
        spans_of_rows = by_question(samples["window_index"][:], predictions)
        predictions = [best_answer(spans) if spans[0] else None for spans in spans_of_rows]
    path = setup.output_dir / "predictions.jsonl"
    if setup.accelerator.is_main_process:
        with path.open("w", encoding="utf-8") as file:
            for row, prediction in zip(rows, predictions, strict=True):
                content = {**row, "prediction": prediction}
                file.write(json.dumps(content, default=str, ensure_ascii=False) + "\n")
    print_on_main(setup.accelerator, f"{len(rows)} rows predicted: {path}")


def _predict_samples(setup: Setup, model: nn.Module) -> list[Predicted]:
    """Predict this process's part of the samples of `predict_file` that are not empty, with a
    progress bar on the main process: pairs of the index of a sample and its prediction.
    """
    accelerator = setup.accelerator
    backend = backend_for(accelerator)
    _, samples = setup.unlabelled
    lengths = np.asarray(samples["length"][:])
    not_empty = np.flatnonzero(lengths)
    found: list[Predicted] = []
    if not len(not_empty):
        return found
    inputs = [name for name in ("input_ids", "token_type_ids") if name in samples.column_names]
    windows = evaluation_windows(
        samples.select(not_empty).select_columns(inputs),
        setup.data.collate,
        accelerator=accelerator,
        batch_size=setup.config.per_device_eval_batch_size,
        lengths=lengths[not_empty],
    )

    def predict(batch: dict[str, Any], micro_batch: MicroBatch) -> list[Predicted]:
        """Predict the samples of a micro-batch."""
        indices = not_empty[micro_batch.positions].tolist()
        return list(zip(indices, _predict_batch(setup, model, batch, indices), strict=True))

    bar = tqdm(
        total=len(not_empty) // accelerator.num_processes,
        desc="predicting",
        unit="sample",
        disable=not accelerator.is_main_process,
    )
    with torch.no_grad(), evaluation_mode(backend, model), backend.autocast(), bar:
        for _, of_batch in run_forwards(backend, windows, predict):
            found += of_batch
            bar.update(len(of_batch))
    return found


def _predict_batch(
    setup: Setup, model: nn.Module, batch: dict[str, Any], indices: list[int]
) -> list[Prediction] | list[Span]:
    """Run the model on a batch of samples of `predict_file`, and return the prediction of each
    sample; in question answering, the best span in each sample.
    """
    task = setup.config.task
    if task == "seq2seq":
        return [{"text": text} for text in generated_targets(setup, model, batch)]
    inputs = argument_filter(model)(batch)
    outputs = callable_module(model)(**inputs)
    if task == "question-answering":
        _, samples = setup.unlabelled
        return read_spans(outputs, [samples[i] for i in indices])
    logits = outputs.logits.float().cpu()
    pairs = zip(logits, indices, strict=True)
    return [_prediction_from_logits(setup, of_sample, index) for of_sample, index in pairs]


def _prediction_from_logits(setup: Setup, logits: torch.Tensor, index: int) -> Prediction:
    """Turn the logits of one sample of `predict_file` into its entry in predictions.jsonl, see
    `write_predictions`.
    """
    task = setup.config.task
    labels = setup.data.labels
    if task == "regression":
        return {"value": float(logits[0])}
    if task == "multi-label":
        probabilities = logits.sigmoid()
        scores = {
            label: round(float(probability), 6)
            for label, probability in zip(labels, probabilities, strict=True)
        }
        return {"labels": [label for label in scores if scores[label] > 0.5], "scores": scores}
    if task == "token-classification":
        return {"tags": _tags_of_words(setup, logits, index)}
    probability, best = logits.softmax(-1).max(-1)
    score = round(probability.item(), 6)
    if task == "multiple-choice":
        return {"choice": best.item(), "score": score}
    return {"label": labels[int(best)], "score": score}


def _tags_of_words(setup: Setup, logits: torch.Tensor, index: int) -> list[str | None]:
    """Return the predicted tag of each word of a row of `predict_file` in token classification:
    that of the word's first token, or None if the word was truncated.
    """
    rows, samples = setup.unlabelled
    words = rows[index][setup.data.columns["tokens"]]
    tags: list[str | None] = [None] * len(words)
    for token, word in enumerate(samples[index]["label"]):
        if word >= 0:
            best = int(logits[token].argmax())
            tags[word] = setup.data.labels[best]
    return tags
