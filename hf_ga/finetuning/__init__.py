"""The fine-tuning command `hf-ga`: from files and flags to a trained model on disk.

`data` turns rows into tokenized samples, task by task; `run` builds the model, trains, evaluates
and saves. No other package of hf_ga imports this one.
"""
