"""Accelerate's own loop, exact by one changed import line: `from hf_ga import Accelerator`.

accelerator.py        the class that scripts use
loader.py             yields the micro-batches of windows in place of Accelerate's batches
windows_of_loader.py  makes these windows from the user's DataLoader
named_entries.py      converts batches of any type to dicts and back
training_loop.py      drives the engine: the current window and micro-batch
call_order.py         refuses a loop that does not call fetch, forward, backward, step in this order
engines.py            makes the engine of a window, or None until the model is proven
first_forward.py      proves a model whose first forward shows how it is called
sharding.py           proves a model before FSDP shards it
outputs.py            records the model's forwards
criteria.py           records the calls of torch's loss functions
loss_comparison.py    compares the loss that the loop passes with the one that was proven
across_samples.py     finds loss sums that compare samples
loss_checks.py        decides which loss the loop passes, and remembers which were checked
loss_terms.py         runs the backward of each kind of loss
metrics.py            gathers values of all processes
state.py              saves and restores the positions of the loaders and the schedules
"""
