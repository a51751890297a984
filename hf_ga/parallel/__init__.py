"""What is needed where a run has several processes: FSDP1 and FSDP2, sharded checkpoints, and values that all ranks must share.

May import `exact` and `errors`.
"""
