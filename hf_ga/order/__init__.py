"""Which samples make a window, and which process computes them in which micro-batch.

In: the number of samples, seed, epoch, lengths. Out: positions of a window, and its plan.
Begin with order.py (the shuffled order of an epoch), then plan.py; length_plan.py plans by length,
chunks.py for the same bits, layout.py has the arithmetic of batch sizes, plan_batch.py shows it.
"""
