"""`hf_ga.Accelerator`: Accelerate's own loop, in which any split of a window is the full batch."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_ga.accelerator.loader import Epochs, WindowedDataLoader, loader_seed, make_windowed
from hf_ga.accelerator.metrics import gather_rows
from hf_ga.accelerator.resume import Resumed, resume
from hf_ga.accelerator.state import (
    InitialSchedulerState,
    SavedState,
    begin_to_write,
    check_can_save,
    check_has_loaders,
    check_was_written,
    folder_to_load,
    loader_positions,
    restore_positions,
)
from hf_ga.accelerator.training_loop import TrainingLoop
from hf_ga.draws.generators import preserved_random_states
from hf_ga.engine.whole.whole_window import WholeBatchLoss
from hf_ga.errors import ConfigError, HfGaError
from hf_ga.model.precision import check_step
from hf_ga.order.layout import Layout
from hf_ga.parallel.backend import check_supported, keep_process_group_alive
from hf_ga.parallel.prepare import enable_fp16_on_cpu, enable_fsdp_on_cpu, exact_sharding
from hf_ga.parallel.processes import gather_uneven, raise_on_all_ranks
from hf_ga.recovery.files import writing

logger = get_logger(__name__)


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` with exact gradient accumulation.

    While a model is in training mode, a prepared DataLoader yields the micro-batches of windows:
    one window is the samples of one optimizer step over all processes. `backward` takes the model's
    own loss of a micro-batch and adds its part of the mean loss over all targets of the window.
    Dropout and the order of samples depend on the seed, the epoch and the sample only. So every
    split of a window makes the same update. In evaluation mode, everything works as in Accelerate.

    Args:
        *args: See `accelerate.Accelerator`.
        global_batch_size: Samples in one window over all processes. The gradient accumulation steps
            follow from it, and a size that is not divisible gives uneven micro-batches. Default:
            processes x batch size of the DataLoader x gradient accumulation steps.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.
        whole_batch: A function (outputs, batch) -> the loss of all samples of a window, a scalar,
            for a loss that is not a sum over samples: in-batch negatives, the hardest samples. It
            gets the model's outputs for all samples of all processes, one row per sample, and their
            batch. The loop calls `model(**batch)` and passes the outputs to `backward`. Each
            micro-batch has two forwards. Parameters of a module `whole_batch` are trained, too.
        **kwargs: See `accelerate.Accelerator`.

    Attributes:
        training_loop: Runs the engine for the user's loop: the current window and micro-batch.
        epochs: Counts the epochs that each dataset was trained on.

    Raises:
        ConfigError: If the loop or a setting makes exact accumulation impossible.
        LossNotAdditive: If the loss is not a sum of means, or compares samples.
        UnkeyedRandomness: If the model or the loop draws random numbers that cannot be tied to a
            sample.

    Example:
        from hf_ga import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    """

    def __init__(
        self,
        *args: Any,
        global_batch_size: int | None = None,
        allow_split_dependent_randomness: bool = False,
        whole_batch: WholeBatchLoss | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the accelerator; see the class for the arguments."""
        super().__init__(*args, **kwargs)
        self.global_batch_size = global_batch_size
        self._requested_accumulation_steps = self.gradient_accumulation_steps
        self._allow_split_dependent_randomness = allow_split_dependent_randomness
        self._whole_batch = whole_batch
        check_supported(self)
        enable_fsdp_on_cpu(self)
        enable_fp16_on_cpu(self)
        self._forget_prepared_objects()

    def _forget_prepared_objects(self) -> None:
        """Reset `hf_ga.Accelerator` to a new one's state: no prepared model, loader, scheduler."""
        self.training_loop = TrainingLoop(
            self,
            allow_split_dependent_randomness=self._allow_split_dependent_randomness,
            whole_batch=self._whole_batch,
        )
        self.epochs = Epochs()
        self._initial_scheduler_states: list[InitialSchedulerState] = []

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as `accelerate.Accelerator.prepare` does.

        Under FSDP, gradients are reduced in float32.
        """
        models = [value for value in args if isinstance(value, nn.Module)]
        optimizers = [value for value in args if isinstance(value, torch.optim.Optimizer)]
        with exact_sharding(self, models, optimizers):
            return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare a model as `accelerate.Accelerator.prepare_model` does, and register it with the
        training loop.
        """
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if isinstance(prepared, nn.parallel.DistributedDataParallel):
            keep_process_group_alive(prepared)
            prepared.no_sync = partial(self.no_sync, prepared)  # which LocalSGD calls
        self.training_loop.add_model(model, prepared)
        return prepared

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        """Prepare a DataLoader as `accelerate.Accelerator.prepare_data_loader` does; it yields the
        micro-batches of windows while a model is in training mode.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        seed = loader_seed(data_loader)
        # On several processes, Accelerate draws a seed for the sampler: do not let it change the
        # random numbers that the script draws later.
        with preserved_random_states():
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        prepared = make_windowed(self, data_loader, prepared, seed)
        if self.global_batch_size is not None and prepared.shuffles:
            prepared.build_windows()  # sets the accumulation steps, which scripts read
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer as `accelerate.Accelerator.prepare_optimizer` does; its `step` then
        checks that the window's gradient is complete.

        Raises:
            ConfigError: If the optimizer's step needs a closure (LBFGS).
        """
        check_step(optimizer)
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = WindowOptimizer
            prepared.accelerator = self
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare a scheduler as `accelerate.Accelerator.prepare_scheduler` does, and remember its
        initial state, for a resume on another number of processes.
        """
        is_new = not getattr(scheduler, "_is_accelerate_prepared", False)
        prepared = super().prepare_scheduler(scheduler)
        if is_new and isinstance(prepared, AcceleratedScheduler):
            self._initial_scheduler_states.append(InitialSchedulerState(prepared))
            self._log_steps_of_scheduler(prepared)
        return prepared

    def _log_steps_of_scheduler(self, scheduler: AcceleratedScheduler) -> None:
        """Warn that a prepared scheduler steps once for each process at every update, as in
        Accelerate: if it was not built for that, the learning rates depend on their number.
        """
        steps_once = scheduler.split_batches or not scheduler.step_with_optimizer
        if self.num_processes > 1 and not steps_once:
            logger.warning(
                f"hf_ga: as in Accelerate, a prepared scheduler steps {self.num_processes} times "
                f"at every update, once for each process. If it was not built for "
                f"{self.num_processes} times as many steps (num_training_steps * "
                "accelerator.num_processes, and warmup likewise), the learning rates depend on the "
                "number of processes."
            )

    def free_memory(self, *objects: Any) -> Any:
        """Release everything that was prepared, as `accelerate.Accelerator.free_memory` does, and
        give up the current window.
        """
        self.training_loop.leave()
        self._forget_prepared_objects()
        return super().free_memory(*objects)

    # The loop

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Enclose a micro-batch's forward, backward and optimizer step, as in Accelerate.

        The loader has already set `sync_gradients`, which is true for the last micro-batch of a
        window. An error of the loop in a micro-batch of another size than the loader's says so.
        """
        self.training_loop.is_inside = True
        try:
            with self.training_loop.undone_on_error():
                yield
        except Exception as error:
            note = self.training_loop.note_on_error(error)
            if note is not None and not isinstance(error, HfGaError):
                error.add_note(note)
            raise

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: gradients are summed over processes where the window needs it.

        Raises:
            ConfigError: If LocalSGD calls it, whose processes train apart.
        """
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("accelerate.local_sgd"):
            raise ConfigError(
                "LocalSGD lets processes train apart between averages of their weights, so no "
                "split of a window is the full batch: leave it out."
            )
        return nullcontext()

    def backward(
        self, loss: Any, *, num_targets: float | Tensor | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Add the gradient of a loss of the current micro-batch to that of its window.

        What the loss averages over is read from its autograd graph. It is any sum of means: of the
        model's own loss, torch's loss functions, sums over a mask that are divided by its sum, ...

        Args:
            loss: The loss of this micro-batch, a scalar, neither divided by the accumulation steps
                nor scaled. With `whole_batch`, what the model returned for this micro-batch.
            num_targets: For a sum that is not divided: what it is summed over, the number of
                targets or the sum of their weights.
            **kwargs: `retain_graph`, as in `Tensor.backward`. Others are refused.

        Returns:
            With `whole_batch`, the loss of the whole window, a scalar without gradient, the same
            for each of its micro-batches. Otherwise None.

        Raises:
            ConfigError: If the loop does not call fetch, forward, backward and step in this order.
            LossNotAdditive: If the loss is not a sum of means, or compares samples.
            UnkeyedRandomness: If random numbers were drawn that cannot be tied to samples.

        Example:
            losses = F.cross_entropy(outputs.logits, labels, weight=weight, reduction="sum")
            accelerator.backward(losses, num_targets=weight[labels].sum())
        """
        retain_graph = bool(kwargs.pop("retain_graph", False))
        if kwargs:
            raise ConfigError(
                f"accelerator.backward got {', '.join(kwargs)}, but only takes a loss, num_targets "
                "and retain_graph. Leave it out."
            )
        with self.training_loop.undone_on_error():
            return self.training_loop.backward(loss, num_targets, retain_graph=retain_graph)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Unscale the gradients of fp16, as `accelerate.Accelerator.unscale_gradients` does.

        Within a window there are none yet, so nothing is done.
        """
        if self._has_gradients():
            super().unscale_gradients(optimizer)

    def _has_gradients(self) -> bool:
        """Whether the loop is at the end of a window, whose gradient appears now if it waits for
        another backward.
        """
        if self.sync_gradients:
            self.training_loop.complete()
        return self.sync_gradients

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Clip gradients, as `accelerate.Accelerator.clip_grad_norm_` does.

        Returns:
            The norm before clipping; 0 within a window, where there are no gradients yet.
        """
        if self._has_gradients():
            return super().clip_grad_norm_(*args, **kwargs)
        return torch.zeros((), device=self.device)

    def clip_grad_value_(self, *args: Any, **kwargs: Any) -> None:
        """Clip gradients, as `accelerate.Accelerator.clip_grad_value_` does.

        Within a window there are none yet, so nothing is done.
        """
        if self._has_gradients():
            super().clip_grad_value_(*args, **kwargs)

    @property
    def window_loss(self) -> Tensor | None:
        """The mean loss over all targets of the last complete window, a scalar without gradient.

        It is the same on all processes and for every split of the window, unlike the losses of
        micro-batches, so it is the number to log. None before the first window is complete.

        Example:
            if accelerator.sync_gradients:  # after `backward` of the window's last micro-batch
                print(f"loss {accelerator.window_loss.item():.4f}")
        """
        return self.training_loop.loss

    def gather(self, tensor: Any) -> Any:
        """Gather tensors from all processes as `accelerate.Accelerator.gather` does.

        In a training loop, their numbers of rows may differ, as those of micro-batches may.
        """
        gather = super().gather
        if self.training_loop.engine.slot is None:
            return gather(tensor)
        return recursively_apply(partial(gather_uneven, gather), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather values from all processes as `accelerate.Accelerator.gather_for_metrics` does.

        In a training loop, processes may have micro-batches of different sizes, and a process with
        fewer micro-batches than the others repeats a sample: its values are dropped, so that each
        sample counts once.
        """
        engine = self.training_loop.engine
        slot = engine.slot
        is_evaluation = getattr(self.gradient_state.active_dataloader, "is_yielding_windows", False)
        if slot is None or not is_evaluation:
            return super().gather_for_metrics(input_data, use_gather_object)
        num_rows = len(slot.micro_batch) if engine.counts_slot else 0
        return gather_rows(self, input_data, num_rows, as_objects=use_gather_object)

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
        """Skip batches of a loader's next epoch, as `accelerate.Accelerator.skip_first_batches`
        does.

        After `load_state`, a training loader ignores `num_batches` and continues at its own saved
        position, which does not depend on the number of processes or the batch size. Otherwise, a
        training loader can skip whole windows only.

        Returns:
            A loader that skips them; for a loader that yields windows, the same object.
        """
        if not isinstance(dataloader, WindowedDataLoader):
            return super().skip_first_batches(dataloader, num_batches)
        dataloader.num_to_skip = num_batches
        return dataloader

    def set_accumulation_steps(self, layout: Layout) -> None:
        """Set the accelerator's `gradient_accumulation_steps` to what follows from its
        `global_batch_size`.

        Args:
            layout: How a loader's windows are split into micro-batches.

        Raises:
            ConfigError: If the accelerator was made with another number of accumulation steps.
        """
        requested = self._requested_accumulation_steps
        if requested not in (1, layout.accumulation_steps):
            raise ConfigError(
                f"gradient_accumulation_steps {requested} does not fit a {layout}: leave it out, "
                "or leave global_batch_size out."
            )
        self.gradient_accumulation_steps = layout.accumulation_steps

    # Checkpoints

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Save a checkpoint as `accelerate.Accelerator.save_state` does, with the positions of the
        training loaders. All processes must call it.

        The file `hf_ga_state.json` is written last, when everything else is on the disk: `resume`
        ignores a folder without it, which a killed run has left.

        Returns:
            The folder of the checkpoint.

        Raises:
            ConfigError: If the window's optimizer step is not done: its gradients would be lost.
            CheckpointError: If a write fails, for example because the disk is full; on all
                processes.
        """
        check_can_save(self, has_updated=self.training_loop.has_updated)
        place = Path(output_dir or self.project_dir)
        if output_dir is not None and self.is_main_process:
            begin_to_write(place)
        with raise_on_all_ranks(self), writing(place, place.parent, "resume the run"):
            folder = super().save_state(output_dir, *args, **kwargs)
        with raise_on_all_ranks(self), writing(place, place.parent, "resume the run"):
            positions = loader_positions(self._dataloaders)
            if self.is_main_process:
                loop = self.training_loop
                SavedState(
                    num_processes=self.num_processes,
                    loaders=positions,
                    num_windows=loop.num_complete_windows,
                    num_updates_by_hand=loop.num_updates_by_hand,
                ).write(Path(folder))
        self.wait_for_everyone()
        return folder

    def resume(self, folder: str | Path) -> Resumed:
        """Load the last complete checkpoint in a folder, if there is one, and say where the loop
        goes on. Call it on all processes, after everything is prepared.

        The checkpoints are those of `save_state`, each in a folder of its own. One that was saved
        on another number of processes or with another batch size is continued with the same
        updates, if the windows have the same size (`global_batch_size`). The next iteration over
        the training loader begins at the checkpoint's position, so the loop skips nothing itself.

        Args:
            folder: The folder with the checkpoints, which all machines must share. If it does not
                exist or has no complete checkpoint, the loop starts from the beginning.

        Returns:
            The epoch and the number of steps to go on with.

        Raises:
            CheckpointError: If the checkpoint is that of another model, data set or window size, or
                if a process does not see it; on all processes.

        Example:
            start = accelerator.resume("outputs/run")
            step = start.step
            for epoch in range(start.epoch, num_epochs):
                for batch in loader:
                    with accelerator.accumulate(model):
                        ...
                    if accelerator.sync_gradients:
                        step += 1
                        if step % 100 == 0:
                            accelerator.save_state(f"outputs/run/step_{step}")
        """
        return resume(self, Path(folder))

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint as `accelerate.Accelerator.load_state` does, with the positions of the
        training loaders.

        If it was saved on another number of processes, learning rate schedules are converted to
        the same number of updates on this one. A window that was begun is given up.

        Raises:
            CheckpointError: If a training loader of the saved run was not prepared yet, or
                `save_state` was stopped while it wrote over an earlier checkpoint.
        """
        folder = folder_to_load(input_dir, self.project_dir)
        check_was_written(folder)
        super().load_state(input_dir, *args, **kwargs)
        self.training_loop.leave_window()
        saved = SavedState.read(folder)
        if saved is None:
            return
        self.training_loop.go_on_after(
            num_windows=saved.num_windows, num_updates_by_hand=saved.num_updates_by_hand
        )
        if self._optimizers:  # those of an evaluation need no position
            check_has_loaders(self._dataloaders, saved.loaders)
        restore_positions(self._dataloaders, saved.loaders)
        if saved.num_processes != self.num_processes:
            for initial_state in self._initial_scheduler_states:
                initial_state.convert(saved.num_processes, self.num_processes)


class WindowOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that steps on complete windows only.

    Attributes:
        accelerator: The accelerator that prepared it.
    """

    accelerator: Accelerator

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Zero the gradients as `AcceleratedOptimizer.zero_grad` does."""
        self.accelerator.training_loop.before_zero_grad(self)
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        """Step as `AcceleratedOptimizer.step` does, after a check that the window's gradient is
        complete.

        Before the window's last micro-batch, it does nothing.

        Raises:
            ConfigError: If the window's gradient is not complete at its end.
        """
        training_loop = self.accelerator.training_loop
        if not self.gradient_state.sync_gradients:
            training_loop.skip_step()
            return
        training_loop.before_step(self)
        if not self.gradient_state.sync_gradients:  # the window is computed once more
            return
        with training_loop.suspended():
            super().step(closure)
        training_loop.after_step()
