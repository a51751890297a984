"""What two ranks exchange in a window, of small models, in a second each. `test_processes.py` has
more models and more ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import helpers as h
import pytest
import torch
from forked import on_two_ranks, outcome
from processes import make_accelerator, make_windows, prepare, whole_gradients
from steps import backward_window, train_step
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

import hf_ga
from hf_ga.errors import CheckpointError, ConfigError
from hf_ga.loading.memory import TooLarge
from hf_ga.model.precision import check_trainable
from hf_ga.parallel import prepare as preparing
from hf_ga.parallel.backend import Backend, RankStatus
from hf_ga.parallel.processes import (
    broadcast_from_main,
    check_agreement,
    gather_uneven,
    raise_on_all_ranks,
)


class Halves(nn.Module):
    """The first half of the samples goes through one layer, the others through another one: on two ranks, each has a
    gradient of one of them.

    Attributes:
        fails: what a forward of this rank raises, given the number of its samples.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.fails: Callable[[int], Exception | None] = lambda num_samples: None

    def forward(self, x, second, labels):
        if (error := self.fails(len(x))) is not None:
            raise error
        logits = x.new_zeros(len(x), 3)
        for layer, rows in zip(self.layers, (~second, second), strict=True):
            if rows.any():
                logits = logits.index_put((rows,), layer(x[rows]))
        loss = nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def points(number: int = 5) -> list[dict]:
    torch.manual_seed(1)
    return [
        {
            "x": torch.randn(4),
            "second": torch.tensor(2 * i >= number),
            "labels": torch.tensor(i % 3),
        }
        for i in range(number)
    ]


def stack(samples: list[dict]) -> dict:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def assert_full_batch(found: list[Any], model: nn.Module, batch: dict) -> None:
    """Each rank has the gradient and the loss of one forward and backward of the whole window."""
    truth = h.full_batch_gradient(model, batch)
    loss = h.mean_loss(
        model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    ).item()
    for gradients, result in found:
        assert (
            h.relative_error(
                {n: gradients.get(n, torch.zeros_like(g)) for n, g in truth.items()}, truth
            )
            < 1e-6
        )
        assert result.loss == pytest.approx(loss, rel=1e-6)


def ddp_window(
    size: int = 5,
    fails: Callable[[int], Exception | None] | None = None,
    chunk: int | None = None,
    per_device_batch_size: int = 2,
) -> tuple[h.Gradients, hf_ga.StepResult]:
    """Of the first samples; `fails`: of rank 1; chunk: for the same bits."""
    accelerator = make_accelerator("ddp")
    plain = Halves()
    model, _ = preparing.prepare(accelerator, plain, torch.optim.SGD(plain.parameters(), lr=0.0))
    sizes = {"per_device_batch_size": per_device_batch_size, "global_batch_size": size}
    (window,) = hf_ga.WindowLoader(
        points(max(size, 5))[:size],
        stack,
        accelerator=accelerator,
        shuffle=False,
        canonical_micro_batch=chunk,
        **sizes,
    )
    if fails is not None and accelerator.process_index == 1:
        plain.fails = fails
    result = backward_window(accelerator, model, window)
    return whole_gradients(model), result


@pytest.mark.parametrize("size", [5, 1], ids=["3 samples and 2", "1 sample and none"])
def test_replicas_have_the_gradient_of_the_full_batch(size):
    """Also of a parameter that only the other rank used. Control: neither rank's share alone is
    near to it.
    """
    found = on_two_ranks(lambda: ddp_window(size))
    assert_full_batch(found, Halves(), stack(points()[:size]))
    assert [result.num_targets for _, result in found] == [size, size]
    assert (
        h.relative_error(
            h.full_batch_gradient(Halves(), stack(points()[:3])),
            h.full_batch_gradient(Halves(), stack(points())),
        )
        > 0.1
    )


@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_have_the_same_bits_on_one_rank_and_on_two(chunk):
    """Also of a parameter that only the other rank used."""
    alone, one = ddp_window(chunk=chunk)
    found = on_two_ranks(lambda: ddp_window(chunk=chunk))
    assert_full_batch(found, Halves(), stack(points()))
    for gradients, result in found:
        assert result.loss == one.loss
        assert all(torch.equal(gradients[name], gradient) for name, gradient in alone.items())


def test_both_ranks_know_of_a_failure():
    def work() -> list[Any]:
        failed = outcome(
            lambda: ddp_window(fails=lambda num_samples: ZeroDivisionError("on purpose"))
        )
        return [failed, ddp_window()]

    (first, after), (second, _) = on_two_ranks(work)
    assert second == "ZeroDivisionError: on purpose"
    assert first == f"ProcessFailed: process 1 failed: {second}"
    assert_full_batch([after], Halves(), stack(points()))


