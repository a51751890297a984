"""The window's gradient, for a loop that computes its own loss.

In: the loss of each micro-batch, as the loop passes it to `backward`. Out: `.grad` of the window.
divisors.py   what each term of the loss divides by, and whether that can be trusted
groups.py     terms whose divisors keep one proportion share a gradient buffer
gradient.py   adds up the gradients and divides them at the window's end; begin here
rehearsal.py  samples that are computed twice, in other company
"""
