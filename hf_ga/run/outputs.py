"""What a run leaves in its folder beside metrics and checkpoints: models in the type in which they came, summary, plot."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from hf_ga.data.data import PreparedData
from hf_ga.exact.forward import unwrapped
from hf_ga.recovery.files import flush, flush_tree, publish, tidy, write_json
from hf_ga.recovery.latest import keep_newest, set_latest
from hf_ga.recovery.manifest import read_manifest
from hf_ga.recovery.write_errors import filling, writing
from hf_ga.run.adapters import is_lora
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.report import plot_curves, read_metrics


def prepare_output_dir(config: FinetuneConfig, checkpoint: Path | None) -> None:
    """Make the folder, without what a run that goes on from this checkpoint has left of later steps."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder, folder):
        tidy(folder)
        if checkpoint is not None and checkpoint.resolve().parent == folder.resolve():
            own = folder / checkpoint.resolve().name
            set_latest(own)  # checkpoints of later steps are of a future that is given up
            keep_newest(folder, read_manifest(own)["step"], config.save_total_limit)  # it was killed before it came to that
        else:
            (folder / "metrics.jsonl").unlink(missing_ok=True)


def save_best(
    folder: Path, model: nn.Module, data: PreparedData, dtype: torch.dtype, weights: dict[str, Tensor] | None = None
) -> None:
    """The model as it stands, with its tokenizer, whole or not at all; of LoRA the adapters only. For the main process.

    Args:
        weights: the whole `state_dict()`, where that of the model holds shards.

    Raises:
        CheckpointError: the disk is full, or the like. What was there before is kept.
    """
    with filling(folder) as partial:
        if is_lora(model):
            unwrapped(model).save_pretrained(partial)
        else:
            _save(partial, unwrapped(model), dtype, weights)
        data.tokenizer.save_pretrained(partial)
        publish(folder)


def save_last(
    folder: Path, model: nn.Module, data: PreparedData, dtype: torch.dtype, weights: dict[str, Tensor] | None = None
) -> None:
    """The trained model as `from_pretrained` loads it, among the run's other files; see `save_best`. LoRA adapters go to `adapter/`
    and are merged: the model is used up.
    """
    plain: Any = unwrapped(model)
    if is_lora(model):
        with filling(folder / "adapter") as partial:
            plain.save_pretrained(partial)
            publish(folder / "adapter")
        plain = plain.merge_and_unload(safe_merge=True)
    with filling(folder / "last", names=folder / SAFE_WEIGHTS_NAME) as partial:
        _save(partial, plain, dtype, weights)
        data.tokenizer.save_pretrained(partial)
        flush_tree(partial)
        for earlier in (folder / CONFIG_NAME, *folder.glob("model*.safetensors*")):  # of a run that goes on, or ends again
            earlier.unlink(missing_ok=True)
            flush(folder)
        for path in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG_NAME):  # config.json last: nothing loads by half
            path.replace(folder / path.name)
            flush(folder)
        partial.rmdir()


def write_reports(folder: Path, summary: dict[str, Any]) -> None:
    """curves.png and summary.json."""
    title = f"{summary['config']['task']}: validation loss {summary['eval_loss']:.4f} after {summary['steps']} steps"
    with writing(folder / "curves.png", folder):
        plot_curves(read_metrics(folder / "metrics.jsonl"), folder / "curves.png", title)
    with writing(folder / "summary.json", folder):
        write_json(folder / "summary.json", summary)  # last: where it is, the run is over


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
