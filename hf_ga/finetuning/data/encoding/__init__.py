"""From rows to the samples of a task.

In: rows and their columns. Out: input ids, labels. Begin with tokenization.py; choices.py, pairs.py
and spans.py have tasks of their own, labels.py targets, collation.py and masking.py
make batches.
"""
