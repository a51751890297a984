"""Speed-ups that are not rows (`speed_up.py`). Each could be deleted alone.

In: a model. Out: the same gradient with less work. The trial of a loss (`engine/look/trial.py`)
chooses which to use; docs/performance.md lists their gains.
"""
