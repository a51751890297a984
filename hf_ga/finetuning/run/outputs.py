"""Outputs of a run besides metrics and checkpoints: models in their original dtype, summary,
plot.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from hf_ga.exact.forward import unwrapped
from hf_ga.finetuning.run.adapters import is_lora, merge_adapters, save_adapter
from hf_ga.finetuning.run.build import mergeable
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.finetuning.run.reload import (
    Check,
    Expected,
    check_adapter,
    check_model,
    expected_outputs,
)
from hf_ga.finetuning.run.report import plot_curves, read_metrics
from hf_ga.finetuning.run.run import Run, Setup
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.prepare import full_state_dict
from hf_ga.parallel.processes import raise_on_all_ranks
from hf_ga.recovery.files import (
    delete,
    flush,
    flush_tree,
    partial_folder,
    publish,
    tidy,
    write_json,
    writing,
)
from hf_ga.recovery.latest import keep_newest, set_latest
from hf_ga.recovery.manifest import read_manifest


def prepare_output_dir(config: FinetuneConfig, checkpoint: Path | None) -> None:
    """Create the folder; on resume, remove outputs of steps after the checkpoint."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder, folder):
        tidy(folder)
        if checkpoint is not None and checkpoint.resolve().parent == folder.resolve():
            own = folder / checkpoint.resolve().name
            set_latest(own)  # later checkpoints are discarded
            keep_newest(
                folder, read_manifest(own)["step"], config.save_total_limit
            )  # it may have been killed before this
        else:
            (folder / "metrics.jsonl").unlink(missing_ok=True)


def save_and_check_best(setup: Setup, model: nn.Module) -> Check | None:
    """`save_best`, then load the folder and compare it with the model. All processes must call it.

    Returns:
        The result for `summary.json`; None on other processes.

    Raises:
        CheckpointError: See `save_best`.
        SavedModelDiffers: The folder is not the trained model; on all processes.
    """
    expected = expected_outputs(setup, model)
    weights = save_best(setup, model)
    check = None
    with raise_on_all_ranks(setup.accelerator):
        if setup.accelerator.is_main_process:
            folder = setup.output_dir / "best"
            check = _check(setup, folder, model, weights, expected)
    return check


def save_best(setup: Setup, model: nn.Module) -> dict[str, Tensor]:
    """Atomically save the current model (with LoRA, the adapters only) and its tokenizer to
    `best/`. All processes must call it.

    Returns:
        The full weights on the main process, nothing on others.

    Raises:
        CheckpointError: a failed write, such as a full disk; on all processes. Earlier files are
            kept.
    """
    folder = setup.output_dir / "best"
    weights = full_state_dict(setup.accelerator, model)
    with raise_on_all_ranks(setup.accelerator):
        if setup.accelerator.is_main_process:
            with partial_folder(folder) as partial:
                if is_lora(model):
                    whole = mergeable(setup, weights) if _hides_adapters(setup) else model
                    save_adapter(partial, whole, weights, setup.config)
                else:
                    _save(partial, unwrapped(model), setup.dtype, weights)
                setup.data.tokenizer.save_pretrained(partial)
                publish(folder)
    return weights


def _hides_adapters(setup: Setup) -> bool:
    """Whether PEFT finds no adapters in the model, as FSDP1's wrappers change their names."""
    return is_sharded(setup.accelerator) and not setup.accelerator.is_fsdp2


