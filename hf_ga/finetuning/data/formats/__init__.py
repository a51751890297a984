"""From the names of files, folders and datasets to rows.

In: `--train_file`, `--dataset_name`. Out: `datasets.Dataset`s. Begin with named_datasets.py and
files.py; delimited.py, documents.py (JSON, SQuAD) know one format each, corpus.py is the
embedded dataset.
"""
