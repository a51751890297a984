"""Probe batches of one model, and its loss and gradient on them.

All probes run in float32 without autocast, frozen parameters included, to keep rounding errors
small.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.batches import (
    IGNORED_LABEL,
    Batch,
    MicroBatch,
    as_batch,
    entries_of_samples,
    sample_length,
    take_rows,
)
from hf_ga.exact.forward import (
    LossFunction,
    argument_filter,
    gradients_apart,
    head_loss,
    own_loss,
    restored_buffers,
    restored_modes,
    run_forward,
    unwrapped,
)
from hf_ga.exact.generators import (
    moved_generators,
    preserved_random_states,
    random_states,
    seed_generators,
)
from hf_ga.exact.hooks import Call, Counts, SpeedUp
from hf_ga.exact.loss import Loss
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.precision import at_least_float32
from hf_ga.proof.precision import check_trainable, full_precision
from hf_ga.proof.probes import NUM_PROBE_SAMPLES, Probe, has_enough_targets, rows_with_targets
from hf_ga.proof.sites import find_dropout_sites

NUM_CANDIDATES = 64  # samples to choose probe samples from


class Prober:
    """Runs one model on probe batches. Args: see `targets.prove`.

    Attributes:
        dropout: the model's keyed dropout. loss: set once proven. speed_ups: those in use.
        unused: names of trainable parameters without a gradient in all probes.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Sequence[Any],
        collate_fn: Callable,
        loss_fn: LossFunction | None,
    ) -> None:
        if not len(samples):
            raise LossNotAdditive("a proof needs samples, got none.")
        self.model, self.collate_fn, self.loss_fn = unwrapped(model), collate_fn, loss_fn
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters, self.unused = list(trainable.values()), set(trainable)
        check_trainable(self.model, self.parameters)
        self.device, self._accepted = self.parameters[0].device, argument_filter(self.model)
        self.speed_ups: list[SpeedUp] = []
        self.by_length = sorted(samples, key=sample_length)
        spread = np.unique(np.linspace(0, len(samples) - 1, NUM_CANDIDATES).astype(int))
        self.candidates = [self.by_length[i] for i in spread]
        self.collate_draws = False
        self.entries: frozenset[str] = frozenset()  # of a batch, with one row per sample
        self.loss: Loss | None = None

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Run the block in training mode and full precision; then restore random states, buffers
        and modes.

        Raises:
            LossNotAdditive: an index is out of range: a token, a label, or the label that marks
                ignored targets.
        """
        with (
            preserved_random_states(),
            restored_buffers(self.model),
            restored_modes(self.model),
            full_precision(self.model),
        ):
            # A model in training mode keeps its submodules in evaluation mode: it will be trained
            # this way.
            if not self.model.training:
                self.model.train()
            self.entries = entries_of_samples(self.collate, self.by_length[-1])
            try:
                yield
            except IndexError as error:
                raise LossNotAdditive(
                    f"the model or its loss fails on the samples ({error}). Likely causes: a "
                    "token outside of the vocabulary, a "
                    "label that is not a class, or a loss that ignores another label than "
                    f"{IGNORED_LABEL}: for that, pass loss_fn."
                ) from error

    @contextmanager
    def keyed(self, allow_split_dependent_randomness: bool) -> Iterator[None]:
        """Find the dropout sites and run the block with keyed dropout. Modules with other draws, if
        allowed, are in evaluation mode.
        """
        self.dropout = find_dropout_sites(
            self.model,
            self._forward_copies,
            allow_split_dependent_randomness=allow_split_dependent_randomness,
        )
        for module in self.dropout.unkeyed:  # the proof needs equal forwards
            module.training = False
        with self.dropout.scope(self.model):
            yield

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Collate with seeded generators, so that random collate functions are repeatable."""
        seed_generators(0)
        before = random_states()
        batch = as_batch(self.collate_fn(samples))
        self.collate_draws |= bool(moved_generators(before))
        return batch

    def _forward_copies(self, num_samples: int) -> None:
        """A forward on equal samples. Random draws of the collate function do not count as the
        model's.
        """
        with preserved_random_states():
            batch = self._on_device(self.collate([self.by_length[-1]] * num_samples))
        run_forward(self.model, batch, self.loss_fn)

    def _rows_with_targets(self) -> dict[str, Any]:
        """The probe samples: candidates with targets, as different as possible, repeated if too
        few. Taken from the shorter half
        if it has enough targets: a proof should not need more memory than training.
        """
        count = len(self.candidates) // 2
        if not (
            count and has_enough_targets(batch := self.collate(self.candidates[:count]), count)
        ):
            batch, count = self.collate(self.candidates), len(self.candidates)
        picked = rows_with_targets(batch, count, NUM_PROBE_SAMPLES)
        return take_rows(batch, np.resize(picked, NUM_PROBE_SAMPLES), self.entries)

    def _call(self, batch: Batch, rows: np.ndarray, counts: Counts = ()) -> Call:
        keys, shared = sample_keys(0, 0, rows).to(self.device), window_key(0, 0, 0).to(self.device)
        return Call(
            MicroBatch(dict(batch), rows, rows), self._on_device(batch), counts, keys, shared
        )

    def _outputs(self, call: Call) -> Any:
        for hook in (self.dropout, *self.speed_ups):
            hook.before(call)
        return self.model(**self._accepted(call.batch))

    def _probe(self, call: Call, totals: Counts | None = None) -> Probe:
        """Loss, targets that loss_fn counts, gradients. totals: compute the call's term in a window
        with so many targets.
        """
        with gradients_apart(
            self.parameters
        ):  # not autograd.grad: reentrant checkpointing supports backward() only
            loss, number = self._value(self._outputs(call), call, totals)
            if loss.requires_grad:  # a constant if there is no target
                loss.backward()
            self.unused -= {name for name, p in self.model.named_parameters() if p.grad is not None}
            kept = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
        return float(loss.detach()), number, kept

    def _value(self, outputs: Any, call: Call, totals: Counts | None) -> tuple[Tensor, float]:
        if totals is not None:
            return torch.as_tensor(self.loss.mean(self.loss.sums(outputs, call)[0], totals)), 0.0
        return (
            (head_loss(outputs), 0.0)
            if self.loss_fn is None
            else own_loss(self.loss_fn, outputs, call.batch)
        )

    def _on_device(self, batch: Batch) -> dict[str, Any]:
        return {
            name: at_least_float32(v.to(self.device)) if isinstance(v, Tensor) else v
            for name, v in batch.items()
        }
