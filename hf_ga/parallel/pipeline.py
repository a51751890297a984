"""Pipeline parallelism with `torch.distributed.pipelining`: each rank holds some layers of the
model, and the micro-batches of a window are those of the schedule.

    gradient of the window = sum over micro-batches of the gradient of
                             (sum of its loss) / (targets of the window over all replicas)

torch's schedule runs the forwards and backwards. It must not divide by the number of micro-batches
(`scale_grads=False`), because each micro-batch's term is already divided by the window's targets.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hf_ga.errors import ConfigError, NonFinite
from hf_ga.exact.backend import check_supported
from hf_ga.exact.batches import as_batch
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import fresh_gradients, module_modes
from hf_ga.exact.generators import random_states
from hf_ga.exact.loss import HeadMean
from hf_ga.exact.precision import check_optimizer, check_precision
from hf_ga.exact.rule import Rule
from hf_ga.exact.update import StepResult, update
from hf_ga.exact.window import LoaderState, Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.pipeline_backend import PipelineBackend
from hf_ga.parallel.pipeline_model import (
    SUPPORTED_MODELS,
    StageModel,
    check_can_be_split,
    layers_of_stage,
)
from hf_ga.parallel.processes import check_agreement
from hf_ga.parallel.stage_draws import StageDraws, num_draws_before

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
        self,
        backend: PipelineBackend,
        stage_model: StageModel,
        rule: Rule,
        schedule: str,
        loader_state: LoaderState,
    ) -> None:
        """Make the engine of this rank's pipeline stage; `prepare_pipeline` calls it.

        Args:
            backend: How the ranks of the pipeline communicate.
            stage_model: This rank's stage.
            rule: The proven rule, for the modules of this stage.
            schedule: Name of torch's schedule, a key of `SCHEDULES`.
            loader_state: The state of the loader whose windows are trained on.
        """
        self.model = stage_model.model
        self.stage = backend.stage
        self.num_stages = backend.num_stages
        self.replica = backend.replica
        self.num_replicas = backend.num_replicas
        self._backend = backend
        self._stage_model = stage_model
        self._schedule = SCHEDULES[schedule]
        self._loader_state = loader_state
        self._engine = Engine(backend, self.model, rule, module=stage_model)

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
            ProcessFailed: If another rank failed before the schedule ran.
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
                f"the loss or a gradient of window {window.index} of epoch {window.epoch} is not "
                "finite. No parameter was updated: lower the learning rate, or look for the cause "
                "with hf_ga.train_step on one process."
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
            ProcessFailed: See `train_step`.
        """
        engine = self._engine
        engine.rule.check_fits(self.model)
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
        before = random_states()
        with fresh_gradients(engine.parameters):
            engine.begin(window)
            with engine.deferring_failures(), engine.scope():
                if engine.calls and engine.has_targets:
                    self._run_schedule()
                engine.check_generators(before)
            return engine.end()

    def _run_schedule(self) -> None:
        """Run torch's pipeline schedule: the forwards and backwards of all micro-batches of this
        replica in a window. Adds the gradients to those of this stage's parameters.

        Raises:
            Exception: The error of this stage's forward or backward.
        """
        engine = self._engine
        num_micro_batches = len(engine.calls)
        hidden_shape = max_hidden_shape(engine, self.model.config.hidden_size)
        stage = PipelineStage(
            StageForward(engine, self._stage_model, hidden_shape),
            self.stage,
            self.num_stages,
            self._backend.device,
            input_args=self._example_input(hidden_shape),
            output_args=self._example_output(hidden_shape),
            group=self._backend.stages,
        )
        schedule = self._schedule(
            stage, num_micro_batches, loss_fn=lambda term, index: term, scale_grads=False
        )
        # torch splits its input into micro-batches of equal size along dim 0. Ours differ in size,
        # so its input are their indices, with which each stage looks up its own micro-batch.
        indices = torch.arange(num_micro_batches)
        try:
            schedule.step(index=indices, target=indices, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            # Raise the stage's own error, without the list of shapes that torch adds.
            raise error.__cause__ from None

    def _example_input(self, hidden_shape: tuple[int, ...]) -> Tensor | tuple[()]:
        """Return a tensor without data (on the meta device) of the shape of the hidden states that
        this pipeline stage receives, for torch's schedule; () on the first stage, which receives
        none.
        """
        if self._stage_model.is_first:
            return ()
        return torch.empty(hidden_shape, device="meta", requires_grad=True)

    def _example_output(self, hidden_shape: tuple[int, ...]) -> Tensor:
        """Return a tensor without data (on the meta device) of the shape of what this pipeline
        stage returns, for torch's schedule: hidden states or, on the last stage, a scalar (a
        micro-batch's term of the window's mean loss).
        """
        shape = () if self._stage_model.is_last else hidden_shape
        return torch.empty(shape, device="meta", requires_grad=True)

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
        excluded = self._backend.tied if self._backend.is_last else None
        weights = unique_weights(self.model, excluded)
        if self.replica == 0:
            save_file(weights, folder / file_name, metadata={"format": "pt"})
        num_bytes = {name: weight.nbytes for name, weight in weights.items()}
        files = gather_object([(file_name, num_bytes)])
        if self._backend.accelerator.is_main_process:
            self.model.config.save_pretrained(folder)
            index = weights_index(files)
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
        self._backend.accelerator.wait_for_everyone()


class StageForward(nn.Module):
    """The module that torch's pipeline schedule calls for each micro-batch of a window: the forward
    of this rank's stage.

    Args:
        engine: The engine, which has begun the window.
        stage_model: This rank's stage.
        hidden_shape: The shape of the hidden states that stages send to each other, (samples,
            tokens, hidden size). A schedule sends one shape only, so hidden states of smaller
            micro-batches are padded to it for the transfer, and the padding is removed before a
            stage computes with them.
    """

    def __init__(
        self, engine: Engine, stage_model: StageModel, hidden_shape: tuple[int, ...]
    ) -> None:
        """Store the engine, the stage and the shape of the hidden states that stages send."""
        super().__init__()
        self.engine = engine
        self.stage_model = stage_model
        self.hidden_shape = hidden_shape

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        """Run this pipeline stage's forward of one micro-batch; torch's schedule calls it.

        Args:
            received: The padded hidden states of the previous stage, of shape `hidden_shape`;
                nothing on the first stage.
            index: The index of the micro-batch, of shape (1,).

        Returns:
            On the last stage, the micro-batch's term of the window's mean loss; on the others,
            hidden states padded to `hidden_shape`.
        """
        call = self.engine.calls[int(index)]
        batch = call.micro_batch.batch
        if received:
            num_samples, num_tokens = batch["input_ids"].shape
            batch = {**batch, "inputs_embeds": received[0][:num_samples, :num_tokens]}
        micro_batch = replace(call.micro_batch, batch=batch)
        outputs = self.engine.forward_only(replace(call, micro_batch=micro_batch))
        if self.stage_model.is_last:
            return self._loss_term(outputs)
        return self._pad_hidden_states(outputs)

    def _loss_term(self, outputs: Any) -> Tensor:
        """On the last pipeline stage, return a micro-batch's term of the window's mean loss (0 for
        a filler), and add it to the loss that the engine reports for the window.

        Args:
            outputs: The model's outputs.
        """
        engine = self.engine
        with engine.backend.autocast():
            term, counts = engine.loss_term(outputs, is_recomputable=False)
        # This adds the term to the window's loss. The backward itself is run by torch's schedule.
        engine.backward_term(term, counts)
        return term * engine.call.weight

    def _pad_hidden_states(self, hidden: Tensor) -> Tensor:
        """Convert hidden states to float32 and pad them with zeros to `hidden_shape`, to send them
        to the next pipeline stage.

        Args:
            hidden: Hidden states of shape (samples, tokens, hidden size).
        """
        num_samples, num_tokens, _ = self.hidden_shape
        missing_samples = num_samples - hidden.shape[0]
        missing_tokens = num_tokens - hidden.shape[1]
        # For each dim, from the last to the first: the padding before and after.
        padding = (0, 0, 0, missing_tokens, 0, missing_samples)
        padded = F.pad(hidden.float(), padding).contiguous()
        if not padded.requires_grad:
            # The next stage also sends a gradient to a stage without trainable parameters.
            padded.requires_grad_()
        return padded


def split_into_stages(
    accelerator: Accelerator,
    model: PreTrainedModel,
    windows: WindowLoader,
    find_rule: Callable[[], Rule],
    *,
    num_stages: int,
    schedule: str,
) -> Pipeline:
    """Split a model into pipeline stages; see `hf_ga.prepare_pipeline`.

    Args:
        accelerator: See `hf_ga.prepare_pipeline`.
        model: See there.
        windows: See there.
        find_rule: Tests the full model's loss, and returns the result.
        num_stages: See there.
        schedule: See there.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}.")
    check_can_be_split(model, num_stages)
    check_accelerator(accelerator)
    if not isinstance(windows, WindowLoader):
        raise ConfigError(
            f"a pipeline needs a WindowLoader, got a {type(windows).__name__}: load the dataset "
            "without streaming."
        )
    rule = find_rule()
    check_rule(rule)
    weights = [p.detach().double() for p in model.parameters()]
    norm = float(torch.nn.utils.get_total_norm(weights))
    check_agreement(accelerator, "weights of the model (here their norm)", repr(norm))
    # torch's 1F1B schedule needs at least one micro-batch for each stage.
    min_calls = num_stages if schedule == "1f1b" else 1
    backend = PipelineBackend(accelerator, num_stages, min_calls)
    first_draw = _first_draw(model, windows, backend.stage, num_stages)
    stage_model = StageModel(model, backend.stage, num_stages)
    stage_model.to(accelerator.device)
    backend.tied = stage_model.tied
    windows.split_over(backend.num_replicas, backend.replica)
    # The draws of the full model. No speed-ups.
    stage_rule = replace(
        rule, dropout=StageDraws(first_draw), speed_ups=(), modes=module_modes(model)
    )
    return Pipeline(backend, stage_model, stage_rule, schedule, windows.state)


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


def check_rule(rule: Rule) -> None:
    """Check that pipeline stages can compute the loss and the dropout of a tested model.

    Args:
        rule: The result of the test.

    Raises:
        ConfigError: If the loss is not the mean that the model's own head computes, or some random
            draws cannot be tied to a sample.
    """
    if not isinstance(rule.loss, HeadMean):
        raise ConfigError(
            f"unsupported loss in a pipeline: {rule.name}. Stages cannot audit it on the data that "
            "is trained on, so only the mean that the model's own head computes is supported: "
            "omit loss_fn and router balancing, or use FSDP."
        )
    if getattr(rule.dropout, "unkeyed", ()):
        raise ConfigError(
            "unsupported: split-dependent randomness in a pipeline. Omit "
            "allow_split_dependent_randomness, and set the probability of the random draws to 0."
        )


def _first_draw(model: PreTrainedModel, windows: WindowLoader, stage: int, num_stages: int) -> int:
    """Return how many random draws the stages before one make in a forward."""
    if stage == 0:
        return 0
    layers = model.get_submodule(SUPPORTED_MODELS[type(model).__name__].layers)
    (first, *_) = layers_of_stage(stage, num_stages, len(layers))
    samples = windows.probe_samples(2)
    device = next(model.parameters()).device
    batch = send_to_device(as_batch(windows.collate_fn(samples)), device)
    return num_draws_before(model, batch, len(samples), layers[first])


def max_hidden_shape(engine: Engine, hidden_size: int) -> tuple[int, int, int]:
    """Return the smallest shape into which the hidden states of every micro-batch of a window fit:
    the one shape that pipeline stages send to each other.

    Args:
        engine: The engine, which has begun the window.
        hidden_size: The model's hidden size.

    Returns:
        (maximum number of samples, maximum number of tokens, hidden size).

    Raises:
        ConfigError: If the batches have no `input_ids` of shape (samples, tokens).
    """
    all_input_ids = [call.micro_batch.batch.get("input_ids") for call in engine.calls]
    if not all(isinstance(ids, Tensor) and ids.dim() == 2 for ids in all_input_ids):
        raise ConfigError(
            "a pipeline needs input_ids of shape (samples, tokens) in every batch: let the collate "
            "function return them."
        )
    max_samples = max(ids.shape[0] for ids in all_input_ids)
    max_tokens = max(ids.shape[1] for ids in all_input_ids)
    return max_samples, max_tokens, hidden_size


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
