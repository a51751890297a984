"""Batch arithmetic: processes x micro-batch size x accumulation steps, and the window they make."""

from dataclasses import dataclass

from hf_ga.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """How a window is computed.

    Only `window_size` is part of what is trained; the rest is a matter of memory and speed.

    Attributes:
        num_processes: Processes (devices).
        micro_batch_size: Maximum samples in one forward on one process; of the longest samples if
            windows are planned by length.
        accumulation_steps: Micro-batches per process in a full window; if windows are planned by
            length, of one in which all samples are as long as the longest.
        window_size: Samples in a full window over all processes (the global batch).
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
        """Derive the sizes that are not given, and check the others.

        Args:
            num_processes: Processes (devices).
            micro_batch_size: Maximum samples in one forward on one process.
            accumulation_steps: Micro-batches per process in a window. None: they follow from
                `global_batch_size`, or are 1 without it.
            global_batch_size: Samples in a window over all processes. Sizes that do not divide it
                give uneven micro-batches. None: the product of the others.

        Raises:
            ConfigError: If a size is below 1, or the given steps do not reach the global batch.

        >>> Layout.from_sizes(1, 10, global_batch_size=64).accumulation_steps
        7
        """
        named = {
            "the number of processes": num_processes,
            "per_device_train_batch_size": micro_batch_size,
            "gradient_accumulation_steps": accumulation_steps,
            "global_batch_size": global_batch_size,
        }
        for name, value in named.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        samples_per_step = num_processes * micro_batch_size
        if global_batch_size is None:
            global_batch_size = samples_per_step * (accumulation_steps or 1)
        needed = -(-global_batch_size // samples_per_step)
        if accumulation_steps not in (None, needed):
            raise ConfigError(
                f"global_batch_size {global_batch_size} cannot be reached with "
                f"gradient_accumulation_steps {accumulation_steps}: {num_processes} processes x "
                f"{micro_batch_size} samples x {accumulation_steps} steps = "
                f"{samples_per_step * accumulation_steps}. Leave gradient_accumulation_steps out "
                f"(it would be {needed}), or change one of the sizes."
            )
        return cls(num_processes, micro_batch_size, needed, global_batch_size)

    def __str__(self) -> str:
        processes = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        steps = self.accumulation_steps
        micro_batches = "1 micro-batch" if steps == 1 else f"{steps} micro-batches"
        size = str(self.micro_batch_size)
        if self.num_processes * steps * self.micro_batch_size != self.window_size:
            size = f"at most {size}"
        return f"window of {self.window_size} samples = {processes} x {micro_batches} x {size}"
