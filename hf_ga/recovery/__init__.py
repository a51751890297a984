"""Recovery from interruptions and failures: checkpoints, their manifest, the lock of a run's
folder, signals, and the search for the cause of non-finite numbers.

A checkpoint is written under a temporary name, flushed to disk, renamed, and only then named in the
file `latest`; before a run loads it, all its files are compared with its manifest.
"""
