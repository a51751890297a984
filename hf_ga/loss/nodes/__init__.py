"""Single nodes of an autograd graph.

In: a node. Out: what it saved of its forward (saved.py: all `_saved_*` attributes are read there),
what it divides by (means.py), what it sums over (counts.py), the value it had (values.py).
"""
