"""Models that compute one embedding per text, and the losses that compare the embeddings of a whole
window: InfoNCE, CoSENT, Matryoshka.

They need nothing installed but torch and transformers; `--task embedding` of the command uses them.
"""
