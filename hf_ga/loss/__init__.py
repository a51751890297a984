"""A scalar loss read from its autograd graph: which means it is a sum of, what each divides by.

In: the loss of one micro-batch, before its backward. Out: a list of `Term`, with
loss = sum_k factor_k * numerator_k / divisor_k, and a backward that leaves out the divisions.
A loss of another form raises `LossNotAdditive`. Begin with `read_terms` in graph.py, where sums are
divided; the divisor of a mean is read in nodes/means.py (`reduction_of`). stacks.py, penalty.py and
identity.py serve graph.py.
"""

from hf_ga.loss.graph import read_terms
from hf_ga.loss.stacks import StackSizes
from hf_ga.loss.terms import Term, describe, undivided

__all__ = ["StackSizes", "Term", "describe", "read_terms", "undivided"]
