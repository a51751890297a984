"""How many targets a batch has for a head: a few rules, one of them picked by proof on the model itself.

loss x (targets of the micro-batch) / (targets of the window) is exact for every head whose loss is one mean over its targets, if
the count is the head's own. The rule is proven on losses and gradients: for two groups of samples A and B

    n(A+B) loss(A+B) = n(A) loss(A) + n(B) loss(B)        and the same for the gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.batches import IGNORED_LABEL, Batch, same_shapes, sample_length, take_rows
from hf_ga.errors import LossNotAdditive
from hf_ga.forward import LossFunction, accepted_arguments, run_forward, unwrapped
from hf_ga.generators import preserved_random_states
from hf_ga.keyed import sample_keys, window_key
from hf_ga.places import KeyedPlaces, restored_buffers

# Right rules leave float32 rounding (seen: at most 1e-5 of the gradient); wrong ones several percent. A parameter whose gradient
# is nearly zero is judged against the norm over all parameters.
TOLERANCE, FLOOR = 1e-3, 1e-5
NUM_PROBE_SAMPLES = 5
Probe = tuple[float, float, list[Tensor]]  # loss (mean, or sum with loss_fn), targets counted by loss_fn, gradients


def count_shifted_labels(batch: Batch, num_samples: int) -> int:
    """Labels that count, without the first column: a causal head predicts column 1 first."""
    return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())


def count_labels(batch: Batch, num_samples: int) -> int:
    """Labels that count."""
    return int((batch["labels"] != IGNORED_LABEL).sum())


def count_samples(batch: Batch, num_samples: int) -> int:
    """Samples."""
    return num_samples


RULES: dict[str, Callable[[Batch, int], int]] = {
    "shifted labels": count_shifted_labels,
    "labels": count_labels,
    "samples": count_samples,
}


@dataclass(frozen=True)
class TargetRule:
    """What was proven of a model: how its targets are counted, whether padding matters, where it draws dropout.

    Attributes:
        name: a key of `RULES`, or "loss_fn" (the loss function counts by itself).
        pad_to_window: the loss of a sample depends on the width of its batch, so all micro-batches of a window need one width.
        width_matters: as found by the probe; None where all probe samples had the same shape (then padding is kept equal too).
        places: where randomness is drawn.
        residual: the largest relative residual of the identity above, as measured.
    """

    name: str
    pad_to_window: bool
    width_matters: bool | None
    places: KeyedPlaces
    residual: float

    def count(self, batch: Batch, num_samples: int) -> int:
        """Targets of a collated batch (on the host: no device is asked)."""
        return RULES[self.name](batch, num_samples)

    def __str__(self) -> str:
        width = (
            "padding width does not matter" if not self.pad_to_window else "micro-batches padded to the window's width"
        )
        return f"targets counted as {self.name} (residual {self.residual:.0e}), {width}"


def prove_targets(
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    *,
    loss_fn: LossFunction | None = None,
    allow_unkeyed: bool = False,
) -> TargetRule:
    """Find the counting rule of a model's loss, and prove it on a few samples. Weights, gradients, buffers and random states stay.

    Args:
        model: in any mode, wrapped or not; the proof runs in training mode with keyed dropout.
        samples: some samples of the dataset; the shortest and the longest tell whether padding matters.
        collate_fn: list of samples -> arguments of the model.
        loss_fn: own loss; then its own count is checked.
        allow_unkeyed: accept draws that cannot be keyed; then the proof runs in evaluation mode.

    Raises:
        LossNotAdditive: no rule fits, or several that differ. UnkeyedRandomness: a draw cannot be tied to its sample.

    Example:
        rule = prove_targets(model, [dataset[i] for i in range(32)], collate_fn)
        rule.name        # 'shifted labels' for a GPT, 'labels' for a BERT with a masked-LM head
    """
    prover = _Prover(model, samples, collate_fn, loss_fn)
    with preserved_random_states(), restored_buffers(prover.model), _mode(prover.model, training=True):
        prover.places.find(prover.forward_copies, allow_unkeyed)
        prover.model.train(not allow_unkeyed)
        with prover.places.active():
            name, residual = prover.prove_rule()
            width_matters = prover.width_matters(name)
    return TargetRule(name, width_matters is not False, width_matters, prover.places, residual)


class _Prover:
    """The probe batches of one model, and the comparisons on them."""

    def __init__(
        self, model: nn.Module, samples: Sequence[Any], collate_fn: Callable, loss_fn: LossFunction | None
    ) -> None:
        if not len(samples):
            raise LossNotAdditive("a proof needs samples, got none.")
        self.model, self.collate_fn, self.loss_fn = unwrapped(model), collate_fn, loss_fn
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.device = next(self.model.parameters()).device
        self.places = KeyedPlaces(self.model)
        by_length = sorted(samples, key=sample_length)
        middle = max(0, min(len(by_length) // 2, len(by_length) - NUM_PROBE_SAMPLES))
        picked = by_length[middle : middle + NUM_PROBE_SAMPLES]
        self.picked = [picked[i % len(picked)] for i in range(NUM_PROBE_SAMPLES)]
        self.shortest, self.longest = by_length[0], by_length[-1]
        self.by_length = by_length

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        return dict(self.collate_fn(samples))

    def forward_copies(self, num_samples: int) -> None:
        run_forward(self.model, self._on_device(self.collate([self.longest] * num_samples)), self.loss_fn)

    def prove_rule(self) -> tuple[str, float]:
        """The rule that makes the loss of A+B the weighted sum of its parts, and its residual."""
        whole = separating_labels(self.collate(self.picked), len(self.picked))
        rows = {"A": np.arange(1), "B": np.arange(1, len(self.picked)), "A+B": np.arange(len(self.picked))}
        batches = {name: take_rows(whole, index, len(self.picked)) for name, index in rows.items()}
        probes = {name: self._probe(batch, rows[name]) for name, batch in batches.items()}
        if self.loss_fn is not None:
            counts = {"loss_fn": [probes[name][1] for name in rows]}
        else:
            counts = {
                rule: [RULES[rule](batches[name], len(rows[name])) for name in rows]
                for rule in _applicable(accepted_arguments(self.model, whole))
            }
        residuals = {rule: _residual(list(probes.values()), n, self.loss_fn is not None) for rule, n in counts.items()}
        fitting = [rule for rule, residual in residuals.items() if residual <= TOLERANCE]
        shares = {round(counts[rule][0] / counts[rule][2], 9) for rule in fitting if counts[rule][2]}
        if len(shares) != 1:
            raise LossNotAdditive(self._explanation(fitting, residuals, counts, probes))
        return fitting[0], residuals[fitting[0]]

    def width_matters(self, rule: str) -> bool | None:
        """Whether a short sample's loss or gradient changes when it is padded to a long one's width; None: not testable."""
        short = next((s for s in self.by_length if self._has_targets(rule, s)), None)
        if short is None:
            return None
        narrow = self.collate([short])
        wide = take_rows(self.collate([short, self.longest]), [0], 2)
        if same_shapes(narrow, wide):
            return None
        probes = [self._probe(batch, np.arange(1)) for batch in (narrow, wide, wide)]
        # With A narrow, B wide and A+B wide the identity is that of equal parts only if both are equal.
        return _residual(probes, [1, 1, 2], is_sum=False) > TOLERANCE

    def _has_targets(self, rule: str, sample: Any) -> bool:
        return rule == "loss_fn" or RULES[rule](self.collate([sample]), 1) > 0

    def _probe(self, batch: Batch, rows: np.ndarray) -> Probe:
        self.places.set_keys(sample_keys(0, 0, rows).to(self.device), window_key(0, 0, 0).to(self.device))
        loss, count = run_forward(self.model, self._on_device(batch), self.loss_fn)
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        kept = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients, strict=True)]
        return float(loss.detach()), float(count) if count is not None else 0.0, kept

    def _on_device(self, batch: Batch) -> dict[str, Any]:
        return {name: v.to(self.device) if isinstance(v, Tensor) else v for name, v in batch.items()}

    def _explanation(self, fitting: list[str], residuals: dict, counts: dict, probes: dict[str, Probe]) -> str:
        if fitting:
            return (
                f"several ways of counting targets fit and cannot be told apart on these samples: {', '.join(fitting)}. Give "
                "prove_targets more samples of different lengths, or pass loss_fn."
            )
        losses = {name: probe[0] for name, probe in probes.items()}
        numbers = "; ".join(
            f"{rule}: {counts[rule]} targets in A, B, A+B, off by {residuals[rule]:.1e}" for rule in residuals
        )
        return (
            f"the loss of a batch is not the mean over its targets for any way of counting them ({numbers}; losses "
            f"{', '.join(f'{name} {loss:.4g}' for name, loss in losses.items())}). Likely cause: {likely_cause(self.model, losses)}. "
            "Remedy: pass loss_fn(outputs, batch) -> (sum of the loss over the targets, number of targets)."
        )


def separating_labels(batch: Batch, num_samples: int) -> dict[str, Any]:
    """Mask labels in a copy so that the rules count differently: the first sample keeps column 0 and one more label, the others
    lose column 0 and keep three; of one label a sample, the last one is masked. Float labels and unlabelled batches stay.
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.is_floating_point() or len(labels) != num_samples:
        return dict(batch)
    labels = labels.clone()
    if labels.dim() == 1:
        labels[-1] = IGNORED_LABEL
    elif labels.dim() == 2:
        for row, values in enumerate(labels):
            kept = (values[1:] != IGNORED_LABEL).nonzero().flatten() + 1
            kept = kept[: 1 if row == 0 else 3]
            masked = torch.full_like(values, IGNORED_LABEL)
            masked[kept] = values[kept]
            if row == 0 and len(kept):
                masked[0] = values[0] if values[0] != IGNORED_LABEL else values[kept[0]]
            labels[row] = masked
    return {**batch, "labels": labels}


