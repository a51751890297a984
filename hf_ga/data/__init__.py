"""Datasets -> tokenized samples -> batches, task by task.

`prepare_data` loads rows (hub, files, folders, the embedded corpus), finds their columns, checks and encodes labels, and
tokenizes. It never builds a model and knows nothing of training: what is wrong with the data is an error before any work starts.
"""
