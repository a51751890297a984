"""Faults of a window that no comparison of samples shows.

In: a window's forwards and backwards. Out: nothing, a warning or an error. draw_check.py finds
draws that are not keyed, statistic_check.py samples that are compared with a mean of several,
state.py and weight_check.py buffers and weights that change within the window, sample_count.py
samples that were computed twice or never, lone_terms.py parts of a loss that a process leaves out;
nonfinite.py finds which sample and module made a number infinite or NaN.
"""
