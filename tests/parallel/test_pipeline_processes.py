"""More stages, schedules, replicas and models than `test_pipeline.py`."""

from functools import partial

import helpers as h
import pytest
import torch
from forked import on_ranks, without_errors
from pipelines import (
    FLOOR,
    MODELS,
    alone,
    assert_trains_as_one_process,
    first_gradient,
    full_batch,
    kill_two_stages,
    make_pipeline,
    put_together,
    stages_with,
    weights_of,
)

pytestmark = pytest.mark.slow("starts processes")


# All models train in two stages of 1F1B in test_pipeline.py, some in three.
@pytest.mark.parametrize(
    ("name", "num_stages", "schedule"),
    [
        ("frozen Llama", 3, "gpipe"),
        ("BERT classifier", 3, "gpipe"),
        ("Llama", 3, "1f1b"),
    ],
)
def test_stages_train_as_one_process(name, num_stages, schedule):
    assert_trains_as_one_process(name, num_stages, schedule)


@pytest.mark.parametrize("name", ["BERT masked LM"])
def test_two_stages_in_two_replicas(name):
    assert_trains_as_one_process(name, num_stages=2, schedule="gpipe", num_replicas=2)


@pytest.mark.parametrize("name", ["GPT-2", "GPT-2 with bf16"])
def test_stages_under_bf16_are_as_near_to_float64_as_one_process(name):
    found = without_errors(on_ranks(partial(first_gradient, "bf16", 2, name), 2))
    own_error = h.relative_error(first_gradient("bf16", None, name), full_batch(name))
    error = h.relative_error(put_together(found), full_batch(name))
    assert 100 * FLOOR < error < 2 * own_error  # the lower bound: autocast was on


def test_killed_and_resumed_in_three_stages(tmp_path):
    kill_two_stages(tmp_path)
    expected, _ = alone("GPT-2")
    found = without_errors(on_ranks(partial(stages_with, tmp_path, 3), 3))
    assert h.relative_error(put_together(found), expected) < FLOOR


@pytest.mark.parametrize("name", MODELS)
def test_saved_models_are_loaded_without_a_pipeline(name, tmp_path):
    def work() -> None:
        pipeline, _ = make_pipeline(name, 2, "gpipe")
        pipeline.save_pretrained(tmp_path)

    without_errors(on_ranks(work, 2))
    model = MODELS[name]()
    loaded = type(model).from_pretrained(tmp_path)
    assert weights_of(loaded).keys() == weights_of(model).keys()
    assert all(torch.equal(w, weights_of(model)[n]) for n, w in weights_of(loaded).items())
