"""Probe batches of one model and the comparisons on them, for `targets.prove_targets`.

All probes run in float32 without autocast, frozen parameters in half precision too: the question is what the loss is a mean of,
not how precisely it is computed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.batches import IGNORED_LABEL, Batch, as_batch, entries_of_samples, same_shapes, sample_length, take_rows
from hf_ga.errors import ConfigError, LossNotAdditive
from hf_ga.forward import LossFunction, accepted_arguments, gradients_apart, restored_modes, run_forward, unwrapped
from hf_ga.generators import moved_generators, preserved_random_states, random_states, seed_generators
from hf_ga.keyed import sample_keys, window_key
from hf_ga.places import KeyedPlaces, restored_buffers
from hf_ga.precision import LOW_PRECISION, at_least_float32, frozen_in_float32

# Right rules leave rounding: at most TOLERANCE, or 20 times what the same samples in another order differ by. A parameter whose
# gradient is small is judged against FLOOR of the norm over all parameters.
TOLERANCE, TIMES_ROUNDING, FLOOR = 2e-5, 20.0, 1e-2
MOST_ROUNDING = 5e-4  # above it, right and wrong rules could not be told apart
NUM_CANDIDATES, NUM_PROBE_SAMPLES = 64, 6
NUM_IN_A = 2  # of the probe samples; not 1, for which BatchNorm has no statistics
Probe = tuple[float, float, list[Tensor]]  # loss (mean, or sum with loss_fn), targets counted by loss_fn, gradients
Rules = Mapping[str, Callable[[Batch, int], int]]


class Prover:
    """Asks a model on a few samples: which rule counts its targets, and does padding matter?

    Args:
        rules: name -> (batch, number of samples) -> targets. The others: see `targets.prove_targets`.
    """

    def __init__(
        self, model: nn.Module, samples: Sequence[Any], collate_fn: Callable, loss_fn: LossFunction | None, rules: Rules
    ) -> None:
        if not len(samples):
            raise LossNotAdditive("a proof needs samples, got none.")
        self.model, self.collate_fn, self.loss_fn, self.rules = unwrapped(model), collate_fn, loss_fn, rules
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        _check_model(self.model, self.parameters)
        self.device = self.parameters[0].device
        self.places = KeyedPlaces(self.model)
        self.by_length = sorted(samples, key=sample_length)
        spread = np.unique(np.linspace(0, len(samples) - 1, NUM_CANDIDATES).astype(int))
        self.candidates = [self.by_length[i] for i in spread]
        self.collate_draws = False
        self.entries: frozenset[str] = frozenset()

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Training mode in full precision for a while; random states, buffers and modes are put back."""
        with preserved_random_states(), restored_buffers(self.model), restored_modes(self.model), _full_precision(self.model):
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
            batch = self.collate([self.by_length[-1]] * num_samples)
        run_forward(self.model, self._on_device(batch), self.loss_fn)

    def prove_rule(self) -> tuple[str, float]:
        """The rule that makes the loss of A+B the weighted sum of its parts, and its residual.

        Raises:
            LossNotAdditive: none does, or two that differ.
        """
        whole = self._rows_with_targets()
        if self.loss_fn is None:  # a loss function counts by itself, and may not know labels to be ignored
            whole = separating_labels(whole, NUM_PROBE_SAMPLES)
        everything = np.arange(NUM_PROBE_SAMPLES)
        rows = {"A": everything[:NUM_IN_A], "B": everything[NUM_IN_A:], "A+B": everything}
        batches = {name: take_rows(whole, index, self.entries) for name, index in rows.items()}
        probes = {name: self._probe(batch, rows[name]) for name, batch in batches.items()}
        tolerance = self._tolerance(whole, probes["A+B"])
        if self.loss_fn is not None:
            counts = {"loss_fn": [probes[name][1] for name in rows]}
        else:
            counts = {
                rule: [self.rules[rule](batches[name], len(rows[name])) for name in rows]
                for rule in _applicable(accepted_arguments(self.model, whole))
            }
        residuals = {rule: _residual(list(probes.values()), n, self.loss_fn is not None) for rule, n in counts.items()}
        fitting = [rule for rule, residual in residuals.items() if residual <= tolerance]
        shares = {round(counts[rule][0] / counts[rule][2], 9) for rule in fitting if counts[rule][2]}
        if len(shares) != 1:
            raise LossNotAdditive(self._explanation(fitting, residuals, counts, probes))
        return fitting[0], residuals[fitting[0]]

    def width_matters(self) -> bool | None:
        """Whether a short sample's loss or gradient changes when it is padded to a long one's width; None: it cannot be told."""
        longest = self.by_length[-1]
        short = next((s for s in self.by_length if _targets_per_row(self.collate([s]), 1)[0]), None)
        if short is None or self.collate_draws:
            return None
        narrow, wide = self.collate([short]), take_rows(self.collate([short, longest]), [0], self.entries)
        if same_shapes(narrow, wide):
            return None
        return _off(self._probe(narrow, np.arange(1)), self._probe(wide, np.arange(1))) > TOLERANCE

    def _tolerance(self, whole: Batch, probe: Probe) -> float:
        """What is rounding here: the same samples in reverse order give the same mean, in another order of summation."""
        reverse = np.arange(NUM_PROBE_SAMPLES)[::-1].copy()
        rounding = _off(self._probe(take_rows(whole, reverse, self.entries), reverse), probe)
        if not rounding <= MOST_ROUNDING:
            raise LossNotAdditive(
                f"the loss or its gradient depends on the order of the samples in a batch, by {rounding:.1e} relative (limit "
                f"{MOST_ROUNDING:.0e}). Likely cause: {likely_cause(self.model, None)}, or computing in low precision."
            )
        return max(TOLERANCE, TIMES_ROUNDING * rounding)

    def _rows_with_targets(self) -> dict[str, Any]:
        """The probe samples: of the candidates, collated once, some that have targets, as different as can be: all lengths, and of
        one label a sample all labels in turn. The shortest is the first. Few are repeated.
        """
        batch = self.collate(self.candidates)
        useful = np.flatnonzero(_targets_per_row(batch, len(self.candidates)))
        if not len(useful):
            raise LossNotAdditive(
                f"none of {len(self.candidates)} samples has a target (all labels are {IGNORED_LABEL}): nothing to prove."
            )
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.dim() == 1:
            values = labels.numpy()[useful]
            turn = [int((values[:i] == value).sum()) for i, value in enumerate(values)]  # how often the label came before
            useful = useful[np.argsort(turn, kind="stable")]
            picked = np.sort(useful[:NUM_PROBE_SAMPLES])
        else:
            picked = useful[np.unique(np.linspace(0, len(useful) - 1, NUM_PROBE_SAMPLES).astype(int))]
        return take_rows(batch, np.resize(picked, NUM_PROBE_SAMPLES), self.entries)

    def _probe(self, batch: Batch, rows: np.ndarray) -> Probe:
        self.places.set_keys(sample_keys(0, 0, rows).to(self.device), window_key(0, 0, 0).to(self.device))
        with gradients_apart(self.parameters):  # not autograd.grad: reentrant checkpointing knows backward() only
            try:
                loss, count = run_forward(self.model, self._on_device(batch), self.loss_fn)
            except IndexError as error:
                raise LossNotAdditive(
                    f"the model fails on labels of {IGNORED_LABEL}, which ask its loss to leave a target out ({error}). If its "
                    "loss ignores another value, pass loss_fn."
                ) from error
            loss.backward()
            kept = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
        return float(loss.detach()), float(count) if count is not None else 0.0, kept

    def _on_device(self, batch: Batch) -> dict[str, Any]:
        return {name: at_least_float32(v.to(self.device)) if isinstance(v, Tensor) else v for name, v in batch.items()}

    def _explanation(self, fitting: list[str], residuals: dict, counts: dict, probes: dict[str, Probe]) -> str:
        if fitting:
            return (
                f"several ways of counting targets fit and cannot be told apart on these samples: {', '.join(fitting)}. Give "
                "prove_targets more samples of different lengths, or pass loss_fn."
            )
        losses = {name: probe[0] for name, probe in probes.items()}
        shown = ", ".join(f"{name} {loss:.4g}" for name, loss in losses.items())
        numbers = "; ".join(f"{rule}: {counts[rule]} targets in A, B, A+B, off by {residuals[rule]:.1e}" for rule in residuals)
        return (
            f"the loss of a batch is not the mean over its targets for any way of counting them ({numbers}; losses "
            f"{shown}). Likely cause: {likely_cause(self.model, losses)}. "
            "Remedy: pass loss_fn(outputs, batch) -> (sum of the loss over the targets, number of targets)."
        )


