"""From a wanted global batch and what there is to an exact layout: `plan_batch`."""

from collections.abc import Iterable
from dataclasses import dataclass

from hf_ga.errors import ConfigError
from hf_ga.exact.layout import SCALING_RULES, Layout, scaled_learning_rate

# Whose rule it is; see SCALING_RULES.
OPTIMIZER_OF_RULE = {"linear": "SGD", "sqrt": "Adam"}


@dataclass(frozen=True)
class Share:
    """What some processes have in common.

    Attributes:
        num_processes: how many they are.
        samples: samples of a full window that each of them gets.
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
    """Another layout on the same processes.

    Attributes:
        reason: what is better about it.
        layout: its sizes.
        learning_rate_factors: {rule: factor of the rate that goes with its window}; 1 where the window stays.
        learning_rates: {rule: rate}; None where no base rate was given.
    """

    reason: str
    layout: Layout
    learning_rate_factors: dict[str, float]
    learning_rates: dict[str, float] | None

    def __str__(self) -> str:
        return f"{self.layout.window_size} samples, {self.reason} ({' '.join(_flags(self.layout))})"


@dataclass(frozen=True)
class BatchPlan:
    """How a wanted global batch is computed exactly. `str()` gives one line for each fact.

    Attributes:
        layout: processes, most samples in a micro-batch, accumulation steps, samples in a window (the wanted batch).
        nodes: machines.
        devices_per_node: processes on each of them.
        shares: who gets how much; together the window.
        accumulation_ratio: window / (processes x micro-batch limit). Where it is no whole number, full micro-batches cannot make
            the window.
        balance: share of the device time in which no process waits for a larger one, if all samples cost the same.
        base_batch_size: the window that the base learning rate was found with.
        learning_rate_factors: {rule: factor of the base rate for the wanted window}.
        learning_rates: {rule: rate}; None where no base rate was given.
        launch_flags: flags of `accelerate launch` (for several nodes without the flags that differ between clusters).
        training_flags: flags of hf_ga.
        alternatives: other layouts, nearest windows first.
    """

    layout: Layout
    nodes: int
    devices_per_node: int
    shares: tuple[Share, ...]
    accumulation_ratio: float
    balance: float
    base_batch_size: int
    learning_rate_factors: dict[str, float]
    learning_rates: dict[str, float] | None
    launch_flags: tuple[str, ...]
    training_flags: tuple[str, ...]
    alternatives: tuple[Alternative, ...]

    def __str__(self) -> str:
        return "\n".join((*self._facts(), *self._alternatives()))

    def _facts(self) -> Iterable[str]:
        layout, processes = self.layout, self.layout.num_processes
        yield f"window: {layout.window_size} samples in each optimizer step"
        yield f"processes: {processes} = {self.nodes} node(s) x {self.devices_per_node} device(s)"
        yield f"samples per process: {', '.join(map(str, self.shares))}"
        sum_of_shares = " + ".join(f"{share.num_processes} x {share.samples}" for share in self.shares)
        yield f"exact: {sum_of_shares} = {layout.window_size}; no sample added, dropped or repeated, each target weighs the same"
        yield f"accumulation: {layout.accumulation_steps} micro-batch(es) of at most {layout.micro_batch_size} on a process"
        if layout.window_size % (processes * layout.micro_batch_size):
            yield f"not possible with full micro-batches only: {_rounded(layout)}"
        yield f"balance: {100 * self.balance:.1f} % of the device time is used where all samples cost the same"
        yield "samples of different lengths: a run shares out work, not samples, and of shorter ones more fit into a micro-batch"
        if self.learning_rates or self.base_batch_size != layout.window_size:
            yield f"learning rate: {_rates(self.learning_rate_factors, self.learning_rates)}, found with {self.base_batch_size}"
        yield f"launch: accelerate launch {' '.join(self.launch_flags)} scripts/finetune.py {' '.join(self.training_flags)}"
        if self.nodes > 1:
            yield "each node also needs --machine_rank, --main_process_ip and --main_process_port (see scripts/submit_slurm.py)"

    def _alternatives(self) -> Iterable[str]:
        for other in self.alternatives:
            same = other.layout.window_size == self.layout.window_size
            rates = f"learning rate {_rates(other.learning_rate_factors, other.learning_rates)}"
            yield f"or {other}: {'the same update' if same else rates}"


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
    """Lay a wanted global batch out exactly over the devices that there are.

    Samples per process differ by at most one, and so do a process's micro-batches: these are the numbers that `plan_window` makes
    of each full window, and `plan_by_length` where all samples are equally long. Of shorter samples it puts more into the same
    memory, so a process has fewer micro-batches, and as much work as the others instead of as many samples.

    Args:
        global_batch_size: samples wanted in one optimizer step over all processes.
        nodes: machines.
        devices_per_node: devices (processes) on each machine.
        per_device_train_batch_size: most samples in one micro-batch; or give the next two.
        tokens_per_micro_batch: most tokens in one micro-batch, padding included.
        sequence_length: tokens of the longest sample; only with tokens_per_micro_batch.
        learning_rate: peak rate that was found with base_batch_size samples a step.
        base_batch_size: default: the wanted batch.

    Raises:
        ConfigError: a size below 1, no limit or two of them, or a sample longer than a micro-batch may be.

    >>> print(plan_batch(3072, nodes=30, devices_per_node=8, per_device_train_batch_size=10).shares[0])
    192 x 13 (in micro-batches: 7 + 6)
    """
    sizes = {"global_batch_size": global_batch_size, "nodes": nodes, "devices_per_node": devices_per_node}
    _check(sizes | {"base_batch_size": base_batch_size}, learning_rate)
    limit = _micro_batch_limit(per_device_train_batch_size, tokens_per_micro_batch, sequence_length)
    layout = Layout.from_sizes(nodes * devices_per_node, limit, global_batch_size=global_batch_size)
    base = base_batch_size or global_batch_size
    largest = -(-global_batch_size // layout.num_processes)
    return BatchPlan(
        layout,
        nodes,
        devices_per_node,
        _shares(layout),
        accumulation_ratio=global_batch_size / (layout.num_processes * limit),
        balance=global_batch_size / (layout.num_processes * largest),
        base_batch_size=base,
        learning_rate_factors=_factors(layout, base),
        learning_rates=_learning_rates(layout, base, learning_rate),
        launch_flags=tuple(launch_flags(nodes, devices_per_node)),
        training_flags=tuple(_flags(layout)),
        alternatives=tuple(
            Alternative(reason, other, _factors(other, base), _learning_rates(other, base, learning_rate))
            for reason, other in _alternatives(layout)
        ),
    )


def launch_flags(nodes: int, processes_per_node: int) -> list[str]:
    """Flags of `accelerate launch` that are the same on all nodes.

    `--multi_gpu` means several processes, on whatever device: with `--cpu`, Accelerate (1.15) starts one.
    """
    several = ["--multi_gpu"] if nodes * processes_per_node > 1 else []
    return [*several, "--num_machines", str(nodes), "--num_processes", str(nodes * processes_per_node)]


def _check(sizes: dict[str, int | None], learning_rate: float | None) -> None:
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.")
    if learning_rate is not None and not 0 < learning_rate < float("inf"):
        raise ConfigError(f"learning_rate must be greater than 0 and finite, got {learning_rate}.")


def _micro_batch_limit(samples: int | None, tokens: int | None, sequence_length: int | None) -> int:
    """Most samples in a micro-batch, from whichever limit is given."""
    _check({"per_device_train_batch_size": samples, "tokens_per_micro_batch": tokens, "sequence_length": sequence_length}, None)
    if (samples is None) == (tokens is None):
        raise ConfigError(
            "the limit of a micro-batch is needed once: give per_device_train_batch_size (samples), or tokens_per_micro_batch "
            f"with sequence_length; got {samples} samples and {tokens} tokens."
        )
    if (tokens is None) != (sequence_length is None):
        raise ConfigError(
            "tokens_per_micro_batch and sequence_length need each other: give both, or per_device_train_batch_size alone; "
            f"got {tokens} and {sequence_length}."
        )
    if samples is not None:
        return samples
    if tokens < sequence_length:
        raise ConfigError(
            f"a sample of sequence_length {sequence_length} does not fit into tokens_per_micro_batch {tokens}: allow at least "
            "so many tokens, or cut samples shorter."
        )
    return tokens // sequence_length


def _shares(layout: Layout) -> tuple[Share, ...]:
    """Larger shares first."""
    samples, larger = divmod(layout.window_size, layout.num_processes)
    groups = ((larger, samples + 1), (layout.num_processes - larger, samples))
    return tuple(Share(count, size, _cut(size, layout.micro_batch_size)) for count, size in groups if count)


def _cut(samples: int, limit: int) -> dict[int, int]:
    """{size: number} of as few micro-batches as the limit allows, sizes differing by at most one."""
    parts = -(-samples // limit)
    if not parts:
        return {}
    size, larger = divmod(samples, parts)
    return {size: count for size, count in ((size + 1, larger), (size, parts - larger)) if count}


def _alternatives(layout: Layout) -> Iterable[tuple[str, Layout]]:
    """Same window with another accumulation, then other windows; each once."""
    window, processes, limit = layout.window_size, layout.num_processes, layout.micro_batch_size
    largest = -(-window // processes)
    size = -(-largest // layout.accumulation_steps)
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


def _learning_rates(layout: Layout, base_batch_size: int, learning_rate: float | None) -> dict[str, float] | None:
    if learning_rate is None:
        return None
    return {rule: scaled_learning_rate(learning_rate, rule, base_batch_size, layout.window_size) for rule in SCALING_RULES}


def _rates(factors: dict[str, float], rates: dict[str, float] | None) -> str:
    """One phrase: the rules, as factor, and as rate where there is one."""
    shown = [
        f"x {factor:.4g} ({rule}, for {OPTIMIZER_OF_RULE[rule]})" + (f" = {rates[rule]:.4g}" if rates else "")
        for rule, factor in factors.items()
    ]
    return " or ".join(shown)


def _flags(layout: Layout) -> list[str]:
    return ["--global_batch_size", str(layout.window_size), "--per_device_train_batch_size", str(layout.micro_batch_size)]


def _rounded(layout: Layout) -> str:
    """What a whole number of accumulation steps would make of the window."""
    unit = layout.num_processes * layout.micro_batch_size
    steps = layout.window_size // unit
    near = [f"{count} step(s) give {count * unit}" for count in (steps, steps + 1) if count]
    product = f"{layout.num_processes} x {layout.micro_batch_size}"
    return f"{layout.window_size} / ({product}) = {layout.window_size / unit:.4g} steps; {', '.join(near)}"
