"""Models, wrappers and windows of the scenarios of several processes.

Everything is small: what counts is the split, the process group and the wrapper, which are real.
"""

import json
from collections import Counter
from pathlib import Path

import helpers as h
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ga
from hf_ga.parallel import prepare as preparing
from hf_ga.training import LossSettings, prepare_with, try_before

WINDOW = 64
LAST = 13
SEED = 3
MICRO_BATCH = 8


def make_accelerator(kind: str, layer: str = "BertLayer", **more) -> Accelerator:
    """A fresh one. kind: ddp, fsdp1, fsdp2, with `checkpointing` behind it for FSDP's activation
    checkpointing.
    """
    AcceleratorState._reset_state()
    if PartialState(cpu=True).num_processes > 1:
        PartialState().distributed_type = DistributedType.MULTI_CPU
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **more)
    if not kind.startswith("ddp"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(kind[4]),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[layer],
            activation_checkpointing="checkpointing" in kind,
            **(
                {"use_orig_params": True} if kind[4] == "1" else {}
            ),  # as `accelerate launch` sets it
        )
        preparing.enable_fsdp_on_cpu(accelerator, plugin)
    return accelerator


def prepare(
    accelerator: Accelerator,
    kind: str,
    model: nn.Module,
    samples: list[dict],
    loss_fn=None,
    collate=h.pad_right,
    **how,
):
    """Try the loss, then wrap. Returns model, optimizer."""
    settings = LossSettings(loss_fn=loss_fn, **how)
    try_before(accelerator, model, samples, collate, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = prepare_with(accelerator, model, optimizer, settings)
    assert_wrapped(model, kind, accelerator)
    return model, optimizer


def assert_wrapped(model: nn.Module, kind: str, accelerator: Accelerator) -> None:
    """Real DDP; real FSDP, in which the root and its layers are units and the parameters lie in
    shards.
    """
    if accelerator.num_processes == 1:
        return
    if kind == "ddp":
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        return
    unit = FullyShardedDataParallel if kind.startswith("fsdp1") else FSDPModule
    assert sum(isinstance(module, unit) for module in model.modules()) >= 2
    if unit is FSDPModule:
        assert all(
            isinstance(p, DTensor) and p.placements[0].is_shard() for p in model.parameters()
        )
    else:
        assert not any(
            isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()
        )
        assert all(
            unit._handle.uses_sharded_strategy
            for unit in FullyShardedDataParallel.fsdp_modules(model)
            if unit._handle
        )


def make_windows(
    accelerator: Accelerator, samples: list[dict], collate=h.pad_right, **more
) -> hf_ga.WindowLoader:
    options = {
        "per_device_batch_size": MICRO_BATCH,
        "global_batch_size": WINDOW,
        "seed": SEED,
        **more,
    }
    return hf_ga.WindowLoader(samples, collate, accelerator=accelerator, **options)


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Under the names of the unwrapped model; all processes must call it."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return _gradients(model)
    return _gradients(model)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if (grad := parameter.grad) is not None:
            for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
                name = name.replace(wrapper, "")
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found[name.removeprefix("module.")] = grad.detach().clone().contiguous()
    return found


class Collectives(TorchDispatchMode):
    """Counts what is sent: calls and bytes of every collective of the process group that holds more
    than 10,000 bytes.

    Bytes are those of the whole tensor: what all-reduce takes, what an all-gather makes, what a
        reduce-scatter takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter()
        self.bytes = Counter()
        self.small = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            size = max(_sizes(args))
            name = function._opname.strip("_").replace("base", "").strip("_")
            if size > 10_000:
                self.calls[name] += 1
                self.bytes[name] += size
            else:
                self.small += 1
        return function(*args, **(kwargs or {}))


def _sizes(values) -> list[int]:
    """Bytes of each tensor, and of each list of tensors together."""
    found = [0]
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value.nbytes)
        elif isinstance(value, (list, tuple)):
            found += [sum(t.nbytes for t in value if isinstance(t, torch.Tensor)), *_sizes(value)]
    return found


def save(
    accelerator: Accelerator, folder: Path, name: str, tensors: dict | None = None, **facts
) -> None:
    """Tensors of the main process, facts of every process."""
    if tensors is not None and accelerator.is_main_process:
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.{accelerator.process_index}.json").write_text(json.dumps(facts))
