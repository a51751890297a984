"""ExactTrainer under DDP and FSDP2: a window makes the same update on 1, 2 and 3 processes, Trainer's does not; a run is resumed on
another number of processes.
"""

import functools

import helpers as h
import pytest
import torch
import transformers as tf
from accelerate.utils import FullyShardedDataParallelPlugin
from forked import together
from torch.distributed.tensor import DTensor
from trainers import Case

from hf_ga.parallel.prepare import enable_fsdp_on_cpu
from hf_ga.trainer.exact_trainer import ExactTrainer

pytestmark = [
    pytest.mark.slow("trains on up to three processes"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # about outputs that are views, which nothing changes in place
]
WINDOW, NUM_SAMPLES, STEPS = 12, 29, 30  # two full windows and one of 5 samples: fewer than processes x batch size
LAYOUTS = {1: (12, 1), 2: (3, 2), 3: (1, 4)}  # processes: per-device batch size, accumulation steps
MODELS = {
    "bert": (h.bert_token_classifier, h.tag_samples),
    "gpt2": (h.gpt2, h.token_samples),
    "mixtral": (lambda dropout: h.mixtral(0.1), h.token_samples),
}


class ShardedTrainer(ExactTrainer):
    """Shards on CPUs, too, where Accelerate would train with DDP."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        enable_fsdp_on_cpu(self.accelerator, plugin)
        self.is_fsdp_enabled = self.args.world_size > 1


def whole(tensor):
    """Of shards on all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_on(folder, processes, trainer_class, name="bert", **more):
    """First gradient and the losses of all steps, with dropout."""
    build, make_samples = MODELS[name]
    case = Case(folder / "trainer", build, make_samples(NUM_SAMPLES))
    settings = {"max_steps": STEPS, "learning_rate": 0.05, "lr_scheduler_type": "constant", **more}
    settings["ddp_backend"] = "gloo" if processes > 1 else None

    def work():
        torch.set_num_threads(1)
        run = case.run(trainer_class, LAYOUTS[processes], **settings)
        gradient = {name.removeprefix("module."): whole(value) for name, value in run.gradients[0].items()}
        if run.trainer.args.process_index == 0:
            torch.save({"gradient": gradient, "losses": run.losses}, folder / "found.pt")

    assert together(work, "ddp", processes) == {0}
    return torch.load(folder / "found.pt")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """name of a model -> its run on one process."""
    return functools.cache(lambda name: run_on(tmp_path_factory.mktemp("alone"), 1, ExactTrainer, name))


CASES = [(name, ExactTrainer, (2, 3)) for name in MODELS] + [("bert", ShardedTrainer, (2, 3)), ("mixtral", ShardedTrainer, (2,))]


@pytest.mark.parametrize(("name", "trainer_class", "numbers"), CASES)
def test_any_number_of_processes_makes_the_same_updates(name, trainer_class, numbers, alone, tmp_path):
    for processes in numbers:
        found = run_on(tmp_path, processes, trainer_class, name)
        assert h.relative_error(found["gradient"], alone(name)["gradient"]) < 1e-6
        assert found["losses"] == pytest.approx(alone(name)["losses"], rel=1e-5)
        assert len(found["losses"]) == STEPS


def test_trainers_own_updates_differ(tmp_path):
    one, two = (run_on(tmp_path, processes, tf.Trainer) for processes in (1, 2))
    assert h.relative_error(two["gradient"], one["gradient"]) > 0.01


@pytest.mark.parametrize("trainer_class", [ExactTrainer, ShardedTrainer])
def test_a_run_is_resumed_on_another_number_of_processes(trainer_class, alone, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 10}
    run_on(tmp_path, 3, trainer_class, max_steps=10, **saving)
    resumed = run_on(tmp_path, 2, trainer_class, resume=10)
    assert resumed["losses"] == pytest.approx(alone("bert")["losses"][10:], rel=1e-5)
