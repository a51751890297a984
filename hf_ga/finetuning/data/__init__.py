"""Datasets -> tokenized samples -> batches, task by task.

`prepare_data` loads rows (hub, files, folders, the embedded corpus), finds their columns, checks
and encodes labels, and tokenizes. It does not depend on a model or on training: bad data is an
error before any work starts.
"""
