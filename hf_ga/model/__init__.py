"""One forward of any model.

In: a model and a batch. Out: its outputs and its loss, in the precision that Accelerate applies.
Begin with forward.py; outputs.py lists the tensors of nested outputs, precision.py checks autocast
and dtypes, loaded.py has classes without importing them, override.py changes attributes for the
time of a `with` block, hooks.py has hooks that copies of a model do not have.
"""
