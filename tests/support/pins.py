"""What must not change by a bit when code is moved: hashes of orders, plans, masks, gradients and
weights.

`python pins.py` writes them. Integers are the same on every machine. Floats depend on the processor
and the versions, so they are stored for each kind of machine and compared only there. On a new kind
they are added; on a known one they replace those of all.
"""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers as tf
from accelerate import Accelerator
from helpers import (
    bert_classifier,
    bert_masked_lm,
    bert_question_answering,
    bert_token_classifier,
    by_number,
    class_samples,
    gpt2,
    llama,
    mixtral,
    pad_right,
    plain_tagger,
    t5,
    tag_samples,
    token_samples,
    weighted_samples,
    weighted_token_loss,
    xlnet_classifier,
)
from steps import backward_window
from tried import later, tried

import hf_ga
from hf_ga.rows.fused_attention import FusedAttention
from hf_ga.rows.packing import Packing
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.lean_forward import LeanForward

FILE = Path(__file__).with_name("pins.json")
NUM_SAMPLES = 13
MICRO_BATCHES = (2, 5, 13)


def answer_samples(num_samples: int) -> list[dict]:
    """Question answering: a span a sample."""
    rows = token_samples(num_samples)
    return [
        {"input_ids": s["input_ids"], "start_positions": i % 3, "end_positions": i % 3 + 1}
        for i, s in enumerate(rows)
    ]


HEADS: dict[str, tuple[Callable, Callable, Callable | None]] = {
    "gpt2": (lambda: gpt2(0.1), token_samples, None),
    "llama": (lambda: llama(0.1), token_samples, None),
    "bert classifier": (lambda: bert_classifier(0.1), class_samples, None),
    "bert masked lm": (lambda: bert_masked_lm(0.1), token_samples, None),
    "bert tags": (lambda: bert_token_classifier(0.1), tag_samples, None),
    "bert answers": (lambda: bert_question_answering(0.1), answer_samples, None),
    "t5": (lambda: t5(0.1), token_samples, None),
    "xlnet": (lambda: xlnet_classifier(0.1), class_samples, None),
    "mixtral": (lambda: mixtral(0.5), token_samples, None),
    "own loss": (lambda: plain_tagger(0.1), weighted_samples, weighted_token_loss),
}
TASKS = ("causal LM, row by row", "classes", "masked LM", "tags")  # jobs of `runs.py`


def sha256(*arrays: np.ndarray | torch.Tensor) -> str:
    """Of bytes, shapes and types."""
    digest = hashlib.sha256()
    for array in map(np.asarray, arrays):
        digest.update(
            f"{array.shape} {array.dtype}".encode() + np.ascontiguousarray(array).tobytes()
        )
    return digest.hexdigest()[:16]


def fingerprint() -> str:
    """What the last bits of a float depend on, beside the code."""
    cpu = next(
        (
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return (
        f"{cpu}; {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}, "
        f"transformers {tf.__version__}"
    )


def integers() -> dict[str, str]:
    """Orders, plans and masks."""
    from hf_ga.draws.dropout.masks import keep_mask, sample_keys, window_key
    from hf_ga.order.length_plan import CPU_OVERHEAD, ByLength
    from hf_ga.order.order import epoch_order
    from hf_ga.order.plan import plan_by_sizes, plan_window

    lengths = np.random.default_rng(0).integers(1, 300, 256)
    pins = {
        f"order {seed} {epoch}": sha256(epoch_order(1000, seed, epoch))
        for seed in (0, 7)
        for epoch in (0, 1)
    }
    for processes in (1, 2, 3):
        plans = {
            "count": plan_window(61, processes, 8),
            "sizes": plan_by_sizes(lengths, processes, [5, 11]),
            "length": ByLength(1, 2048, CPU_OVERHEAD, lockstep=False)(lengths, processes),
            "length in step": ByLength(1, 2048, CPU_OVERHEAD, lockstep=True)(lengths, processes),
        }
        pins |= {
            f"plan by {name}, {processes}": sha256(*(m for share in plan for m in share))
            for name, plan in plans.items()
        }
    keys = sample_keys(1, 2, np.arange(5))
    for_window = window_key(1, 2, 3)
    for shape, axis in (((5, 7, 16), 0), ((5, 2, 9, 9), 0), ((10, 4, 6), 0), ((7, 5, 8), 1)):
        pins[f"mask {shape} {axis}"] = sha256(
            keep_mask(keys, 12345678901234567890, shape, axis, 0.1)
        )
    pins["mask of a window"] = sha256(keep_mask(for_window, 42, (6, 8), None, 0.3))
    return pins


def gradients() -> dict[str, str]:
    """Of each head in each layout: every speed-up off, and each on by itself."""
    pins = {}
    for name, (build, make_samples, loss_fn) in HEADS.items():
        samples = make_samples(NUM_SAMPLES)
        for mode in modes(build(), samples, loss_fn):
            for size, digest in _gradients(build(), samples, loss_fn, mode).items():
                pins[f"gradient {name}, {mode}, {size}"] = digest
    return pins


def modes(model: torch.nn.Module, samples: list[dict], loss_fn: Callable | None) -> list[str]:
    """Ways to compute a window that this head has."""
    names = {speed_up.name for speed_up in tried(model, samples, loss_fn=loss_fn).used}
    return ["plain", *(["lazy logits"] if "chunked loss" in names else []), "packed"]


def _gradients(
    model: torch.nn.Module, samples: list[dict], loss_fn: Callable | None, mode: str
) -> dict[int, str]:
    accelerator = Accelerator(cpu=True)
    digests = {}
    speed_ups = [
        LeanForward(),
        *([] if mode == "plain" else [ChunkedLoss()]),
        *([Packing()] if mode == "packed" else []),
    ]
    speed_ups.append(FusedAttention())
    tried(model, samples, speed_ups=speed_ups, loss_fn=loss_fn)
    prepared = accelerator.prepare(model)
    for size in MICRO_BATCHES:
        sizes = {
            "planner": by_number(size),
            "global_batch_size": NUM_SAMPLES,
            "pad_to_window": True,
        }
        windows = hf_ga.WindowLoader(samples, pad_right, accelerator=accelerator, seed=3, **sizes)
        prepared.zero_grad()
        window = later(next(iter(windows)))
        backward_window(accelerator, prepared, window, loss_fn=loss_fn)
        digests[size] = sha256(*(p.grad for p in model.parameters() if p.grad is not None))
    return digests


def runs() -> dict[str, str]:
    """Weights of a short whole run of each task, and of one on two processes."""
    from forked import phase, run_phases
    from runs import filled_place, job_config, save_jobs, train_job

    pins = {}
    with tempfile.TemporaryDirectory() as folder, filled_place(Path(folder)) as place:
        save_jobs(place)
        for task in TASKS:
            pins[f"run {task}"] = train_job(place, place / task, task, max_steps=5)[
                "weights_sha256"
            ][:16]
        config = job_config(place, place / "two", "translations", max_steps=4)
        run_phases(place / "job", [phase(config, processes=2)])
        pins["run on two processes"] = json.loads((place / "two" / "summary.json").read_text())[
            "weights_sha256"
        ][:16]
    return pins


if __name__ == "__main__":
    for setting in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        os.environ[setting] = "1"
    torch.set_num_threads(1)
    floats = json.loads(FILE.read_text())["floats"]
    if fingerprint() in floats:  # a sum was changed, on other machines as well
        floats = {}
    floats[fingerprint()] = gradients() | runs()
    FILE.write_text(json.dumps({"integers": integers(), "floats": floats}, indent=1) + "\n")
