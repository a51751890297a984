"""The global random generators of torch, numpy and Python: seed and restore them, and detect
draws.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


def random_states() -> dict[str, bytes]:
    """Return the states of all global generators, to compare with `==`.

    On a GPU this reads counters on the host, no synchronisation.
    """
    kind, words, *rest = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": words.tobytes() + repr((kind, rest)).encode(),
        "random": repr(hash(random.getstate())).encode(),
    }
    if _is_cuda_in_use():
        of_devices = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
        states["torch.cuda"] = b"".join(of_devices)
    return states


def _is_cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def moved_generators(before: dict[str, bytes]) -> list[str]:
    """Return the names of the generators that somebody drew from.

    Args:
        before: Result of `random_states` at an earlier time.
    """
    return [name for name, state in random_states().items() if state != before.get(name, state)]


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Put all global generators back at the end, also after an error."""
    devices = list(range(torch.cuda.device_count())) if _is_cuda_in_use() else []
    with torch.random.fork_rng(devices=devices), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        yield


def seed_generators(key: int) -> None:
    """Seed the CPU generators of torch, numpy and Python from a 64-bit key.

    Numpy's legacy generator takes 32 of its bits.
    """
    torch.default_generator.manual_seed(key & ((1 << 63) - 1))
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)
