"""The proof of a model that is not called as `model(**batch)`, or that returns no loss.

How such a model is called shows in its first training forward: its arguments there are the samples
of the proof. What is proven is that each sample's outputs depend on this sample only (and where
dropout is drawn, and which speed-ups change nothing). The loss is the loop's own criterion, whose
divisor torch's loss function tells (`criteria.py`), or is given with `num_targets`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.accelerator.loss_comparison import GivenSum
from hf_ga.accelerator.outputs import named_arguments, tensors_of
from hf_ga.errors import ConfigError, LossNotAdditive, NoLoss, UnkeyedRandomness
from hf_ga.exact.loss import HeadMean, Loss
from hf_ga.exact.rule import Rule
from hf_ga.proof.causes import likely_cause
from hf_ga.training import prove_targets


def prove_first_forward(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    num_samples: int,
    *,
    allow_split_dependent_randomness: bool = False,
) -> tuple[Rule, Loss | None]:
    """Prove a model on the arguments of one of its forwards.

    Args:
        model: Not wrapped, in training mode.
        args: Positional arguments of its forward.
        kwargs: Keyword arguments of its forward.
        num_samples: Samples in the arguments.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.

    Returns:
        A rule whose loss is what the loop passes to `backward` with a number of targets, and how
        the model's own loss counts its targets if it returns one. All micro-batches of a window
        are padded to one width, because the effect of padding is not tested.

    Raises:
        ConfigError: If the arguments cannot be cut into samples.
        LossNotAdditive, UnkeyedRandomness: See `hf_ga.prove_targets`.
    """
    named = named_arguments(model, args, kwargs)
    of_samples = {
        name: value
        for name, value in named.items()
        if isinstance(value, Tensor) and value.dim() and len(value) == num_samples
    }
    if not of_samples:
        raise ConfigError(
            f"none of the model's arguments ({', '.join(named)}) is a tensor with one row for each "
            f"of the {num_samples} samples, so the model cannot be tested: pass such tensors, not "
            "lists or dicts of them."
        )
    shared = {name: value for name, value in named.items() if name not in of_samples}
    samples = [
        {name: value[row].detach().cpu() for name, value in of_samples.items()}
        for row in range(num_samples)
    ]

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return {**stacked, **shared}

    prove = partial(
        prove_targets,
        model,
        samples,
        collate,
        allow_split_dependent_randomness=allow_split_dependent_randomness,
    )
    head: Loss | None = None
    try:
        with _naming(shared, num_samples):
            rule = prove()
        head = rule.loss
    except NoLoss:
        with _naming(shared, num_samples):
            rule = _prove_outputs(model, prove)
    if head is not None and not isinstance(head, HeadMean):
        raise ConfigError(
            f"the model's loss is {head.name}, which needs the batch by its names: let the collate "
            "function return a dict, and call model(**batch)."
        )
    return replace(rule, loss=GivenSum(), pad_to_window=True, width_matters=None), head


@contextmanager
def _naming(shared: dict[str, Any], num_samples: int) -> Iterator[None]:
    """Name arguments that all samples were taken to share, if the proof fails with them.

    Args:
        shared: The arguments without one row for each sample.
        num_samples: Samples in the arguments.
    """
    try:
        yield
    except (NoLoss, UnkeyedRandomness):
        raise
    except Exception as error:
        several = [
            f"{name} of shape {list(value.shape)}"
            for name, value in shared.items()
            if isinstance(value, Tensor) and value.dim()
        ]
        if not several:
            raise
        raise ConfigError(
            f"the model was called with {', '.join(several)} for {num_samples} samples, so these "
            "arguments cannot be cut into samples: let the collate function return a dict, call "
            "model(**batch), and let the model return its loss."
        ) from error


def _prove_outputs(model: nn.Module, prove: Callable[..., Rule]) -> Rule:
    try:
        return prove(loss_fn=sum_of_outputs)
    except NoLoss:
        raise
    except LossNotAdditive as error:
        raise LossNotAdditive(
            "the model's outputs for one sample depend on the other samples of its micro-batch, so "
            "no split of a window is the full batch. Likely cause: "
            f"{error.cause or likely_cause(model, None)}."
        ) from error


def sum_of_outputs(outputs: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
    """Compute a loss that depends on every output of every sample: the outputs times fixed numbers.

    Returns:
        (sum over the samples, number of samples).

    Raises:
        LossNotAdditive: If the outputs have no row for each sample.
    """
    num_samples = max(len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim())
    total = None
    for value in tensors_of(outputs, with_gradient=False) or [outputs]:
        has_rows = isinstance(value, Tensor) and value.dim() and len(value) % num_samples == 0
        if not has_rows:
            continue
        rows = value.reshape(num_samples, -1).float()
        weights = torch.cos(torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype))
        part = (rows * weights).sum()
        total = part if total is None else total + part
    if total is None:
        raise LossNotAdditive(
            "the model's outputs have no row for each sample, so hf_ga cannot split a batch: "
            "return a tensor with the samples on the first axis, or let the model return its loss."
        )
    return total, num_samples
