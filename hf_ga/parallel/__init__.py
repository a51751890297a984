"""Ranks: what differs between one process, DDP, FSDP and the same bits on any number of ranks.

In: gradients and divisors of this rank. Out: those of the window. Begin with backend.py, which is
the only one to communicate within a window; fsdp.py has `backend_for`, prepare.py prepares models,
shards.py saves and loads, processes.py has what ranks agree on.
"""
