"""`ExactTrainer`: `transformers.Trainer` with exact gradient accumulation.

Trainer's loop stays; its batches come from hf_ga's windows, and its loss is what each micro-batch adds to the window's mean.
"""
