"""Runs a model on probe batches: small trial batches whose losses and gradients a proof compares.

All probe batches run in float32 without autocast, frozen parameters included, to keep rounding
errors small.
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
from hf_ga.exact.dropout_site import DropoutSite
from hf_ga.exact.engine import Engine
from hf_ga.exact.entries import Entries, put_together
from hf_ga.exact.fetch import BatchFetcher, WindowRequest
from hf_ga.exact.forward import (
    LossFunction,
    argument_filter,
    call_loss_fn,
    extra_forwards,
    force_eager,
    fresh_gradients,
    head_loss,
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
from hf_ga.proof.probes import NUM_PROBE_SAMPLES, ProbeResult, has_enough_targets, rows_with_targets
from hf_ga.proof.sites import find_dropout_sites

MAX_CANDIDATES = 64  # maximum number of samples to choose probe samples from


class Prober:
    """Runs one model on probe batches, the small trial batches of a proof.

    Args:
        model: The model, wrapped or not.
        samples: Some samples of the dataset.
        collate_fn: List of samples -> keyword arguments of the model.
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets). None: the loss of the
            model's own head.

    Attributes:
        model: The unwrapped model.
        parameters: Its trainable parameters.
        unused_parameters: Names of trainable parameters that have had no gradient so far.
        samples_by_length: All samples, sorted by length.
        candidates: Up to `MAX_CANDIDATES` of them, evenly spaced, to choose probe samples from.
        is_collate_random: Whether the collate function has drawn random numbers.
        dropout: The model's keyed dropout, once `find_dropout` has found its sites.
        loss: The proven loss. None until it is proven.
        speed_ups: The speed-ups in use.

    Raises:
        LossNotAdditive: If there are no samples.
        ConfigError: If the model cannot be trained exactly (see `check_trainable`).
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Sequence[Any],
        collate_fn: Callable,
        loss_fn: LossFunction | None,
    ) -> None:
        """Unwrap the model, check that it can be trained exactly, and choose candidate samples."""
        if not len(samples):
            raise LossNotAdditive("a proof needs samples, got none.")
        self.model = unwrapped(model)
        self.collate_fn = collate_fn
        self.loss_fn = loss_fn
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(trainable.values())
        self.unused_parameters = set(trainable)
        check_trainable(self.model, self.parameters)
        self.device = self.parameters[0].device
        self._model_arguments = argument_filter(self.model)
        self.speed_ups: list[SpeedUp] = []
        self.samples_by_length = sorted(samples, key=sample_length)
        evenly_spaced = np.unique(np.linspace(0, len(samples) - 1, MAX_CANDIDATES).astype(int))
        self.candidates = [self.samples_by_length[i] for i in evenly_spaced]
        self.is_collate_random = False
        self._entries: Entries | None = None
        self.loss: Loss | None = None

    @contextmanager
    def proof_mode(self) -> Iterator[None]:
        """Prepare the model for a proof within the block, and restore it afterwards.

        In the block, the model is in training mode, in float32, and not compiled. At the end,
        random states, buffers, dtypes and training modes are as before. On entry, this also learns
        from a few samples which entries of a batch have rows of samples.

        Raises:
            DataError: If a collated batch cannot be split into samples.
            LossNotAdditive: If the block raises an IndexError: a token, a label, or the label that
                marks ignored targets is out of range.
        """
        with (
            preserved_random_states(),
            extra_forwards(self.model),
            restored_modes(self.model),
            full_precision(self.model),
            force_eager(),
        ):
            # If the model is in training mode, its submodules keep their modes, evaluation mode
            # included: this is how it will be trained.
            if not self.model.training:
                self.model.train()
            self._entries = Entries(self._collate_in_float32, self.samples_by_length[-1])
            # A few samples, one by one, show entries that do not have one row per sample.
            self._entries.inspect_samples(self.candidates[::4])
            # Raises if a batch of the shortest and the longest sample cannot be split into samples.
            self.collate([self.samples_by_length[0], self.samples_by_length[-1]])
            self._initial_buffers = {name: b.clone() for name, b in self.model.named_buffers()}
            try:
                yield
            except IndexError as error:
                raise LossNotAdditive(
                    f"the model or its loss fails on the samples ({error}). Likely causes: a "
                    "token outside of the vocabulary, a label that is not a class, or a loss that "
                    f"ignores a label other than {IGNORED_LABEL} and 0: for that, pass loss_fn."
                ) from error

    def find_dropout(self, allow_split_dependent_randomness: bool) -> None:
        """Find the model's dropout sites, and set `dropout`.

        If random draws that cannot be tied to a sample are allowed, the modules that make them are
        put into evaluation mode, because a proof needs forwards with equal outputs.

        Raises:
            UnkeyedRandomness: If there are such draws, and they are not allowed.
        """
        self.dropout = find_dropout_sites(
            self.model,
            partial(self._forward_copies, self.samples_by_length[-1]),
            allow_split_dependent_randomness=allow_split_dependent_randomness,
        )
        if self._entries.ragged and self.dropout.sites:
            self._check_masks_of_joined_rows(allow_split_dependent_randomness)
        for module in self.dropout.unkeyed:
            module.training = False

    def _check_masks_of_joined_rows(self, allow_split_dependent_randomness: bool) -> None:
        """Check that no dropout mask is drawn for an entry with several or no rows per sample.

        Some entries of a batch concatenate the rows of all samples, and each sample has another
        number of rows (the patches of all images). Dropout on these rows cannot be tied to samples.
        If allowed, its sites are marked as not keyed.

        Raises:
            UnkeyedRandomness: If there is such a mask, and it is not allowed.
        """
        joined_sites = self._sites_of_joined_rows(allow_split_dependent_randomness)
        if joined_sites and not allow_split_dependent_randomness:
            site_names = ", ".join(dict.fromkeys(site.name for site in joined_sites))
            entry_names = ", ".join(sorted(self._entries.ragged))
            raise UnkeyedRandomness(
                f"{site_names} draws dropout masks for the rows of {entry_names}, which does not "
                "have exactly one row per sample, so the masks cannot be tied to samples. Set this "
                "dropout to 0."
            )
        for site in joined_sites:
            site.is_keyed = False
            self.dropout.sites[site.key] = site
            self.dropout.unkeyed.append(site.module)

    def _sites_of_joined_rows(self, allow_split_dependent_randomness: bool) -> list[DropoutSite]:
        """Find the dropout sites whose masks do not have exactly one row per sample.

        Runs the model on copies of the sample with the fewest rows in the entries that concatenate
        the rows of all samples, then on copies of the sample with the most rows.
        """
        by_num_rows = sorted(self.candidates, key=self._entries.count_ragged_rows)
        sites_with_fewest, sites_with_most = [
            find_dropout_sites(
                self.model,
                partial(self._forward_copies, sample),
                allow_split_dependent_randomness=allow_split_dependent_randomness,
            ).sites
            for sample in (by_num_rows[0], by_num_rows[-1])
        ]
        joined_sites = []
        for key, site in (sites_with_most | self.dropout.sites).items():
            same_site = sites_with_fewest.get(key)
            has_one_row_each = (
                same_site is not None
                and same_site.rows_per_sample == 1
                and site.rows_per_sample == 1
            )
            if not has_one_row_each:
                joined_sites.append(site)
        return joined_sites

    @property
    def sample_entries(self) -> set[str]:
        """Names of the entries of a collated batch that hold rows of samples.

        The proof splits these into parts of a batch; all other entries are shared by the samples.
        """
        return self._entries.of_samples

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Collate samples in float32 so that the batch can be split into samples.

        Random generators are seeded before, so that a random collate function is repeatable.

        Returns:
            The batch. An entry in which samples do not have one row each (the patches of all
            images) is replaced by `RowsPerSample`, a list with the rows of each sample.
        """
        return self._entries.split(self._collate_seeded(samples), samples)

    def on_device(self, batch: Batch) -> dict[str, Any]:
        """Return a probe batch on the model's device, in the form that the model gets.

        Each entry of `RowsPerSample`, which `collate` has split, is concatenated again.
        """
        return send_to_device(put_together(batch), self.device)

    def plain_forward(self, batch: Batch) -> Any:
        """Return the model's outputs for a probe batch, without gradients and keyed dropout."""
        with torch.no_grad():
            return self.model(**self._model_arguments(self.on_device(batch)))

    def _collate_seeded(self, samples: list[Any]) -> dict[str, Any]:
        """Collate samples of a proof in float32, after seeding all random generators.

        Sets `is_collate_random` if the collate function draws random numbers.
        """
        seed_generators(0)
        states_before = random_states()
        batch = self._collate_in_float32(samples)
        self.is_collate_random |= bool(moved_generators(states_before))
        return batch

    def _collate_in_float32(self, samples: list[Any]) -> dict[str, Any]:
        """Collate samples of a proof, and convert fp16 and bf16 tensors of the batch to float32."""
        return {
            name: at_least_float32(value) if isinstance(value, Tensor) else value
            for name, value in as_batch(self.collate_fn(samples)).items()
        }

    def _forward_copies(self, sample: Any, num_samples: int) -> None:
        """Run model and loss on several copies of one sample, to find the model's dropout sites.

        Random states are restored after collating, so that draws of the collate function are not
        mistaken for draws of the model.
        """
        with preserved_random_states():
            batch = self._collate_seeded([sample] * num_samples)
        batch = send_to_device(batch, self.device)
        run_forward(self.model, batch, self.loss_fn)

    def probe_batch(self, ignored_label: int = IGNORED_LABEL) -> dict[str, Any]:
        """Collate the batch on which a proof compares the loss of all samples with those of parts.

        Its `NUM_PROBE_SAMPLES` samples have targets and differ as much as possible in length and
        label. They are repeated if too few samples have targets. Only the shorter half of the
        candidates is used if it has enough targets: a proof should not need more memory than
        training.

        Args:
            ignored_label: The label that the head ignores, -100 or 0; all others are targets.

        Raises:
            LossNotAdditive: If no sample has a target.
        """
        candidates = self.candidates[: len(self.candidates) // 2]
        batch = self.collate(candidates) if candidates else None
        if batch is None or not has_enough_targets(batch, len(candidates), ignored_label):
            candidates = self.candidates
            batch = self.collate(candidates)
        rows = rows_with_targets(batch, len(candidates), NUM_PROBE_SAMPLES, ignored_label)
        return take_rows(batch, np.resize(rows, NUM_PROBE_SAMPLES), self.sample_entries)

    def _window(
        self,
        batches: Sequence[Batch],
        positions: Sequence[np.ndarray],
        window_batch: Batch | None = None,
    ) -> Window:
        """Make a window whose micro-batches are probe batches.

        Args:
            batches: The micro-batches.
            positions: For each micro-batch, the positions of its samples, which key their dropout.
            window_batch: All micro-batches as one batch, for a loss of the whole window. None: the
                loss does not read it.
        """
        window_positions = np.concatenate(positions)
        ends = np.cumsum([len(part) for part in positions])
        request = WindowRequest(
            seed=0,
            epoch=0,
            index=0,
            positions=window_positions,
            sample_ids=window_positions,
            micro_batches=np.split(np.arange(len(window_positions)), ends[:-1]),
            pad_to_window=True,  # so that the engine never collates these samples to another width
        )
        fetcher = BatchFetcher({} if window_batch is None else window_batch, self.sample_entries)
        return Window(request, fetcher, [put_together(batch) for batch in batches])

    def _engine(self, loss: Loss, speed_ups: Sequence[SpeedUp] | None = None) -> Engine:
        """Make an engine that computes a loss on this process alone, with keyed dropout.

        Args:
            loss: The loss.
            speed_ups: The speed-ups to use. None: those that have passed so far.
        """
        speed_ups = self.speed_ups if speed_ups is None else speed_ups
        rule = Rule(loss, self.dropout, speed_ups=tuple(speed_ups))
        return Engine(LocalBackend(self.device), self.model, rule)

    def _probe(self, batch: Batch, positions: np.ndarray) -> ProbeResult:
        """Run forward and backward of one probe batch.

        Args:
            batch: The batch.
            positions: The positions of its samples, which key their dropout: int64, of shape
                (samples,).

        Returns:
            Loss and gradient as the model's head (or `loss_fn`) returns them for this batch.
        """
        loss = BatchLoss(self.loss_fn)
        value, gradients = self.loss_and_gradients(loss, [batch], [positions])
        return ProbeResult(value, loss.num_targets, gradients)

    def loss_and_gradients(
        self,
        loss: Loss,
        batches: Sequence[Batch],
        positions: Sequence[np.ndarray],
        window_batch: Batch | None = None,
    ) -> tuple[float, list[Tensor]]:
        """Compute loss and gradient of a window of probe batches, by the engine that trains.

        The speed-ups in use are forced on, also where a batch is too small to gain from them.
        Existing gradients of the model are kept. Parameters that get a gradient are removed from
        `unused_parameters`.

        Args:
            loss: The loss to compute.
            batches: The micro-batches.
            positions: For each micro-batch, the positions of its samples, which key their dropout.
            window_batch: All micro-batches as one batch, for a loss of the whole window.

        Returns:
            The loss, and the gradient of each of `parameters`: zeros for a parameter without one.
        """
        engine = self._engine(loss)
        with ExitStack() as stack:
            for speed_up in self.speed_ups:
                stack.enter_context(speed_up.trial())
            stack.enter_context(fresh_gradients(self.parameters))
            result = compute(engine, self._window(batches, positions, window_batch))
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    self.unused_parameters.discard(name)
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
        return result.loss, gradients

    def _proven_loss(self, batches: Sequence[Batch], positions: Sequence[np.ndarray]) -> float:
        """Compute the mean loss of a window of probe batches by the proven rule, without gradients
        and speed-ups.

        Args:
            batches: The micro-batches of the window.
            positions: For each micro-batch, the positions of its samples, which key their dropout.
        """
        engine = self._engine(self.loss, speed_ups=())
        engine.begin(self._window(batches, positions))
        mean_loss = 0.0
        with torch.no_grad(), engine.scope():
            for index in range(len(engine.calls)):
                with engine.micro_batch(index) as batch:
                    term, counts = engine.loss_term(engine.forward(batch))
                    mean_loss += float(term)
                    if self.loss.counts_in_forward:
                        engine.status.counts = sum_counts(engine.status.counts, counts)
        if self.loss.counts_in_forward:
            # The terms were divided by the number of samples, because only the forwards show the
            # number of targets. NaN if there are none.
            num_targets = sum(engine.status.counts) or np.nan
            mean_loss *= engine.window.num_samples / num_targets
        return mean_loss

    def _batch_loss(self, batch: Batch, positions: np.ndarray) -> float:
        """Compute the head's loss of a probe batch by one forward without gradients."""
        engine = self._engine(BatchLoss(self.loss_fn))
        engine.begin(self._window([batch], [positions]), training=False)
        with torch.no_grad(), engine.scope(), engine.micro_batch(0) as on_device:
            return float(engine.mean(engine.forward(on_device)))


class BatchLoss(Loss):
    """The loss of a single batch exactly as its model's head or `loss_fn` returns it.

    A proof compares the loss of a window of micro-batches with it.

    Args:
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets). None: the head's loss.

    Attributes:
        num_targets: The number of targets that `loss_fn` returned for the last batch; 0.0 without a
            `loss_fn`.
    """

    name = "batch"

    def __init__(self, loss_fn: LossFunction | None) -> None:
        """Store the loss function; without one, the loss is that of the model's own head."""
        self.loss_fn = loss_fn
        self.num_targets = 0.0

    def count(self, batch: Batch, num_samples: int) -> Counts:
        """Return 1 target for every batch, so that the engine does not change its loss."""
        return (1,)

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        """Return the batch's own loss, and 1 target. Sets `num_targets` if there is a `loss_fn`."""
        if self.loss_fn is None:
            return (head_loss(outputs),), (1,)
        total, self.num_targets = call_loss_fn(self.loss_fn, outputs, call.batch)
        return (total,), (1,)
