"""Losses of all samples of a window together, which no split into micro-batches computes.

In: outputs of all micro-batches. Out: the gradient of the loss at these outputs, with which each
micro-batch is computed again. Begin with whole_window.py (own loop) or whole_batch.py (a user's);
first_pass.py runs their forwards, used_outputs.py finds the outputs that count, router.py and
router_losses.py balance experts.
"""
