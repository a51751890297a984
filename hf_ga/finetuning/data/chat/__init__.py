"""Conversations of many formats -> the text that the model reads, and which characters of it are
targets.

`columns` finds the format of a dataset by its columns. `conversation`, `messages`, `calls` and
`values` read a row of any format into a `Conversation`. `template` renders it, `turns` locates the
turns of the assistant, `usage` checks that the template omits nothing of a row, `rendering` does
all this for rows, and checks that the model learns to stop.
"""
