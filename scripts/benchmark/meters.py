"""Clocks, counters and the memory of this process."""

import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import Any

import psutil
import torch
from torch import Tensor, nn

MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}  # large enough that the product is bound by arithmetic


class CountedCollate:
    """A collate function that counts what it hands out.

    Attributes:
        ids: of the samples, in the order in which they came. real_tokens: of the samples. padded_tokens: elements of `input_ids`.
    """

    def __init__(self, collate: Callable[[Sequence[Any]], dict[str, Any]]) -> None:
        self.collate = collate
        self.restart()

    def restart(self) -> None:
        """Forget what came so far (a warm-up, a proof)."""
        self.ids: list[int] = []
        self.real_tokens = self.padded_tokens = 0

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        batch = self.collate(samples)
        self.ids += [sample["id"] for sample in samples]
        self.real_tokens += sum(len(sample["input_ids"]) for sample in samples)
        self.padded_tokens += batch["input_ids"].numel()
        return batch


class Stopwatch:
    """Seconds of the clock from `start` or `go_on` to `stop`, and of these those in forward and backward, of whichever thread.

    On a CUDA device both are told by events of its own clock, so that nothing is waited for in between.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.inside: list[tuple[Any, Any]] = []
        self._runs: list[tuple[Any, Any]] = []
        self._depths: Counter[int] = Counter()  # of each thread

    def now(self) -> Any:
        """A mark: seconds, or on a CUDA device an event."""
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Forget what was measured so far."""
        self.inside.clear()
        self._runs.clear()
        self.go_on()

    def go_on(self) -> None:
        """What comes now is added to what was measured."""
        synchronize(self.device)
        self._began = self.now()

    def stop(self) -> None:
        """A window is done, and what follows is not measured."""
        self._runs.append((self._began, self.now()))
        synchronize(self.device)

    @property
    def seconds(self) -> float:
        return sum(_between(began, ended) for began, ended in self._runs)

    @property
    def inside_seconds(self) -> float:
        """Those in which two threads are inside count once."""
        first = self._runs[0][0]
        spans = sorted((_between(first, begin), _between(first, end)) for begin, end in self.inside)
        total = covered = 0.0
        for begin, end in spans:
            total += max(0.0, end - max(begin, covered))
            covered = max(covered, end)
        return total

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What runs here is forward or backward; inside of itself it counts once."""
        thread, began = get_ident(), self.now()
        self._depths[thread] += 1
        try:
            yield
        finally:
            self._depths[thread] -= 1
            if not self._depths[thread]:
                self.inside.append((began, self.now()))


@contextmanager
def forwards_and_backwards(stopwatch: Stopwatch, model: nn.Module) -> Iterator[None]:
    """Count every forward of `model`, of copies too, as a whole, and every backward."""
    owner: Any = model if "forward" in vars(model) else type(model)  # mixed precision puts one into the model itself
    forward, backward = owner.forward, torch.autograd.backward

    @wraps(forward)  # hf_ga reads its signature
    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        with stopwatch.counted():
            return forward(*args, **kwargs)

    def timed_backward(*args: Any, **kwargs: Any) -> None:
        with stopwatch.counted():
            backward(*args, **kwargs)

    owner.forward, torch.autograd.backward = timed_forward, timed_backward
    try:
        yield
    finally:
        owner.forward, torch.autograd.backward = forward, backward


def _between(began: Any, ended: Any) -> float:
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000


def synchronize(device: str) -> None:
    """Wait until the device has done all that it was told."""
    if device == "cuda":
        torch.cuda.synchronize()


def memory_now(device: str) -> int:
    """Bytes that this process holds: of the device, or on a CPU of its resident set."""
    return torch.cuda.memory_allocated() if device == "cuda" else psutil.Process().memory_info().rss


def peak_memory(device: str) -> int:
    """Most bytes that this process ever held: allocated on the device, or on a CPU the largest resident set."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def matrix_product_rate(device: str, mixed_precision: str, size: int | None = None, repeats: int = 8) -> float:
    """Floating-point operations a second of the device's own product of two large square matrices: the best of several."""
    size = size or MATRIX_SIZE[device]
    dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = [_product_seconds(device, left, right) for _ in range(repeats)]
    return 2 * size**3 / min(seconds[1:])


def _product_seconds(device: str, left: Tensor, right: Tensor) -> float:
    synchronize(device)
    began = time.perf_counter()
    left @ right
    synchronize(device)
    return time.perf_counter() - began


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of one over the median of the other."""
    return statistics.median(over) / statistics.median(under)
