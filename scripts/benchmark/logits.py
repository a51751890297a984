"""A causal LM step with a large vocabulary: Trainer, which makes all logits, against hf_ga."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmark.arms import BY_LENGTH, TRAINER, Measurement
from benchmark.figures import Bound, Section
from benchmark.setting import Sample, Setting
from benchmark.speed import Speed, run_arms

VOCABULARY, MICRO_BATCH, NUM_WINDOWS = 50_000, 16, 2
MOST_MEMORY, MOST_TIME = 0.5, 1.0


def measure_logits(setting: Setting, samples: Sequence[Sample], rounds: int) -> Speed:
    """Windows of one micro-batch of samples of one length; memory and time in processes of their own."""
    setting = replace(setting, vocabulary=VOCABULARY, micro_batch_size=MICRO_BATCH, window_size=MICRO_BATCH)
    samples = list(samples[: NUM_WINDOWS * MICRO_BATCH])
    targets = sum(len(sample["input_ids"]) - 1 for sample in samples)
    return run_arms(setting, samples, targets, {TRAINER: rounds, BY_LENGTH: rounds}, "large vocabulary")


def logits_section(speed: Speed) -> Section:
    """Peak memory of training, above that of the process before, and seconds a step."""
    setting = speed.setting
    if refused := [f"{arm}: not run: {m.refused}" for arm, measured in speed.rounds.items() for m in measured if m.refused]:
        ran = Bound(f"{setting.model}, large vocabulary: arms that ran", len(speed.rounds) - len(refused), len(speed.rounds))
        return Section(f"{setting.model}: vocabulary of {setting.vocabulary:,}", (), [], [ran], refused)
    above = {arm: statistics.median(_above(m) for m in measured) / 2**20 for arm, measured in speed.rounds.items()}
    seconds = {arm: statistics.median(m.seconds for m in measured) / NUM_WINDOWS for arm, measured in speed.rounds.items()}
    cpu = {arm: statistics.median(m.cpu_seconds for m in measured) / NUM_WINDOWS for arm, measured in speed.rounds.items()}
    section = Section(
        f"{setting.model}: vocabulary of {setting.vocabulary:,}, micro-batch of {MICRO_BATCH} x {setting.max_length} tokens",
        ("arm", "memory that training adds, MiB", "of Trainer's", "seconds a step", "of Trainer's", "CPU s", "of Trainer's"),
        [[arm, *(v for of in (above, seconds, cpu) for v in (of[arm], of[arm] / of[TRAINER]))] for arm in speed.rounds],
        figures={arm: [m.to_dict() for m in measured] for arm, measured in speed.rounds.items()},
    )
    memory, time = above[BY_LENGTH] / above[TRAINER], seconds[BY_LENGTH] / seconds[TRAINER]
    section.bounds.append(Bound(f"{setting.model}, large vocabulary: memory of Trainer's", memory, MOST_MEMORY, at_most=True))
    section.bounds.append(Bound(f"{setting.model}, large vocabulary: time of Trainer's", time, MOST_TIME, at_most=True))
    return section


def _above(measurement: Measurement) -> int:
    return measurement.peak_memory - measurement.memory_before
