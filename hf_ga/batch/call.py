"""`hf_ga.backward`: the gradient of one batch in micro-batches, in place of
`model(**batch).loss.backward()`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_ga.batch.backend import make_backend
from hf_ga.batch.collated import Axes, CollatedBatch, told_apart
from hf_ga.batch.ranks import (
    Agreement,
    agree_on_global_batch,
    gather_batches,
)
from hf_ga.engine.whole.whole_window import WholeBatchLoss
from hf_ga.errors import ConfigError
from hf_ga.loading.fetch import WindowRequest
from hf_ga.loading.window import LoaderState, Window
from hf_ga.model.forward import LossFunction, module_modes, unwrapped
from hf_ga.order.plan import plan_by_sizes
from hf_ga.parallel.backend import Backend
from hf_ga.training import LossSettings, check_one_loss, loop_of

# A sample's dropout masks are keyed by one int64: step * MAX_SAMPLES + index in the global batch.
MAX_SAMPLES = 2**32
MAX_STEPS = 2**31


@dataclass
class BatchWindow(Window):
    """The global batch of one call of `hf_ga.backward`, as a window that the engine computes.

    Attributes:
        can_pad: Whether all micro-batches can have one padded length: those of all ranks have it,
            or have no padding.
    """

    can_pad: bool = True

    @property
    def description(self) -> str:
        """The name of this batch of `hf_ga.backward` in error messages."""
        return f"the batch of step {self.index}"

    def padded_to_window(self) -> Window:
        """Return the window with all micro-batches padded to the length of the batch.

        Raises:
            ConfigError: If the ranks' batches have different padded lengths, so that there is no
                single batch whose gradient could be computed.
        """
        if not self.can_pad:
            raise ConfigError(
                "the loss depends on the padded length, and the batches of the ranks have "
                "different padded lengths, so they are not one batch: pad all batches to the same "
                "length in the collate function."
            )
        return super().padded_to_window()


@dataclass
class CallMemory:
    """What `hf_ga.backward` keeps for a model between its calls.

    Attributes:
        step: Number of the next call.
        max_elements: Maximum number of padded elements in one micro-batch. None: memory never ran
            out.
        states: `Agreement.kind` -> what batches with the same entries share, such as padding.
        axes: Structure of a batch (`CollatedBatch.structure`) -> the token axes of its entries: of
            those that had the same padded length in all earlier batches.
    """

    step: int = 0
    max_elements: int | None = None
    states: dict[Any, LoaderState] = field(default_factory=dict)
    axes: dict[tuple[str, ...], Axes] = field(default_factory=dict)

    def __reduce__(self) -> tuple:
        """Pickle and copy what `hf_ga.backward` keeps for a model as an empty memory: it refers to
        modules of this model, not of its copy.
        """
        return CallMemory, ()


def backward(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    micro_batch_size: int | Literal["auto"],
    loss_fn: LossFunction | None = None,
    whole_batch: WholeBatchLoss | None = None,
    accelerator: Accelerator | None = None,
    seed: int | None = None,
    step: int | None = None,
    allow_split_dependent_randomness: bool = False,
) -> Tensor:
    """Add the gradient of a batch's mean loss to `.grad`, computed in micro-batches.

    Replaces `loss = model(**batch).loss; loss.backward()` in any loop. The gradient is that of one
    forward and backward of the whole batch, for every `micro_batch_size`. With several ranks it is
    that of the batches of all ranks together, which may differ in size. Gradients are summed over
    the ranks here, once, both under DistributedDataParallel and with a plain model in a process
    group.

    What the loss averages over is read from its autograd graph, as in `hf_ga.Accelerator`; random
    numbers of the forward belong to samples. In some calls, some samples are computed twice, in
    other company, to find losses in which they depend on each other.

    Args:
        model: The model, in training mode. It may be wrapped by DistributedDataParallel, not by
            FSDP.
        batch: The model's arguments by name, with one row for each sample. A batch on a GPU is
            copied to the host first, so pass it as the DataLoader returns it.
        micro_batch_size: Maximum number of samples in one forward. "auto" starts with the whole
            batch. Whenever memory runs out, the batch is computed again in micro-batches of half
            the size, which the next calls keep.
        loss_fn: A function (outputs, batch) -> (sum of the loss over the targets, number of
            targets), which replaces the model's own loss. Define it outside of the loop.
        whole_batch: A function (outputs, batch) -> the loss of all samples together, a scalar, in
            place of `loss_fn`: in-batch negatives, the hardest samples. It gets outputs and batch
            of all ranks. Each micro-batch has two forwards. See `hf_ga.prepare`.
        accelerator: The accelerator that prepared the model, for its precision (the loss scale of
            fp16) and its ranks. Default: the caller's `torch.autocast` and torch's default process
            group.
        seed: The seed of the dropout masks. Default: `torch.initial_seed()` of rank 0.
        step: Number of this call, from which its dropout masks are derived. Default: one more than
            in the last call, beginning with 0. After a resume pass it once; the next calls continue
            from there.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.

    Returns:
        The mean loss over the targets of the global batch, a detached scalar; 0 for a batch without
        targets, which adds no gradient.

    Raises:
        ConfigError: If an argument cannot be used, or the model is in evaluation mode.
        DataError: If the batch cannot be split into samples.
        LossNotAdditive: If the loss is not a sum of means, or compares samples.
        UnkeyedRandomness: If some random draws cannot be tied to a sample.
        OutOfMemory: If a single sample does not fit.
        ProcessFailed: If another rank raised an error.

    Example:
        for batch in loader:
            loss = hf_ga.backward(model, batch, micro_batch_size=8)
            optimizer.step()
            optimizer.zero_grad()
    """
    check_one_loss(loss_fn, whole_batch)
    _check_arguments(micro_batch_size, step)
    backend = make_backend(model, accelerator)
    memory = _memory_of(model)
    if step is None:
        step = memory.step
    losses = (loss_fn, whole_batch)
    # The backend turns autocast on again, for forwards only.
    with torch.autocast(backend.device.type, enabled=False):
        collated, agreement = _collate_and_agree(
            backend, model, batch, memory, losses=losses, seed=seed, step=step
        )
        state = memory.states.setdefault(agreement.kind, LoaderState())
        state.max_elements = memory.max_elements
        window = _make_window(
            backend,
            collated,
            agreement,
            state,
            needs_all=whole_batch is not None,
            micro_batch_size=micro_batch_size,
            step=step,
        )
        settings = LossSettings(loss_fn, whole_batch, allow_split_dependent_randomness)
        result = loop_of(model, backend, settings).add_gradients(window)
    memory.max_elements = state.max_elements
    memory.step = step + 1
    return result.loss_tensor


def _check_arguments(micro_batch_size: Any, step: Any) -> None:
    """Check the arguments of `hf_ga.backward` that can be checked without the model, and that
    gradients are enabled.
    """
    if micro_batch_size != "auto":
        is_integer = isinstance(micro_batch_size, int) and not isinstance(micro_batch_size, bool)
        if not is_integer or micro_batch_size < 1:
            raise ConfigError(
                f'micro_batch_size must be an integer of at least 1 or "auto", got '
                f"{micro_batch_size!r}."
            )
    if not torch.is_grad_enabled():
        raise ConfigError("hf_ga.backward computes gradients: call it outside of torch.no_grad().")
    if step is not None and not 0 <= step < MAX_STEPS:
        raise ConfigError(f"step must be at least 0 and below {MAX_STEPS}, got {step}.")


def _memory_of(model: nn.Module) -> CallMemory:
    """Return what `hf_ga.backward` keeps for a model: an attribute of it, not an entry of a global
    table, which would refer to the model and keep it from being freed.
    """
    attributes = vars(unwrapped(model))
    return attributes.setdefault("_hf_ga_backward", CallMemory())


def _collate_and_agree(
    backend: Backend,
    model: nn.Module,
    batch: Mapping[str, Any],
    memory: CallMemory,
    *,
    losses: tuple[LossFunction | None, WholeBatchLoss | None],
    seed: int | None,
    step: int,
) -> tuple[CollatedBatch, Agreement]:
    """Read this rank's batch, and exchange with the other ranks what all must know about the global
    batch. Stores its token axes in `memory`.
    """
    with backend.failing_on_all_ranks():
        collated = CollatedBatch(batch)
    structure = collated.structure
    if collated.num_samples:
        earlier = memory.axes.get(structure, collated.axes)
        collated.set_axes(told_apart([collated.axes, earlier]))
    agreement = agree_on_global_batch(
        backend,
        collated,
        seed=torch.initial_seed() if seed is None else seed,
        step=step,
        setup=(module_modes(unwrapped(model)), *(loss is None for loss in losses)),
    )
    if not model.training:
        raise ConfigError("the model is in evaluation mode: call model.train() before the loop.")
    if collated.num_samples:
        memory.axes[structure] = collated.axes
    return collated, agreement


def _make_window(
    backend: Backend,
    collated: CollatedBatch,
    agreement: Agreement,
    state: LoaderState,
    *,
    needs_all: bool,
    micro_batch_size: int | Literal["auto"],
    step: int,
) -> BatchWindow:
    """Make the window of one call. Its micro-batches have samples of similar lengths of this rank,
    taken from the gathered global batch if `needs_all`, or if some rank has no samples.
    """
    if micro_batch_size == "auto":
        micro_batch_size = max(1, collated.num_samples)
    (micro_batches,) = plan_by_sizes(collated.lengths, 1, [micro_batch_size])
    first_offset = agreement.first_offset(backend.process_index)
    needs_all = needs_all or 0 in agreement.num_samples_by_rank
    if needs_all and backend.num_processes > 1:
        collated = gather_batches(backend, collated)
    else:
        collated.first_offset = first_offset
    offsets = np.arange(agreement.num_samples)
    is_split = len(micro_batches) > 1 or backend.num_processes > 1
    # Whether padding matters shows in a rehearsal, which a batch in one piece has not.
    keeps_padding = state.pad_to_window or not (is_split or state.is_width_tried)
    request = WindowRequest(
        seed=agreement.seed,
        epoch=0,
        index=step,
        positions=step * MAX_SAMPLES + offsets,
        sample_ids=offsets,
        micro_batches=[first_offset + indices for indices in micro_batches],
        max_micro_batches=backend.max_over_ranks(len(micro_batches)),
        pad_to_window=keeps_padding and agreement.can_pad,
    )
    return BatchWindow(request, collated, collated[request], state, can_pad=agreement.can_pad)
