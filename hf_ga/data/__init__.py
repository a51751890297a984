"""From rows of a dataset to tokenised samples and batches, task by task."""
