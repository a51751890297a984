"""Load a saved folder as a user would, and compare it with the trained model: its tensors one by
one, and its outputs on a few rows.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isnan
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
from hf_ga.exact.batches import Batch, as_batch
from hf_ga.exact.forward import (
    argument_filter,
    callable_module,
    force_eager,
    restored_modes,
    unwrapped,
)
from hf_ga.exact.memory import is_out_of_memory
from hf_ga.finetuning.run.adapters import is_lora, keep_4_bit_layout
from hf_ga.finetuning.run.build import proof_samples
from hf_ga.finetuning.run.models import base_dtype, compute_dtype, load_model, quiet_transformers
from hf_ga.finetuning.run.run import Setup
from hf_ga.recovery.latest import newest

Check = dict[str, float]  # the entry of summary.json
Outputs = dict[str, Tensor]
Weights = Mapping[str, Tensor]

NUM_ROWS = 4
NUM_POSITIONS = 64  # of which a decoder computes logits, at most
NUM_NAMES = 5  # of tensors in the message
# See `_tolerances`.
NUM_NUDGES = 4
SAFETY_FACTOR = 4
FLOAT32_TOLERANCE = 1e-4
FLOAT32_ROUNDING = 2.0**-21
TF32_ROUNDING = 2.0**-11


@dataclass(frozen=True)
class Expected:
    """What a saved folder must compute.

    Attributes:
        batch: A few training rows, on the host.
        outputs: Of the trained model for them, float32 on the host, by name.
    """

    batch: Batch
    outputs: Outputs


def expected_outputs(setup: Setup, model: nn.Module) -> Expected:
    """The trained model's outputs on a few training rows, from the shortest to one of median
    length; at most an evaluation batch, which fits into memory.

    All processes must call it before the model is saved: under FSDP, forwards are collectives.

    Args:
        setup: Of the run.
        model: The prepared model.
    """
    samples = proof_samples(setup.data, "train")
    num_rows = min(NUM_ROWS, len(samples), setup.config.per_device_eval_batch_size)
    chosen = np.linspace(0, len(samples) // 2, num_rows).astype(int)  # sorted by length
    batch = as_batch(setup.data.collate([samples[i] for i in chosen]))
    return Expected(batch, _outputs(setup, model, batch, setup.accelerator.device))


def check_model(setup: Setup, folder: Path, weights: Weights, expected: Expected) -> Check:
    """Load a model with `from_pretrained(folder)`, and compare it with the trained one. For the
    main process; needs memory for one more model.

    Args:
        setup: Of the run.
        folder: Of the saved model.
        weights: The full `state_dict()` of the trained model (with LoRA, of the merged one).
        expected: From `expected_outputs`.

    Returns:
        `relative_error` of the outputs, its `tolerance`, and the number of `rows`.

    Raises:
        SavedModelDiffers: If a tensor is missing or differs by more than its rounding to the saved
            dtype, the model has another dtype, or the outputs differ by more than the tolerance.
    """
    with _loading(setup, folder):
        loaded = _from_pretrained(setup, folder)
    if loaded.config.dtype != setup.dtype:
        what = f"it loads in {loaded.config.dtype}, not in {setup.dtype}"
        raise _differs(setup, folder, what)
    trained = {name: tensor for name, tensor in weights.items() if name != LOG_TEMPERATURE}
    saved_in = {name: setup.dtype for name, _ in loaded.named_parameters(remove_duplicate=False)}
    _compare_tensors(setup, folder, loaded.state_dict(), trained, saved_in)
    return _compare_outputs(setup, folder, loaded.float(), trained, expected)


def check_adapter(
    setup: Setup, folder: Path, model: nn.Module, weights: Weights, expected: Expected
) -> Check:
    """Load the base model in its own precision (QLoRA: in 4 bits) with `PeftModel.from_pretrained`,
    and compare it with the trained model. For the main process; needs memory for one more model.

    Args:
        setup: Of the run.
        folder: Of the saved adapter.
        model: The trained model.
        weights: Its full `state_dict()`.
        expected: From `expected_outputs`.

    Returns:
        As `check_model`.

    Raises:
        SavedModelDiffers: If a trained tensor is missing or differs, or the outputs differ by more
            than the tolerance.
    """
    import peft

    in_4_bits = setup.config.load_in_4bit
    with _loading(setup, folder):
        base, _ = load_model(setup, dtype=base_dtype(setup) if in_4_bits else setup.dtype)
        loaded = peft.PeftModel.from_pretrained(base, str(folder))
    keep_4_bit_layout(loaded)
    names = {
        name.replace("_fsdp_wrapped_module.", "")
        for name, parameter in unwrapped(model).named_parameters()
        if parameter.requires_grad
    }
    trained = {name: weights[name] for name in names}
    found = {name: tensor for name, tensor in loaded.state_dict().items() if name in names}
    _compare_tensors(setup, folder, found, trained, {})
    if base_dtype(setup) == torch.float32 and not in_4_bits:
        loaded = loaded.float()  # as it was trained
    return _compare_outputs(setup, folder, loaded, trained, expected)


def _from_pretrained(setup: Setup, folder: Path) -> PreTrainedModel | EmbeddingModel:
    task = setup.data.task
    model = task.auto_class.from_pretrained(
        folder, trust_remote_code=setup.config.trust_remote_code
    )
    if task.labels != "pairs":
        return model
    return EmbeddingModel(model, saved_pooling(str(folder)) or "mean")


@contextmanager
def _loading(setup: Setup, folder: Path) -> Iterator[None]:
    """Turn errors of loading into a SavedModelDiffers; keep torch's generator, which draws first
    weights.
    """
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is missing is named by the comparison
            yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _differs(setup, folder, f"it cannot be loaded ({reason})") from error


def _compare_tensors(
    setup: Setup,
    folder: Path,
    loaded: Weights,
    trained: Weights,
    saved_in: Mapping[str, torch.dtype],
) -> None:
    """Raise SavedModelDiffers if names, shapes or values differ.

    Args:
        setup: Of the run.
        folder: For the message.
        loaded: Tensors of the loaded model, in whatever dtype they are loaded.
        trained: Those of the trained model.
        saved_in: The dtypes that tensors are rounded to in the file. Others are saved as they are.
    """
    faults = dict.fromkeys(trained.keys() - loaded.keys(), "missing")
    faults |= dict.fromkeys(loaded.keys() - trained.keys(), "not of the trained model")
    for name in trained.keys() & loaded.keys():
        found = loaded[name]
        saved = trained[name].to(saved_in.get(name, trained[name].dtype))
        if found.shape != saved.shape:
            faults[name] = f"shape {list(found.shape)}, not {list(saved.shape)}"
        elif not torch.equal(found, saved.to(found)):
            faults[name] = "other values"
    if faults:
        raise _differs(setup, folder, _listed(faults))


def _listed(faults: Mapping[str, str]) -> str:
    named = [f"{name} ({fault})" for name, fault in sorted(faults.items())[:NUM_NAMES]]
    more = f", and {len(faults) - NUM_NAMES} more" if len(faults) > NUM_NAMES else ""
    return f"tensors differ: {', '.join(named)}{more}"


def _compare_outputs(
    setup: Setup, folder: Path, loaded: nn.Module, trained: Weights, expected: Expected
) -> Check:
    """Raise SavedModelDiffers if the outputs differ by more than the tolerance.

    Args:
        setup: Of the run.
        folder: For the message.
        loaded: The loaded model; gets the trained weights.
        trained: Weights of the trained model by the names of the loaded one, before they were
            rounded.
        expected: Of the trained model.
    """
    outputs = _outputs_where_it_fits(setup, loaded, expected.batch)
    error = relative_error(outputs, expected.outputs)
    for tolerance in _tolerances(setup, loaded, trained, expected.batch, outputs):
        if error <= tolerance:
            rows = len(next(iter(expected.outputs.values())))
            return {"relative_error": error, "tolerance": tolerance, "rows": rows}
    what = (
        "its weights are those that were saved, but the relative error of its outputs "
        f"({', '.join(expected.outputs)}) is {error:.1e}, more than the {tolerance:.1e} of rounding"
    )
    raise _differs(setup, folder, what)


def _outputs_where_it_fits(setup: Setup, loaded: nn.Module, batch: Batch) -> Outputs:
    """Outputs computed on the run's device, or on the CPU if the second model does not fit."""
    if setup.config.load_in_4bit and is_lora(loaded):  # was loaded to where it computes
        return _outputs(setup, loaded, batch, setup.accelerator.device)
    try:
        return _outputs(setup, loaded.to(setup.accelerator.device), batch, setup.accelerator.device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    clear_device_cache()
    return _outputs(setup, loaded.cpu(), batch, torch.device("cpu"))


@torch.no_grad()
def _outputs(setup: Setup, model: nn.Module, batch: Batch, device: torch.device) -> Outputs:
    """The floating-point outputs of a model in evaluation mode that have a row for each sample: not
    the loss, nor a learned temperature, which is not saved.
    """
    plain = unwrapped(model)
    plain = plain.get_base_model() if is_lora(plain) else plain
    inputs = argument_filter(plain)(batch)
    if "logits_to_keep" in inspect.signature(type(plain).forward).parameters:
        width = inputs["input_ids"].shape[1]
        step = -(-width // NUM_POSITIONS)
        inputs.pop("labels", None)  # the loss would need all positions
        inputs["logits_to_keep"] = torch.arange(0, width, step)
    with restored_modes(model), force_eager(), setup.accelerator.autocast():
        model.eval()
        outputs = callable_module(model)(**send_to_device(inputs, device))
    named = outputs if isinstance(outputs, Mapping) else dict(enumerate(outputs))
    return {
        str(name): value.float().cpu()
        for name, value in named.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim()
    }


def relative_error(found: Outputs, expected: Outputs) -> float:
    """The largest relative L2 error of the outputs; infinite if one is missing.

    >>> relative_error({"logits": torch.tensor([3.0, 5.0])}, {"logits": torch.tensor([3.0, 4.0])})
    0.2
    """
    if found.keys() != expected.keys():
        return inf
    return max(_relative_distance(found[name], expected[name]) for name in expected)


def _relative_distance(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return inf
    same = (found == expected) | (found.isnan() & expected.isnan())  # masked logits are -inf
    distance = (found - expected).masked_fill(same, 0.0).double().norm()
    norm = expected.nan_to_num(0.0, 0.0, 0.0).double().norm()
    error = float(distance / norm.clamp(min=torch.finfo(torch.float32).tiny))
    return inf if isnan(error) else error


def _tolerances(
    setup: Setup, loaded: nn.Module, trained: Weights, batch: Batch, outputs: Outputs
) -> Iterator[float]:
    """How far rounding may move the outputs, relative to them. Three bounds, each larger than the
    one before and more expensive, so that the first one that holds is enough:

    1. 1e-4, for sums in float32 in another order.
    2. For a model saved in bf16 or fp16, also the effect of rounding the weights: how far the
       outputs move if the loaded model gets the trained weights as they were before.
    3. Instead of 1e-4, 4 times the largest of four changes of the outputs, each time all weights
       move up or down, at random, by one rounding error of the forward: 2^-8 of a weight if
       products are computed in bf16, 2^-11 in fp16 and TF32, 2^-21 in float32 (for longer sums).

    Args:
        setup: Of the run.
        loaded: The loaded model; its weights are changed.
        trained: See `_compare_outputs`.
        batch: The rows.
        outputs: Of the loaded model for them.
    """
    yield FLOAT32_TOLERANCE
    device = next(loaded.parameters()).device
    of_weights = 0.0
    if setup.dtype != torch.float32:
        loaded.load_state_dict(trained, strict=False)
        exact = _outputs(setup, loaded, batch, device)
        of_weights = relative_error(outputs, exact)
        outputs = exact
        yield of_weights + FLOAT32_TOLERANCE
    rounding = max(torch.finfo(compute_dtype(setup)).eps / 2, FLOAT32_ROUNDING)
    if setup.config.tf32:
        rounding = max(rounding, TF32_ROUNDING)
    generator = torch.Generator(device).manual_seed(0)
    changes = []
    for _ in range(NUM_NUDGES):
        _nudge(loaded, rounding, generator)
        nudged = _outputs(setup, loaded, batch, device)
        changes.append(relative_error(nudged, outputs))
        outputs = nudged
    yield of_weights + max(FLOAT32_TOLERANCE, SAFETY_FACTOR * max(changes))


@torch.no_grad()
def _nudge(model: nn.Module, rounding: float, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            exact = parameter.float()
            up = torch.empty_like(exact).bernoulli_(generator=generator)
            parameter.copy_(exact * (1 + rounding * (2 * up - 1)))


def _differs(setup: Setup, folder: Path, what: str) -> SavedModelDiffers:
    checkpoint = newest(setup.output_dir)
    remedy = (
        "update transformers and peft, or correct the model's own code, and resume with "
        "--resume_from_checkpoint auto, which saves the model again; or train with other adapters"
    )
    kept = f"The checkpoint {checkpoint} is kept: {remedy}."
    if checkpoint is None:
        kept = "There is no checkpoint yet: update transformers and peft, or train other adapters."
    return SavedModelDiffers(
        f"{folder} is not the trained model: {what}. Do not use this folder. {kept}"
    )
