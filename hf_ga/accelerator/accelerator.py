"""`hf_ga.Accelerator`: Accelerate's own loop, in which any split of a window is the full batch."""

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hf_ga.accelerator.across_samples import (
    depends_across_samples,
    operation_across_samples,
)
from hf_ga.accelerator.criteria import CriteriaWatch, Mean
from hf_ga.accelerator.first_forward import prove_first_forward
from hf_ga.accelerator.loader import WindowedDataLoader, seed_of, windowed
from hf_ga.accelerator.losses import GivenSum, Seen, check_factor, check_loss, mean_of
from hf_ga.accelerator.outputs import ForwardWatch, loss_of, tensors_of
from hf_ga.accelerator.state import SavedState, ScheduleStart
from hf_ga.errors import (
    ConfigError,
    DataError,
    HfGaError,
    LossNotAdditive,
    NoLoss,
    UnkeyedRandomness,
)
from hf_ga.exact.audit import is_small
from hf_ga.exact.backend import keep_process_group_alive
from hf_ga.exact.base_loader import BaseLoader
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import unwrapped
from hf_ga.exact.generators import moved_generators, preserved_random_states, random_states
from hf_ga.exact.layout import Layout
from hf_ga.exact.loss import HeadMean, Loss, WithRouter
from hf_ga.exact.precision import check_step
from hf_ga.exact.rule import Rule
from hf_ga.exact.whole_window import WholeBatchLoss, WholeWindow, parameters_of
from hf_ga.exact.window import Window
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.main_proof import prove_where_weights_are
from hf_ga.parallel.prepare import (
    enable_fp16_on_cpu,
    enable_fsdp_on_cpu,
    exact_sharding,
)
from hf_ga.parallel.processes import gather_uneven
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.packing import Packing
from hf_ga.training import (
    NUM_PROOF_SAMPLES,
    Given,
    default_speed_ups,
    engine_for,
    prove_targets,
    remember,
)

