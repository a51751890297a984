"""Predict the time of one optimizer step on a GPU with a roofline model, without a GPU: the times
are computed, not measured.

For each way of training, the script counts what one window (the samples of one optimizer step) of
docstrings needs: floating point operations, bytes that pass through the GPU's memory, and kernel
launches. Each of them, divided by what the device can do in a second, is a lower bound of the time;
the largest bound is the prediction.

    python scripts/roofline.py
    python scripts/roofline.py --models gpt --devices h100 h200
    python scripts/roofline.py --lengths lognormal --max_length 1024 --window 64 --micro_batch 8

Compiled rows are counted under an assumption, see `KERNELS_OF_THEIR_OWN`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import MODELS, SAMPLES, Shape, build_model
from common import table as format_table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from hf_ga.model.override import override
from hf_ga.order.length_plan import GPU_OVERHEAD, ByLength, Computed, row_length
from hf_ga.speed.chunked_loss import CHUNK_BYTES, OutputProjection, chunked_cross_entropy

# Seconds that the host needs to launch one kernel: an assumption, no vendor states it.
LAUNCH_SECONDS = (2e-6, 5e-6)
# AdamW reads weight, gradient and two moments, and writes all but the gradient; clipping reads the
# gradient twice and writes it once. All in float32.
OPTIMIZER_BYTES = 4 * (4 + 3 + 3)  # for each weight
# Operators that launch no kernel.
OPERATORS_WITHOUT_KERNEL = (
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "_unsafe_view",
    "lift_fresh",
)
# Operators that read only some rows of their first input: about as many bytes as they write.
GATHER_OPERATORS = ("embedding", "index", "gather", "nll_loss_forward")
# Assumption about compiled layers: these operators stay kernels of their own (products, attention,
# and sums over tokens, which are gradients of biases and norms), as do conversions of a weight and
# sums into a gradient. All between two products is one kernel, which reads what others have
# written, and writes what others read.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = "_scaled_dot_product"  # how the names of its operators begin
KERNELS_OF_THEIR_OWN = (*PRODUCTS, "sum", "native_layer_norm_backward")


@dataclass(frozen=True)
class Device:
    """The peak performance of a GPU, for the roofline model.

    Attributes:
        name: The name of the GPU.
        flops: Dense bf16 floating point operations per second of its tensor cores.
        bandwidth: Memory bandwidth in bytes per second.
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


SHAPES = {"gpt": Shape("gpt"), "bert": Shape("bert", words=30522)}
MODEL_NAMES = {"gpt": "GPT-2-small", "bert": "BERT-base"}
POSITIONS = {"gpt": 1024, "bert": 512}
ATTENTION_DROPOUT = {"gpt": "attn_pdrop", "bert": "attention_probs_dropout_prob"}


@dataclass(frozen=True)
class Mode:
    """A way of training whose time the roofline model predicts, such as Trainer with
    group_by_length, or hf_ga with packing.

    Attributes:
        name: Name of the row in the table.
        batches: Function that splits an epoch into micro-batches: (tokens of each sample, samples
            of a window, samples of a micro-batch) -> the sample indices of each micro-batch.
        keeps_scores: Whether attention stores its scores, weights and dropout mask in memory, each
            of shape (heads, tokens, tokens); False for a fused attention kernel.
        is_packed: Whether layers only compute real tokens; otherwise samples are padded to the
            longest of the micro-batch.
        is_lean: Whether GPT-2's activation is one kernel, and the logits are computed in chunks, of
            target tokens only.
        has_rows: Whether each micro-batch is a row of one of a few lengths, and its layers are
            compiled. For packed modes only.
    """

    name: str
    batches: Callable[[np.ndarray, int, int], list[np.ndarray]]
    keeps_scores: bool = False
    is_packed: bool = False
    is_lean: bool = False
    has_rows: bool = False


@dataclass(frozen=True)
class Work:
    """The work of some micro-batches on a GPU, counted for the roofline model.

    Attributes:
        flops: Floating point operations of matrix products.
        num_bytes: Bytes of memory read and written.
        kernels: Number of launched kernels.
        tokens: Number of computed tokens, padding included.
        micro_batches: Number of micro-batches.
    """

    flops: float = 0.0
    num_bytes: float = 0.0
    kernels: float = 0.0
    tokens: float = 0.0
    micro_batches: float = 0.0


