"""Recovery from interruptions and failures: checkpoints, their manifest, the lock of a run's
folder, and signals.

A checkpoint is written under a temporary name, flushed to disk, renamed, and only then named in the
file `latest`; before a run loads it, all its files are compared with its manifest.
"""
