"""What a model's loss averages over, where it draws dropout, and whether a speed-up changes nothing: proven on a few samples.

`targets.prove` asks the questions and returns a `ProvenLoss`, which the step takes. The proof runs the functions that training
runs.
"""
