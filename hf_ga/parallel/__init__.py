"""Several processes: FSDP1, FSDP2, sharded checkpoints, what the ranks agree on."""
