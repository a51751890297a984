"""From samples to one update, for any split: order, plan, window, masks, backend, optimizer.

`backend.py` has all communication of a window; FSDP and pipelines plug in from other rooms.
"""
