"""Split a global batch exactly over the available devices: `plan_batch`."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hf_ga.exact.layout import Layout
from hf_ga.exact.plan import plan_window


@dataclass(frozen=True)
class BatchPlan:
    """An exact layout of a global batch. `str()` lists its facts.

    Attributes:
        layout: Processes, largest micro-batch, accumulation steps, global batch.
        nodes: Machines.
        devices_per_node: Processes on each of them.
        shares: {sizes of the micro-batches of a process: number of such processes}.
    """

    layout: Layout
    nodes: int
    devices_per_node: int
    shares: dict[tuple[int, ...], int]

    def __str__(self) -> str:
        return "\n".join(f"{name:<21}{fact}" for name, fact in self._facts())

    def _facts(self) -> Iterable[tuple[str, str]]:
        window = self.layout.window_size
        processes = self.layout.num_processes
        limit = self.layout.micro_batch_size
        text = f"{window} samples in each optimizer step, none added, dropped or repeated"
        yield "global batch", text
        yield "processes", f"{processes} = {self.nodes} node(s) x {self.devices_per_node} device(s)"
        for sizes, count in self.shares.items():
            counted = Counter(sizes).items()
            micro_batches = " + ".join(f"{number} x {size}" for size, number in counted) or "none"
            text = f"{count} process(es) x {sum(sizes)}, in micro-batches: {micro_batches}"
            yield "samples", text
        full_micro_batches = window / (processes * limit)
        steps = self.layout.accumulation_steps
        yield "accumulation steps", f"{steps} (full micro-batches: {full_micro_batches:.4g})"
        balance = window / (processes * max(map(sum, self.shares)))
        yield "balance", f"{balance:.1%} of the device time is used if all samples cost the same"
        flags = f"--global_batch_size {window} --per_device_train_batch_size {limit}"
        launch = " ".join(launch_flags(self.nodes, self.devices_per_node))
        yield "command", f"accelerate launch {launch} scripts/finetune.py {flags}"


def plan_batch(
    global_batch_size: int,
    *,
    nodes: int = 1,
    devices_per_node: int = 1,
    per_device_train_batch_size: int,
) -> BatchPlan:
    """Split a global batch exactly over the available devices with `plan_window`; the sizes need
    not divide evenly.

    Args:
        global_batch_size: Samples in one optimizer step over all processes.
        nodes: Machines.
        devices_per_node: Processes on each of them.
        per_device_train_batch_size: Maximum samples in one micro-batch.

    Raises:
        ConfigError: If a size is below 1.

    >>> plan_batch(3072, nodes=30, devices_per_node=8, per_device_train_batch_size=10).shares
    {(7, 6): 192, (6, 6): 48}
    """
    layout = Layout.from_sizes(
        nodes * devices_per_node, per_device_train_batch_size, global_batch_size=global_batch_size
    )
    plan = plan_window(global_batch_size, layout.num_processes, per_device_train_batch_size)
    return BatchPlan(
        layout, nodes, devices_per_node, dict(Counter(tuple(map(len, share)) for share in plan))
    )


def launch_flags(nodes: int, processes_per_node: int) -> list[str]:
    """Return the flags of `accelerate launch` that all nodes share."""
    num_processes = nodes * processes_per_node
    flags = ["--num_machines", str(nodes), "--num_processes", str(num_processes)]
    if num_processes == 1:
        return flags
    return ["--multi_gpu", *flags]  # several processes, on a CPU too
