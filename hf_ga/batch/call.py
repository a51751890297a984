"""`hf_ga.backward`: the gradient of one batch in micro-batches, in place of
`model(**batch).loss.backward()`.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_ga.batch.backend import make_backend
from hf_ga.batch.collated import CollatedBatch, CollatedFetcher
from hf_ga.batch.padding import TokenEntries, refined
from hf_ga.batch.ranks import (
    Agreement,
    agree,
    gather,
    proof_samples,
    raise_on_all_ranks,
)
from hf_ga.errors import ConfigError
from hf_ga.exact.backend import Backend
from hf_ga.exact.engine import Engine
from hf_ga.exact.fetch import WindowRequest
from hf_ga.exact.forward import LossFunction, module_modes, unwrapped
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.exact.rule import Rule
from hf_ga.exact.step import add_gradients
from hf_ga.exact.whole_window import WholeBatchLoss
from hf_ga.exact.window import LoaderState, Window
from hf_ga.training import Given, check_one_loss, rule_for

# A sample's dropout masks are keyed by one int64: step, then place in the global batch.
MOST_SAMPLES = 2**32
MOST_STEPS = 2**31


class BatchWindow(Window):
    """The global batch of one call."""

    @property
    def description(self) -> str:
        """The name that error messages give it."""
        return f"the batch of step {self.index}"


@dataclass
class CallMemory:
    """What is kept of a model between calls.

    Attributes:
        step: Number of the next call.
        max_elements: Largest number of padded elements in one micro-batch. None: memory never ran
            out.
        states: Kind of batch -> what was proven of it, and what audits have seen.
        token_entries: Structure of a batch -> its entries that had the same width in all batches.
        loss: The loss function of the last call. None: the model's own loss.
    """

    step: int = 0
    max_elements: int | None = None
    states: dict[Any, LoaderState] = field(default_factory=dict)
    token_entries: dict[tuple[str, ...], tuple[TokenEntries, ...]] = field(default_factory=dict)
    loss: LossFunction | WholeBatchLoss | None = None

    def note_loss(self, loss: LossFunction | WholeBatchLoss | None) -> None:
        """Note the loss function of a call, and warn if it is another one than before."""
        is_another = self.loss is not None and self.loss != loss
        if loss is not None and is_another:
            warnings.warn(
                "hf_ga.backward: the loss function is another one than in the last call, so it is "
                "proven again, which takes time: define it outside of the loop.",
                stacklevel=3,
            )
        self.loss = loss

    def __reduce__(self) -> tuple:
        """Let a copy of the model start anew: what was proven holds hooks of this one."""
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
    audit: bool = True,
) -> Tensor:
    """Add the gradient of a batch's mean loss to `.grad`, computed in micro-batches.

    Replaces `loss = model(**batch).loss; loss.backward()` in any loop. The gradient is that of one
    forward and backward of the whole batch, for every `micro_batch_size`; with several ranks that
    of the batches of all ranks together, which may differ in size. Gradients are summed over the
    ranks here, once; under DistributedDataParallel and with a plain model in a process group.

    The first call of a model, and of each new kind of batch (other entries), proves on samples of
    the batch what the loss averages over.

    Args:
        model: In training mode; may be wrapped by DistributedDataParallel, not by FSDP.
        batch: The model's arguments by name, with one row for each sample. A batch on a GPU is
            copied to the host first, so pass it as the DataLoader returns it.
        micro_batch_size: Largest number of samples in one forward. "auto" starts with the whole
            batch. Whenever memory runs out, the batch is computed again in micro-batches of half
            the size, which the next calls keep to.
        loss_fn: A function (outputs, batch) -> (sum of the loss over the targets, number of
            targets), which replaces the head's own loss. Define it outside of the loop.
        whole_batch: A function (outputs, batch) -> the loss of all samples together, a scalar, in
            place of `loss_fn`: in-batch negatives, the hardest samples. It gets outputs and batch
            of all ranks. Each micro-batch has two forwards. See `hf_ga.prepare`.
        accelerator: The accelerator that prepared the model, for its precision (the loss scale of
            fp16) and its ranks. Default: the caller's `torch.autocast` and torch's default process
            group.
        seed: The seed of the dropout masks. Default: `torch.initial_seed()` of rank 0.
        step: Number of this call, which keys its dropout masks. Default: one more than in the last
            call, beginning with 0. After a resume pass it once, and the count goes on from there.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.
        audit: Test the loss again on the batches that come, before their gradients are returned.

    Returns:
        The mean loss over the targets of the global batch, a detached scalar; 0 for a batch without
        targets, which adds no gradient.

    Raises:
        ConfigError: If an argument cannot be used, or the model is in evaluation mode.
        DataError: If the batch cannot be cut into samples.
        LossNotAdditive: If the loss is no sum over targets, in the proof or in an audit.
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
    memory.note_loss(loss_fn or whole_batch)
    if step is None:
        step = memory.step
    given = Given(loss_fn, whole_batch, allow_split_dependent_randomness, audit=audit)
    # The backend turns autocast on again, for forwards only.
    with torch.autocast(backend.device.type, enabled=False):
        collated, agreement = _agreed(backend, model, batch, memory, given, seed, step)
        fetcher = _fetcher(backend, collated, agreement, given)
        window = _window(backend, fetcher, collated, agreement, memory, micro_batch_size, step)
        rule = _rule(backend, model, window, given)
        _check_widths(rule, agreement)
        engine = Engine(
            backend,
            model,
            rule,
            allow_split_dependent_randomness=allow_split_dependent_randomness,
            is_audited=audit,
        )
        result = add_gradients(engine, window)
    memory.max_elements = window.state.max_elements
    memory.step = step + 1
    return result.loss_tensor


