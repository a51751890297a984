"""`ExactTrainer`: `transformers.Trainer` with exact gradient accumulation.

Uses Trainer's loop; batches come from hf_ga's windows, and the loss is each micro-batch's term of
the window's mean.
"""
