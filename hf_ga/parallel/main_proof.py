"""A proof that only the main process can make, because only it holds the model's weights.

The other processes get the rule. It refers to modules of the model and to the user's functions, of
which every process has its own: those travel by name.
"""

import pickle
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from io import BytesIO
from types import ModuleType
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_ga.errors import HfGaError, ProcessFailed
from hf_ga.exact.compiled_dropout import CompiledDropout
from hf_ga.exact.hooks import Call
from hf_ga.exact.loss import COUNTING_RULES
from hf_ga.exact.rule import Rule
from hf_ga.parallel.main_weights import loads_on_main

# A proof of a large model on a CPU may take longer than collectives of GPUs may wait. If the main
# process ends, the others do not wait any more.
PATIENCE = timedelta(days=1)
# What the last probe left behind; the next forward makes its own.
LEFT_BEHIND = (Tensor, Call, CompiledDropout)


def prove_where_weights_are(
    accelerator: Accelerator,
    model: nn.Module,
    prove: Callable[[], Rule | None],
    functions: Sequence[Any] = (),
) -> Rule | None:
    """The result of a proof: each process makes it, or the main process where only it holds the
    weights.

    All processes must call it.

    Args:
        accelerator: The accelerator of the run.
        model: The model, in which a wrapper may have sharded everything already; the same modules
            on all processes.
        prove: Makes the rule. None is passed on, too.
        functions: The user's loss functions, which the rule may refer to; the same on all
            processes.

    Raises:
        HfGaError: What the proof raised, on all processes.
        ProcessFailed: Another error of the main process.

    Example:
        rule = prove_where_weights_are(accelerator, model, partial(prove_targets, model, samples))
    """
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if is_sharded or not loads_on_main(accelerator):
        return prove()
    named = _named_objects(model, functions)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    outcome: Any = None
    failure: Exception | None = None
    rule: Rule | None = None
    if accelerator.is_main_process:
        try:
            rule = prove()
            outcome = pack(rule, named)
        except Exception as error:
            failure = error
            outcome = _as_seen_by_others(error)
    sent = [outcome]
    dist.broadcast_object_list(sent, src=0, group=group)
    dist.destroy_process_group(group)
    if failure is not None:
        raise failure
    if accelerator.is_main_process:
        return rule
    (outcome,) = sent
    if isinstance(outcome, Exception):
        raise outcome
    return unpack(outcome, named)


def pack(value: Any, named: dict[str, Any]) -> bytes:
    """A value as bytes, with names in place of the named objects.

    Args:
        value: A rule. Tensors in it are left out.
        named: The objects that every process has its own of.
    """
    file = BytesIO()
    _Packer(file, named).dump(value)
    return file.getvalue()


def unpack(packed: bytes, named: dict[str, Any]) -> Any:
    """The value that was packed, with this process's objects in place of their names."""
    return _Unpacker(BytesIO(packed), named).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: BytesIO, named: dict[str, Any]) -> None:
        super().__init__(file)
        self._names = {id(value): name for name, value in named.items()}

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, LEFT_BEHIND):
            return ""
        if isinstance(value, ModuleType):  # of a router: its Python module
            return f"python {value.__name__}"
        return self._names.get(id(value))


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: BytesIO, named: dict[str, Any]) -> None:
        super().__init__(file)
        self._named = named

    def persistent_load(self, name: str) -> Any:
        if not name:
            return None
        if name.startswith("python "):
            return sys.modules[name.removeprefix("python ")]
        return self._named[name]


def _named_objects(model: nn.Module, functions: Sequence[Any]) -> dict[str, Any]:
    """What every process has its own of, or what cannot be pickled."""
    counting = {f"counting {name}": count for name, count in COUNTING_RULES.items()}
    modules = {f"module {name}": module for name, module in model.named_modules()}
    own = {f"function {i}": function for i, function in enumerate(functions)}
    return {name: value for name, value in (counting | modules | own).items() if value is not None}


def _as_seen_by_others(error: Exception) -> HfGaError:
    """The same error, if it is one of ours and so can be pickled."""
    if isinstance(error, HfGaError):
        return error
    return ProcessFailed(f"process 0 failed: {type(error).__name__}: {error}")
