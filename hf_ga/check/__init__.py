"""The equivalence checker: is every split of a window the full batch, on the user's own model and training step, and if not, why?

`check_equivalence` compares gradients with one forward and backward of the whole window in float64; `arms` holds ready-made steps.
"""
