"""Samples -> one update, exact for any split: order, plan, window, keyed dropout, loss, engine,
backend, optimizer.

`engine.py` computes a window for every loop, `step.py` has the only training loop of our own over
micro-batches, `loss.py` the only divisor, `backend.py` all communication of a window. Speed-ups and
FSDP plug in from other rooms, as `hooks.SpeedUp` and `backend.Backend`.
"""
