"""ExactTrainer: `transformers.Trainer` with exact gradient accumulation, by changing one import
line.

Trainer's loop, logging, evaluation, checkpoints and callbacks are unchanged. Four methods are
overridden:

    train                  checks that training can be made exact
    get_train_dataloader   proves how the trainer's own loss counts its targets; batches come from
    hf_ga's windows get_batch_samples      counts the targets of the window before any forward
    training_step          keyed dropout; compute_loss gives this micro-batch's part of the window's
    mean loss, not divided again
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from hf_ga.errors import ConfigError, DataError, LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.backend import RankStatus, added
from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.forward import callable_module, module_modes
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.hooks import Call
from hf_ga.exact.lengths import find_lengths
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.exact.step import Forward
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.fsdp import backend_for, is_sharded
from hf_ga.parallel.prepare import configure_fsdp, enable_fp16_on_cpu
from hf_ga.proof.precision import full_precision
from hf_ga.trainer.batches import WindowBatch, WindowedDataLoader
from hf_ga.trainer.checks import WindowSize, check_trainer
from hf_ga.trainer.loss import TrainerLoss
from hf_ga.trainer.pairs import collate_pairs, gather_uneven, has_pairs
from hf_ga.training import NUM_PROOF_SAMPLES, prove_targets

BOOKKEEPING = (
    "_metrics",
    "_total_train_tokens",
)  # TRL's compute_loss updates them; the proof's forwards must not


class WindowLoss:
    """The proven loss of a trainer: each micro-batch's term of the mean loss over all targets of
    its window.

    Attributes:
        forward, batches, totals, status: of the current window. calls: of its batches, with weight
            0 for one that adds nothing: it has no targets, or repeats samples. num_begun: number of
            its micro-batches begun; None: no window.
    """

    def __init__(self, trainer: Trainer, windows: WindowLoader) -> None:
        self.trainer, self.fetcher, self.device = trainer, windows.fetcher, trainer.args.device
        self.module, self.backend = TrainerLoss(trainer), backend_for(trainer.accelerator)
        trainer.model.train()  # as in each training step: the proof needs the modes of training
        samples = windows.fetcher.probe_samples(next(windows.requests()), NUM_PROOF_SAMPLES)
        with (
            _without_bookkeeping(trainer),
            _accumulation_unseen(trainer),
            full_precision(trainer.model),
        ):
            try:
                self.proven = prove_targets(self.module, samples, windows.fetcher.collate_fn)
            except LossNotAdditive as error:
                error.add_note(
                    "ExactTrainer uses compute_loss or compute_loss_func; loss_fn is an argument "
                    "of hf_ga.train_step only."
                )
                raise
        windows.state.pad_to_window = self.proven.pad_to_window
        self.num_begun: int | None = None
        self._reaches_backward = (
            False  # checked once: reading a gradient synchronizes with the device
        )

    def begin_window(self, batches: list[WindowBatch]) -> None:
        """Count a window's targets on the host.

        Raises:
            ConfigError: the batches are not one window, or the previous window is incomplete.
                DataError: no target under fp16.
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
        request, loss = replace(batches[0].request, seed=self.trainer.args.seed), self.proven.loss
        window = Window(request, self.fetcher, batches[: len(request.micro_batches)])
        repeated = [
            MicroBatch(b, request.positions[:1], request.sample_ids[:1])
            for b in batches[len(request.micro_batches) :]
        ]
        calls = [
            Call(m, counts=loss.count(m.batch, len(m))) for m in (*window.micro_batches, *repeated)
        ]
        own = [call.counts for call in calls[: len(request.micro_batches)]]
        self.status = RankStatus(
            torch.zeros((), device=self.device), added((0,) * loss.num_means, *own)
        )
        self.totals = self.backend.all_reduce_status(self.status).counts
        adds = [any(self.totals) and loss.contributes(counts) for counts in own] + [False] * len(
            repeated
        )
        planned = [call for call, weight in zip(calls, adds, strict=True) if weight]
        if any(self.totals):
            planned = self.backend.equalize(window, planned, loss)
        rest = [
            replace(call, weight=0) for call, weight in zip(calls, adds, strict=True) if not weight
        ]
        self.calls = [*planned, *rest][: len(batches)]
        self.batches = batches
        self.forward = Forward(
            self.trainer.accelerator, self.module, window, (loss, *self.proven.hooks)
        )
        self.num_begun = 0
        if self.trainer.accelerator.scaler is not None and not any(self.totals):
            raise DataError(
                "a window has no targets, so it has no loss for fp16 to scale: remove such samples."
            )

    def begin_micro_batch(self, model: nn.Module, inputs: dict[str, Any]) -> int:
        """The index of the next micro-batch in the window (0-based).

        Raises:
            ConfigError: there is none, it is not `inputs`, or the model is not the proven one.
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
        if index == 0:
            self.backend.begin(model, self.proven.loss)
        return index

    def part(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        *,
        index: int,
        num_items_in_batch: None = None,
    ) -> Tensor:
        """Replaces `compute_loss` in a training step: the term of micro-batch `index` in the
        window's mean loss.
        """
        loss, planned = self.proven.loss, self.calls[index]
        if index == 0:
            self._begin_forwards()
        if not planned.weight and not (self.backend.is_sharded and any(self.totals)):
            if (
                self.trainer.args.world_size > 1
            ):  # compute_loss may be a collective (TRL's gathers metrics)
                with torch.no_grad():
                    call, outputs = self.forward(planned)
                    loss.sums(outputs, call)
            return torch.zeros((), device=self.device, requires_grad=True)
        call, outputs = self.forward(planned)
        term = loss.mean(loss.sums(outputs, call)[0], self.totals)
        if self.backend.is_sharded:  # FSDP averages over ranks
            term = term * (planned.weight * self.trainer.args.world_size)
        if not self._reaches_backward:
            self._reaches_backward = True
            term.register_hook(self._check_not_scaled)
        return term

    def _begin_forwards(self) -> None:
        """Called after Trainer's own `model.train()`, before the first forward of a window."""
        if self.proven.modes != module_modes(self.module):
            raise ConfigError(
                "the training modes (or the modules) of the model differ from those of the proof: "
                "a callback or training_step "
                "put a module into evaluation mode. Do that in the model's own train() method, "
                "which the proof calls too."
            )
        if any(self.totals):
            with _without_bookkeeping(self.trainer), self.trainer.accelerator.autocast():
                all_reduce = partial(self.backend.all_reduce, status=self.status)
                self.totals = self.proven.loss.prepare(
                    self.calls, self.totals, self.forward, all_reduce, self.device
                )

    def end_window(self, model: nn.Module) -> None:
        """After the last backward: sum the gradients over the ranks."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.status.has_gradient = [p.grad is not None for p in parameters]
        self.backend.reduce_gradients(
            model, self.backend.all_reduce_status(self.status), self.proven.unused
        )

    def _check_not_scaled(self, gradient: Tensor) -> None:
        scaler = self.trainer.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        if float(gradient) != scale:
            raise ConfigError(
                "the term of the window's loss must reach backward() unscaled, but was "
                f"multiplied by {float(gradient) / scale:g}: "
                "an overridden training_step scales it again. Remove that scaling."
            )


class ExactTrainerMixin:
    """A mixin for any subclass of `transformers.Trainer`: makes its gradient that of the full batch
    for any accumulation.

    The window is processes x per_device_train_batch_size x gradient_accumulation_steps samples, and
    every such split of it, also over processes (DDP), gives the same update: the mean of the
    trainer's own loss (`compute_loss`, `compute_loss_func`, label smoothing, or the head's) over
    all targets of the window, with the order of samples keyed by (data_seed or seed, epoch) and
    dropout by (seed, epoch, position). The logged loss is this mean. `num_items_in_batch` is that
    of one batch, not of the window: a custom loss must be the mean over its batch.
    `dataloader_drop_last` drops the last window if it is short.

    Raises, when training begins:
        ConfigError, DataError: training cannot be made exact (see `checks`). LossNotAdditive,
            UnkeyedRandomness: see `hf_ga.prove_targets`.

    Example:
        from hf_ga import ExactTrainer as Trainer              # instead of: from transformers
        import Trainer

        class ExactSFTTrainer(ExactTrainerMixin, SFTTrainer):  # TRL's, or your own
            pass
    """

    _window_loss: WindowLoss | None = None

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trainer's `train`, after checking that it can be made exact."""
        enable_fp16_on_cpu(self.accelerator)
        check_trainer(self, ExactTrainerMixin)
        if is_sharded(self.accelerator):
            configure_fsdp(self.accelerator.state.fsdp_plugin, self.model)
        window = WindowSize(self._window_size)
        window.check(self.args, kwargs.get("resume_from_checkpoint", args[0] if args else None))
        self.pop_callback(WindowSize)  # of an earlier training
        self.add_callback(window)
        return super().train(*args, **kwargs)

    @property
    def _window_size(self) -> int:
        args = self.args
        return args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps

    def get_train_dataloader(self) -> DataLoader:
        """Prove the loss, then load hf_ga's windows, micro-batch by micro-batch, from Trainer's
        dataset and collate function.
        """
        loader = super().get_train_dataloader()
        args, collate_fn = self.args, loader.collate_fn
        windows = WindowLoader(
            loader.dataset,
            partial(collate_pairs, collate_fn) if has_pairs(collate_fn) else collate_fn,
            accelerator=self.accelerator,
            per_device_batch_size=args.per_device_train_batch_size,
            global_batch_size=self._window_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
            drop_last_window=args.dataloader_drop_last,
            planner=partial(
                plan_by_sizes, sizes=[args.per_device_train_batch_size]
            ),  # as many micro-batches as Trainer's
            lengths=find_lengths(loader.dataset, loader.collate_fn),
        )
        self._window_loss = WindowLoss(self, windows)
        if self.is_world_process_zero() and not args.disable_tqdm:
            print(f"ExactTrainer: {windows.layout}; {self._window_loss.proven}")
        return WindowedDataLoader(windows, loader)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, None]:
        """The micro-batches of one window, without a number of items: each loss is weighted by its
        own targets.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._window_loss.begin_window(batches)
        return batches, None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Add one micro-batch's gradient; returns its term of the window's mean loss."""
        loss = self._window_loss
        index = loss.begin_micro_batch(model, inputs)
        if index == 0:
            model.zero_grad()  # gradients of a window that a callback interrupted
        before = random_states()
        part, gather = (
            partial(loss.part, index=index),
            partial(gather_uneven, self.accelerator.gather),
        )
        replaced = (
            patch.multiple(self, compute_loss=part),
            patch.multiple(self.accelerator, gather=gather),
        )
        with _accumulation_unseen(self), loss.forward.scope(), replaced[0], replaced[1]:
            result = super().training_step(model, inputs)
        if moved := moved_generators(before):
            raise UnkeyedRandomness(
                f"the training step drew from {' and '.join(moved)} although the proof's forwards "
                "did not: this randomness depends "
                "on the split of the window. Switch it off."
            )
        if index == len(loss.batches) - 1:
            loss.end_window(model)
        return (
            result if loss.backend.is_sharded else result * self.args.world_size
        )  # Trainer logs the mean over processes


class ExactTrainer(ExactTrainerMixin, Trainer):
    """`transformers.Trainer` with exact gradient accumulation: see `ExactTrainerMixin`."""


@contextmanager
def _accumulation_unseen(trainer: Trainer) -> Iterator[None]:
    """Trainer divides the loss by one of these numbers, and a custom loss may divide by the other:
    set both to 1 in the block.
    """
    trainer.current_gradient_accumulation_steps = 1  # the loop sets it for each window
    with patch.object(trainer.args, "gradient_accumulation_steps", 1):
        yield


@contextmanager
def _without_bookkeeping(trainer: Trainer) -> Iterator[None]:
    """Undo changes of the proof's forwards to counters that a trainer logs."""
    kept = {name: deepcopy(vars(trainer)[name]) for name in BOOKKEEPING if name in vars(trainer)}
    try:
        yield
    finally:
        vars(trainer).update(kept)
