"""Write the outputs of a run besides metrics.jsonl and checkpoints: the best and the trained model,
each checked by loading it again, the summary, and the plot of the curves.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from hf_ga.finetuning.run.build import mergeable
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.finetuning.run.model.adapters import is_lora, merge_adapters, save_adapter
from hf_ga.finetuning.run.model.reload import (
    CheckResult,
    Expected,
    check_saved,
    expected_outputs,
)
from hf_ga.finetuning.run.results.report import plot_curves, read_metrics
from hf_ga.finetuning.run.run import Run, Setup
from hf_ga.model.forward import unwrapped
from hf_ga.parallel.fsdp import is_sharded, unwrapped_name
from hf_ga.parallel.prepare import full_state_dict
from hf_ga.parallel.processes import call_on_main, raise_on_all_ranks
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
    """Create the output folder of a fine-tuning run, and remove incomplete files that a crash left
    there. If the run resumes from a checkpoint in this folder, make it the latest and delete
    surplus ones; otherwise delete an earlier metrics.jsonl.

    Args:
        config: The configuration of the run.
        checkpoint: The checkpoint to resume from, which may be in another folder, or None.

    Raises:
        CheckpointError: If the folder cannot be written.
    """
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder, folder):
        tidy(folder)
        if checkpoint is None or checkpoint.resolve().parent != folder.resolve():
            (folder / "metrics.jsonl").unlink(missing_ok=True)
            return
        resumed = folder / checkpoint.resolve().name
        # Later checkpoints are no longer used.
        set_latest(resumed)
        # The run may have been killed after it saved this checkpoint, before it deleted old ones.
        step = read_manifest(resumed)["step"]
        keep_newest(folder, step, config.save_total_limit)


def save_and_check_best(setup: Setup, model: nn.Module) -> CheckResult | None:
    """Save the best model of a run so far to `best/`, then load that folder again and compare it
    with the model. All processes must call it.

    Args:
        setup: The setup of the run.
        model: The prepared model.

    Returns:
        The result of the comparison for `summary.json`; None for adapters of a base model with
        random initial weights, which is not saved.

    Raises:
        CheckpointError: If a write fails; on all processes.
        SavedModelDiffers: If the loaded model is not the model in memory; on all processes.
    """
    expected = expected_outputs(setup, model)
    weights = save_best(setup, model)
    best = setup.output_dir / "best"
    return call_on_main(setup.accelerator, check_saved, setup, best, model, weights, expected)


def save_best(setup: Setup, model: nn.Module) -> dict[str, Tensor]:
    """Atomically save a run's model (with LoRA, the adapters only) and its tokenizer to `best/` in
    the output folder. All processes must call it.

    Args:
        setup: The setup of the run.
        model: The prepared model.

    Returns:
        The full state dict on the main process, an empty one on the others.

    Raises:
        CheckpointError: If a write fails, as on a full disk; on all processes. Earlier files are
            kept.
    """
    folder = setup.output_dir / "best"
    weights = full_state_dict(setup.accelerator, model)
    with raise_on_all_ranks(setup.accelerator):
        if setup.accelerator.is_main_process:
            with partial_folder(folder) as partial:
                if is_lora(model):
                    # PEFT finds no adapters in a model that FSDP1 has wrapped.
                    is_fsdp1 = is_sharded(setup.accelerator) and not setup.accelerator.is_fsdp2
                    peft_model = mergeable(setup, weights) if is_fsdp1 else model
                    save_adapter(partial, peft_model, weights, setup.config)
                else:
                    _save_in_original_dtype(partial, unwrapped(model), setup.dtype, weights)
                setup.data.tokenizer.save_pretrained(partial)
                publish(folder)
    return weights


def save_and_check_trained(
    run: Run, weights: dict[str, Tensor], expected: Expected
) -> dict[str, CheckResult | None]:
    """Save the trained model in the run's folder, then load it and compare it with the model in
    memory. Call on the main process only.

    With LoRA, first do the same with the adapters in `adapter/`, then merge them into the weights
    of the base model, in place, and save the merged model.

    Args:
        run: The finished run.
        weights: The full state dict of the trained model.
        expected: The result of `expected_outputs` for the trained model.

    Returns:
        Entries of `summary.json`: `saved_model` and, with LoRA, `saved_adapter`.

    Raises:
        CheckpointError: If a write fails.
        SavedModelDiffers: If a loaded model is not the trained model.
    """
    results: dict[str, CheckResult | None] = {}
    model: Any = unwrapped(run.model)
    if is_lora(model):
        folder = run.output_dir / "adapter"
        if is_sharded(run.accelerator) or run.config.load_in_4bit:
            model = mergeable(run, weights)
        with partial_folder(folder) as partial:
            save_adapter(partial, model, weights, run.config)
            publish(folder)
        results["saved_adapter"] = check_saved(run, folder, model, weights, expected)
        if run.config.load_in_4bit:
            # The merged model has the base in its original precision, not in 4 bits.
            expected = expected_outputs(run, model)
        model = merge_adapters(model)
        weights = model.state_dict()
    save_last(run, model, weights)
    results["saved_model"] = check_saved(run, run.output_dir, model, weights, expected)
    return results


def save_last(setup: Setup, model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Save the trained model and its tokenizer in the run's folder, to be loaded by
    `from_pretrained`. Call on the main process only.

    The folder has other contents, so files are written to a temporary folder and renamed one by
    one. config.json is deleted first and renamed last, so that a crash leaves no folder that loads
    as a mixture of old and new files.

    Args:
        setup: The setup of the run.
        model: The trained model without adapters.
        weights: Its full state dict.

    Raises:
        CheckpointError: If a write fails, as on a full disk. Earlier files are kept.
    """
    folder = setup.output_dir
    plain_model: Any = unwrapped(model)
    with partial_folder(folder / "last", path_in_error=folder / SAFE_WEIGHTS_NAME) as partial:
        _save_in_original_dtype(partial, plain_model, setup.dtype, weights)
        setup.data.tokenizer.save_pretrained(partial)
        flush_tree(partial)
        # A model that the run saved before it was resumed.
        for earlier in (folder / CONFIG_NAME, *folder.glob("model*.safetensors*")):
            earlier.unlink(missing_ok=True)
            flush(folder)
        # config.json comes last.
        for path in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG_NAME):
            # A folder cannot be renamed to the name of one that is not empty.
            if path.is_dir():
                delete(folder / path.name)
            path.replace(folder / path.name)
            flush(folder)
        partial.rmdir()