def likely_cause(model: nn.Module, losses: dict[str, float]) -> str:
    """The most likely reason why a loss is not additive, in words."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return f"{name} ({type(module).__name__}) normalises by the statistics of the whole micro-batch"
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        return "the router's auxiliary loss (output_router_logits) is a product of means over the micro-batch"
    if abs(losses["A"] + losses["B"] - losses["A+B"]) <= TOLERANCE * abs(losses["A+B"]):
        return "the loss is a sum, not a mean"
    return "a loss across samples (in-batch negatives), a sum of several means, or a mean over something else"


def _applicable(arguments: Batch) -> list[str]:
    labels = arguments.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return ["samples"]
    return ["labels", "samples"] if labels.dim() == 1 else ["shifted labels", "labels", "samples"]


def _residual(probes: list[Probe], counts: Sequence[float], is_sum: bool) -> float:
    """How far A and B are from A+B: the largest of the loss and every parameter's gradient, relative (with the global floor)."""
    weights = [1.0, 1.0, 1.0] if is_sum else [float(n) for n in counts]
    if not all(counts) or (is_sum and abs(counts[0] + counts[1] - counts[2]) > TOLERANCE * abs(counts[2])):
        return float("inf")
    a, b, whole = (
        (w * loss, torch._foreach_mul(grads, w)) for w, (loss, _, grads) in zip(weights, probes, strict=True)
    )
    off_loss = abs(a[0] + b[0] - whole[0]) / max(abs(whole[0]), 1e-12)
    differences = torch._foreach_sub(torch._foreach_add(a[1], b[1]), whole[1])
    off, size = (torch.stack(torch._foreach_norm(tensors)).double().cpu() for tensors in (differences, whole[1]))
    scale = size + (FLOOR / TOLERANCE) * size.norm()
    return float(max(off_loss, (off / scale.clamp(min=1e-30)).max().item()))


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode for a while; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
