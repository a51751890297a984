"""Speed-ups as hooks around the forward. Each is independent of the others and could be deleted.

The trial of a loss (`engine/trial.py`) chooses which to use; docs/performance.md lists their gains.
"""
