"""The equivalence checker: does every split of a window give the full batch's gradient, with the
user's model and training step?

`check_equivalence` compares gradients with one forward and backward of the whole window in float64;
`arms` has ready-made training steps to check. An arm is one training step under test: hf_ga's own,
transformers' Trainer, a loop with Accelerate, or the user's.
"""
