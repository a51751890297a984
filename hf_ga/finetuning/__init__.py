"""The fine-tuning command: from files and flags to a trained model on disk.

`data` turns rows into tokenized samples, task by task; `run` builds, trains, evaluates and saves.
Nothing of the library imports this package.
"""
