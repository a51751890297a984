"""Models that make one vector of each text, and the losses that compare the vectors of a whole
window: InfoNCE, CoSENT, Matryoshka.

The library has them, with nothing installed but torch and transformers; `--task embedding` uses
them.
"""
