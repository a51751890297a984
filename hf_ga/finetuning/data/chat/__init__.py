"""Conversations of many forms -> the text that the model reads, and which characters of it are
targets.

`columns` finds the form of a dataset by its columns, `messages` and `conversation` read a row of
any form into one, `template` and `turns` render it and locate the assistant's turns, `usage` checks
that nothing of a row is left out, and `rendering` does all this for rows.
"""
