"""Pipeline parallelism by `torch.distributed.pipelining`: each rank holds some layers of the model,
and the micro-batches of a window are those of the schedule.

    gradient of the window = sum over micro-batches of the gradient of
                             (sum of its loss) / (targets of the window over all replicas)

torch's schedule runs the forwards and backwards; it must not divide by the number of micro-batches
(`scale_grads=False`), because the terms are already divided by the window's targets.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hf_ga.errors import ConfigError, NonFinite
from hf_ga.exact.backend import check_supported
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import gradients_apart, module_modes
from hf_ga.exact.generators import random_states
from hf_ga.exact.loss import HeadMean
from hf_ga.exact.precision import check_optimizer, check_precision
from hf_ga.exact.rule import Rule
from hf_ga.exact.update import StepResult, update
from hf_ga.exact.window import LoaderState, Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.pipeline_backend import PipelineBackend
from hf_ga.parallel.pipeline_model import StageModel, check_can_be_cut
from hf_ga.parallel.processes import check_agreement

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline:
    """This rank's stage of a model, and the windows that all stages compute together.

    `hf_ga.prepare_pipeline` makes it.

    Attributes:
        model: This rank's stage: an object of the model's class, in which the modules of other
            stages are stand-ins without parameters. Its parameters are called as in the whole
            model. Build the optimizer on them.
        stage: Number of the stage that this rank holds, from 0.
        num_stages: Number of stages of the model.
        replica: Number of the copy of the model that this rank is part of, from 0.
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
        """Update this rank's stage once: compute the gradient of the window, clip it, step the
        optimizer, zero the gradients. All ranks must call it.

        Args:
            optimizer: The optimizer of `model.parameters()`.
            window: From the `WindowLoader` that was given to `prepare_pipeline`.
            max_grad_norm: L2 norm of the gradient over all stages to clip to. None or 0: no
                clipping.

        Returns:
            Loss, number of targets and norm of the whole window, the same on all ranks; step a
            scheduler unless the window was `skipped`.

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
        """Add the gradient of the window's mean loss, with respect to this stage's parameters, to
        their `.grad`. All ranks must call it.

        Args:
            window: See `train_step`.

        Raises:
            ConfigError: If the model is in evaluation mode, or the window is of another loader or
                cut into chunks for the same bits.
            ProcessFailed: See `train_step`.
        """
        engine = self._engine
        engine.rule.check_fits(self.model)
        if window.state is not self._loader_state:
            raise ConfigError(
                "this window is not from the WindowLoader that was given to prepare_pipeline: "
                "another one gives the stages of a model different samples. Use that loader, or "
                "call its load_state_dict to go on elsewhere."
            )
        if window.request.chunk_tree is not None:
            raise ConfigError(
                "a pipeline does not support same_bits (canonical_micro_batch), because stages add "
                "gradients in the order of their schedule: omit it."
            )
        before = random_states()
        with gradients_apart(engine.parameters):
            engine.begin(window)
            with engine.deferring_failures(), engine.scope():
                if engine.calls and engine.has_targets:
                    self._run_schedule()
                engine.check_generators(before)
            return engine.end()

    def _run_schedule(self) -> None:
        """Run forward and backward of all micro-batches of this replica."""
        engine = self._engine
        num_calls = len(engine.calls)
        shape = hidden_shape(engine, self.model.config.hidden_size)
        hidden = torch.empty(shape, device="meta", requires_grad=True)
        received: Tensor | tuple[()] = hidden
        returned = hidden
        if self._stage_model.is_first:
            received = ()
        if self._stage_model.is_last:
            # The term of the window's mean loss.
            returned = torch.empty((), device="meta", requires_grad=True)
        stage = PipelineStage(
            StageForward(engine, self._stage_model, shape),
            self.stage,
            self.num_stages,
            self._backend.device,
            input_args=received,
            output_args=returned,
            group=self._backend.stages,
        )
        schedule = self._schedule(
            stage, num_calls, loss_fn=lambda term, index: term, scale_grads=False
        )
        # torch cuts what it is given into equal parts along the first axis. Micro-batches are not
        # equal, so it is given their numbers, by which each stage looks its own batch up.
        indices = torch.arange(num_calls)
        try:
            schedule.step(index=indices, target=indices, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            # What a stage raised, without the list of shapes that torch adds.
            raise error.__cause__ from None

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the whole model in the format of transformers: one safetensors file for each stage,
        and their index. All ranks must call it.

        Args:
            folder: On a file system that all processes of the first replica share.

        Example:
            pipeline.save_pretrained("outputs/model")
            model = AutoModelForCausalLM.from_pretrained("outputs/model")
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = f"model-{self.stage + 1:05}-of-{self.num_stages:05}.safetensors"
        # The first stage saves a tied weight.
        copy = self._backend.tied if self._backend.is_last else None
        weights = own_weights(self.model, left_out=copy)
        if self.replica == 0:
            save_file(weights, folder / file, metadata={"format": "pt"})
        sizes = {name: weight.nbytes for name, weight in weights.items()}
        files = gather_object([(file, sizes)])
        if self._backend.accelerator.is_main_process:
            self.model.config.save_pretrained(folder)
            index = weights_index(files)
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
        self._backend.accelerator.wait_for_everyone()


class StageForward(nn.Module):
    """The module that torch's schedule calls for each micro-batch of a window.

    Args:
        engine: The engine, which has begun the window.
        stage_model: This rank's stage.
        shape: The shape of the hidden states that stages send, (samples, tokens, width). A schedule
            sends one shape only, so smaller micro-batches are padded on the way; no stage computes
            padding.
    """

    def __init__(self, engine: Engine, stage_model: StageModel, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.engine = engine
        self.stage_model = stage_model
        self.shape = shape

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        """Run one micro-batch.

        Args:
            received: The hidden states of the stage before, of `shape`; nothing on the first stage.
            index: The number of the micro-batch, of shape (1,).

        Returns:
            The micro-batch's term of the window's mean loss on the last stage, hidden states of
            `shape` on the others.
        """
        call = self.engine.calls[int(index)]
        batch = call.micro_batch.batch
        if received:
            num_samples, num_tokens = batch["input_ids"].shape
            batch = {**batch, "inputs_embeds": received[0][:num_samples, :num_tokens]}
        micro_batch = replace(call.micro_batch, batch=batch)
        outputs = self.engine.forward_only(replace(call, micro_batch=micro_batch))
        if self.stage_model.is_last:
            return self._term(outputs)
        return self._padded(outputs)

    def _term(self, outputs: Any) -> Tensor:
        """Return the micro-batch's term of the window's mean loss, 0 for a repeated micro-batch."""
        engine = self.engine
        with engine.backend.autocast():
            term, counts = engine.loss_term(outputs, is_recomputable=False)
        # Adds the term to the window's loss; the schedule runs the backward.
        engine.backward_term(term, counts)
        return term * engine.call.weight

    def _padded(self, hidden: Tensor) -> Tensor:
        """Pad hidden states with zeros to `shape`, in float32."""
        num_samples, num_tokens, _ = self.shape
        missing_samples = num_samples - hidden.shape[0]
        missing_tokens = num_tokens - hidden.shape[1]
        # From the last axis to the first, the numbers before and behind.
        padding = (0, 0, 0, missing_tokens, 0, missing_samples)
        padded = F.pad(hidden.float(), padding).contiguous()
        if not padded.requires_grad:
            # A stage without trainable parameters is sent a gradient, too.
            padded.requires_grad_()
        return padded


def prepare_pipeline(
    accelerator: Accelerator,
    model: PreTrainedModel,
    windows: WindowLoader,
    rule: Rule,
    *,
    num_stages: int,
    schedule: str = "1f1b",
) -> Pipeline:
    """Cut a model into pipeline stages, and keep the one of this rank.

    With twice (three times, ...) as many processes as stages, the model is trained in two (three,
    ...) replicas, which share each window. The gradient is that of the full batch for any number of
    stages, replicas and micro-batches. The first stage holds the embeddings, the last one the head;
    a weight that both use is kept on both, and gets the sum of both gradients.

    Args:
        accelerator: The accelerator of all processes.
        model: A model of transformers with a head (`pipeline_model.PARTS`), the same on all ranks,
            not prepared. It is changed: it keeps the modules of this rank's stage, and moves to
            the accelerator's device.
        windows: The loader of the training samples. It splits its windows over replicas from now
            on.
        rule: The result of `prove_targets` on the whole model, which must come first.
        num_stages: Stages of the model, at most its number of layers.
        schedule: "gpipe" runs all forwards of a window before its backwards; "1f1b" alternates, so
            that a stage keeps the activations of at most `num_stages` micro-batches.

    Returns:
        The pipeline. Build the optimizer on `pipeline.model.parameters()`.

    Raises:
        ConfigError: If the model, its loss or a setting is unsupported in a pipeline.

    Example:
        windows = hf_ga.WindowLoader(dataset, collate_fn, accelerator=accelerator, **sizes)
        rule = hf_ga.prove_targets(model, windows.probe_samples(64), collate_fn)
        pipeline = hf_ga.prepare_pipeline(accelerator, model, windows, rule, num_stages=2)
        optimizer = torch.optim.AdamW(pipeline.model.parameters())
        for window in windows:
            result = pipeline.train_step(optimizer, window, max_grad_norm=1.0)
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}.")
    check_can_be_cut(model, num_stages)
    check_rule(rule, model)
    check_accelerator(accelerator)
    if not isinstance(windows, WindowLoader):
        raise ConfigError(
            f"a pipeline needs a WindowLoader, got a {type(windows).__name__}: load the dataset "
            "without streaming."
        )
    weights = [p.detach().double() for p in model.parameters()]
    norm = float(torch.nn.utils.get_total_norm(weights))
    check_agreement(accelerator, "weights of the model (here their norm)", repr(norm))
    min_calls = num_stages if schedule == "1f1b" else 1
    backend = PipelineBackend(accelerator, num_stages, min_calls)
    stage_model = StageModel(model, backend.stage, num_stages)
    stage_model.to(accelerator.device)
    backend.tied = stage_model.tied
    windows.split_over(backend.num_replicas, backend.replica)
    stage_rule = rule_of_stage(rule, model)
    return Pipeline(backend, stage_model, stage_rule, schedule, windows.state)


