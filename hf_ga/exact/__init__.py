"""From samples to one update: order, plan, window, keyed randomness, loss term, step, the one exchange between processes."""
