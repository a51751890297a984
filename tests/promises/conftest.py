"""For promises 1 and 2: the environment of a fresh shell, with all threads and none of the
variables that the other tests set.
"""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(1)
