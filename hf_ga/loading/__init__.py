"""From a dataset to the micro-batches of windows.

In: a dataset, a collate function, the order and plan of `order`. Out: windows (window.py).
Begin with window_loader.py, then base_loader.py; streams/ does it for iterable datasets. fetch.py
loads and collates (in workers: workers.py), entries.py and batches.py know what is whose row.
"""
