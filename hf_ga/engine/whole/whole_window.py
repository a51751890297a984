"""A loss of all samples of a window together: in-batch negatives, the hardest samples, any mean. It
is not a sum over micro-batches, but a sum over micro-batches has the same gradient:

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
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.draws.generators import moved_generators, random_states
from hf_ga.engine.slots import Slot
from hf_ga.errors import ConfigError, LossNotAdditive, UnkeyedRandomness
from hf_ga.loading.batches import MicroBatch
from hf_ga.loading.memory import is_out_of_memory
from hf_ga.loading.window import Window
from hf_ga.model.forward import Batch, restored_state
from hf_ga.model.outputs import named_tensors, non_tensor_values, with_tensors
from hf_ga.model.precision import at_least_float32, autocast_disabled
from hf_ga.parallel.backend import Backend, RankStatus

# (outputs of all samples of a window, its batch) -> the loss, a scalar
WholeBatchLoss = Callable[[Any, Batch], Tensor]
# Relative difference of a loss, or its gradients, that may be rounding: the same function of the
# same numbers.
SAME_LOSS = 1e-4


@dataclass(frozen=True)
class UsedOutputs:
    """The names of the model outputs that a loss of a whole window uses, and whether it also uses
    parameters directly.

    Attributes:
        per_sample: Outputs with one row per sample, with respect to which the loss has a gradient.
        shared: Outputs that do not depend on the samples (a learned temperature), with respect to
            which the loss has a gradient.
        without_gradient: Outputs that the loss reads, but with respect to which it has no gradient.
        uses_parameters: Whether the loss depends on trainable parameters directly.
    """

    per_sample: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    without_gradient: frozenset[str] = frozenset()
    uses_parameters: bool = False

    @property
    def names(self) -> frozenset[str]:
        """The names of all model outputs that the loss of the whole window uses, with or without a
        gradient.
        """
        return self.per_sample | self.shared | self.without_gradient


class LazyWindowBatch(Mapping):
    """The collated batch of all samples of a window, on the device, as the batch argument of the
    user's `whole_batch` loss.

    It is collated lazily, when an entry is read for the first time, as many losses only use the
    model's outputs.

    Args:
        window: The window.
        device: The device on which the tensors are put.
    """

    def __init__(self, window: Window, device: torch.device) -> None:
        """Create the batch of all samples of a window, for a `whole_batch` loss, without collating
        it yet.
        """
        self._window = window
        self._device = device
        self._batch: Batch | None = None  # None until an entry is read

    def _collated(self) -> Batch:
        """Return the batch of all samples of the window for a `whole_batch` loss; the first call
        collates it.
        """
        if self._batch is None:
            self._batch = self._window.whole_batch(self._device)
        return self._batch

    def __getitem__(self, name: str) -> Any:
        """Return an entry of the window's batch for a `whole_batch` loss. The first access collates
        the batch.
        """
        return self._collated()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the entries of the window's batch, which is collated at the
        first access.
        """
        return iter(self._collated())

    def __len__(self) -> int:
        """Return the number of entries of the window's batch, which is collated at the first
        access.
        """
        return len(self._collated())


