"""`--task embedding`: choose the loss of text embeddings by the flags and the columns of the rows,
and evaluate the embeddings of a split.
"""

import numpy as np
import torch
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn
from transformers import EvalPrediction

from hf_ga.embedding.losses import (
    CoSENT,
    InfoNCE,
    Matryoshka,
    WindowLoss,
    unit_vectors,
)
from hf_ga.embedding.model import LOG_TEMPERATURE
from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.data.encoding.pairs import names_of_texts
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.finetuning.run.run import Setup
from hf_ga.finetuning.run.scores.evaluation import (
    EVALUATION_WINDOW,
    evaluation_mode,
    run_forwards,
)
from hf_ga.finetuning.run.scores.readers import compute_user_metrics
from hf_ga.finetuning.run.scores.retrieval import MEASURES, retrieval_metrics, spearman
from hf_ga.loading.batches import MicroBatch
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.model.forward import argument_filter, callable_module
from hf_ga.parallel.fsdp import backend_for
from hf_ga.parallel.processes import call_on_main

# Column of texts, such as `anchor` -> their vectors, shape (samples, dim); a learned temperature is
# `log_temperature`, shape ().
Vectors = dict[str, Tensor]


def has_scores(data: PreparedData) -> bool:
    """Return whether the rows of `--task embedding` are pairs of texts with a similarity score. If
    not, they are anchors with their positives.
    """
    return "label" in data.columns


def window_loss(config: FinetuneConfig, data: PreparedData) -> WindowLoss:
    """Return the loss of `--task embedding`: CoSENT for pairs with a score, otherwise InfoNCE. With
    the flag `matryoshka_dims`, it is the sum of this loss over vectors truncated to these sizes.
    """
    temperature = config.initial_temperature
    loss: WindowLoss = InfoNCE(temperature, symmetric=config.symmetric_loss)
    if has_scores(data):
        loss = CoSENT(temperature)
    if config.matryoshka_dims is None:
        return loss
    return Matryoshka(loss, sizes=tuple(config.matryoshka_dims))


def check_embedding(setup: Setup) -> None:
    """Check that flags, rows and model of `--task embedding` fit each other.

    Args:
        setup: The setup of the run.

    Raises:
        ConfigError: If a flag or a metric needs the other kind of rows (pairs with a score, or
            anchors with positives), one of `matryoshka_dims` is larger than the model's vectors,
            or the user passes `preprocess_logits_for_metrics`.
    """
    config = setup.config
    if setup.preprocess_logits_for_metrics is not None:
        raise ConfigError(
            "preprocess_logits_for_metrics is for logits, but the task embedding has vectors: omit "
            "it; compute_metrics gets the vectors of the whole split."
        )
    hidden_size = setup.model_config.get_text_config().hidden_size
    too_large = [dim for dim in config.matryoshka_dims or () if dim > hidden_size]
    if too_large:
        raise ConfigError(
            f"matryoshka_dims {too_large[0]} is beyond the {hidden_size} numbers of the model's "
            f"vectors: use at most {hidden_size}."
        )
    are_scored = has_scores(setup.data)
    for flag in ("learn_temperature", "symmetric_loss"):
        if are_scored and getattr(config, flag):
            raise ConfigError(
                f"{flag} is for anchors with positives, but the rows are pairs with a score (the "
                f"column {setup.data.columns['label']!r}): omit it."
            )
    metric = config.metric_for_best_model
    rows = "pairs with a score" if are_scored else "anchors with positives"
    possible = ["spearman"] if are_scored else list(MEASURES)
    if metric in {"spearman", *MEASURES} - set(possible):
        raise ConfigError(
            f"metric_for_best_model {metric} cannot be computed from {rows}: use loss or "
            f"{', '.join(possible)}."
        )


@torch.no_grad()
def evaluate_embeddings(
    setup: Setup, model: nn.Module, windows: WindowLoader, split: str
) -> dict[str, float]:
    """Compute loss and metrics of a model's text embeddings on a split, for `--task embedding`.

    All ranks must call it, and all return the same numbers. The model is in evaluation mode
    meanwhile; the modes of its modules are restored.

    The loss is the mean over groups of 256 consecutive samples (`EVALUATION_WINDOW`): each anchor
    is compared with the positives and negatives of its group. The metrics search the whole split.

    Args:
        setup: The setup of the run.
        model: The prepared model.
        windows: The loader of the split, see `evaluation_windows`.
        split: The name of the split.

    Returns:
        `loss`, `num_targets` (the number of samples) and the metrics.
    """
    backend = backend_for(setup.accelerator)
    module = callable_module(model)
    arguments = argument_filter(model)

    def embed(batch: dict[str, Tensor], micro_batch: MicroBatch) -> Vectors:
        """Compute the text vectors of a micro-batch in float32, and copy them to the CPU."""
        with backend.autocast():
            outputs = module(**arguments(batch))
        return {name: value.float().cpu() for name, value in outputs.items()}

    with evaluation_mode(backend, model):
        forwards = run_forwards(backend, windows, embed)
        local_vectors = [(micro_batch.sample_ids, vectors) for micro_batch, vectors in forwards]
    gathered = gather_object(local_vectors)
    return call_on_main(setup.accelerator, _compute_results, setup, gathered, split)


