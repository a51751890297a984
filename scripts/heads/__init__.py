"""The sweep over all heads of transformers: each built small, hf_ga and Trainer compared with plain PyTorch on the full batch."""
