"""The sweep over all heads of transformers: small models, hf_ga and Trainer compared with plain
PyTorch on the full batch.
"""
