"""Where the time of a window goes: an arm's epoch under torch's profiler, on one thread, by kinds of operations."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.profiler import ProfilerActivity, profile

from benchmark.arms import ARMS, PACKED, REBALANCED
from benchmark.figures import Section
from benchmark.lap import Lap, Refused
from benchmark.samples import collate_function
from benchmark.setting import Sample, Setting, build_model

PROFILED = (REBALANCED, PACKED)
NUM_WINDOWS = 4
OTHER, REST = "other operations", "Python, calls, waiting: in no operation"
# What the name of an operation looks like from its beginning, without `aten::`; the first that fits counts.
KINDS: dict[str, str] = {
    "matrix products of layers and head": r"(addmm|mm)$",
    "attention": r"baddbmm|bmm|_softmax|softmax|_scaled_dot_product|DroppedAttention",
    "norms and activations": r"(native_)?layer_norm|gelu|tanh",
    "dropout masks": r"bitwise_|__(xor|and|rshift)__|ge_?$|bernoulli_|(native_)?dropout|random_|arange",
    "elementwise": r"r?(mul|div|add|sub|pow|neg|exp|log)_?$|sum|amax",
    "copies, zeros, memory": r"_?(to|copy|to_copy|clone|cat|fill|zero|zeros|empty|new_empty|index|embedding|scatter|gather|resize)",
    "optimizer and clipping": r"Optimizer\.|_fused_adam|_foreach|linalg_vector_norm",
    "views": r"(t|view|_unsafe_view|reshape|transpose|permute|expand|select|slice|split|(un)?squeeze|as_strided|detach)(_|$)",
    "autograd and dispatch": r".*(Backward\d*$|autograd::|linear$|matmul$|resolve_)",
}


@dataclass
class Profile:
    """Of one arm's epoch.

    Attributes:
        seconds: of the clock. kinds: of each kind of operation (seconds, calls). refused: why there is nothing of this.
    """

    seconds: float = 0.0
    kinds: dict[str, tuple[float, int]] = field(default_factory=dict)
    refused: str = ""


class ProfiledLap(Lap):
    """A lap whose timed part runs under the profiler."""

    def begin(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.setting.device == "cuda" else [])]
        self.profiler = profile(activities=kinds, acc_events=True)  # torch 2.11 warns that it would forget those of other cycles
        self.profiler.start()
        super().begin()

    def end(self) -> None:
        super().end()
        self.profiler.stop()


def profile_arm(setting: Setting, arm: str, samples: Sequence[Sample]) -> Profile:
    """Run an arm's epoch under the profiler, in this process."""
    torch.set_num_threads(setting.num_threads)
    lap = ProfiledLap(setting, build_model(setting), list(samples), collate_function(setting))
    try:
        ARMS[arm](lap)
    except Refused as refusal:
        return Profile(refused=" ".join(str(refusal).split()))
    times = (
        (event.key, event.self_device_time_total if setting.device == "cuda" else event.self_cpu_time_total, event.count)
        for event in lap.profiler.key_averages()
    )
    return Profile(lap.stopwatch.seconds, by_kind(times, lap.stopwatch.seconds))


def on_one_thread(setting: Setting) -> Setting:
    """The profiler sees the thread that started it: with one there are no lanes, and nobody waits for another."""
    return replace(setting, num_threads=1)


def by_kind(operations: Iterable[tuple[str, float, int]], seconds: float) -> dict[str, tuple[float, int]]:
    """Seconds and calls of each kind, and what is left of `seconds`.

    Args:
        operations: (name, microseconds in it and in nothing that it calls, calls).

    >>> found = by_kind([("aten::mm", 6e5, 2), ("aten::mul_", 1e5, 3), ("aten::sort", 1e5, 1)], 1.0)
    >>> found["matrix products of layers and head"], found["elementwise"], found["other operations"]
    ((0.6, 2), (0.1, 3), (0.1, 1))
    """
    found: dict[str, tuple[float, int]] = dict.fromkeys((*KINDS, OTHER), (0.0, 0))
    for name, microseconds, calls in operations:
        plain = name.removeprefix("aten::")
        kind = next((kind for kind, pattern in KINDS.items() if re.match(pattern, plain)), OTHER)
        found[kind] = found[kind][0] + microseconds / 1e6, found[kind][1] + calls
    return {**found, REST: (seconds - sum(time for time, _ in found.values()), 0)}


def profile_section(setting: Setting, profiles: dict[str, Profile], num_windows: int) -> Section:
    """A row for each kind, two columns for each arm."""
    ran = {arm: of for arm, of in profiles.items() if not of.refused}
    header = ["", *(text for arm in ran for text in (f"{arm}: ms a window", "% of its time"))]
    rows = [
        [kind, *(cell for of in ran.values() for cell in _cells(of, of.kinds[kind][0], num_windows))]
        for kind in (*KINDS, OTHER, REST)
    ]
    rows.append(["all", *(cell for of in ran.values() for cell in _cells(of, of.seconds, num_windows))])
    notes = [f"{arm}: not run: {of.refused}" for arm, of in profiles.items() if of.refused]
    figures = {arm: vars(of) for arm, of in profiles.items()}
    title = f"{setting.model}: where the time goes, {num_windows} ragged windows under the profiler, one thread"
    return Section(title, header, rows, notes=notes, figures={"profiles": figures})


def _cells(of: Profile, seconds: float, num_windows: int) -> tuple[float, str]:
    return seconds / num_windows * 1e3, f"{100 * seconds / of.seconds:.1f}"
