"""Probe batches of one model, and its loss and gradient on them.

All probes run in float32 without autocast, frozen parameters included, to keep rounding errors
small.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.backend import LocalBackend, sum_counts
from hf_ga.exact.batches import (
    IGNORED_LABEL,
    Batch,
    as_batch,
    sample_length,
    take_rows,
)
from hf_ga.exact.engine import Engine
from hf_ga.exact.entries import Entries, put_together
from hf_ga.exact.fetch import BatchFetcher, WindowRequest
from hf_ga.exact.forward import (
    LossFunction,
    argument_filter,
    extra_forwards,
    gradients_apart,
    head_loss,
    not_compiled,
    own_loss,
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
from hf_ga.exact.loss import Loss, Sums
from hf_ga.exact.precision import at_least_float32
from hf_ga.exact.rule import Rule
from hf_ga.exact.step import compute
from hf_ga.exact.window import Window
from hf_ga.proof.precision import check_trainable, full_precision
from hf_ga.proof.probes import NUM_PROBE_SAMPLES, Probe, has_enough_targets, rows_with_targets
from hf_ga.proof.sites import find_dropout_sites

NUM_CANDIDATES = 64  # samples to choose probe samples from


class Prober:
    """Runs one model on probe batches.

    Args:
        model: See `targets.prove`, as the others.

    Attributes:
        dropout: The model's keyed dropout.
        loss: Set once it is proven.
        speed_ups: Those in use.
        unused: Names of trainable parameters without a gradient in all probes.
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
        self.model = unwrapped(model)
        self.collate_fn = collate_fn
        self.loss_fn = loss_fn
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(trainable.values())
        self.unused = set(trainable)
        check_trainable(self.model, self.parameters)
        self.device = self.parameters[0].device
        self._accepted = argument_filter(self.model)
        self.speed_ups: list[SpeedUp] = []
        self.by_length = sorted(samples, key=sample_length)
        spread = np.unique(np.linspace(0, len(samples) - 1, NUM_CANDIDATES).astype(int))
        self.candidates = [self.by_length[i] for i in spread]
        self.collate_draws = False
        self._entries: Entries | None = None
        self.loss: Loss | None = None

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Run the block in training mode and full precision; then restore random states, buffers
        and modes.

        Raises:
            LossNotAdditive: If an index is out of range: a token, a label, or the label that marks
                ignored targets.
        """
        with (
            preserved_random_states(),
            extra_forwards(self.model),
            restored_modes(self.model),
            full_precision(self.model),
            not_compiled(),
        ):
            # A model in training mode keeps its submodules in evaluation mode: it will be trained
            # this way.
            if not self.model.training:
                self.model.train()
            self._entries = Entries(self._in_full_precision, self.by_length[-1])
            self._entries.look_at(self.candidates[::4])
            self.collate([self.by_length[0], self.by_length[-1]])  # can be cut into samples
            self._buffers = {name: b.clone() for name, b in self.model.named_buffers()}
            try:
                yield
            except IndexError as error:
                raise LossNotAdditive(
                    f"the model or its loss fails on the samples ({error}). Likely causes: a "
                    "token outside of the vocabulary, a label that is not a class, or a loss that "
                    f"ignores another label than {IGNORED_LABEL}: for that, pass loss_fn."
                ) from error

    def find_dropout(self, allow_split_dependent_randomness: bool) -> None:
        """Find the dropout sites. Modules with other draws, if allowed, are put into evaluation
        mode, because the proof needs equal forwards.
        """
        self.dropout = find_dropout_sites(
            self.model,
            partial(self._forward_copies, self.by_length[-1]),
            allow_split_dependent_randomness=allow_split_dependent_randomness,
        )
        if self._entries.joined and self.dropout.sites:
            self._check_masks_of_samples(allow_split_dependent_randomness)
        for module in self.dropout.unkeyed:
            module.training = False

    def _check_masks_of_samples(self, allow_split_dependent_randomness: bool) -> None:
        """Check that no mask is drawn for the rows of an entry of which samples do not have one
        each.

        Raises:
            UnkeyedRandomness: If one is.
        """
        by_number = sorted(self.candidates, key=self._entries.num_joined)
        with_few, with_many = [
            find_dropout_sites(
                self.model,
                partial(self._forward_copies, sample),
                allow_split_dependent_randomness=allow_split_dependent_randomness,
            ).sites
            for sample in (by_number[0], by_number[-1])
        ]
        of_rows = []
        for key, site in (with_many | self.dropout.sites).items():
            found = with_few.get(key)
            if found is None or found.rows_per_sample != 1 or site.rows_per_sample != 1:
                of_rows.append(site)
        if of_rows and not allow_split_dependent_randomness:
            names = ", ".join(dict.fromkeys(site.name for site in of_rows))
            entries = ", ".join(sorted(self._entries.joined))
            raise UnkeyedRandomness(
                f"{names} draws dropout masks for the rows of {entries}, of which samples do not "
                "have one each, so the masks cannot be tied to samples. Set this dropout to 0."
            )
        for site in of_rows:
            site.is_keyed = False
            self.dropout.sites[site.key] = site
            self.dropout.unkeyed.append(site.module)

    @property
    def entries(self) -> set[str]:
        """Names of the entries of a batch that hold rows of samples."""
        return self._entries.of_samples

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Collate with seeded generators, so that random collate functions are repeatable.

        Returns:
            The batch, with `Parts` in place of entries without one row for each sample, to be cut
            into samples; half precision becomes float32, as all of the proof.
        """
        return self._entries.split(self._seeded(samples), samples)

    def probe_batch(self) -> dict[str, Any]:
        """Return the samples that a proof compares with parts of them."""
        return self._rows_with_targets()

    def on_device(self, batch: Batch) -> dict[str, Any]:
        """Return a batch as the model gets it."""
        return send_to_device(put_together(batch), self.device)

    def plain_forward(self, batch: Batch) -> Any:
        """Compute the model's outputs for a batch, without gradients and without keyed dropout."""
        with torch.no_grad():
            return self.model(**self._accepted(self.on_device(batch)))

    def _seeded(self, samples: list[Any]) -> dict[str, Any]:
        seed_generators(0)
        before = random_states()
        batch = self._in_full_precision(samples)
        self.collate_draws |= bool(moved_generators(before))
        return batch

    def _in_full_precision(self, samples: list[Any]) -> dict[str, Any]:
        return {
            name: at_least_float32(value) if isinstance(value, Tensor) else value
            for name, value in as_batch(self.collate_fn(samples)).items()
        }

    def _forward_copies(self, sample: Any, num_samples: int) -> None:
        """Run a forward on copies of a sample.

        Random draws of the collate function do not count as the model's.
        """
        with preserved_random_states():
            batch = self._seeded([sample] * num_samples)
        batch = send_to_device(batch, self.device)
        run_forward(self.model, batch, self.loss_fn)

    def _rows_with_targets(self) -> dict[str, Any]:
        """Choose the probe samples: candidates with targets, as different as possible, repeated if
        there are too few.

        They are of the shorter half if that has enough targets: a proof should not need more memory
        than training.
        """
        chosen = self.candidates[: len(self.candidates) // 2]
        batch = self.collate(chosen) if chosen else None
        if batch is None or not has_enough_targets(batch, len(chosen)):
            chosen = self.candidates
            batch = self.collate(chosen)
        picked = rows_with_targets(batch, len(chosen), NUM_PROBE_SAMPLES)
        return take_rows(batch, np.resize(picked, NUM_PROBE_SAMPLES), self.entries)

    def _window(
        self,
        batches: Sequence[Batch],
        rows: Sequence[np.ndarray],
        whole: Batch | None = None,
    ) -> Window:
        """Make a window of probe batches; see `compute` for the arguments."""
        positions = np.concatenate(rows)
        ends = np.cumsum([len(part) for part in rows])
        request = WindowRequest(
            seed=0,
            epoch=0,
            index=0,
            positions=positions,
            sample_ids=positions,
            micro_batches=np.split(np.arange(len(positions)), ends[:-1]),
            pad_to_window=True,  # nothing is to be collated again
        )
        fetcher = BatchFetcher({} if whole is None else whole, self.entries)
        return Window(request, fetcher, [put_together(b) for b in batches])

    def _engine(self, loss: Loss, speed_ups: Sequence[SpeedUp] | None = None) -> Engine:
        used = self.speed_ups if speed_ups is None else speed_ups
        rule = Rule(loss, self.dropout, speed_ups=tuple(used))
        return Engine(LocalBackend(self.device), self.model, rule)

    def _probe(self, batch: Batch, rows: np.ndarray) -> Probe:
        """Compute loss and gradient of one batch as its model (or `loss_fn`) returns them.

        Args:
            batch: The batch.
            rows: The positions that key its dropout.
        """
        loss = BatchLoss(self.loss_fn)
        value, gradients = self.compute(loss, [batch], [rows])
        return Probe(value, loss.number, gradients)

    def compute(
        self,
        loss: Loss,
        batches: Sequence[Batch],
        rows: Sequence[np.ndarray],
        whole: Batch | None = None,
    ) -> tuple[float, list[Tensor]]:
        """Compute loss and gradient of a window of probe batches, by the engine that trains.

        Args:
            loss: What to compute.
            batches: The micro-batches.
            rows: For each of them, the positions that key its dropout.
            whole: All of them together, for a loss of the whole window.
        """
        engine = self._engine(loss)
        with ExitStack() as stack:
            for speed_up in self.speed_ups:
                stack.enter_context(speed_up.trial())
            stack.enter_context(gradients_apart(self.parameters))
            result = compute(engine, self._window(batches, rows, whole))
            named = self.model.named_parameters()
            self.unused -= {name for name, p in named if p.grad is not None}
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
        return result.loss, gradients

    def _value(self, batches: Sequence[Batch], rows: Sequence[np.ndarray]) -> float:
        """Compute the mean loss of a window of these micro-batches by the proven rule, without
        gradients and without speed-ups.
        """
        engine = self._engine(self.loss, speed_ups=())
        engine.begin(self._window(batches, rows))
        value = 0.0
        with torch.no_grad(), engine.scope():
            for index in range(len(engine.calls)):
                with engine.micro_batch(index) as batch:
                    term, counts = engine.loss_term(engine.forward(batch))
                    value += float(term)
                    if self.loss.counts_in_forward:
                        engine.status.counts = sum_counts(engine.status.counts, counts)
        if self.loss.counts_in_forward:  # until now the divisor was the number of samples
            value *= engine.window.num_samples / (sum(engine.status.counts) or np.nan)
        return value

    def _loss_is_finite(self, batch: Batch, rows: np.ndarray) -> bool:
        """Whether the head's loss of a batch is a finite number; one forward."""
        engine = self._engine(BatchLoss(self.loss_fn))
        engine.begin(self._window([batch], [rows]), training=False)
        with torch.no_grad(), engine.scope(), engine.micro_batch(0) as on_device:
            loss = engine.mean(engine.forward(on_device))
        return bool(loss.isfinite())


class BatchLoss(Loss):
    """The loss of a batch as its model (or `loss_fn`) returns it: what a proof compares with.

    Args:
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets). None: the head's loss.

    Attributes:
        number: The targets that `loss_fn` counted in the last batch; 0.0 without a `loss_fn`.
    """

    name = "batch"

    def __init__(self, loss_fn: LossFunction | None) -> None:
        self.loss_fn = loss_fn
        self.number = 0.0

    def count(self, batch: Batch, num_samples: int) -> Counts:
        return (1,)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        if self.loss_fn is None:
            return (head_loss(outputs),), (1,)
        total, self.number = own_loss(self.loss_fn, outputs, call.batch)
        return (total,), (1,)
