"""Out of memory under FSDP2 on some of the ranks, which wait for each other in every forward and
backward: all compute the window again in smaller micro-batches, or the error has a name.

A rank that waits for ever would end its test after `LIMIT` seconds.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import helpers as h
import pytest
import torch
from forked import on_ranks, on_two_ranks, without_errors
from processes import make_accelerator, make_windows, whole_gradients
from torch import nn
from torch.distributed.fsdp import FSDPModule

import hf_ga
from hf_ga.engine import gradient
from hf_ga.engine.window_engine import WindowEngine
from hf_ga.parallel import rejoin
from hf_ga.parallel.rejoin import can_rejoin

LIMIT = 60  # seconds
NUM_CALLS = 3  # of each rank in the first window, none of them a filler
BUILDS = {
    "GPT2Block": partial(h.gpt2, 0.1),
    "MixtralDecoderLayer": partial(h.mixtral, 0.5),
}
slow = pytest.mark.slow("starts processes")
pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.13 resets a failed forward"
)


class Shortage:
    """Memory runs out in the last layer of a model, in one call with many tokens.

    Args:
        layer: The layer.
        at: Which of its training forwards with more than `fits` tokens, from 0 on.
        in_backward: In the backward of that call.
        lasts: In all following calls, too.
    """

    def __init__(
        self,
        layer: nn.Module,
        at: int,
        in_backward: bool = False,
        fits: int = 0,
        lasts: bool = False,
    ) -> None:
        self.at = at
        self.in_backward = in_backward
        self.fits = fits
        self.lasts = lasts
        self.num_calls = 0
        self.num_failures = 0
        layer.register_forward_hook(self._after)

    def _after(self, layer: nn.Module, args: tuple, output) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        is_repeated = torch._C._current_graph_task_id() != -1  # by activation checkpointing
        if is_repeated or not torch.is_grad_enabled() or hidden[..., 0].numel() <= self.fits:
            return
        self.num_calls += 1
        if self.num_calls <= self.at or (self.num_failures and not self.lasts):
            return
        if self.in_backward:
            hidden.register_hook(self._fail)
        else:
            self._fail()

    def _fail(self, gradient: torch.Tensor | None = None) -> None:
        self.num_failures += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def trained(
    shortage: Callable[[nn.Module], Shortage],
    failing: tuple[int, ...] = (),
    layer: str = "GPT2Block",
    kind: str = "fsdp2",
    evaluates: bool = False,
    each: bool = False,
    precision: str = "no",
    limit: int | None = None,
) -> SimpleNamespace:
    """Two updates, in windows of 32 and 7 samples.

    limit: Padded tokens of a micro-batch, as if memory had run out before.
    """
    accelerator = make_accelerator(kind, layer, mixed_precision=precision)
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = each
    model = BUILDS[layer]()
    last = [module for module in model.modules() if type(module).__name__ == layer][-1]
    samples = h.token_samples(39)
    windows = make_windows(accelerator, samples, global_batch_size=32, per_device_batch_size=5)
    windows.state.max_elements = limit
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
    planted = None
    if accelerator.process_index in failing:
        planted = shortage(last)
    results = []
    for window in windows:
        if evaluates:  # leaves the weights of some units gathered
            with torch.no_grad():
                model(**h.pad_right(samples[:2]))
        results.append(hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0))
    return SimpleNamespace(
        losses=[result.loss for result in results],
        retries=[result.retries for result in results],
        limit=windows.state.max_elements,
        num_failures=0 if planted is None else planted.num_failures,
        weights={
            name.replace("_checkpoint_wrapped_module.", ""): whole(parameter).detach()
            for name, parameter in model.named_parameters()
        },
    )


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@pytest.fixture(scope="module")
def undisturbed():
    """layer -> the run in which memory suffices."""
    found = {}

    def of(layer: str) -> SimpleNamespace:
        if layer not in found:
            work = partial(trained, None, layer=layer)
            found[layer] = without_errors(on_two_ranks(work, "fsdp2"))[0]
        return found[layer]

    return of


@pytest.mark.parametrize(
    ("at", "in_backward", "failing", "more"),
    [
        (NUM_CALLS - 1, True, (0,), {"evaluates": True}),
        *(
            pytest.param(*case, marks=slow)
            for case in [
                (0, False, (1,), {}),
                (1, True, (0, 1), {"each": True}),
                (1, False, (0, 1), {"kind": "fsdp2 checkpointing"}),
                (1, True, (1,), {"kind": "fsdp2 checkpointing", "evaluates": True}),
                (1, False, (1,), {"layer": "MixtralDecoderLayer"}),
            ]
        ),
    ],
)
def test_all_ranks_compute_the_window_again(undisturbed, at, in_backward, failing, more):
    """In the first micro-batch, between others and in the last one, which sums the gradients."""
    expected = undisturbed(more.get("layer", "GPT2Block"))
    planted = partial(Shortage, at=at, in_backward=in_backward)
    ranks = without_errors(on_two_ranks(partial(trained, planted, failing, **more), "fsdp2"))
    assert [rank.num_failures for rank in ranks] == [int(i in failing) for i in range(2)]
    for rank in ranks:
        assert rank.retries == [1, 0]
        assert rank.limit == ranks[0].limit
        assert rank.losses == pytest.approx(expected.losses, rel=1e-6)
        assert h.relative_error(rank.weights, expected.weights) < 1e-6
    assert expected.retries == [0, 0]


def test_an_evaluation_between_windows_changes_no_gradient():
    """It leaves whole weights of some units in the place of their shards."""
    samples = h.token_samples(16)

    def work() -> list[h.Gradients]:
        accelerator = make_accelerator("fsdp2", "GPT2Block")
        windows = make_windows(accelerator, samples, global_batch_size=8, shuffle=False)
        model = h.gpt2()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
        found = []
        for window in windows:
            optimizer.zero_grad()
            with torch.no_grad():
                model(**h.pad_right(samples[:2]))
            hf_ga.backward_window(accelerator, model, window)
            found.append(whole_gradients(model))
        return found

    for found in without_errors(on_two_ranks(work, "fsdp2")):
        for gradients, share in zip(found, (samples[:8], samples[8:]), strict=True):
            truth = h.full_batch_gradient(h.gpt2(), h.pad_right(share))
            assert h.relative_error(gradients, truth) < 1e-6


@slow
def test_the_retry_has_the_bits_of_a_run_that_knew_the_limit():
    """In bf16, in which FSDP2 keeps gradients of micro-batches in another place: after a backward,
    of which they have a part.
    """
    more = {"precision": "bf16", "evaluates": True}
    planted = partial(Shortage, at=1, in_backward=True)
    first, second = without_errors(on_two_ranks(partial(trained, planted, (1,), **more), "fsdp2"))
    assert first.retries == second.retries == [1, 0]
    expected = partial(trained, None, limit=first.limit, **more)
    for rank in without_errors(on_two_ranks(expected, "fsdp2")):
        assert rank.retries == [0, 0]
        assert rank.losses == first.losses == second.losses
        for name, weight in rank.weights.items():
            assert torch.equal(weight, first.weights[name])
            assert torch.equal(weight, second.weights[name])


def test_what_a_rank_computes_while_it_rejoins_would_be_seen(undisturbed):
    """The control: with it, without a retry and the count of samples, the update is another one."""

    finish = WindowEngine.finish

    def finish_as_if_nothing_failed(engine: WindowEngine, **how: bool) -> bool:
        engine.gradient.failure = None
        return finish(engine, **how)

    def work() -> SimpleNamespace:
        WindowEngine.finish = finish_as_if_nothing_failed  # in a process that ends with it
        gradient.check_samples = lambda sums, num_processes: None
        return trained(partial(Shortage, at=0), (1,))

    expected = undisturbed("GPT2Block")
    for rank in without_errors(on_two_ranks(work, "fsdp2")):
        assert rank.retries == [0, 0]
        assert h.relative_error(rank.weights, expected.weights) > 1e-4


@slow
def test_three_ranks(undisturbed):
    planted = partial(Shortage, at=1)
    work = partial(trained, planted, (0, 2))
    for rank in without_errors(on_ranks(work, 3, "fsdp2", limit=LIMIT)):
        assert rank.retries == [1, 0]
        assert h.relative_error(rank.weights, undisturbed("GPT2Block").weights) < 1e-6


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "does not fit into the memory of process 1 by itself"),
        ({"kind": "fsdp1"}, "Under FSDP it cannot be split here"),
    ],
    ids=["not even one of them", "FSDP1"],
)
def test_what_cannot_be_cut_has_a_name_and_ends_all_ranks(more, words):
    planted = partial(Shortage, at=0, lasts=True)
    kind = more.get("kind", "fsdp2")
    work = partial(trained, planted, (1,), **more)
    first, second = on_ranks(work, 2, kind, limit=LIMIT)
    assert second.startswith("OutOfMemory: ")
    assert words in second
    assert "Error: " in first


def test_where_a_rank_cannot_rejoin(monkeypatch):
    """Older versions of torch, and replicas of shards."""
    replicas = SimpleNamespace(dp_replicate_enabled=True)
    assert can_rejoin(SimpleNamespace(is_fsdp2=True, parallelism_config=None))
    assert not can_rejoin(SimpleNamespace(is_fsdp2=False, parallelism_config=None))
    assert not can_rejoin(SimpleNamespace(is_fsdp2=True, parallelism_config=replicas))
    monkeypatch.setattr(rejoin, "FSDPModule", object)
    assert not can_rejoin(SimpleNamespace(is_fsdp2=True, parallelism_config=None))