def write_reports(folder: Path, summary: dict[str, Any]) -> None:
    """Plot the curves in metrics.jsonl to curves.png, then write summary.json, which marks the run
    as finished.

    Args:
        folder: The folder of the run.
        summary: The content of summary.json.

    Raises:
        CheckpointError: If a write fails.
    """
    loss = summary["eval_loss"]
    title = (
        f"{summary['config']['task']}: validation loss {loss:.4f} after {summary['steps']} steps"
    )
    with writing(folder / "curves.png", folder):
        plot_curves(read_metrics(folder / "metrics.jsonl"), folder / "curves.png", title)
    with writing(folder / "summary.json", folder):
        write_json(folder / "summary.json", summary)


def _save_in_original_dtype(
    folder: Path, model: Any, dtype: torch.dtype, weights: dict[str, Tensor]
) -> None:
    """Save the model of a run, which is trained in float32, with its parameters in the dtype of the
    pretrained checkpoint.
    """
    buffers = {unwrapped_name(name) for name, _ in model.named_buffers()}
    saved = {
        name: tensor if name in buffers or not tensor.is_floating_point() else tensor.to(dtype)
        for name, tensor in weights.items()
    }
    # The names of a tied weight share one tensor, so that it is saved once.
    for name, source in model.all_tied_weights_keys.items():
        has_both = name in saved and source in saved
        if has_both and torch.equal(saved[name], saved[source]):
            saved[name] = saved[source]
    training_dtype = model.config.dtype
    model.save_pretrained(folder, state_dict=saved)
    # `save_pretrained` wrote the dtype of the model's parameters into config.json.
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    model.config.dtype = training_dtype
