"""Check that a saved model is the trained one: load its folder as a user would, and compare all of
its tensors, and its outputs for a few rows, with those of the trained model.
"""

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import send_to_device
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ga.embedding.layout import saved_pooling
from hf_ga.embedding.model import LOG_TEMPERATURE, EmbeddingModel
from hf_ga.errors import SavedModelDiffers
from hf_ga.finetuning.run.build import samples_to_try
from hf_ga.finetuning.run.model.adapters import is_lora, keep_4_bit_layout
from hf_ga.finetuning.run.model.models import (
    compute_dtype,
    load_model,
    loading_dtype,
    quiet_transformers,
)
from hf_ga.finetuning.run.run import Setup
from hf_ga.loading.batches import as_batch
from hf_ga.loading.memory import is_out_of_memory
from hf_ga.model.forward import (
    Batch,
    argument_filter,
    callable_module,
    force_eager,
    restored_modes,
    unwrapped,
)
from hf_ga.model.outputs import named_tensors
from hf_ga.parallel.fsdp import unwrapped_name
from hf_ga.recovery.latest import newest

# `relative_error`, `tolerance` and `rows`: the result of a check in summary.json.
CheckResult = dict[str, float]
Outputs = dict[str, Tensor]
Weights = Mapping[str, Tensor]

NUM_ROWS = 4
MAX_LOGIT_POSITIONS = 64  # maximum number of positions for which a decoder computes logits
MAX_LISTED_TENSORS = 5  # maximum number of tensors that an error message names
# What rounding in the forward may change in float32.
FLOAT32_TOLERANCE = 1e-4
TF32_ROUNDING = 2.0**-11
# As many as 256 independent roundings add up to: the root of their number.
ADDED_ROUNDINGS = 16


@dataclass(frozen=True)
class Expected:
    """A few inputs of a run's trained model, and its outputs for them. The model that is loaded
    from the saved folder must have the same outputs.

    Attributes:
        batch: A few training rows, on the CPU.
        outputs: The trained model's outputs for them by name, such as `logits`: float32, on the
            CPU.
    """

    batch: Batch
    outputs: Outputs