def random_batches(lengths: np.ndarray, window: int, micro_batch: int) -> list[np.ndarray]:
    """Split an epoch into micro-batches as Trainer does by default, in random order.

    Args:
        lengths: Tokens of each sample of the epoch, shape (samples,).
        window: Samples of an optimizer step.
        micro_batch: Maximum samples of a micro-batch.

    Returns:
        The sample indices of each micro-batch.
    """
    order = np.random.default_rng(0).permutation(len(lengths))
    return np.array_split(order, -(-len(order) // micro_batch))


def grouped_batches(lengths: np.ndarray, window: int, micro_batch: int) -> list[np.ndarray]:
    """Split an epoch into micro-batches as Trainer's sampling strategy group_by_length does.

    Args:
        lengths: Tokens of each sample of the epoch, shape (samples,).
        window: Samples of an optimizer step.
        micro_batch: Maximum samples of a micro-batch.

    Returns:
        The sample indices of each micro-batch.
    """
    generator = torch.Generator().manual_seed(0)
    sampler = LengthGroupedSampler(window, lengths=lengths.tolist(), generator=generator)
    return np.array_split(np.array([*sampler]), -(-len(lengths) // micro_batch))


def rebalanced_batches(lengths: np.ndarray, window: int, micro_batch: int) -> list[np.ndarray]:
    """Split an epoch into micro-batches as Trainer's sampling strategy batch_rebalance does.

    Args:
        lengths: Tokens of each sample of the epoch, shape (samples,).
        window: Samples of an optimizer step.
        micro_batch: Maximum samples of a micro-batch.

    Returns:
        The sample indices of each micro-batch.
    """
    sampler = BatchRebalanceSampler(lengths.tolist(), window, 1, window // micro_batch)
    return [np.array(batch) for batch in sampler]


def planned_batches(
    lengths: np.ndarray, window: int, micro_batch: int, *, computed: Computed = Computed.REAL
) -> list[np.ndarray]:
    """Split an epoch into windows in random order, and each into micro-batches by hf_ga's plan by
    length for a GPU.

    Args:
        lengths: Tokens of each sample of the epoch, shape (samples,).
        window: Samples of an optimizer step.
        micro_batch: Samples of a micro-batch of the longest samples; shorter ones are more.
        computed: Which tokens the plan counts.

    Returns:
        The sample indices of each micro-batch.
    """
    order = np.random.default_rng(0).permutation(len(lengths))
    has_rows = computed is Computed.ROWS
    plan = ByLength(
        micro_batch,
        micro_batch * int(lengths.max()) if has_rows else None,
        GPU_OVERHEAD,
        lockstep=False,
        computed=computed,
        pads_attention=False,
    )
    batches = []
    for start in range(0, len(order), window):
        samples = order[start : start + window]
        (micro_batches,) = plan(lengths[samples], 1)  # the plan of the only process
        batches += [samples[offsets] for offsets in micro_batches]
    return batches


TRAINER = Mode("Trainer", random_batches)
HF_GA = Mode("hf_ga, packed", planned_batches, is_packed=True, is_lean=True)
MODES = (
    TRAINER,
    replace(TRAINER, name="Trainer, scores stored", keeps_scores=True),
    Mode("Trainer, group_by_length", grouped_batches),
    Mode("Trainer, batch_rebalance", rebalanced_batches),
    Mode(
        "hf_ga, padded, scores stored",
        partial(planned_batches, computed=Computed.PADDED),
        keeps_scores=True,
        is_lean=True,
    ),
    HF_GA,
    replace(
        HF_GA,
        name="hf_ga, compiled rows",
        batches=partial(planned_batches, computed=Computed.ROWS),
        has_rows=True,
    ),
)


class CountKernels(TorchDispatchMode):
    """Context manager that counts the operators that launch a GPU kernel within the block, and the
    bytes that they read and write.

    Attributes:
        kernels: Number of operators that launch a kernel.
        num_bytes: Bytes that they read and write.
        is_compiled: Whether the operators that follow are compiled, and so share kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.num_bytes = 0
        self.is_compiled = False
        self._made: dict[int, Any] = {}  # by compiled operators: the storage of each result
        self._unwritten: dict[int, int] = {}  # results no other kernel has read yet -> bytes
        self._in_kernel: set[int] = set()  # what the current kernel has read or computed
        self._is_in_kernel = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call an operator and count it, unless it is a view or launches no kernel."""
        kwargs = kwargs or {}
        outputs = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if function.namespace != "aten" or function.is_view or name in OPERATORS_WITHOUT_KERNEL:
            return outputs
        if self.is_compiled:
            self._count_compiled(name, [*tensors_in([args, kwargs])], [*tensors_in(outputs)])
            return outputs
        self.kernels += 1
        written = sum(map(bytes_in_memory, tensors_in(outputs)))
        if name in GATHER_OPERATORS:
            read = written
        else:
            read = sum(map(bytes_in_memory, tensors_in([args, kwargs])))
        self.num_bytes += read + written
        return outputs

    def _count_compiled(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Count an operator of a compiled graph, see `KERNELS_OF_THEIR_OWN`."""
        ends_kernel = name in PRODUCTS or name.startswith(ATTENTION)
        read = {_key(x) for x in inputs}
        is_sum_into = any(_key(x) in read and _key(x) not in self._made for x in outputs)
        is_of_weights = bool(inputs) and all(isinstance(x, nn.Parameter) for x in inputs)
        is_alone = ends_kernel or name in KERNELS_OF_THEIR_OWN or is_sum_into or is_of_weights
        if ends_kernel:
            self._is_in_kernel = False
        self.kernels += is_alone or not self._is_in_kernel
        if not is_alone and not self._is_in_kernel:
            self._is_in_kernel = True
            self._in_kernel = set()
        in_kernel = set() if is_alone else self._in_kernel
        for tensor in inputs if name not in GATHER_OPERATORS else outputs:
            if _key(tensor) not in in_kernel:
                in_kernel.add(_key(tensor))
                self.num_bytes += self._unwritten.pop(_key(tensor), 0) + bytes_in_memory(tensor)
        for tensor in outputs:
            self._made[_key(tensor)] = tensor.untyped_storage()  # kept: its key is its own
            if is_alone:
                self.num_bytes += bytes_in_memory(tensor)
            else:
                self._in_kernel.add(_key(tensor))
                self._unwritten[_key(tensor)] = bytes_in_memory(tensor)


def _key(tensor: Tensor) -> int:
    """Return what a tensor has in common with its views."""
    return tensor.untyped_storage()._cdata


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def bytes_in_memory(tensor: Tensor) -> int:
    """Return the bytes that a kernel reads or writes for a tensor: those of its elements, but at
    most those of its storage, which is smaller for an expanded tensor.
    """
    bytes_of_elements = tensor.numel() * tensor.element_size()
    bytes_of_storage = tensor.untyped_storage().nbytes()
    return min(bytes_of_elements, bytes_of_storage)


def build(shape: Shape, mode: Mode) -> nn.Module:
    """Build a GPT-2 or BERT in training mode, to be counted with fake tensors.

    With a fused attention kernel the model has no attention dropout, because the kernel does it
    without more work.

    Args:
        shape: The sizes of the model.
        mode: The way of training, which chooses the attention and the activation.
    """
    arguments: dict[str, Any] = {}
    if not mode.keeps_scores:
        arguments[ATTENTION_DROPOUT[shape.kind]] = 0.0
    if shape.kind == "gpt":
        arguments["use_cache"] = False
        if mode.is_lean:
            arguments["activation_function"] = "gelu_pytorch_tanh"
    attention = "eager" if mode.keeps_scores else "sdpa"
    return build_model(
        shape, positions=POSITIONS[shape.kind], attn_implementation=attention, **arguments
    )


def count(
    model: nn.Module, shape: Shape, mode: Mode, lengths: np.ndarray, tail: int = 0
) -> CountKernels:
    """Count the kernels and bytes of one micro-batch's forward and backward in bf16, on fake
    tensors; the backward adds to existing gradients.

    The operators are those of a CPU, except that dropout counts as one kernel, as on a GPU.

    Args:
        model: The model, of fake tensors.
        shape: The sizes of the model.
        mode: The way of training.
        lengths: Tokens of each sample, shape (samples,).
        tail: Tokens of the row that belong to no sample.
    """
    if mode.is_packed:
        num_rows = 1
        num_columns = int(lengths.sum()) + tail
    else:
        num_rows = len(lengths)
        num_columns = int(lengths.max())
    ids = torch.ones(num_rows, num_columns, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if mode.is_packed:
        # transformers uses a mask of four dims as it is, and builds none of tokens x tokens.
        inputs["attention_mask"] = torch.ones(1, 1, 1, ids.shape[1], dtype=torch.bool)
    if mode.is_packed and shape.kind == "bert":
        # BERT's position embeddings are for one sample, so pass positions that exist.
        inputs |= {"position_ids": torch.zeros_like(ids), "token_type_ids": torch.zeros_like(ids)}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with ExitStack() as stack:
        stack.enter_context(override(F, dropout=_fused_dropout))
        counter = stack.enter_context(CountKernels())
        counter.is_compiled = mode.has_rows
        with torch.autocast("cpu", torch.bfloat16):
            eager = override(counter, is_compiled=False)
            loss = _loss(model, shape, mode, inputs, int((lengths - 1).sum()), eager)
        loss.backward()
    return counter


def _loss(
    model: nn.Module,
    shape: Shape,
    mode: Mode,
    inputs: dict[str, Tensor],
    num_targets: int,
    eager: AbstractContextManager[None],
) -> Tensor:
    """Compute the model's loss with the operators of a way of training; the value does not matter.
    The loss in chunks, of `num_targets` tokens, is in the context `eager`: it is not compiled.
    """
    ids = inputs["input_ids"]
    if shape.kind == "bert":
        return model(**inputs, labels=torch.zeros(len(ids), dtype=torch.long)).loss
    if not mode.is_lean:
        return model(**inputs, labels=ids).loss
    hidden = model.transformer(**inputs).last_hidden_state
    with eager:
        hidden = hidden.flatten(0, 1)[torch.arange(num_targets)]
        head = OutputProjection(model.lm_head.weight, None, torch.bfloat16)
        rows = max(CHUNK_BYTES, hidden.numel() * 4) // (4 * len(head.weight))
        target = torch.ones(num_targets, dtype=torch.long)
        return chunked_cross_entropy(head, hidden, target, max(1, rows), mean=True)


def _fused_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Replacement for `F.dropout` with one kernel in the forward and one in the backward, as
    torch's and hf_ga's dropout have on a GPU.
    """
    if not training or p == 0:
        return input
    output, _ = torch.native_dropout(input, p, training)
    return output


def flops(shape: Shape, mode: Mode, lengths: np.ndarray, tail: int = 0) -> float:
    """Count the floating point operations of all matrix products of one micro-batch's forward and
    backward.

    A layer has 12 x width^2 weights, each with 6 operations for each token. Attention has 12 x
    width operations for each layer and pair of tokens: a padded batch computes all pairs, a packed
    causal model half of each sample's. A language model's output projection has 6 x words x width
    operations for each token whose logits are computed. Operations that a fused backward
    recomputes are not counted.

    Args:
        shape: The sizes of the model.
        mode: The way of training.
        lengths: Tokens of each sample, shape (samples,).
        tail: Tokens of the row that belong to no sample.
    """
    is_causal = shape.kind == "gpt"
    longest = int(lengths.max())
    num_padded = len(lengths) * longest
    if mode.is_packed:
        num_tokens = int(lengths.sum()) + tail
        num_pairs = (lengths.astype(float) ** 2).sum() / (1 + is_causal)
    else:
        num_tokens = num_padded
        num_pairs = num_padded * longest
    layer_flops = 72 * shape.width**2 * num_tokens + 12 * shape.width * num_pairs
    total = shape.layers * layer_flops
    if is_causal:
        num_logits = int((lengths - 1).sum()) if mode.is_lean else num_padded
        total += 6 * shape.words * shape.width * num_logits
    return total


def work_of_window(
    shape: Shape, mode: Mode, lengths: np.ndarray, window: int, micro_batch: int
) -> Work:
    """Count the work of one optimizer step, on average over the windows of an epoch, with the bytes
    that the optimizer reads and writes.

    Args:
        shape: The sizes of the model.
        mode: The way of training.
        lengths: Tokens of each sample of the epoch, shape (samples,).
        window: Samples of an optimizer step.
        micro_batch: Samples of a micro-batch.
    """
    works = []
    batches = mode.batches(lengths, window, micro_batch)
    with FakeTensorMode():
        model = build(shape, mode)
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        for batch in batches:
            batch_lengths = lengths[batch]
            num_real = int(batch_lengths.sum())
            num_padded = len(batch_lengths) * int(batch_lengths.max())
            tail = 0
            if mode.has_rows:
                tail = row_length(num_real, micro_batch * int(lengths.max())) - num_real
            counter = count(model, shape, mode, batch_lengths, tail)
            works.append(
                Work(
                    flops=flops(shape, mode, batch_lengths, tail),
                    num_bytes=counter.num_bytes,
                    kernels=counter.kernels,
                    tokens=num_real + tail if mode.is_packed else num_padded,
                    micro_batches=1,
                )
            )
    num_windows = len(lengths) / window
    works.append(Work(num_bytes=OPTIMIZER_BYTES * num_weights * num_windows))
    return Work(*np.sum([astuple(work) for work in works], axis=0) / num_windows)


def table(works: dict[str, Work], device: Device, real_tokens: float) -> str:
    """Format the predicted times of one optimizer step as a Markdown table with a row for each way
    of training.

    Args:
        works: Name of the way of training -> work of one optimizer step. The first one is the
            baseline of the speed-ups.
        device: The GPU.
        real_tokens: Tokens of one optimizer step without padding.
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
    rows = []
    times_of_trainer: list[float] = []
    for name, work in works.items():
        computing = work.flops / device.flops
        memory = work.num_bytes / device.bandwidth
        launches = [work.kernels * seconds for seconds in LAUNCH_SECONDS]
        times = [max(computing, memory, launch) for launch in launches]
        times_of_trainer = times_of_trainer or times
        speed_ups = [base / time for base, time in zip(times_of_trainer, times, strict=True)]
        rows.append(
            [
                name,
                f"{work.tokens / real_tokens:.2f}",
                f"{work.micro_batches:.1f}",
                f"{work.flops / 1e12:.1f}",
                f"{work.num_bytes / 1e9:.0f}",
                f"{work.kernels:,.0f}",
                f"{computing * 1e3:.0f}",
                f"{memory * 1e3:.0f}",
                _format_range(launches, 1e3, ".0f"),
                _format_range(times, 1e3, ".0f"),
                _format_range(speed_ups, 1, ".2f"),
            ]
        )
    return format_table(header, rows)


def _format_range(values: Sequence[float], factor: float, digits: str) -> str:
    """Format two numbers, times a factor, as "low to high", or as one if they look the same."""
    low, high = (f"{value * factor:{digits}}" for value in values)
    return low if low == high else f"{low} to {high}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command scripts/roofline.py: print a table of predicted times for each model and GPU.

    Args:
        arguments: The command-line flags. None: those of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=[*MODELS])
    add("--devices", nargs="+", choices=DEVICES, default=["h100"])
    add("--num_samples", type=int, default=1024, help="samples of an epoch (default: 1024)")
    add("--window", type=int, default=512, help="samples of a window (default: 512)")
    add("--micro_batch", type=int, default=32, help="samples of a micro-batch (default: 32)")
    add("--lengths", choices=SAMPLES, default="docstrings", help="see scripts/benchmark.py")
    add("--max_length", type=int, default=512, help="tokens of the longest sample (default: 512)")
    add("--layers", type=int, default=12, help="layers of the models (default: 12)")
    flags = parser.parse_args(arguments)
    for kind in flags.models:
        samples = SAMPLES[flags.lengths](kind, flags.max_length, flags.num_samples)
        lengths = np.array([len(sample["input_ids"]) for sample in samples])
        shape = replace(SHAPES[kind], layers=flags.layers)
        works = {
            mode.name: work_of_window(shape, mode, lengths, flags.window, flags.micro_batch)
            for mode in MODES
        }
        real_tokens = lengths.sum() / (len(lengths) / flags.window)
        for device in map(DEVICES.get, flags.devices):
            print(
                f"{MODEL_NAMES[kind]} on one {device.name}, bf16, {real_tokens:,.0f} real tokens "
                f"in a window of {flags.window} (computed, not measured)\n"
            )
            print(table(works, device, real_tokens), end="\n\n")


if __name__ == "__main__":
    main()
