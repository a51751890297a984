"""How many targets a batch has for a head: a few rules, one of them picked by proof on the model itself.

loss x (targets of the micro-batch) / (targets of the window) is exact for every head whose loss is one mean over its targets, if
the count is the head's own. The rule is proven on losses and gradients: for two groups of samples A and B

    n(A+B) loss(A+B) = n(A) loss(A) + n(B) loss(B)        and the same for the gradient.

A head whose loss is a sum of several means has one such count for each of them (`parts.py`); the balancing loss of a mixture of
experts is taken over the whole window (`router.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_ga.exact.batches import Batch
from hf_ga.exact.forward import LossFunction, module_modes
from hf_ga.exact.parts import PARTS
from hf_ga.exact.places import KeyedPlaces
from hf_ga.exact.router import RouterLoss
from hf_ga.exact.terms import Counts, count_targets
from hf_ga.proof.packing_proof import prove_packing
from hf_ga.proof.proof import Prover
from hf_ga.speed.lazy_logits import LazyHead
from hf_ga.speed.packing import Packing


@dataclass(frozen=True)
class TargetRule:
    """What was proven of a model: how its targets are counted, whether padding matters, where it draws dropout.

    Attributes:
        name: a key of `terms.RULES` (one mean), of `parts.PARTS` (a sum of means), or "loss_fn" (it counts by itself).
        pad_to_window: the loss of a sample depends on its batch's width, so all micro-batches of a window need one width.
        width_matters: as found by the probe; None where it cannot be told (samples of one shape, a collate function that draws):
            then padding is kept equal too.
        places: where randomness is drawn.
        residual: the largest relative residual of the identity above, as measured.
        modes: of every module, whether it was in training mode.
        router: the model's balancing loss, where the head adds one.
        unused: names of trainable parameters that got no gradient in the proof.
        packing: how the layers compute real tokens only, where that is proven. not_packed: why it is not.
        lazy_head: the output layer, where loss and gradient were the same without its logits. full_logits: why they were not.
    """

    name: str
    pad_to_window: bool
    width_matters: bool | None
    places: KeyedPlaces
    residual: float
    modes: tuple[bool, ...]
    router: RouterLoss | None = None
    unused: frozenset[str] = frozenset()
    lazy_head: LazyHead | None = None
    full_logits: str = ""
    packing: Packing | None = None
    not_packed: str = ""

    def count(self, batch: Batch, num_samples: int) -> int:
        """Targets of a collated batch (on the host: no device is asked), of all parts of the loss together."""
        return sum(count_targets(self.name, batch, num_samples))

    @contextmanager
    def active(self, *, without_logits: bool = True) -> Iterator[None]:
        """For forwards of the model: its balancing loss is kept apart, and its logits are not made, unless somebody reads them."""
        with (
            nullcontext() if self.router is None else self.router.active(),
            self.lazy_head.active() if self.lazy_head is not None and without_logits else nullcontext(),
        ):
            yield

    def expect(self, counts: Counts) -> None:
        """The targets of the next forward, counted on the host."""
        if self.lazy_head is not None:
            self.lazy_head.expect(counts)

    def __str__(self) -> str:
        width = {
            True: "micro-batches padded to the window's width, which matters",
            False: "padding width does not matter",
            None: "micro-batches padded alike, as it cannot be told whether that matters",
        }[self.width_matters]
        router = "" if self.router is None else ", the router's balancing loss taken over the whole window"
        full_logits = self.full_logits
        if self.lazy_head is not None and self.lazy_head.layer is None:
            full_logits = "its output layer is wrapped or watched"
        logits = full_logits and f", full logits ({full_logits})"
        if self.lazy_head is not None and not full_logits:
            logits = ", no full logits"
        packed = ", no padding between layers" if self.packing is not None else self.not_packed and f", padded ({self.not_packed})"
        return f"targets counted as {self.name} (residual {self.residual:.0e}), {width}{router}{logits}{packed}"


def prove_targets(
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    *,
    loss_fn: LossFunction | None = None,
    allow_unkeyed: bool = False,
    padding_free: bool = False,
) -> TargetRule:
    """Find the counting rule of a model's loss and prove it on a few samples. Weights, gradients, buffers, random states stay.

    Args:
        model: in any mode, wrapped or not; the proof runs in training mode with keyed dropout.
        samples: some samples of the dataset; the shortest and the longest tell whether padding matters.
        collate_fn: list of samples -> arguments of the model.
        loss_fn: own loss; then its own count is checked.
        allow_unkeyed: accept draws that cannot be keyed; in the proof the modules that draw them are in evaluation mode.
        padding_free: prove also that layers may compute real tokens only; where they may not, `not_packed` says why.

    Raises:
        LossNotAdditive: no rule fits, or several that differ, or no sample has a target. ConfigError: nothing is
            trainable, or not in float32. UnkeyedRandomness: a draw of the model
            cannot be tied to its sample.

    Example:
        rule = prove_targets(model, [dataset[i] for i in range(32)], collate_fn)
        rule.name        # 'shifted labels' for a GPT, 'labels' for a BERT with a masked-LM head
    """
    prover = Prover(model, samples, collate_fn, loss_fn)
    with prover.untouched():
        modes = module_modes(prover.model)
        prover.places.find(prover.forward_copies, allow_unkeyed)
        for module in prover.places.unkeyed:  # allowed to draw in training, but the proof needs equal forwards
            module.training = False
        with prover.places.active():
            prover.find_router()
            prover.find_lazy_head()
            with prover.lazy.active():  # what is proven is what runs
                name, residual = prover.prove_rule()
                width_matters = prover.width_matters(name)
                if width_matters:
                    prover.check_unpadded(name)
            prover.lazy.learn_count(name)
            one_width = width_matters is not False or (name in PARTS and PARTS[name].one_width)
            packing, not_packed = prove_packing(prover, one_width) if padding_free else (None, "")
        return TargetRule(
            name,
            one_width,
            width_matters,
            prover.places,
            residual,
            modes,
            prover.router,
            frozenset(prover.unused),
            prover.lazy.head,
            prover.lazy.full_logits,
            packing,
            not_packed,
        )
