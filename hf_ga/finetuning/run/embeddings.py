"""`--task embedding`: the loss of a window by the flags and the columns, and the evaluation of all
vectors of a split.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import EvalPrediction

from hf_ga.embedding.losses import CoSENT, InfoNCE, Matryoshka, WindowLoss, shortened, unit_vectors
from hf_ga.embedding.model import LOG_TEMPERATURE
from hf_ga.errors import ConfigError
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import restored_modes
from hf_ga.exact.hooks import Hook
from hf_ga.exact.rule import Rule
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.data.pairs import names_of_texts
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.finetuning.run.evaluation import EVALUATION_WINDOW
from hf_ga.finetuning.run.readers import compute_user_metrics
from hf_ga.finetuning.run.retrieval import MEASURES, retrieval_metrics, spearman
from hf_ga.finetuning.run.run import Setup
from hf_ga.parallel.fsdp import backend_for
from hf_ga.parallel.processes import broadcast_from_main, raise_on_all_ranks

# Column -> vectors of all samples of a split; also `log_temperature`.
Vectors = dict[str, Tensor]
# Indices of samples in the split, and their outputs.
Share = tuple[np.ndarray, Vectors]


def has_scores(data: PreparedData) -> bool:
    """Whether the rows are pairs with a score; else an anchor and its positive."""
    return "label" in data.columns


def window_loss(config: FinetuneConfig, data: PreparedData) -> WindowLoss:
    """Return the loss of a window: CoSENT for pairs with a score, InfoNCE for others; summed over
    `matryoshka_dims`.
    """
    temperature = config.initial_temperature
    loss: WindowLoss = InfoNCE(temperature, symmetric=config.symmetric_loss)
    if has_scores(data):
        loss = CoSENT(temperature)
    if config.matryoshka_dims is None:
        return loss
    return Matryoshka(loss, sizes=tuple(config.matryoshka_dims))


def check_embedding(setup: Setup) -> None:
    """Check that flags, columns and model fit.

    Args:
        setup: What the parts of the run share.

    Raises:
        ConfigError: If a flag or a metric is for the other kind of rows, a size is beyond that of
            the model's vectors, the model is an encoder-decoder, or a function is for logits.
    """
    config = setup.config
    model_config = setup.model_config
    if setup.preprocess_logits_for_metrics is not None:
        raise ConfigError(
            "preprocess_logits_for_metrics is for logits, but the task embedding has vectors: omit "
            "it; compute_metrics gets the vectors of the whole split."
        )
    if model_config.is_encoder_decoder:
        raise ConfigError(
            f"embeddings need an encoder or a decoder, but {model_config.model_type} has both: use "
            "another model."
        )
    size = model_config.get_text_config().hidden_size
    too_large = [dim for dim in config.matryoshka_dims or () if dim > size]
    if too_large:
        raise ConfigError(
            f"matryoshka_dims {too_large[0]} is beyond the {size} numbers of the model's vectors: "
            f"use at most {size}."
        )
    scored = has_scores(setup.data)
    for name in ("learn_temperature", "symmetric_loss"):
        if scored and getattr(config, name):
            raise ConfigError(
                f"{name} is for anchors with positives, but the rows are pairs with a score (the "
                f"column {setup.data.columns['label']!r}): omit it."
            )
    _check_metric(config.metric_for_best_model, scored)


def _check_metric(metric: str, scored: bool) -> None:
    """Raise ConfigError if the rows do not have what a metric needs.

    Args:
        metric: `metric_for_best_model`.
        scored: Whether the rows are pairs with a score.
    """
    if scored:
        kind = "pairs with a score"
        known = "spearman"
        is_known = metric not in MEASURES
    else:
        kind = "anchors with positives"
        known = ", ".join(MEASURES)
        is_known = metric != "spearman"
    if not is_known:
        raise ConfigError(
            f"metric_for_best_model {metric} cannot be computed from {kind}: use loss or {known}."
        )


@torch.no_grad()
def evaluate_embeddings(
    setup: Setup, model: nn.Module, windows: WindowLoader, rule: Rule, split: str
) -> dict[str, float]:
    """Compute loss and metrics of a split in evaluation mode. All ranks must call it; all return
    the same numbers.

    The loss is the mean over groups of 256 consecutive samples (`EVALUATION_WINDOW`), which
    compares each anchor with the positives of its group. The metrics search the whole split.

    Args:
        setup: What the parts of the run share.
        model: The prepared model.
        windows: The windows of the split, see `evaluation_windows`.
        rule: What was proven about the model.
        split: The split to evaluate.

    Returns:
        `loss`, `num_targets` and the metrics; for shorter vectors of `matryoshka_dims` also
        `ndcg_at_10_dim_64` or `spearman_dim_64`.
    """
    windows.set_epoch(0)
    without_dropout = replace(rule, dropout=Hook(), speed_ups=())
    engine = Engine(backend_for(setup.accelerator), model, without_dropout)
    with restored_modes(model):
        model.eval()
        shares = [share for window in windows for share in _shares(engine, window)]
    shares = gather_object(shares)
    results: dict[str, float] = {}
    with raise_on_all_ranks(setup.accelerator):
        if setup.accelerator.is_main_process:
            results = _results(setup, _in_order(shares), split)
    return broadcast_from_main(setup.accelerator, results)


def _shares(engine: Engine, window: Window) -> Iterator[Share]:
    """Yield the outputs of this rank's micro-batches, on the host. Under FSDP, where forwards are
    collectives, all ranks run equally many.
    """
    engine.begin(window, training=False, skip_empty=False)
    for index in range(len(engine.calls)):
        with engine.scope(), engine.micro_batch(index) as batch:
            outputs = engine.forward(batch)
        if engine.call.weight:
            on_host = {name: value.float().cpu() for name, value in outputs.items()}
            yield engine.call.micro_batch.sample_ids, on_host


def _in_order(shares: list[Share]) -> Vectors:
    """Join the outputs of all samples in the order of the split."""
    sample_ids = np.concatenate([ids for ids, _ in shares])
    order = torch.from_numpy(np.argsort(sample_ids))
    _, first_outputs = shares[0]
    joined = {}
    for name, value in first_outputs.items():
        if value.dim():
            joined[name] = torch.cat([outputs[name] for _, outputs in shares])[order]
        else:
            # The learned temperature, which is the same in all micro-batches.
            joined[name] = value
    return joined


def _results(setup: Setup, vectors: Vectors, split: str) -> dict[str, float]:
    """Compute loss and metrics of the vectors of a split, see `evaluate_embeddings`."""
    data = setup.data
    dataset = data.splits[split]
    vectors = {name: value.to(setup.accelerator.device) for name, value in vectors.items()}
    ids = torch.tensor(dataset["text_ids"][:])
    batch = {f"text_id_{name}": ids[:, i] for i, name in enumerate(names_of_texts(ids.shape[1]))}
    if has_scores(data):
        batch["score"] = torch.tensor(dataset["label"][:], dtype=torch.float32)
    loss = _mean_loss(window_loss(setup.config, data), vectors, batch)
    results = {"loss": loss, "num_targets": float(len(dataset))}
    if setup.compute_metrics is not None:
        arrays = tuple(v.cpu().numpy() for name, v in vectors.items() if v.dim())
        scores = batch["score"].numpy() if has_scores(data) else None
        return compute_user_metrics(setup, EvalPrediction(arrays, scores)) | results
    results |= _metrics(vectors, batch)
    size = vectors["anchor"].shape[-1]
    for dim in setup.config.matryoshka_dims or ():
        if dim < size:
            found = _metrics(shortened(vectors, dim), batch)
            main = "spearman" if has_scores(data) else "ndcg_at_10"
            results[f"{main}_dim_{dim}"] = found[main]
    return results


def _mean_loss(loss: WindowLoss, vectors: Vectors, batch: dict[str, Tensor]) -> float:
    """Average the losses of groups of consecutive samples, weighted by their number of samples."""
    device = vectors["anchor"].device
    num_samples = len(vectors["anchor"])
    total = 0.0
    for start in range(0, num_samples, EVALUATION_WINDOW):
        own = slice(start, start + EVALUATION_WINDOW)
        outputs = {name: value[own] if value.dim() else value for name, value in vectors.items()}
        of_group = {name: value[own].to(device) for name, value in batch.items()}
        total += float(loss(outputs, of_group)) * len(outputs["anchor"])
    return total / num_samples


def _metrics(vectors: Vectors, batch: dict[str, Tensor]) -> dict[str, float]:
    """Compute the metrics of a split: rank correlation of pairs with a score, or retrieval."""
    units = {name: unit_vectors(value) for name, value in vectors.items() if value.dim()}
    if "score" in batch:
        return {"spearman": spearman(units["anchor"], units["positive"], batch["score"])}
    candidates = [name for name in units if name != "anchor"]
    return retrieval_metrics(
        units["anchor"],
        torch.cat([units[name] for name in candidates]),
        batch["text_id_anchor"],
        torch.cat([batch[f"text_id_{name}"] for name in candidates]),
    )


def learned_temperature(weights: dict[str, Tensor]) -> float | None:
    """Return the temperature among a model's weights; None if it is not learned."""
    found = weights.get(LOG_TEMPERATURE)
    if found is None:
        return None
    return float(found.float().exp())
