"""Why a training step under test differs from the full batch.

In: the gradient of the step in a layout. Out: causes by name. Begin with diagnosis.py; weights.py
has the table of wrong weights, divisors.py and switches.py read the loss and what is called.
"""
