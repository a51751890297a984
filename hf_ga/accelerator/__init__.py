"""Accelerate's own loop, exact by one changed import line: `from hf_ga import Accelerator`.

accelerator.py        the class: what scripts call
loader.py             hands out the micro-batches of windows in place of Accelerate's batches
windows_of_loader.py  makes these windows from the user's DataLoader
named_entries.py      batches of any type as dicts
training_loop.py      the window and the micro-batch that the loop is in; drives the engine
call_order.py         refuses a loop that does not call fetch, forward, backward, step in this order
engines.py            the engine of a window, or None as long as the model is not proven
first_forward.py      the proof of a model that shows in its first forward how it is called
sharding.py           the proof of a model before FSDP shards it
outputs.py            watches the model's forwards
criteria.py           watches the calls of torch's loss functions
loss_comparison.py    compares the loss that the loop passes with the one that was proven
across_samples.py     finds sums that compare samples
loss_checks.py        remembers which losses were compared
loss_terms.py         makes the backward of each kind of loss
metrics.py            gathers values of all processes
state.py              saves and restores the position of the loaders and the schedule
"""
