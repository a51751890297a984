"""Samples that are computed twice in other company, to see whether they depend on each other.

In: some samples of a window. Out: nothing, or an error (refusals.py). Begin with rehearsal.py,
which compares; choice.py says which samples are rehearsed, recorder.py and footprints.py what is
compared, and inside.py finds the backward code of a model. looks.py decides which windows are tried
again, padding_trial.py whether they must be padded, trial.py tries a model before training.
"""
