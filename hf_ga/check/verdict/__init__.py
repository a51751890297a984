"""From gradients to a report: tolerances, verdicts, rows, text and HTML.

In: gradients of arms and the reference. Out: a report. Begin with judging.py; report.py prints,
more_rows.py has two more rows of it.
"""
