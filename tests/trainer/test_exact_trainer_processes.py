"""ExactTrainer under DDP: a window makes the same update on 1, 2 and 3 processes, Trainer's does not; a run is resumed on another
number of processes.
"""

import helpers as h
import pytest
import torch
import transformers as tf
from forked import together
from trainers import Case

from hf_ga.trainer.exact_trainer import ExactTrainer

pytestmark = pytest.mark.slow("trains on up to three processes")
WINDOW, NUM_SAMPLES, STEPS = 12, 29, 30  # two full windows and one of 5 samples: fewer than processes x batch size
LAYOUTS = {1: (12, 1), 2: (3, 2), 3: (1, 4)}  # processes: per-device batch size, accumulation steps
MODELS = {
    "bert": (h.bert_token_classifier, h.tag_samples),
    "gpt2": (h.gpt2, h.token_samples),
    "mixtral": (lambda dropout: h.mixtral(0.1), h.token_samples),
}


def run_on(folder, processes, trainer_class, name="bert", **more):
    """First gradient and the losses of all steps, with dropout."""
    build, make_samples = MODELS[name]
    case = Case(folder / "trainer", build, make_samples(NUM_SAMPLES))
    settings = {"max_steps": STEPS, "learning_rate": 0.05, "lr_scheduler_type": "constant", **more}
    settings["ddp_backend"] = "gloo" if processes > 1 else None

    def work():
        torch.set_num_threads(1)
        run = case.run(trainer_class, LAYOUTS[processes], **settings)
        if run.trainer.args.process_index == 0:
            gradient = {name.removeprefix("module."): value for name, value in run.gradients[0].items()}
            torch.save({"gradient": gradient, "losses": run.losses}, folder / "found.pt")

    assert together(work, "ddp", processes) == {0}
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_processes_makes_the_same_updates(name, tmp_path):
    alone, *others = (run_on(tmp_path, processes, ExactTrainer, name) for processes in LAYOUTS)
    assert len(alone["losses"]) == STEPS
    for found in others:
        assert h.relative_error(found["gradient"], alone["gradient"]) < 1e-6
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_trainers_own_updates_differ(tmp_path):
    alone, two = (run_on(tmp_path, processes, tf.Trainer) for processes in (1, 2))
    assert h.relative_error(two["gradient"], alone["gradient"]) > 0.01


def test_a_run_is_resumed_on_another_number_of_processes(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 10}
    whole = run_on(tmp_path, 1, ExactTrainer)
    run_on(tmp_path, 3, ExactTrainer, max_steps=10, **saving)
    resumed = run_on(tmp_path, 2, ExactTrainer, resume=10)
    assert resumed["losses"] == pytest.approx(whole["losses"][10:], rel=1e-5)
