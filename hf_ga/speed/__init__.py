"""Speed-ups around the forward (`speed_up.py`). Each could be deleted alone.

The trial of a loss (`engine/trial.py`) chooses which to use; docs/performance.md lists their gains.
"""
