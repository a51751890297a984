"""`hf_ga.backward`: one call that computes the gradient of a collated batch in micro-batches, in
any PyTorch loop with any DataLoader.
"""
