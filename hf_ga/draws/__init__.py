"""Randomness by sample: a number depends on seed, epoch, sample, draw and coordinate only.

In: torch's random functions, called in a user's loop or model. Out: rows of numbers by hash.
Begin with keyed.py (`KeyedDraws`), which replaces the functions for the time of a micro-batch;
functions.py and samplers.py have the replacements, dropout/ those of dropout, sample_dims.py finds
the dim of the samples; draw.py and values.py make numbers of the hashes of hashing.py.
"""
