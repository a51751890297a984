"""What a run leaves in its folder beside metrics and checkpoints: models in the type in which they came, summary, card, plot."""

import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import datasets
import torch
import transformers
from torch import Tensor, nn

from hf_ga.adapters import is_lora, merged, save_adapter
from hf_ga.config import FinetuneConfig
from hf_ga.data import PreparedData
from hf_ga.forward import unwrapped
from hf_ga.model_card import write_model_card
from hf_ga.report import plot_curves, read_metrics, write_json


def prepare_output_dir(config: FinetuneConfig, checkpoint: Path | None) -> None:
    """Make the folder. A run that goes on in another folder takes its earlier lines and its best model along."""
    folder = Path(config.output_dir)
    if config.overwrite_output_dir:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if checkpoint is None or checkpoint.resolve().parent == folder.resolve():
        return
    if (earlier := checkpoint.resolve().parent / "metrics.jsonl").is_file():
        shutil.copy(earlier, folder)
    if (best := checkpoint.resolve().parent / "best").is_dir():
        shutil.copytree(best, folder / "best", dirs_exist_ok=True)


def save_best(
    folder: Path, model: nn.Module, data: PreparedData, dtype: torch.dtype, weights: dict[str, Tensor] | None = None
) -> None:
    """The model as it stands, with its tokenizer; of LoRA the adapters only. For the main process.

    Args:
        weights: the whole `state_dict()`, where that of the model holds shards.
    """
    if is_lora(model):
        save_adapter(model, folder)
    else:
        _save(folder, unwrapped(model), dtype, weights)
    data.tokenizer.save_pretrained(folder)


def save_last(
    folder: Path, model: nn.Module, data: PreparedData, dtype: torch.dtype, weights: dict[str, Tensor] | None = None
) -> None:
    """The trained model as `from_pretrained` loads it; see `save_best`. LoRA adapters go to `adapter/` and are merged: the model is
    used up.
    """
    if is_lora(model):
        save_adapter(model, folder / "adapter")
        _save(folder, merged(model), dtype)
    else:
        _save(folder, unwrapped(model), dtype, weights)
    data.tokenizer.save_pretrained(folder)


def write_reports(config: FinetuneConfig, summary: dict[str, Any]) -> None:
    """summary.json, curves.png and the model cards."""
    folder = Path(config.output_dir)
    plot_curves(read_metrics(folder / "metrics.jsonl"), folder / "curves.png")
    write_json(folder / "summary.json", summary)
    for model in (folder, folder / "best", folder / "adapter"):
        if model.is_dir():
            write_model_card(config, summary, model)


def versions() -> dict[str, str]:
    """Of everything that a result may depend on."""
    modules = {"torch": torch, "transformers": transformers, "accelerate": accelerate, "datasets": datasets}
    return {"hf_ga": version("hf_ga"), "python": platform.python_version()} | {k: m.__version__ for k, m in modules.items()}


def _save(folder: Path, model: Any, dtype: torch.dtype, weights: dict[str, Tensor] | None = None) -> None:
    """In its own type: a model that came in bf16 goes in bf16. Buffers keep theirs."""
    buffers = {name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_buffers()}
    converted: dict[int, Tensor] = {}  # by address: a tensor that goes by two names stays one
    saved = {}
    for name, tensor in (model.state_dict() if weights is None else _tied(model, weights)).items():
        keeps = name in buffers or not tensor.is_floating_point()
        saved[name] = tensor if keeps else converted.setdefault(tensor.data_ptr(), tensor.to(dtype))
    trained = model.config.dtype
    model.save_pretrained(folder, state_dict=saved)
    model.config.dtype = dtype  # it has written that of the parameters
    model.config.save_pretrained(folder)
    model.config.dtype = trained


def _tied(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for weights that go by two names: of shards, each name was gathered by itself."""
    pairs = [(name, source) for name, source in model.all_tied_weights_keys.items() if name in weights and source in weights]
    return weights | {name: weights[source] for name, source in pairs if torch.equal(weights[name], weights[source])}
