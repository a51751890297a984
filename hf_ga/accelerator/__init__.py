"""Accelerate's own loop, exact by one changed import line: `from hf_ga import Accelerator`.

`accelerator.py` is the class; `loader.py` hands out the micro-batches of windows in place of
Accelerate's batches; `losses.py` finds out whether the loss that the loop passes to `backward` is
the one that was proven; `outputs.py` watches the model's forwards; `state.py` saves and restores
the position of the loaders and the schedule.
"""