BY_HAND = (
    "This loop accumulates by hand: pass gradient_accumulation_steps to Accelerator, put the "
    "forward and backward into `with accelerator.accumulate(model):`, and pass the undivided loss "
    "to accelerator.backward."
)
OTHER_LOSS = (
    "the loop passed the model's own loss before, and now another one, whose outputs were computed "
    "without the window's padding: use one loss from the first batch on."
)


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
        self.audit = audit
        self.whole_batch = whole_batch
        self.global_batch_size = global_batch_size
        self._given_steps = self.gradient_accumulation_steps
        self.allow_split_dependent_randomness = allow_split_dependent_randomness
        self._forget()
        enable_fsdp_on_cpu(self)
        enable_fp16_on_cpu(self)

    def _forget(self) -> None:
        """Forget everything that was prepared."""
        for watch in getattr(self, "_watches", {}).values():
            watch.remove()
        self._prepared: dict[nn.Module, nn.Module] = {}  # the model inside -> the prepared one
        self._watches: dict[nn.Module, ForwardWatch] = {}
        self._schedules: list[ScheduleStart] = []
        self._engine: Engine | None = None
        self._open = ExitStack()  # of the micro-batch that was handed out
        self._window = ExitStack()  # of the window
        self._gradient: tuple[Tensor, int] | None = None  # after the last backward
        self._is_waiting = False  # for the backward of that micro-batch
        self._had_backward = False  # that micro-batch
        self._index = 0  # of that micro-batch in its window
        self._num_windows = 0
        self._is_complete = True  # all backwards of the window were made
        self._was_interrupted = False  # the window before was left by `break`
        self._epochs: dict[int, int] = {}  # id of a dataset -> the epoch that was begun last
        self._heads: dict[tuple, bool] = {}  # kind of a loss -> it is the model's own
        self._criterion_kinds: set[tuple] = set()  # of losses that are means of torch
        self._warned_of_number = False
        self._sum_kinds: set[tuple] = set()  # of sums that do not compare samples
        self._passes_own_loss = False  # the very tensor that the model returned
        self._criteria = CriteriaWatch()  # of the micro-batch
        self._source: str | None = None  # where the losses of the window come from
        self._head: Loss | None = None  # counts the targets of a model proven in its first forward

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As `accelerate.Accelerator.prepare`; under FSDP, gradients are reduced in float32."""
        models = [value for value in args if isinstance(value, nn.Module)]
        loaders = [value for value in args if isinstance(value, DataLoader)]
        if models and is_sharded(self):
            self._prove_before_sharding(models, loaders)
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
        self._prepared[unwrapped(prepared)] = prepared
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
            prepared.owner = self
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
        self.leave_micro_batch()
        self._forget()
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
        if not self._is_waiting:
            raise ConfigError(self._why_nothing_waits())
        if self._engine is not None:
            self._check_gradients()
        try:
            with self._failing_on_all_ranks():
                self._backward(loss, num_targets)
        finally:
            self._is_waiting = False
            self._had_backward = True
        with self._failing_on_all_ranks():
            self._open.close()
        if self._index == len(self._engine.calls) - 1:
            self._window.close()
            self._engine.end()
            self._is_complete = True
        else:
            self._gradient = _first_gradient(self._engine.parameters)
        window_loss = self._engine.loss
        return window_loss.value if isinstance(window_loss, WholeWindow) else None

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `accelerate.Accelerator.gather_for_metrics`. In a training loop, the values of a
        micro-batch that only fills up the loader's length are left out, so no sample counts twice.
        """
        engine = self._engine
        if engine is None or engine.call is None or not self._in_windows:
            return super().gather_for_metrics(input_data, use_gather_object)
        number = len(engine.call.micro_batch) if engine.call.weight else 0
        if use_gather_object or not _all_tensors(input_data):
            values = list(input_data)[:number]
            return gather_object(values)
        return accelerate.utils.operations.recursively_apply(
            lambda value: gather_uneven(self.gather, value[:number] if value.dim() else value),
            input_data,
        )

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

    # Checkpoints

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """As `accelerate.Accelerator.save_state`, and the position of the loaders.

        Raises:
            ConfigError: If the window is not complete: its gradients would be lost.
        """
        if not self._is_complete:
            raise ConfigError(
                "save_state within a window would lose the gradients of its first micro-batches: "
                "save after optimizer.step(), when accelerator.sync_gradients is true."
            )
        if is_sharded(self) and not self.is_fsdp2 and self.device.type == "cpu":
            raise ConfigError(
                "save_state: FSDP1 on CPU processes frees the weights that torch gathers for the "
                "checkpoint, and the process would crash. On a CPU use FSDP2 or DDP."
            )
        location = super().save_state(output_dir, *args, **kwargs)
        loaders = [
            loader.state() if isinstance(loader, WindowedDataLoader) and loader.has_begun else None
            for loader in self._dataloaders
        ]
        if self.is_main_process:
            state = SavedState(self.num_processes, loaders, self._passes_own_loss)
            state.write(Path(location))
        self.wait_for_everyone()
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As `accelerate.Accelerator.load_state`, and the position of the loaders. Schedules are
        where they are after as many updates on this number of processes.
        """
        folder = self._folder_to_load(input_dir)
        super().load_state(input_dir, *args, **kwargs)
        self.leave_micro_batch()
        self._is_complete = True
        saved = SavedState.read(folder)
        if saved is None:
            return
        self._passes_own_loss = saved.passes_own_loss
        for loader, state in zip(self._dataloaders, saved.loaders, strict=False):
            if state is not None and isinstance(loader, WindowedDataLoader):
                loader.restore(state)
        if saved.num_processes != self.num_processes:
            for schedule in self._schedules:
                self._step_again(schedule, saved.num_processes)

    # What the loaders call

    @property
    def _in_windows(self) -> bool:
        """Whether the active loader hands out windows."""
        return isinstance(self.gradient_state.active_dataloader, WindowedDataLoader) and (
            self.gradient_state.active_dataloader.in_windows
        )

    def training_model(self) -> nn.Module | None:
        """The prepared model that is in training mode and has something to train.

        Raises:
            ConfigError: If there are several.
        """
        # Of a model under DDP, Accelerate's list has the model inside.
        bases = dict.fromkeys(unwrapped(model) for model in self._models)
        found = [base for base in bases if base.training and _is_trainable(base)]
        if len(found) > 1:
            names = ", ".join(type(base).__name__ for base in found)
            raise ConfigError(
                f"{len(found)} prepared models are in training mode ({names}), but a window is "
                "that of one model: put them into one nn.Module and prepare that, or call eval() "
                "or requires_grad_(False) on those that are not trained."
            )
        return self._prepared.get(found[0], found[0]) if found else None

    def begin_window(
        self, model: nn.Module, window: Window, *, has_names: bool
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        """Hand out the micro-batches of a window: each batch, and whether it is the last one.

        Args:
            model: The prepared model that is trained.
            window: The window.
            has_names: Whether the user's collate function returns named entries, so that the model
                can be called with them for its proof.
        """
        self._check_order()
        self._check_syncs(model)
        self._keep_given(model)
        if not self._passes_own_loss and self.whole_batch is None:
            # A loss of the loop's own may average over the padding, too.
            window = window.padded_to_window()
        num_calls = window.request.most_micro_batches
        self._num_windows += 1
        self._was_interrupted = not self._is_complete
        self._is_complete = False
        self._source = None
        self._window.close()
        handle = register_optimizer_step_pre_hook(self._before_any_step)
        self._window.callback(handle.remove)
        self._engine = self._engine_if_known(model, window, has_names)
        if self._engine is not None:
            self._begin(self._engine, window)
        for index in range(num_calls):
            if index:
                self._check_order()
            self._index = index
            self._is_waiting = True
            self._had_backward = False
            is_last = index == num_calls - 1
            self.step = index + 1
            self.gradient_state._set_sync_gradients(is_last)
            if self._engine is None:
                batch = self._first_batch(model, window)
            else:
                batch = self._enter(model, index)
            yield batch, is_last

    def _keep_given(self, model: nn.Module) -> None:
        known = vars(self).get("_hf_ga_given", {})
        if unwrapped(model) not in known:
            allowed = self.allow_split_dependent_randomness
            given = Given(
                whole_batch=self.whole_batch,
                allow_split_dependent_randomness=allowed,
                audit=self.audit,
            )
            remember(self, model, given)

    def _engine_if_known(self, model: nn.Module, window: Window, has_names: bool) -> Engine | None:
        """The engine of a window. None if only the first forward of the loop will show how the
        model is called, and what its loss is.
        """
        base = unwrapped(model)
        is_proven = base in window.state.rules or vars(self)["_hf_ga_given"][base].rule is not None
        if not is_proven and not has_names:
            if self.whole_batch is not None:
                raise ConfigError(
                    "whole_batch needs batches by name, as the model is called with them once "
                    "more: let the collate function return a dict, and call model(**batch)."
                )
            return None
        try:
            return engine_for(self, model, window)
        except NoLoss:
            return None
        except HfGaError:
            raise
        except Exception:
            if is_proven or self.whole_batch is not None:
                raise
            return None  # the loop calls the model in another way, or its own call fails, too

    def _usable(self, rule: Rule) -> Rule:
        """The rule without speed-ups that outputs would show which a loop may read.

        Packing leaves hidden states at the padding empty, so it is used once the loop has passed
        the model's own loss. Logits that are computed later would need weights that FSDP has
        sharded again.
        """
        left_out: tuple[type, ...] = ()
        if not self._passes_own_loss:
            left_out += (Packing,)
        if is_sharded(self):
            left_out += (ChunkedLoss,)
        usable = tuple(hook for hook in rule.speed_ups if not isinstance(hook, left_out))
        return replace(rule, speed_ups=usable)

    def _begin(self, engine: Engine, window: Window) -> None:
        engine.rule = self._usable(engine.rule)
        engine.begin(window, num_calls=window.request.most_micro_batches)
        if self.scaler is not None and not engine.has_targets:
            raise DataError(
                f"window {window.index} of epoch {window.epoch} has no targets, so it has no loss "
                "for fp16 to scale: remove such samples."
            )

    def _enter(self, model: nn.Module, index: int) -> dict[str, Any]:
        """Put the state of a micro-batch into effect until its backward. Gives its batch."""
        self._open = ExitStack()
        self._watch_criteria(model)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._open.enter_context(model.no_sync())  # gradients are summed once, at the end
        engine = self._engine
        self._open.enter_context(engine.scope())
        batch = self._open.enter_context(engine.micro_batch(index))
        watch = self._watch_of(model)
        is_counted_in_forward = isinstance(engine.rule.loss, GivenSum)
        watch.start(None if is_counted_in_forward else engine.arguments(batch))
        watch.learn_again = partial(self._learn_again, model)
        return batch

    def _learn_again(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The loop calls the model with something else than the batch: prove it so.

        Raises:
            ConfigError: If the loop called it with the batch before.
        """
        if self.whole_batch is not None:
            raise ConfigError(
                "whole_batch needs the model to be called as model(**batch), with the batch that "
                "the loader returned: its forward runs once more before the loop's."
            )
        if self._num_windows > 1 or self._index:
            raise ConfigError(
                "the model was called with the entries of the batch before, and now with others "
                "(changed labels, another mask, more arguments), so their targets were counted "
                "wrongly: change them in the collate function."
            )
        number = len(self._engine.call.micro_batch)
        self._open.close()  # the proof must not run within this micro-batch's speed-ups
        self._random_states = random_states()
        self._learn(model, self._engine.window, number, args, kwargs)

    def _watch_criteria(self, model: nn.Module) -> None:
        """Until the backward, note the loss functions that the loop calls."""
        self._criteria.start(unwrapped(model))
        self._open.callback(self._criteria.turn_off)

    def _watch_of(self, model: nn.Module) -> ForwardWatch:
        if model not in self._watches:
            self._watches[model] = ForwardWatch(
                model,
                is_open=lambda: self._is_waiting,
                criteria=self._criteria,
                give_up=self.leave_micro_batch,
                notes_tensors=self.whole_batch is not None,
            )
        return self._watches[model]

    def _first_batch(self, model: nn.Module, window: Window) -> dict[str, Any]:
        """The first batch of a model that is proven in its first forward."""
        window = window.padded_to_window()
        own = window.micro_batches or window.split([np.array([0])]).micro_batches
        watch = self._watch_of(model)
        watch.start()
        watch.learn = partial(self._learn, model, window, len(own[0]))
        self._open = ExitStack()
        self._watch_criteria(model)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._open.enter_context(model.no_sync())
        self._random_states = random_states()
        return send_to_device(own[0].batch, self.device)

    def _learn(
        self,
        model: nn.Module,
        window: Window,
        num_samples: int,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        """At the start of the first forward: prove the model on its arguments, begin the window."""
        base = unwrapped(model)
        moved = moved_generators(self._random_states)
        if moved and not self.allow_split_dependent_randomness:
            raise UnkeyedRandomness(
                f"the loop drew from {' and '.join(moved)} between fetching a batch and its "
                "forward: this randomness depends on the split of the window. Draw it in the "
                "dataset or the collate function, where it is seeded for each sample, or accept it "
                "with Accelerator(allow_split_dependent_randomness=True)."
            )
        rule, self._head = prove_first_forward(
            base,
            args,
            kwargs,
            num_samples,
            allow_split_dependent_randomness=self.allow_split_dependent_randomness,
        )
        window.state.rules[base] = rule
        window.state.pad_to_window = True
        self._engine = engine_for(self, model, window)
        self._begin(self._engine, window)
        self._open.close()
        self._enter(model, 0)
        rule.dropout.join_forward(args, kwargs)

    def begin_other_batches(self) -> None:
        """A loader hands out Accelerate's own batches: no model is in training mode."""
        self._had_backward = False

    def first_epoch(self, dataset: Any) -> int:
        """The epoch that a new loader of a dataset begins with: a loop may make its loader anew for
        each epoch.
        """
        return self._epochs.get(id(dataset), -1) + 1

    def note_epoch(self, dataset: Any, epoch: int) -> None:
        """An epoch of a dataset begins."""
        self._epochs[id(dataset)] = epoch

    def same_on_all_ranks(self, value: Any) -> Any:
        """The main process's value."""
        return broadcast_object_list([value])[0] if self.num_processes > 1 else value

    def set_accumulation_steps(self, layout: Layout) -> None:
        """The accumulation steps that follow from `global_batch_size`.

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

    def load_position(self, windows: BaseLoader, state: dict[str, Any]) -> None:
        """Continue at a saved position, which any layout of the same windows shares."""
        windows.use_seed(state["seed"])
        windows.load_state_dict(state)
        if hasattr(windows, "__len__") and windows.num_consumed >= len(windows):
            windows.set_epoch(windows.epoch + 1)

    def check_complete(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer's step: all micro-batches of the window had their backward.

        Raises:
            ConfigError: If not, and there are gradients.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._engine is not None and self._is_complete:
            known = {*self._engine.parameters, *parameters_of(self.whole_batch)}
            if any(p.grad is not None and p not in known for p in parameters):
                raise ConfigError(
                    "the optimizer has parameters with a gradient that are not in the prepared "
                    "model (a head, a temperature), which are not summed over the window: make "
                    "them part of the model."
                )
            return
        if not any(p.grad is not None and bool(p.grad.any()) for p in parameters):
            return
        raise ConfigError(
            "optimizer.step() came before accelerator.backward of every micro-batch of the window "
            "(loss.backward() bypasses the accelerator, and so does a DataLoader that was not "
            f"prepared). {BY_HAND}"
        )

    # Details

    def _backward(self, loss: Tensor, num_targets: float | Tensor | None) -> None:
        engine = self._engine
        if engine is None:
            raise LossNotAdditive(
                "the loss does not come from a training forward of the prepared model on this "
                "batch: call the model that accelerator.prepare returned."
            )
        if self.whole_batch is not None:
            self._backward_of_outputs(loss, num_targets)
            return
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise LossNotAdditive(
                "accelerator.backward needs one number, the loss of the micro-batch, got "
                f"{_described(loss)}."
            )
        self._check_unpacked(loss)
        loss = loss.reshape(()) if loss.dim() else loss
        if num_targets is not None:
            number = float(num_targets)
            self._check_sum(loss)
            self._check_number(loss, number)
            self._count_in_forward("num_targets")
            engine.backward((loss, number))
        elif self._is_head(loss):
            self._backward_of_head(loss)
        else:
            mean = self._mean_of(loss)
            self._count_in_forward("a criterion")
            self._backward_of_mean(loss, mean.number())

    def _backward_of_outputs(self, outputs: Any, num_targets: float | Tensor | None) -> None:
        """Backward through the model's outputs, of which `whole_batch` is the loss."""
        watch = self._watch_of(self._engine.model)
        if num_targets is not None or not watch.returned(outputs):
            raise ConfigError(
                "with whole_batch, accelerator.backward takes what the model returned for this "
                "micro-batch, unchanged and alone: outputs = model(**batch); "
                "accelerator.backward(outputs)."
            )
        self._engine.backward(outputs)

    def _check_sum(self, loss: Tensor) -> None:
        """Check that a sum does not compare samples, in windows 1, 2, 4, 8, ... and whenever it is
        made by other operations than before.

        Raises:
            LossNotAdditive: If it does.
        """
        kind = _kind_of(loss)
        if kind in self._sum_kinds and not self._is_due:
            return
        outputs = self._watch_of(self._engine.model).outputs
        number = len(self._engine.call.micro_batch)
        found = self._comparison_in(loss, outputs, number) if number > 1 else None
        if found is not None:
            raise LossNotAdditive(
                f"the sum that this loop passes compares the samples of a micro-batch ({found}), "
                "so no number of targets makes it exact: pass it as Accelerator(whole_batch=...), "
                "which gets all samples of a window."
            )
        self._sum_kinds.add(kind)

    def _comparison_in(self, loss: Tensor, outputs: Any, num_samples: int) -> str | None:
        """What in a sum compares the samples of a micro-batch."""
        tensors = tensors_of(outputs)
        found = operation_across_samples(loss, tensors)
        # FSDP takes a gradient of the outputs for the beginning of the backward.
        can_differentiate = is_small(outputs) and not is_sharded(self)
        if found is None and can_differentiate:
            is_mixed = depends_across_samples(loss, tensors, num_samples)
            found = "their gradients depend on each other" if is_mixed else None
        return found

    def _check_number(self, loss: Tensor, number: float) -> None:
        """Check that a number of targets was not raised to 1 for a micro-batch without any. Where
        the sum is not 0, that cannot be told from one target: then warn once.

        Raises:
            LossNotAdditive: If the sum is 0: the window would be divided by too many.
        """
        num_samples = len(self._engine.call.micro_batch)
        if number != 1 or num_samples == 1:
            return
        if not self._warned_of_number:
            self._warned_of_number = True
            warnings.warn(
                f"hf_ga: num_targets is 1 for a micro-batch of {num_samples} samples. If that is "
                "max(number, 1), the window is divided by too many: pass the plain number, which "
                "may be 0.",
                stacklevel=4,
            )
        if bool(loss == 0):
            raise LossNotAdditive(
                f"the sum is 0 and num_targets is 1 for a micro-batch of {num_samples} samples, as "
                "with max(number, 1): such micro-batches would count as targets of the window. "
                "Pass the plain number; it may be 0."
            )

    def _is_head(self, loss: Tensor) -> bool:
        """Whether a loss is the model's own, up to something that does not depend on the data.

        What is not the very tensor that the model returned is looked at in windows 1, 2, 4, 8, ...
        and whenever it is made by other operations than before.

        Raises:
            LossNotAdditive: If it is neither that nor a mean of torch's loss functions.
        """
        seen = self._seen()
        head = loss_of(seen.outputs)
        if head is None:
            return False
        if loss is head:
            return True
        kind = _kind_of(loss)
        if kind in self._heads and not self._is_due:
            if self._heads[kind]:
                check_factor(loss, seen)
            return self._heads[kind]
        try:
            check_loss(loss, seen)
            self._heads[kind] = True
        except LossNotAdditive:
            if not seen.means:
                raise
            mean_of(loss, seen)
            self._heads[kind] = False
        return self._heads[kind]

    @property
    def _is_due(self) -> bool:
        """Whether this is window 1, 2, 4, 8, ... since the accelerator was made."""
        return self._num_windows & (self._num_windows - 1) == 0

    def _seen(self) -> Seen:
        """What was seen of the micro-batch that waits for its backward."""
        return Seen(
            self._watch_of(self._engine.model).outputs,
            self._criteria.found,
            self._criteria.ran_outside,
            len(self._engine.call.micro_batch),
            self.gradient_accumulation_steps,
            frozenset(
                value.untyped_storage().data_ptr()
                for value in self._engine.call.batch.values()
                if isinstance(value, Tensor)
            ),
        )

    def _mean_of(self, loss: Tensor) -> Mean:
        """The mean of one of torch's loss functions that a loss is."""
        kind = _kind_of(loss)
        if kind in self._criterion_kinds and not self._is_due:
            for mean in self._criteria.found:
                if mean.value is loss:
                    return mean
        mean = mean_of(loss, self._seen())
        self._criterion_kinds.add(kind)
        return mean

    def _check_unpacked(self, loss: Tensor) -> None:
        """Note whether the loop passes the very loss that the model returned: then the next window
        may be packed.

        Raises:
            ConfigError: If it is another loss, of a forward that was packed.
        """
        self._passes_own_loss = loss is loss_of(self._watch_of(self._engine.model).outputs)
        is_packed = any(isinstance(hook, Packing) for hook in self._engine.rule.speed_ups)
        if is_packed and not self._passes_own_loss:
            raise ConfigError(OTHER_LOSS)

    def _backward_of_head(self, loss: Tensor) -> None:
        """Backward of the model's own loss, or of one that differs by a penalty only."""
        engine = self._engine
        self._use("the model's loss")
        watch = self._watch_of(engine.model)
        if isinstance(engine.loss, GivenSum):  # of a model that was proven in its first forward
            self._backward_of_mean(loss, self._head.count(watch.arguments, watch.num_samples)[0])
            return
        inner = engine.loss.loss if isinstance(engine.loss, WithRouter) else engine.loss
        if isinstance(inner, HeadMean):
            engine.backward(loss, is_whole=loss is loss_of(watch.outputs))
            return
        # A sum of means is computed from the outputs; a penalty on the weights is in the loss only.
        term, counts = engine.term(watch.outputs)
        head = loss_of(watch.outputs)
        if loss is not head and head is not None:
            share = len(engine.call.micro_batch) / engine.window.num_samples
            term = term + (loss - head) * share
        engine.backward_term(term, counts)

    def _backward_of_mean(self, loss: Tensor, number: float) -> None:
        """Backward of a mean over `number` targets; without targets it is 0 / 0 and left out."""
        total = loss * number if number else 0.0
        self._engine.backward((total, number))

    def _use(self, source: str) -> None:
        """Note where the loss of this micro-batch comes from.

        Raises:
            ConfigError: If it is another source than in the window's other micro-batches.
        """
        if self._index and self._source != source:
            raise ConfigError(
                f"the losses of one window come from {self._source} and from {source}: use one of "
                "them for all micro-batches."
            )
        self._source = source

    def _count_in_forward(self, source: str) -> None:
        """This window's loss is a sum whose targets are counted after the forwards."""
        engine = self._engine
        self._use(source)
        engine.window.state.pad_to_window = True
        if not engine.window.request.whole_window:
            raise ConfigError(OTHER_LOSS)
        if isinstance(engine.loss, GivenSum):
            return
        if isinstance(engine.loss, WithRouter):
            raise ConfigError(
                f"{source}: the loss of this model has a router's balancing loss, which would be "
                "lost. Pass the model's own loss, or set output_router_logits=False."
            )
        engine.count_in_forward(GivenSum())

    @contextmanager
    def _failing_on_all_ranks(self) -> Iterator[None]:
        """An error of hf_ga on one of several ranks is raised on all, at the end of the window."""
        try:
            yield
        except HfGaError as error:
            is_alone = self.num_processes == 1 or self._engine is None
            if is_alone or self._engine.backend.is_sharded:
                self.leave_micro_batch()
                raise
            if self._engine.status.failure is None:
                self._engine.status.failure = error

    def leave_micro_batch(self) -> None:
        """Give up the micro-batch that was handed out, without its backward."""
        self._is_waiting = False
        stack = self._open
        self._open = ExitStack()
        with contextlib.suppress(HfGaError):  # what it checks does not matter any more
            stack.close()

    def _check_order(self) -> None:
        """Before a batch is handed out: the one before had its backward."""
        if not self._is_waiting:
            return
        self.leave_micro_batch()
        raise ConfigError(
            "a batch was fetched before accelerator.backward of the one before it. If this is an "
            "evaluation, call model.eval() before it. If the loop collects several batches, or "
            f"calls loss.backward() itself: {BY_HAND}"
        )

    def _check_syncs(self, model: nn.Module) -> None:
        """Before a window: nobody else has turned the summing of gradients off.

        Raises:
            ConfigError: If somebody has: LocalSGD, or a loop that uses `model.no_sync()`.
        """
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        if is_ddp and not model.require_backward_grad_sync:
            raise ConfigError(
                "model.no_sync() (LocalSGD uses it) leaves gradients of the processes apart, but "
                f"hf_ga sums them once per window. Leave LocalSGD out. {BY_HAND}"
            )

    def _check_gradients(self) -> None:
        """Before a backward: there are the gradients of the window's earlier micro-batches, and no
        others.

        Raises:
            ConfigError: If not.
        """
        if self._engine.backend.is_sharded and self._index:
            return  # FSDP makes its gradients anew
        if self._index:
            if not _is_untouched(self._gradient, _first_gradient(self._engine.parameters)):
                raise ConfigError(
                    "gradients were changed within a window (zero_grad, or a change by hand), so "
                    "those of its first micro-batches are lost: call zero_grad after "
                    "optimizer.step(), and change gradients when accelerator.sync_gradients is "
                    "true."
                )
            return
        updated = {
            p
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        left = []
        for parameter in self._engine.parameters:
            if parameter.grad is None:
                continue
            if self._was_interrupted or (updated and parameter not in updated):
                parameter.grad = None  # of a window that was left, or of no optimizer
            else:
                left.append(parameter)
        if any(bool(p.grad.any()) for p in left):
            raise ConfigError(
                "gradients of an earlier window are left: its optimizer.step() or zero_grad() did "
                f"not come. {BY_HAND}"
            )
        for parameter in left:  # zero_grad(set_to_none=False)
            parameter.grad = None

    def _before_any_step(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """Before a step of any optimizer of torch: not within a window of the model it updates."""
        if self._is_complete or self._engine is None:
            return
        trained = set(self._engine.parameters)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p in trained and p.grad is not None for p in parameters):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() within a window would update with a part of "
                "its gradient: step the optimizer that accelerator.prepare returned; it steps when "
                "accelerator.sync_gradients is true."
            )

    def _why_nothing_waits(self) -> str:
        if self._had_backward:
            return (
                "accelerator.backward was called twice for one batch: add the losses up and call "
                "it once."
            )
        active = self.gradient_state.active_dataloader
        began_in_evaluation = isinstance(active, WindowedDataLoader) and not active.in_windows
        if began_in_evaluation or self.training_model() is None:
            return (
                "accelerator.backward needs a batch of a training window, but the model was in "
                "evaluation mode when the loader began (from_pretrained returns it so): call "
                "model.train() before the training loop. To train without dropout, set its "
                "probabilities to 0."
            )
        return (
            "accelerator.backward needs a batch of a prepared DataLoader that was not used yet: "
            "pass the training DataLoader to accelerator.prepare, call backward once for each of "
            "its batches, and keep the iterator: `iterator = iter(loader)`, not next(iter(loader))."
        )

    def _prove_before_sharding(self, models: list[nn.Module], loaders: list[DataLoader]) -> None:
        """A sharded model cannot be proven (FSDP1), or in half precision only (FSDP2): prove it on
        the first loader's samples now.
        """
        if not loaders and self.is_fsdp2:
            return
        if not loaders:
            raise ConfigError(
                "under FSDP1 the model must be tested before it is sharded: pass model, optimizer "
                "and the training DataLoader in one call of accelerator.prepare."
            )
        for model in models:
            if not _is_trainable(model):
                continue
            collate_fn = loaders[0].collate_fn
            dataset = loaders[0].dataset
            step = max(1, len(dataset) // NUM_PROOF_SAMPLES)
            samples = [dataset[i] for i in range(0, len(dataset), step)]
            allowed = self.allow_split_dependent_randomness
            prove = partial(
                prove_targets,
                model,
                samples,
                collate_fn,
                whole_batch=self.whole_batch,
                allow_split_dependent_randomness=allowed,
                speed_ups=default_speed_ups(model, self),
            )
            rule = prove_where_weights_are(self, model, prove, (self.whole_batch,))
            given = Given(
                whole_batch=self.whole_batch,
                allow_split_dependent_randomness=allowed,
                rule=rule,
                audit=self.audit,
            )
            remember(self, model, given)

    def _folder_to_load(self, input_dir: str | None) -> Path:
        if input_dir is not None:
            return Path(input_dir).expanduser()
        folder = Path(self.project_dir, "checkpoints")
        newest = max(folder.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))
        return newest

    def _step_again(self, schedule: ScheduleStart, saved_processes: int) -> None:
        prepared = schedule.prepared
        if prepared.split_batches or not prepared.step_with_optimizer:
            return
        num_updates = prepared.scheduler.last_epoch // saved_processes
        schedule.step_again(num_updates * self.num_processes)


class WindowOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that steps on complete windows only."""

    owner: Accelerator

    def step(self, closure: Any = None) -> None:
        """See `accelerate.optimizer.AcceleratedOptimizer.step`."""
        if self.gradient_state.sync_gradients:
            self.owner.check_complete(self)
        super().step(closure)


def _first_gradient(parameters: list[nn.Parameter]) -> tuple[Tensor, int] | None:
    """The first gradient that there is, and the number of its changes."""
    for parameter in parameters:
        if parameter.grad is not None:
            return parameter.grad, parameter.grad._version
    return None


def _is_untouched(before: tuple[Tensor, int] | None, now: tuple[Tensor, int] | None) -> bool:
    if before is None or now is None:
        return before is None
    return before[0] is now[0] and before[1] == now[1]


def _is_trainable(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters())


def _all_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return all(map(_all_tensors, value.values()))
    return isinstance(value, list | tuple) and bool(value) and all(map(_all_tensors, value))


def _kind_of(loss: Tensor) -> tuple:
    """The last operations that made a loss."""
    node = loss.grad_fn
    if node is None:
        return ()
    return (node.name(), *(n.name() for n, _ in node.next_functions if n is not None))


def _described(loss: Any) -> str:
    if isinstance(loss, Tensor):
        return f"a tensor of shape {list(loss.shape)}"
    return f"a {type(loss).__name__}"
