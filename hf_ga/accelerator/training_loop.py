"""Drives the engine for a user's own training loop, micro-batch by micro-batch."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_ga.accelerator.call_order import CallOrder, check_gradient_sync
from hf_ga.accelerator.criteria import CriteriaRecorder
from hf_ga.accelerator.engines import engine_if_provable, rule_for_loop
from hf_ga.accelerator.first_forward import prove_first_forward
from hf_ga.accelerator.loader import WindowedDataLoader
from hf_ga.accelerator.loss_checks import LossChecks
from hf_ga.accelerator.loss_comparison import MicroBatchRecord, SumPassedByLoop
from hf_ga.accelerator.loss_terms import LossTerms, check_has_one_element
from hf_ga.accelerator.outputs import ForwardRecorder
from hf_ga.errors import ConfigError, DataError, HfGaError, LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import unwrapped
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.update import StepResult
from hf_ga.exact.whole_window import WholeWindow, parameters_of
from hf_ga.exact.window import Window
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.training import LossSettings, engine_for


class TrainingLoop:
    """Runs the engine for a user's loop, which fetches batches and calls `accelerator.backward`.

    Args:
        accelerator: The accelerator of the loop.
        loss_settings: The user's settings for the model's loss and its proof.

    Attributes:
        call_order: Tracks the loop's calls within the window.
        loss_terms: Runs the backward of the losses that the loop passes.
        engine: The engine of the current window. None before the first window, and before the first
            forward of a model that is proven in that forward.
        last_result: The result of the last complete window; None before there is one.
    """

    def __init__(self, accelerator: accelerate.Accelerator, loss_settings: LossSettings) -> None:
        """Start before the first window of a user's loop, with no prepared model."""
        self.accelerator = accelerator
        self.loss_settings = loss_settings
        self.call_order = CallOrder()
        self.loss_terms = LossTerms(LossChecks(can_differentiate=not is_sharded(accelerator)))
        self.engine: Engine | None = None
        self.last_result: StepResult | None = None
        self._prepared_models: dict[nn.Module, nn.Module] = {}  # unwrapped -> prepared
        self._recorders: dict[nn.Module, ForwardRecorder] = {}  # of prepared models
        self._criteria = CriteriaRecorder()
        # Context managers that are entered when a micro-batch is handed out, until its backward,
        # and those of the window.
        self._micro_batch_contexts = ExitStack()
        self._window_contexts = ExitStack()
        # The random generators' states when a batch was handed out whose forward is a proof.
        self._random_states: dict[str, bytes] = {}

    def add_model(self, prepared: nn.Module) -> None:
        """Register a model that `accelerator.prepare` returns."""
        self._prepared_models[unwrapped(prepared)] = prepared

    def close(self) -> None:
        """Give up the window of the user's loop, and remove all hooks from the prepared models."""
        self.leave_micro_batch()
        self._window_contexts.close()
        for recorder in self._recorders.values():
            recorder.remove()

    @property
    def is_in_windows(self) -> bool:
        """Whether the loader that the user's loop iterates over yields windows now, which is not so
        in an evaluation.
        """
        active = self.accelerator.gradient_state.active_dataloader
        return isinstance(active, WindowedDataLoader) and active.is_yielding_windows

    def training_model(self) -> nn.Module | None:
        """Return the prepared model that is in training mode and has trainable parameters.

        Returns:
            None if there is no such model, as in an evaluation.

        Raises:
            ConfigError: If there are several.
        """
        # For a model under DDP, Accelerate's list contains the model inside the wrapper.
        unwrapped_models = dict.fromkeys(unwrapped(model) for model in self.accelerator._models)
        in_training = [
            model for model in unwrapped_models if model.training and is_trainable(model)
        ]
        if not in_training:
            return None
        if len(in_training) > 1:
            names = ", ".join(type(model).__name__ for model in in_training)
            raise ConfigError(
                f"{len(in_training)} prepared models are in training mode ({names}), but a window "
                "can train one model only: put them into one nn.Module and prepare that, or call "
                "eval() or requires_grad_(False) on those that are not trained."
            )
        model = in_training[0]
        return self._prepared_models.get(model, model)

    def micro_batches(
        self, model: nn.Module, window: Window, *, batches_are_mappings: bool
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        """Begin a window, and hand out its micro-batches on this rank one by one to the user's
        loop.

        Sets Accelerate's `step` and `sync_gradients` for each of them.

        Args:
            model: The prepared model that is trained.
            window: The window.
            batches_are_mappings: Whether the user's collate function returns mappings, so that
                the proof can call `model(**batch)`.

        Yields:
            (batch on the device, whether it is the last one of the window).

        Raises:
            ConfigError: If the loop fetches a batch before it called `accelerator.backward` for
                the previous one.
        """
        self._check_fetch()
        window = self._begin_window(model, window, batches_are_mappings)
        num_micro_batches = window.request.max_micro_batches  # the same on all ranks
        for index in range(num_micro_batches):
            self._check_fetch()
            self.call_order.begin_micro_batch(index)
            is_last = index == num_micro_batches - 1
            self.accelerator.step = index + 1
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            if self.engine is None:
                batch = self._first_batch_to_prove(model, window)
            else:
                batch = self._enter_micro_batch(model, index)
            yield batch, is_last

    def backward(self, loss: Any, num_targets: float | Tensor | None) -> Tensor | None:
        """Run the backward of the current micro-batch, which the user's loop asks for, and finish
        the window after its last one.

        Finishing sums the gradients over all ranks and raises errors that were kept for the end of
        the window.

        Args:
            loss: See `Accelerator.backward`.
            num_targets: See `Accelerator.backward`.

        Returns:
            With `whole_batch`, the loss of the whole window; otherwise None.

        Raises:
            ConfigError: If no micro-batch waits for its backward, or gradients were changed.
            LossNotAdditive: If the loss is not one that is known to add up over micro-batches.
        """
        call_order = self.call_order
        if not call_order.is_waiting:
            raise call_order.unexpected_backward(is_in_evaluation=self._is_in_evaluation())
        if self.engine is not None:
            call_order.check_gradients(self.engine, self.accelerator._optimizers)
        try:
            with self._raising_on_all_ranks():
                self._backward(loss, num_targets)
        finally:
            call_order.note_backward()
        with self._raising_on_all_ranks():
            self._micro_batch_contexts.close()
        engine = self.engine
        is_last_micro_batch = call_order.index == len(engine.calls) - 1
        if is_last_micro_batch:
            self._window_contexts.close()
            self.last_result = engine.end()
            call_order.is_complete = True
        else:
            call_order.note_gradients(engine.parameters)
        return engine.loss.value if isinstance(engine.loss, WholeWindow) else None

    def leave_micro_batch(self) -> None:
        """Give up the micro-batch that was handed out to the user's loop, without its backward.

        Its context managers are closed; errors of hf_ga that they raise are ignored, as they are
        about a micro-batch that does not count.
        """
        self.call_order.is_waiting = False
        contexts = self._micro_batch_contexts
        self._micro_batch_contexts = ExitStack()
        with contextlib.suppress(HfGaError):
            contexts.close()

    def leave_window(self) -> None:
        """Give up the current window of the user's loop, because `accelerator.load_state` loads
        weights from a checkpoint.
        """
        self.leave_micro_batch()
        self.call_order.is_complete = True

    def check_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check, before a prepared optimizer of the user's loop steps, that the gradient of the
        window is complete.

        Raises:
            ConfigError: If the gradient is not complete, or if parameters outside of the model have
                a gradient.
        """
        loss_parameters = parameters_of(self.loss_settings.whole_batch)
        self.call_order.check_optimizer_step(self.engine, optimizer, loss_parameters)

    # Windows

    def _begin_window(self, model: nn.Module, window: Window, batches_are_mappings: bool) -> Window:
        """Begin a window of the user's loop, and its engine unless the model is proven in the
        loop's first forward.

        Args:
            model: The prepared model that is trained.
            window: The window.
            batches_are_mappings: Whether the user's collate function returns mappings, so that
                the proof can call `model(**batch)`.

        Returns:
            The window; if the loop's loss may average over the padding, with all micro-batches
            padded to the same length.

        Raises:
            ConfigError: If the loop turned gradient synchronization off.
        """
        check_gradient_sync(model)
        if not self.loss_terms.passes_own_loss and self.loss_settings.whole_batch is None:
            window = window.padded_to_window()
        self.call_order.begin_window()
        self.loss_terms.begin_window()
        self._window_contexts.close()
        hook = register_optimizer_step_pre_hook(self._before_any_step)
        self._window_contexts.callback(hook.remove)
        self.engine = engine_if_provable(
            self.accelerator,
            model,
            window,
            self.loss_settings,
            batches_are_mappings=batches_are_mappings,
        )
        if self.engine is not None:
            self._begin_engine(window)
        return window

    def _begin_engine(self, window: Window) -> None:
        """Begin a window of the user's loop in the engine: count its targets and plan this rank's
        micro-batches.

        First, speed-ups that do not fit the loop are removed from the engine's rule. An example is
        packing, for a loop that computes a loss of its own from the model's outputs.

        Args:
            window: The window.

        Raises:
            DataError: If the window has no targets under fp16, because the GradScaler needs a loss
                to scale.
        """
        engine = self.engine
        passes_own_loss = self.loss_terms.passes_own_loss
        # Removing speed-ups again changes nothing, so this may be repeated in every window.
        engine.rule = rule_for_loop(engine.rule, self.accelerator, passes_own_loss=passes_own_loss)
        engine.begin(window, num_calls=window.request.max_micro_batches)
        if self.accelerator.scaler is not None and not engine.has_targets:
            raise DataError(
                f"window {window.index} of epoch {window.epoch} has no targets, so it has no loss "
                "for fp16 to scale: remove samples without targets."
            )

    def _before_any_step(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """Step pre-hook of all torch optimizers during a window of the user's loop: refuse a step
        that would update the model before the window's gradient is complete.
        """
        if self.engine is not None:
            self.call_order.check_other_optimizer(self.engine, optimizer)

    def _is_in_evaluation(self) -> bool:
        """Return whether the user's loop is in an evaluation, which explains a call of
        `accelerator.backward` that no micro-batch waits for.

        That is so if no model is in training mode now, or if none was when the loop began to
        iterate over the loader, which then yields Accelerate's own batches.
        """
        active = self.accelerator.gradient_state.active_dataloader
        if isinstance(active, WindowedDataLoader) and not active.is_yielding_windows:
            return True
        return self.training_model() is None

    def _check_fetch(self) -> None:
        """Check, before a batch is handed out to the user's loop, that the loop called
        `accelerator.backward` for the previous one.

        Raises:
            ConfigError: If the loop did not call it. The previous micro-batch is given up first.
        """
        try:
            self.call_order.check_fetch()
        except ConfigError:
            self.leave_micro_batch()
            raise

    # Micro-batches

    def _enter_micro_batch(self, model: nn.Module, index: int) -> dict[str, Any]:
        """Enter the context managers of a micro-batch of the user's loop (keyed dropout, speed-ups,
        recording), which `backward` closes.

        Args:
            model: The prepared model.
            index: The index of the micro-batch in its window (0-based).

        Returns:
            The micro-batch's batch on the device.
        """
        engine = self.engine
        self._enter_recording_contexts(model)
        self._micro_batch_contexts.enter_context(engine.scope())
        batch = self._micro_batch_contexts.enter_context(engine.micro_batch(index))
        recorder = self._recorder_of(model)
        # If the loop counts the targets of its own loss, it may call the model with anything.
        accepts_any_arguments = isinstance(engine.rule.loss, SumPassedByLoop)
        recorder.start(None if accepts_any_arguments else engine.arguments(batch))
        recorder.prove_again = partial(self._prove_again, model)
        return batch

    def _enter_recording_contexts(self, model: nn.Module) -> None:
        """Begin the contexts of a micro-batch: until its backward, the loss functions that the
        user's loop calls are recorded, and DDP does not all-reduce gradients.

        Args:
            model: The prepared model.
        """
        self._micro_batch_contexts = ExitStack()
        self._criteria.start(unwrapped(model))
        self._micro_batch_contexts.callback(self._criteria.turn_off)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            # The engine sums the gradients over all ranks once, at the end of the window.
            self._micro_batch_contexts.enter_context(model.no_sync())

    def _recorder_of(self, model: nn.Module) -> ForwardRecorder:
        """Return the recorder of a prepared model's forward passes in the user's loop.

        It is made on first use, and then hooks the model.
        """
        if model not in self._recorders:
            self._recorders[model] = ForwardRecorder(
                model,
                is_waiting_for_backward=lambda: self.call_order.is_waiting,
                criteria=self._criteria,  # loss functions of torch that the loop calls
                leave_micro_batch=self.leave_micro_batch,
                # A `whole_batch` loss is computed from the outputs, not from a loss of the loop.
                records_tensors=self.loss_settings.whole_batch is not None,
            )
        return self._recorders[model]

    def _backward(self, loss: Any, num_targets: float | Tensor | None) -> None:
        """Check what the loop passed to `accelerator.backward`, and run the backward of the current
        micro-batch.

        Args:
            loss: The loss; with `whole_batch`, the model's outputs.
            num_targets: The number of targets that the loss is summed over, or None.

        Raises:
            ConfigError: If, with `whole_batch`, the loop passed anything but what the model
                returned.
            LossNotAdditive: If the loss is not one that is known to add up over micro-batches.
        """
        engine = self.engine
        if engine is None:
            raise LossNotAdditive(
                "the loss does not come from a training forward of the prepared model on this "
                "batch: call the model that accelerator.prepare returned."
            )
        recorder = self._recorder_of(engine.model)
        if self.loss_settings.whole_batch is None:
            check_has_one_element(loss)
            record = self._record_of_micro_batch(recorder)
            self.loss_terms.backward(engine, recorder, record, loss, num_targets)
            return
        if num_targets is not None or not recorder.is_unchanged(loss):
            raise ConfigError(
                "with whole_batch, accelerator.backward takes what the model returned for this "
                "micro-batch, unchanged and alone: outputs = model(**batch); "
                "accelerator.backward(outputs)."
            )
        engine.backward(loss)

    def _record_of_micro_batch(self, recorder: ForwardRecorder) -> MicroBatchRecord:
        """Collect what was recorded of the current micro-batch of the user's loop, for the checks
        of the loss that the loop passes for it.
        """
        call = self.engine.call
        tensors = [value for value in call.batch.values() if isinstance(value, Tensor)]
        return MicroBatchRecord(
            outputs=recorder.outputs,
            means=self._criteria.means,
            submodules_run_by_loop=self._criteria.submodules_run_by_loop,
            num_samples=len(call.micro_batch),
            num_accumulation_steps=self.accelerator.gradient_accumulation_steps,
            batch_storages=frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors),
        )

    @contextmanager
    def _raising_on_all_ranks(self) -> Iterator[None]:
        """Let an error of hf_ga on this rank of a user's loop be raised on all ranks at the end of
        the window.

        If only this rank raised at once, the others would wait for it forever in the next
        all-reduce. The error is raised at once on a single process, before the engine exists, and
        under FSDP, which cannot continue without this rank.
        """
        try:
            yield
        except HfGaError as error:
            engine = self.engine
            is_alone = self.accelerator.num_processes == 1 or engine is None
            if is_alone or engine.backend.is_sharded:
                self.leave_micro_batch()
                raise
            if engine.status.failure is None:
                engine.status.failure = error

    # Models that are proven in a forward of the loop

    def _first_batch_to_prove(self, model: nn.Module, window: Window) -> dict[str, Any]:
        """Return the first batch of a window for a model that will be proven in the loop's forward
        on this batch, because it is not known yet how the loop calls the model.

        Args:
            model: The prepared model.
            window: The window, which has no engine yet.

        Returns:
            The batch on the device, padded to the longest sample of the window. A rank without
            samples in the window gets one that does not count.
        """
        window = window.padded_to_window()
        micro_batches = window.micro_batches
        if not micro_batches:  # other ranks have all samples of the window
            micro_batches = window.split([np.array([0])]).micro_batches
        first = micro_batches[0]
        recorder = self._recorder_of(model)
        recorder.start()
        recorder.prove = partial(self._prove, model, window, len(first))
        self._enter_recording_contexts(model)
        self._random_states = random_states()
        return send_to_device(first.batch, self.accelerator.device)

    def _prove(
        self,
        model: nn.Module,
        window: Window,
        num_samples: int,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        """Prove the model on the arguments of a forward that the loop has just called, and then
        begin the window, so that this forward is the one of its first micro-batch.

        Args:
            model: The prepared model.
            window: The window.
            num_samples: The number of samples in the arguments.
            args: The positional arguments of the forward.
            kwargs: The keyword arguments of the forward.

        Raises:
            ConfigError: If the arguments cannot be split into samples.
            UnkeyedRandomness: If the loop drew random numbers since it fetched the batch.
        """
        self._check_generators()
        rule, self.loss_terms.model_loss = prove_first_forward(
            unwrapped(model),
            args,
            kwargs,
            num_samples,
            allow_split_dependent_randomness=self.loss_settings.allow_split_dependent_randomness,
        )
        window.state.rules[unwrapped(model)] = rule
        window.state.pad_to_window = True
        self.engine = engine_for(self.accelerator, model, window)
        self._begin_engine(window)
        self._micro_batch_contexts.close()
        self._enter_micro_batch(model, 0)
        rule.dropout.join_forward(args, kwargs)  # this forward has begun already

    def _prove_again(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Prove a model once more because the loop calls it with something other than the batch
        that it was proven on, and begin the window again.

        Args:
            model: The prepared model.
            args: The positional arguments of the forward.
            kwargs: The keyword arguments of the forward.

        Raises:
            ConfigError: If the loop called the model with the batch before, so that targets were
                counted wrongly, or if there is a `whole_batch`.
        """
        if self.loss_settings.whole_batch is not None:
            raise ConfigError(
                "whole_batch needs the model to be called as model(**batch), with the batch that "
                "the loader returned: its forward runs once more before the loop's."
            )
        if self.loss_terms.checks.num_windows > 1 or self.call_order.index:
            raise ConfigError(
                "the model was called with the entries of the batch before, and is now called with "
                "others (changed labels, another mask, more arguments), so the targets of the "
                "window were counted wrongly: make these changes in the collate function."
            )
        num_samples = len(self.engine.call.micro_batch)
        self._micro_batch_contexts.close()  # the proof must run without this one's speed-ups
        self._random_states = random_states()
        self._prove(model, self.engine.window, num_samples, args, kwargs)

    def _check_generators(self) -> None:
        """Check that the user's loop drew no random numbers between fetching a batch and the
        forward in which the model is proven, unless split-dependent randomness is allowed.

        Raises:
            UnkeyedRandomness: If the loop drew random numbers there.
        """
        moved = moved_generators(self._random_states)
        if moved and not self.loss_settings.allow_split_dependent_randomness:
            raise UnkeyedRandomness(
                f"the loop drew from {' and '.join(moved)} between fetching a batch and its "
                "forward: this randomness depends on the split of the window. Draw it in the "
                "dataset or the collate function, where it is seeded for each sample, or accept it "
                "with Accelerator(allow_split_dependent_randomness=True)."
            )


def is_trainable(model: nn.Module) -> bool:
    """Return whether a model that `accelerator.prepare` gets has a parameter with `requires_grad`,
    so that the user's loop trains it.
    """
    return any(parameter.requires_grad for parameter in model.parameters())
