"""What is learned from the full model, before it is split: its loss is tried, and its random draws
are counted.

A keyed draw is known by its number in the forward. So that the masks of a stage are those of the
full model, a stage counts on from where the stages before it end.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_ga.draws.keyed import KeyedDraws, KnownDraws
from hf_ga.engine.look.trial import LossFacts, try_loss
from hf_ga.engine.own_loop import OwnLoop
from hf_ga.engine.window_engine import WindowEngine
from hf_ga.errors import UnkeyedRandomness
from hf_ga.parallel.backend import LocalBackend
from hf_ga.pipeline.model import first_layers


@dataclass(frozen=True)
class FullModel:
    """What is known about a model that is split into stages.

    Attributes:
        loss: What is known about its loss.
        num_draws: How many random draws of a forward precede each stage, with that of the whole
            forward as the last number: num_stages + 1 numbers.
        draws: Which dims of its draws hold the samples.
    """

    loss: LossFacts
    num_draws: list[int]
    draws: KnownDraws


def try_full_model(
    model: PreTrainedModel,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    num_stages: int,
) -> FullModel:
    """Try the loss of a model on this process, where it is, and count its random draws.

    Args:
        model: The full model. It is as before afterwards.
        samples: Some samples of the dataset.
        collate_fn: A function (list of samples) -> arguments of the model.
        num_stages: Number of pipeline stages that it will be split into.

    Raises:
        LossNotAdditive: If the loss is not a sum of means, or compares samples.
        UnkeyedRandomness: If random numbers were drawn that cannot be tied to samples, or the
            number of draws depends on the data.
    """
    backend = LocalBackend(next(model.parameters()).device)
    engine = WindowEngine(lambda: backend, allow_split_dependent_randomness=False)
    engine.speed_ups.candidates = lambda model: []  # stages use none
    with _counted_draws(model, num_stages, engine.draws) as counts:
        loss = try_loss(OwnLoop(engine, model), samples, collate_fn)
    return FullModel(loss, [_only(places) for places in counts], engine.draws.known())


@contextmanager
def _counted_draws(
    model: PreTrainedModel, num_stages: int, draws: KeyedDraws
) -> Iterator[list[set[tuple[int, int]]]]:
    """Record where the draws stood when each stage began, and at the model's end, in all forwards
    in the block.
    """
    counts: list[set[tuple[int, int]]] = [{(0, 0)}, *(set() for _ in range(num_stages))]

    def record_in(index: int) -> Callable[..., None]:
        """Return a hook that records where the draws stand."""

        def hook(*_: Any) -> None:
            counts[index].add(draws.mark().place)

        return hook

    with ExitStack() as hooks:
        for index, layer in enumerate(first_layers(model, num_stages)):
            if index > 0:
                hooks.callback(layer.register_forward_pre_hook(record_in(index)).remove)
        hooks.callback(model.register_forward_hook(record_in(num_stages)).remove)
        yield counts


def _only(places: set[tuple[int, int]]) -> int:
    """Return the one number of draws that all forwards had made at one place of the model.
    UnkeyedRandomness if there are several, or the model sets a seed.
    """
    (num_seedings, number), *others = places
    if others or num_seedings:
        raise UnkeyedRandomness(
            "the stages of a pipeline cannot number the model's random draws, because their number "
            "depends on the data, or the model sets a seed: turn this randomness off, or use FSDP."
        )
    return number