def failing_window(where: str) -> tuple[str, float]:
    """What this rank raises in a window in which rank 1 fails, and the loss of the same window
    after that.
    """
    accelerator = make_accelerator("ddp")
    is_armed = False
    error = (
        torch.OutOfMemoryError() if where == "memory" else ValueError("row \udc80 is bad")
    )  # a text that cannot be encoded

    def fail(*args: Any) -> None:
        if is_armed and accelerator.process_index == 1:
            raise error

    def collate(samples: list[dict]) -> dict:
        if where == "collate":
            fail()
        return h.pad_right(samples)

    base, samples = (
        (h.mixtral(0.5), h.token_samples(16))
        if where == "router"
        else (h.bert_classifier(0.1), h.class_samples(16))
    )
    model, _ = prepare(accelerator, "ddp", base, samples, collate=collate)
    if where != "collate":
        base.register_forward_pre_hook(fail)
    (window,) = make_windows(
        accelerator, samples, collate, global_batch_size=16, per_device_batch_size=2
    )
    window.state.pad_to_window = where == "collate"
    is_armed = True
    said = outcome(partial(backward_window, accelerator, model, window))
    is_armed = False
    return said, backward_window(accelerator, model, window).loss


@pytest.mark.parametrize("where", ["collate", "router", "memory"])
def test_both_ranks_raise_in_the_same_window_and_can_go_on(where):
    """The failing rank its own error, the other one its message: where a window must have one
    width, in the pass in which experts are counted, and where a sample alone does not fit.
    """
    (first, loss), (second, same) = on_two_ranks(partial(failing_window, where))
    words = (
        "does not fit into the memory of process 1"
        if where == "memory"
        else "ValueError: row \udc80 is bad"
    )
    assert words in second
    assert first == f"ProcessFailed: process 1 failed: {second.encode(errors='replace').decode()}"
    assert loss == same > 0


def test_both_ranks_compute_again_where_one_ran_out_of_memory():
    def out_of_memory(num_samples: int) -> Exception | None:
        return torch.OutOfMemoryError("on purpose") if num_samples > 2 else None

    found = on_two_ranks(lambda: ddp_window(16, fails=out_of_memory, per_device_batch_size=4))
    assert [result.retries for _, result in found] == [1, 1]
    assert_full_batch(found, Halves(), stack(points(16)))


def test_what_two_ranks_cannot_know_is_refused():
    """Rank 1 has memory for one sample, so no micro-batch of it has samples of both layers."""

    def out_of_memory(num_samples: int) -> Exception | None:
        return torch.OutOfMemoryError("on purpose") if num_samples > 1 else None

    said = on_two_ranks(lambda: outcome(lambda: ddp_window(fails=out_of_memory)))
    assert all("cannot be known whether they are one mean" in words for words in said)


def test_the_smallest_micro_batch_that_failed_is_the_limit_of_both_ranks():
    def work() -> None:
        backend = Backend(make_accelerator("ddp"))
        failure = TooLarge(8 - 2 * backend.accelerator.process_index)
        backend.all_reduce_status(RankStatus(torch.zeros(()), (0,), (False,), failure))

    assert on_two_ranks(partial(outcome, work)) == ["TooLarge: 6"] * 2


def test_shards_have_the_gradient_of_the_full_batch():
    """FSDP2. Rank 1 has a micro-batch less and repeats one, which must not count; the norm is that
    of all shards.
    """
    samples = h.token_samples(5)

    def work() -> tuple[h.Gradients, hf_ga.StepResult, float]:
        accelerator = make_accelerator("fsdp2", "GPT2Block")
        plain = h.gpt2()
        model, optimizer = preparing.prepare(
            accelerator, plain, torch.optim.SGD(plain.parameters(), lr=0.0)
        )
        (window,) = hf_ga.WindowLoader(
            samples,
            h.pad_right,
            accelerator=accelerator,
            planner=h.by_number(2),
            global_batch_size=5,
            shuffle=False,
        )
        result = backward_window(accelerator, model, window)
        gradients = whole_gradients(model)
        stepped = train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
        return gradients, result, stepped.grad_norm

    found = on_two_ranks(work)
    assert_full_batch([of_rank[:2] for of_rank in found], h.gpt2(), h.pad_right(samples))
    assert [norm for *_, norm in found] == [pytest.approx(h.norm(found[0][0]), rel=1e-5)] * 2


def test_errors_and_values_are_those_of_all_ranks():
    def work() -> list[Any]:
        accelerator = make_accelerator("ddp")
        rank = accelerator.process_index

        def write(kind: type[Exception]) -> None:
            with raise_on_all_ranks(accelerator):
                if rank == 1:
                    raise kind("the disk of rank 1 is full")

        agree = outcome(lambda: check_agreement(accelerator, "rows", str(rank)))
        return [
            [outcome(partial(write, kind)) for kind in (CheckpointError, ConfigError)],
            agree,
            outcome(lambda: check_agreement(accelerator, "rows", "3")),
            broadcast_from_main(accelerator, rank),
            gather_uneven(accelerator.gather, torch.tensor([True, False, True][rank:])).tolist(),
        ]

    first, second = on_two_ranks(work)
    assert first == second
    assert first[0] == [
        f"{kind}: the disk of rank 1 is full" for kind in ("CheckpointError", "ConfigError")
    ]
    assert first[1].startswith(
        "ConfigError: all processes must have the same rows, but they have process 0: 0, process "
        "1: 1"
    )
    assert first[2:] == [None, 0, [True, False, True, False, True]]


def test_embeddings_that_each_rank_renormalises_are_refused_on_several():
    """Each rank would renormalise the rows of its own samples: alone it is the full batch."""
    model = nn.Embedding(4, 2, max_norm=0.5)
    parameters = list(model.parameters())
    check_trainable([model], parameters, num_processes=1)
    with pytest.raises(ConfigError, match="max_norm"):
        check_trainable([model], parameters, num_processes=2)
