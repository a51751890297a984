"""Conversations of many formats -> the text that the model reads, and which characters of it are
targets.

`columns` finds the format of a dataset by its columns. `conversation` and `messages` read a row of
any format into a `Conversation`. `template` renders it. `rendering` does this for rows, locates the
turns of the assistant, and checks that the template omits nothing of a row, and that the model
learns to stop.
"""
