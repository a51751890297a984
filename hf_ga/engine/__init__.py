"""The window's gradient, for a loop that computes its own loss.

In: the loss of each micro-batch, as the loop passes it to `backward`. Out: `.grad` of the window.
window_engine.py  computes a window for a loop that runs its own forwards; begin here
slots.py          the micro-batches of a window, and its rehearsal
divisors.py       what each term of the loss divides by, and whether that can be trusted
groups.py         terms whose divisors keep one proportion share a gradient buffer
gradient.py       adds up the gradients and divides them at the window's end
rehearsal.py      samples that are computed twice, in other company
whole_batch.py    a loss of all samples of a window: its first pass
used_outputs.py   which outputs of the model such a loss uses
own_loop.py       hf_ga's own loop over the micro-batches of a window
nonfinite.py      which samples and module make a loss or gradient of that loop non-finite
"""
