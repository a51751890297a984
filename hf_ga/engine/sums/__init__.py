"""What the terms of a loss are divided by, and the buffers in which their gradients are summed.

In: the terms of each micro-batch's loss. Out: a divisor for each at the window's end, or an error.
Begin with readings.py, the terms, and window_sums.py, the sums; divisors.py checks what they are
divided by, groups.py and same_terms.py say which terms share a buffer, agreement.py what ranks
compare, shown_gradients.py is `.grad`. loss_sums.py has losses given as (sum, number),
chunk_sums.py the fixed order for the same bits.
"""
