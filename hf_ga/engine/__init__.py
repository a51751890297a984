"""The window's gradient, for a loop that computes its own loss.

In: the loss of each micro-batch, as the loop passes it to `backward`. Out: `.grad` of the window.
Begin with window_engine.py, then gradient.py; slots.py has the micro-batches, speed_ups.py those
that are used. sums/ divides, look/ computes samples twice, checks/ finds other faults, whole/ has
losses of all samples. own_loop.py is hf_ga's own loop, update.py its optimizer step, evaluation.py
its evaluation.
"""
