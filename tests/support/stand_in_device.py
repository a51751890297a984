"""A device that is not the CPU, for machines that have no other: its tensors compute on the CPU and
say that they lie elsewhere.

As on a GPU, operands on two devices are an error, and the host learns nothing of what is computed
    unless it waits: for a number,
for a shape that depends on values, for a copy. Each time it does is noted, with the lines that led
there. What a GPU rounds in another way, its kernels, its memory and its speed are not to be seen
here.

`set_up` is for a whole process: it makes torch's "PrivateUse1" this device, and Accelerate takes it
as it would take a GPU.
"""

import copy
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
# Whose result, or its shape, the host must know before it goes on. (`index` with booleans too.)
WAIT = {
    *(
        aten._local_scalar_dense.default,
        aten.is_nonzero.default,
        aten.equal.default,
        aten.nonzero.default,
    ),
    *(
        aten.masked_select.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
    ),
    *(aten.bincount.default, aten.repeat_interleave.Tensor),
}
waits: list[str] = []  # what the host waited for: the lines that led there


class DeviceTensor(Tensor):
    """A tensor on the device; `inner` has its numbers."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "DeviceTensor":
        more = {
            "strides": inner.stride(),
            "storage_offset": inner.storage_offset(),
            "dtype": inner.dtype,
        }
        return Tensor._make_wrapper_subclass(cls, inner.shape, device=torch.device(NAME, 0), **more)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:
        return f"DeviceTensor({self.inner})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        _note()
        return self.inner.tolist()

    def storage(self) -> Any:
        return self.inner.storage()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: "DeviceTensor") -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Saved as a tensor of the CPU: whoever loads a file says where to."""
        return self.inner.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceTensor":
        if id(self) not in memo:
            copied = DeviceTensor(self.inner.detach().clone())
            copied = nn.Parameter(copied) if isinstance(self, nn.Parameter) else copied
            copied.requires_grad_(self.requires_grad).grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return compute(function, args, kwargs or {})


class EverythingPasses(TorchDispatchMode):
    """New tensors are asked for on the device by name; nothing else tells them from those of the
    CPU.
    """

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return compute(function, args, kwargs or {})


def compute(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """On the CPU; the result is on the device if operands are, or if it is asked for there."""
    tensors = [x for x in _leaves([*args, *kwargs.values()]) if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, DeviceTensor)]
    device = kwargs.get("device")
    to_device = bool(ours) if device is None else torch.device(device).type == NAME
    if ours or to_device:
        _check(function, args, kwargs, tensors, ours, to_device)
    if not ours and not to_device:
        return function(*args, **kwargs)
    here = {"device": torch.device("cpu"), "pin_memory": False}
    inner_args = _inner(args)
    inner_kwargs = {name: here.get(name, _inner(value)) for name, value in kwargs.items()}
    if function is aten.histc.default:  # GPUs take integers
        inner_args = (inner_args[0].float(), *inner_args[1:])
    found = function(*inner_args, **inner_kwargs)
    if function is aten.copy_.default:
        return args[0]
    found = _on_device(found) if to_device else found
    if function._schema.is_mutable or any(result.alias_info for result in function._schema.returns):
        return return_and_correct_aliasing(function, args, kwargs, found)
    return found


def _leaves(values: Iterable) -> list:
    """Values, and those in lists of them. (torch's own functions for trees take as long as all that
    is computed.)
    """
    return [
        x
        for value in values
        for x in (_leaves(value) if isinstance(value, (list, tuple)) else [value])
    ]


def _inner(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_inner, value))
    return value.inner if isinstance(value, DeviceTensor) else value


def _on_device(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_device, value))
    return (
        DeviceTensor(value)
        if isinstance(value, Tensor) and not isinstance(value, DeviceTensor)
        else value
    )


def _check(
    function: Callable,
    args: tuple,
    kwargs: dict,
    tensors: list[Tensor],
    ours: list[Tensor],
    to_device: bool,
) -> None:
    """Raise what a GPU would raise, and note what it would make the host wait for."""
    if function in COPIES:
        source, target = (
            (args[0], to_device)
            if function is COPIES[0]
            else (args[1], isinstance(args[0], DeviceTensor))
        )
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if isinstance(source, DeviceTensor) != target and (blocking or not target):
            _note()
        return
    elsewhere = [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim() > 0]
    if ours and elsewhere:
        found = ", ".join(f"{list(x.shape)} on {x.device}" for x in tensors)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {function} got {found}"
        )
    booleans = any(x.dtype in (torch.bool, torch.uint8) for x in ours if x is not args[0])
    if function in WAIT or (function is aten.index.Tensor and booleans):
        _note()


def _note() -> None:
    frames = [f for f in traceback.extract_stack() if f.filename != __file__]
    if any(
        f.filename.endswith("masking_utils.py") for f in frames
    ):  # transformers asks its mask for padding, once a forward
        return
    waits.append(
        " < ".join(
            f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in reversed(frames[-40:])
        )
    )


# What torch asks `torch.<device>`. There is one stream only.
MODULE = SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: True,
    _is_in_bad_fork=lambda: False,
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_rng_state=lambda device=None: torch.zeros(1, dtype=torch.uint8),
    set_rng_state=lambda state, device=None: None,
    manual_seed_all=lambda seed: None,
    synchronize=lambda device=None: None,
    current_stream=lambda: MODULE,
    stream=lambda stream: nullcontext(),
    empty_cache=lambda: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
)


def _register() -> torch.library.Library:
    """The few functions that torch calls below the level of `compute`: `torch.tensor(values,
    device=...)` is one.
    """

    def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
        return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))

    def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        return DeviceTensor(torch.empty(size, dtype=dtype))

    def copy_from(source, target, non_blocking=False):
        if not non_blocking or not isinstance(target, DeviceTensor):
            _note()
        _inner(target).copy_(_inner(source))
        return target

    library = torch.library.Library("aten", "IMPL")
    for name, function in (
        ("empty_strided", empty_strided),
        ("empty.memory_format", empty),
        ("_copy_from", copy_from),
    ):
        library.impl(name, function, "PrivateUse1")
    return library


def set_up() -> torch.device:
    """From now on this process has the device. Returns it."""
    global _library  # what is registered is gone with the object
    _setup_privateuseone_for_python_backend(NAME, MODULE)
    _library = _register()
    EverythingPasses().__enter__()
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # a weight with two owners stays one when a module is moved
    PartialState.default_device = property(lambda self: torch.device(NAME, 0))
    return torch.device(NAME, 0)
