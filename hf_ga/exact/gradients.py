"""The forwards and backwards of one window on this process: what its share adds to the gradient of the window's mean loss."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from hf_ga.errors import ConfigError, LossNotAdditive
from hf_ga.exact.forward import LossFunction, argument_filter, callable_module, loss_of
from hf_ga.exact.keyed import sample_keys, window_key
from hf_ga.exact.reduce import Share, is_sharded, meet, sum_tensors
from hf_ga.exact.router import BalanceCall, add_calls
from hf_ga.exact.terms import Counts, add_counts, count_targets, window_term
from hf_ga.exact.windows import MicroBatch, Window
from hf_ga.parallel.sharding import gradient_sync
from hf_ga.proof.targets import TargetRule
from hf_ga.run.losses import CrossEntropySum


@dataclass
class Forward:
    """One forward and backward. weight: 0 where it is done only because the other processes do one (FSDP), else 1."""

    micro_batch: MicroBatch
    counts: Counts
    weight: int = 1


def head_gradients(
    accelerator: Accelerator, model: nn.Module, window: Window, rule: TargetRule, share: Share, *, sync_each: bool
) -> None:
    """Of the head's own mean loss: targets are counted first, on the host, so the divisor is known before any forward.

    Args:
        share: gets counts and loss; the loss is divided by the targets of the window already.
        sync_each: under FSDP, reduce the gradients after every micro-batch.
    """
    counts = [count_targets(rule.name, m.batch, len(m)) for m in window.micro_batches]
    share.counts = add_counts(rule.name, counts)
    totals = _totals(accelerator, window, share)
    if not sum(totals):
        return
    # A micro-batch without targets has no mean (0 / 0): it contributes nothing and is left out, unless its tokens were routed.
    forwards = [Forward(m, n) for m, n in zip(window.micro_batches, counts, strict=True) if any(n) or rule.router]
    forwards = as_many_as_others(accelerator, window, forwards, rule)
    with rule.active():
        balance = _balance(accelerator, model, window, rule, forwards, share)
        _add_terms(accelerator, model, window, rule, forwards, share, totals=totals, balance=balance, sync_each=sync_each)


def _add_terms(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    rule: TargetRule,
    forwards: Sequence[Forward],
    share: Share,
    *,
    totals: Counts,
    balance: list[BalanceCall],
    sync_each: bool,
) -> None:
    """Forward and backward of these micro-batches, one after the other."""
    module, accepted = callable_module(model), argument_filter(model)
    batches = keyed_batches(accelerator, window, rule, [f.micro_batch for f in forwards], share)
    for i, (batch, forward) in enumerate(zip(batches, forwards, strict=True)):
        with gradient_sync(accelerator, model, sync_each or i == len(forwards) - 1):
            rule.expect(forward.counts)
            with accelerator.autocast():  # a prepared model has its own; another one is not left in float32
                outputs = module(**accepted(batch))
                term = window_term(rule.name, outputs, batch, forward.counts, totals)
                if rule.router is not None:
                    term = term + rule.router.term(rule.router.take(), balance)
            _backward(accelerator, term, forward.weight)
        if forward.weight:
            share.loss += term.detach()


def summed_gradients(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    rule: TargetRule,
    loss_fn: LossFunction,
    share: Share,
    *,
    sync_each: bool,
) -> None:
    """Of an own loss, which counts during its forward: the divisor is known at the end, so gradients are divided by the samples of
    the window (which keeps their size), and the caller corrects that once.

    A count that is a number, not a tensor on the device, saves waiting for the device; hf_ga's own losses count on the host.

    Args:
        share: gets the loss, summed over the targets, and their number.
    """
    forwards = as_many_as_others(accelerator, window, [Forward(m, ()) for m in window.micro_batches])
    module, accepted, total = callable_module(model), argument_filter(model), 0.0
    batches = keyed_batches(accelerator, window, rule, [f.micro_batch for f in forwards], share)
    for i, (batch, forward) in enumerate(zip(batches, forwards, strict=True)):
        with gradient_sync(accelerator, model, sync_each or i == len(forwards) - 1):
            with accelerator.autocast():
                outputs = module(**accepted(batch))
                loss, number = loss_of(outputs, batch, loss_fn)
            known = isinstance(loss_fn, CrossEntropySum)
            count = loss_fn.count(forward.micro_batch.batch) if known else float(number)
            weight = forward.weight if count else 0
            if not weight and not is_sharded(accelerator):
                continue  # without targets the sum may be 0 / 0: it contributes nothing and is left out
            if not count and not (loss.requires_grad and torch.isfinite(loss)):
                raise LossNotAdditive(
                    "under FSDP loss_fn must return a finite sum that is computed from the outputs, also for a batch without "
                    f"targets (0 times a logit), got {loss}."
                )
            _backward(accelerator, loss / window.num_samples, weight)
        if weight:
            share.loss += loss.detach().to(share.loss.dtype)
            total += count
    share.counts = (total,)


@torch.no_grad()
def choices_of_experts(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    rule: TargetRule,
    micro_batches: Sequence[MicroBatch],
    share: Share | None = None,
) -> list[list[BalanceCall]]:
    """What experts the tokens of each micro-batch choose, by forwards that are done again with gradients: the same dropout."""
    module, accepted, calls = callable_module(model), argument_filter(model), []
    batches = keyed_batches(accelerator, window, rule, micro_batches, share)
    for batch, micro_batch in zip(batches, micro_batches, strict=True):
        rule.expect(count_targets(rule.name, micro_batch.batch, len(micro_batch)))
        with accelerator.autocast():
            module(**accepted(batch))
        calls.append(rule.router.take() if rule.router is not None else [])
    return calls


def set_keys(rule: TargetRule, window: Window, micro_batch: MicroBatch, device: torch.device) -> None:
    """The next forward on `device` computes these samples: their tokens, packed where that gains, and their dropout."""
    if rule.packing is not None:
        rule.packing.set_batch(micro_batch.batch, device)
    rule.places.set_keys(*_keys(window, [micro_batch], device))


def keyed_batches(
    accelerator: Accelerator,
    window: Window,
    rule: TargetRule,
    micro_batches: Iterable[MicroBatch],
    share: Share | None = None,
) -> Iterator[dict]:
    """Each micro-batch on the device, with its samples' keys set for the dropout of the next forward; `share` is told of it.

    Those of one shape that follow each other are told of at once, so that their masks can be drawn together.
    """
    device = accelerator.device
    for alike in [list(group) for _, group in groupby(micro_batches, _shape)]:
        keys, for_window = _keys(window, alike, device)
        for i, micro_batch in enumerate(alike):
            if share is not None:
                share.in_hand = micro_batch
            if rule.packing is not None:
                rule.packing.set_batch(micro_batch.batch, device)
            rule.places.set_keys(keys[i * len(micro_batch) :], for_window, len(micro_batch))
            yield send_to_device(micro_batch.batch, device, non_blocking=True)


def _keys(window: Window, micro_batches: Sequence[MicroBatch], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of all their samples, and of the window."""
    positions = np.concatenate([micro_batch.positions for micro_batch in micro_batches])
    keys, for_window = sample_keys(window.seed, window.epoch, positions), window_key(window.seed, window.epoch, window.index)
    return keys.to(device, non_blocking=True), for_window.to(device, non_blocking=True)


