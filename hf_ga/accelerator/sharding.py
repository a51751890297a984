"""The proof of a model before it is sharded."""

from dataclasses import replace
from functools import partial
from typing import Any

import accelerate
from torch import nn
from torch.utils.data import DataLoader

from hf_ga.accelerator.training_loop import is_trainable
from hf_ga.errors import ConfigError
from hf_ga.parallel.main_proof import prove_where_weights_are
from hf_ga.training import NUM_PROOF_SAMPLES, Given, default_speed_ups, prove_targets, remember


def prove_before_sharding(
    accelerator: accelerate.Accelerator,
    models: list[nn.Module],
    loaders: list[DataLoader],
    given: Given,
) -> None:
    """Prove models on the first loader's samples, and remember the result.

    A sharded model cannot be proven (FSDP1), or in half precision only (FSDP2).

    Args:
        accelerator: The accelerator, which shards.
        models: Those that are prepared now.
        loaders: Those that are prepared in the same call, as the user made them.
        given: What was given to the accelerator about the model's loss.

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
            _spread_samples(loaders[0].dataset),
            loaders[0].collate_fn,
            whole_batch=given.whole_batch,
            allow_split_dependent_randomness=given.allow_split_dependent_randomness,
            speed_ups=default_speed_ups(model, accelerator),
        )
        rule = prove_where_weights_are(accelerator, model, prove, [given.whole_batch])
        remember(accelerator, model, replace(given, rule=rule))


def _spread_samples(dataset: Any) -> list[Any]:
    """Take samples at equal distances over a whole dataset."""
    step = max(1, len(dataset) // NUM_PROOF_SAMPLES)
    return [dataset[index] for index in range(0, len(dataset), step)]
