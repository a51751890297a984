"""The proof, on a few samples: what a model's loss averages over, where it draws dropout, which
speed-ups leave it unchanged.

`targets.prove` returns a `Rule`, which the engine uses. The proof and the training step drive the
same engine.
"""
