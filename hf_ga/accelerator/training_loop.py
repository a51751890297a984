"""The training loop of a user: the window that it is in, and its micro-batches one by one."""

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

from hf_ga.accelerator.call_order import CallOrder, check_syncs
from hf_ga.accelerator.criteria import CriteriaWatch
from hf_ga.accelerator.engines import engine_if_provable, rule_for_loop
from hf_ga.accelerator.first_forward import prove_first_forward
from hf_ga.accelerator.loader import WindowedDataLoader
from hf_ga.accelerator.loss_checks import LossChecks
from hf_ga.accelerator.loss_comparison import GivenSum, Seen
from hf_ga.accelerator.loss_terms import LossTerms, check_is_number
from hf_ga.accelerator.outputs import ForwardWatch
from hf_ga.errors import ConfigError, DataError, HfGaError, LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import unwrapped
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.whole_window import WholeWindow, parameters_of
from hf_ga.exact.window import Window
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.training import Given, engine_for


class TrainingLoop:
    """Runs the engine for a loop that fetches batches and calls `backward` itself.

    Args:
        accelerator: The accelerator of the loop.
        given: What was given to it about the model's loss.

    Attributes:
        order: Where the loop is in its window.
        terms: Makes the backward of what the loop passes.
        engine: Of the window. None before the first one, and before the first forward of a model
            that is proven there.
    """

    def __init__(self, accelerator: accelerate.Accelerator, given: Given) -> None:
        self.accelerator = accelerator
        self.given = given
        self.order = CallOrder()
        self.terms = LossTerms(LossChecks(can_differentiate=not is_sharded(accelerator)))
        self.engine: Engine | None = None
        self._prepared: dict[nn.Module, nn.Module] = {}  # the model inside -> the prepared one
        self._watches: dict[nn.Module, ForwardWatch] = {}
        self._criteria = CriteriaWatch()
        self._micro_batch = ExitStack()  # of the micro-batch that was handed out
        self._window = ExitStack()
        self._random_states: dict[str, bytes] = {}  # before a forward in which a model is proven

    def add_model(self, prepared: nn.Module) -> None:
        """Called when a model was prepared."""
        self._prepared[unwrapped(prepared)] = prepared

    def close(self) -> None:
        """Leave nothing behind."""
        self.leave_micro_batch()
        self._window.close()
        for watch in self._watches.values():
            watch.remove()

    @property
    def is_in_windows(self) -> bool:
        """Whether the active loader hands out windows."""
        active = self.accelerator.gradient_state.active_dataloader
        return isinstance(active, WindowedDataLoader) and active.in_windows

    def training_model(self) -> nn.Module | None:
        """Return the prepared model that is in training mode and has something to train.

        Raises:
            ConfigError: If there are several.
        """
        # Of a model under DDP, Accelerate's list has the model inside.
        bases = dict.fromkeys(unwrapped(model) for model in self.accelerator._models)
        found = [base for base in bases if base.training and is_trainable(base)]
        if not found:
            return None
        if len(found) > 1:
            names = ", ".join(type(base).__name__ for base in found)
            raise ConfigError(
                f"{len(found)} prepared models are in training mode ({names}), but a window is "
                "that of one model: put them into one nn.Module and prepare that, or call eval() "
                "or requires_grad_(False) on those that are not trained."
            )
        return self._prepared.get(found[0], found[0])

    def micro_batches(
        self, model: nn.Module, window: Window, *, has_names: bool
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        """Hand out the micro-batches of a window.

        Args:
            model: The prepared model that is trained.
            window: The window.
            has_names: Whether the user's collate function returns named entries, so that the model
                can be called with them for its proof.

        Yields:
            A batch on the device, and whether it is the last one of the window.
        """
        self._check_fetch()
        window = self._begin_window(model, window, has_names)
        num_calls = window.request.max_micro_batches
        for index in range(num_calls):
            self._check_fetch()
            self.order.begin_micro_batch(index)
            is_last = index == num_calls - 1
            self.accelerator.step = index + 1
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            if self.engine is None:
                batch = self._first_batch(model, window)
            else:
                batch = self._enter_micro_batch(model, index)
            yield batch, is_last

    def backward(self, loss: Any, num_targets: float | Tensor | None) -> Tensor | None:
        """See `Accelerator.backward`."""
        order = self.order
        if not order.is_waiting:
            raise order.unexpected_backward(is_in_evaluation=self._is_in_evaluation())
        if self.engine is not None:
            order.check_gradients(self.engine, self.accelerator._optimizers)
        try:
            with self._failing_on_all_ranks():
                self._backward(loss, num_targets)
        finally:
            order.note_backward()
        with self._failing_on_all_ranks():
            self._micro_batch.close()
        engine = self.engine
        if order.index == len(engine.calls) - 1:
            self._window.close()
            engine.end()
            order.is_complete = True
        else:
            order.note_gradients(engine.parameters)
        return engine.loss.value if isinstance(engine.loss, WholeWindow) else None

    def leave_micro_batch(self) -> None:
        """Give up the micro-batch that was handed out, without its backward."""
        self.order.is_waiting = False
        stack = self._micro_batch
        self._micro_batch = ExitStack()
        with contextlib.suppress(HfGaError):  # what it checks does not matter any more
            stack.close()

    def leave_window(self) -> None:
        """Give up the window, as its weights are loaded from a checkpoint."""
        self.leave_micro_batch()
        self.order.is_complete = True

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a prepared optimizer's step: the window is complete.

        Raises:
            ConfigError: If not.
        """
        self.order.check_step(self.engine, optimizer, parameters_of(self.given.whole_batch))

    # Windows

    def _begin_window(self, model: nn.Module, window: Window, has_names: bool) -> Window:
        """Begin a window, and its engine if the model can be proven now.

        Returns:
            The window, padded to one width where the loop may average over the padding.
        """
        check_syncs(model)
        if not self.terms.passes_own_loss and self.given.whole_batch is None:
            window = window.padded_to_window()
        self.order.begin_window()
        self.terms.begin_window()
        self._window.close()
        handle = register_optimizer_step_pre_hook(self._before_any_step)
        self._window.callback(handle.remove)
        self.engine = engine_if_provable(
            self.accelerator, model, window, self.given, has_names=has_names
        )
        if self.engine is not None:
            self._begin_engine(window)
        return window

    def _begin_engine(self, window: Window) -> None:
        """Begin the window in the engine.

        Raises:
            DataError: If there is no target under fp16.
        """
        engine = self.engine
        passes_own_loss = self.terms.passes_own_loss
        engine.rule = rule_for_loop(engine.rule, self.accelerator, passes_own_loss=passes_own_loss)
        engine.begin(window, num_calls=window.request.max_micro_batches)
        if self.accelerator.scaler is not None and not engine.has_targets:
            raise DataError(
                f"window {window.index} of epoch {window.epoch} has no targets, so it has no loss "
                "for fp16 to scale: remove such samples."
            )

    def _before_any_step(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        if self.engine is not None:
            self.order.check_other_optimizer(self.engine, optimizer)

    def _is_in_evaluation(self) -> bool:
        """Whether no model was in training mode when the loader began."""
        active = self.accelerator.gradient_state.active_dataloader
        hands_out_others = isinstance(active, WindowedDataLoader) and not active.in_windows
        return hands_out_others or self.training_model() is None

    def _check_fetch(self) -> None:
        try:
            self.order.check_fetch()
        except ConfigError:
            self.leave_micro_batch()
            raise

    # Micro-batches

    def _enter_micro_batch(self, model: nn.Module, index: int) -> dict[str, Any]:
        """Put the state of a micro-batch into effect until its backward.

        Returns:
            Its batch on the device.
        """
        engine = self.engine
        self._open_micro_batch(model)
        self._micro_batch.enter_context(engine.scope())
        batch = self._micro_batch.enter_context(engine.micro_batch(index))
        watch = self._watch_of(model)
        is_counted_in_forward = isinstance(engine.rule.loss, GivenSum)
        watch.start(None if is_counted_in_forward else engine.arguments(batch))
        watch.prove_again = partial(self._prove_again, model)
        return batch

    def _open_micro_batch(self, model: nn.Module) -> None:
        """Until the backward, note which loss functions are called, and do not sum gradients."""
        self._micro_batch = ExitStack()
        self._criteria.start(unwrapped(model))
        self._micro_batch.callback(self._criteria.turn_off)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._micro_batch.enter_context(model.no_sync())  # summed once, at the end

    def _watch_of(self, model: nn.Module) -> ForwardWatch:
        if model not in self._watches:
            self._watches[model] = ForwardWatch(
                model,
                is_open=lambda: self.order.is_waiting,
                criteria=self._criteria,
                give_up=self.leave_micro_batch,
                notes_tensors=self.given.whole_batch is not None,
            )
        return self._watches[model]

    def _backward(self, loss: Any, num_targets: float | Tensor | None) -> None:
        engine = self.engine
        if engine is None:
            raise LossNotAdditive(
                "the loss does not come from a training forward of the prepared model on this "
                "batch: call the model that accelerator.prepare returned."
            )
        watch = self._watch_of(engine.model)
        if self.given.whole_batch is None:
            check_is_number(loss)
            self.terms.backward(engine, watch, self._seen(watch), loss, num_targets)
            return
        if num_targets is not None or not watch.returned(loss):
            raise ConfigError(
                "with whole_batch, accelerator.backward takes what the model returned for this "
                "micro-batch, unchanged and alone: outputs = model(**batch); "
                "accelerator.backward(outputs)."
            )
        engine.backward(loss)

    def _seen(self, watch: ForwardWatch) -> Seen:
        """Return what was seen of the micro-batch that waits for its backward."""
        call = self.engine.call
        tensors = [value for value in call.batch.values() if isinstance(value, Tensor)]
        return Seen(
            outputs=watch.outputs,
            means=self._criteria.found,
            ran_outside=self._criteria.ran_outside,
            num_samples=len(call.micro_batch),
            num_steps=self.accelerator.gradient_accumulation_steps,
            storages=frozenset(value.untyped_storage().data_ptr() for value in tensors),
        )

    @contextmanager
    def _failing_on_all_ranks(self) -> Iterator[None]:
        """Keep an error of hf_ga on one of several ranks for the end of the window, where it is
        raised on all.
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

    def _first_batch(self, model: nn.Module, window: Window) -> dict[str, Any]:
        """Return the first batch of a model that is proven in its first forward."""
        window = window.padded_to_window()
        micro_batches = window.micro_batches
        if not micro_batches:  # another rank has all samples of the window
            micro_batches = window.split([np.array([0])]).micro_batches
        micro_batch = micro_batches[0]
        watch = self._watch_of(model)
        watch.start()
        watch.prove = partial(self._prove, model, window, len(micro_batch))
        self._open_micro_batch(model)
        self._random_states = random_states()
        return send_to_device(micro_batch.batch, self.accelerator.device)

    def _prove(
        self,
        model: nn.Module,
        window: Window,
        num_samples: int,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        """Prove the model on the arguments of a forward that begins, then begin the window.

        Raises:
            UnkeyedRandomness: If the loop drew random numbers since it fetched the batch.
        """
        self._check_generators()
        rule, self.terms.head = prove_first_forward(
            unwrapped(model),
            args,
            kwargs,
            num_samples,
            allow_split_dependent_randomness=self.given.allow_split_dependent_randomness,
        )
        window.state.rules[unwrapped(model)] = rule
        window.state.pad_to_window = True
        self.engine = engine_for(self.accelerator, model, window)
        self._begin_engine(window)
        self._micro_batch.close()
        self._enter_micro_batch(model, 0)
        rule.dropout.join_forward(args, kwargs)

    def _prove_again(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Prove a model that the loop calls with something else than the batch.

        Raises:
            ConfigError: If the loop called it with the batch before.
        """
        if self.given.whole_batch is not None:
            raise ConfigError(
                "whole_batch needs the model to be called as model(**batch), with the batch that "
                "the loader returned: its forward runs once more before the loop's."
            )
        if self.terms.checks.num_windows > 1 or self.order.index:
            raise ConfigError(
                "the model was called with the entries of the batch before, and now with others "
                "(changed labels, another mask, more arguments), so their targets were counted "
                "wrongly: change them in the collate function."
            )
        num_samples = len(self.engine.call.micro_batch)
        self._micro_batch.close()  # the proof must not run within this micro-batch's speed-ups
        self._random_states = random_states()
        self._prove(model, self.engine.window, num_samples, args, kwargs)

    def _check_generators(self) -> None:
        """Check that the loop drew no random numbers since it fetched the batch.

        Raises:
            UnkeyedRandomness: If it did.
        """
        moved = moved_generators(self._random_states)
        if moved and not self.given.allow_split_dependent_randomness:
            raise UnkeyedRandomness(
                f"the loop drew from {' and '.join(moved)} between fetching a batch and its "
                "forward: this randomness depends on the split of the window. Draw it in the "
                "dataset or the collate function, where it is seeded for each sample, or accept it "
                "with Accelerator(allow_split_dependent_randomness=True)."
            )


def is_trainable(model: nn.Module) -> bool:
    """Whether a parameter of a model is trained."""
    return any(parameter.requires_grad for parameter in model.parameters())
