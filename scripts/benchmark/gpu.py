"""The sections of `scripts/gpu_report.py`."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator

import hf_ga
from benchmark.arms import ABLATION, DEFAULT, NATIVE, OPT_IN, SPEED, TRAINER, default
from benchmark.lap import measure_apart
from benchmark.peers import PEERS
from benchmark.report import WORTH_TIME, Bound, Section, ablation_section, added_memory, tokens_per_second
from benchmark.setting import SIZES, Setting, build_model
from hf_ga.exact.length_plan import ATTENTION_WIDTH, CPU_OVERHEAD, GPU_OVERHEAD


def peers_section(setting: Setting) -> Section:
    """hf_ga, all modes of Trainer, TRL, a plain loop; useful FLOPs over the measured peak of a matrix product."""
    name, measured = setting.model, measure_apart(setting, SPEED | PEERS[setting.model], f"{setting.model}, peers")
    rates = {arm: tokens_per_second(setting, of) for arm, of in measured.items()}
    share, ours = flops(setting) / setting.real_tokens / peak(setting), rates[DEFAULT]
    rows = [[arm, r, r / rates[TRAINER], r * share, measured[arm].padding, added_memory(measured[arm])] for arm, r in rates.items()]
    bounds = [
        Bound(f"{name}: tokens/s over Trainer's default", ours / rates[TRAINER], 2.0),
        Bound(f"{name}: over its best mode", ours / np.nanmax([rates[arm] for arm in rates if arm.startswith(TRAINER)]), 1.2),
        Bound(f"{name}: useful FLOPs over the peak", ours * share, 0.45),
    ]
    header = ("arm", "real tokens/s", "x Trainer", "of peak", "padded / real", "memory that training adds, MiB")
    return Section(f"{name}: {len(setting.samples)} ragged samples", header, rows, bounds)


def peak(setting: Setting) -> float:
    """FLOP/s of square matrix products."""
    on_gpu, low = setting.device == "cuda", setting.mixed_precision == "bf16"
    x = torch.ones(*[8192 if on_gpu else 512] * 2, dtype=torch.bfloat16 if low else torch.float32, device=setting.device)
    float((x @ x)[0, 0])  # waits for the device
    began = time.perf_counter()
    for _ in range(20):
        y = x @ x
    float(y[0, 0])
    return 40 * len(x) ** 3 / (time.perf_counter() - began)


def flops(setting: Setting) -> float:
    """Of an epoch without padding: 6 for each weight and token, 12 x width for each layer and pair of tokens that attend."""
    layers, width, _, words = SIZES[setting.size]
    causal = setting.model == "gpt"
    pairs = sum(len(sample["input_ids"]) ** 2 for sample in setting.samples) / (1 + causal)
    return 6 * (12 * layers * width**2 + causal * words * width) * setting.real_tokens + 12 * layers * width * pairs


def dropout_section(setting: Setting) -> Section:
    """torch's dropout in place of keyed."""
    section = ablation_section(setting, measure_apart(setting, {DEFAULT: default, NATIVE: ABLATION[NATIVE]}, "dropout"))
    section.bounds.append(
        Bound(f"{setting.model}: time with keyed over native dropout", 1 / section.rows[1][1], 1.02, at_most=True)
    )
    return section


def opt_in_section(setting: Setting) -> Section:
    """What was never tried on a GPU, without dropout. Each should become the default that passes for both models."""
    measured = measure_apart(replace(setting, dropout=0.0), {DEFAULT: default, **OPT_IN}, "opt-in")
    section = ablation_section(setting, measured)
    section.bounds = [
        Bound(f"{setting.model}: default if the gain in time passes: {row[0]}", 1 / row[1], WORTH_TIME) for row in section.rows[1:]
    ]
    return replace(
        section,
        title=f"{setting.model}: used in addition",
        header=("in addition", *section.header[1:-1]),
        rows=[row[:-1] for row in section.rows],
    )


def cost_section(setting: Setting) -> Section:
    """Least squares of relative errors: seconds of a micro-batch = a + b x tokens + c x samples x width^2."""
    on_gpu = setting.device == "cuda"
    widths, tokens = ((32, 128, 512), (512, 2048, 8192, 32768)) if on_gpu else ((8, 32, 64), (64, 128, 256))
    shapes = [(count // width, width) for count in tokens for width in widths]
    terms = np.array([(1, n * width, n * width**2) for n, width in shapes], float)
    in_use = (GPU_OVERHEAD if on_gpu else CPU_OVERHEAD, ATTENTION_WIDTH)
    rows, bounds = [["in use", *in_use, ""]], []
    for size in ("small", "base") if on_gpu else ("tiny",):
        seconds = seconds_of(replace(setting, size=size), shapes)
        a, b, c = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(shapes)), rcond=None)[0]
        rows.append([f"width {SIZES[size][1]}", a / b, b / c, float(np.abs(terms @ (a, b, c) / seconds - 1).max())])
        for constant, used, fitted in zip(("overhead", "attention width"), in_use, rows[-1][1:], strict=False):
            ratio = max(used / fitted, fitted / used) if fitted > 0 else np.nan
            bounds.append(
                Bound(f"{setting.model}, {rows[-1][0]}: {constant} stays if it is within a factor", ratio, 2, at_most=True)
            )
    return Section(
        f"{setting.model}: a micro-batch", ("constants", "overhead, tokens", "attention width", "largest error"), rows, bounds
    )


def seconds_of(setting: Setting, shapes: list[tuple[int, int]]) -> np.ndarray:
    """Of micro-batches of n samples of one width: half of a window of two, the median of three."""
    accelerator, times = Accelerator(cpu=setting.device == "cpu", mixed_precision=setting.mixed_precision), []
    model = accelerator.prepare(build_model(setting))
    proven = hf_ga.prove_targets(model, setting.samples[:64], setting.collate)
    for n, width in shapes:
        samples = [setting.samples[0] | {"input_ids": [5] * width}] * 2 * n
        sizes = {"per_device_batch_size": n, "global_batch_size": 2 * n}
        (window,) = hf_ga.WindowLoader(samples, setting.collate, accelerator=accelerator, **sizes)
        ends = [time.perf_counter()]
        for _ in range(4):
            float(hf_ga.backward_window(accelerator, model, window, targets=proven).loss)  # waits for the device
            ends.append(time.perf_counter())
        times.append(statistics.median(np.diff(ends)[1:]) / 2)
    return np.array(times)


SECTIONS: dict[str, Callable[[Setting], Section]] = {
    "peers": peers_section,
    "dropout": dropout_section,
    "opt_in": opt_in_section,
    "cost": cost_section,
}
