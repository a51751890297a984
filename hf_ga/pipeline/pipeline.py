"""Pipeline parallelism with `torch.distributed.pipelining`: each rank holds some layers of the
model, and the micro-batches of a window are those of the schedule.

    gradient of the window = (sum over micro-batches of the gradient of the sum of its loss)
                             / (targets of the window over all replicas)

torch's schedule runs the forwards and backwards. It must not divide by the number of micro-batches
(`scale_grads=False`).
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hf_ga.engine.update import StepResult, update
from hf_ga.errors import ConfigError, NonFinite
from hf_ga.loading.window import LoaderState, Window
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.model.forward import check_not_wrapped
from hf_ga.model.precision import check_optimizer, check_precision
from hf_ga.parallel.backend import check_supported
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.processes import check_agreement
from hf_ga.pipeline.backend import PipelineBackend
from hf_ga.pipeline.model import StageModel, check_can_be_split, check_no_hooks
from hf_ga.pipeline.stage_loop import StageLoop
from hf_ga.pipeline.trial import try_full_model
from hf_ga.training import needs_autocast

NUM_TRIED_SAMPLES = 64  # of a dataset, from which those of the trial are chosen
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline:
    """This rank's stage of a model that is trained with pipeline parallelism, with methods that
    compute a window together with the other stages.

    `hf_ga.prepare_pipeline` returns it.

    Attributes:
        model: This rank's stage: the model, in which the modules of other stages are placeholders
            without parameters. Its parameters have the names of the full model. Build the optimizer
            on them.
        stage: Index of the stage that this rank holds, from 0.
        num_stages: Number of stages of the model.
        replica: Index of the copy of the model that this rank is part of, from 0.
        num_replicas: Number of copies of the model.
    """

    def __init__(
        self, backend: PipelineBackend, loop: StageLoop, loader_state: LoaderState
    ) -> None:
        """Hold this rank's stage; `prepare_pipeline` calls it.

        Args:
            backend: How the ranks of the pipeline communicate.
            loop: Computes windows in this rank's stage.
            loader_state: The state of the loader whose windows are trained on.
        """
        self.model = loop.model
        self.stage = backend.stage
        self.num_stages = backend.num_stages
        self.replica = backend.replica
        self.num_replicas = backend.num_replicas
        self._backend = backend
        self._loop = loop
        self._loader_state = loader_state

    def train_step(
        self,
        optimizer: torch.optim.Optimizer,
        window: Window,
        *,
        max_grad_norm: float | None = None,
    ) -> StepResult:
        """Update this rank's pipeline stage once: compute the gradient of the window, clip it, step
        the optimizer, zero the gradients. All ranks must call it.

        Args:
            optimizer: The optimizer of `model.parameters()`.
            window: A window of the `WindowLoader` that was passed to `prepare_pipeline`.
            max_grad_norm: Maximum L2 norm of the gradient over all stages. None or 0: no clipping.

        Returns:
            Loss, number of targets and gradient norm of the window, the same on all ranks. Step the
            scheduler yourself, unless the window was `skipped`.

        Raises:
            NonFinite: If the loss or a gradient is not finite, on any rank. No stage is updated.
            Others: See `backward_window`.
        """
        accelerator = self._backend.accelerator
        check_optimizer(accelerator, optimizer)
        # After an unfinished `accumulate`, a prepared optimizer would not step.
        accelerator.sync_gradients = True
        optimizer.zero_grad(set_to_none=True)
        result = self.backward_window(window)
        if result.skipped:
            return result
        update(self._backend, self.model, optimizer, max_grad_norm, result)
        optimizer.zero_grad(set_to_none=True)
        if result.nonfinite:
            raise NonFinite(
                f"the loss or a gradient of {window.description} is not finite. No parameter was "
                "updated: lower the learning rate, or look for the cause with hf_ga.train_step on "
                "one process."
            )
        return result

    def backward_window(self, window: Window) -> StepResult:
        """Add the gradient of the window's mean loss, with respect to this pipeline stage's
        parameters, to their `.grad`. All ranks must call it.

        Args:
            window: See `train_step`.

        Returns:
            Loss and number of targets of the window, the same on all ranks.

        Raises:
            ConfigError: If the model is in evaluation mode, or the window is from another loader or
                split into chunks for `same_bits`.
            LossNotAdditive: If the loss is not a sum of means with one divisor.
            UnkeyedRandomness: If a stage drew other random numbers than the full model.
            ProcessFailed: If another rank failed; at the window's end, so that none waits.
        """
        with self._backend.failing_on_all_ranks():
            self._check_window(window)
        return self._loop.add_gradients(window)

    def _check_window(self, window: Window) -> None:
        """Check that a window can be computed. Raises a ConfigError, see `backward_window`."""
        if not self.model.training:
            raise ConfigError(
                "the model is in evaluation mode: call model.train() before a training step."
            )
        if window.state is not self._loader_state:
            raise ConfigError(
                "this window is not from the WindowLoader that was passed to prepare_pipeline: "
                "with another loader the stages of a model may get different samples. Use that "
                "loader; its load_state_dict continues at another position."
            )
        if window.request.chunk_tree is not None:
            raise ConfigError(
                "a pipeline does not support same_bits (canonical_micro_batch), because stages add "
                "gradients in the order of their schedule: omit it."
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the full model for `from_pretrained` of transformers: one safetensors file for each
        stage, their index, and the config. All ranks must call it; those of the first replica write
        the files.

        Args:
            folder: The folder to write to, which all processes of the first replica must share.

        Example:
            pipeline.save_pretrained("outputs/model")
            model = AutoModelForCausalLM.from_pretrained("outputs/model")
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        file_name = f"model-{self.stage + 1:05}-of-{self.num_stages:05}.safetensors"
        # The first stage saves a tied weight, so the last stage excludes its copy.
        weights = unique_weights(self.model, excluded=self._backend.second_copy)
        if self.replica == 0:
            save_file(weights, folder / file_name, metadata={"format": "pt"})
        num_bytes = {name: weight.nbytes for name, weight in weights.items()}
        files = gather_object([(file_name, num_bytes)])
        if self._backend.accelerator.is_main_process:
            self.model.config.save_pretrained(folder)
            index = weights_index(files)
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
        self._backend.accelerator.wait_for_everyone()


def prepare_pipeline(
    accelerator: Accelerator,
    model: PreTrainedModel,
    windows: WindowLoader,
    *,
    num_stages: int,
    schedule: str = "1f1b",
) -> Pipeline:
    """Split a model into pipeline stages, and keep this rank's stage.

    With twice (three times, ...) as many processes as stages, the model is trained in two (three,
    ...) replicas, over which each window is split. The gradient is that of the full batch for any
    number of stages, replicas and micro-batches. The first stage holds the embeddings, the last one
    the head. If they share a weight (tied embeddings), both hold a copy, which gets the sum of both
    gradients. Random numbers (dropout) are those of the full model.

    Before it is split, each process tries the loss of the full model on a few samples, on the
    device where the model is.

    Args:
        accelerator: The accelerator of all processes.
        model: A transformers model of one of the supported classes
            (`hf_ga.pipeline.model.SUPPORTED_MODELS`), the same on all ranks, not prepared. It is
            changed in place: it keeps the modules of this rank's stage only, and moves to the
            accelerator's device.
        windows: The loader of the training samples. It is changed: it splits its windows over
            replicas, not over all processes.
        num_stages: Number of stages, at least 2 and at most the model's number of layers.
        schedule: "gpipe" runs all forwards of a window before its backwards; "1f1b" alternates
            between them, so that a stage keeps the activations of at most `num_stages`
            micro-batches.

    Returns:
        The pipeline. Build the optimizer on `pipeline.model.parameters()`.

    Raises:
        ConfigError: If the model or a setting is unsupported in a pipeline.
        LossNotAdditive: If the model's loss is not a sum of means, or compares samples.
        UnkeyedRandomness: If random numbers were drawn that cannot be tied to samples.
        ProcessFailed: If the trial failed on another process.

    Example:
        windows = hf_ga.WindowLoader(dataset, collate_fn, accelerator=accelerator, **sizes)
        pipeline = hf_ga.prepare_pipeline(accelerator, model, windows, num_stages=2)
        optimizer = torch.optim.AdamW(pipeline.model.parameters())
        for window in windows:
            result = pipeline.train_step(optimizer, window, max_grad_norm=1.0)
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}.")
    check_can_be_split(model, num_stages)
    check_not_wrapped(model)
    check_no_hooks(model)
    check_accelerator(accelerator)
    if not isinstance(windows, WindowLoader):
        raise ConfigError(
            f"a pipeline needs a WindowLoader, got a {type(windows).__name__}: load the dataset "
            "without streaming."
        )
    weights = [p.detach().double() for p in model.parameters()]
    norm = float(torch.nn.utils.get_total_norm(weights))
    check_agreement(accelerator, "weights of the model (here their norm)", repr(norm))
    backend = PipelineBackend(accelerator, num_stages)
    autocast = accelerator.autocast() if needs_autocast(model) else nullcontext()
    with backend.failing_on_all_ranks(), autocast:
        samples = windows.trial_samples(NUM_TRIED_SAMPLES)
        full_model = try_full_model(model, samples, windows.collate_fn, num_stages)
    full_model.loss.note_padding(windows.state)
    stage_model = StageModel(model, backend.stage, num_stages)
    stage_model.to(accelerator.device)
    backend.tied = stage_model.tied
    windows.split_over(backend.num_replicas, backend.replica)
    loop = StageLoop(backend, stage_model, SCHEDULES[schedule], full_model)
    return Pipeline(backend, loop, windows.state)


