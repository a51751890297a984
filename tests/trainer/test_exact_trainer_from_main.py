"""ExactTrainer under FSDP2 with `cpu_ram_efficient_loading`: the weights of rank 0, on all ranks."""

import os
from functools import partial
from pathlib import Path

import helpers as h
import pytest
import torch
import transformers as tf
from forked import on_two_ranks, without_errors
from torch.distributed.tensor import DTensor
from trainers import Case, mixed

pytestmark = [
    pytest.mark.slow("trains on two processes"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]
LAYOUT = (12, 4)  # samples of a micro-batch, micro-batches of a window on each rank


def trained(folder: Path, other_weights: str) -> tuple[h.Gradients, list[float]]:
    """The first gradient and the losses.

    other_weights: What rank 1 has: "same", "none" or "random".
    """
    torch.set_num_threads(1)
    case = Case(folder, partial(h.gpt2, num_hidden_layers=1), h.token_samples(101))
    if os.environ["RANK"] == "1" and other_weights == "none":
        case.model.to("meta")
    if os.environ["RANK"] == "1" and other_weights == "random":
        with torch.no_grad():
            for parameter in case.model.parameters():
                parameter.normal_()
    settings = {"max_steps": 3, "learning_rate": 0.05, "ddp_backend": "gloo"}
    fsdp = {"cpu_ram_efficient_loading": other_weights != "same"}
    run = case.run(mixed(tf.Trainer), LAYOUT, fsdp=True, fsdp_config=fsdp, **settings)
    gradients = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in run.gradients[0].items()
    }
    return gradients, run.losses


@pytest.mark.parametrize("other_weights", ["none", "random"])
def test_the_run_is_the_one_in_which_all_ranks_have_the_weights(tmp_path, other_weights):
    same, _ = without_errors(on_two_ranks(partial(trained, tmp_path, "same")))
    for found in without_errors(on_two_ranks(partial(trained, tmp_path, other_weights))):
        assert h.relative_error(found[0], same[0]) < 1e-7
        assert found[1] == pytest.approx(same[1], rel=1e-6)
