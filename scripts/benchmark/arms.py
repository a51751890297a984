"""The arms by name, and what is measured of one: each runs an epoch of the same samples with the same model."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmark import loops, trainers
from benchmark.lap import Lap, Refused
from benchmark.meters import memory_now, peak_memory
from benchmark.samples import collate_function
from benchmark.setting import Sample, Setting, build_model, count_parameters

TRAINER, GROUPED, REBALANCED = "Trainer", "Trainer, group_by_length", "Trainer, batch_rebalance"
UNSORTED, BY_LENGTH, PACKED = "hf_ga, unsorted", "hf_ga, by length", "hf_ga, packed"
ARMS: dict[str, Callable[[Lap], None]] = {
    TRAINER: trainers.default,
    GROUPED: trainers.group_by_length,
    REBALANCED: trainers.batch_rebalance,
    "TRL SFTTrainer": trainers.sft,
    "TRL SFTTrainer, padding-free": trainers.sft_padding_free,
    "raw Accelerate loop": loops.accelerate_loop,
    UNSORTED: loops.unsorted,
    BY_LENGTH: loops.by_length,
    PACKED: loops.packed,
}
HF_GA = (UNSORTED, BY_LENGTH, PACKED)
# Those that the bounds on real lengths are about; the others are there to be seen.
COMPARED = (TRAINER, GROUPED, REBALANCED, BY_LENGTH, PACKED)


@dataclass
class Measurement:
    """One epoch of one arm.

    Attributes:
        seconds: of all its windows, from the first request for data to the end of the last step. inside_seconds: of these, in
            forward and backward. cpu_seconds: of all threads.
        samples: handed out in it. each_once: whether these were all samples, once each.
        real_tokens, padded_tokens: of their batches. num_body, num_head: see `count_parameters`.
        peak_memory, memory_before: bytes; before is after imports, data and the model's construction. warmup_peak: see `Lap`.
        refused: why there is nothing of the above, in a line.
    """

    seconds: float = 0.0
    inside_seconds: float = 0.0
    cpu_seconds: float = 0.0
    samples: int = 0
    each_once: bool = False
    real_tokens: int = 0
    padded_tokens: int = 0
    num_body: int = 0
    num_head: int = 0
    peak_memory: int = 0
    memory_before: int = 0
    warmup_peak: int = 0
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_arm(setting: Setting, arm: str, samples: Sequence[Sample], turn: Connection | None = None) -> Measurement:
    """Run an arm in this process, which should be its own: peak memory is that of the process.

    Args:
        turn: given, each window waits for it: see `run_in_turns`.
    """
    torch.set_num_threads(setting.num_threads)
    model = build_model(setting)
    num_body, num_head = count_parameters(model)
    gc.collect()
    before = memory_now(setting.device)
    lap = Lap(setting, model, list(samples), collate_function(setting), turn)
    try:
        ARMS[arm](lap)
    except Refused as refusal:
        return Measurement(refused=" ".join(str(refusal).split()))
    except torch.OutOfMemoryError:
        return Measurement(refused="the device's memory is too small for it")
    return Measurement(
        seconds=lap.stopwatch.seconds,
        inside_seconds=lap.stopwatch.inside_seconds,
        cpu_seconds=lap.cpu_seconds,
        samples=len(lap.collate.ids),
        each_once=sorted(lap.collate.ids) == [sample["id"] for sample in samples],
        real_tokens=lap.collate.real_tokens,
        padded_tokens=lap.collate.padded_tokens,
        num_body=num_body,
        num_head=num_head,
        peak_memory=peak_memory(setting.device),
        memory_before=before,
        warmup_peak=lap.warmup_peak,
    )