def _join_vectors(micro_batches: list[tuple[np.ndarray, Vectors]]) -> tuple[Vectors, Vectors]:
    """Concatenate the text vectors of all micro-batches of an evaluation of `--task embedding`,
    each with the indices of its samples, in the order of the split; and return the scalars, which
    are the same in all micro-batches: a learned temperature.
    """
    sample_ids, outputs = zip(*micro_batches, strict=True)
    order = torch.from_numpy(np.argsort(np.concatenate(sample_ids)))
    joined = {}
    scalars = {}
    for name, value in outputs[0].items():
        if value.dim() > 0:
            joined[name] = torch.cat([vectors[name] for vectors in outputs])[order]
        else:
            scalars[name] = value
    return joined, scalars


def _compute_results(
    setup: Setup, micro_batches: list[tuple[np.ndarray, Vectors]], split: str
) -> dict[str, float]:
    """Compute loss and metrics from the text embeddings of a split, for `--task embedding`: the
    metrics of the task or, if there is one, those of the user's `compute_metrics` instead.
    """
    data = setup.data
    dataset = data.splits[split]
    joined = _join_vectors(micro_batches)
    vectors, scalars = send_to_device(joined, setup.accelerator.device)
    text_ids = torch.tensor(dataset["text_ids"][:])
    batch: dict[str, Tensor] = {}
    for index, name in enumerate(names_of_texts(text_ids.shape[1])):
        batch[f"text_id_{name}"] = text_ids[:, index]
    if has_scores(data):
        batch["score"] = torch.tensor(dataset["label"][:], dtype=torch.float32)
    loss = _mean_loss(window_loss(setup.config, data), vectors, scalars, batch)
    results = {"loss": loss, "num_targets": float(len(dataset))}
    if setup.compute_metrics is not None:
        arrays = tuple(value.cpu().numpy() for value in vectors.values())
        scores = batch["score"].numpy() if has_scores(data) else None
        return compute_user_metrics(setup, EvalPrediction(arrays, scores)) | results
    return results | _compute_metrics(vectors, batch)


def _mean_loss(
    loss: WindowLoss, vectors: Vectors, scalars: Vectors, batch: dict[str, Tensor]
) -> float:
    """Compute, in an evaluation of `--task embedding`, the loss of each group of 256 consecutive
    samples, and return the mean, weighted by the number of samples in a group.
    """
    device = vectors["anchor"].device
    num_samples = len(vectors["anchor"])
    total = 0.0
    for start in range(0, num_samples, EVALUATION_WINDOW):
        group = slice(start, start + EVALUATION_WINDOW)
        of_group = {name: value[group] for name, value in vectors.items()}
        group_batch = {name: value[group].to(device) for name, value in batch.items()}
        total += float(loss(of_group | scalars, group_batch)) * len(of_group["anchor"])
    return total / num_samples


def _compute_metrics(vectors: Vectors, batch: dict[str, Tensor]) -> dict[str, float]:
    """Compute the metrics of `--task embedding` for a split: Spearman's correlation for pairs with
    a score, otherwise retrieval metrics.
    """
    units = {name: unit_vectors(value) for name, value in vectors.items()}
    if "score" in batch:
        return {"spearman": spearman(units["anchor"], units["positive"], batch["score"])}
    document_columns = [name for name in units if name != "anchor"]
    return retrieval_metrics(
        queries=units["anchor"],
        documents=torch.cat([units[name] for name in document_columns]),
        query_ids=batch["text_id_anchor"],
        document_ids=torch.cat([batch[f"text_id_{name}"] for name in document_columns]),
    )


def learned_temperature(weights: dict[str, Tensor]) -> float | None:
    """Return, for summary.json, the temperature of the embedding loss from a trained model's state
    dict, or None if the model has no learned temperature.
    """
    log_temperature = weights.get(LOG_TEMPERATURE)
    if log_temperature is None:
        return None
    return float(log_temperature.float().exp())
