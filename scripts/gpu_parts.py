"""The parts of `gpu_report.py`: each takes the results so far, and yields rows (dicts) and lines about targets and rules
(strings).
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from benchmark.arms import ABLATION, DEFAULT, NATIVE, PACKED, SPEED, TRAINER, default
from benchmark.lap import Lap
from benchmark.report import WORTH_MEMORY, WORTH_TIME, Bound, added_memory, tokens_per_second
from benchmark.setting import SIZES, TASKS, Setting, build_model, documentation_strings
from benchmark.trainers import PEERS
from torch.nn.utils.rnn import pad_sequence

import hf_ga
from hf_ga.check.rows import OURS
from hf_ga.exact.length_plan import ATTENTION_WIDTH, CPU_OVERHEAD, GPU_OVERHEAD
from hf_ga.parallel.prepare import enable_fp16_on_cpu
from hf_ga.recovery.checkpoint import state_sha256

Row = dict[str, Any]
Results = Mapping[str, Mapping[str, Any]]
ROOT = Path(__file__).parents[1]
CASES = [(model, precision) for model in TASKS for precision in ("no", "bf16", "fp16")]
LIBRARIES = ("torch", "transformers", "accelerate", "triton", "flash_attn", "trl", "numpy")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 4


def environment(_: Results) -> Iterator[Row]:
    """Device, driver, versions, threads, and the peak of the matrix product."""
    on_gpu = torch.cuda.is_available()
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    yield {"what": "device", "value": subprocess.check_output(query, text=True).strip() if on_gpu else "CPU"}
    yield {"what": "CUDA of torch", "value": str(torch.version.cuda)}
    yield {"what": "threads of torch, cores", "value": f"{torch.get_num_threads()}, {os.cpu_count()}"}
    yield {"what": "Python", "value": sys.version.split()[0]}
    for name in LIBRARIES:
        yield _tried({"what": name}, lambda name=name: {"value": version(name)})
    for name in DTYPES:
        yield {"what": f"peak of a matrix product in {name}, TFLOP/s", "value": _peak(name) / 1e12}


def gpu_tests(_: Results) -> Iterator[Row]:
    """Each test with its outcome; at the end the reasons of failures."""
    _needs_cuda("all of these tests need a GPU")
    files = [f"tests/{name}.py" for name in ("promises/test_on_a_gpu", "parallel/test_stand_in_device")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-v", "--color=no", *files]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if found := re.match(r"tests/\S*?::(.*?) (PASSED|FAILED|ERROR|SKIPPED)", line):
                yield {"test": found[1], "outcome": found[2]}
            if found := re.match(r"(?:FAILED|ERROR) tests/\S*?::(.*?) - (.*)", line):
                yield f"FAILED: {found[1]}: {found[2]}"


def same_update(_: Results) -> Iterator[Row]:
    """Promises 1 and 2 by the checker, on the sizes of GPT-2-small and BERT-base."""
    for model, precision in CASES:
        for dropout in (0.0, 0.1):
            yield _checked(model, precision, dropout)


def same_bits(_: Results) -> Iterator[Row]:
    """The checker's row `bits`."""
    _make_deterministic()
    for model, precision in CASES:
        yield _checked(model, precision, 0.1, layouts=["even"], same_bits=4)


def same_after_a_stop(_: Results) -> Iterator[Row]:
    """4 optimizer steps, and the last two of them again by new objects, from a state that was saved."""
    _make_deterministic()
    for model, precision in CASES:
        with tempfile.TemporaryDirectory() as folder:
            yield _tried({"model": model, "precision": precision}, partial(_resumed, _short(model, precision, 0.1), folder))
    yield "`pytest -m gpu` kills whole runs"


def packed(_: Results) -> Iterator[Row | str]:
    """Layers without padding on a GPU, and attention kernels without padding."""
    _needs_cuda("on a CPU layers are packed by default, and kernels for packed attention do not exist")
    for model in TASKS:
        yield from _arms(_setting(model, dropout=0.0), {DEFAULT: default, **PACKED})
    yield from _kernels()


def dropout(_: Results) -> Iterator[Row | str]:
    """Keyed dropout against torch's."""
    for model in TASKS:
        rows = [*_arms(_setting(model), {NATIVE: ABLATION[NATIVE], DEFAULT: default})]
        yield from rows
        yield _target(f"{model}: time with keyed over that with native dropout", rows[1].get("time"), 1.02, at_most=True)


