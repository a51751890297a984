"""Batch arithmetic: processes x micro-batch size x accumulation steps = global batch size."""

from dataclasses import dataclass

from hf_ga.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """How a window is split over processes and micro-batches.

    Only `window_size` affects the result of training. The other sizes affect memory and speed only.

    Attributes:
        num_processes: Number of processes (devices).
        micro_batch_size: Maximum number of samples in one forward on one process. If windows are
            planned by length, shorter samples may share larger micro-batches.
        accumulation_steps: Number of micro-batches per process in a full window. If windows are
            planned by length, the number for a window whose samples are all as long as the longest.
        window_size: Number of samples in a full window over all processes (global batch size).
    """

    num_processes: int
    micro_batch_size: int
    accumulation_steps: int
    window_size: int

    @classmethod
    def from_sizes(
        cls,
        num_processes: int,
        micro_batch_size: int,
        accumulation_steps: int | None = None,
        global_batch_size: int | None = None,
    ) -> "Layout":
        """Make the layout of a window from the sizes that the user set; derive those that are None.

        Args:
            num_processes: Number of processes (devices).
            micro_batch_size: Maximum number of samples in one forward on one process.
            accumulation_steps: Number of micro-batches per process in a window. None: the smallest
                number that reaches `global_batch_size`, or 1 if that is None, too.
            global_batch_size: Number of samples in a window over all processes. It need not be a
                multiple of the other sizes; micro-batches are then uneven. None: the product of the
                other sizes.

        Raises:
            ConfigError: If a size is below 1, or `accumulation_steps` is not the number of steps
                that `global_batch_size` needs.

        >>> Layout.from_sizes(1, 10, global_batch_size=64).accumulation_steps
        7
        """
        sizes_by_name = {
            "the number of processes": num_processes,
            "per_device_train_batch_size": micro_batch_size,
            "gradient_accumulation_steps": accumulation_steps,
            "global_batch_size": global_batch_size,
        }
        for name, value in sizes_by_name.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        samples_per_step = num_processes * micro_batch_size
        if global_batch_size is None:
            global_batch_size = samples_per_step * (accumulation_steps or 1)
        needed = -(-global_batch_size // samples_per_step)  # rounded up
        if accumulation_steps is not None and accumulation_steps != needed:
            raise ConfigError(
                f"global_batch_size {global_batch_size} cannot be reached with "
                f"gradient_accumulation_steps {accumulation_steps}: {num_processes} processes x "
                f"{micro_batch_size} samples x {accumulation_steps} steps = "
                f"{samples_per_step * accumulation_steps}. Leave gradient_accumulation_steps out "
                f"(it would be {needed}), or change one of the sizes."
            )
        return cls(num_processes, micro_batch_size, needed, global_batch_size)

    def __str__(self) -> str:
        """Describe the layout, as in "window of 64 samples = 2 processes x 4 micro-batches x 8"."""
        processes = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        steps = self.accumulation_steps
        micro_batches = "1 micro-batch" if steps == 1 else f"{steps} micro-batches"
        size = str(self.micro_batch_size)
        if self.num_processes * steps * self.micro_batch_size != self.window_size:
            size = f"at most {size}"
        return f"window of {self.window_size} samples = {processes} x {micro_batches} x {size}"
