"""From the names of files and folders to rows.

In: `--train_file`, `--dataset_name`. Out: `datasets.Dataset`s. Begin with files.py; delimited.py
and documents.py (JSON, SQuAD) know one format each, corpus.py is the embedded dataset.
"""
