"""Proves a model that is not called as `model(**batch)`, or that returns no loss.

How such a model is called shows in its first training forward: its arguments there are split into
the samples of the proof. The proof shows that each sample's outputs depend on this sample only (and
where dropout is drawn, and which speed-ups change nothing). The loss is the loop's own criterion,
whose divisor follows from the arguments of torch's loss function (`criteria.py`), or is passed as
`num_targets`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.accelerator.loss_comparison import SumPassedByLoop
from hf_ga.accelerator.outputs import named_arguments, output_tensors
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
    """Prove a model on the arguments of the first forward that a user's loop makes: test by trial
    forwards and backwards that its outputs for a sample do not depend on the other samples.

    Tensors with one row per sample are split into samples; all other arguments are passed to every
    forward of the proof unchanged.

    Args:
        model: The unwrapped model, in training mode.
        args: The positional arguments of the forward.
        kwargs: The keyword arguments of the forward.
        num_samples: The number of samples in the arguments.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.

    Returns:
        (the result of the proof, whose loss is any sum that the loop passes to `backward` with a
        number of targets; the model's own loss, or None if it returns none). All micro-batches of a
        window are padded to the same length, because the effect of padding is not tested.

    Raises:
        ConfigError: If no argument can be split into samples, or the model's own loss cannot be
            computed from arguments without the batch's names.
        LossNotAdditive, UnkeyedRandomness: See `hf_ga.prove_targets`.
    """
    arguments = named_arguments(model, args, kwargs)
    samples, shared = _split_into_samples(arguments, num_samples)

    def collate(chosen: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Stack samples, taken from the arguments of the loop's first forward, into keyword
        arguments of the model, and add the arguments that all samples share.
        """
        stacked = {name: torch.stack([sample[name] for sample in chosen]) for name in chosen[0]}
        return {**stacked, **shared}

    prove = partial(
        prove_targets,
        model,
        samples,
        collate,
        allow_split_dependent_randomness=allow_split_dependent_randomness,
    )
    model_loss: Loss | None = None
    try:
        with _blaming_shared_arguments(shared, num_samples):
            rule = prove()
        model_loss = rule.loss
    except NoLoss:
        with _blaming_shared_arguments(shared, num_samples):
            rule = _prove_outputs(model, prove)
    if model_loss is not None and not isinstance(model_loss, HeadMean):
        raise ConfigError(
            f"the model's loss is {model_loss.name}, which hf_ga can only compute from a batch "
            "with named entries: let the collate function return a dict, and call model(**batch)."
        )
    rule = replace(rule, loss=SumPassedByLoop(), pad_to_window=True, width_matters=None)
    return rule, model_loss


def _split_into_samples(
    arguments: dict[str, Any], num_samples: int
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Split the arguments of the first forward that a user's loop makes into single samples, on
    which the model is then proven.

    Args:
        arguments: The arguments by name.
        num_samples: The number of samples in them.

    Returns:
        (for each sample, its rows of the tensors with one row per sample, by name and on the CPU;
        all other arguments by name, which all samples share).

    Raises:
        ConfigError: If no argument is a tensor with one row per sample.
    """
    per_sample = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.dim() and len(value) == num_samples
    }
    if not per_sample:
        raise ConfigError(
            f"none of the model's arguments ({', '.join(arguments)}) is a tensor with one row for "
            f"each of the {num_samples} samples, so the model cannot be tested: pass such tensors, "
            "not lists or dicts of them."
        )
    shared = {name: value for name, value in arguments.items() if name not in per_sample}
    samples = [
        {name: value[row].detach().cpu() for name, value in per_sample.items()}
        for row in range(num_samples)
    ]
    return samples, shared


@contextmanager
def _blaming_shared_arguments(shared: dict[str, Any], num_samples: int) -> Iterator[None]:
    """Turn an exception of a model's proof, in the first forward of a user's loop, into a
    ConfigError that names the tensor arguments which could not be split into samples, as they are
    the likely cause.

    `NoLoss` and `UnkeyedRandomness`, which have other causes, pass unchanged. So do all exceptions
    if every tensor argument was split.

    Args:
        shared: The model's arguments without one row per sample, by name.
        num_samples: The number of samples that the model was called with.

    Raises:
        ConfigError: In place of an exception, if a tensor argument could not be split.
    """
    try:
        yield
    except (NoLoss, UnkeyedRandomness):
        raise
    except Exception as error:
        shared_tensors = [
            f"{name} of shape {list(value.shape)}"
            for name, value in shared.items()
            if isinstance(value, Tensor) and value.dim()
        ]
        if not shared_tensors:
            raise
        raise ConfigError(
            f"the model was called with {', '.join(shared_tensors)} for {num_samples} samples, so "
            "these arguments cannot be split into samples: let the collate function return a dict, "
            "call model(**batch), and let the model return its loss."
        ) from error


def _prove_outputs(model: nn.Module, prove: Callable[..., Rule]) -> Rule:
    """Prove, for a model that returns no loss to a user's loop, that the outputs for each sample
    depend on this sample only, by trial forwards and backwards with a made-up loss.

    Args:
        model: The unwrapped model.
        prove: Calls `hf_ga.prove_targets` for the model with the given `loss_fn`.

    Returns:
        The rule that the proof found for the made-up loss, with the model's dropout and speed-ups.

    Raises:
        LossNotAdditive: If outputs depend on other samples, or have no row per sample.
    """
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
    """Compute a made-up loss for the proof of a model that returns no loss to a user's loop.

    It depends on every output of every sample: each sample's output values are multiplied by fixed
    factors (cos 0, cos 1, cos 2, ...) and added.

    Args:
        outputs: What the model returned.
        batch: The model's arguments.

    Returns:
        (sum over the samples, number of samples).

    Raises:
        LossNotAdditive: If no output has a row for each sample.
    """
    num_samples = max(len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim())
    total = None
    for value in output_tensors(outputs, requires_grad=False) or [outputs]:
        has_rows = isinstance(value, Tensor) and value.dim() and len(value) % num_samples == 0
        if not has_rows:
            continue
        rows = value.reshape(num_samples, -1).float()
        factors = torch.cos(torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype))
        weighted_sum = (rows * factors).sum()
        total = weighted_sum if total is None else total + weighted_sum
    if total is None:
        raise LossNotAdditive(
            "the model's outputs have no row for each sample, so hf_ga cannot split a batch: "
            "return a tensor whose first dim is the samples, or let the model return its loss."
        )
    return total, num_samples
