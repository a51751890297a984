"""ExactTrainer: `transformers.Trainer` with exact gradient accumulation, by changing one import
line.

Trainer's loop, logging, evaluation, checkpoints and callbacks are unchanged. Five methods are
overridden:

    create_accelerator_and_postprocess   FSDP on CPU processes, too
    train                  checks that training can be made exact
    get_train_dataloader   batches come from hf_ga's windows
    get_batch_samples      fetches a window
    training_step          keyed draws; what compute_loss returns is read, and its gradient is
                           divided at the window's end
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from hf_ga.engine.slots import Slot, extra_rehearsal, plain_slots
from hf_ga.engine.sums.loss_sums import LossSums
from hf_ga.engine.whole.whole_batch import WholeBatch
from hf_ga.engine.window_engine import WindowEngine, trainable_parameters
from hf_ga.errors import ConfigError, DataError
from hf_ga.loading.fetch import WindowRequest
from hf_ga.loading.lengths import find_lengths
from hf_ga.loading.window import Window
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.model.forward import LossFunction, argument_filter, call_loss_fn
from hf_ga.model.override import override
from hf_ga.model.precision import check_step
from hf_ga.order.plan import plan_by_sizes
from hf_ga.parallel.fsdp import backend_for, is_sharded
from hf_ga.parallel.prepare import enable_fp16_on_cpu, enable_fsdp_on_cpu, every_prepare_exact
from hf_ga.parallel.processes import call_on_main, gather_uneven
from hf_ga.trainer.batches import WindowBatch, WindowedDataLoader
from hf_ga.trainer.checks import WindowSize, check_trainer, last_complete_checkpoint
from hf_ga.trainer.loss import WindowLoss, num_items_in
from hf_ga.trainer.pairs import chosen_first, collate_pairs, forward_of_pairs, has_pairs

logger = get_logger(__name__)

# Attributes of TRL's trainers that compute_loss updates for the log; additional forwards must not
# change them.
LOGGED_COUNTERS = ("_metrics", "_total_train_tokens")


class TrainerWindow:
    """Drives the engine in the order in which Trainer's loop makes its calls: it fetches all
    batches of a window first, then trains on each of them.

    Args:
        trainer: The trainer.
        windows: The loader of the windows of its training dataset.

    Attributes:
        engine: Computes the windows.
        slots: The micro-batches of the current window.
        num_begun: How many of them `training_step` was called for; None before the first window.
        is_complete: Whether the gradient of the current window is complete.
    """

    def __init__(self, trainer: Trainer, windows: WindowLoader) -> None:
        """Start before the first window of an `ExactTrainer`."""
        self.trainer = trainer
        self.fetcher = windows.fetcher
        self.loader_state = windows.state  # what windows of the loader share, such as padding
        if trainer.args.neftune_noise_alpha:
            self.loader_state.pad_to_window = True  # its noise is scaled by the padded width
        self.engine = WindowEngine(
            partial(backend_for, trainer.accelerator), allow_split_dependent_randomness=False
        )
        self.engine.trusts_num_targets = True  # those of loss_sums are checked, see LossSums
        self.slots: list[Slot] = []
        self.num_begun: int | None = None
        self.is_complete = False
        self._batches: list[WindowBatch] = []
        self._window: Window | None = None
        self._mask_request: WindowRequest | None = None
        self._rehearsal: Slot | None = None
        self._has_pairs = has_pairs(trainer.data_collator)
        self._loss_sums = None if trainer.loss_sums is None else LossSums(trainer.loss_sums)
        self._is_scale_checked = False  # whether `backward` has checked its first loss
        self._window_loss: WindowLoss | None = None
        self._whole_batch: WholeBatch | None = None
        if trainer.whole_batch:
            loss = WindowLoss(trainer)
            self._window_loss = loss
            self._whole_batch = WholeBatch(self.engine, loss.loss_of_window, loss)

    def begin(self, batches: list[WindowBatch]) -> None:
        """Take the next window of `ExactTrainer`.

        Args:
            batches: What Trainer fetched for one optimizer step.

        Raises:
            ConfigError: If the batches are not those of one window, if `training_step` was never
                called for the previous window, or if the optimizer's step needs a closure.
        """
        self._check_batches(batches)
        if self.trainer.optimizer is not None:  # Trainer makes it after its data loader
            check_step(self.trainer.optimizer)
        request = batches[0].request
        # Trainer fetches the same number of batches on all ranks; those beyond this rank's
        # micro-batches of the window do not count.
        without_fillers = batches[: len(request.micro_batches)]
        self._batches = batches
        for batch in batches:
            batch.note_versions()
        self._window = Window(request, self.fetcher, without_fillers, self.loader_state)
        # Random draws are keyed by `seed`, whereas the order may be keyed by `data_seed`.
        self._mask_request = replace(request, seed=self.trainer.args.seed)
        self.num_begun = 0
        self.engine.speed_ups.is_resumed = self.trainer.state.global_step > 0

    def _begin_window(self) -> None:
        """Begin the window in the engine, or begin it again."""
        trainer = self.trainer
        if is_sharded(trainer.accelerator):
            # Without a rehearsal it is not known whether the padded width matters.
            self.loader_state.pad_to_window = True
        if self._whole_batch is not None:
            trainer.model.train()  # Trainer calls it in each training step only
            self._window = self._whole_batch.planned(self._window, [trainer.model_wrapped])
        elif self.loader_state.pad_to_window:
            self._window = self._window.padded_to_window()
        self._mask_request = replace(
            self._mask_request, pad_to_window=self._window.request.pad_to_window
        )
        self.slots = plain_slots(self._window)
        self._rehearsal = None
        # A loss of a whole window compares samples on purpose.
        is_single = len(self.slots) == 1 and trainer.accelerator.num_processes == 1
        looks = self._whole_batch is None and not is_single and self.engine.can_rehearse()
        if looks and self.engine.is_rehearsal_due(trainer.state.global_step):
            self._rehearsal = extra_rehearsal(
                self._window,
                num_processes=trainer.accelerator.num_processes,
                is_first=not self.engine.has_rehearsed,
                positions=self.engine.looks.positions,
            )
        self.is_complete = False
        optimizers = [] if trainer.optimizer is None else [trainer.optimizer]
        self.engine.begin_window(
            [trainer.model_wrapped],
            trainable_parameters([trainer.model_wrapped], optimizers),
            num_slots=len(self.slots),
            is_rehearsed=self._rehearsal is not None,
            has_extra=self._rehearsal is not None,
            is_full_batch=is_single,
            state=self.loader_state,
            looks=looks,
        )

    def _check_batches(self, batches: list[WindowBatch]) -> None:
        """Check that Trainer fetched the batches of one window, and that `training_step` was called
        for the window before.
        """
        if len({(batch.request.epoch, batch.request.index) for batch in batches}) != 1:
            raise ConfigError(
                "get_batch_samples must return the micro-batches of one window unchanged from the "
                "data loader."
            )
        if self.num_begun == 0:
            raise ConfigError(
                "an overridden training_step must call super().training_step once for each "
                "micro-batch."
            )

    def next_index(self, inputs: dict[str, Any]) -> int:
        """Return the index of the micro-batch that Trainer passes to `training_step` (0-based).

        Raises:
            ConfigError: If the window has no further micro-batch, or `inputs` is not this one as it
                was.
        """
        index = self.num_begun
        if index == len(self._batches) or inputs is not self._batches[index]:
            raise ConfigError(
                "training_step must be called once for each micro-batch that get_batch_samples "
                "returned."
            )
        if inputs.is_changed():
            raise ConfigError(
                "an overridden training_step changes the micro-batch, but a window may be computed "
                "from other batches of its samples: change them in the collate function or in "
                "compute_loss."
            )
        self.num_begun += 1
        return index

    def train(self, index: int, step: Callable[[dict[str, Any]], Any]) -> None:
        """Train on a micro-batch, with the rehearsal before the first one, and complete the window
        after the last one.

        Args:
            index: The index of the micro-batch in the window (0-based).
            step: Runs Trainer's own training step on a batch.
        """
        trainer = self.trainer
        if index == 0:
            self._run_before(step)
        is_last = index == len(self.slots) - 1
        self._run(self.slots[index], step, is_last)
        if not is_last:
            return
        while not self.engine.finish(can_repeat=True):
            logger.info(f"hf_ga: a window is computed again: {self.engine.gradient.must_repeat}.")
            with preserving_counters(trainer):
                self._run_before(step)
                for slot in self.slots:
                    self._run(slot, step, slot is self.slots[-1])
        if self._whole_batch is not None:
            self._whole_batch.add_direct_gradients()
        self.engine.leave_window()
        self.is_complete = True
        if trainer.accelerator.scaler is not None and not self.engine.gradient.num_targets:
            raise DataError(
                "a window has no targets, so it has no loss for fp16 to scale: remove such samples."
            )

    def _run_before(self, step: Callable[[dict[str, Any]], Any]) -> None:
        """Run what comes before the micro-batches of a window: a first pass, if the loss needs one,
        and the rehearsal, which computes some samples in other company and adds nothing.

        The window begins here, and not where it is fetched: callbacks may change the model between.
        """
        self._begin_window()
        trainer = self.trainer
        trainer.model.train()  # for the first pass; Trainer calls it in each training step
        with preserving_counters(trainer):
            if self._whole_batch is not None:
                self._whole_batch.begin(self._window, self.slots, self._mask_request)
                return
            forward = partial(self._forward, step=step)
            self.engine.count_experts(self.slots, self._mask_request, forward)
            if self._rehearsal is not None:
                self._run(self._rehearsal, step, is_last=False)

    def _forward(self, slot: Slot, step: Callable[[dict[str, Any]], Any]) -> None:
        """Run Trainer's training step on a micro-batch, without its backward."""
        with self._own_loss(backward=lambda loss, **kwargs: None):
            step(self.engine.backend.place(dict(slot.micro_batch.batch)))

    def _run(self, slot: Slot, step: Callable[[dict[str, Any]], Any], is_last: bool) -> None:
        """Run Trainer's training step on a micro-batch, with keyed draws and our backward."""
        backward = partial(self._backward, is_last=is_last)
        with (
            self.engine.micro_batch(slot, self._mask_request),
            self._own_loss(backward),
            self.engine.failing_together(),
        ):
            step(dict(self.engine.place(slot)))

    @contextmanager
    def _own_loss(self, backward: Callable[..., None]) -> Iterator[None]:
        """Replace the trainer's loss and backward in the block."""
        trainer = self.trainer
        with (
            override(trainer, compute_loss=partial(self._compute_loss, trainer.compute_loss)),
            override(trainer.accelerator, backward=backward),
        ):
            yield

    def _compute_loss(
        self,
        original: Callable[..., Any],
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: None = None,
    ) -> Tensor:
        """Compute the trainer's loss of a micro-batch alone; replaces its `compute_loss` during a
        training step. `compute_loss_func` gets the number of items of this micro-batch.
        """
        if self._whole_batch is not None:
            outputs = self._window_loss.outputs_of(model, inputs)
            index = next(i for i, slot in enumerate(self.slots) if slot is self.engine.slot)
            self._loss, self._num_targets = self._whole_batch.part(index, outputs)
            return self._loss
        num_items = num_items_in(self.trainer, inputs)
        if self._loss_sums is not None:
            outputs = model(**argument_filter(model)(inputs))
            self._loss, self._num_targets = self._sums_of(outputs, inputs)
            return self._loss
        self._num_targets = None
        if self._has_pairs:
            inputs = chosen_first(inputs)
            model = partial(forward_of_pairs, model)
        self._loss = original(model, inputs, num_items_in_batch=num_items)
        return self._loss

    def _sums_of(self, outputs: Any, inputs: dict[str, Any]) -> tuple[Tensor, float]:
        """Call the trainer's `loss_sums`, and explain a missing column."""
        num_samples = len(self.engine.slot.micro_batch)
        is_checked = self._rehearsal is not None
        try:
            return self._loss_sums(outputs, inputs, num_samples, is_checked=is_checked)
        except KeyError as error:
            error.add_note(
                "loss_sums gets what the collate function returns; Trainer removes columns that "
                "the model does not take unless remove_unused_columns=False."
            )
            raise

    def _backward(self, loss: Tensor, *, is_last: bool, **kwargs: Any) -> None:
        """Add the gradient of a micro-batch's loss to the window; replaces `accelerator.backward`
        during a training step.
        """
        self._check_scale(loss)
        self.engine.add(loss, self._num_targets, is_last=is_last)

    def _check_scale(self, loss: Tensor) -> None:
        """Check once that the loss reached `backward` as `compute_loss` returned it."""
        if self._is_scale_checked:
            return  # reading a value waits for the device
        self._is_scale_checked = True
        passed = float(loss.detach())
        expected = float(self._loss.detach())
        if passed != expected and math.isfinite(expected):
            raise ConfigError(
                "the loss must reach backward() unscaled, but was multiplied by "
                f"{passed / expected:g}: an overridden training_step scales it again. Remove that "
                "scaling."
            )

    def loss_to_log(self, loss: Tensor) -> Tensor:
        """Return what `ExactTrainer` logs for the current micro-batch, a scalar: the window's mean
        loss for its last one, 0 for the others, as Trainer adds them up.

        Args:
            loss: The loss of the micro-batch.
        """
        if not self.is_complete:
            return torch.zeros_like(loss)
        return self.engine.gradient.loss.to(loss.dtype)