def check_accelerator(accelerator: Accelerator) -> None:
    """Check that a pipeline can be trained with the settings of an accelerator.

    Raises:
        ConfigError: If the accelerator uses fp16 or FSDP, or a setting with which gradients cannot
            be exact.
    """
    check_supported(accelerator)
    check_precision(accelerator)
    if accelerator.scaler is not None:
        raise ConfigError("unsupported: fp16 in a pipeline. Use bf16, or no mixed precision.")
    if is_sharded(accelerator):
        raise ConfigError(
            "unsupported: FSDP in a pipeline. Launch with a profile without FSDP, such as "
            "accelerate_configs/multi_gpu.yaml, or use FSDP without stages."
        )


def weights_index(files: list[tuple[str, dict[str, int]]]) -> dict[str, Any]:
    """Return the content of the index (`model.safetensors.index.json`) in which transformers looks
    up the file of each weight of a model that pipeline stages have saved.

    Args:
        files: For each rank, the name of its stage's file, and name of a weight -> its size in
            bytes. The ranks of one stage in several replicas list the same file.

    >>> weights_index([("1.safetensors", {"wte": 8}), ("2.safetensors", {"ln": 4})])
    {'metadata': {'total_size': 12}, 'weight_map': {'wte': '1.safetensors', 'ln': '2.safetensors'}}
    """
    total_size = 0
    weight_map = {}
    # Replicas wrote no files of their own: each file counts once.
    for file_name, num_bytes in dict(files).items():
        total_size += sum(num_bytes.values())
        weight_map |= dict.fromkeys(num_bytes, file_name)
    return {"metadata": {"total_size": total_size}, "weight_map": weight_map}


def unique_weights(model: nn.Module, excluded: nn.Parameter | None) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a pipeline stage by their names, to save
    them. A tensor with several names (tied weights) is listed under its first name only.

    Args:
        model: The stage.
        excluded: A parameter to omit, because another stage saves it. None: omit nothing.
    """
    weights: dict[str, Tensor] = {}
    handled_ids = {id(excluded)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in handled_ids:
            weights[name] = tensor
        handled_ids.add(id(tensor))
    return weights
