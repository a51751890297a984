"""Evaluations: losses and metrics that do not depend on the split.

In: outputs of a model. Out: figures by name. Begin with evaluation.py; readers.py takes predictions
from outputs, metrics.py and retrieval.py compute figures.
"""
