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

from hf_ga.errors import ConfigError, LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.batches import Batch, MicroBatch
from hf_ga.exact.forward import restored_buffers
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.memory import is_out_of_memory
from hf_ga.exact.outputs import named_tensors, non_tensor_values, with_tensors
from hf_ga.exact.precision import at_least_float32, autocast_disabled
from hf_ga.exact.window import Window

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
class FirstForward:
    """A forward of the first pass over a window.

    Attributes:
        micro_batch: Its samples.
        outputs: What the model returned, without gradients.
        is_counted: Whether the samples belong to the window of this rank: not those of a filler.
    """

    micro_batch: MicroBatch
    outputs: Any
    is_counted: bool


@dataclass(frozen=True)
class FirstPass:
    """The first pass over a window on this rank.

    Attributes:
        window: The window.
        forwards: The forwards of this rank, at least one.
        device: The device of the model.
        process_index: The index of this rank.
        parameters: The trainable parameters of the model.
        all_reduce: Sums a tensor over the ranks.
        scaled: Multiplies a tensor by the fp16 loss scale.
    """

    window: Window
    forwards: Sequence[FirstForward]
    device: torch.device
    process_index: int
    parameters: Sequence[nn.Parameter]
    all_reduce: Callable[[Tensor], Tensor]
    scaled: Callable[[Tensor], Tensor]

    def from_first_rank(self, tensor: Tensor) -> Tensor:
        """Broadcast the first rank's tensor, such as a gradient of the window's loss, to all ranks,
        as they may have rounded differently: an all-reduce in which the other ranks pass zeros.
        """
        return self.all_reduce(tensor if self.process_index == 0 else torch.zeros_like(tensor))


@dataclass(frozen=True)
class _Inputs:
    """What the loss of a window was computed from, and what came out.

    Attributes:
        outputs: The outputs of all samples.
        batch: Their batch.
        leaves: The tensors in `outputs`, then the parameters, which have gradients.
        loss: The loss.
        gradients: Of each leaf. None where there is none.
        device: The device of the model.
    """

    outputs: Any
    batch: Mapping[str, Any]
    leaves: list[Tensor]
    loss: Tensor
    gradients: tuple[Tensor | None, ...]
    device: torch.device


@dataclass(frozen=True)
class _Gradients:
    """The loss of one window and its gradients with respect to the model's outputs.

    Attributes:
        loss: The loss, a scalar.
        output_gradients: By the name of the output, the gradient of the loss with respect to it:
            one row per sample of the window, or the shape of an output that all samples share.
        window: The window.
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
        outputs, tensors = self._window_outputs(first_pass)
        names = sorted(self.used.per_sample | self.used.shared)
        leaves = [tensors[name].requires_grad_() for name in names]
        parameters = _distinct([*first_pass.parameters, *parameters_of(self.whole_batch)])
        batch = LazyWindowBatch(window, first_pass.device)
        loss = loss_of_all(self.whole_batch, outputs, batch, first_pass.device)
        gradients = _gradients_of(loss, [*leaves, *parameters], first_pass.device)
        output_gradients = {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for name, leaf, gradient in zip(names, leaves, gradients, strict=False)
        }
        parameter_gradients = gradients[len(leaves) :]
        self.direct_gradients = [
            # Cloned, as autograd may return one tensor for several parameters, or an expanded one.
            (parameter, first_pass.from_first_rank(first_pass.scaled(gradient.clone())))
            for parameter, gradient in zip(parameters, parameter_gradients, strict=True)
            if gradient is not None
        ]
        self._gradients = _Gradients(loss.detach(), output_gradients, window)
        self._inputs = None
        if is_checked:
            leaves = [*leaves, *parameters]
            self._inputs = _Inputs(
                outputs, batch, leaves, loss.detach(), gradients, first_pass.device
            )

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
        """Exchange the outputs of this rank's forwards, so that all ranks have those of the whole
        window, in its order.

        Returns:
            The outputs as `whole_batch` gets them (those that it does not use are None), and the
            tensors in them by name, in at least float32.

        Raises:
            LossNotAdditive: If the outputs of the micro-batches cannot be concatenated: one is
                missing, its rows have another shape, or values that are not tensors differ.
        """
        window = first_pass.window
        tensors: dict[str, Tensor] = {}
        other_values: list[Any] | None = None
        for forward in first_pass.forwards:
            outputs = forward.outputs
            values = non_tensor_values(outputs)
            if other_values is not None:
                _check_same_values(other_values, values)
            other_values = values
            self._copy_outputs(forward, window, tensors)
        for name in sorted(set(tensors) - self.used.shared):
            tensors[name] = _merge_rows_of_ranks(tensors[name], first_pass)
        return with_tensors(outputs, tensors), tensors

    def _copy_outputs(
        self, forward: FirstForward, window: Window, tensors: dict[str, Tensor]
    ) -> None:
        """Copy the outputs of a micro-batch to the rows of its samples in the outputs of the whole
        window. An output that all samples share is stored as it is.

        Args:
            forward: The forward of the micro-batch. Of one that is not counted, no rows are copied.
            window: The window.
            tensors: The outputs of the window by name, filled in place.

        Raises:
            LossNotAdditive: If an output that the loss uses is missing, or its rows have another
                shape than in other micro-batches.
        """
        offsets = torch.as_tensor(window.offsets_of(forward.micro_batch))
        of_micro_batch = named_tensors(forward.outputs)
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
            if forward.is_counted:
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
    buffers = restored_buffers(whole_batch) if is_module and is_extra else nullcontext()
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
    """Merge the output rows that each rank has computed for its own samples of the window, and
    return the merged rows on all ranks.

    Args:
        rows: One row per sample of the window; zeros for samples of other ranks.
        first_pass: Has the all-reduce, a sum over the ranks.
    """
    if rows.dtype != torch.bool:
        return first_pass.all_reduce(rows)
    return first_pass.all_reduce(rows.to(torch.uint8)).bool()


def _check_same_values(expected: list[Any], values: list[Any]) -> None:
    """Check that the values other than tensors in the model's outputs are the same for two
    micro-batches, as the loss of the whole window gets those of one of them.

    Raises:
        LossNotAdditive: If they differ.
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
    other micro-batches of the window.

    Args:
        name: The name of the output.
        output: The output of the micro-batch.
        rows: The rows of the whole window, into which it will be copied.
        num_samples: The number of samples of the micro-batch.

    Raises:
        LossNotAdditive: If it has another number of rows, or rows of another shape.
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


def _distinct(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Drop repeated parameters, and keep the order: the model and a loss of the whole window may
    share some.
    """
    return list(dict.fromkeys(parameters))


def _gradients_of(
    loss: Tensor, leaves: Sequence[Tensor], device: torch.device
) -> tuple[Tensor | None, ...]:
    """Return the gradient of a loss with respect to each leaf, None where there is none."""
    with autocast_disabled(device):  # which would compute this backward in half precision
        return torch.autograd.grad(loss, leaves, allow_unused=True)


def _is_same(now: Tensor | None, before: Tensor | None) -> bool:
    """Whether two tensors are the same up to rounding: both None, or close to each other.

    True if neither is finite: NaN is no other loss than NaN, and is reported before the update.
    """
    if now is None or before is None:
        return now is before
    if bool(now.isfinite().all()) != bool(before.isfinite().all()):
        return False
    change = (now.detach() - before).norm()
    return not bool(change > SAME_LOSS * before.norm())