def _check_arguments(micro_batch_size: Any, step: Any) -> None:
    """Check the arguments of a call that need no model.

    Raises:
        ConfigError: If one of them cannot be used, or gradients are disabled.
    """
    is_number = isinstance(micro_batch_size, int) and not isinstance(micro_batch_size, bool)
    if micro_batch_size != "auto" and (not is_number or micro_batch_size < 1):
        raise ConfigError(
            f'micro_batch_size must be an integer of at least 1 or "auto", got '
            f"{micro_batch_size!r}."
        )
    if not torch.is_grad_enabled():
        raise ConfigError("hf_ga.backward computes gradients: call it outside of torch.no_grad().")
    if step is not None and not 0 <= step < MOST_STEPS:
        raise ConfigError(f"step must be at least 0 and below {MOST_STEPS}, got {step}.")


def _memory_of(model: nn.Module) -> CallMemory:
    """Return what is kept of a model, made at the first call.

    The model itself keeps it: what was proven refers to the model, so a table of models would keep
    it from being freed.
    """
    attributes = vars(unwrapped(model))
    return attributes.setdefault("_hf_ga_backward", CallMemory())


def _agreed(
    backend: Backend,
    model: nn.Module,
    batch: Mapping[str, Any],
    memory: CallMemory,
    given: Given,
    seed: int | None,
    step: int,
) -> tuple[CollatedBatch, Agreement]:
    """Collate this rank's batch, and let the ranks agree on the global one.

    Returns:
        This rank's batch, and what the ranks agreed on.

    Raises:
        ConfigError: If the model is in evaluation mode, or ranks differ in what they should not.
        DataError: If the batch cannot be used.
        ProcessFailed: If another rank's batch cannot.
    """
    collated = None
    failure = None
    try:
        collated = CollatedBatch(batch)
    except Exception as error:
        # `agree` raises it on all ranks.
        failure = error
    if collated is not None and collated.structure in memory.token_entries:
        known = memory.token_entries[collated.structure]
        collated.cut_padding_of(refined(collated.token_entries, known))
    agreement = agree(
        backend,
        collated,
        failure,
        seed=torch.initial_seed() if seed is None else seed,
        step=step,
        setup=[
            module_modes(unwrapped(model)),
            given.loss_fn is None,
            given.whole_batch is None,
        ],
    )
    if not model.training:
        raise ConfigError("the model is in evaluation mode: call model.train() before the loop.")
    if collated.num_samples:
        memory.token_entries[collated.structure] = collated.token_entries
    return collated, agreement


def _fetcher(
    backend: Backend, collated: CollatedBatch, agreement: Agreement, given: Given
) -> CollatedFetcher:
    """Return a fetcher of micro-batches from this rank's batch, or from the global batch where
    other ranks' samples are needed: by a loss of all of them, and by a rank that has none.
    """
    samples_of_proof = partial(proof_samples, backend, collated, agreement)
    needs_all = given.whole_batch is not None or 0 in agreement.sizes
    if needs_all and backend.num_processes > 1:
        return CollatedFetcher(gather(backend, collated), 0, samples_of_proof)
    first = agreement.first_of(backend.process_index)
    return CollatedFetcher(collated, first, samples_of_proof)


def _window(
    backend: Backend,
    fetcher: CollatedFetcher,
    collated: CollatedBatch,
    agreement: Agreement,
    memory: CallMemory,
    micro_batch_size: int | Literal["auto"],
    step: int,
) -> BatchWindow:
    """Return the global batch of all ranks, with this rank's samples in micro-batches of similar
    lengths.
    """
    first = agreement.first_of(backend.process_index)
    size = micro_batch_size
    if micro_batch_size == "auto":
        size = max(1, collated.num_samples)
    (micro_batches,) = plan_by_sizes(collated.lengths, 1, [size])
    places = np.arange(agreement.num_samples)
    state = memory.states.setdefault(agreement.kind, LoaderState())
    state.max_elements = memory.max_elements
    request = WindowRequest(
        seed=agreement.seed,
        epoch=0,
        index=step,
        positions=step * MOST_SAMPLES + places,
        sample_ids=places,
        micro_batches=[first + rows for rows in micro_batches],
        pad_to_window=state.pad_to_window,
    )
    return BatchWindow(request, fetcher, fetcher[request], state)


def _rule(backend: Backend, model: nn.Module, window: BatchWindow, given: Given) -> Rule:
    """Return what was proven for this kind of batch, and prove it now if it was not.

    Raises:
        ConfigError: If no trainable parameter has a gradient, or the model has changed.
        LossNotAdditive: See `backward`.
        UnkeyedRandomness: See `backward`.
        ProcessFailed: If the proof failed on another rank.
    """
    base = unwrapped(model)
    rules = window.state.rules
    known = rules.get(base)
    failure = None
    try:
        rule = rule_for(model, window, given)
    except Exception as error:
        failure = error
    is_new = rules.get(base) is not known
    if is_new or failure is not None:
        raise_on_all_ranks(backend, failure)
    rule.check_fits(model)
    trained = {name for name, p in base.named_parameters() if p.requires_grad}
    if rule.unused >= trained:
        raise ConfigError(
            "the loss has no gradient: no trainable parameter takes part in it, or it is detached."
        )
    return rule


def _check_widths(rule: Rule, agreement: Agreement) -> None:
    """Refuse batches of different widths whose loss depends on the width.

    Raises:
        ConfigError: If no single batch would have the samples of all ranks.
    """
    if rule.pad_to_window and agreement.is_padded and not agreement.has_one_width:
        raise ConfigError(
            "the loss depends on the padded width (or that could not be tested), and the batches "
            "of the ranks have different widths, so they are no one batch: pad all batches to the "
            "same width in the collate function."
        )
