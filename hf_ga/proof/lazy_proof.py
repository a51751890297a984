"""Whether a model may be trained without its full logits: the same loss and gradient on the probes, asked of each model once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from hf_ga.exact.batches import Batch
from hf_ga.exact.terms import count_targets
from hf_ga.proof.probes import TOLERANCE, Probe, off
from hf_ga.speed.lazy_logits import LazyHead

# Probe samples of which all logits are made, which with loss and gradients take four times their memory, more than training needs:
# two with few targets and one with many (`probes.separating_labels`).
NUM_WITH_LOGITS = 3
ROWS_OF_PIECE = 3  # so few that the probes have several pieces


class LazyProof:
    """What a proof learns of one model.

    Attributes:
        head: the output layer, where loss and gradient are the same without its logits, else None.
        full_logits: why they are not; "" for a model without such a layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.full_logits = ""
        self.head: LazyHead | None = LazyHead(model)
        if self.head.layer is None:
            self.head = None
        self._batch: Batch = {}
        self._rows: list[int] = []

    def refuse(self, reason: str) -> None:
        """The logits are made."""
        self.head, self.full_logits = None, reason

    def ask(self, batch: Batch, probe: Callable[[], Probe]) -> None:
        """Compare. probe: forward and backward of `batch`, which has positions with targets and without."""
        plain = probe()
        try:
            with self.active():
                distance = off(probe(), plain)
                self._batch, self._rows = batch, list(self.head.rows)
        except Exception as error:  # whatever it is that this head does with its logits, it can do with true ones
            self.refuse(f"{type(error).__name__} without them")
            return
        if not self._rows:
            self.refuse("its loss is another than a cross entropy of them")
        elif not distance <= TOLERANCE:
            self.refuse(f"off by {distance:.0e} without them")

    @contextmanager
    def active(self) -> Iterator[None]:
        """As in a step, but in several pieces although the probes have few rows: what is proven is what runs."""
        if (head := self.head) is None:
            yield
            return
        head.piece_rows = ROWS_OF_PIECE
        try:
            with head.active():
                yield
        finally:
            head.piece_rows = None

    def learn_count(self, rule: str) -> None:
        """Whether the rule that was proven counts the rows of the head's one cross entropy."""
        if self.head is not None:
            self.head.counted = self._rows == list(count_targets(rule, self._batch, NUM_WITH_LOGITS))