class ExactTrainerMixin:
    """A mixin for any subclass of `transformers.Trainer`: makes its gradient that of the full batch
    for any accumulation.

    A window is processes x per_device_train_batch_size x gradient_accumulation_steps samples, and
    every such split of it, also over processes (DDP), gives the same update: the mean of the
    trainer's own loss (`compute_loss`, `compute_loss_func`, label smoothing, or the model's own)
    over all targets of the window. The order of samples is keyed by (data_seed or seed, epoch), and
    dropout by (seed, epoch, position). The logged loss is the mean over the window.

    `num_items_in_batch` is that of one batch, not of the window: a custom loss must be a mean over
    its batch, or a sum of means, also weighted ones; what each divides by is read. For a loss that
    cannot be read (a custom autograd function), a subclass defines a method
    `loss_sums(self, outputs, batch) -> (sum of the loss, what it is divided by)`.
    `dataloader_drop_last` drops the last window if it is short.

    Attributes:
        whole_batch: `compute_loss` is a loss of all samples of a window (in-batch negatives, the
            hardest samples). True, in a subclass: what the model returns in `compute_loss` are the
            outputs of the whole window, and `inputs` its batch. Each micro-batch has two forwards.

    Raises, in training:
        ConfigError: If a setting cannot be made exact (see `checks`).
        LossNotAdditive: If the loss is not a sum of means, or compares samples.
        UnkeyedRandomness: If a random number was drawn that cannot be tied to samples.
        DataError: If a window has no targets under fp16.

    Example:
        from hf_ga import ExactTrainer as Trainer  # instead of: from transformers import Trainer

        class ExactSFTTrainer(ExactTrainerMixin, SFTTrainer):  # TRL's, or your own
            pass
    """

    whole_batch = False
    _window: TrainerWindow | None = None
    # A subclass may have a method `loss_sums(self, outputs, batch) -> (sum of the loss, targets)`.
    # (Not `loss_fn`: trainers with their own compute_loss often have an attribute of that name.)
    loss_sums: LossFunction | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the order of the bases when a subclass is made.

        Raises:
            ConfigError: If a trainer comes before the mixin, whose methods it would hide.
        """
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1 : cls.__mro__.index(ExactTrainerMixin)]:
            if issubclass(base, Trainer) and not issubclass(base, ExactTrainerMixin):
                raise ConfigError(
                    f"class {cls.__name__}: {base.__name__} comes before ExactTrainerMixin, so it "
                    f"would train as {base.__name__} does: class {cls.__name__}(ExactTrainerMixin, "
                    f"{base.__name__})."
                )

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as Trainer does, but with FSDP also on several CPU processes,
        where Accelerate would silently train with DDP.
        """
        super().create_accelerator_and_postprocess()
        options = self.args.fsdp_plugin_args
        plugin = None if options is None else FullyShardedDataParallelPlugin(**options)
        enable_fsdp_on_cpu(self.accelerator, plugin)
        self.is_fsdp_enabled |= is_sharded(self.accelerator)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Check that training can be made exact, then train as `Trainer.train` does.

        The window size is saved in each checkpoint, and compared when a run resumes. With
        `resume_from_checkpoint=True` or `"auto"` the run resumes from the last complete checkpoint
        in `output_dir`, on any number of processes; one that a killed run has not completed is
        ignored. Without any, "auto" starts from the beginning.

        Raises:
            ConfigError: If a setting is not supported, or the checkpoint to resume from was saved
                with another window size.
        """
        enable_fp16_on_cpu(self.accelerator)
        check_trainer(self, ExactTrainerMixin)
        window_size = WindowSize(self._window_size)
        if args:
            kwargs["resume_from_checkpoint"], *args = args
        resume_from = kwargs.get("resume_from_checkpoint")
        if resume_from is True or resume_from == "auto":
            last = call_on_main(self.accelerator, last_complete_checkpoint, self.args.output_dir)
            # Of True without any checkpoint, Trainer complains.
            kwargs["resume_from_checkpoint"] = last or (resume_from is True)
        window_size.check_checkpoint(kwargs.get("resume_from_checkpoint"), self.args)
        self.pop_callback(WindowSize)  # of an earlier call of train
        self.add_callback(window_size)
        # Trainer's own no_sync would end what the engine sets in the first micro-batch of a window.
        own_sync = override(self.accelerator, no_sync=lambda model: nullcontext())
        with every_prepare_exact(self.accelerator), own_sync:
            return super().train(*args, **kwargs)

    @property
    def _window_size(self) -> int:
        """The number of samples in one optimizer step of `ExactTrainer` over all processes."""
        args = self.args
        return args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute Trainer's loss of a batch; with `loss_sums`, the mean loss of the batch, which
        Trainer's evaluations use.

        Returns:
            The loss, or (loss, outputs of the model) if `return_outputs`.
        """
        if self.loss_sums is None:
            return super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
            )
        outputs = model(**argument_filter(model)(inputs))
        loss_sum, num_targets = call_loss_fn(self.loss_sums, outputs, inputs)
        loss = loss_sum / (num_targets or 1.0)
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of the micro-batches of hf_ga's windows, and log their layout.

        The dataset, the collate function and the worker settings are those of Trainer's own loader.
        """
        loader = super().get_train_dataloader()
        args = self.args
        collate_fn = loader.collate_fn
        if has_pairs(collate_fn):
            collate_fn = partial(collate_pairs, collate_fn)
        micro_batch_size = args.per_device_train_batch_size
        windows = WindowLoader(
            loader.dataset,
            collate_fn,
            accelerator=self.accelerator,
            per_device_batch_size=micro_batch_size,
            global_batch_size=self._window_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
            drop_last_window=args.dataloader_drop_last,
            # As many micro-batches as Trainer's own loader has batches.
            planner=partial(plan_by_sizes, sizes=[micro_batch_size]),
            lengths=find_lengths(loader.dataset, loader.collate_fn),
        )
        self._window = TrainerWindow(self, windows)
        # A warning, so that it is shown with the default settings of logging.
        logger.warning(f"ExactTrainer: {windows.layout}")
        return WindowedDataLoader(windows, loader)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, None]:
        """Fetch the micro-batches of the next window from Trainer's loader, and begin the window.

        Args:
            epoch_iterator: Trainer's iterator over the training loader.
            num_batches: The number of micro-batches to fetch.
            device: The device of the model.

        Returns:
            (micro-batches, None). None instead of a number of items, because hf_ga itself divides
            by the targets of the window.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._window.begin(batches)
        return batches, None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run Trainer's training step with hf_ga's loss and backward: add the gradient of one
        micro-batch's part of the window's mean loss.

        After the window's last micro-batch, the gradients are summed over all ranks.

        Args:
            model: The wrapped model.
            inputs: A micro-batch that `get_batch_samples` returned.
            num_items_in_batch: Not used.

        Returns:
            The micro-batch's contribution to the logged loss, a scalar.
        """
        window = self._window
        index = window.next_index(inputs)
        if index == 0:
            model.zero_grad()  # gradients of a window that a callback interrupted
        # Stays 0 if the loss is refused, which all ranks raise at the window's end.
        losses = [torch.zeros((), device=self.args.device)]

        def step(batch: dict[str, Any]) -> None:
            """Run the training step of Trainer, or of the subclass, on a batch."""
            losses.append(super(ExactTrainerMixin, self).training_step(model, batch))

        gather = partial(gather_uneven, self.accelerator.gather)
        # So that neither Trainer nor a custom loss divides by the number of steps, or multiplies by
        # that of processes and counts the items of all of them.
        self.current_gradient_accumulation_steps = 1  # Trainer's loop sets it for each window
        hidden = {"gradient_accumulation_steps": 1, "average_tokens_across_devices": False}
        with override(self.args, **hidden), override(self.accelerator, gather=gather):
            window.train(index, step)
        return window.loss_to_log(losses[-1])


class ExactTrainer(ExactTrainerMixin, Trainer):
    """`transformers.Trainer` with exact gradient accumulation: see `ExactTrainerMixin`."""


@contextmanager
def preserving_counters(trainer: Trainer) -> Iterator[None]:
    """Restore, after the block, the counters that TRL's trainers log, so that `ExactTrainer`'s
    additional forwards, of a rehearsal or of a first pass over a window, do not change the log.
    """
    saved = {
        name: deepcopy(vars(trainer)[name]) for name in LOGGED_COUNTERS if name in vars(trainer)
    }
    try:
        yield
    finally:
        vars(trainer).update(saved)
