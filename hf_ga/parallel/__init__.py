"""Training on several processes: the backend for FSDP, sharded checkpoints, and helpers for
collectives.

`fsdp.backend_for` selects the backend; the rest of the package does not depend on which one is
used.
"""
