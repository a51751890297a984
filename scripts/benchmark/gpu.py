"""Sections of the benchmark for `scripts/gpu_report.py`: each is a function that measures one
model's setting and returns a table with its targets.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import collate, seconds_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

import hf_ga
from benchmark.arms import (
    ACCELERATE_LOOP,
    COMPILED,
    COMPILED_FULL_ROWS,
    DEFAULT,
    REBALANCED,
    TRAINER,
    peer_arms,
)
from benchmark.measuring import measure_one_by_one
from benchmark.report import Bound, Section, best_of_trainer, speed_table
from benchmark.setting import Setting, build_model, make_accelerator
from hf_ga.order.length_plan import ATTENTION_WIDTH, CPU_OVERHEAD, GPU_OVERHEAD
from hf_ga.rows.options import AttentionOptions
from hf_ga.training import LossSettings, remember

# Number of kernels in the table of the profile.
NUM_KERNELS = 25
# Targets: tokens per second over the best of Trainer's, by model.
MIN_RATIO_TO_TRAINER = {"gpt": 3.0, "bert": 2.0}


def peers(setting: Setting) -> Section:
    """Benchmark the training speed of hf_ga, Trainer and full rows, and the share of the device's
    peak that useful FLOPs reach; the peak is that of a measured matrix product.
    """
    name = setting.model
    measured = measure_one_by_one(setting, peer_arms(setting.device), f"{name}, peers")
    section = speed_table(setting, measured)
    matrix_size = 512
    dtype = torch.float32
    if setting.device == "cuda":
        matrix_size = 8192
        dtype = torch.bfloat16
    matrix = torch.randn(matrix_size, matrix_size, dtype=dtype, device=setting.device)
    peak_flops = 2 * matrix_size**3 / median_seconds(lambda: matrix @ matrix, setting)
    # Times tokens per second, it is the share of the peak.
    share_per_rate = flops_per_token(setting) / peak_flops
    rates = {COMPILED: math.nan, COMPILED_FULL_ROWS: math.nan}  # on a CPU
    rates |= {arm: rate for arm, rate, *_ in section.rows}
    best = best_of_trainer(rates, TRAINER, REBALANCED)
    ours = np.nanmax([rates[DEFAULT], rates[COMPILED]])
    section.bounds = [
        Bound(
            f"{name}: tokens/s over the best arm of Trainer",
            ours / best,
            MIN_RATIO_TO_TRAINER[name],
        ),
        Bound(f"{name}: tokens/s over full rows, compiled", ours / rates[COMPILED_FULL_ROWS], 0.6),
        Bound(f"{name}: hf_ga.Accelerator over hf_ga", rates[ACCELERATE_LOOP] / ours, 0.85),
        Bound(f"{name}: useful FLOPs over the peak", ours * share_per_rate, 0.45),
    ]
    section.header.append("of peak")
    for row in section.rows:
        row.append(row[1] * share_per_rate)
    return section


def flops_per_token(setting: Setting) -> float:
    """Count the FLOPs of forward and backward for each token of the benchmark's samples, on
    average, without padding and recomputation: 6 for each weight of a matrix product, and 12 x
    hidden size for each layer and token that it attends to.
    """
    shape = setting.shape
    num_pairs = sum(length**2 for length in setting.lengths)
    num_weights = 12 * shape.layers * shape.width**2
    if shape.kind == "gpt":  # causal attention, and the output projection
        num_pairs /= 2
        num_weights += shape.words * shape.width
    attention_flops = 12 * shape.layers * shape.width * num_pairs / setting.real_tokens
    return 6 * num_weights + attention_flops


def cost(setting: Setting) -> Section:
    """Measure the constants of the cost model by which hf_ga plans micro-batches, and compare them
    with the defaults in use.

    The model is: seconds of a micro-batch = a + b x samples x length + c x samples x length^2, with
    the padded length. It is fitted by least squares of relative errors.
    """
    name = f"{setting.model}, width {setting.shape.width}"
    if setting.device == "cuda":
        lengths = (32, 128, 512)
        token_counts = (512, 2048, 8192, 32768)
        overhead = GPU_OVERHEAD
    else:
        lengths = (8, 32, 64)
        token_counts = (64, 128, 256)
        overhead = CPU_OVERHEAD
    shapes = [(num_tokens // length, length) for num_tokens in token_counts for length in lengths]
    terms = np.array([(1, n * length, n * length**2) for n, length in shapes], float)
    seconds = micro_batch_seconds(setting, shapes)
    # Divide by the measured times, so that residuals are relative errors.
    relative_terms = terms / seconds[:, None]
    constants, *_ = np.linalg.lstsq(relative_terms, np.ones(len(shapes)), rcond=None)
    a, b, c = constants
    rows = [
        ["overhead in tokens", a / b, overhead],
        ["attention width", b / c, ATTENTION_WIDTH],
    ]
    bounds = []
    for constant, fitted, in_use in rows:
        # fitted / in_use or its inverse, whichever is larger; NaN if the fit is negative.
        factor = np.exp(abs(np.log(fitted / in_use)))
        title = f"{name}: default {constant} stays within a factor"
        bounds.append(Bound(title, factor, 2, at_most=True))
    errors = np.abs(terms @ (a, b, c) / seconds - 1)
    rows.append(["largest relative error", float(errors.max()), ""])
    return Section(
        f"{name}: time of a micro-batch", ["constant", "measured", "in use"], rows, bounds
    )


def micro_batch_seconds(setting: Setting, shapes: list[tuple[int, int]]) -> np.ndarray:
    """Measure the seconds that hf_ga needs for forward and backward of micro-batches of given
    shapes; each is timed as half of a window of two equal ones.

    Args:
        setting: The setting of the benchmark: model, device and precision.
        shapes: For each micro-batch, the number of samples and their length in tokens.

    Returns:
        Seconds of each micro-batch, shape (micro-batches,).
    """
    accelerator = make_accelerator(setting)
    model = accelerator.prepare(build_model(setting))
    remember(accelerator, model, LossSettings())
    seconds = []
    for num_samples, length in shapes:
        sample = setting.samples[0] | {"input_ids": [5] * length}
        (window,) = hf_ga.WindowLoader(
            [sample] * 2 * num_samples,
            collate,
            accelerator=accelerator,
            per_device_batch_size=num_samples,
            global_batch_size=2 * num_samples,
        )
        step = partial(hf_ga.backward_window, accelerator, model, window)
        seconds.append(median_seconds(step, setting) / 2)
    return np.array(seconds)


def median_seconds(function: Callable[[], object], setting: Setting) -> float:
    """Measure the seconds of calling a function, its work on the device included, with torch's
    benchmark timer after warm-up calls.
    """
    timer = Timer("function()", globals={"function": function}, num_threads=setting.num_threads)
    return timer.timeit(3).median


def profile(setting: Setting) -> Section:
    """Profile one optimizer step of hf_ga with torch's profiler: list the kernels that take most
    time on the device, their total, and the duration of the step.
    """
    accelerator = make_accelerator(setting)
    model = build_model(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    windows = hf_ga.WindowLoader(
        setting.samples,
        collate,
        accelerator=accelerator,
        per_device_batch_size=setting.micro_batch_size,
        global_batch_size=setting.window_size,
        lengths=setting.lengths,
    )
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
    on_gpu = setting.device == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    first, second, *_ = windows

    def step(window: hf_ga.Window) -> None:
        """Train on one window."""
        hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)

    # The first steps warm up.
    step(first)
    step(second)
    if on_gpu:
        torch.cuda.synchronize()
    unprofiled = seconds_of(partial(step, second))
    with torch.profiler.profile(activities=activities) as profiler:
        profiled = seconds_of(partial(step, second))
    events = profiler.key_averages()

    def microseconds(event: Any) -> float:
        """Return the time of a kernel itself, without operators that it calls."""
        return event.self_device_time_total if on_gpu else event.self_cpu_time_total

    busy = sum(map(microseconds, events)) / 1e6
    events = sorted(events, key=microseconds, reverse=True)[:NUM_KERNELS]
    rows = [[event.key[:70], event.count, microseconds(event) / 1e3] for event in events]
    rows.append(["all of them", "", busy * 1e3])
    rows.append(["the step, without the profiler", "", unprofiled * 1e3])
    rows.append(["the step, with it", "", profiled * 1e3])
    title = f"{setting.model}: kernels of a step of {len(second.micro_batches)} micro-batches"
    return Section(title, ["kernel", "calls", "ms"], rows)


def attention(setting: Setting) -> Section:
    """Benchmark causal attention alone, forward and backward, on a GPU: hf_ga's kernels on packed
    samples with keyed dropout, and torch's `scaled_dot_product_attention` on padded samples with
    its own dropout; without dropout, also torch's kernels on packed samples, with a deterministic
    backward. The heads are those of the setting's model.
    """
    if setting.device == "cpu":
        return Section("Attention alone: needs a GPU", ["attention"], [])
    # Imported lazily, because it needs Triton.
    from hf_ga.rows.attention_kernel import Attention
    from hf_ga.rows.varlen_attention import VarlenAttention

    num_heads = setting.shape.heads
    head_dim = setting.shape.width // num_heads
    rows = []
    for max_length in (128, 512, 1024):
        num_samples = 2**15 // max_length
        generator = np.random.default_rng(0)
        lengths = generator.integers(max_length // 4, max_length + 1, num_samples)
        packed_shape = (int(lengths.sum()), 3, num_heads, head_dim)
        padded_shape = (3, num_samples, num_heads, max_length, head_dim)
        packed = torch.randn(packed_shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
        padded = torch.randn(padded_shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
        # Two matrix products in the forward and five in the backward, each with 2 x head_dim
        # operations for each pair of tokens; causal attention needs half of the pairs.
        operations = 14 * head_dim * num_heads * float((lengths**2).sum()) / 2
        for dropout_p in (0.0, 0.1):
            arms = {
                "packed, keyed": partial(_packed_attention, Attention, packed, lengths, dropout_p),
                "padded, torch": partial(_padded_attention, padded, dropout_p),
            }
            if dropout_p == 0:
                arms["packed, torch"] = partial(
                    _packed_attention, VarlenAttention, packed, lengths, dropout_p
                )
            for name, function in arms.items():
                function()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                seconds = median_seconds(function, setting)
                memory = (torch.cuda.max_memory_allocated() - before) / 2**20
                tflops = operations / seconds / 1e12
                rows.append([max_length, dropout_p, name, 1e3 * seconds, tflops, memory])
    header = ["longest", "dropout", "attention", "ms", "TFLOP/s on real tokens", "memory, MiB"]
    return Section(f"Attention alone, {num_heads} heads of {head_dim}, bf16", header, rows)


def _packed_attention(
    kernel: type[torch.autograd.Function], packed: Tensor, lengths: np.ndarray, dropout_p: float
) -> None:
    """Run forward and backward of attention of packed samples; `packed` has the queries, keys and
    values, shape (tokens, 3, heads, head_dim).
    """
    ends = np.cumsum(lengths)
    offsets = torch.tensor([0, *ends], dtype=torch.int32).to("cuda")
    query, key, value = packed.unbind(1)
    output = kernel.apply(
        query,
        key,
        value,
        offsets,
        int(lengths.max()),
        torch.arange(len(lengths), device="cuda") if dropout_p else None,
        AttentionOptions(dropout_p, query.shape[-1] ** -0.5, is_causal=True),
    )
    # Any gradient of the output's shape will do.
    output.backward(query)


def _padded_attention(padded: Tensor, dropout_p: float) -> None:
    """Run forward and backward of torch's attention with its own dropout; `padded` has the
    queries, keys and values, shape (3, samples, heads, tokens, head_dim).
    """
    query, key, value = padded
    output = scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)
    # Any gradient of the output's shape will do.
    output.backward(query)


# Name of the section -> function that measures it for the setting of one model.
SECTIONS = {
    "peers": peers,
    "cost": cost,
    "profile": profile,
    "attention": attention,
}
