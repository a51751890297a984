"""One call for a collated batch: `hf_ga.backward`, in any PyTorch loop on any DataLoader."""
