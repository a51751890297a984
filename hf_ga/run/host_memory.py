"""What a C library does with the memory of freed tensors, where training runs on a CPU."""

import ctypes

import torch

M_MXFAST, M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = 1, -1, -2, -4  # of glibc's malloc.h
HEAP_PART = 64 << 20  # bytes: a thread's heap grows by such parts


def keep_freed_memory(device: torch.device) -> bool:
    """Let freed tensors leave their memory to the next ones, for the rest of the process; on a CPU under glibc only.

    glibc gives large blocks back to the system when they are freed, and the system clears every page when it hands it out again: a
    tenth of a window's time went there (GPT-2 of 4 layers x 256: 77,000 page faults a window). Small blocks that are freed join
    their neighbours at once, so that tensors find room there (see `start.environment` for those that only the environment reaches).

    Returns:
        whether anything was done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if device.type != "cpu" or mallopt is None:
        return False
    # No block is mapped by itself, so all of them come from heaps, whose top is not given back. Nor is an empty part of a thread's
    # heap, as long as less than the pad would be left: two parts, so never. The system gives pages of the pad when they are used.
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_MXFAST, 0), (M_TOP_PAD, 2 * HEAP_PART))
    return all(mallopt(*setting) for setting in settings)


def give_back_freed_memory(device: torch.device) -> bool:
    """Give pages that hold nothing but freed blocks back to the system, once; on a CPU under glibc only.

    What comes next then lies densely, however the blocks before it were strewn over the heaps.

    Returns:
        whether anything was done.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if device.type != "cpu" or trim is None:
        return False
    trim(0)
    return True
