"""From the command line to a configuration that is checked before any data is read.

In: flags. Out: `FinetuneConfig` (config.py). Begin with cli.py; arguments.py translates the flags
of TrainingArguments and of transformers' example scripts, config_checks.py checks values.
"""
