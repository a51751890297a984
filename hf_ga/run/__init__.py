"""The fine-tuning command: configuration, loop, evaluation, predictions, outputs."""
