"""What a head's loss averages over, where a model draws random numbers, and whether a speed-up computes the same."""
