"""Conversations of many forms -> the text that the model reads, and which characters of it are
targets.

`columns` finds the form of a dataset by its columns. `conversation`, `messages`, `calls` and
`values` read a row of any form into one. `template` renders it, `turns` locates the turns of the
assistant, `usage` checks that nothing of a row is left out, `ending` that the model learns to stop.
`rendering` does all this for rows.
"""