def save_and_check_trained(
    run: Run, weights: dict[str, Tensor], expected: Expected
) -> dict[str, Check | None]:
    """Save the trained model for `from_pretrained`; with LoRA, the adapters to `adapter/`, and the
    model with the adapters merged in place. Then load each again and compare. For the main process.

    Args:
        run: The finished run.
        weights: The full `state_dict()`.
        expected: What the trained model computes.

    Returns:
        Entries of `summary.json`.

    Raises:
        CheckpointError: See `save_last`.
        SavedModelDiffers: A folder is not the trained model.
    """
    checks: dict[str, Check | None] = {}
    model: Any = unwrapped(run.model)
    if is_lora(model):
        folder = run.output_dir / "adapter"
        if is_sharded(run.accelerator) or run.config.load_in_4bit:
            model = mergeable(run, weights)
        with partial_folder(folder) as partial:
            save_adapter(partial, model, weights, run.config)
            publish(folder)
        checks["saved_adapter"] = _check(run, folder, model, weights, expected)
        if run.config.load_in_4bit:  # the merged model has the base in its own precision
            expected = expected_outputs(run, model)
        model = merge_adapters(model)
        weights = model.state_dict()
    save_last(run, model, weights)
    checks["saved_model"] = check_model(run, run.output_dir, weights, expected)
    return checks


def _check(
    setup: Setup, folder: Path, model: nn.Module, weights: dict[str, Tensor], expected: Expected
) -> Check | None:
    if not is_lora(model):
        return check_model(setup, folder, weights, expected)
    if setup.config.model_name_or_path is None:  # a base that was drawn cannot be loaded
        return None
    return check_adapter(setup, folder, model, weights, expected)


def save_last(setup: Setup, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Save the trained model for `from_pretrained` in the run's folder. For the main process.

    Args:
        setup: Of the run.
        model: Without adapters.
        weights: The full `state_dict()`.

    Raises:
        CheckpointError: a failed write, such as a full disk. Earlier files are kept.
    """
    folder = setup.output_dir
    plain: Any = unwrapped(model)
    with partial_folder(folder / "last", path_in_error=folder / SAFE_WEIGHTS_NAME) as partial:
        _save(partial, plain, setup.dtype, weights)
        setup.data.tokenizer.save_pretrained(partial)
        flush_tree(partial)
        for earlier in (
            folder / CONFIG_NAME,
            *folder.glob("model*.safetensors*"),
        ):  # from before a resume
            earlier.unlink(missing_ok=True)
            flush(folder)
        for path in sorted(
            partial.iterdir(), key=lambda path: path.name == CONFIG_NAME
        ):  # config.json last: marks it complete
            if path.is_dir():  # a folder cannot be renamed onto a non-empty one
                delete(folder / path.name)
            path.replace(folder / path.name)
            flush(folder)
        partial.rmdir()


def write_reports(folder: Path, summary: dict[str, Any]) -> None:
    """Write curves.png and summary.json."""
    title = (
        f"{summary['config']['task']}: validation loss {summary['eval_loss']:.4f} after "
        f"{summary['steps']} steps"
    )
    with writing(folder / "curves.png", folder):
        plot_curves(read_metrics(folder / "metrics.jsonl"), folder / "curves.png", title)
    with writing(folder / "summary.json", folder):
        write_json(folder / "summary.json", summary)  # last: marks a finished run


def _save(folder: Path, model: Any, dtype: torch.dtype, weights: dict[str, Tensor]) -> None:
    """Save in the original dtype: a model loaded in bf16 is saved in bf16. Buffers keep their
    dtype.
    """
    buffers = {name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_buffers()}
    converted: dict[int, Tensor] = {}  # by address: tied tensors stay tied
    saved = {}
    for name, tensor in _tied(model, weights).items():
        keeps = name in buffers or not tensor.is_floating_point()
        saved[name] = tensor if keeps else converted.setdefault(tensor.data_ptr(), tensor.to(dtype))
    trained = model.config.dtype
    model.save_pretrained(folder, state_dict=saved)
    model.config.dtype = dtype  # save_pretrained sets the parameters' dtype
    model.config.save_pretrained(folder)
    model.config.dtype = trained


def _tied(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tie weights with two names, which are gathered separately from shards."""
    pairs = [
        (name, source)
        for name, source in model.all_tied_weights_keys.items()
        if name in weights and source in weights
    ]
    return weights | {
        name: weights[source]
        for name, source in pairs
        if torch.equal(weights[name], weights[source])
    }
