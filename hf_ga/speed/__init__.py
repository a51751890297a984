"""Speed-ups as hooks around the forward: each file stands alone and could be deleted.

`training.default_speed_ups` chooses which to try, the proof which to use; docs/performance.md says what each is worth.
"""
