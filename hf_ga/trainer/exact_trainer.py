"""ExactTrainer: `transformers.Trainer` with exact gradient accumulation, by changing one import
line.

Trainer's loop, logging, evaluation, checkpoints and callbacks are unchanged. Four methods are
overridden:

    train                  checks that training can be made exact
    get_train_dataloader   proves how the trainer's own loss counts its targets; batches come from
                           hf_ga's windows
    get_batch_samples      counts the targets of the window before any forward
    training_step          keyed dropout; compute_loss gives this micro-batch's part of the window's
                           mean loss, not divided again
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from hf_ga.errors import ConfigError, DataError, LossNotAdditive
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import (
    LossFunction,
    argument_filter,
    call_loss_fn,
    callable_module,
    module_modes,
)
from hf_ga.exact.lengths import find_lengths
from hf_ga.exact.override import override
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.exact.precision import check_step
from hf_ga.exact.rule import Rule
from hf_ga.exact.update import StepResult
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.fsdp import backend_for
from hf_ga.parallel.main_proof import prove_where_weights_are
from hf_ga.parallel.prepare import enable_fp16_on_cpu, every_prepare_exact
from hf_ga.parallel.processes import gather_uneven
from hf_ga.proof.precision import full_precision
from hf_ga.trainer.batches import WindowBatch, WindowedDataLoader
from hf_ga.trainer.checks import WindowSize, check_trainer
from hf_ga.trainer.loss import TrainerLoss
from hf_ga.trainer.pairs import collate_pairs, has_pairs
from hf_ga.training import NUM_PROOF_SAMPLES, prove_targets

logger = get_logger(__name__)

# Attributes of TRL's trainers that compute_loss updates for the log; forwards of the proof must not
# change them.
LOGGED_COUNTERS = ("_metrics", "_total_train_tokens")


class TrainerWindow:
    """Drives the engine in the order in which Trainer's loop makes its calls: it fetches all
    batches of a window first, then trains on each of them.

    Making it proves the trainer's loss on samples of the training dataset.

    Args:
        trainer: The trainer, whose model is not wrapped yet.
        windows: The loader of the windows of its training dataset.

    Attributes:
        rule: The result of the proof.
        loss_module: The trainer's loss as a module.
        engine: The engine of the current window.
        batches: The micro-batches of the current window that Trainer fetched.
        num_begun: How many of them `training_step` was called for; None before the first window.
        result: The result of the current window; None until it is complete.

    Raises:
        LossNotAdditive, UnkeyedRandomness: See `hf_ga.prove_targets`.
    """

    def __init__(self, trainer: Trainer, windows: WindowLoader) -> None:
        """Put the model of an `ExactTrainer` into training mode, and prove the trainer's loss; see
        the class.
        """
        self.trainer = trainer
        self.fetcher = windows.fetcher
        self.loader_state = windows.state  # what windows of the loader share, such as padding
        self.loss_module = TrainerLoss(trainer)
        self.num_begun: int | None = None
        self.result: StepResult | None = None
        self._is_scale_checked = False  # whether `backward` has checked its first loss
        trainer.model.train()  # as in each training step: the proof needs these modes
        self.rule = self._prove(windows)
        windows.state.pad_to_window = self.rule.pad_to_window

    def _prove(self, windows: WindowLoader) -> Rule:
        """Prove how the trainer's loss counts its targets, by trial forwards and backwards on
        samples of the training dataset.

        Args:
            windows: The loader of the windows.

        Returns:
            The result of the proof: what the loss averages over, where dropout is drawn, and which
            speed-ups change nothing.

        Raises:
            LossNotAdditive, UnkeyedRandomness: See `hf_ga.prove_targets`. Notes on the exception
                say which methods of a Trainer correspond to the remedies in its message.
        """
        trainer = self.trainer
        loss_fn = trainer.loss_sums
        whole_batch = self.loss_module.loss_of_window if trainer.whole_batch else None

        def prove() -> Rule:
            """Prove the loss of the `ExactTrainer` on this process."""
            with (
                _preserving_counters(trainer),
                _hiding_accumulation(trainer),
                full_precision(trainer.model),
            ):
                return prove_targets(
                    self.loss_module,
                    windows.probe_samples(NUM_PROOF_SAMPLES),
                    windows.collate_fn,
                    loss_fn=loss_fn,
                    whole_batch=whole_batch,
                )

        try:
            return prove_where_weights_are(
                trainer.accelerator, self.loss_module, prove, (loss_fn, whole_batch)
            )
        except LossNotAdditive as error:
            error.add_note(
                "ExactTrainer uses compute_loss or compute_loss_func. In place of them, and of "
                "loss_fn, write a method loss_sums(self, outputs, batch) of your subclass; in "
                "place of passing whole_batch, set whole_batch = True in it."
            )
            raise
        except KeyError as error:
            if loss_fn is not None:
                error.add_note(
                    "loss_sums gets what the collate function returns; Trainer removes columns "
                    "that the model does not take unless remove_unused_columns=False."
                )
            raise

    def begin(self, batches: list[WindowBatch]) -> None:
        """Begin a window of `ExactTrainer`: count its targets, and make a first pass over it if the
        loss needs one.

        Args:
            batches: What Trainer fetched for one optimizer step.

        Raises:
            ConfigError: If the batches are not those of one window, if `training_step` was never
                called for the previous window, or if the optimizer's step needs a closure.
            DataError: If the window has no targets under fp16.
        """
        self._check_batches(batches)
        trainer = self.trainer
        accelerator = trainer.accelerator
        if trainer.optimizer is not None:  # Trainer makes it after its data loader
            check_step(trainer.optimizer)
        # Dropout is keyed by `seed`, whereas the order of samples may be keyed by `data_seed`.
        request = replace(batches[0].request, seed=trainer.args.seed)
        # Trainer fetches the same number of batches on all ranks; those beyond this rank's
        # micro-batches of the window do not count.
        without_fillers = batches[: len(request.micro_batches)]
        window = Window(request, self.fetcher, without_fillers, self.loader_state)
        self.engine = self._make_engine()
        trainer.model.train()  # for a first pass; Trainer calls it in each training step only
        gather = partial(gather_uneven, accelerator.gather)
        with (
            _preserving_counters(trainer),
            _hiding_accumulation(trainer),
            override(accelerator, gather=gather),
        ):
            self.engine.begin(window, num_calls=len(batches))
        self.batches = batches
        self.num_begun = 0
        self.result = None
        self._check_has_targets(any(self.engine.totals))

    def _check_batches(self, batches: list[WindowBatch]) -> None:
        """Check what Trainer fetched for one optimizer step of `ExactTrainer`, before the window
        begins.

        Args:
            batches: What Trainer fetched.

        Raises:
            ConfigError: If the batches are not those of one window, or if `training_step` was never
                called for the previous window.
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

    def _make_engine(self) -> Engine:
        """Make the engine that computes one window with `ExactTrainer`'s wrapped model and loss."""
        trainer = self.trainer
        return Engine(
            backend_for(trainer.accelerator),
            trainer.model_wrapped,
            self.rule,
            module=self.loss_module,
            is_audited=trainer.audit,
            # A user's compute_loss may contain a collective (TRL's gathers metrics).
            audits_together=trainer.loss_sums is None,
        )

    def begin_micro_batch(self, model: nn.Module, inputs: dict[str, Any]) -> int:
        """Begin the next micro-batch of a window of `ExactTrainer`: count it, and check that it is
        the one that Trainer passes to `training_step`.

        Args:
            model: The model that Trainer passes to `training_step`.
            inputs: The batch that Trainer passes to `training_step`.

        Returns:
            The index of the micro-batch in the window (0-based).

        Raises:
            ConfigError: If the window has no further micro-batch, `inputs` is not this one, or the
                model is not the proven one.
        """
        index = self.num_begun
        if index == len(self.batches) or inputs is not self.batches[index]:
            raise ConfigError(
                "training_step must be called once for each micro-batch that get_batch_samples "
                "returned."
            )
        if callable_module(model) is not self.loss_module.model:
            raise ConfigError(
                "the model must be trained as it was proven, but it was wrapped in a "
                f"{type(model).__name__}."
            )
        self.num_begun += 1
        return index

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: None = None
    ) -> Tensor:
        """Compute the current micro-batch's term of the window's mean loss; it replaces Trainer's
        `compute_loss` during a training step.

        The arguments are Trainer's; they are not used, as the engine has the batch.

        Returns:
            The term, a scalar; 0 for a micro-batch that does not count.

        Raises:
            ConfigError: If the modules' training modes are not those of the proof.
        """
        engine = self.engine
        if self.rule.modes != module_modes(self.loss_module):
            raise ConfigError(
                "the training modes (or the modules) of the model differ from those of the proof: "
                "a callback or training_step put a module into evaluation mode. Do that in the "
                "model's own train() method, which the proof calls too."
            )
        self._term = torch.zeros((), device=engine.backend.device, requires_grad=True)
        self._counts = ()
        counts_in_window = bool(engine.call.weight)
        # Under FSDP every forward and backward is a collective, which all ranks must make.
        is_needed_by_fsdp = engine.backend.is_sharded and any(engine.totals)
        if counts_in_window or is_needed_by_fsdp:
            outputs = engine.forward(engine.call.batch)
            self._term, self._counts = engine.loss_term(outputs)
        elif engine.backend.num_processes > 1:
            # A user's loss may contain a collective (TRL's gathers metrics): all ranks compute it.
            with torch.no_grad():
                engine.sums(engine.forward(engine.call.batch))
        return self._term

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward of the current micro-batch's term; it replaces `accelerator.backward`
        during a training step of `ExactTrainer`.

        Args:
            loss: What Trainer passes: the term that `compute_loss` returned. In the first training
                step, this is checked; later not, because reading a value waits for the device.
            **kwargs: Further arguments of `accelerator.backward`, ignored.

        Raises:
            ConfigError: If the term was scaled between `compute_loss` and here.
        """
        if not self._is_scale_checked:
            self._is_scale_checked = True
            passed = float(loss.detach())
            expected = float(self._term.detach())
            if passed != expected and math.isfinite(expected):
                raise ConfigError(
                    "the term of the window's loss must reach backward() unscaled, but was "
                    f"multiplied by {passed / expected:g}: an overridden training_step scales it "
                    "again. Remove that scaling."
                )
        self.engine.backward_term(self._term, self._counts)

    def end(self) -> None:
        """End a window of `ExactTrainer` after its last training step: sum its gradients over all
        ranks, and store its result.

        Raises:
            DataError: If the window has no targets under fp16.
        """
        self.result = self.engine.end()
        self._check_has_targets(not self.result.skipped)

    def _check_has_targets(self, has_targets: bool) -> None:
        """Check that a window of `ExactTrainer` has targets if Accelerate scales losses for fp16,
        as its gradient scaler needs a loss.

        Args:
            has_targets: Whether the window has targets.

        Raises:
            DataError: If Accelerate scales losses, but the window has no targets.
        """
        if self.trainer.accelerator.scaler is not None and not has_targets:
            raise DataError(
                "a window has no targets, so it has no loss for fp16 to scale: remove such samples."
            )

    def loss_to_log(self) -> Tensor:
        """Return the current micro-batch's contribution to the loss that `ExactTrainer` logs, a
        scalar.

        Trainer adds these up over the micro-batches of a window and averages them over the
        processes; the result is the window's mean loss.
        """
        if self.engine.loss.counts_in_forward:
            # The divisor is known at the end of the window: its last micro-batch logs the loss.
            if self.result is None:
                return torch.zeros_like(self._term.detach())
            return self.result.loss_tensor.to(self._term.dtype)
        # Times the number of processes, as Trainer averages. A filler has the weight 0.
        weight = self.engine.call.weight * self.engine.backend.num_processes
        return self._term.detach() * weight


class ExactTrainerMixin:
    """A mixin for any subclass of `transformers.Trainer`: makes its gradient that of the full batch
    for any accumulation.

    A window is processes x per_device_train_batch_size x gradient_accumulation_steps samples, and
    every such split of it, also over processes (DDP), gives the same update: the mean of the
    trainer's own loss (`compute_loss`, `compute_loss_func`, label smoothing, or the model's own)
    over all targets of the window. The order of samples is keyed by (data_seed or seed, epoch), and
    dropout by (seed, epoch, position). The logged loss is the mean over the window.

    `num_items_in_batch` is that of one batch, not of the window: a custom loss must be the mean
    over its batch. For weighted means, and other means that are not over targets, a subclass
    defines a method `loss_sums(self, outputs, batch) -> (sum of weights x losses, sum of weights)`.
    `dataloader_drop_last` drops the last window if it is short.

    Attributes:
        audit: Test the loss again on the windows that are trained on, before their updates. False,
            in a subclass, accepts that a kind of row which the proof did not see trains a wrong
            gradient.
        whole_batch: `compute_loss` is a loss of all samples of a window (in-batch negatives, the
            hardest samples). True, in a subclass: what the model returns in `compute_loss` are the
            outputs of the whole window, and `inputs` its batch. Each micro-batch has two forwards.

    Raises, when training begins:
        ConfigError, DataError: If training cannot be made exact (see `checks`).
        LossNotAdditive, UnkeyedRandomness: See `hf_ga.prove_targets`.

    Example:
        from hf_ga import ExactTrainer as Trainer  # instead of: from transformers import Trainer

        class ExactSFTTrainer(ExactTrainerMixin, SFTTrainer):  # TRL's, or your own
            pass
    """

    audit = True
    whole_batch = False
    _window: TrainerWindow | None = None
    # A subclass may have a method `loss_sums(self, outputs, batch) -> (sum of the loss, targets)`.
    # (Not `loss_fn`: trainers with their own compute_loss often have an attribute of that name.)
    loss_sums: LossFunction | None = None

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Check that training can be made exact, then train as `Trainer.train` does.

        The window size is saved in each checkpoint, and compared when a run resumes.

        Raises:
            ConfigError: If a setting is not supported, or the checkpoint to resume from was saved
                with another window size.
        """
        enable_fp16_on_cpu(self.accelerator)
        check_trainer(self, ExactTrainerMixin)
        window_size = WindowSize(self._window_size)
        resume_from = kwargs.get("resume_from_checkpoint", args[0] if args else None)
        window_size.check_checkpoint(self.args, resume_from)
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
        """Prove the trainer's loss, and return a loader of the micro-batches of hf_ga's windows.

        The dataset, the collate function and the worker settings are those of Trainer's own loader.
        Unless progress bars are disabled, the layout and the result of the proof are logged.
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
        if not args.disable_tqdm:
            # A warning, so that it is shown with the default settings of logging.
            logger.warning(f"ExactTrainer: {windows.layout}; {self._window.rule}")
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
        index = window.begin_micro_batch(model, inputs)
        if index == 0:
            model.zero_grad()  # gradients of a window that a callback interrupted
        gather = partial(gather_uneven, self.accelerator.gather)
        with _hiding_accumulation(self), override(self.accelerator, gather=gather):
            with (
                window.engine.scope(),
                window.engine.micro_batch(index),
                override(self, compute_loss=window.compute_loss),
                override(self.accelerator, backward=window.backward),
            ):
                super().training_step(model, inputs)
            if index == len(window.batches) - 1:
                window.end()
        return window.loss_to_log()


class ExactTrainer(ExactTrainerMixin, Trainer):
    """`transformers.Trainer` with exact gradient accumulation: see `ExactTrainerMixin`."""


@contextmanager
def _hiding_accumulation(trainer: Trainer) -> Iterator[None]:
    """Let an `ExactTrainer` see 1 gradient accumulation step in the block, so that neither Trainer
    nor a custom loss divides the loss by the number of steps.
    """
    trainer.current_gradient_accumulation_steps = 1  # Trainer's loop sets it for each window
    with override(trainer.args, gradient_accumulation_steps=1):
        yield


@contextmanager
def _preserving_counters(trainer: Trainer) -> Iterator[None]:
    """Restore, after the block, the counters that TRL's trainers log, so that `ExactTrainer`'s
    additional forwards, of the proof or of a first pass over a window, do not change the log.
    """
    saved = {
        name: deepcopy(vars(trainer)[name]) for name in LOGGED_COUNTERS if name in vars(trainer)
    }
    try:
        yield
    finally:
        vars(trainer).update(saved)
