"""Several processes: FSDP's backend of the exact step, sharded checkpoints, and helpers that run on all ranks.

The rest of the package never asks which engine runs: `backend_for` answers once.
"""
