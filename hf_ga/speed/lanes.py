"""Micro-batches of a window side by side on a CPU: each lane is a thread with its part of the cores and with modules of its own.

Any split of a window is the same update, so who computes which micro-batch is free. Threads that compute a micro-batch each do not
wait for one another in every operation, as the threads that share one operation do, and Python's own work and the small operations
of one lane run beside the products of the other. A lane's modules are copies that share the weights, so all that modules and hooks
keep is a lane's own, and so are its gradients: they are added up in the order of the lanes, whichever ended first.
"""

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.exact.costs import CPU
from hf_ga.exact.length_plan import longest_first

if TYPE_CHECKING:
    from hf_ga.exact.windows import MicroBatch
    from hf_ga.proof.targets import TargetRule


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
COPYING = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__new__", "__slots__")
PLAIN, CONTAINERS = {type(None), bool, int, float, str}, {dict, OrderedDict, set, list}


@dataclass(frozen=True)
class Lane:
    """A model, or a copy of its modules that shares the weights, with what was proven of it."""

    model: nn.Module
    rule: "TargetRule"


class LaneFailed(Exception):
    """What the lane of this number raised; the first of those that failed."""

    def __init__(self, index: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.index, self.error = index, error


def lanes_of(model: nn.Module, rule: "TargetRule", count: int) -> list[Lane]:
    """The model itself and, where that is possible, copies. To be called where nothing of the rule is active: hooks count."""
    first = Lane(model, rule)
    if count < 2 or not rule.copies or torch.get_num_threads() < count or obstacle(model, rule):
        return [first]
    return [first, *(copied(first) for _ in range(count - 1))]


def obstacle(model: nn.Module, rule: "TargetRule") -> str:
    """Why this model cannot be computed in lanes now; empty if nothing is in the way."""
    if rule.router is not None or rule.places.unkeyed:
        return "its micro-batches need each other, or a generator"
    if _has_hooks(model):
        return "it has hooks, compiled code or a forward of its instance, which belong to the model itself"
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    if modes or torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled():
        return "modes of torch are active, which belong to a thread"
    return ""


def copied(lane: Lane) -> Lane:
    """Its modules and what was proven of them once more, with the same weights, buffers and configurations.

    As `copy.deepcopy` does it, but what a module has is copied value by value: most is plain or empty, and `deepcopy` takes its
    time for each. A class that says itself how it is copied is asked.

    Raises:
        whatever modules raise that cannot be copied.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in lane.model.parameters()}
    memo |= {id(b): b for b in lane.model.buffers()}
    modules = list(lane.model.modules())
    memo |= {id(m.config): m.config for m in modules if "config" in vars(m)}
    usual = {cls for cls in map(type, modules) if all(getattr(cls, n, None) is getattr(nn.Module, n, None) for n in COPYING)}
    copies = [(m, m.__new__(type(m))) for m in modules if type(m) in usual]
    memo |= {id(module): new for module, new in copies}
    for module, new in copies:
        vars(new).update({name: _copied_value(value, memo) for name, value in vars(module).items()})
    return Lane(*copy.deepcopy((lane.model, lane.rule), memo))


def _copied_value(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) in PLAIN:
        return value
    if type(value) in CONTAINERS and not value:
        return memo.setdefault(id(value), type(value)())
    return copy.deepcopy(value, memo)


def deal(micro_batches: Sequence["MicroBatch"], packed: bool, count: int) -> list[list[int]]:
    """Which micro-batches each lane computes, the longest dealt first, each to the lane that has least."""
    cost = replace(CPU, overhead=CPU.overhead // count, packed=packed)
    return longest_first(np.array([cost.of(_lengths(m, packed)) for m in micro_batches]), count)[1]


def side_by_side(lanes: Sequence[Lane], work: Callable[[int, Callable[[], bool]], None]) -> None:
    """`work(i, is_over)` for each lane, the first one on this thread; all have ended when it returns.

    `is_over()` tells a lane that another one failed, so that its result will not be used.

    Raises:
        LaneFailed: one of them did.
    """
    threads, errors = torch.get_num_threads(), dict[int, BaseException]()

    def run(i: int) -> None:
        torch.set_num_threads(threads // len(lanes))  # of this thread alone
        try:
            work(i, lambda: bool(errors))
        except BaseException as error:
            errors[i] = error

    others = [threading.Thread(target=copy_context().run, args=(run, i), daemon=True) for i in range(1, len(lanes))]
    for lane, thread in zip(lanes, [threading.current_thread(), *others], strict=True):
        lane.rule.places.thread = thread
    try:
        for thread in others:
            thread.start()
        run(0)
        for thread in others:
            thread.join()
    finally:
        torch.set_num_threads(threads)
        lanes[0].rule.places.thread = None
    if errors:
        raise LaneFailed(min(errors), errors[min(errors)])


def add_gradients(lanes: Sequence[Lane]) -> None:
    """The gradients of the copies, to those of the model itself, in the order of the lanes."""
    for lane in lanes[1:]:
        pairs = [
            (p, q.grad) for p, q in zip(lanes[0].model.parameters(), lane.model.parameters(), strict=True) if q.grad is not None
        ]
        both = [(p.grad, g) for p, g in pairs if p.grad is not None]
        if both:
            torch._foreach_add_(*map(list, zip(*both, strict=True)))
        for parameter, gradient in pairs:
            if parameter.grad is None:
                parameter.grad = gradient
        lane.model.zero_grad(set_to_none=True)


def _lengths(micro_batch: "MicroBatch", packed: bool) -> np.ndarray:
    """Tokens of each sample that are computed."""
    mask = micro_batch.batch.get("attention_mask")
    if packed and isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.sum(1).numpy()
    widths = [v.shape[1] for v in micro_batch.batch.values() if isinstance(v, Tensor) and v.dim() > 1]
    return np.full(len(micro_batch), max(widths, default=1))


def _has_hooks(model: nn.Module) -> bool:
    """What a copy would call too, or would not: hooks of modules and parameters, code and forwards of one instance."""
    if nn.modules.module._has_any_global_hook():
        return True
    own = (any(getattr(m, name) for name in HOOKS) or "forward" in vars(m) or m._compiled_call_impl for m in model.modules())
    return any(own) or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
