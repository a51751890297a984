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

    A prediction contains: text classification `label`, `score`; multi-label `labels` (probability
        above 0.5), `scores`;
    regression `value`; token classification `tags` (one per word, None for truncated words);
    question answering `answer` ("" if no answer is the most likely), `score`, and its characters
    `start` and `end`; multiple choice `choice` (0-based index), `score`; seq2seq `text`. It is None
    for a row without text.
    """
    if setup.unlabelled is None:
        return
    (rows, named, samples), accelerator = setup.unlabelled, setup.accelerator
    lengths, size = np.asarray(samples["length"][:]), setup.config.per_device_eval_batch_size
    windows = samples["window"][:] if "window" in samples.column_names else [0] * len(samples)
    samples_of_row = by_question(windows, range(len(samples)))
    row_of = np.repeat(np.arange(len(samples_of_row)), [len(group) for group in samples_of_row])
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    batches = [order[start : start + size].tolist() for start in range(0, len(order), size)]
    if is_sharded(
        accelerator
    ):  # each forward is a collective, so all processes need equally many batches: some repeat one
        batches += batches[:1] * (-len(batches) % accelerator.num_processes)
    own = batches[accelerator.process_index :: accelerator.num_processes]
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
            of_batch = _of_batch(
                setup, model, [samples[i] for i in ids], [named[int(row_of[i])] for i in ids]
            )
            found |= zip(ids, of_batch, strict=True)
            bar.update(len(ids))
    found = dict(gather_object(list(found.items())))  # windows of a question may be anywhere
    predictions = [_of_row([found[i] for i in group if i in found]) for group in samples_of_row]
    path = setup.output_dir / "predictions.jsonl"
    if accelerator.is_main_process:
        with path.open("w", encoding="utf-8") as file:
            for row, prediction in zip(rows, predictions, strict=True):
                file.write(
                    json.dumps({**row, "prediction": prediction}, default=str, ensure_ascii=False)
                    + "\n"
                )
    print_on_main(accelerator, f"{len(rows)} rows predicted: {path}")


def _of_batch(
    setup: Setup, model: nn.Module, samples: list[dict], rows: list[dict]
) -> list[Prediction] | list[Span]:
    data, kind = setup.data, setup.data.task.labels
    collate = collate_choices if kind == "choice" else collate_ids
    batch = send_to_device(collate(samples, data.tokenizer.pad_token_id), setup.accelerator.device)
    if kind == "target":
        return [{"text": text} for text in generated_targets(setup, model, batch)]
    outputs = callable_module(model)(**argument_filter(model)(batch))
    if kind == "answers":
        return read_spans(outputs, samples)
    logits = outputs.logits.float().cpu()
    return [_prediction(data, *of_sample) for of_sample in zip(logits, samples, rows, strict=True)]


def _of_row(found: list[Prediction] | list[Span]) -> Prediction | None:
    """The prediction of a row, from those of its samples: several for the windows of a question,
    none for an empty row.
    """
    if not found:
        return None
    return best_answer(found) if isinstance(found[0], Span) else found[0]


def _prediction(data: PreparedData, logits: torch.Tensor, sample: dict, row: dict) -> Prediction:
    """The prediction of one sample; see `write_predictions`."""
    kind = data.task.labels
    if kind == "number":
        return {"value": float(logits[0])}
    if kind == "classes":
        scores = {
            name: round(float(p), 6) for name, p in zip(data.labels, logits.sigmoid(), strict=True)
        }
        return {"labels": [name for name, p in scores.items() if p > 0.5], "scores": scores}
    if kind == "tags":
        tags: list[str | None] = [None] * len(row["tokens"])
        for piece, word in enumerate(sample["label"]):  # index of the word, at its first token
            if word >= 0:
                tags[word] = data.labels[int(logits[piece].argmax())]
        return {"tags": tags}
    probability, best = (value.item() for value in logits.softmax(-1).max(-1))
    return ({"choice": best} if kind == "choice" else {"label": data.labels[int(best)]}) | {
        "score": round(probability, 6)
    }
