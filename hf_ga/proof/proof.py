"""Probe batches of one model and the comparisons on them, for `targets.prove_targets`.

All probes run in float32 without autocast, frozen parameters too: the question is what the loss is a mean of, not how precisely.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.batches import IGNORED_LABEL, Batch, as_batch, entries_of_samples, same_shapes, sample_length, take_rows
from hf_ga.exact.forward import LossFunction, accepted_arguments, gradients_apart, head_loss, loss_of, restored_modes, unwrapped
from hf_ga.exact.generators import moved_generators, preserved_random_states, random_states, seed_generators
from hf_ga.exact.keyed import sample_keys, window_key
from hf_ga.exact.parts import PARTS, parts_known_by
from hf_ga.exact.places import KeyedPlaces, restored_buffers
from hf_ga.exact.precision import at_least_float32, check_trainable, full_precision
from hf_ga.exact.router import BalanceCall, RouterLoss, add_calls
from hf_ga.exact.terms import Counts, add_counts, count_targets, window_term
from hf_ga.proof.lazy_proof import NUM_WITH_LOGITS, LazyProof
from hf_ga.proof.probes import (
    NUM_IN_A,
    NUM_PROBE_SAMPLES,
    TOLERANCE,
    Probe,
    applicable_rules,
    has_enough_targets,
    no_single_rule,
    off,
    residual_of,
    rows_with_targets,
    separating_labels,
    separating_parts,
    targets_per_row,
    unknown_router_loss,
    unlike_in_another_order,
    unlike_without_padding,
)

# Right rules leave rounding: at most TOLERANCE, or 20 times what the same samples in another order differ by.
TIMES_ROUNDING, MOST_ROUNDING = 20.0, 5e-4  # above the second, right and wrong rules could not be told apart
NUM_CANDIDATES, NUM_WIDTHS = 64, 8
Batches, Rows = dict[str, Batch], dict[str, np.ndarray]  # of A, B and A+B


class Prover:
    """Asks a model on a few samples: which rule counts its targets, and does padding matter? Args: see `targets.prove_targets`."""

    def __init__(self, model: nn.Module, samples: Sequence[Any], collate_fn: Callable, loss_fn: LossFunction | None) -> None:
        if not len(samples):
            raise LossNotAdditive("a proof needs samples, got none.")
        self.model, self.collate_fn, self.loss_fn = unwrapped(model), collate_fn, loss_fn
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters, self.unused = list(trainable.values()), set(trainable)  # those to which no probe gave a gradient
        check_trainable(self.model, self.parameters)
        self.device = self.parameters[0].device
        self.places = KeyedPlaces(self.model)
        self.router: RouterLoss | None = None
        self.lazy = LazyProof(self.model)
        self.by_length = sorted(samples, key=sample_length)
        spread = np.unique(np.linspace(0, len(samples) - 1, NUM_CANDIDATES).astype(int))
        self.candidates = [self.by_length[i] for i in spread]
        self.collate_draws, self.tolerance = False, TOLERANCE  # the second as measured by `prove_rule`
        self.entries: frozenset[str] = frozenset()

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Training mode in full precision for a while; random states, buffers and modes are put back."""
        with preserved_random_states(), restored_buffers(self.model), restored_modes(self.model), full_precision(self.model):
            # One that is in training mode already keeps what the user froze in evaluation mode: it will train so.
            if not self.model.training:
                self.model.train()
            self.entries = entries_of_samples(self.collate, self.by_length[-1])
            yield

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Collate with seeded generators, so that a collate function that draws gives the same batch again."""
        seed_generators(0)
        before = random_states()
        batch = as_batch(self.collate_fn(samples))
        self.collate_draws |= bool(moved_generators(before))
        return batch

    def forward_copies(self, num_samples: int) -> None:
        """A forward on equal samples; what the collate function draws is not the model's doing."""
        with preserved_random_states():
            batch = self._on_device(self.collate([self.by_length[-1]] * num_samples))
        loss_of(self.model(**accepted_arguments(self.model, batch)), batch, self.loss_fn)

    def find_router(self) -> None:
        """Learn whether the head adds a router's balancing loss, and how much it weighs."""
        if self.loss_fn is not None:
            return
        router = RouterLoss(self.model)
        if router.is_possible:
            with router.active(), gradients_apart(self.parameters):
                outputs = self._forward(self._rows_with_targets(), np.arange(NUM_PROBE_SAMPLES))
                head_loss(outputs).backward()
                router.find_coefficients()
                for parameter in self.parameters:
                    parameter.grad = None
        self.router = router if any(router.coefficients) else None

    def find_lazy_head(self) -> None:
        """Learn whether loss and gradient are the same without the logits of the output layer."""
        if self.loss_fn is not None or self.lazy.head is None:
            self.lazy.head = None
            return
        batch = take_rows(self._separated(self._rows_with_targets()), rows := np.arange(NUM_WITH_LOGITS), self.entries)
        if parts_known_by(accepted_arguments(self.model, batch)) is not None:
            # `parts.py` computes it after the forward, when under FSDP the layer is sharded again.
            self.lazy.refuse("its loss is a sum of means, which is taken of them")
            return
        with self._without_router():
            self.lazy.ask(batch, partial(self._probe, batch, rows))

    def prove_rule(self) -> tuple[str, float]:
        """The rule by which the terms of A and B add up to the loss of A+B, and how far they are off.

        Raises:
            LossNotAdditive: none does, or two that differ.
        """
        everything = np.arange(NUM_PROBE_SAMPLES)
        rows = {"A": everything[:NUM_IN_A], "B": everything[NUM_IN_A:], "A+B": everything}
        whole = self._separated(self._rows_with_targets())
        batches = {name: take_rows(whole, index, self.entries) for name, index in rows.items()}
        with self._without_router():
            probes = {name: self._probe(batch, rows[name]) for name, batch in batches.items()}
            tolerance = self.tolerance = self._tolerance(whole, probes["A+B"])
            rule, residual = self._sum_of_means(batches, rows, probes["A+B"], tolerance) or self._one_mean(
                batches, rows, probes, tolerance
            )
        if self.router is not None:
            residual = off(self._added_up(rule, batches, rows), self._probe(whole, everything))
            if not residual <= tolerance:
                raise LossNotAdditive(unknown_router_loss(residual))
        return rule, residual

    def _sum_of_means(self, batches: Batches, rows: Rows, whole: Probe, tolerance: float) -> tuple[str, float] | None:
        """A head that is known by its entries, if what it computes is what `parts.py` recomputes."""
        name = parts_known_by(accepted_arguments(self.model, batches["A+B"])) if self.loss_fn is None else None
        if name is None:
            return None
        try:
            residual = off(self._added_up(name, batches, rows), whole)
        except LossNotAdditive:  # another output than this kind of head has
            return None
        return (name, residual) if residual <= tolerance else None

    def _one_mean(self, batches: Batches, rows: Rows, probes: dict[str, Probe], tolerance: float) -> tuple[str, float]:
        if self.loss_fn is not None:
            counts = {"loss_fn": [probes[name][1] for name in rows]}
        else:
            counts = {
                rule: [sum(count_targets(rule, batches[name], len(rows[name]))) for name in rows]
                for rule in applicable_rules(accepted_arguments(self.model, batches["A+B"]))
            }
        residuals = {rule: residual_of(list(probes.values()), n, self.loss_fn is not None) for rule, n in counts.items()}
        fitting = [rule for rule, residual in residuals.items() if residual <= tolerance]
        shares = {round(counts[rule][0] / counts[rule][2], 9) for rule in fitting if counts[rule][2]}
        if len(shares) != 1:
            raise LossNotAdditive(no_single_rule(self.model, fitting, residuals, counts, probes))
        return fitting[0], residuals[fitting[0]]

    def _added_up(self, rule: str, batches: Batches, rows: Rows) -> Probe:
        """The terms of A and B, computed as a step does, and their gradients added up."""
        names = ("A", "B")
        counts = {name: count_targets(rule, batches[name], len(rows[name])) for name in names}
        totals, balance = add_counts(rule, list(counts.values())), self._balance([(batches[n], rows[n]) for n in names])
        with self._without_router():
            a, b = (self._probe(batches[n], rows[n], partial(self._term, rule, counts[n], totals, balance)) for n in names)
        return a[0] + b[0], 0.0, torch._foreach_add(a[2], b[2])

    def _balance(self, batches: list[tuple[Batch, np.ndarray]]) -> list[BalanceCall]:
        """What the router's balancing loss needs to know of all the batches together."""
        if self.router is None:
            return []
        calls = []
        with self.router.active(), torch.no_grad():
            for batch, rows in batches:
                self._forward(batch, rows)
                calls.append(self.router.take())
        return add_calls(calls)

    def _term(self, rule: str, counts: Counts, totals: Counts, balance: list[BalanceCall], outputs: Any, batch: Batch) -> Tensor:
        term = torch.as_tensor(window_term(rule, outputs, batch, counts, totals))
        return term if self.router is None else term + self.router.term(self.router.take(), balance)

    def _without_router(self) -> AbstractContextManager[None]:
        return nullcontext() if self.router is None else self.router.active()

    def _separated(self, batch: Batch) -> Batch:
        """Labels masked so that the ways of counting differ, also those of a second mean if the head can leave them out.

        A loss function counts by itself, and may not know labels to be ignored: then nothing is masked.
        """
        if self.loss_fn is not None:
            return batch
        batch = separating_labels(batch, NUM_PROBE_SAMPLES)
        separated = separating_parts(batch, NUM_PROBE_SAMPLES)
        try:
            with torch.no_grad():
                is_finite = head_loss(self._forward(separated, np.arange(NUM_PROBE_SAMPLES))).isfinite()
        except (IndexError, RuntimeError):  # positions beyond the text are an error of this head
            return batch
        return separated if is_finite else batch

    def width_matters(self, rule: str) -> bool | None:
        """Whether padding short samples to a long one's width changes their loss or gradient; None: it cannot be told."""
        shorter, longest = self.candidates[:-1], self.by_length[-1]
        useful = np.flatnonzero(targets_per_row(self.collate(shorter), len(shorter))) if shorter else []
        if not len(useful) or self.collate_draws:
            return None
        picked = [shorter[i] for i in useful[np.unique(np.linspace(0, len(useful) - 1, NUM_WIDTHS).astype(int))]]
        whole, shapes_differ = self.collate([*picked, longest]), False
        for i, sample in enumerate(picked):  # one by one: at some lengths padding may make no difference (pooling, top-k)
            row = np.array([i])
            narrow, wide = self.collate([sample]), take_rows(whole, row, self.entries)
            if same_shapes(narrow, wide):
                continue
            shapes_differ = True
            try:
                if off(self._probe_one(rule, narrow), self._probe_one(rule, wide)) > TOLERANCE:
                    return True
            except (RuntimeError, ValueError, LossNotAdditive):  # the model cannot take a batch as narrow as that
                return True
        return False if shapes_differ else None

    def check_unpadded(self, rule: str) -> None:
        """Of a head for which padding matters: the longest sample alone, which has none, and a padded one add up to both together.

        Raises:
            LossNotAdditive: they do not, so no width for all micro-batches of a window is enough.
        """
        if self.loss_fn is not None or self.collate_draws:
            return
        whole, rows = self.collate([self.by_length[0], self.by_length[-1]]), {"A": np.arange(1), "B": np.arange(1, 2)}
        batches = {name: take_rows(whole, index, self.entries) for name, index in rows.items()}
        if not any(add_counts(rule, [count_targets(rule, batch, 1) for batch in batches.values()])):
            return
        added_up, counts = self._added_up(rule, batches, rows), count_targets(rule, whole, 2)
        balance = self._balance([(whole, np.arange(2))])
        with self._without_router():
            together = self._probe(whole, np.arange(2), partial(self._term, rule, counts, counts, balance))
        if not (distance := off(added_up, together)) <= self.tolerance:
            raise LossNotAdditive(unlike_without_padding(distance))

    def _probe_one(self, rule: str, batch: Batch) -> Probe:
        """A sample by itself. One that has no target of some part of the loss has no loss of the head's own: then by parts."""
        counts = count_targets(rule, batch, 1) if rule in PARTS else ()
        return self._probe(batch, np.arange(1), partial(self._term, rule, counts, counts, []) if counts else None)

    def _tolerance(self, whole: Batch, probe: Probe) -> float:
        """What is rounding here: the same samples in reverse order give the same mean, in another order of summation."""
        reverse = np.arange(NUM_PROBE_SAMPLES)[::-1].copy()
        rounding = off(self._probe(take_rows(whole, reverse, self.entries), reverse), probe)
        if not rounding <= MOST_ROUNDING:
            raise LossNotAdditive(unlike_in_another_order(self.model, probe[0], rounding, MOST_ROUNDING))
        return max(TOLERANCE, TIMES_ROUNDING * rounding)

    def _rows_with_targets(self) -> dict[str, Any]:
        """The probe samples: of the candidates some that have targets, as different as can be. Few are repeated. They are of the
        shorter half if that has enough targets: a proof should not need more memory than the training.
        """
        count = len(self.candidates) // 2
        if not (count and has_enough_targets(batch := self.collate(self.candidates[:count]), count)):
            batch, count = self.collate(self.candidates), len(self.candidates)
        picked = rows_with_targets(batch, count, NUM_PROBE_SAMPLES)
        return take_rows(batch, np.resize(picked, NUM_PROBE_SAMPLES), self.entries)

    def _forward(self, batch: Batch, rows: np.ndarray) -> Any:
        self.places.set_keys(sample_keys(0, 0, rows).to(self.device), window_key(0, 0, 0).to(self.device))
        return self.model(**accepted_arguments(self.model, self._on_device(batch)))

    def _probe(self, batch: Batch, rows: np.ndarray, term: Callable[[Any, Batch], Tensor] | None = None) -> Probe:
        """Loss (or `term` of the outputs), what loss_fn counts, gradients."""
        with gradients_apart(self.parameters):  # not autograd.grad: reentrant checkpointing knows backward() only
            try:
                outputs, on_device = self._forward(batch, rows), self._on_device(batch)
                loss, count = (term(outputs, on_device), None) if term else loss_of(outputs, on_device, self.loss_fn)
            except IndexError as error:
                raise LossNotAdditive(
                    f"the model fails on labels of {IGNORED_LABEL}, which ask its loss to leave a target out ({error}). If its "
                    "loss ignores another value, pass loss_fn."
                ) from error
            if loss.requires_grad:  # it is a constant where nothing is a target
                loss.backward()
            self.unused -= {name for name, p in self.model.named_parameters() if p.grad is not None}
            kept = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
        return float(loss.detach()), float(count) if count is not None else 0.0, kept

    def _on_device(self, batch: Batch) -> dict[str, Any]:
        return {name: at_least_float32(v.to(self.device)) if isinstance(v, Tensor) else v for name, v in batch.items()}
