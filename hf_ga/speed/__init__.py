"""Speed-ups as hooks around the forward. Each is independent of the others and could be deleted.

`training.default_speed_ups` chooses which to try, the proof which to use; docs/performance.md lists
their gains.
"""
