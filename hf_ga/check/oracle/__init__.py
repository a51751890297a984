"""The gradient to compare with: one forward and backward of the whole window in float64.

In: a model and a window. Out: gradients by name. Begin with reference.py; reference_draws.py draws
the same numbers in float64.
"""
