"""What is still to be read of a loss."""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.autograd.graph import Node

from hf_ga.loss.nodes.saved import Number, quotient


@dataclass(frozen=True)
class Part:
    """A part of a loss that is still to be read: a node and what is done to its output.

    Attributes:
        node: The node.
        output: Which of its outputs.
        factor: What the loss multiplies it by, without `divisor`.
        divisor: What the loss divides it by, in the divisions nearest to the node. None: nothing.
        is_closed: Whether there is an addition between `divisor` and the node.
        entries: The indices in stacks of heads that lead to the node.
        weights: See `Term`.
        divisions: See `Term`.
        mean: The part of the nearest division, whose node divides by itself: what the loss does
            with a sum that it has divided. None: nothing was divided.
    """

    node: Node
    output: int = 0
    factor: Number = 1.0
    divisor: Number | None = None
    is_closed: bool = False
    entries: tuple[int, ...] = ()
    weights: tuple[tuple[Node, Number], ...] = ()
    divisions: tuple[Node, ...] = ()
    mean: "Part | None" = None

    def input(self, position: int, factor: Number = 1.0) -> list["Part"]:
        """Return the part of an input of the node. Empty if it needs no gradient."""
        child, output = self.node.next_functions[position]
        if child is None:
            return []
        # The same tensor where nothing is multiplied: parts with one factor are known by it.
        is_one = isinstance(factor, float) and factor == 1.0
        product = self.factor if is_one else self.factor * factor
        return [replace(self, node=child, output=output, factor=product)]

    def divided_by(self, divisor: Number) -> "Part":
        """Return the part with one more division.

        Divisions in a row are one: sum / 2 / n divides by 2n. With an addition in between, the
        outer one belongs to all that was added up: ((sum / n) + other) / 2.
        """
        divisions = self.divisions
        if isinstance(divisor, Tensor) or divisor == 0.0:
            divisions = (*divisions, self.node)
        self = replace(self, divisions=divisions, mean=self)
        if self.divisor is None:
            return replace(self, divisor=divisor, is_closed=False)
        if self.is_closed:
            factor = quotient(self.factor, self.divisor)
            return replace(self, factor=factor, divisor=divisor, is_closed=False)
        return replace(self, divisor=self.divisor * divisor)

    def closed(self) -> "Part":
        """Return the part below an addition."""
        return replace(self, is_closed=True)

    @property
    def is_switched_off(self) -> bool:
        """Whether its factor is 0; one on an accelerator is not read."""
        return isinstance(self.factor, float) and self.factor == 0.0

    def full_factor(self) -> Number:
        """Return the factor with all divisions."""
        return self.factor if self.divisor is None else quotient(self.factor, self.divisor)
