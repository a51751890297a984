"""What lets a run be killed at any moment and resumed: whole checkpoints, the lock of an output folder, signals.

Also the search for the cause of a loss that is not finite. May import `parallel`, `exact` and `errors`.
"""
