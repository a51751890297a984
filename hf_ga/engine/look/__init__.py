"""Samples that are computed twice in other company, to see whether they depend on each other.

In: some samples of a window. Out: nothing, or an error. Begin with rehearsal.py; looks.py
decides which windows are tried again, trial.py tries a model before training, sample_count.py
checks that each sample of a window is computed once.
"""
