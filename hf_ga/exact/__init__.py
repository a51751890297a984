"""Samples -> one update, exact for any split: order, plan, window, keyed dropout, loss, step,
backend, optimizer.

`step.py` has the only loop over micro-batches, `loss.py` the only divisor, `backend.py` all
communication of a window. Speed-ups and FSDP plug in from other rooms, as `hooks.SpeedUp` and
`backend.Backend`.
"""
