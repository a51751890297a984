"""Datasets -> tokenized samples -> batches, task by task.

In: rows (hub, files, folders, the embedded corpus). Out: samples. Begin with data.py
(`prepare_data`); formats/ loads files, columns.py finds roles of columns, encoding/ has labels and
tokenization by task, chat/ conversations. It does not depend on a model or on training: bad data is
an error before any work starts.
"""
