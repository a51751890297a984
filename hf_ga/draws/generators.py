"""The global random generators of torch, numpy and Python: seed and restore them, and detect that
code drew from them.
"""

import ctypes
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

MT19937_BYTES = 4 * (624 + 1)  # its words and the position of the next one, each of 32 bits
NOTHING_KEPT = repr((0, 0.0)).encode()  # no normal number for the next draw


def random_states(earlier: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """Return the states of the global random generators of torch, numpy and Python, to find out
    with `==` whether a forward or a collate function drew from one, which could make the gradient
    depend on the split of the window.

    On a GPU this reads counters that are on the host, without synchronisation.

    Args:
        earlier: The result of an earlier call, if any, which saves time where nothing was drawn.

    Returns:
        The name of each generator ("torch", "numpy", "random" and, if CUDA is initialised,
        "torch.cuda" for all GPUs) with its state.
    """
    states = {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy": _numpy_state((earlier or {}).get("numpy", b"")),
        "random": repr(hash(random.getstate())).encode(),
    }
    if _is_cuda_in_use():
        gpu_states = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
        states["torch.cuda"] = b"".join(gpu_states)
    return states


def _numpy_state(earlier: bytes) -> bytes:
    """Return the state of numpy's global generator; `earlier` is one that may be the same.

    `get_state` takes 30 us, as it makes numbers of all words: it is called where words have changed
    or numpy keeps a normal number for the next draw, which changes no words then.
    """
    generator = np.random.get_bit_generator()
    words = b""
    if isinstance(generator, np.random.MT19937):
        words = ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)
        if earlier == words + NOTHING_KEPT:
            return earlier
    state = np.random.get_state(legacy=False)
    if words:
        return words + repr((state["has_gauss"], state["gauss"])).encode()
    return repr(state).encode()


def _is_cuda_in_use() -> bool:
    """Whether a GPU is available and this process has initialised CUDA, so that the random
    generators of its GPUs have states.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_available()  # the faster one first


def moved_generators(before: dict[str, bytes]) -> list[str]:
    """Return the names of the global random generators whose state has changed since an earlier
    call of `random_states`: those that a forward or a collate function drew from or seeded.

    Args:
        before: The result of that call.
    """
    now = random_states(before)
    return [name for name, state in now.items() if state != before.get(name, state)]


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
