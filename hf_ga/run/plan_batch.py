"""Split a global batch exactly over the available devices: `plan_batch`."""

from collections.abc import Iterable
from dataclasses import dataclass

from hf_ga.errors import ConfigError
from hf_ga.exact.layout import SCALING_RULES, Layout


@dataclass(frozen=True)
class Share:
    """Processes with equally many samples of a full window.

    Attributes:
        num_processes: number of such processes.
        samples: samples of each of them.
        micro_batch_sizes: {samples in a micro-batch: number of such micro-batches}, larger first; empty without samples.
    """

    num_processes: int
    samples: int
    micro_batch_sizes: dict[int, int]

    def __str__(self) -> str:
        sizes = " + ".join(f"{count} x {size}" if count > 1 else f"{size}" for size, count in self.micro_batch_sizes.items())
        return f"{self.num_processes} x {self.samples} (in micro-batches: {sizes})" if sizes else f"{self.num_processes} x nothing"


@dataclass(frozen=True)
class Alternative:
    """Another layout on the same processes, and {rule: factor of the base learning rate} for its window."""

    reason: str
    layout: Layout
    learning_rate_factors: dict[str, float]


@dataclass(frozen=True)
class BatchPlan:
    """An exact layout of a global batch. `str()` gives one fact per line.

    Attributes:
        layout: processes, largest micro-batch, accumulation steps, window size (the global batch).
        nodes: machines.
        devices_per_node: processes on each machine.
        shares: samples per process; together the window.
        balance: share of the device time that is used if all samples cost the same.
        learning_rate: peak rate found with base_batch_size samples per step, if given.
        base_batch_size: samples per step that the learning rate was found with.
        learning_rate_factors: {rule: factor of that rate for the wanted window}.
        alternatives: other layouts, nearest windows first.
    """

    layout: Layout
    nodes: int
    devices_per_node: int
    shares: tuple[Share, ...]
    balance: float
    learning_rate: float | None
    base_batch_size: int
    learning_rate_factors: dict[str, float]
    alternatives: tuple[Alternative, ...]

    def __str__(self) -> str:
        return "\n".join(self._facts())

    def _facts(self) -> Iterable[str]:
        window, processes, limit = self.layout.window_size, self.layout.num_processes, self.layout.micro_batch_size
        yield f"window: {window} samples in each optimizer step"
        yield f"processes: {processes} = {self.nodes} node(s) x {self.devices_per_node} device(s)"
        yield f"samples per process: {', '.join(map(str, self.shares))}"
        total = " + ".join(f"{share.num_processes} x {share.samples}" for share in self.shares)
        yield f"exact: {total} = {window}; no sample added, dropped or repeated, each target weighs the same"
        yield f"accumulation: {self.layout.accumulation_steps} micro-batch(es) of at most {limit} on a process"
        full = processes * limit
        if window % full:
            near = ", ".join(f"{n} step(s) give {n * full}" for n in (window // full, window // full + 1) if n)
            steps = f"{window} / ({processes} x {limit}) = {window / full:.4g} steps"
            yield f"not possible with full micro-batches only: {steps}; {near}"
        yield f"balance: {100 * self.balance:.1f} % of the device time is used if all samples cost the same"
        yield "samples of different lengths: a run balances work, and puts more short samples into a micro-batch"
        yield f"learning rate: {self._rates(self.learning_rate_factors)}, found with {self.base_batch_size}"
        launch = " ".join(launch_flags(self.nodes, self.devices_per_node))
        yield f"launch: accelerate launch {launch} scripts/finetune.py {_flags(self.layout)}"
        if self.nodes > 1:
            yield "each node also needs --machine_rank, --main_process_ip and --main_process_port (see scripts/submit_slurm.py)"
        for other in self.alternatives:
            same = other.layout.window_size == window
            rates = "the same update" if same else f"learning rate {self._rates(other.learning_rate_factors)}"
            yield f"or {other.layout.window_size} samples, {other.reason} ({_flags(other.layout)}): {rates}"

    def _rates(self, factors: dict[str, float]) -> str:
        rates = {rule: f" = {self.learning_rate * factor:.4g}" if self.learning_rate else "" for rule, factor in factors.items()}
        return " or ".join(f"x {factors[rule]:.4g} ({rule}, for {OPTIMIZERS[rule]}){rate}" for rule, rate in rates.items())


OPTIMIZERS = {"linear": "SGD", "sqrt": "Adam"}  # of the scaling rules


def plan_batch(
    global_batch_size: int,
    *,
    nodes: int = 1,
    devices_per_node: int = 1,
    per_device_train_batch_size: int | None = None,
    tokens_per_micro_batch: int | None = None,
    sequence_length: int | None = None,
    learning_rate: float | None = None,
    base_batch_size: int | None = None,
) -> BatchPlan:
    """Split a global batch exactly over the available devices; the sizes need not divide.

    The numbers of samples per process differ by at most one, and so do a process's micro-batches, as `plan_window` plans each full
    window, and `plan_by_length` where all samples are equally long.

    Args:
        global_batch_size: samples in one optimizer step over all processes.
        nodes: machines.
        devices_per_node: devices (processes) on each machine.
        per_device_train_batch_size: most samples in one micro-batch; or give the next two.
        tokens_per_micro_batch: most tokens in one micro-batch, padding included.
        sequence_length: tokens of the longest sample; only with tokens_per_micro_batch.
        learning_rate: peak rate found with base_batch_size samples per step.
        base_batch_size: default: global_batch_size.

    Raises:
        ConfigError: a size below 1, no limit of a micro-batch or two, or a sample longer than a micro-batch.

    >>> print(plan_batch(3072, nodes=30, devices_per_node=8, per_device_train_batch_size=10).shares[0])
    192 x 13 (in micro-batches: 7 + 6)
    """
    for name, value in list(locals().items()):
        if value is not None and name != "learning_rate" and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.")
    if learning_rate is not None and not 0 < learning_rate < float("inf"):
        raise ConfigError(f"learning_rate must be greater than 0 and finite, got {learning_rate}.")
    limit = _micro_batch_limit(per_device_train_batch_size, tokens_per_micro_batch, sequence_length)
    layout = Layout.from_sizes(nodes * devices_per_node, limit, global_batch_size=global_batch_size)
    base = base_batch_size or global_batch_size
    samples, larger = divmod(global_batch_size, layout.num_processes)
    groups = ((larger, samples + 1), (layout.num_processes - larger, samples))
    return BatchPlan(
        layout,
        nodes,
        devices_per_node,
        shares=tuple(Share(count, size, _micro_batch_sizes(size, limit)) for count, size in groups if count),
        balance=global_batch_size / (layout.num_processes * (samples + bool(larger))),
        learning_rate=learning_rate,
        base_batch_size=base,
        learning_rate_factors=_factors(layout, base),
        alternatives=tuple(Alternative(reason, other, _factors(other, base)) for reason, other in _alternatives(layout)),
    )


def launch_flags(nodes: int, processes_per_node: int) -> list[str]:
    """Flags of `accelerate launch` that all nodes share. `--multi_gpu` means several processes, on a CPU too."""
    several = ["--multi_gpu"] if nodes * processes_per_node > 1 else []
    return [*several, "--num_machines", str(nodes), "--num_processes", str(nodes * processes_per_node)]


def _micro_batch_limit(samples: int | None, tokens: int | None, sequence_length: int | None) -> int:
    if samples is not None and tokens is None and sequence_length is None:
        return samples
    if samples is not None or tokens is None or sequence_length is None or tokens < sequence_length:
        raise ConfigError(
            f"the limit of a micro-batch is unclear: got per_device_train_batch_size {samples}, tokens_per_micro_batch {tokens}, "
            f"sequence_length {sequence_length}. Give either per_device_train_batch_size alone, or tokens_per_micro_batch with a "
            "sequence_length that fits into it."
        )
    return tokens // sequence_length


def _micro_batch_sizes(samples: int, limit: int) -> dict[int, int]:
    """{size: number} of as few micro-batches as the limit allows, sizes differing by at most one."""
    if not samples:
        return {}
    count = -(-samples // limit)
    size, larger = divmod(samples, count)
    return {size: count for size, count in ((size + 1, larger), (size, count - larger)) if count}


def _alternatives(layout: Layout) -> Iterable[tuple[str, Layout]]:
    """The same window with one accumulation step less or smaller micro-batches, then the nearest other windows; each once."""
    window, processes, limit = layout.window_size, layout.num_processes, layout.micro_batch_size
    largest = -(-window // processes)  # samples of one process
    size = -(-largest // layout.accumulation_steps)  # samples of one micro-batch
    if layout.accumulation_steps > 1:
        fewer = Layout.from_sizes(processes, -(-largest // (layout.accumulation_steps - 1)), global_batch_size=window)
        yield f"{fewer.accumulation_steps} accumulation step(s), if {fewer.micro_batch_size} samples fit at once", fewer
    if size > 1:
        steps = -(-largest // (size - 1))
        more = Layout.from_sizes(processes, -(-largest // steps), global_batch_size=window)
        yield f"{more.accumulation_steps} accumulation steps, in less memory", more
    near: dict[int, str] = {}  # full micro-batches are equal shares too: the second reason replaces the first
    for unit, reason in ((processes, "all processes get equally much"), (processes * limit, "full micro-batches")):
        lower = window - window % unit
        near |= {other: reason for other in (lower, lower + unit) if window % unit and other}
    for other in sorted(near, key=lambda other: abs(other - window)):
        yield f"{near[other]}, {other // processes} samples each", Layout.from_sizes(processes, limit, global_batch_size=other)


def _factors(layout: Layout, base_batch_size: int) -> dict[str, float]:
    return {rule: scale(layout.window_size / base_batch_size) for rule, scale in SCALING_RULES.items()}


def _flags(layout: Layout) -> str:
    return f"--global_batch_size {layout.window_size} --per_device_train_batch_size {layout.micro_batch_size}"