def _shape(micro_batch: MicroBatch) -> dict[str, torch.Size]:
    """Of each entry of its batch."""
    return {name: value.shape for name, value in micro_batch.batch.items() if isinstance(value, Tensor)}


def _totals(accelerator: Accelerator, window: Window, share: Share) -> Counts:
    """Targets of the window over all processes; where the loader knows them, nobody is asked."""
    if accelerator.num_processes > 1 and window.expected_targets is not None and len(share.counts) == 1:
        return (window.expected_targets,)
    return tuple(int(count) for count in meet(accelerator, share).counts)


def as_many_as_others(
    accelerator: Accelerator, window: Window, forwards: list[Forward], rule: TargetRule | None = None
) -> list[Forward]:
    """Under FSDP every process runs as many forwards as the one that has most: it repeats one, with weight 0."""
    missing = window.request.most_micro_batches - len(forwards)
    if not is_sharded(accelerator) or not missing:
        return forwards
    stand_in = forwards[0] if forwards else _stand_in(window, rule)
    return [*[Forward(stand_in.micro_batch, stand_in.counts, weight=0)] * missing, *forwards]


def _stand_in(window: Window, rule: TargetRule | None) -> Forward:
    """The first sample of the window that has targets: its loss is a number.

    Raises:
        ConfigError: none has, so the loader was told wrong.
    """
    for offset in range(window.num_samples):
        micro_batch = window.split([np.array([offset])]).micro_batches[0]
        counts = count_targets(rule.name, micro_batch.batch, 1) if rule is not None else ()
        if rule is None or any(counts):
            return Forward(micro_batch, counts)
    raise ConfigError(
        f"window {window.index} of epoch {window.epoch} has no targets, but target_counts say {window.expected_targets}: correct "
        "target_counts, or leave them out."
    )


def _balance(
    accelerator: Accelerator, model: nn.Module, window: Window, rule: TargetRule, forwards: Sequence[Forward], share: Share
) -> list[BalanceCall]:
    """The router's choices over the whole window, on all processes. One without micro-batches learns from a stand-in how many
    numbers it has to send.
    """
    if rule.router is None:
        return []
    forwards = forwards or [replace(_stand_in(window, rule), weight=0)]
    calls = choices_of_experts(accelerator, model, window, rule, [f.micro_batch for f in forwards], share)
    own = add_calls([[call.times(forward.weight) for call in of] for of, forward in zip(calls, forwards, strict=True)])
    if not is_sharded(accelerator):
        meet(accelerator, share)  # one that failed in this pass waits in a meeting of this shape already
    sums = iter(sum_tensors(accelerator, [t for call in own for t in (call.chosen, call.probability, call.num_tokens)]))
    return [BalanceCall(next(sums), next(sums), next(sums), call.value) for call in own]


def _backward(accelerator: Accelerator, term: Tensor, weight: int) -> None:
    """Backward of a term of the loss. FSDP takes the average of the processes' gradients, which are to be added."""
    factor = weight * accelerator.num_processes if is_sharded(accelerator) else 1
    accelerator.backward(term if factor == 1 else term * factor)