def separating_labels(batch: Batch, num_samples: int) -> dict[str, Any]:
    """Mask labels in a copy so that the rules count differently: those of A keep column 0 and one more label, the others lose
    column 0 and keep three; of one label a sample, the last one is masked. Float labels and unlabelled batches stay.
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.is_floating_point() or len(labels) != num_samples:
        return dict(batch)
    labels = labels.clone()
    if labels[0].numel() == 1:
        labels[-1] = IGNORED_LABEL
        return {**batch, "labels": labels}
    for row, values in enumerate(labels.view(num_samples, -1)):  # more than one axis of labels (pixels): one long row
        kept = (values[1:] != IGNORED_LABEL).nonzero().flatten() + 1
        kept = kept[: 1 if row < NUM_IN_A else 3]
        masked = torch.full_like(values, IGNORED_LABEL)
        masked[kept] = values[kept]
        if row < NUM_IN_A and len(kept):
            masked[0] = values[0] if values[0] != IGNORED_LABEL else values[kept[0]]
        values.copy_(masked)
    return {**batch, "labels": labels}


def likely_cause(model: nn.Module, losses: dict[str, float] | None) -> str:
    """The most likely reason why a loss is not additive, in words."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return f"{name} ({type(module).__name__}) normalises by the statistics of the whole micro-batch"
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        return "the router's auxiliary loss (output_router_logits) is a product of means over the micro-batch"
    if losses and abs(losses["A"] + losses["B"] - losses["A+B"]) <= TOLERANCE * abs(losses["A+B"]):
        return "the loss is a sum, not a mean"
    return "a loss across samples (in-batch negatives), a sum of several means, or a mean over something else"


