"""Accelerate's own loop, exact by one changed import line: `from hf_ga import Accelerator`.

accelerator.py        the class that scripts use
loader.py             yields the micro-batches of windows in place of Accelerate's batches
windows_of_loader.py  makes these windows from the user's DataLoader
named_entries.py      converts batches of any type to dicts and back
training_loop.py      drives the engine: the current window and micro-batch
by_hand.py            loops that divide their loss and step their optimizer by themselves
misuse.py             refuses a loop that does not call fetch, forward, backward, step in this order
schedules.py          refuses learning rate schedules that step in each iteration
metrics.py            gathers values of all processes
state.py              saves and restores the positions of the loaders and the schedules
"""
