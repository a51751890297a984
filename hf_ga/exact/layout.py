"""Batch arithmetic: processes x micro-batch size x accumulation steps, and the window they make."""

from dataclasses import dataclass

from hf_ga.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """How a window is computed. Only `window_size` is part of what is trained; the rest is a matter
    of memory and speed.

    Attributes:
        num_processes: processes (devices).
        micro_batch_size: maximum samples in one forward on one process; of the longest samples if
            windows are planned by length.
        accumulation_steps: micro-batches per process in a full window; planned by length, where all
            samples are of the longest.
        window_size: samples in a full window over all processes (the global batch).
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
        """Derive what is left out; check what is given twice.

        Without `global_batch_size` the window is the product of the other three (accumulation
        steps: 1 if left out). With it, accumulation follows, and sizes that do not divide give
        uneven micro-batches.

        Raises:
            ConfigError: a size below 1, or a global batch that the given layout cannot reach.

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
        if global_batch_size is None:
            global_batch_size = num_processes * micro_batch_size * (accumulation_steps or 1)
        needed = -(-global_batch_size // (num_processes * micro_batch_size))
        if accumulation_steps not in (None, needed):
            raise ConfigError(
                f"global_batch_size {global_batch_size} cannot be reached with "
                f"gradient_accumulation_steps {accumulation_steps}: "
                f"{num_processes} processes x {micro_batch_size} samples x {accumulation_steps} "
                "steps = "
                f"{num_processes * micro_batch_size * accumulation_steps}. Leave "
                "gradient_accumulation_steps out (it would be "
                f"{needed}), or change one of the sizes."
            )
        return cls(num_processes, micro_batch_size, needed, global_batch_size)

    def __str__(self) -> str:
        processes = f"{self.num_processes} process{'es' * (self.num_processes > 1)}"
        micro_batches = (
            f"{self.accumulation_steps} micro-batch{'es' * (self.accumulation_steps > 1)}"
        )
        most = (
            ""
            if self.num_processes * self.accumulation_steps * self.micro_batch_size
            == self.window_size
            else "at most "
        )
        return (
            f"window of {self.window_size} samples = {processes} x {micro_batches} x "
            f"{most}{self.micro_batch_size}"
        )
