"""The equivalence checker: does every split of a window give the full batch's gradient, with the
user's model and training step?

In: a model, a window, training steps (arms.py). Out: a report. Begin with check.py
(`check_equivalence`), or script.py for a user's script as it is; reference.py has the float64
gradient, causes/ says why a step is wrong, verdict/ judges and reports.
"""