def _targets_per_row(batch: Batch, num_samples: int) -> np.ndarray:
    """A measure of how much each sample has to learn from: labels that count (beyond column 0, if there are columns)."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0 or len(labels) != num_samples:
        return np.ones(num_samples, np.int64)
    counting = (labels != IGNORED_LABEL).flatten(1) if labels.dim() > 1 else (labels != IGNORED_LABEL).unsqueeze(1)
    return (counting[:, 1:] if counting.shape[1] > 1 else counting).sum(1).numpy()


def _applicable(arguments: Batch) -> list[str]:
    labels = arguments.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return ["samples"]
    return ["shifted labels", "labels", "samples"] if labels.dim() == 2 else ["labels", "samples"]


def _residual(probes: list[Probe], counts: Sequence[float], is_sum: bool) -> float:
    """How far the weighted A and B together are from the weighted A+B."""
    counted = counts[2] if is_sum else all(counts)  # a part of a sum may weigh nothing (a class weight of 0), a mean may not
    if not counted or (is_sum and abs(counts[0] + counts[1] - counts[2]) > TOLERANCE * abs(counts[2])):
        return float("inf")
    a, b, whole = (
        (loss * weight, 0.0, torch._foreach_mul(gradients, weight))
        for (loss, _, gradients), weight in zip(probes, [1.0] * 3 if is_sum else map(float, counts), strict=True)
    )
    return _off((a[0] + b[0], 0.0, torch._foreach_add(a[2], b[2])), whole)


def _off(probe: Probe, reference: Probe) -> float:
    """The largest relative difference of the loss and of every parameter's gradient (with the floor); a NaN counts as infinite."""
    off_loss = abs(probe[0] - reference[0]) / max(abs(reference[0]), 1e-12)
    differences = torch._foreach_sub(probe[2], reference[2])
    off, size = (torch.stack(torch._foreach_norm(tensors)).double().cpu() for tensors in (differences, reference[2]))
    scale = size + FLOOR * size.norm()
    worst = torch.maximum((off / scale.clamp(min=1e-30)).max(), torch.tensor(off_loss).double())  # a NaN stays, unlike in max()
    return float(worst.nan_to_num(nan=float("inf")))


def _check_model(model: nn.Module, trainable: list[nn.Parameter]) -> None:
    """Raise ConfigError for a model that cannot be trained exactly whatever its loss is."""
    if hasattr(model, "_orig_mod"):
        raise ConfigError("a model compiled by torch.compile is not supported yet: pass the model itself.")
    if not trainable:
        raise ConfigError("no parameter of the model is trainable: set requires_grad of some.")
    if low := {str(p.dtype) for p in trainable if p.dtype in LOW_PRECISION}:
        raise ConfigError(
            f"trainable parameters must be float32, some are {', '.join(sorted(low))}, in which updates get lost: call "
            "model.float(), or load it with dtype=torch.float32."
        )


@contextmanager
def _full_precision(model: nn.Module) -> Iterator[None]:
    """The forward without the autocast that Accelerate put around it, or the caller has on, and no frozen half precision."""
    prepared = model.__dict__.get("forward")
    device_type = next(model.parameters()).device.type
    with torch.autocast(device_type, enabled=False), frozen_in_float32(model):
        if prepared is None or not hasattr(model, "_original_forward"):
            yield
            return
        model.forward = model._original_forward
        try:
            yield
        finally:
            model.forward = prepared
