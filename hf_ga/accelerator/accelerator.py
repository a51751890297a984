"""`hf_ga.Accelerator`: Accelerate's own loop, in which any split of a window is the full batch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_ga.accelerator.call_order import BY_HAND
from hf_ga.accelerator.loader import Epochs, WindowedDataLoader, seed_of, windowed
from hf_ga.accelerator.metrics import gather_rows
from hf_ga.accelerator.sharding import prove_before_sharding
from hf_ga.accelerator.state import (
    SavedState,
    ScheduleStart,
    check_can_save,
    folder_to_load,
    positions_of,
    restore_positions,
)
from hf_ga.accelerator.training_loop import TrainingLoop
from hf_ga.errors import ConfigError
from hf_ga.exact.backend import keep_process_group_alive
from hf_ga.exact.generators import preserved_random_states
from hf_ga.exact.layout import Layout
from hf_ga.exact.precision import check_step
from hf_ga.exact.whole_window import WholeBatchLoss
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.prepare import enable_fp16_on_cpu, enable_fsdp_on_cpu, exact_sharding
from hf_ga.training import Given


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` with exact gradient accumulation.

    A prepared DataLoader hands out the micro-batches of windows while its model is in training
    mode: one window is the samples of one optimizer step over all processes. `backward` takes the
    model's own loss of a micro-batch and adds its part of the mean loss over all targets of the
    window. Dropout and the order of samples depend on the seed, the epoch and the sample only. So
    every split of a window makes the same update. In evaluation mode everything is Accelerate's.

    Args:
        *args: See `accelerate.Accelerator`.
        global_batch_size: Samples in one window over all processes. Accumulation steps follow from
            it, and sizes that do not divide give uneven micro-batches. Default: processes x batch
            size of the DataLoader x gradient accumulation steps.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.
        audit: Test the model's loss again on the windows that are trained on, before their updates.
            False accepts that a kind of row which the proof did not see trains a wrong gradient.
        whole_batch: (outputs, batch) -> the loss of all samples of a window, a scalar; see
            `hf_ga.prepare`. Then the loop passes the model's outputs to `backward`.
        **kwargs: See `accelerate.Accelerator`.

    Attributes:
        training_loop: The window and the micro-batch that the loop is in.
        epochs: Of the datasets that were trained on.

    Raises:
        ConfigError: If the loop or a setting makes exact accumulation impossible.
        LossNotAdditive: If the loss is not one that is proven to add up.
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
        audit: bool = True,
        whole_batch: WholeBatchLoss | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.global_batch_size = global_batch_size
        self._given_steps = self.gradient_accumulation_steps
        self._given = Given(
            whole_batch=whole_batch,
            allow_split_dependent_randomness=allow_split_dependent_randomness,
            audit=audit,
        )
        enable_fsdp_on_cpu(self)
        enable_fp16_on_cpu(self)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget everything that was prepared."""
        self.training_loop = TrainingLoop(self, self._given)
        self.epochs = Epochs()
        self._schedules: list[ScheduleStart] = []

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As `accelerate.Accelerator.prepare`; under FSDP, gradients are reduced in float32."""
        models = [value for value in args if isinstance(value, nn.Module)]
        loaders = [value for value in args if isinstance(value, DataLoader)]
        if models and is_sharded(self):
            prove_before_sharding(self, models, loaders, self._given)
        optimizers = [value for value in args if isinstance(value, torch.optim.Optimizer)]
        with exact_sharding(self, models, optimizers):
            return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """See `accelerate.Accelerator.prepare_model`."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if isinstance(prepared, nn.parallel.DistributedDataParallel):
            keep_process_group_alive(prepared)
        self.training_loop.add_model(prepared)
        return prepared

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        """As `accelerate.Accelerator.prepare_data_loader`; the loader hands out windows while its
        model trains.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        seed = seed_of(data_loader)
        with preserved_random_states():  # on several processes Accelerate draws a seed of its own
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        prepared = windowed(self, data_loader, prepared, seed)
        if self.global_batch_size is not None and prepared.shuffles:
            prepared.windows  # noqa: B018 - sets the accumulation steps, which scripts read
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> AcceleratedOptimizer:
        """As `accelerate.Accelerator.prepare_optimizer`; a step needs a complete window.

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
        """See `accelerate.Accelerator.prepare_scheduler`."""
        is_new = not getattr(scheduler, "_is_accelerate_prepared", False)
        prepared = super().prepare_scheduler(scheduler)
        if is_new and isinstance(prepared, AcceleratedScheduler):
            self._schedules.append(ScheduleStart(prepared))
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """See `accelerate.Accelerator.free_memory`."""
        self.training_loop.close()
        self._begin_anew()
        return super().free_memory(*objects)

    clear = free_memory

    # The loop

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Around a forward, a backward and the optimizer's step, as in Accelerate.

        The loader has already set `sync_gradients`: it is true for the last micro-batch of a
        window.
        """
        yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Not for use by hand: gradients are summed once per window.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "accelerator.no_sync (which LocalSGD uses, too) leaves gradients unsynchronised by "
            f"hand, but hf_ga sums them once per window by itself. {BY_HAND}"
        )

    def backward(
        self, loss: Any, *, num_targets: float | Tensor | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Add the gradient of a micro-batch's part of the window's mean loss.

        Args:
            loss: The model's own loss of this micro-batch, neither divided nor scaled. A criterion
                with the same mean, and a penalty on the weights, are recognised. With
                `num_targets`, any sum over targets, a scalar. With `whole_batch`, what the model
                returned for this micro-batch.
            num_targets: What `loss` is summed over: targets, or a sum of weights.
            **kwargs: Of `accelerate.Accelerator.backward`; `retain_graph` and others are refused.

        Returns:
            With `whole_batch`, the loss of the window, the same in each of its micro-batches.

        Raises:
            ConfigError: If the loop does not follow the order of calls of `accumulate`.
            LossNotAdditive: If the loss is another than the one that was proven.

        Example:
            losses = F.cross_entropy(outputs.logits, labels, weight=weight, reduction="sum")
            accelerator.backward(losses, num_targets=weight[labels].sum())
        """
        if kwargs:
            raise ConfigError(
                f"accelerator.backward got {', '.join(kwargs)}: one backward per micro-batch is "
                "all that a window needs. Leave it out."
            )
        return self.training_loop.backward(loss, num_targets)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `accelerate.Accelerator.gather_for_metrics`. In a training loop, the values of a
        micro-batch that only fills up the loader's length are left out, so no sample counts twice.
        """
        engine = self.training_loop.engine
        call = None if engine is None else engine.call
        if call is None or not self.training_loop.is_in_windows:
            return super().gather_for_metrics(input_data, use_gather_object)
        num_rows = len(call.micro_batch) if call.weight else 0
        return gather_rows(self, input_data, num_rows, as_objects=use_gather_object)

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
        """As `accelerate.Accelerator.skip_first_batches`.

        After `load_state`, a training loader continues at its own saved position, which other
        processes and batch sizes share, whatever `num_batches` says. Otherwise whole windows can
        be skipped.
        """
        if not isinstance(dataloader, WindowedDataLoader):
            return super().skip_first_batches(dataloader, num_batches)
        dataloader.num_to_skip = num_batches
        return dataloader

    def set_accumulation_steps(self, layout: Layout) -> None:
        """Use the accumulation steps that follow from `global_batch_size`.

        Args:
            layout: Of the windows of a loader.

        Raises:
            ConfigError: If others were asked for.
        """
        given = self._given_steps
        if given not in (1, layout.accumulation_steps):
            raise ConfigError(
                f"gradient_accumulation_steps {given} does not fit a {layout}: leave it out, or "
                "leave global_batch_size out."
            )
        self.gradient_accumulation_steps = layout.accumulation_steps

    # Checkpoints

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """As `accelerate.Accelerator.save_state`, and the position of the loaders.

        Raises:
            ConfigError: If the window is not complete: its gradients would be lost.
        """
        check_can_save(self, is_complete=self.training_loop.order.is_complete)
        location = super().save_state(output_dir, *args, **kwargs)
        positions = positions_of(self._dataloaders)
        if self.is_main_process:
            passes_own_loss = self.training_loop.terms.passes_own_loss
            SavedState(self.num_processes, positions, passes_own_loss).write(Path(location))
        self.wait_for_everyone()
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As `accelerate.Accelerator.load_state`, and the position of the loaders. Schedules are
        where they are after as many updates on this number of processes.
        """
        folder = folder_to_load(input_dir, self.project_dir)
        super().load_state(input_dir, *args, **kwargs)
        self.training_loop.leave_window()
        saved = SavedState.read(folder)
        if saved is None:
            return
        self.training_loop.terms.passes_own_loss = saved.passes_own_loss
        restore_positions(self._dataloaders, saved.loaders)
        if saved.num_processes != self.num_processes:
            for schedule in self._schedules:
                schedule.convert(saved.num_processes, self.num_processes)


class WindowOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that steps on complete windows only.

    Attributes:
        accelerator: The accelerator that prepared it.
    """

    accelerator: Accelerator

    def step(self, closure: Any = None) -> None:
        """See `accelerate.optimizer.AcceleratedOptimizer.step`."""
        if self.gradient_state.sync_gradients:
            self.accelerator.training_loop.check_step(self)
        super().step(closure)
