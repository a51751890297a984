"""The global random generators of torch, numpy and Python: seed and restore them, and detect that
code drew from them.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


def random_states() -> dict[str, bytes]:
    """Return the states of the global random generators of torch, numpy and Python, to find out
    with `==` whether a forward or a collate function drew from one, which could make the gradient
    depend on the split of the window.

    On a GPU this reads counters that are on the host, without synchronisation.

    Returns:
        The name of each generator ("torch", "numpy", "random" and, if CUDA is initialised,
        "torch.cuda" for all GPUs) with its state.
    """
    numpy_algorithm, numpy_words, *numpy_rest = np.random.get_state(legacy=True)
    states = {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy": numpy_words.tobytes() + repr((numpy_algorithm, numpy_rest)).encode(),
        "random": repr(hash(random.getstate())).encode(),
    }
    if _is_cuda_in_use():
        gpu_states = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
        states["torch.cuda"] = b"".join(gpu_states)
    return states


def _is_cuda_in_use() -> bool:
    """Whether a GPU is available and this process has initialised CUDA, so that the random
    generators of its GPUs have states.
    """
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def moved_generators(before: dict[str, bytes]) -> list[str]:
    """Return the names of the global random generators whose state has changed since an earlier
    call of `random_states`: those that a forward or a collate function drew from or seeded.

    Args:
        before: The result of that call.
    """
    return [name for name, state in random_states().items() if state != before.get(name, state)]


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the states of all global random generators at the end of the `with` block, which
    loads or collates samples, also after an error.
    """
    devices = list(range(torch.cuda.device_count())) if _is_cuda_in_use() else []
    with torch.random.fork_rng(devices=devices), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        yield


def seed_generators(key: int) -> None:
    """Seed the global CPU generators of torch, numpy and Python, so that random transforms and
    collate functions give the same micro-batches for any split of the window.

    Args:
        key: A 64-bit random key; numpy uses its lower 32 bits, torch its lower 63 bits.
    """
    torch.default_generator.manual_seed(key & ((1 << 63) - 1))
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)