@dataclass(frozen=True)
class FirstPass:
    """The first pass over a window on this rank.

    Attributes:
        window: The window.
        slots: The micro-batches of this rank, at least one. No samples of a filler are counted.
        outputs: What the model returned for each of them, without gradients.
        parameters: The trainable parameters of the model.
        backend: How ranks communicate.
        status: The status of this rank.
    """

    window: Window
    slots: Sequence[Slot]
    outputs: Sequence[Any]
    parameters: Sequence[nn.Parameter]
    backend: Backend
    status: RankStatus

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks."""
        return self.backend.all_reduce(tensor, self.status)

    def from_first_rank(self, tensor: Tensor) -> Tensor:
        """Broadcast the first rank's tensor, such as a gradient of the window's loss, to all ranks,
        as they may have rounded differently: an all-reduce in which the other ranks pass zeros.
        """
        is_first = self.backend.process_index == 0
        return self.all_reduce(tensor if is_first else torch.zeros_like(tensor))


@dataclass(frozen=True)
class _Inputs:
    """What the loss of a window was computed from, and what came out."""

    outputs: Any
    batch: Mapping[str, Any]
    leaves: list[Tensor]  # in `outputs`, then the parameters
    loss: Tensor
    gradients: tuple[Tensor | None, ...]  # of each leaf
    device: torch.device


@dataclass(frozen=True)
class _Gradients:
    """The loss of one window, and its gradients by the output's name: one row per sample of the
    window, or the shape of an output that all samples share.
    """

    loss: Tensor
    output_gradients: dict[str, Tensor]
    window: Window


class WholeWindow:
    """The user's loss of all samples of a window together, computed from the outputs of a first
    pass over the window, with its gradient with respect to them.

    Args:
        whole_batch: The user's function (outputs of all samples, batch of all samples) -> scalar
            loss. If it is a module, its parameters are trained, too.
        used: The outputs that it uses.

    Attributes:
        direct_gradients: After `prepare`, the gradients of parameters that the loss uses directly,
            multiplied by the fp16 loss scale, the same on all ranks.
    """

    def __init__(self, whole_batch: WholeBatchLoss, used: UsedOutputs) -> None:
        """Wrap the user's loss of a whole window, given the model outputs that it uses."""
        self.whole_batch = whole_batch
        self.used = used
        self.direct_gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._gradients: _Gradients | None = None  # of the window that `prepare` got last
        self._inputs: _Inputs | None = None  # of that window, if it is checked again

    @property
    def value(self) -> Tensor:
        """The user's `whole_batch` loss of the window that was last passed to `prepare`, a
        scalar.
        """
        return self._gradients.loss

    def prepare(self, first_pass: FirstPass, *, is_checked: bool) -> None:
        """Compute the loss of the window, and its gradients with respect to the model's outputs and
        to parameters that it uses directly.

        Args:
            first_pass: The first pass over the window.
            is_checked: Whether `check_again` will be called for this window.

        Raises:
            ConfigError: If the loss is not a scalar tensor.
            LossNotAdditive: If rows of outputs have different shapes in different micro-batches, or
                the loss depends on no output.
            UnkeyedRandomness: If the loss draws random numbers.
        """
        window = first_pass.window
        backend = first_pass.backend
        outputs, tensors = self._window_outputs(first_pass)
        names = sorted(self.used.per_sample | self.used.shared)
        leaves = [tensors[name].requires_grad_() for name in names]
        # The model and the loss may share some.
        parameters = list(dict.fromkeys([*first_pass.parameters, *parameters_of(self.whole_batch)]))
        batch = LazyWindowBatch(window, backend.device)
        loss = loss_of_all(self.whole_batch, outputs, batch, backend.device)
        gradients = _gradients_of(loss, [*leaves, *parameters], backend.device)
        output_gradients = {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for name, leaf, gradient in zip(names, leaves, gradients, strict=False)
        }
        parameter_gradients = gradients[len(leaves) :]
        self.direct_gradients = [
            # Cloned, as autograd may return one tensor for several parameters, or an expanded one.
            (parameter, first_pass.from_first_rank(backend.scaled(gradient.clone())))
            for parameter, gradient in zip(parameters, parameter_gradients, strict=True)
            if gradient is not None
        ]
        self._gradients = _Gradients(loss.detach(), output_gradients, window)
        self._inputs = None
        if is_checked:
            leaves = [*leaves, *parameters]
            self._inputs = _Inputs(outputs, batch, leaves, loss.detach(), gradients, backend.device)

    def check_again(self) -> None:
        """Compute the loss of the window again from the same outputs, after other forwards.

        Raises:
            LossNotAdditive: If it is another one, or has another gradient: then it uses something
                that a forward left behind.
        """
        inputs = self._inputs
        self._inputs = None
        try:
            loss = loss_of_all(
                self.whole_batch, inputs.outputs, inputs.batch, inputs.device, is_extra=True
            )
            gradients = _gradients_of(loss, inputs.leaves, inputs.device)
            pairs = [(loss, inputs.loss), *zip(gradients, inputs.gradients, strict=True)]
            is_same = all(_is_same(now, before) for now, before in pairs)
        except (RuntimeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            is_same = False  # the shapes of what was left behind are others
        if not is_same:
            raise LossNotAdditive(
                "the loss of whole_batch, computed from the same outputs, is another one after "
                "another forward of the model, or has another gradient. Likely cause: it uses "
                "something of the model besides its outputs (what a hook or an attribute of the "
                "last forward holds). Let the model return it."
            )

    def _window_outputs(self, first_pass: FirstPass) -> tuple[Any, dict[str, Tensor]]:
        """Exchange outputs, so that all ranks have those of the whole window in its order. Returns
        them as `whole_batch` gets them (unused ones are None), and by name, at least float32.
        """
        window = first_pass.window
        tensors: dict[str, Tensor] = {}
        other_values: list[Any] | None = None
        for slot, outputs in zip(first_pass.slots, first_pass.outputs, strict=True):
            values = non_tensor_values(outputs)
            if other_values is not None:
                _check_same_values(other_values, values)
            other_values = values
            self._copy_outputs(slot, outputs, window, tensors)
        for name in sorted(set(tensors) - self.used.shared):
            tensors[name] = _merge_rows_of_ranks(tensors[name], first_pass)
        return with_tensors(outputs, tensors), tensors

    def _copy_outputs(
        self, slot: Slot, outputs: Any, window: Window, tensors: dict[str, Tensor]
    ) -> None:
        """Copy the outputs of a micro-batch, unless it is a filler, to the rows of its samples in
        the window's outputs `tensors`. One that all samples share is stored as it is.
        """
        offsets = torch.as_tensor(window.offsets_of(slot.micro_batch))
        of_micro_batch = named_tensors(outputs)
        for name in self.used.names:
            if name not in of_micro_batch:
                raise LossNotAdditive(
                    f"the model does not return {name!r} for every micro-batch, which the loss "
                    "of the whole window needs."
                )
            output = at_least_float32(of_micro_batch[name])
            if name in self.used.shared:
                tensors[name] = output.clone()
                continue
            rows = tensors.setdefault(name, _zero_rows(output, window))
            _check_rows(name, output, rows, len(offsets))
            if slot.is_counted:
                rows[offsets.to(output.device)] = output

    def part(self, outputs: Any, micro_batch: MicroBatch) -> Tensor:
        """Return a micro-batch's part of the window's loss.

        Its gradient with respect to the outputs of the micro-batch is that of the loss of the
        window. Its value is the loss of the window, times the micro-batch's share of the samples.

        Args:
            outputs: What the model returned for the micro-batch, with gradients.
            micro_batch: Its samples.
        """
        gradients = self._gradients
        offsets = torch.as_tensor(gradients.window.offsets_of(micro_batch))
        has_first_sample = bool((offsets == 0).any())
        tensors = named_tensors(outputs)
        term = torch.zeros((), device=gradients.loss.device)
        for name, gradient in gradients.output_gradients.items():
            output = at_least_float32(tensors[name])
            if name in self.used.per_sample:
                micro_batch_gradient = gradient[offsets.to(gradient.device)]
                term = term + (output * micro_batch_gradient).sum()
            else:  # the gradient of a shared output counts once, in one micro-batch of the window
                term = term + (output * gradient).sum() * has_first_sample
        # The term has the right gradient, but not a meaningful value: replace its value by a share
        # of the window's loss, so that the values of all micro-batches add up to that loss.
        value = gradients.loss * (len(offsets) / gradients.window.num_samples)
        only_gradient = term - term.detach()  # its value is 0
        return only_gradient + value


def loss_of_all(
    whole_batch: WholeBatchLoss,
    outputs: Any,
    batch: Batch,
    device: torch.device,
    *,
    is_extra: bool = False,
) -> Tensor:
    """Call the user's loss of a whole window with gradients enabled and without autocast, and check
    what it returns.

    Args:
        whole_batch: The user's loss function.
        outputs: The model's outputs for all samples of the window.
        batch: The batch of all samples of the window.
        device: The device of the model.
        is_extra: Whether this call is beside the one of the window, so that buffers of a loss that
            is a module stay as they are.

    Returns:
        The loss, a tensor of shape ().

    Raises:
        ConfigError: If the loss is not a scalar tensor.
        LossNotAdditive: If it has no gradient.
        UnkeyedRandomness: If it draws from a random generator.
    """
    before = random_states()
    is_module = isinstance(whole_batch, nn.Module)
    buffers = restored_state(whole_batch) if is_module and is_extra else nullcontext()
    with torch.enable_grad(), autocast_disabled(device), buffers:
        loss = whole_batch(outputs, batch)
    moved = moved_generators(before)
    if moved:
        raise UnkeyedRandomness(
            f"whole_batch drew from {' and '.join(moved)}, so every rank would compute a "
            "different loss. Let it depend on the outputs and the batch only; draw random "
            "numbers in the dataset, the collate function or the model."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"whole_batch must return the loss as a scalar tensor, got {loss!r:.80}. (A sum and a "
            "number of targets, or a loss per sample, is for loss_fn.)"
        )
    if not loss.requires_grad:
        raise LossNotAdditive(
            "the loss of whole_batch does not depend on the outputs of the model: it is detached, "
            "or computed from something other than its arguments."
        )
    return loss.reshape(())


def _merge_rows_of_ranks(rows: Tensor, first_pass: FirstPass) -> Tensor:
    """Return the output rows of all ranks, given those of this rank, with zeros for samples of
    others.
    """
    if rows.dtype != torch.bool:
        return first_pass.all_reduce(rows)
    return first_pass.all_reduce(rows.to(torch.uint8)).bool()


def _check_same_values(expected: list[Any], values: list[Any]) -> None:
    """Check that the values other than tensors in the outputs are the same for two micro-batches,
    as the loss of the whole window gets those of one of them.
    """
    if expected != values:
        raise LossNotAdditive(
            "the model returns numbers that are not the same for all micro-batches "
            f"({expected[:4]} and {values[:4]}), but the loss of the whole window would use those "
            "of one micro-batch: return tensors with one row per sample."
        )


def _zero_rows(output: Tensor, window: Window) -> Tensor:
    """Return zeros with one row per sample of the window, with the row shape, dtype and device of a
    micro-batch's output.
    """
    return output.new_zeros((window.num_samples, *output.shape[1:]))


def _check_rows(name: str, output: Tensor, rows: Tensor, num_samples: int) -> None:
    """Check that an output of a micro-batch has one row per sample, of the same shape as in the
    window's other micro-batches, whose rows are in `rows`.
    """
    has_rows = output.dim() > 0 and len(output) == num_samples
    if has_rows and output.shape[1:] == rows.shape[1:]:
        return
    raise LossNotAdditive(
        f"the model's {name!r} has shape {list(output.shape)} for {num_samples} samples, and rows "
        f"of shape {list(rows.shape[1:])} in another micro-batch, so the rows of a window cannot "
        "be concatenated. Pad all batches to one length, or return one vector per sample."
    )


def parameters_of(whole_batch: WholeBatchLoss) -> list[nn.Parameter]:
    """Return the trainable parameters of the user's loss of a whole window, if it is a module;
    otherwise [].
    """
    if not isinstance(whole_batch, nn.Module):
        return []
    return [p for p in whole_batch.parameters() if p.requires_grad]


def _gradients_of(
    loss: Tensor, leaves: Sequence[Tensor], device: torch.device
) -> tuple[Tensor | None, ...]:
    """Return the gradient of a loss with respect to each leaf, None where there is none."""
    with autocast_disabled(device):  # which would compute this backward in half precision
        return torch.autograd.grad(loss, leaves, allow_unused=True)


def _is_same(now: Tensor | None, before: Tensor | None) -> bool:
    """Whether two tensors are the same up to rounding, or both None. True if neither is finite: NaN
    is no other loss than NaN, and is reported before the update.
    """
    if now is None or before is None:
        return now is before
    if bool(now.isfinite().all()) != bool(before.isfinite().all()):
        return False
    change = (now.detach() - before).norm()
    return not bool(change > SAME_LOSS * before.norm())
