"""Several processes: the FSDP backend of the exact step, sharded checkpoints, and collective
helpers.

`backend_for` selects the backend; the rest of the package does not depend on which one is used.
"""
