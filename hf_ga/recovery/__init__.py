"""Recovery from stops and failures: checkpoints, their manifest and lock, signals, the search for
non-finite numbers.

A checkpoint is written under a temporary name, flushed, renamed, then named in `latest`; its
manifest is verified before loading.
"""