def ablation(_: Results) -> Iterator[Row]:
    """Each speed-up left out."""
    on_cpu_only = ("packing", "fused attention") if torch.cuda.is_available() else ()
    arms = {name: arm for name, arm in ABLATION.items() if name not in (NATIVE, *on_cpu_only)}
    for model in TASKS:
        yield from _arms(_setting(model), arms)
    yield f"a speed-up stays if leaving it out takes {WORTH_TIME} times the time or {WORTH_MEMORY} times the memory"


def trainers(_: Results) -> Iterator[Row | str]:
    """hf_ga, Trainer in all its modes, TRL and a plain loop; useful FLOPs over the measured peak."""
    peak = _peak("bf16" if torch.cuda.is_available() else "float32")
    yield f"measured peak of the matrix product: {peak / 1e12:.4g} TFLOP/s"
    for model in TASKS:
        setting, rates = _setting(model), {}
        for row in _arms(setting, {TRAINER: SPEED[TRAINER], **SPEED, **(PEERS if model == "gpt" else {})}):
            rates[row["arm"]] = row.get("real tokens/s", 0.0)
            yield row | {"of peak": rates[row["arm"]] * _flops(setting) / setting.real_tokens / peak}
        best = max(rate for arm, rate in rates.items() if arm.startswith("Trainer"))
        yield _target(f"{model}: real tokens/s over Trainer's default", rates[DEFAULT] / (rates[TRAINER] or np.nan), 2.0)
        yield _target(f"{model}: over the best mode of Trainer", rates[DEFAULT] / (best or np.nan), 1.2)
        if model == "gpt":
            yield _target("gpt: useful FLOPs over peak", rates[DEFAULT] * _flops(setting) / setting.real_tokens / peak, 0.45)


def host_waits(_: Results) -> Iterator[Row | str]:
    """By torch's debug mode, which warns where the host waits for the device."""
    _needs_cuda("the host of a CPU waits for no device")
    for name, arm in ((DEFAULT, default), (TRAINER, SPEED[TRAINER])):
        with warnings.catch_warnings(record=True) as caught:
            lap = _CountingLap(_setting("gpt"), caught)
            torch.cuda.set_sync_debug_mode("warn")
            lap.run(arm)
            torch.cuda.set_sync_debug_mode("default")
        waits = statistics.median(lap.waits[lap.setting.windows_per_epoch :])
        yield {"arm": name, "waits in a step": waits, "where": ", ".join(sorted(lap.places))}
        if name == DEFAULT:
            yield _target("waits of the host in a step", waits, 1, at_most=True)


def cost_model(_: Results) -> Iterator[Row]:
    """Least squares of relative errors: time of a micro-batch = a + b tokens + c samples x width^2."""
    on_gpu = torch.cuda.is_available()
    widths, tokens = ((32, 128, 512), (512, 2048, 8192, 32768)) if on_gpu else ((8, 32, 64), (64, 128, 256))
    shapes = [(count // width, width) for count in tokens for width in widths]
    for model in TASKS:
        for size in ("small", "base") if on_gpu else ("tiny",):
            seconds = np.array(_times_of_micro_batches(_setting(model, size=size), shapes))
            terms = np.array([(1, n * width, n * width**2) for n, width in shapes], float)
            (a, b, c), *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(shapes)), rcond=None)
            fitted = terms @ (a, b, c)
            yield {
                "model": model,
                "width": SIZES[size][1],
                "overhead, tokens": a / b,
                "overhead in use": GPU_OVERHEAD if on_gpu else CPU_OVERHEAD,
                "attention width": b / c,
                "attention width in use": ATTENTION_WIDTH,
                "largest error of the fit": float(np.abs(fitted / seconds - 1).max()),
                "ms": (1000 * seconds).tolist(),
                "fitted ms": (1000 * fitted).tolist(),
            }


def defaults(results: Results) -> Iterator[Row]:
    """What the figures decide about what is opt-in, or a guess, because it never ran on a GPU."""
    worth = f"default if proven, and {WORTH_TIME} times as fast or 1/{WORTH_MEMORY} of the memory, for both models"
    for arm in PACKED:
        rows = [row for row in results["packed"].get("rows", []) if row.get("arm") == arm]
        gains = [row.get("time", np.inf) <= 1 / WORTH_TIME or row.get("memory", np.inf) <= 1 / WORTH_MEMORY for row in rows]
        yield {"what": arm, "rule": worth, "verdict": _decided(rows, "make it the default" if all(gains) else "stays opt-in")}
    for name, constant in (("overhead", "GPU_OVERHEAD"), ("attention width", "ATTENTION_WIDTH")):
        rows = results["cost_model"].get("rows", []) if torch.cuda.is_available() else []
        ratios = [row["overhead, tokens" if name == "overhead" else name] / row[f"{name} in use"] for row in rows]
        kept = all(0.5 <= ratio <= 2 for ratio in ratios)
        rule = "stays if the fits are within a factor of 2 of it"
        yield {"what": constant, "rule": rule, "verdict": _decided(rows, "stays" if kept else "change it, by model width")}
    lines = [line for line in results["dropout"].get("targets", []) if torch.cuda.is_available()]
    verdict = "stays" if all(line.startswith("passed") for line in lines) else "change it"
    yield {"what": "compiled masks", "rule": "stays at a time <= 1.02 of native dropout", "verdict": _decided(lines, verdict)}