def check_accelerator(accelerator: Accelerator) -> None:
    """Check that stages can be trained with the settings of an accelerator.

    Raises:
        ConfigError: If it uses fp16 or FSDP, or has settings that no exact step supports.
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


def check_rule(rule: Rule, model: nn.Module) -> None:
    """Check that what was proven of the whole model can be computed by stages.

    Args:
        rule: The proof's result.
        model: The whole model.

    Raises:
        ConfigError: If the proof is of another model, the loss is not the mean of the model's own
            head, or some randomness is not keyed.
    """
    rule.check_fits(model)
    if getattr(rule.dropout, "model", model) is not model:
        raise ConfigError(
            "the rule was proven for another model, whose dropout is not this one's: call "
            "prove_targets with the model that is passed to prepare_pipeline."
        )
    if not isinstance(rule.loss, HeadMean):
        raise ConfigError(
            f"unsupported loss in a pipeline: {rule.name}. Stages cannot audit it on the data that "
            "is trained on, so only the mean that the model's own head computes is supported: "
            "leave loss_fn and router balancing out, or use FSDP."
        )
    if getattr(rule.dropout, "unkeyed", ()):
        raise ConfigError(
            "unsupported: split-dependent randomness in a pipeline. Leave "
            "allow_split_dependent_randomness out, and set what draws it to 0."
        )


def rule_of_stage(rule: Rule, model: nn.Module) -> Rule:
    """Return what was proven of the whole model, for the modules that a stage keeps.

    A dropout site is keyed by the path of its module in the whole model, which the stage keeps.

    Args:
        rule: What was proven of the whole model.
        model: The stage.
    """
    dropout = rule.dropout
    if isinstance(dropout, KeyedDropout):
        dropout = dropout_of_stage(dropout, model)
    return replace(rule, dropout=dropout, speed_ups=(), modes=module_modes(model))


def dropout_of_stage(whole: KeyedDropout, model: nn.Module) -> KeyedDropout:
    """Return the keyed dropout of the whole model, for the modules that a stage keeps."""
    dropout = KeyedDropout(model)
    dropout.hooked = [module for module in whole.hooked if module in dropout.names]
    dropout.sites = {key: site for key, site in whole.sites.items() if site.module in dropout.names}
    return dropout


def hidden_shape(engine: Engine, width: int) -> tuple[int, int, int]:
    """Return the shape into which the hidden states of all micro-batches fit.

    Args:
        engine: The engine, which has begun the window.
        width: The model's hidden size.

    Returns:
        (samples, tokens, width).

    Raises:
        ConfigError: If the batches have no `input_ids` of shape (samples, tokens).
    """
    ids = [call.micro_batch.batch.get("input_ids") for call in engine.calls]
    if not all(isinstance(one, Tensor) and one.dim() == 2 for one in ids):
        raise ConfigError(
            "a pipeline needs input_ids of shape (samples, tokens) in every batch: let the collate "
            "function return them."
        )
    num_samples = max(one.shape[0] for one in ids)
    num_tokens = max(one.shape[1] for one in ids)
    return num_samples, num_tokens, width


def weights_index(files: list[tuple[str, dict[str, int]]]) -> dict[str, Any]:
    """Return the index with which transformers finds the file of each weight.

    Args:
        files: Of each stage, the name of its file and name -> bytes of its weights.
    """
    total_size = 0
    file_of_weight = {}
    for file, sizes in files:
        total_size += sum(sizes.values())
        file_of_weight |= dict.fromkeys(sizes, file)
    return {"metadata": {"total_size": total_size}, "weight_map": file_of_weight}


def own_weights(model: nn.Module, left_out: nn.Parameter | None) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by their names, each once.

    Args:
        model: One stage.
        left_out: A parameter that another stage holds, too. None: there is none.
    """
    found: dict[str, Tensor] = {}
    seen = {id(left_out)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            found[name] = tensor
        seen.add(id(tensor))
    return found
