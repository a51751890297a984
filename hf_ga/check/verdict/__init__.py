"""From gradients to a report: tolerances, verdicts, rows, text and HTML.

In: gradients of arms and of the oracle. Out: a report. Begin with judging.py; report.py prints,
pipeline.py and same_bits.py are two more rows of it.
"""
