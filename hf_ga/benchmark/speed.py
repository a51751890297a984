"""Whole windows: all arms in turn, each measurement in a process of its own, medians over the rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from hf_ga.benchmark.apart import ProcessEnded, run_apart
from hf_ga.benchmark.arms import HF_GA, Measurement, measure_arm
from hf_ga.benchmark.meters import matrix_product_rate
from hf_ga.benchmark.setting import Sample, Setting


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


def run_arms(setting: Setting, samples: Sequence[Sample], targets: int, rounds: dict[str, int], title: str) -> Speed:
    """Arm after arm, round after round; an arm that is refused is not asked again.

    Args:
        rounds: of each arm, in how many rounds it is measured.
    """
    result = Speed(setting, len(samples), targets, {arm: [] for arm in rounds}, [])
    with tqdm(total=sum(rounds.values()), desc=title, unit="arm", dynamic_ncols=True) as bar:
        for number in range(max(rounds.values())):
            result.product_rates.append(run_apart(product_rate, setting))
            for arm in [arm for arm, wanted in rounds.items() if number < wanted]:
                bar.set_postfix_str(arm)
                measured = result.rounds[arm]
                if not (measured and measured[0].refused):
                    measured.append(_measured(setting, arm, samples))
                bar.update()
    return result


def product_rate(setting: Setting) -> float:
    """`matrix_product_rate` of the setting's device, threads and precision."""
    torch.set_num_threads(setting.num_threads)
    return matrix_product_rate(setting.device, setting.mixed_precision)


def _measured(setting: Setting, arm: str, samples: Sequence[Sample]) -> Measurement:
    try:
        return run_apart(measure_arm, setting, arm, samples, as_finetune=arm in HF_GA)
    except ProcessEnded as error:
        return Measurement(refused=str(error))
