"""Checkpoints that survive a kill, the lock, signals, and the search for a loss that is not finite."""
