"""A loss of all samples of a window together: in-batch negatives, the hardest samples, a mean over
anything. No sum over micro-batches is this loss, but one has its gradient:

1. A first pass without gradients computes the outputs o of all micro-batches. The ranks exchange
   them, in the order of the window.
2. The loss L(o) and its gradient g = dL / do are computed once, in float32.
3. The second pass has the same dropout, so the same outputs. The sum of o x g over a micro-batch,
   with g constant, has the gradient of L through these outputs.

(The method is that of Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup", https://arxiv.org/abs/2101.06983, which stores the random states of the first pass.
Keyed dropout needs none.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.errors import ConfigError, LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.batches import Batch
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import FirstPass, Loss, OwnSum, Sums
from hf_ga.exact.outputs import named_tensors, plain_values, with_tensors
from hf_ga.exact.precision import at_least_float32, not_autocast
from hf_ga.exact.window import Window

# (outputs of all samples of a window, its batch) -> the loss, a scalar
WholeBatchLoss = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class UsedOutputs:
    """The tensors among a model's outputs that a loss of a whole window uses, by name.

    Attributes:
        of_samples: The loss has a gradient with respect to them; they have one row per sample.
        shared: So it has to these, which do not depend on the samples (a learned temperature).
        read: The loss needs them, but has no gradient with respect to them.
        parameters: Whether the loss depends on parameters directly.
    """

    of_samples: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    parameters: bool = False

    @property
    def kept(self) -> frozenset[str]:
        """All of them."""
        return self.of_samples | self.shared | self.read


class WindowBatch(Mapping):
    """The collated batch of all samples of a window, on the device. It is collated when an entry is
    read for the first time: many losses read none.

    Args:
        window: The window.
        device: Where the tensors go.
    """

    def __init__(self, window: Window, device: torch.device) -> None:
        self._window = window
        self._device = device
        self._batch: Batch | None = None

    def _collated(self) -> Batch:
        if self._batch is None:
            self._batch = self._window.whole_batch(self._device)
        return self._batch

    def __getitem__(self, name: str) -> Any:
        return self._collated()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._collated())

    def __len__(self) -> int:
        return len(self._collated())


class Projection:
    """A loss function by which a proof sees whether the outputs of a sample depend on others.

    It is the sum of (o + r)^2 / 2 over all elements o of the outputs, with fixed numbers r that
    differ from element to element. So nothing cancels in it, and it is additive just if the outputs
    of a sample do not depend on its micro-batch.

    Args:
        used: The outputs that it takes.
    """

    def __init__(self, used: UsedOutputs) -> None:
        self.used = used

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, int]:
        """Compute the sum of (o + r)^2 / 2, and count the samples; as a `loss_fn`."""
        tensors = named_tensors(outputs)
        total = torch.zeros(())
        number = 0
        for name in sorted(self.used.of_samples):
            value = at_least_float32(tensors[name])
            shifted = value + _fixed_numbers(value)
            total = total.to(value.device) + shifted.square().sum() / 2
            number = len(value)
        return total, number


@dataclass(frozen=True)
class _Gradients:
    """The gradient of the loss of one window.

    Attributes:
        loss: A scalar.
        of_outputs: For each used output, the gradient of the loss with respect to it: one row per
            sample of the window, or like the output where it is shared.
        window: The window.
    """

    loss: Tensor
    of_outputs: dict[str, Tensor]
    window: Window


class WholeWindow(Loss):
    """The user's loss of all samples of a window together.

    Args:
        whole_batch: (outputs of all samples, batch of all samples) -> the loss, a scalar. If it is
            a module, its parameters are trained, too.
        used: The outputs that it uses.
    """

    name = "whole_batch"
    needs_first_pass = True

    def __init__(self, whole_batch: WholeBatchLoss, used: UsedOutputs) -> None:
        self.whole_batch = whole_batch
        self.used = used
        self.uses_parameters = used.parameters
        self.own_gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._gradients: _Gradients | None = None

    @property
    def value(self) -> Tensor:
        """The loss of the window, a scalar, after `prepare`."""
        return self._gradients.loss

    @property
    def additive(self) -> OwnSum:
        """A loss of the same outputs that is additive just if they do not depend on the split."""
        return OwnSum(Projection(self.used))

    def count(self, batch: Batch, num_samples: int) -> Counts:
        return (num_samples,)

    def prepare(self, first_pass: FirstPass) -> Counts:
        """Compute the loss of the window and its gradient with respect to the outputs.

        Raises:
            ConfigError: If the loss is not a scalar tensor.
            LossNotAdditive: If rows of outputs have different shapes in different micro-batches, or
                the loss depends on no output.
            UnkeyedRandomness: If the loss draws random numbers.
        """
        window = first_pass.window
        outputs, tensors = self._outputs_of_window(first_pass)
        names = sorted(self.used.of_samples | self.used.shared)
        leaves = [tensors[name].requires_grad_() for name in names]
        parameters = _distinct([*first_pass.parameters, *parameters_of(self.whole_batch)])
        batch = WindowBatch(window, first_pass.device)
        loss = loss_of_all(self.whole_batch, outputs, batch, first_pass.device)
        with not_autocast(first_pass.device):  # which would compute this backward in half precision
            found = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True)
        of_outputs = {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for name, leaf, gradient in zip(names, leaves, found, strict=False)
        }
        self.own_gradients = [
            # Autograd gives one tensor, or an expanded one, to several parameters.
            (parameter, first_pass.from_first_rank(first_pass.scaled(gradient.clone())))
            for parameter, gradient in zip(parameters, found[len(leaves) :], strict=True)
            if gradient is not None
        ]
        self._gradients = _Gradients(loss.detach(), of_outputs, window)
        return (window.num_samples,)

    def _outputs_of_window(self, first_pass: FirstPass) -> tuple[Any, dict[str, Tensor]]:
        """Compute the outputs of all samples of the window on all ranks, in its order, and return
        them with the tensors in them.
        """
        window = first_pass.window
        tensors: dict[str, Tensor] = {}
        plain: list[Any] | None = None
        for call in first_pass.calls:
            outputs = first_pass.forward(call)
            if plain is not None and plain != plain_values(outputs):
                raise LossNotAdditive(
                    "the model returns numbers that are not the same for all micro-batches "
                    f"({plain[:4]} and {plain_values(outputs)[:4]}), which the loss of the whole "
                    "window would take from one of them: return tensors with one row per sample."
                )
            plain = plain_values(outputs)
            offsets = torch.as_tensor(window.offsets_of(call.micro_batch))
            found = named_tensors(outputs)
            for name in self.used.kept:
                if name not in found:
                    raise LossNotAdditive(
                        f"the model does not return {name!r} for every micro-batch, which the loss "
                        "of the whole window needs."
                    )
                value = at_least_float32(found[name])
                if name in self.used.shared:
                    tensors[name] = value.clone()
                    continue
                rows = tensors.setdefault(name, value.new_zeros(_with_rows(value, window)))
                _check_rows(name, value, rows, len(offsets))
                if call.weight:
                    rows[offsets.to(value.device)] = value
        for name in sorted(set(tensors) - self.used.shared):
            tensors[name] = _sum_over_ranks(tensors[name], first_pass)
        return with_tensors(outputs, tensors), tensors

    def sums(self, outputs: Any, call: Call) -> tuple[Sums, Counts]:
        """Compute a micro-batch's share of the loss of the window.

        Its gradient with respect to the micro-batch's outputs is that of the loss of the window.
        """
        gradients = self._gradients
        offsets = torch.as_tensor(gradients.window.offsets_of(call.micro_batch))
        has_first_sample = bool((offsets == 0).any())
        tensors = named_tensors(outputs)
        term = torch.zeros((), device=gradients.loss.device)
        for name, gradient in gradients.of_outputs.items():
            output = at_least_float32(tensors[name])
            if name in self.used.of_samples:
                own_gradient = gradient[offsets.to(gradient.device)]
                term = term + (output * own_gradient).sum()
            else:  # one of the window's micro-batches has all of its gradient
                term = term + (output * gradient).sum() * has_first_sample
        share = gradients.loss * (len(offsets) / gradients.window.num_samples)
        only_gradient = term - term.detach()  # the value is 0
        return (only_gradient + share,), call.counts

    def mean(self, sums: Sums, totals: Counts) -> Tensor | float:
        return sums[0]


def loss_of_all(
    whole_batch: WholeBatchLoss, outputs: Any, batch: Batch, device: torch.device
) -> Tensor:
    """Compute the loss of all samples of a window, in the precision of the outputs.

    Args:
        whole_batch: The user's loss function.
        outputs: Of all samples.
        batch: Of all samples.
        device: Of the model.

    Raises:
        ConfigError: If the loss is not a scalar tensor.
        LossNotAdditive: If it has no gradient.
        UnkeyedRandomness: If it draws random numbers.
    """
    before = random_states()
    with torch.enable_grad(), not_autocast(device):
        loss = whole_batch(outputs, batch)
    moved = moved_generators(before)
    if moved:
        raise UnkeyedRandomness(
            f"whole_batch drew from {' and '.join(moved)}, so every rank would compute another "
            "loss. Let it depend on the outputs and the batch only; what is random belongs into "
            "the dataset, the collate function or the model."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"whole_batch must return the loss as a scalar tensor, got {loss!r:.80}. (A sum and a "
            "number of targets, or a loss per sample, is for loss_fn.)"
        )
    if not loss.requires_grad:
        raise LossNotAdditive(
            "the loss of whole_batch does not depend on the outputs of the model: it is detached, "
            "or computed from something else than its arguments."
        )
    return loss.reshape(())


def _sum_over_ranks(tensor: Tensor, first_pass: FirstPass) -> Tensor:
    """Sum rows of which each is zero on all ranks but one."""
    if tensor.dtype != torch.bool:
        return first_pass.all_reduce(tensor)
    return first_pass.all_reduce(tensor.to(torch.uint8)).bool()


def _with_rows(value: Tensor, window: Window) -> tuple[int, ...]:
    return (window.num_samples, *value.shape[1:])


def _check_rows(name: str, value: Tensor, rows: Tensor, num_samples: int) -> None:
    if value.dim() and len(value) == num_samples and value.shape[1:] == rows.shape[1:]:
        return
    raise LossNotAdditive(
        f"the model's {name!r} has shape {list(value.shape)} for {num_samples} samples, and rows "
        f"of shape {list(rows.shape[1:])} in another micro-batch, so the rows of a window cannot "
        "be put together. Pad all batches to one width, or return one vector per sample."
    )


def _fixed_numbers(like: Tensor) -> Tensor:
    """Return a number for each place in a row, which does not depend on the size of the row."""
    numbers = torch.ones((), device=like.device, dtype=like.dtype)
    for axis, size in enumerate(like.shape[1:]):
        places = torch.arange(1, size + 1, device=like.device, dtype=like.dtype)
        numbers = numbers.unsqueeze(-1) * torch.cos(places * (axis + 1.5))
    return numbers


def parameters_of(whole_batch: WholeBatchLoss) -> list[nn.Parameter]:
    """Return the trainable parameters of a loss that is a module."""
    if not isinstance(whole_batch, nn.Module):
        return []
    return [p for p in whole_batch.parameters() if p.requires_grad]


def _distinct(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameters))
