"""A proof that only the main process can make, because under FSDP2 with `cpu_ram_efficient_loading`
only it holds the model's weights.

The main process sends the resulting rule to the others. The rule refers to modules of the model and
to the user's loss functions, of which every process has objects of its own. So it is pickled with
names in place of these objects, and each process puts its own objects in place of the names.
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

# The proof of a large model on a CPU may take longer than the usual timeout of collectives. If the
# main process ends, the others stop waiting.
PROOF_TIMEOUT = timedelta(days=1)
# Types of what the last forward of a proof left in its hooks: not sent, the next forward makes its
# own.
NOT_SENT = (Tensor, Call, CompiledDropout)


def prove_where_weights_are(
    accelerator: Accelerator,
    model: nn.Module,
    prove: Callable[[], Rule | None],
    functions: Sequence[Any] = (),
) -> Rule | None:
    """Make the proof of a model's loss where the model's weights are, and return its rule on all
    processes. All processes must call it.

    Under FSDP2 with `cpu_ram_efficient_loading`, before the model is sharded, the main process
    makes the proof and sends the rule to the others. In all other cases each process makes the
    proof itself.

    Args:
        accelerator: The accelerator of the run.
        model: The model, with the same modules on all processes. It may be sharded already.
        prove: A function that makes the proof and returns its rule, or None if there is none.
        functions: The user's loss functions, to which the rule may refer; the same on all
            processes.

    Raises:
        HfGaError: If the proof raised it; on all processes.
        ProcessFailed: On the other processes, if the proof raised any other error on the main
            process.

    Example:
        rule = prove_where_weights_are(accelerator, model, partial(prove_targets, model, samples))
    """
    is_already_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if is_already_sharded or not loads_on_main(accelerator):
        return prove()
    objects_by_name = _local_objects(model, functions)
    group = dist.new_group(backend="gloo", timeout=PROOF_TIMEOUT)
    # What is broadcast: the pickled rule, or the error to raise.
    outcome: bytes | HfGaError | None = None
    failure: Exception | None = None
    rule: Rule | None = None
    if accelerator.is_main_process:
        try:
            rule = prove()
            outcome = pack(rule, objects_by_name)
        except Exception as error:
            failure = error
            outcome = _error_for_other_processes(error)
    broadcast = [outcome]
    dist.broadcast_object_list(broadcast, src=0, group=group)
    dist.destroy_process_group(group)
    if failure is not None:
        raise failure
    if accelerator.is_main_process:
        return rule
    (outcome,) = broadcast
    if isinstance(outcome, Exception):
        raise outcome
    return unpack(outcome, objects_by_name)


def pack(value: Any, objects_by_name: dict[str, Any]) -> bytes:
    """Pickle a proof's rule for other processes, with names in place of the objects of which every
    process has its own, such as modules. Tensors are not sent: they are None after `unpack`.

    Args:
        value: The rule, or None.
        objects_by_name: The objects that are replaced by their names.
    """
    file = BytesIO()
    _NamingPickler(file, objects_by_name).dump(value)
    return file.getvalue()


def unpack(packed: bytes, objects_by_name: dict[str, Any]) -> Any:
    """Unpickle a proof's rule, which `pack` pickled on another process, with this process's objects
    in place of their names.

    Args:
        packed: What `pack` returned.
        objects_by_name: This process's objects, by the same names as in `pack`.
    """
    return _NamingUnpickler(BytesIO(packed), objects_by_name).load()


class _NamingPickler(pickle.Pickler):
    """A pickler for a proven rule that is sent to other processes: it writes names in place of
    objects of which every process has its own.

    Args:
        file: The file to write to.
        objects_by_name: The objects that are replaced by their names.
    """

    def __init__(self, file: BytesIO, objects_by_name: dict[str, Any]) -> None:
        """Store the names of the objects of which every process has its own, such as modules."""
        super().__init__(file)
        # `id` of an object -> its name.
        self._names = {id(value): name for name, value in objects_by_name.items()}

    def persistent_id(self, value: Any) -> str | None:
        """Return the name to write in place of an object of which every process has its own, such
        as a module; "" for a tensor or another object that is not sent; None to pickle the object
        itself. The pickler of a proven rule calls it for every object.
        """
        if isinstance(value, NOT_SENT):
            return ""
        if isinstance(value, ModuleType):  # a router's rule refers to its Python module
            return f"python {value.__name__}"
        return self._names.get(id(value))


class _NamingUnpickler(pickle.Unpickler):
    """An unpickler that puts this process's objects in place of the names that `_NamingPickler`
    wrote.

    Args:
        file: The file to read.
        objects_by_name: This process's objects.
    """

    def __init__(self, file: BytesIO, objects_by_name: dict[str, Any]) -> None:
        """Store this process's objects, which take the place of their names in the rule that the
        main process has sent.
        """
        super().__init__(file)
        self._objects_by_name = objects_by_name

    def persistent_load(self, name: str) -> Any:
        """Return this process's object for a name in the rule that the main process has sent; None
        for "", which stands for an object that was not sent.
        """
        if not name:
            return None
        if name.startswith("python "):
            return sys.modules[name.removeprefix("python ")]
        return self._objects_by_name[name]


def _local_objects(model: nn.Module, functions: Sequence[Any]) -> dict[str, Any]:
    """Return the objects to which a proven rule may refer, and of which every process has its own,
    by names that are the same on all processes: counting rules, modules of the model, and the
    user's loss functions (those that are not None).
    """
    objects_by_name: dict[str, Any] = {}
    for name, count in COUNTING_RULES.items():
        objects_by_name[f"counting {name}"] = count
    for name, module in model.named_modules():
        objects_by_name[f"module {name}"] = module
    for index, function in enumerate(functions):
        if function is not None:
            objects_by_name[f"function {index}"] = function
    return objects_by_name


def _error_for_other_processes(error: Exception) -> HfGaError:
    """Return the error that the other processes raise after the main process's proof failed: the
    same one if it is an error of hf_ga, which can be pickled, otherwise a ProcessFailed.
    """
    if isinstance(error, HfGaError):
        return error
    return ProcessFailed(f"process 0 failed: {type(error).__name__}: {error}")
