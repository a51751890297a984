"""Random draws that belong to samples: exact for any split of a window into micro-batches.

`keyed.py` replaces torch's random functions while a micro-batch is processed; `functions.py` and
`dropouts.py` hold the replacements, `draw.py` and `values.py` compute the numbers from hashes, and
`sample_dims.py` finds the dim of a draw that holds the samples.
"""