def _decided(figures: list[Any], verdict: str) -> str:
    return verdict if figures else "not decided: no figures of a GPU"


def _needs_cuda(why: str) -> None:
    if not torch.cuda.is_available():
        raise SkipTest(f"needs CUDA: {why}")


def _make_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


def _tried(row: Row, measure: Callable[[], Row]) -> Row:
    """The row with what was measured, or with the error."""
    try:
        return row | measure()
    except PackageNotFoundError:
        return row | {"value": "not installed"}
    except Exception as error:
        return row | {"verdict": f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _target(what: str, value: float | None, limit: float, at_most: bool = False) -> str:
    line = str(Bound(what, np.nan if value is None else value, limit, at_most))
    return line if torch.cuda.is_available() else f"not judged on a CPU: {line.partition(': ')[2]}"


def _setting(model: str, count: int | None = None, **more: Any) -> Setting:
    """On a GPU the sizes of GPT-2-small and BERT-base."""
    if torch.cuda.is_available():
        fits = 64 if torch.cuda.get_device_properties(0).total_memory > 60e9 else 16
        sizes = {"size": "base", "device": "cuda", "mixed_precision": "bf16", "max_length": 512, "epochs": 2}
        sizes, count = sizes | {"window_size": 512, "micro_batch_size": fits}, count or 2048
    else:
        sizes = {"size": "tiny", "max_length": 64, "epochs": 1, "window_size": 16, "micro_batch_size": 4}
    sizes |= {"num_threads": torch.get_num_threads()} | more
    return Setting(model, **sizes, **documentation_strings(model, sizes["max_length"], count or 32))


def _short(model: str, precision: str, dropout: float) -> Setting:
    sizes = {"max_length": 64, "window_size": 4, "micro_batch_size": 2}
    return _setting(model, 4 * STEPS, mixed_precision=precision, dropout=dropout, **sizes)


def _checked(model: str, precision: str, dropout: float, **more: Any) -> Row:
    def check() -> Row:
        setting = _short(model, precision, dropout)
        found = hf_ga.check_equivalence(
            build_model(setting), setting.samples, setting.collate, precision={"no": "fp32"}.get(precision, precision), **more
        )
        return {"relative error": found.max_error, "verdict": found.verdict(OURS)}

    return _tried({"model": model, "precision": precision, "dropout": dropout}, check)


def _resumed(setting: Setting, folder: str) -> Row:
    whole, again = _trained(setting, folder, save=True), _trained(setting, folder, save=False)
    same = whole[0] == again[0] and again[1] == STEPS // 2
    return {"steps after the stop": again[1], "verdict": "passed, same SHA-256 of the weights" if same else "FAILED: other weights"}


def _trained(setting: Setting, folder: str, save: bool) -> tuple[str, int]:
    """SHA-256 of the weights after the last window, and the number of steps. save: in the middle; else begin there."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=setting.device == "cpu", mixed_precision=setting.mixed_precision)
    enable_fp16_on_cpu(accelerator)
    sizes = {"per_device_batch_size": setting.micro_batch_size, "global_batch_size": setting.window_size}
    windows = hf_ga.WindowLoader(setting.samples, setting.collate, accelerator=accelerator, **sizes)
    model = build_model(setting)
    model, optimizer = hf_ga.prepare(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.register_for_checkpointing(windows)
    if not save:
        accelerator.load_state(folder)
    for steps, window in enumerate(windows, start=1):
        hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
        if save and steps == STEPS // 2:
            accelerator.save_state(folder)
    return state_sha256(model.state_dict()), steps


def _arms(setting: Setting, arms: Mapping[str, Callable[[Lap], None]]) -> Iterator[Row]:
    """Rates; time and memory relative to the first arm."""
    first: Row = {}
    for name, arm in arms.items():
        row = _tried({"model": setting.model, "arm": name}, partial(_arm, setting, arm))
        first = first or row
        for ratio, of, over in (("time", first, row), ("memory", row, first)):
            figure = "real tokens/s" if ratio == "time" else "memory, MiB"
            if figure in of and figure in over:
                row[ratio] = of[figure] / over[figure]
        yield row


def _arm(setting: Setting, arm: Callable[[Lap], None]) -> Row:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    measured = Lap(setting).run(arm)
    row = {"real tokens/s": tokens_per_second(setting, measured), "padded / real": measured.padding}
    return row | {"each sample once": measured.each_once} | ({"memory, MiB": added_memory(measured)} if on_gpu else {})


class _CountingLap(Lap):
    """Counts warnings of waits in each step."""

    def __init__(self, setting: Setting, caught: list[warnings.WarningMessage]) -> None:
        super().__init__(setting)
        self.caught, self.waits, self.places = caught, [], set()

    def step_done(self) -> None:
        waits = [found for found in self.caught if "synchronizing" in str(found.message)]
        self.waits.append(len(waits))
        self.places = {f"{Path(found.filename).name}:{found.lineno}" for found in waits}
        self.caught.clear()
        warnings.simplefilter("always")
        super().step_done()


def _times_of_micro_batches(setting: Setting, shapes: list[tuple[int, int]]) -> list[float]:
    """Seconds of a micro-batch of n samples of one width: half of a window of two, median of three."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=setting.device == "cpu", mixed_precision=setting.mixed_precision)
    model, found = accelerator.prepare(build_model(setting)), []
    proven = hf_ga.prove_targets(model, setting.samples[:64], setting.collate)
    for n, width in shapes:
        samples = [setting.samples[0] | {"input_ids": [5] * width}] * (2 * n)
        sizes = {"per_device_batch_size": n, "global_batch_size": 2 * n}
        (window,) = hf_ga.WindowLoader(samples, setting.collate, accelerator=accelerator, **sizes)
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            hf_ga.backward_window(accelerator, model, window, targets=proven).loss  # noqa: B018 - synchronizes with the device
            seconds.append(time.perf_counter() - began)
        found.append(statistics.median(seconds[1:]) / 2)
    return found


def _peak(name: str) -> float:
    """FLOP/s of a square matrix product, the best of ten."""
    on_gpu, seconds = torch.cuda.is_available(), []
    size = 8192 if on_gpu else 512
    x = torch.ones(size, size, dtype=DTYPES[name], device="cuda" if on_gpu else "cpu")
    for _ in range(10):
        seconds.append(_seconds(lambda: x @ x))
    return 2 * size**3 / min(seconds)


def _seconds(run: Callable[[], Any]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began


def _flops(setting: Setting) -> float:
    """Of an epoch, forward and backward, without padding: 6 a weight and token, and 12 x width a pair of tokens that attend."""
    layers, width, _, words = SIZES[setting.size]
    is_causal = setting.model == "gpt"
    weights = 12 * layers * width**2 + is_causal * words * width
    pairs = sum(len(sample["input_ids"]) ** 2 for sample in setting.samples) / (1 + is_causal)
    return 6 * weights * setting.real_tokens + 12 * layers * width * pairs


def _kernels() -> Iterator[Row]:
    """Causal attention of packed samples in bf16 against padded attention in float32."""
    lengths = [len(sample["input_ids"]) for sample in _setting("gpt").samples[:64]]
    q, k, v = torch.randn(3, sum(lengths), 12, 64, device="cuda", dtype=torch.bfloat16).requires_grad_().unbind()
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")

    def padded(*packed: torch.Tensor) -> torch.Tensor:
        rows = [pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in packed]
        out = F.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)
        return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)])

    def of_torch(*packed: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(*packed, ends, ends, max(lengths), max(lengths), window_size=(-1, 0))

    def of_flash_attn(*packed: torch.Tensor) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(*packed, ends, ends, max(lengths), max(lengths), causal=True)

    right = padded(q.float(), k.float(), v.float())
    for name, kernel in {"padded": padded, "torch varlen_attn": of_torch, "flash_attn_varlen_func": of_flash_attn}.items():

        def measure(kernel: Callable = kernel) -> Row:
            error = float((kernel(q, k, v) - right).norm() / right.norm())
            seconds = min(_seconds(lambda: kernel(q, k, v).sum().backward(retain_graph=True)) for _ in range(10))
            return {"relative error": error, "ms": 1000 * seconds}

        yield _tried({"kernel, forward and backward": name}, measure)
