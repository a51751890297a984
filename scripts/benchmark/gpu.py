"""What `scripts/gpu_report.py` adds to the benchmark: a model's setting -> a table with its
targets.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import hf_ga
from benchmark.arms import (
    ABLATION,
    ACCELERATE_LOOP,
    DEFAULT,
    NATIVE,
    REBALANCED,
    SPEED,
    TRAINER,
    default,
)
from benchmark.lap import Measured, measure_apart
from benchmark.report import Bound, Section, ablation_section, speed_section
from benchmark.setting import SIZES, Setting, build_model
from benchmark.trainers import PADDING_FREE, PEERS, PLAIN
from hf_ga.exact.length_plan import ATTENTION_WIDTH, CPU_OVERHEAD, GPU_OVERHEAD
from hf_ga.training import Given, remember

# The number of kernels that are shown.
NUM_KERNELS = 25
# The arms that fit into the report's time: each starts a process, and waits for a GPU's libraries.
GPU_ARMS = (TRAINER, REBALANCED, PADDING_FREE, ACCELERATE_LOOP, DEFAULT, NATIVE)


def peers(setting: Setting) -> Section:
    """Measure hf_ga, all modes of Trainer, TRL and a plain loop, and useful FLOPs over the measured
    peak of a matrix product.
    """
    name = setting.model
    arms = SPEED | {NATIVE: ABLATION[NATIVE]}
    arms |= {arm: run for arm, run in PEERS.items() if name == "gpt" or arm == PLAIN}
    names = setting.arms or (GPU_ARMS if setting.device == "cuda" else tuple(arms))
    chosen = {arm: run for arm, run in arms.items() if arm in names}
    left_out = Measured([math.nan] * setting.epochs * setting.windows_per_epoch)
    measured = dict.fromkeys(arms, left_out) | measure_apart(setting, chosen, f"{name}, peers")
    section = speed_section(setting, measured)
    dtype, size = (torch.bfloat16, 8192) if setting.device == "cuda" else (torch.float32, 512)
    x = torch.randn(size, size, dtype=dtype, device=setting.device)
    share = flops_per_token(setting) * seconds(lambda: x @ x, setting) / (2 * size**3)
    rates = {arm: rate for arm, rate, *_ in section.rows}
    best = np.nanmax([rate for arm, rate in rates.items() if arm.startswith(TRAINER)])
    section.bounds = [
        Bound(f"{name}: tokens/s over Trainer's default", rates[DEFAULT] / rates[TRAINER], 2.0),
        Bound(f"{name}: tokens/s over Trainer's best mode", rates[DEFAULT] / best, 1.2),
        Bound(f"{name}: useful FLOPs over the peak", rates[DEFAULT] * share, 0.45),
    ]
    return replace(
        section,
        header=[*section.header, "of peak"],
        rows=[[*row, row[1] * share] for row in section.rows],
    )


def flops_per_token(setting: Setting) -> float:
    """Count the useful FLOPs of a token, without padding: 6 for each weight and token, 12 x width
    for each layer and pair of tokens that attend.
    """
    layers, width, _, words = SIZES[setting.size]
    is_causal = setting.model == "gpt"
    pairs = sum(len(sample["input_ids"]) ** 2 for sample in setting.samples)
    num_weights = 12 * layers * width**2
    if is_causal:
        pairs /= 2
        num_weights += words * width
    return 6 * num_weights + 12 * layers * width * pairs / setting.real_tokens


def dropout(setting: Setting) -> Section:
    """Measure torch's dropout in place of keyed dropout."""
    arms = {DEFAULT: default, NATIVE: ABLATION[NATIVE]}
    section = ablation_section(setting, measure_apart(setting, arms, "dropout"))
    _, row_of_native = section.rows
    share = 1 / row_of_native[1]
    title = f"{setting.model}: time of keyed over native dropout"
    return replace(section, bounds=[Bound(title, share, 1.02, at_most=True)])


