"""Proves models before FSDP shards them in `accelerator.prepare`."""

from dataclasses import replace
from functools import partial
from typing import Any

import accelerate
from torch import nn
from torch.utils.data import DataLoader

from hf_ga.accelerator.training_loop import is_trainable
from hf_ga.errors import ConfigError
from hf_ga.parallel.main_proof import prove_where_weights_are
from hf_ga.training import (
    NUM_PROOF_SAMPLES,
    LossSettings,
    default_speed_ups,
    prove_targets,
    remember,
)


def prove_before_sharding(
    accelerator: accelerate.Accelerator,
    models: list[nn.Module],
    loaders: list[DataLoader],
    loss_settings: LossSettings,
) -> None:
    """Prove the trainable models of an `accelerator.prepare` call before FSDP shards them, and
    store the results for their training.

    The proof tests by trial forwards and backwards how a model's loss adds up over samples. It
    cannot be done later: FSDP1's sharded model cannot be proven at all, and FSDP2's only in half
    precision. The samples come from the dataset of the first loader. Without a loader, an FSDP2
    model is left to be proven in its first window.

    Args:
        accelerator: The accelerator, with FSDP.
        models: The models that are prepared now, not sharded yet.
        loaders: The DataLoaders that are prepared in the same call, as the user made them.
        loss_settings: The user's settings for the models' loss and their proof.

    Raises:
        ConfigError: If there is no loader under FSDP1.
        LossNotAdditive, UnkeyedRandomness: See `hf_ga.prove_targets`.
    """
    if not loaders and accelerator.is_fsdp2:
        return
    if not loaders:
        raise ConfigError(
            "under FSDP1 the model must be tested before it is sharded: pass model, optimizer "
            "and the training DataLoader in one call of accelerator.prepare."
        )
    for model in filter(is_trainable, models):
        prove = partial(
            prove_targets,
            model,
            _evenly_spaced_samples(loaders[0].dataset),
            loaders[0].collate_fn,
            whole_batch=loss_settings.whole_batch,
            allow_split_dependent_randomness=loss_settings.allow_split_dependent_randomness,
            speed_ups=default_speed_ups(model, accelerator),
        )
        rule = prove_where_weights_are(accelerator, model, prove, [loss_settings.whole_batch])
        remember(accelerator, model, replace(loss_settings, rule=rule))


def _evenly_spaced_samples(dataset: Any) -> list[Any]:
    """Choose the samples on which `hf_ga.Accelerator` tests the model of a user's loop before FSDP
    shards it.

    They are at equal distances over the whole dataset: at least `NUM_PROOF_SAMPLES`, or all samples
    of a smaller dataset.
    """
    step = max(1, len(dataset) // NUM_PROOF_SAMPLES)
    return [dataset[index] for index in range(0, len(dataset), step)]
