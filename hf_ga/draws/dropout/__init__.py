"""Dropout keyed by sample: which elements are dropped does not depend on the split of a window.

In: the keys of a micro-batch's samples, the number of the draw, a shape. Out: a mask, or the input
with the mask applied. Begin with masks.py (`sample_keys`, `keep_mask`); the key of a draw is
`KeyedDraws.site_key` in draws/keyed.py. mask_kernel.py draws the same bits in Triton,
rows/packed_tokens.py for packed tokens. dropout_functions.py replaces `F.dropout`, `torch.dropout`
and attention with dropout, dropout_variants.py the others.
"""
