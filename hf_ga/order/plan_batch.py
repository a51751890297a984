"""`plan_batch`: show how a global batch is split exactly over the available devices."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hf_ga.order.layout import Layout
from hf_ga.order.plan import plan_window


@dataclass(frozen=True)
class BatchPlan:
    """An exact split of a global batch over nodes and devices. `str()` prints it as a table.

    Attributes:
        layout: Numbers of processes and accumulation steps, sizes of micro-batch and global batch.
        nodes: Number of machines.
        devices_per_node: Number of processes on each machine.
        shares: {sizes of the micro-batches of a process: number of processes with these sizes}.
    """

    layout: Layout
    nodes: int
    devices_per_node: int
    shares: dict[tuple[int, ...], int]

    def __str__(self) -> str:
        """Return the split of the global batch as a table of several lines, for the terminal."""
        return "\n".join(f"{label:<21}{text}" for label, text in self._rows())

    def _rows(self) -> Iterable[tuple[str, str]]:
        """Yield the rows of the table, (label, text): global batch size, processes, samples and
        micro-batches of each, accumulation steps, load balance, a launch command.
        """
        window = self.layout.window_size
        processes = self.layout.num_processes
        limit = self.layout.micro_batch_size
        text = f"{window} samples in each optimizer step, none added, dropped or repeated"
        yield "global batch", text
        yield "processes", f"{processes} = {self.nodes} node(s) x {self.devices_per_node} device(s)"
        for sizes, count in self.shares.items():
            count_by_size = Counter(sizes)
            micro_batches = " + ".join(f"{num} x {size}" for size, num in count_by_size.items())
            micro_batches = micro_batches or "none"
            text = f"{count} process(es) x {sum(sizes)}, in micro-batches: {micro_batches}"
            yield "samples", text
        full_micro_batches = window / (processes * limit)
        steps = self.layout.accumulation_steps
        yield "accumulation steps", f"{steps} (full micro-batches: {full_micro_batches:.4g})"
        largest_share = max(sum(sizes) for sizes in self.shares)
        balance = window / (processes * largest_share)
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
    """Split a global batch exactly over the available devices, even if the sizes do not divide.

    Args:
        global_batch_size: Number of samples in one optimizer step over all processes.
        nodes: Number of machines.
        devices_per_node: Number of processes on each machine.
        per_device_train_batch_size: Maximum number of samples in one micro-batch.

    Returns:
        A `BatchPlan`. Print it to see the split and a command that trains with it.

    Raises:
        ConfigError: If a size is below 1.

    >>> plan_batch(3072, nodes=30, devices_per_node=8, per_device_train_batch_size=10).shares
    {(7, 6): 192, (6, 6): 48}
    """
    layout = Layout.from_sizes(
        nodes * devices_per_node, per_device_train_batch_size, global_batch_size=global_batch_size
    )
    plan = plan_window(global_batch_size, layout.num_processes, per_device_train_batch_size)
    sizes_per_process = [tuple(len(micro_batch) for micro_batch in share) for share in plan]
    return BatchPlan(layout, nodes, devices_per_node, shares=dict(Counter(sizes_per_process)))


def launch_flags(nodes: int, processes_per_node: int) -> list[str]:
    """Return the flags of `accelerate launch` that are the same on all nodes, for the command that
    `plan_batch` prints.

    Args:
        nodes: Number of machines.
        processes_per_node: Number of processes on each machine.
    """
    num_processes = nodes * processes_per_node
    flags = ["--num_machines", str(nodes), "--num_processes", str(num_processes)]
    if num_processes == 1:
        return flags
    return ["--multi_gpu", *flags]  # starts several processes, on CPUs too
