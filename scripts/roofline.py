"""Predict the time of a window on one GPU, without a GPU: a roofline. Computed, not measured.

For each mode of training, the script counts what a window of documentation strings takes: floating
point operations, bytes that pass through the GPU's memory, and kernels. Each of them, divided by
what the device can do in a second, is a lower bound of the time; the largest bound is the
prediction.

    python scripts/roofline.py
    python scripts/roofline.py --models gpt --devices h100 h200
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmark.setting import MODELS, documentation_strings
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from hf_ga.exact.length_plan import GPU_OVERHEAD, ByLength
from hf_ga.exact.override import override
from hf_ga.speed.chunked_loss import CHUNK_BYTES, OutputProjection, cross_entropy

MAX_LENGTH = 512
# Seconds that the host needs to launch one kernel: an assumption, no vendor states it.
LAUNCH_SECONDS = (2e-6, 5e-6)
# AdamW reads weight, gradient and two moments, and writes all but the gradient; clipping reads the
# gradient twice and writes it once. All in float32.
OPTIMIZER_BYTES = 4 * (4 + 3 + 3)  # for each weight
# Operators that launch no kernel.
FREE = ("detach", "empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh")
# Operators that read only some rows of their first input: about as many bytes as they write.
GATHERS = ("embedding", "index", "gather", "nll_loss_forward")


@dataclass(frozen=True)
class Device:
    """What a GPU can do at most.

    Attributes:
        name: The name of the GPU.
        flops: Dense bf16 operations of its matrix units in a second.
        bandwidth: Bytes a second between the GPU and its memory.
    """

    name: str
    flops: float
    bandwidth: float


# NVIDIA's data sheets "H100 Tensor Core GPU" and "H200 Tensor Core GPU": 1,979 TFLOP/s with
# sparsity, half of it for dense matrices; 3.35 and 4.8 TB/s.
DEVICES = {
    "h100": Device("H100 SXM", 989e12, 3.35e12),
    "h200": Device("H200 SXM", 989e12, 4.8e12),
}


@dataclass(frozen=True)
class Shape:
    """The shape of a model.

    Attributes:
        kind: One of `MODELS`, a causal language model or a classifier.
        layers: Number of layers.
        width: Hidden size.
        heads: Number of attention heads.
        words: Size of the vocabulary.
    """

    kind: str
    layers: int = 12
    width: int = 768
    heads: int = 12
    words: int = 50257


SHAPES = {"gpt": Shape("gpt"), "bert": Shape("bert", words=30522)}
NAMES = {"gpt": "GPT-2-small", "bert": "BERT-base"}


@dataclass(frozen=True)
class Mode:
    """A way of training.

    Attributes:
        name: Its name in the table.
        batches: A function (lengths of an epoch, window, micro-batch) -> the samples of each
            micro-batch.
        keeps_scores: Whether attention stores scores, weights and masks, of length x length.
        is_packed: Whether layers compute real tokens only; else samples are padded to the longest
            of the micro-batch.
        is_lean: Whether GPT-2's activation is one kernel, and logits are computed chunk by chunk.
    """

    name: str
    batches: Callable[[np.ndarray, int, int], list[np.ndarray]]
    keeps_scores: bool = False
    is_packed: bool = False
    is_lean: bool = False


@dataclass(frozen=True)
class Work:
    """What some micro-batches take.

    Attributes:
        flops: Operations of matrix products.
        num_bytes: Bytes read and written.
        kernels: Number of launched kernels.
        tokens: Number of tokens, padding included.
        micro_batches: Their number.
    """

    flops: float = 0.0
    num_bytes: float = 0.0
    kernels: float = 0.0
    tokens: float = 0.0
    micro_batches: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    def __truediv__(self, number: float) -> "Work":
        return Work(*(value / number for value in vars(self).values()))


def random_batches(lengths: np.ndarray, window: int, micro_batch: int) -> list[np.ndarray]:
    """Make micro-batches as Trainer does by default: in any order."""
    order = np.random.default_rng(0).permutation(len(lengths))
    return np.array_split(order, -(-len(order) // micro_batch))


def grouped_batches(lengths: np.ndarray, window: int, micro_batch: int) -> list[np.ndarray]:
    """Make micro-batches as Trainer's group_by_length does."""
    generator = torch.Generator().manual_seed(0)
    sampler = LengthGroupedSampler(window, lengths=lengths.tolist(), generator=generator)
    return np.array_split(np.array([*sampler]), -(-len(lengths) // micro_batch))


def rebalanced_batches(lengths: np.ndarray, window: int, micro_batch: int) -> list[np.ndarray]:
    """Make micro-batches as Trainer's batch_rebalance does."""
    sampler = BatchRebalanceSampler(lengths.tolist(), window, 1, window // micro_batch)
    return [np.array(batch) for batch in sampler]


def planned_batches(lengths: np.ndarray, window: int, micro_batch: int) -> list[np.ndarray]:
    """Make micro-batches by hf_ga's plan for a GPU, of windows in any order."""
    order = np.random.default_rng(0).permutation(len(lengths))
    plan = ByLength(micro_batch, None, GPU_OVERHEAD, lockstep=False)
    batches = []
    for start in range(0, len(order), window):
        samples = order[start : start + window]
        (of_process,) = plan(lengths[samples], 1)
        batches += [samples[offsets] for offsets in of_process]
    return batches


TRAINER = Mode("Trainer", random_batches)
HF_GA = Mode("hf_ga, packed", planned_batches, is_packed=True, is_lean=True)
PADDED_HF_GA = replace(HF_GA, name="hf_ga, padded, scores stored", is_packed=False)
MODES = (
    TRAINER,
    replace(TRAINER, name="Trainer, scores stored", keeps_scores=True),
    Mode("Trainer, group_by_length", grouped_batches),
    Mode("Trainer, batch_rebalance", rebalanced_batches),
    replace(PADDED_HF_GA, keeps_scores=True),
    HF_GA,
)


class CountKernels(TorchDispatchMode):
    """Count the operators that launch a kernel, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.namespace != "aten" or function.is_view or name in FREE:
            return outputs
        self.kernels += 1
        written = sum(map(bytes_of, tensors_in(outputs)))
        is_gather = name in GATHERS
        read = written if is_gather else sum(map(bytes_of, tensors_in([args, kwargs or {}])))
        self.num_bytes += read + written
        return outputs


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def bytes_of(tensor: Tensor) -> int:
    """Count the bytes of a tensor in memory: an expanded one is not larger than its storage."""
    shown = tensor.numel() * tensor.element_size()
    stored = tensor.untyped_storage().nbytes()
    return min(shown, stored)


def build(shape: Shape, mode: Mode) -> nn.Module:
    """Build the model in training mode, for fake tensors. Attention drops in its own kernel, if
    fused.
    """
    dropped = 0.1 if mode.keeps_scores else 0.0
    attention = "eager" if mode.keeps_scores else "sdpa"
    if shape.kind == "gpt":
        config = GPT2Config(
            vocab_size=shape.words,
            n_layer=shape.layers,
            n_embd=shape.width,
            n_head=shape.heads,
            n_positions=MAX_LENGTH,
            attn_pdrop=dropped,
            activation_function="gelu_pytorch_tanh" if mode.is_lean else "gelu_new",
            use_cache=False,
            attn_implementation=attention,
        )
        model = GPT2LMHeadModel(config)
        # transformers does not find it by GPT-2's class name.
        model.loss_type = "ForCausalLM"
        return model.train()
    config = BertConfig(
        vocab_size=shape.words,
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        attention_probs_dropout_prob=dropped,
        attn_implementation=attention,
    )
    return BertForSequenceClassification(config).train()


def count(model: nn.Module, shape: Shape, mode: Mode, lengths: np.ndarray) -> CountKernels:
    """Count a forward and backward in bf16, which adds to gradients that exist, on fake tensors.

    The operators are those of a CPU; where a GPU has fewer kernels (dropout), so has the count.
    """
    if mode.is_packed:
        rows = 1
        width = int(lengths.sum())
    else:
        rows = len(lengths)
        width = int(lengths.max())
    ids = torch.ones(rows, width, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if mode.is_packed:
        # transformers takes a mask of four axes as it is, and makes none of T x T.
        inputs["attention_mask"] = torch.ones(1, 1, 1, ids.shape[1], dtype=torch.bool)
    if mode.is_packed and shape.kind == "bert":
        # It has no positions for all tokens of a micro-batch.
        inputs |= {"position_ids": torch.zeros_like(ids), "token_type_ids": torch.zeros_like(ids)}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with ExitStack() as stack:
        stack.enter_context(override(F, dropout=_fused_dropout))
        counted = stack.enter_context(CountKernels())
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model, shape, mode, inputs, num_targets=int((lengths - 1).sum()))
        loss.backward()
    return counted


def _loss(
    model: nn.Module, shape: Shape, mode: Mode, inputs: dict[str, Tensor], num_targets: int
) -> Tensor:
    """Compute a loss by the operators of a mode; its value does not matter."""
    ids = inputs["input_ids"]
    if shape.kind == "bert":
        return model(**inputs, labels=torch.zeros(len(ids), dtype=torch.long)).loss
    if not mode.is_lean:
        return model(**inputs, labels=ids).loss
    hidden = model.transformer(**inputs).last_hidden_state
    hidden = hidden.flatten(0, 1)[torch.arange(num_targets)]
    head = OutputProjection(model.lm_head.weight, None, torch.bfloat16)
    rows = max(CHUNK_BYTES, hidden.numel() * 4) // (4 * len(head.weight))
    target = torch.ones(num_targets, dtype=torch.long)
    return cross_entropy(head, hidden, target, max(1, rows), mean=True)


def _fused_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Drop as on a GPU: by one kernel forward and one backward, like torch's and hf_ga's."""
    if not training or p == 0:
        return input
    output, _ = torch.native_dropout(input, p, training)
    return output


def flops(shape: Shape, mode: Mode, lengths: np.ndarray) -> float:
    """Count the operations of the matrix products of one forward and backward.

    6 for each weight of a layer and token (12 x width^2 weights); 12 x width for each layer and
    pair of tokens that attend; 6 x words x width for each token whose logits are computed. A
    padded batch computes all pairs; without padding a causal model computes half of them. What a
    fused backward computes again is left out.
    """
    is_causal = shape.kind == "gpt"
    padded = len(lengths) * int(lengths.max())
    tokens = int(lengths.sum()) if mode.is_packed else padded
    pairs = padded * int(lengths.max())
    if mode.is_packed:
        pairs = (lengths.astype(float) ** 2).sum() / (1 + is_causal)
    logits = int((lengths - 1).sum()) if mode.is_lean else padded
    in_layers = shape.layers * (72 * shape.width**2 * tokens + 12 * shape.width * pairs)
    return in_layers + is_causal * 6 * shape.words * shape.width * logits


def work_of_window(
    shape: Shape, mode: Mode, lengths: np.ndarray, window: int, micro_batch: int
) -> Work:
    """Compute the mean work of a window of an epoch, the optimizer's bytes included."""
    total = Work()
    batches = mode.batches(lengths, window, micro_batch)
    with FakeTensorMode():
        model = build(shape, mode)
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        for batch in batches:
            of_batch = lengths[batch]
            counted = count(model, shape, mode, of_batch)
            padded = len(of_batch) * int(of_batch.max())
            total += Work(
                flops=flops(shape, mode, of_batch),
                num_bytes=counted.num_bytes,
                kernels=counted.kernels,
                tokens=int(of_batch.sum()) if mode.is_packed else padded,
                micro_batches=1,
            )
    return total / (len(lengths) / window) + Work(num_bytes=OPTIMIZER_BYTES * num_weights)


def bounds(work: Work, device: Device, launch_seconds: float) -> tuple[float, float, float]:
    """Return the seconds of computing, of memory traffic and of launches. The largest is the
    prediction.

    >>> bounds(Work(flops=2e12, num_bytes=3e9, kernels=1000), Device("any", 1e12, 1e9), 5e-6)
    (2.0, 3.0, 0.005)
    """
    return (
        work.flops / device.flops,
        work.num_bytes / device.bandwidth,
        work.kernels * launch_seconds,
    )


def table(works: dict[str, Work], device: Device, real_tokens: float) -> str:
    """Return a table in Markdown with a row for each mode.

    Args:
        works: Name of a mode -> mean work of a window.
        device: The GPU.
        real_tokens: Tokens of a window without padding.
    """
    header = (
        "mode",
        "tokens / real",
        "micro-batches",
        "TFLOP",
        "GB",
        "kernels",
        "computing, ms",
        "memory, ms",
        "launches, ms",
        "prediction, ms",
        "times Trainer",
    )
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * (len(header) - 1)}"]
    first = next(iter(works.values()))
    for name, work in works.items():
        computing, memory, _ = bounds(work, device, 0.0)
        launches = [work.kernels * seconds for seconds in LAUNCH_SECONDS]
        times = [max(bounds(work, device, seconds)) for seconds in LAUNCH_SECONDS]
        of_first = [max(bounds(first, device, seconds)) for seconds in LAUNCH_SECONDS]
        ratios = [one / other for one, other in zip(of_first, times, strict=True)]
        cells = (
            name,
            f"{work.tokens / real_tokens:.2f}",
            f"{work.micro_batches:.1f}",
            f"{work.flops / 1e12:.1f}",
            f"{work.num_bytes / 1e9:.0f}",
            f"{work.kernels:,.0f}",
            f"{computing * 1e3:.0f}",
            f"{memory * 1e3:.0f}",
            _range(launches, 1e3, ".0f"),
            _range(times, 1e3, ".0f"),
            _range(ratios, 1, ".2f"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(values: Sequence[float], factor: float, digits: str) -> str:
    low, high = (f"{value * factor:{digits}}" for value in values)
    return low if low == high else f"{low} to {high}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=[*MODELS])
    add("--devices", nargs="+", choices=DEVICES, default=["h100"])
    add("--num_samples", type=int, default=1024, help="of an epoch (default: 1024)")
    add("--window", type=int, default=512, help="samples of a window (default: 512)")
    add("--micro_batch", type=int, default=32, help="samples of a micro-batch (default: 32)")
    add("--layers", type=int, default=12, help="of the models (default: 12)")
    flags = parser.parse_args(arguments)
    for kind in flags.models:
        samples = documentation_strings(kind, MAX_LENGTH, flags.num_samples)["samples"]
        lengths = np.array([len(sample["input_ids"]) for sample in samples])
        shape = replace(SHAPES[kind], layers=flags.layers)
        works = {
            mode.name: work_of_window(shape, mode, lengths, flags.window, flags.micro_batch)
            for mode in MODES
        }
        real_tokens = lengths.sum() / (len(lengths) / flags.window)
        for device in map(DEVICES.get, flags.devices):
            print(
                f"{NAMES[kind]} on one {device.name}, bf16, {real_tokens:,.0f} real tokens in a "
                f"window of {flags.window} (computed, not measured)\n"
            )
            print(table(works, device, real_tokens), end="\n\n")


if __name__ == "__main__":
    main()
