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
    callable_module,
    module_modes,
    own_loss,
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

# TRL's compute_loss updates them; the proof's forwards must not.
BOOKKEEPING = ("_metrics", "_total_train_tokens")


class TrainerWindow:
    """Drives the engine in Trainer's order of calls: all batches of a window are fetched first,
    then each of them is trained on.

    Args:
        trainer: The trainer, whose model is not wrapped yet.
        windows: The loader of its training samples.

    Attributes:
        rule: What was proven about the trainer's own loss.
        engine: Of the current window.
        num_begun: Micro-batches of the window that were begun. None: no window.
        result: Of the current window. None: it is not complete.
    """

    def __init__(self, trainer: Trainer, windows: WindowLoader) -> None:
        self.trainer = trainer
        self.fetcher = windows.fetcher
        self.state = windows.state
        self.module = TrainerLoss(trainer)
        self.num_begun: int | None = None
        self.result: StepResult | None = None
        self._was_checked = False  # comparing once: reading a number waits for the device
        trainer.model.train()  # as in each training step: the proof needs the modes of training
        loss_fn = trainer.loss_sums
        whole_batch = self.module.of_window if trainer.whole_batch else None

        def prove() -> Rule:
            with (
                _without_bookkeeping(trainer),
                _accumulation_unseen(trainer),
                full_precision(trainer.model),
            ):
                return prove_targets(
                    self.module,
                    windows.probe_samples(NUM_PROOF_SAMPLES),
                    windows.collate_fn,
                    loss_fn=loss_fn,
                    whole_batch=whole_batch,
                )

        try:
            self.rule = prove_where_weights_are(
                trainer.accelerator, self.module, prove, (loss_fn, whole_batch)
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
        windows.state.pad_to_window = self.rule.pad_to_window

    def begin(self, batches: list[WindowBatch]) -> None:
        """Begin a window: count its targets, and make a first pass if the loss needs one.

        Args:
            batches: What Trainer fetched for one optimizer step.

        Raises:
            ConfigError: If the batches are not one window, or the previous window is incomplete.
            DataError: If there is no target under fp16.
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
        trainer = self.trainer
        accelerator = trainer.accelerator
        if trainer.optimizer is not None:  # Trainer makes it after its loader
            check_step(trainer.optimizer)
        request = replace(batches[0].request, seed=trainer.args.seed)
        own = batches[: len(request.micro_batches)]
        window = Window(request, self.fetcher, own, self.state)
        backend = backend_for(accelerator)
        self.engine = Engine(
            backend,
            trainer.model_wrapped,
            self.rule,
            module=self.module,
            is_audited=trainer.audit,
            # A user's compute_loss may be a collective (TRL's gathers metrics).
            audits_together=trainer.loss_sums is None,
        )
        trainer.model.train()  # for a first pass; Trainer calls it in each training step only
        gather = partial(gather_uneven, accelerator.gather)
        with (
            _without_bookkeeping(trainer),
            _accumulation_unseen(trainer),
            override(accelerator, gather=gather),
        ):
            self.engine.begin(window, num_calls=len(batches))
        self.batches = batches
        self.num_begun = 0
        self.result = None
        self._check_targets(any(self.engine.totals))

    def begin_micro_batch(self, model: nn.Module, inputs: dict[str, Any]) -> int:
        """Return the index of the next micro-batch in the window (0-based).

        Raises:
            ConfigError: If there is none, it is not `inputs`, or the model is not the proven one.
        """
        index = self.num_begun
        if index == len(self.batches) or inputs is not self.batches[index]:
            raise ConfigError(
                "training_step must be called once for each micro-batch that get_batch_samples "
                "returned."
            )
        if callable_module(model) is not self.module.model:
            raise ConfigError(
                "the model must be trained as it was proven, but it was wrapped in a "
                f"{type(model).__name__}."
            )
        self.num_begun += 1
        return index

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: None = None
    ) -> Tensor:
        """Replace Trainer's `compute_loss` in a training step.

        Returns:
            The term of the current micro-batch in the window's mean loss.
        """
        engine = self.engine
        if self.rule.modes != module_modes(self.module):
            raise ConfigError(
                "the training modes (or the modules) of the model differ from those of the proof: "
                "a callback or training_step put a module into evaluation mode. Do that in the "
                "model's own train() method, which the proof calls too."
            )
        self._term = torch.zeros((), device=engine.backend.device, requires_grad=True)
        self._counts = ()
        if engine.call.weight or (engine.backend.is_sharded and any(engine.totals)):
            outputs = engine.forward(engine.call.batch)
            self._term, self._counts = engine.loss_term(outputs)
        elif engine.backend.num_processes > 1:
            # A user's loss may be a collective (TRL's gathers metrics): all ranks compute it.
            with torch.no_grad():
                engine.sums(engine.forward(engine.call.batch))
        return self._term

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Replace `accelerator.backward` in a training step.

        Raises:
            ConfigError: If the term was scaled on its way.
        """
        if not self._was_checked:
            self._was_checked = True
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
        """End the window.

        Raises:
            DataError: If there is no target under fp16.
        """
        self.result = self.engine.end()
        self._check_targets(not self.result.skipped)

    def _check_targets(self, has_targets: bool) -> None:
        if self.trainer.accelerator.scaler is not None and not has_targets:
            raise DataError(
                "a window has no targets, so it has no loss for fp16 to scale: remove such samples."
            )

    def logged(self) -> Tensor:
        """Return what Trainer adds up over the micro-batches and averages over the processes, to
        log the window's mean loss.
        """
        if self.engine.loss.counts_in_forward:  # the divisor is known at the end
            if self.result is None:
                return torch.zeros_like(self._term.detach())
            return self.result.loss_tensor.to(self._term.dtype)
        weight = self.engine.call.weight * self.engine.backend.num_processes
        return self._term.detach() * weight


class ExactTrainerMixin:
    """A mixin for any subclass of `transformers.Trainer`: makes its gradient that of the full batch
    for any accumulation.

    The window is processes x per_device_train_batch_size x gradient_accumulation_steps samples, and
    every such split of it, also over processes (DDP), gives the same update: the mean of the
    trainer's own loss (`compute_loss`, `compute_loss_func`, label smoothing, or the head's) over
    all targets of the window, with the order of samples keyed by (data_seed or seed, epoch) and
    dropout by (seed, epoch, position). The logged loss is this mean. `num_items_in_batch` is that
    of one batch, not of the window: a custom loss must be the mean over its batch. For weights, and
    other means that are not over targets, a subclass has a method `loss_sums(self, outputs, batch)
    -> (sum of weights x losses, sum of weights)`.
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
        """Check that training can be made exact, then call Trainer's `train`."""
        enable_fp16_on_cpu(self.accelerator)
        check_trainer(self, ExactTrainerMixin)
        window = WindowSize(self._window_size)
        window.check(self.args, kwargs.get("resume_from_checkpoint", args[0] if args else None))
        self.pop_callback(WindowSize)  # of an earlier training
        self.add_callback(window)
        with every_prepare_exact(self.accelerator):
            return super().train(*args, **kwargs)

    @property
    def _window_size(self) -> int:
        args = self.args
        return args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute Trainer's loss; with `loss_sums`, the mean of the batch, for evaluations."""
        if self.loss_sums is None:
            return super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
            )
        outputs = model(**argument_filter(model)(inputs))
        total, number = own_loss(self.loss_sums, outputs, inputs)
        loss = total / (number or 1.0)
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self) -> DataLoader:
        """Prove the loss, then load hf_ga's windows, micro-batch by micro-batch, from Trainer's
        dataset and collate function.
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
            planner=partial(plan_by_sizes, sizes=[micro_batch_size]),  # as many as Trainer's
            lengths=find_lengths(loader.dataset, loader.collate_fn),
        )
        self._window = TrainerWindow(self, windows)
        if not args.disable_tqdm:
            # A warning, as this is to be seen with the default settings of logging.
            logger.warning(f"ExactTrainer: {windows.layout}; {self._window.rule}")
        return WindowedDataLoader(windows, loader)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, None]:
        """Return the micro-batches of one window, without a number of items: each loss is weighted
        by its own targets.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._window.begin(batches)
        return batches, None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Add one micro-batch's gradient; returns its term of the window's mean loss."""
        window = self._window
        index = window.begin_micro_batch(model, inputs)
        if index == 0:
            model.zero_grad()  # gradients of a window that a callback interrupted
        gather = partial(gather_uneven, self.accelerator.gather)
        with _accumulation_unseen(self), override(self.accelerator, gather=gather):
            with (
                window.engine.scope(),
                window.engine.micro_batch(index),
                override(self, compute_loss=window.compute_loss),
                override(self.accelerator, backward=window.backward),
            ):
                super().training_step(model, inputs)
            if index == len(window.batches) - 1:
                window.end()
        return window.logged()


class ExactTrainer(ExactTrainerMixin, Trainer):
    """`transformers.Trainer` with exact gradient accumulation: see `ExactTrainerMixin`."""


@contextmanager
def _accumulation_unseen(trainer: Trainer) -> Iterator[None]:
    """Set to 1, in the block, the numbers by which Trainer divides the loss, and a custom loss may
    divide.
    """
    trainer.current_gradient_accumulation_steps = 1  # the loop sets it for each window
    with override(trainer.args, gradient_accumulation_steps=1):
        yield


@contextmanager
def _without_bookkeeping(trainer: Trainer) -> Iterator[None]:
    """Undo changes of the proof's forwards to counters that a trainer logs."""
    kept = {name: deepcopy(vars(trainer)[name]) for name in BOOKKEEPING if name in vars(trainer)}
    try:
        yield
    finally:
        vars(trainer).update(kept)
