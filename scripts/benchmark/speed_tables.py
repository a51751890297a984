"""Medians, ratios and bounds of whole windows."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmark.arms import BY_LENGTH, GROUPED, PACKED, REBALANCED, TRAINER, Measurement
from benchmark.figures import Bound, Section
from benchmark.setting import useful_flops
from benchmark.speed import Speed

OURS, THEIRS = (BY_LENGTH, PACKED), (TRAINER, GROUPED, REBALANCED)
DEFAULT = {"cpu": PACKED, "cuda": BY_LENGTH}  # what `finetune` does by itself: the bounds are about it
# At least so many times Trainer's default, by device; and the better of its two strategies by length.
TIMES_TRAINER, TIMES_BEST = {"cpu": 3.0, "cuda": 2.0}, 1.15
UNIFORM_SHARE, MOST_OUTSIDE = 0.98, 0.05
EFFICIENCY, EFFICIENCY_AIM = 0.58, 0.75
HEADER = (
    "arm",
    "rounds",
    "real tokens/s",
    "x Trainer",
    "x better of the two by length",
    "CPU s",
    "padded / real",
    "MiB that training adds",
    "outside fwd + bwd %",
    "useful FLOPs / matrix product",
)


def ragged_section(speed: Speed) -> Section:
    """On real lengths: all bounds."""
    arms = summarise(speed)
    ours = _default(arms, speed.setting.device)
    setting, rate = speed.setting, statistics.median(speed.product_rates)
    section = _section(f"{setting.model}: {speed.num_samples} ragged samples", speed, arms)
    if ours is None:
        section.bounds.append(Bound(f"{setting.model}: arms of hf_ga that ran", 0, 1))
        return section
    best, name = arms[ours], f"{setting.model}, {ours}"
    section.bounds.append(Bound(f"{name}: saw each sample once", best["each_once"], 1))
    if best["times_trainer"]:
        section.bounds.append(Bound(f"{name}: times Trainer's default", best["times_trainer"], TIMES_TRAINER[setting.device]))
    if best["times_best"]:
        section.bounds.append(Bound(f"{name}: times the better Trainer by length", best["times_best"], TIMES_BEST))
    if theirs := [arms[arm]["above"] for arm in THEIRS if "above" in arms.get(arm, {})]:
        what = f"{name}: memory that training adds, over the least of Trainer's"
        section.bounds.append(Bound(what, best["above"] / min(theirs), 1.0, at_most=True))
    section.bounds.append(Bound(f"{name}: share outside forward and backward", best["outside"], MOST_OUTSIDE, at_most=True))
    if setting.model == "gpt" and setting.device == "cpu":
        what = f"{name}: useful FLOPs over {rate / 1e9:.0f} GFLOP/s"
        section.bounds.append(Bound(what, best["efficiency"], EFFICIENCY))
        section.bounds.append(Bound(what, best["efficiency"], EFFICIENCY_AIM, is_aim=True))
    return section


def uniform_section(speed: Speed) -> Section:
    """On lengths within 10 % of each other there is little to gain, and nothing may be lost."""
    arms = summarise(speed)
    section = _section(f"{speed.setting.model}: {speed.num_samples} samples of nearly one length", speed, arms)
    ours = _default(arms, speed.setting.device)
    if ours and (others := [row["tokens_per_second"] for arm, row in arms.items() if arm not in OURS and "seconds" in row]):
        what = f"{speed.setting.model}, {ours}: tokens/s on lengths within 10 %, over the fastest other arm"
        section.bounds.append(Bound(what, arms[ours]["tokens_per_second"] / max(others), UNIFORM_SHARE))
    return section


def summarise(speed: Speed) -> dict[str, dict[str, Any]]:
    """Of each arm the medians over its rounds and what follows from them; `refused` alone where it is.

    tokens_per_second: real ones. padding: padded over real tokens. peak and above: MiB, of the whole process and what training
    adds. outside: share of the time outside forward and backward. efficiency: useful operations a second over those of large
    matrix products. times_trainer and times_best: tokens a second over those of Trainer's default, and of the better of its two
    strategies by length.
    """
    arms = {arm: _medians(speed, measured) for arm, measured in speed.rounds.items()}
    rate = {arm: row["tokens_per_second"] for arm, row in arms.items() if "refused" not in row}
    best = max((rate[arm] for arm in (GROUPED, REBALANCED) if arm in rate), default=None)
    for arm, value in rate.items():
        arms[arm]["times_trainer"] = value / rate[TRAINER] if TRAINER in rate else None
        arms[arm]["times_best"] = None if best is None else value / best
    return arms


def _medians(speed: Speed, measured: Sequence[Measurement]) -> dict[str, Any]:
    if refused := [m.refused for m in measured if m.refused]:
        return {"refused": refused[0]}
    seconds, first = statistics.median(m.seconds for m in measured), measured[0]
    flops = useful_flops(first.num_body, first.num_head, first.real_tokens, speed.targets)
    return {
        "seconds": seconds,
        "all_seconds": [m.seconds for m in measured],
        "cpu_seconds": statistics.median(m.cpu_seconds for m in measured),
        "tokens_per_second": first.real_tokens / seconds,
        "padding": first.padded_tokens / first.real_tokens,
        "peak": statistics.median(m.peak_memory for m in measured) / 2**20,
        "above": statistics.median(m.peak_memory - m.memory_before for m in measured) / 2**20,
        "outside": statistics.median(1 - m.inside_seconds / m.seconds for m in measured),
        "useful_flops": flops,
        "efficiency": flops / seconds / statistics.median(speed.product_rates),
        "each_once": all(m.each_once for m in measured),
    }


def _section(title: str, speed: Speed, arms: dict[str, dict[str, Any]]) -> Section:
    section = Section(title, HEADER, [_row(arm, row) for arm, row in arms.items() if "refused" not in row])
    section.notes += [f"{arm}: not run: {row['refused']}" for arm, row in arms.items() if "refused" in row]
    section.notes += [f"{arm}: did not see each sample once" for arm, row in arms.items() if row.get("each_once") is False]
    rates = {"product_rates": speed.product_rates, "targets": speed.targets, "num_samples": speed.num_samples}
    measured = {arm: [m.to_dict() for m in of_arm] for arm, of_arm in speed.rounds.items()}
    section.figures = {"setting": vars(speed.setting), **rates, "arms": arms, "rounds": measured}
    return section


def _row(arm: str, row: dict[str, Any]) -> list[Any]:
    names = ("tokens_per_second", "times_trainer", "times_best", "cpu_seconds", "padding", "above")
    return [arm, len(row["all_seconds"]), *(row[name] for name in names), f"{100 * row['outside']:.1f}", row["efficiency"]]


def _default(arms: dict[str, dict[str, Any]], device: str) -> str | None:
    """The default arm, or another of hf_ga's where that did not run."""
    return next((name for name in (DEFAULT[device], *OURS) if "seconds" in arms.get(name, {})), None)