def cost(setting: Setting) -> Section:
    """Fit the constants of the cost model by least squares of relative errors: seconds of a
    micro-batch = a + b x tokens + c x samples x width^2.
    """
    name = f"{setting.model}, width {SIZES[setting.size][1]}"
    if setting.device == "cuda":
        widths = (32, 128, 512)
        tokens = (512, 2048, 8192, 32768)
        overhead = GPU_OVERHEAD
    else:
        widths = (8, 32, 64)
        tokens = (64, 128, 256)
        overhead = CPU_OVERHEAD
    shapes = [(count // width, width) for count in tokens for width in widths]
    terms = np.array([(1, n * width, n * width**2) for n, width in shapes], float)
    times = seconds_of(setting, shapes)
    # Divided by the times, so that residuals are relative errors.
    relative_terms = terms / times[:, None]
    constants, *_ = np.linalg.lstsq(relative_terms, np.ones(len(shapes)), rcond=None)
    a, b, c = constants
    rows = [
        ["overhead in tokens", a / b, overhead],
        ["attention width", b / c, ATTENTION_WIDTH],
    ]
    # NaN if the fit is negative.
    factors = {what: np.exp(abs(np.log(fitted / used))) for what, fitted, used in rows}
    bounds = [
        Bound(f"{name}: default {what} stays within a factor", factor, 2, at_most=True)
        for what, factor in factors.items()
    ]
    errors = np.abs(terms @ (a, b, c) / times - 1)
    rows.append(["largest relative error", float(errors.max()), ""])
    return Section(
        f"{name}: time of a micro-batch", ("constant", "measured", "in use"), rows, bounds
    )


def seconds_of(setting: Setting, shapes: list[tuple[int, int]]) -> np.ndarray:
    """Measure the seconds of micro-batches, each as half of a window of two.

    Args:
        setting: Model and precision.
        shapes: Samples and width of each micro-batch.

    Returns:
        Seconds, shape (micro-batches,).
    """
    accelerator = Accelerator(cpu=setting.device == "cpu", mixed_precision=setting.mixed_precision)
    model = accelerator.prepare(build_model(setting))
    rule = hf_ga.prove_targets(model, setting.samples[:64], setting.collate)
    remember(accelerator, model, Given(rule=rule))
    times = []
    for n, width in shapes:
        sample = setting.samples[0] | {"input_ids": [5] * width}
        (window,) = hf_ga.WindowLoader(
            [sample] * 2 * n,
            setting.collate,
            accelerator=accelerator,
            per_device_batch_size=n,
            global_batch_size=2 * n,
        )
        step = partial(hf_ga.backward_window, accelerator, model, window)
        times.append(seconds(step, setting) / 2)
    return np.array(times)


def seconds(run: Callable[[], object], setting: Setting) -> float:
    """Measure the seconds of one call and its work on the device, after two that do not count."""
    timer = Timer("run()", globals={"run": run}, num_threads=setting.num_threads)
    return timer.timeit(3).median


def profile(setting: Setting) -> Section:
    """Profile one step of the default arm: how much of it the device computes, and which kernels
    take most of that time.
    """
    accelerator = Accelerator(cpu=setting.device == "cpu", mixed_precision=setting.mixed_precision)
    model = build_model(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    windows = hf_ga.WindowLoader(
        setting.samples,
        setting.collate,
        accelerator=accelerator,
        per_device_batch_size=setting.micro_batch_size,
        global_batch_size=setting.window_size,
        lengths=[len(sample["input_ids"]) for sample in setting.samples],
    )
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
    on_gpu = setting.device == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    first, second, *_ = windows

    def step(window: hf_ga.Window) -> float:
        began = time.perf_counter()
        hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    step(first)
    step(second)
    unprofiled = step(second)
    with torch.profiler.profile(activities=activities) as profiler:
        profiled = step(second)
    events = profiler.key_averages()

    def microseconds(event: Any) -> float:
        return event.self_device_time_total if on_gpu else event.self_cpu_time_total

    busy = sum(map(microseconds, events)) / 1e6
    events = sorted(events, key=microseconds, reverse=True)[:NUM_KERNELS]
    rows = [[event.key[:70], event.count, microseconds(event) / 1e3] for event in events]
    rows.append(["all of them", "", busy * 1e3])
    rows.append(["the step, without the profiler", "", unprofiled * 1e3])
    rows.append(["the step, with it", "", profiled * 1e3])
    title = f"{setting.model}: kernels of a step of {len(second.micro_batches)} micro-batches"
    return Section(title, ("kernel", "calls", "ms"), rows, [])


def attention(setting: Setting) -> Section:
    """Measure causal attention alone, forward and backward: the kernels on packed tokens beside
    torch's on padded ones with its native dropout, in the heads of `setting`.
    """
    if setting.device == "cpu":
        return Section("Attention alone: needs a GPU", ("attention",), [], [])
    _, width, heads, _ = SIZES[setting.size]
    size = width // heads
    rows = []
    for longest in (128, 512, 1024):
        number = 2**15 // longest
        lengths = np.random.default_rng(0).integers(longest // 4, longest + 1, number)
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        packed = torch.randn(int(lengths.sum()), 3, heads, size, **kind).requires_grad_()
        padded = torch.randn(3, number, heads, longest, size, **kind).requires_grad_()
        # Two products forward and five backward, of 2 x size operations for each pair of tokens.
        operations = 14 * size * heads * float((lengths**2).sum()) / 2
        for p in (0.0, 0.1):
            for name, run in {
                "packed, keyed": partial(_packed_attention, packed, lengths, p),
                "padded, torch": partial(_padded_attention, padded, p),
            }.items():
                run()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                taken = seconds(run, setting)
                mebibytes = (torch.cuda.max_memory_allocated() - before) / 2**20
                rows.append([longest, p, name, 1e3 * taken, operations / taken / 1e12, mebibytes])
    header = ("longest", "dropout", "attention", "ms", "TFLOP/s on real tokens", "memory, MiB")
    return Section(f"Attention alone, {heads} heads of {size}, bf16", header, rows, [])


def _packed_attention(packed: Tensor, lengths: np.ndarray, p: float) -> None:
    """Run forward and backward of the kernels with keyed dropout.

    Args:
        packed: Queries, keys and values, shape (tokens, 3, heads, size).
        lengths: Tokens of each sample.
        p: Dropout probability.
    """
    # It needs Triton.
    from hf_ga.speed.attention_kernel import attention

    ends = np.cumsum(lengths)
    starts = torch.tensor([0, *ends], dtype=torch.int32).to("cuda")
    query, key, value = packed.unbind(1)
    out = attention(
        query,
        key,
        value,
        starts,
        int(lengths.max()),
        seeds=torch.arange(len(lengths), device="cuda") if p else None,
        drop_probability=p,
        scale=query.shape[-1] ** -0.5,
        is_causal=True,
    )
    out.backward(query)


def _padded_attention(padded: Tensor, p: float) -> None:
    """Run forward and backward of torch's attention with its native dropout.

    Args:
        padded: Queries, keys and values, shape (3, samples, heads, tokens, size).
        p: Dropout probability.
    """
    query, key, value = padded
    out = scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
    out.backward(query)


SECTIONS = {
    "peers": peers,
    "dropout": dropout,
    "cost": cost,
    "profile": profile,
    "attention": attention,
}
