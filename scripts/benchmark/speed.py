"""Whole windows: all arms in turn, each measurement in a process of its own, medians over the rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from benchmark.apart import ProcessEnded, run_apart, run_in_turns
from benchmark.arms import Measurement, measure_arm
from benchmark.meters import matrix_product_rate
from benchmark.setting import Sample, Setting


@dataclass
class Speed:
    """What was measured of all arms on the same samples.

    Attributes:
        rounds: of each arm its measurements, in the order of the rounds; one that says why, where an arm is refused.
        product_rates: floating-point operations a second of large matrix products, once a round.
    """

    setting: Setting
    num_samples: int
    targets: int
    rounds: dict[str, list[Measurement]]
    product_rates: list[float]


def run_arms(
    setting: Setting, samples: Sequence[Sample], targets: int, rounds: dict[str, int], title: str, *, in_turns: bool = False
) -> Speed:
    """Arm after arm, round after round; an arm that is refused is not asked again.

    Args:
        rounds: of each arm, in how many rounds it is measured.
        in_turns: the arms of a round take turns window by window, instead of epoch by epoch: for small differences.
    """
    result = Speed(setting, len(samples), targets, {arm: [] for arm in rounds}, [])
    with tqdm(total=sum(rounds.values()), desc=title, unit="arm", dynamic_ncols=True) as bar:
        for number in range(max(rounds.values())):
            result.product_rates.append(run_apart(product_rate, setting))
            due = [arm for arm, wanted in rounds.items() if number < wanted]
            running = [arm for arm in due if not any(m.refused for m in result.rounds[arm][:1])]
            bar.update(len(due) - len(running))
            for arms in [running] if in_turns else [[arm] for arm in running]:
                bar.set_postfix_str(", ".join(arms))
                for arm, measured in zip(arms, _measured(setting, arms, samples), strict=True):
                    result.rounds[arm].append(measured)
                bar.update(len(arms))
    return result


def product_rate(setting: Setting) -> float:
    """`matrix_product_rate` of the setting's device, threads and precision."""
    torch.set_num_threads(setting.num_threads)
    return matrix_product_rate(setting.device, setting.mixed_precision)


def _measured(setting: Setting, arms: Sequence[str], samples: Sequence[Sample]) -> list[Measurement]:
    """Of these arms, window by window in turn."""
    found = run_in_turns(measure_arm, [(setting, arm, samples) for arm in arms])
    return [Measurement(refused=str(each)) if isinstance(each, ProcessEnded) else each for each in found]
