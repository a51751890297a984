"""The parts of the benchmark by name: each measures and returns its sections."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmark import logits, planning, profiles, speed, speed_tables, steps
from benchmark.apart import run_apart
from benchmark.arms import COMPARED
from benchmark.figures import Section
from benchmark.samples import count_targets, ragged_samples, uniform_samples
from benchmark.setting import Sample, Setting

UNIFORM_LENGTH = 64
# Steps of each split a round: of the setting's own samples, and of short ones, some of a second each, whose ratio is to be told to
# a few hundredths.
STEPS_OF_OWN, STEPS_OF_SHORT = 3, 12


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        settings: one for each model. num_samples: of an epoch. arms: their names. rounds: measurements of each; on real lengths
            of those that bounds are about, and `rounds_of_others` of the others.
        most_samples: of the largest dataset whose first window is waited for.
    """

    settings: list[Setting]
    num_samples: int
    arms: list[str]
    rounds: int
    rounds_of_others: int
    most_samples: int

    def ragged(self, setting: Setting) -> tuple[Setting, list[Sample]]:
        """Samples of the corpus, and the setting with as many labels as they have."""
        samples, num_labels = ragged_samples(setting, self.num_samples)
        return replace(setting, num_labels=max(num_labels, 2)), samples

    def even(self, setting: Setting, length: int, count: int) -> tuple[Setting, list[Sample]]:
        """Samples that all have the same length."""
        setting, samples = self.ragged(replace(setting, max_length=min(length, setting.max_length)))
        many = (samples * -(-count // len(samples)))[:count]
        return setting, uniform_samples(many, setting.max_length, shortest_share=1.0)


def run_speed(plan: Plan) -> list[Section]:
    """Real lengths."""
    found = []
    for setting in plan.settings:
        setting, samples = plan.ragged(setting)
        targets = count_targets(setting, samples)
        rounds = {arm: plan.rounds if arm in COMPARED else plan.rounds_of_others for arm in plan.arms}
        measured = speed.run_arms(setting, samples, targets, rounds, f"{setting.model}, ragged")
        found.append(speed_tables.ragged_section(measured))
    return found


def run_uniform(plan: Plan) -> list[Section]:
    """Lengths within 10 % of each other."""
    found = []
    for setting in plan.settings:
        setting, samples = plan.ragged(replace(setting, max_length=min(UNIFORM_LENGTH, setting.max_length)))
        samples = uniform_samples(samples, setting.max_length)
        targets, rounds = count_targets(setting, samples), dict.fromkeys(plan.arms, plan.rounds)
        title, in_turns = f"{setting.model}, nearly one length", setting.device == "cpu"  # a GPU may not hold all arms at once
        measured = speed.run_arms(setting, samples, targets, rounds, title, in_turns=in_turns)
        found.append(speed_tables.uniform_section(measured))
    return found


def run_splits(plan: Plan) -> list[Section]:
    """Windows in 1, 4 and 16 micro-batches: of the setting's samples, and of short ones."""
    found = []
    for whole in plan.settings:
        setting, samples = plan.ragged(whole)
        times = run_apart(steps.measure_splits, setting, samples, STEPS_OF_OWN * plan.rounds)
        found.append(steps.splits_section(setting, times, "samples padded to the longest of the window"))
        setting, samples = plan.even(whole, UNIFORM_LENGTH, whole.window_size)
        times = run_apart(steps.measure_splits, setting, samples, STEPS_OF_SHORT * plan.rounds)
        found.append(steps.splits_section(setting, times, f"samples of {setting.max_length} tokens"))
    return found


def run_dropout(plan: Plan) -> list[Section]:
    """Keyed against torch's own."""
    found = []
    for setting in plan.settings:
        setting, samples = plan.ragged(setting)
        times = run_apart(steps.measure_dropout, setting, samples, 2 * plan.rounds)
        found.append(steps.dropout_section(setting, times))
    return found


def run_logits(plan: Plan) -> list[Section]:
    """A large vocabulary, for the causal LM."""
    count = (1 + logits.NUM_WINDOWS) * logits.MICRO_BATCH
    causal = [setting for setting in plan.settings if setting.model == "gpt"]
    found = []
    for setting in causal:
        setting, samples = plan.even(setting, setting.max_length, count)
        found.append(logits.logits_section(logits.measure_logits(setting, samples, plan.rounds)))
    return found


def run_profile(plan: Plan) -> list[Section]:
    """Where the time of a window goes."""
    found = []
    for setting in plan.settings:
        setting, samples = plan.ragged(profiles.on_one_thread(setting))
        num_windows = min(profiles.NUM_WINDOWS, len(samples) // setting.window_size)
        some = samples[: num_windows * setting.window_size]
        seen = {arm: run_apart(profiles.profile_arm, setting, arm, some) for arm in profiles.PROFILED}
        found.append(profiles.profile_section(setting, seen, num_windows))
    return found


def run_plan(plan: Plan) -> list[Section]:
    """From a thousand samples to ten million."""
    sizes = [10**k for k in range(3, len(str(plan.most_samples)))]
    first = {size: [run_apart(planning.first_window, size) for _ in range(plan.rounds)] for size in sizes}
    return [planning.planning_section(first, run_apart(planning.planned_window, 10 * plan.rounds))]


SECTIONS: dict[str, Callable[[Plan], list[Section]]] = {
    "speed": run_speed,
    "uniform": run_uniform,
    "splits": run_splits,
    "dropout": run_dropout,
    "logits": run_logits,
    "profile": run_profile,
    "plan": run_plan,
}
