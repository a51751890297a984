"""ExactTrainer: `transformers.Trainer` with exact gradient accumulation, by changing one import
line.

Trainer's loop, logging, evaluation, checkpoints and callbacks are unchanged. Five methods are
overridden:

    create_accelerator_and_postprocess   FSDP on CPU processes, too
    train                  checks that training can be made exact
    get_train_dataloader   batches come from hf_ga's windows
    get_batch_samples      fetches a window
    training_step          computes a window when its last micro-batch comes: keyed draws; what
                           compute_loss returns is read, and its gradient is divided at the end
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from hf_ga.engine.look.choice import is_rehearsed
from hf_ga.engine.own_loop import OwnLoop
from hf_ga.engine.slots import Slot, plain_slots
from hf_ga.engine.whole.whole_batch import WholeBatch
from hf_ga.engine.window_engine import WindowEngine, trainable_parameters
from hf_ga.errors import ConfigError, DataError
from hf_ga.loading.fetch import WindowRequest
from hf_ga.loading.lengths import find_lengths
from hf_ga.loading.window import Window
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.logs import get_logger
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
REASON_NOT_TO_SPLIT = (
    "It is not split on several processes, as compute_loss gathers values of all of them: make "
    "per_device_train_batch_size smaller (the results stay the same)"
)


class TrainerWindow(OwnLoop):
    """Computes the windows of a trainer as `train_step` does, with Trainer's own training step in
    place of forward and loss: all of a window in Trainer's call for its last micro-batch.

    Args:
        trainer: The trainer.
        windows: The loader of the windows of its training dataset.

    Attributes:
        num_begun: For how many micro-batches of the current window `training_step` was called.
    """

    def __init__(self, trainer: Trainer, windows: WindowLoader) -> None:
        """Start before the first window of an `ExactTrainer`."""
        engine = WindowEngine(
            partial(backend_for, trainer.accelerator), allow_split_dependent_randomness=False
        )
        engine.trusts_num_targets = True  # those of loss_sums are checked, see LossSums
        super().__init__(engine, trainer.model, trainer.loss_sums)
        self.trainer = trainer
        self.fetcher = windows.fetcher
        self.loader_state = windows.state  # what windows of the loader share, such as padding
        if trainer.args.neftune_noise_alpha:
            self.loader_state.pad_to_window = True  # its noise is scaled by the padded width
        self.num_begun = 0
        self._batches: list[WindowBatch] = []
        self._num_updates = 0  # before the current window
        self._counters: dict[str, Any] = {}  # of the trainer, before the window
        self._step: Callable[[dict[str, Any]], Any] | None = None  # Trainer's, on a batch
        self._current: tuple[Tensor, float | None] | None = None  # loss, what it is a sum over
        self._has_pairs = has_pairs(trainer.data_collator)
        self._has_gathers = False  # whether ranks wait for each other in `compute_loss`
        self._is_scale_checked = False  # whether `backward` has checked its first loss
        self._window_loss = WindowLoss(trainer)
        if trainer.whole_batch:
            loss = self._window_loss
            self._whole_batch = WholeBatch(engine, loss.loss_of_window, loss)

    def begin(self, batches: list[WindowBatch]) -> None:
        """Take the next window of `ExactTrainer`.

        Args:
            batches: What Trainer fetched for one optimizer step.

        Raises:
            ConfigError: If the batches are not those of one window, if Trainer made an update
                without a micro-batch of the previous window, or if the optimizer's step needs a
                closure.
        """
        if len({(batch.request.epoch, batch.request.index) for batch in batches}) != 1:
            raise ConfigError(
                "get_batch_samples must return the micro-batches of one window unchanged from the "
                "data loader."
            )
        num_updates = self.trainer.state.global_step
        # Trainer made none if a callback broke the window off.
        if self.num_begun < len(self._batches) and num_updates > self._num_updates:
            raise ConfigError(
                "an overridden training_step must call super().training_step once for each "
                "micro-batch."
            )
        if self.trainer.optimizer is not None:  # Trainer makes it after its data loader
            check_step(self.trainer.optimizer)
        self._batches = batches
        for batch in batches:
            batch.note_versions()
        self.num_begun = 0
        self._num_updates = num_updates

    def is_last(self, inputs: dict[str, Any]) -> bool:
        """Whether the micro-batch that Trainer passes to `training_step` is the window's last one.

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
        return self.num_begun == len(self._batches)

    def train(self, step: Callable[[dict[str, Any]], Any]) -> Tensor:
        """Compute the gradient of the window; return its mean loss.

        Args:
            step: Runs Trainer's own training step on a batch.
        """
        trainer = self.trainer
        self._step = step
        self._counters = deepcopy(self._counters_now())
        if self._counters:  # as those of TRL, whose losses gather them
            self._note_gathers()
        self.model = trainer.model_wrapped
        self.engine.speed_ups.is_resumed = trainer.state.global_step > 0
        trainer.model.train()  # for the first pass; Trainer calls it in each training step
        if is_sharded(trainer.accelerator):
            # Without a rehearsal it is not known whether the padded width matters.
            self.loader_state.pad_to_window = True
        request = self._batches[0].request
        # Trainer fetches the same number of batches on all ranks; those beyond this rank's
        # micro-batches of the window do not count.
        without_fillers = self._batches[: len(request.micro_batches)]
        window = Window(request, self.fetcher, without_fillers, self.loader_state)
        result = self.add_gradients(window)
        if trainer.accelerator.scaler is not None and result.skipped:
            raise DataError(
                "a window has no targets, so it has no loss for fp16 to scale: remove such samples."
            )
        return result.loss_tensor

    def _mask_request(self, window: Window) -> WindowRequest:
        """Return what keys random draws: `seed`, whereas the order may be keyed by `data_seed`."""
        return replace(window.request, seed=self.trainer.args.seed)

    def gather(self, gather: Callable[..., Any], values: Any) -> Any:
        """Gather values of all ranks, with the accelerator's function, in `compute_loss`."""
        self._note_gathers()
        return gather_uneven(gather, values)

    def _note_gathers(self) -> None:
        """Note that this rank cannot leave a micro-batch of which others gather values."""
        backend = self.engine.backend
        if backend.num_processes > 1:
            self._has_gathers = True
            backend.reason_not_to_split = REASON_NOT_TO_SPLIT
            backend.can_rejoin = False

    @property
    def waits_for_ranks(self) -> bool:
        """Whether ranks wait for each other within forwards, backwards or losses."""
        return self._has_gathers or super().waits_for_ranks

    def _counters_now(self) -> dict[str, Any]:
        """Return what the trainer counts for the log."""
        attributes = vars(self.trainer)
        return {name: attributes[name] for name in LOGGED_COUNTERS if name in attributes}

    def _plan_slots(self, window: Window) -> list[Slot]:
        """Return the micro-batches of a window, as many on all ranks: `compute_loss` may gather."""
        return plain_slots(window)

    def _begin(self, window: Window, parameters: Sequence[nn.Parameter], *, is_due: bool) -> None:
        """Begin a window, with the parameters that the optimizer has beside the model. Windows are
        rehearsed by their number in the run, too.
        """
        is_due |= is_rehearsed(self.trainer.state.global_step)
        optimizers = [] if self.trainer.optimizer is None else [self.trainer.optimizer]
        parameters = trainable_parameters([self.model], optimizers)
        super()._begin(window, parameters, is_due=is_due)

    def _run_first_pass(self, window: Window) -> None:
        """Run the forwards that losses of a whole window need before its training forwards."""
        request = self._mask_request(window)
        if self._whole_batch is not None:
            self._whole_batch.begin(window, self._slots, request)
        else:
            self.engine.count_experts(self._slots, request, self._forward)

    def _forward(self, slot: Slot) -> None:
        """Run Trainer's training step on a micro-batch, without its backward."""
        with self._own_loss(backward=lambda loss, **kwargs: None):
            self._step(self.engine.backend.place(dict(slot.micro_batch.batch)))

    def _run_slot(self, slot: Slot, window: Window, index: int = -1) -> None:
        """Run Trainer's training step on a micro-batch, with keyed draws and our backward."""
        if index == 0:  # rehearsals, first passes and earlier tries do not count in the log
            vars(self.trainer).update(deepcopy(self._counters))
        with self.engine.micro_batch(slot, self._mask_request(window)):
            batch = dict(self.engine.place(slot))
            own_loss = self._own_loss(partial(self._backward, index), index)
            # So that this rank goes on, and gathers as often as others.
            together = self.engine.failing_together() if self._has_gathers else nullcontext()
            with own_loss, together:
                self._step(batch)

    @contextmanager
    def _own_loss(self, backward: Callable[..., None], index: int = -1) -> Iterator[None]:
        """Replace the trainer's loss and backward in the block, for the window's n-th
        micro-batch.
        """
        trainer = self.trainer
        compute_loss = partial(self._compute_loss, trainer.compute_loss, index)
        with (
            override(trainer, compute_loss=compute_loss),
            override(trainer.accelerator, backward=backward),
        ):
            yield

    def _compute_loss(
        self,
        original: Callable[..., Any],
        index: int,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: None = None,
    ) -> Tensor:
        """Compute the trainer's loss of a micro-batch alone; replaces its `compute_loss` during a
        training step. `compute_loss_func` gets the number of items of this micro-batch.
        """
        if self._whole_batch is None and self._loss_sums is None:
            num_items = num_items_in(self.trainer, inputs)
            if self._has_pairs:
                inputs = chosen_first(inputs)
                model = partial(forward_of_pairs, model)
            loss = original(model, inputs, num_items_in_batch=num_items)
            self._current = (loss, None)
            return loss
        if self._whole_batch is not None:
            outputs = self._window_loss.outputs_of(model, inputs)
        else:
            outputs = model(**argument_filter(model)(inputs))
        try:
            self._current = self._loss(outputs, inputs, index)
        except KeyError as error:
            error.add_note(
                "loss_sums gets what the collate function returns; Trainer removes columns that "
                "the model does not take unless remove_unused_columns=False."
            )
            raise
        return self._current[0]

    def _backward(self, index: int, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradient of a micro-batch's loss to the window; replaces `accelerator.backward`
        during a training step.
        """
        expected, num_targets = self._current
        self._check_scale(loss, expected)
        self.engine.add(loss, num_targets, is_last=index == len(self._slots) - 1)

    def _check_scale(self, loss: Tensor, expected: Tensor) -> None:
        """Check once that the loss reached `backward` as `compute_loss` returned it."""
        if self._is_scale_checked:
            return  # reading a value waits for the device
        self._is_scale_checked = True
        passed = float(loss.detach())
        expected = float(expected.detach())
        if passed != expected and math.isfinite(expected):
            raise ConfigError(
                "the loss must reach backward() unscaled, but was multiplied by "
                f"{passed / expected:g}: an overridden training_step scales it again. Remove that "
                "scaling."
            )


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
        if type(self).training_step is not ExactTrainerMixin.training_step:
            logger.warning(
                "ExactTrainer: all micro-batches of a window are computed within the last call of "
                f"{type(self).__name__}.training_step for it. What belongs to a micro-batch must "
                "be an entry of its batch, and not an attribute that this method sets."
            )
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
        with every_prepare_exact(self.accelerator):
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
        """Compute the gradient of the window's mean loss in the call for its last micro-batch, by
        Trainer's training step with hf_ga's loss and backward on each of them.

        Args:
            model: The wrapped model.
            inputs: A micro-batch that `get_batch_samples` returned.
            num_items_in_batch: Not used.

        Returns:
            What the call adds to the logged loss, a scalar: the window's mean loss for its last
            micro-batch, 0 for the others.
        """
        window = self._window
        if not window.is_last(inputs):
            return torch.zeros((), device=self.args.device)
        gather = partial(window.gather, self.accelerator.gather)
        # So that neither Trainer nor a custom loss divides by the number of steps, or multiplies by
        # that of processes and counts the items of all of them.
        self.current_gradient_accumulation_steps = 1  # Trainer's loop sets it for each window
        hidden = {"gradient_accumulation_steps": 1, "average_tokens_across_devices": False}
        with override(self.args, **hidden), override(self.accelerator, gather=gather):
            loss = window.train(partial(super().training_step, model))
        return loss.float()


class ExactTrainer(ExactTrainerMixin, Trainer):
    """`transformers.Trainer` with exact gradient accumulation: see `ExactTrainerMixin`."""
