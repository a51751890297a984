"""Windows are planned by real tokens where the model computes no padding: fewer micro-batches, the
same updates.
"""

import helpers as h
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from forked import on_two_ranks, without_errors
from processes import make_accelerator

import hf_ga
from hf_ga.engine import own_loop, speed_ups, window_engine
from hf_ga.order.length_plan import Computed

WINDOW = 16
NUM_WINDOWS = 8
CLOSE = 2e-6
LENGTHS = np.tile([6, 7, 9, 30, 8, 11, 14, 6, 40, 7, 10, 9, 8, 25, 6, 12], NUM_WINDOWS)


def samples() -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randint(3, h.VOCABULARY, (n,), generator=generator) for n in LENGTHS.tolist()]
    return [
        {"input_ids": ids.tolist(), "labels": ids.tolist(), "attention_mask": [1] * len(ids)}
        for ids in numbers
    ]


def make_model():
    torch.manual_seed(0)
    return h.gpt2(0.1, n_positions=64)


def make_loader(accelerator, **options) -> hf_ga.WindowLoader:
    return hf_ga.WindowLoader(
        samples(),
        h.pad_right,
        accelerator=accelerator,
        per_device_batch_size=2,
        global_batch_size=WINDOW,
        lengths=LENGTHS,
        shuffle=False,
        **options,
    )


def train(
    accelerator=None, position=None, stop=NUM_WINDOWS, weights=None, is_compiled=False, **options
):
    """Returns: (number of micro-batches and whether it was planned for packing, of each window;
    model; loader).
    """
    accelerator = accelerator or Accelerator()
    model = make_model()
    if weights is not None:
        model.load_state_dict(weights)
    if is_compiled:
        hf_ga.compile_layers(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = make_loader(accelerator, **options)
    if position is not None:
        loader.load_state_dict(position)
    model, optimizer = accelerator.prepare(model, optimizer)
    calls = []
    planned = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for window in loader:
        calls.clear()
        hf_ga.train_step(accelerator, model, optimizer, window)
        planned.append((len(calls), window.state.computed))
        if loader.num_consumed == stop:
            break
    return planned, accelerator.unwrap_model(model), loader


def weights_of(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def distance(model, other) -> float:
    change = (weights_of(other) - weights_of(make_model())).norm()
    return float((weights_of(model) - weights_of(other)).norm() / change)


def test_fewer_micro_batches_make_the_same_updates(monkeypatch):
    planned, model, loader = train()
    with monkeypatch.context() as patch:
        patch.setattr(speed_ups, "candidates", lambda model: [])
        plain, other, _ = train()
    assert [computed for _, computed in planned] == [Computed.PADDED] * 3 + [Computed.REAL] * 5
    assert not any(computed for _, computed in plain)
    rehearsed = slice(0, 3)
    assert planned[rehearsed] == plain[rehearsed]
    number = planned[-1][0]
    assert number < plain[-1][0]
    assert number >= LENGTHS[:WINDOW].sum() / (2 * LENGTHS.max())
    assert {calls for calls, _ in planned[4:]} == {number}
    assert distance(model, other) < CLOSE
    assert loader.state_dict()["computed_tokens"] == Computed.REAL


@pytest.mark.slow("compiles layers")
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile reads `.grad`
def test_rows_are_planned_where_layers_are_compiled():
    """By their lengths, of which a resumed run knows, too."""
    torch._dynamo.reset()
    planned, model, loader = train(is_compiled=True)
    _, plain, _ = train()
    assert [computed for _, computed in planned] == [Computed.PADDED] * 3 + [Computed.ROWS] * 5
    assert distance(model, plain) < CLOSE
    resumed = make_loader(Accelerator())
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state.computed is Computed.ROWS
    resumed.set_epoch(0)
    assert next(iter(resumed)).request.computed is Computed.ROWS
    assert next(iter(make_loader(Accelerator()))).request.computed is Computed.PADDED


def test_a_window_that_is_rehearsed_is_planned_with_padding(monkeypatch):
    """Rehearsals run without speed-ups: a packed plan would need more memory."""
    for module in (own_loop, window_engine):
        monkeypatch.setattr(module, "is_rehearsed", lambda number: number < 3 or number == 6)
    planned, _, _ = train()
    assert planned[6][0] == planned[1][0] > planned[5][0] + 1
    assert planned[7][0] == planned[5][0]


def test_a_run_that_is_resumed_has_the_same_plans():
    """Also where workers have prefetched windows that were planned before."""
    whole, model, _ = train(num_workers=1)
    stop = 5
    first, half, loader = train(stop=stop)
    rest, resumed, _ = train(position=loader.state_dict(), weights=half.state_dict())
    rehearsed = 2  # the first window of a process is, and then it tries the speed-ups
    assert [calls for calls, _ in first] == [calls for calls, _ in whole[:stop]]
    assert [calls for calls, _ in rest[rehearsed:]] == [
        calls for calls, _ in whole[stop + rehearsed :]
    ]
    assert distance(resumed, model) < CLOSE


def test_windows_that_must_be_padded_are_not_packed():
    planned, _, _ = train(pad_to_window=True)
    assert {calls for calls, _ in planned[4:]} == {WINDOW // 2}


@pytest.mark.slow("starts processes")
def test_two_processes_have_one_plan():
    def work():
        planned, model, loader = train(make_accelerator("ddp"))
        return planned, weights_of(model), loader.state.computed

    _, alone, _ = train()
    for planned, weights, computed in without_errors(on_two_ranks(work)):
        assert computed is Computed.REAL
        assert planned[-1][0] <= planned[3][0]
        change = (weights_of(alone) - weights_of(make_model())).norm()
        assert float((weights - weights_of(alone)).norm() / change) < CLOSE


def test_all_processes_must_pack(monkeypatch):
    """Otherwise they would plan different windows."""

    def work():
        accelerator = make_accelerator("ddp")
        if accelerator.process_index:
            monkeypatch.setattr(speed_ups, "candidates", lambda model: [])
        return [computed for _, computed in train(accelerator)[0]]

    for packed in without_errors(on_two_ranks(work)):
        assert not any(packed)
