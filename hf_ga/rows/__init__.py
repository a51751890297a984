"""Rows: real tokens of several samples side by side, without padding, and layers compiled on them.

In: a padded micro-batch. Out: the same outputs, computed on rows. Begin with packing.py, then
packed_attention.py, with the kernels of attention_kernel.py and, by torch, varlen_attention.py;
row_attention.py and compiled_rows.py for layers that torch.compile compiled.
To add an attention function, register it and its masks with transformers: if it calls sdpa, it is
exact already, on padded samples. `attention_options` in packed_attention.py decides which ones run
packed, `reason_not_to_run_rows` in packing.py which on compiled rows.
"""
