"""What survives a stop or a failure: checkpoints, their manifest and lock, signals, the search for non-finite numbers.

A checkpoint is written beside, flushed, renamed, and named in `latest` last; nothing is read before its manifest is verified.
"""