def expected_outputs(setup: Setup, model: nn.Module) -> Expected:
    """Compute the outputs of a run's model for a few training rows before it is saved. The model
    that is loaded from the saved folder is then compared with them.

    All processes must call it: under FSDP, a forward is a collective. The rows range from the
    shortest to one of median length, and are at most one evaluation batch, which fits into memory.

    Args:
        setup: The setup of the run.
        model: The prepared model.
    """
    samples = samples_to_try(setup.data)  # sorted by length
    num_rows = min(NUM_ROWS, len(samples), setup.config.per_device_eval_batch_size)
    indices = np.linspace(0, len(samples) // 2, num_rows).astype(int)
    batch = as_batch(setup.data.collate([samples[i] for i in indices]))
    outputs = _compute_outputs(setup, model, batch, setup.accelerator.device)
    return Expected(batch, outputs)


def check_saved(
    setup: Setup, folder: Path, model: nn.Module, weights: Weights, expected: Expected
) -> CheckResult | None:
    """Load a model or a LoRA adapter that a run saved, as a user would, and compare it with the
    trained model.

    The base of an adapter is loaded in its own dtype (QLoRA: in 4 bits). Call on the main process
    only. It needs memory for one more model.

    Args:
        setup: The setup of the run.
        folder: The folder of the saved model or adapter.
        model: The trained model.
        weights: Its full `state_dict()`.
        expected: The result of `expected_outputs` for the trained model.

    Returns:
        `relative_error` of the outputs, its `tolerance`, and the number of `rows`; None for an
        adapter of a base model with random initial weights, which is not saved.

    Raises:
        SavedModelDiffers: If a tensor is missing or differs by more than its rounding to the saved
            dtype, the model has another dtype, or the outputs differ by more than the tolerance.
    """
    is_adapter = is_lora(model)
    if is_adapter and setup.config.model_name_or_path is None:
        return None
    try:
        with _loading():
            load = _load_adapter if is_adapter else _load_saved_model
            loaded = load(setup, folder)
        found = loaded.state_dict()
        if is_adapter:
            trained_names = {
                unwrapped_name(name)
                for name, parameter in unwrapped(model).named_parameters()
                if parameter.requires_grad
            }
            trained = {name: weights[name] for name in trained_names}
            found = {name: tensor for name, tensor in found.items() if name in trained_names}
        else:
            if loaded.config.dtype != setup.dtype:
                raise SavedModelDiffers(f"it loads in {loaded.config.dtype}, not in {setup.dtype}")
            # The temperature of an embedding loss is not part of the saved model.
            trained = {name: tensor for name, tensor in weights.items() if name != LOG_TEMPERATURE}
        _compare_tensors(found, trained)
        has_float32_base = loading_dtype(setup) == torch.float32 and not setup.config.load_in_4bit
        if has_float32_base or not is_adapter:
            loaded = loaded.float()  # as in training
        return _compare_outputs(setup, loaded, trained, expected)
    except SavedModelDiffers as difference:
        raise _with_remedy(setup, folder, difference) from difference


def _load_adapter(setup: Setup, folder: Path) -> nn.Module:
    """Load the LoRA adapter that a run saved in a folder, on its base model."""
    import peft

    dtype = loading_dtype(setup) if setup.config.load_in_4bit else setup.dtype
    base_model, _ = load_model(setup, dtype=dtype)
    loaded = peft.PeftModel.from_pretrained(base_model, str(folder))
    keep_4_bit_layout(loaded)
    return loaded


def _load_saved_model(setup: Setup, folder: Path) -> PreTrainedModel | EmbeddingModel:
    """Load the model that a run saved in a folder, as a user would, on the CPU."""
    model = setup.data.task.auto_class.from_pretrained(
        folder, trust_remote_code=setup.config.trust_remote_code
    )
    if setup.config.task == "embedding":
        pooling = saved_pooling(str(folder)) or "mean"
        model = EmbeddingModel(model, pooling)
    return model


@contextmanager
def _loading() -> Iterator[None]:
    """Turn an error of the block, which loads the model that a run saved, into SavedModelDiffers.
    Out-of-memory errors are raised unchanged.
    """
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers(), warnings.catch_warnings():
            # `_compare_tensors` names missing weights.
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SavedModelDiffers(f"it cannot be loaded ({reason})") from error


def _compare_tensors(loaded: Weights, trained: Weights) -> None:
    """Check that the model that a run saved has the names, shapes and values of the trained model's
    tensors, in its dtypes.
    """
    differences = dict.fromkeys(trained.keys() - loaded.keys(), "missing")
    differences |= dict.fromkeys(loaded.keys() - trained.keys(), "not of the trained model")
    for name in trained.keys() & loaded.keys():
        found = loaded[name]
        expected = trained[name].to(found)
        if found.shape != expected.shape:
            differences[name] = f"shape {list(found.shape)}, not {list(expected.shape)}"
        elif not torch.equal(found, expected):
            differences[name] = "other values"
    if differences:
        listed = sorted(differences.items())[:MAX_LISTED_TENSORS]
        text = ", ".join(f"{name} ({difference})" for name, difference in listed)
        if len(differences) > len(listed):
            text += f", and {len(differences) - len(listed)} more"
        raise SavedModelDiffers(f"tensors differ: {text}")


def _compare_outputs(
    setup: Setup, loaded: nn.Module, trained: Weights, expected: Expected
) -> CheckResult:
    """Check that the outputs of the model that a run saved are those of the trained model, up to
    rounding: of its weights, which is measured, and in the forward.
    """
    outputs = _outputs_where_it_fits(setup, loaded, expected.batch)
    error = relative_error(outputs, expected.outputs)
    tolerance = FLOAT32_TOLERANCE
    precision = compute_dtype(setup)
    if precision != torch.float32:
        tolerance += ADDED_ROUNDINGS * torch.finfo(precision).eps / 2
    elif setup.config.tf32:
        tolerance += ADDED_ROUNDINGS * TF32_ROUNDING
    if setup.dtype != torch.float32:
        device = next(loaded.parameters()).device
        loaded.load_state_dict(trained, strict=False)
        exact_outputs = _compute_outputs(setup, loaded, expected.batch, device)
        tolerance += relative_error(outputs, exact_outputs)
    if not error <= tolerance:
        raise SavedModelDiffers(
            "its weights are those that were saved, but the relative error of its outputs "
            f"({', '.join(expected.outputs)}) is {error:.1e}, more than the {tolerance:.1e} of "
            "rounding"
        )
    num_rows = len(next(iter(expected.outputs.values())))
    return {"relative_error": error, "tolerance": tolerance, "rows": num_rows}


def _outputs_where_it_fits(setup: Setup, loaded: nn.Module, batch: Batch) -> Outputs:
    """Compute the outputs of a run's saved model, loaded again, on the run's device, or on the CPU
    if the device has not enough memory for a second model.
    """
    device = setup.accelerator.device
    # bitsandbytes has loaded a 4-bit model onto the device already.
    if setup.config.load_in_4bit and is_lora(loaded):
        return _compute_outputs(setup, loaded, batch, device)
    try:
        return _compute_outputs(setup, loaded.to(device), batch, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    clear_device_cache()
    return _compute_outputs(setup, loaded.cpu(), batch, torch.device("cpu"))


@torch.no_grad()
def _compute_outputs(setup: Setup, model: nn.Module, batch: Batch, device: torch.device) -> Outputs:
    """Run a model in evaluation mode and return its floating-point outputs, except scalars, in
    float32 on the CPU, to compare the trained model of a run with the saved one.
    """
    plain_model = unwrapped(model)
    if is_lora(plain_model):
        plain_model = plain_model.get_base_model()
    inputs = argument_filter(plain_model)(batch)
    if "logits_to_keep" in inspect.signature(type(plain_model).forward).parameters:
        sequence_length = inputs["input_ids"].shape[1]
        step = math.ceil(sequence_length / MAX_LOGIT_POSITIONS)
        inputs["logits_to_keep"] = torch.arange(0, sequence_length, step)
        # The loss would need the logits of all positions.
        inputs.pop("labels", None)
    with restored_modes(model), force_eager(), setup.accelerator.autocast():
        model.eval()
        outputs = callable_module(model)(**send_to_device(inputs, device))
    return {
        name: value.float().cpu()
        for name, value in named_tensors(outputs).items()
        if value.is_floating_point() and value.dim()
    }


def relative_error(found: Outputs, expected: Outputs) -> float:
    """Return the largest relative L2 error of the outputs of a run's saved model; infinity if their
    names, shapes, NaNs or infinite entries differ.

    Args:
        found: The outputs of the loaded model by name.
        expected: The outputs of the trained model by name.

    >>> relative_error({"logits": torch.tensor([3.0, 5.0])}, {"logits": torch.tensor([3.0, 4.0])})
    0.2
    """
    if found.keys() != expected.keys():
        return math.inf
    return max(_relative_distance(found[name], expected[name]) for name in expected)


def _relative_distance(found: Tensor, expected: Tensor) -> float:
    """Return the L2 norm of the difference between an output of a run's saved model and that of the
    trained one, divided by the norm of the latter.
    """
    if found.shape != expected.shape:
        return math.inf
    is_finite = expected.isfinite()
    if not torch.allclose(found[~is_finite], expected[~is_finite], equal_nan=True):
        return math.inf
    distance = (found - expected)[is_finite].double().norm()
    norm = expected[is_finite].double().norm()
    error = float(distance / norm.clamp(min=torch.finfo(torch.float32).tiny))
    return math.inf if math.isnan(error) else error


def _with_remedy(setup: Setup, folder: Path, difference: SavedModelDiffers) -> SavedModelDiffers:
    """Build the error of a run for a saved folder that does not contain the trained model, with a
    remedy.
    """
    checkpoint = newest(setup.output_dir)
    remedy = "There is no checkpoint yet: update transformers and peft, or train other adapters."
    if checkpoint is not None:
        remedy = (
            f"The checkpoint {checkpoint} is kept: update transformers and peft, or correct the "
            "model's own code, and resume with --resume_from_checkpoint auto, which saves the "
            "model again; or train with other adapters."
        )
    return SavedModelDiffers(
        f"{folder} is not the trained model: {difference}. Do not use this folder. {remedy}"
    )
