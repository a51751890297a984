"""Windows of an iterable dataset: no index, no length, read once.

In: an iterable dataset. Out: windows, as of a `WindowLoader`. Begin with stream_loader.py;
stream_reader.py reads a pass, also in workers, shuffle_buffer.py shuffles as `datasets` does.
"""
