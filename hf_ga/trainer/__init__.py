"""`ExactTrainer`: `transformers.Trainer` with exact gradient accumulation."""
