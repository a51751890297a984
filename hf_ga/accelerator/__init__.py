"""Accelerate's own loop, exact by one changed import line: `from hf_ga import Accelerator`.

accelerator.py        the class that scripts use
loader.py             yields the micro-batches of windows in place of Accelerate's batches
windows_of_loader.py  makes these windows from the user's DataLoader
named_entries.py      converts batches of any type to dicts and back
training_loop.py      drives the engine: the current window and micro-batch
checks/               what a loop must not do: calls in another order, changes within a window
metrics.py            gathers values of all processes
state.py              saves and restores the positions of the loaders and the schedules
"""
