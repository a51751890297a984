"""Pipeline parallelism: each rank holds some layers of the model, and torch's schedule runs the
micro-batches of a window through all of them.

pipeline.py    the public functions; begin here
trial.py       the loss of the full model is tried, and its random draws are counted
stage_loop.py  one window in this rank's stage: forwards in the schedule's order
model.py       a stage: the model, in which the modules of other stages are placeholders
backend.py     how ranks communicate, besides the hidden states that the schedule sends
"""
