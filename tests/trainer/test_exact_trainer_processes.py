"""ExactTrainer on 1, 2 and 3 processes, under DDP and FSDP2, at accumulation 1 and 16: a window makes
the same update, Trainer's does not; a run is resumed on another number of processes, at 4. One
start of processes for each number; `pytest -s` prints the table.
"""

import os
from functools import partial
from itertools import product

import helpers as h
import pytest
import torch
import transformers as tf
from accelerate.state import AcceleratorState
from forked import on_two_ranks, together, without_errors
from memory_limits import Device
from test_exact_trainer_pairs import dpo
from test_exact_trainer_trl import sft
from torch.distributed.tensor import DTensor
from trainers import Case, mixed
from trl import DPOTrainer, SFTTrainer

pytestmark = [
    pytest.mark.slow("trains on up to three processes"),
    pytest.mark.filterwarnings(
        "ignore:FSDP2-wrapped module"
    ),  # about outputs that are views, which nothing changes in place
]
WINDOW, NUM_SAMPLES = (
    96,
    101,
)  # each epoch a full window and one of 5 samples: fewer than some processes' batch
STEPS = 6  # docs/trainer.md: of 30
SAVED = 4
FEW = 2  # steps of the other cases than BERT: one of each window


KINDS = {
    "DDP": mixed,
    "FSDP2": mixed,
    "Trainer": lambda base: base,
}


def of_case(build, make_samples, **given):
    return lambda folder, kind, *how, **more: Case(folder, build, make_samples(NUM_SAMPLES)).run(
        kind(tf.Trainer), *how, **given, **more
    )


def loss_of_items(outputs, labels, num_items_in_batch=None):
    """A sum over the items that Trainer counts, and a mean of which it knows nothing."""
    logits = outputs.logits.flatten(0, 1)
    number = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    total = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / number + 0.1 * outputs.logits[:, 0].square().mean()


ONE_LAYER = {"num_hidden_layers": 1}
bert = partial(h.bert_token_classifier, **ONE_LAYER)
gpt2 = partial(h.gpt2, **ONE_LAYER)
RUNS = {
    "bert": of_case(bert, h.tag_samples),
    "function": of_case(bert, h.tag_samples, trainer={"compute_loss_func": loss_of_items}),
    "gpt2": of_case(gpt2, h.token_samples),
    "mixtral": of_case(lambda dropout: h.mixtral(0.1), h.token_samples),
    "dpo": lambda folder, kind, *how, **more: dpo(
        folder, kind(DPOTrainer), gpt2(0.1), *how, num_samples=NUM_SAMPLES, **more
    ),
    "sft": lambda folder, kind, *how, **more: sft(
        folder, kind(SFTTrainer), gpt2(0.1), *how, num_samples=NUM_SAMPLES, **more
    ),
}
CASES = [
    *product(["bert"], KINDS, (1, 16)),
    ("gpt2", "DDP", 1),
    ("gpt2", "FSDP2", 16),
    *product(["gpt2"], ["Trainer"], (1, 16)),
    *product(["function"], ("DDP", "Trainer"), (1, 16)),
    *product(["mixtral"], ("DDP", "FSDP2"), (1, 4)),
    *product(["dpo"], KINDS, [1]),
    ("dpo", "DDP", 16),
    ("dpo", "Trainer", 16),
    ("sft", "DDP", 1),
]


def cases(processes):
    """On one without shards and DPO at 16, which `test_exact_trainer_pairs.py` has; on three, BERT,
    the router in several micro-batches, and DPO, of which one has fewer pairs.
    """
    if processes == 1:
        return [case for case in CASES if case[1] != "FSDP2" and case != ("dpo", "DDP", 16)]
    on_three = {("bert", 1), ("bert", 16), ("mixtral", 4), ("dpo", 1)}
    return [
        (name, kind, ga)
        for name, kind, ga in CASES
        if processes == 2 or ((name, ga) in on_three and kind != "Trainer")
    ]


def whole(tensor):
    """Of shards on all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def num_steps(name, kind, ga):
    if kind == "Trainer":
        return 1
    return STEPS if name == "bert" and ga == 1 else FEW


def train_all(folder, processes):
    """Writes the first gradient and all losses of each case, with dropout; and of a run that three
    processes began.
    """
    found = {}

    def train(name, kind, ga, steps, **more):
        settings = {
            "max_steps": steps,
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            **more,
        }
        settings["ddp_backend"] = "gloo" if processes > 1 else None
        if kind == "FSDP2":
            # torch cannot load the whole state of an optimizer that has none, as plain SGD.
            sharded = {"state_dict_type": "SHARDED_STATE_DICT"}
            settings |= {"fsdp": True, "fsdp_config": sharded}
        run = RUNS[name](folder / kind, KINDS[kind], (WINDOW // processes // ga, ga), **settings)
        assert (kind == "FSDP2") is any(
            isinstance(value, DTensor) for value in run.gradients[0].values()
        )
        gradient = {
            name.removeprefix("module."): whole(value) for name, value in run.gradients[0].items()
        }
        found[name, kind, "resumed" if "resume" in more else ga] = gradient, run.losses
        AcceleratorState._reset_state(True)
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # Accelerate sets it, for later runs too

    torch.set_num_threads(1)
    for name, kind, ga in cases(processes):
        saving = (
            {"save_strategy": "steps", "save_steps": SAVED}
            if processes == 3 and (name, ga) == ("bert", 1)
            else {}
        )
        train(name, kind, ga, num_steps(name, kind, ga), **saving)
    for kind in ("DDP", "FSDP2") if processes == 2 else ():
        train("bert", kind, 4, STEPS, resume=SAVED)
    if os.environ.get("RANK", "0") == "0":
        torch.save(found, folder / f"{processes}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Number of processes -> case -> first gradient, losses."""
    folder = tmp_path_factory.mktemp("found")
    for processes in (1, 3, 2):
        assert together(partial(train_all, folder, processes), "ddp", processes) == {0}
    return {processes: torch.load(folder / f"{processes}.pt") for processes in (1, 2, 3)}


def errors(run, reference):
    """Relative, of the first gradient and the largest of the losses."""
    return h.relative_error(run[0], reference[0]), max(
        abs(a / b - 1) for a, b in zip(*(r[1] for r in (run, reference)), strict=False)
    )


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_split_makes_the_same_updates_and_trainers_do_not(found, processes):
    for (name, kind, ga), run in found[processes].items():
        if ga == "resumed":
            continue
        reference = found[1][name, "Trainer" if kind == "Trainer" else "DDP", 1]
        gradient, losses = errors(run, reference)
        print(f"| {name} | {processes} | {kind} | {ga} | {gradient:.1e} | {losses:.1e} |")
        if kind != "Trainer":
            assert gradient < 1e-6, (name, kind, ga)
            assert losses < 1e-5, (name, kind, ga)
            assert len(run[1]) == num_steps(name, kind, ga)
        elif processes * ga > 1:
            assert gradient > 0.01, (name, kind, ga)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_run_is_resumed_on_another_number_of_processes(found, kind):
    losses = found[2]["bert", kind, "resumed"][1]
    assert losses == pytest.approx(found[1]["bert", "DDP", 1][1][SAVED:], rel=1e-5)
    assert len(losses) == STEPS - SAVED


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_memory_that_runs_out_on_one_process(tmp_path, kind):
    """Both compute the window again in smaller micro-batches."""
    whole_run = RUNS["gpt2"](tmp_path / "whole", mixed, (WINDOW, 1), max_steps=1)

    def work():
        torch.set_num_threads(1)
        case = Case(tmp_path / kind, gpt2, h.token_samples(NUM_SAMPLES))
        sharded = {"fsdp": True} if kind == "FSDP2" else {}
        trainer = case.make(mixed(tf.Trainer), (24, 2), max_steps=1, ddp_backend="gloo", **sharded)
        is_second = trainer.args.process_index == 1
        device = Device(trainer.model, fits=200, chosen=lambda: is_second)
        trainer.train()
        gradients = {name: whole(value) for name, value in trainer.run.gradients[0].items()}
        return gradients, len(device.failures)

    (first, no_failures), (second, num_failures) = without_errors(on_two_ranks(work))
    assert no_failures == 0
    assert num_failures > 0
    for found in (first, second):
        found = {name.removeprefix("module."): value for name, value in found.items()}
        assert h.relative_error(found, whole_run.gradients[0]) < 1e-6


class Gathering(tf.Trainer):
    """Gathers values of all processes in its loss, as TRL's trainers do for their log."""

    num_calls = 0
    fails_at: int | None = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.num_calls += 1
        if self.args.process_index == 1 and self.num_calls == self.fails_at:
            raise torch.OutOfMemoryError("out of memory")
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        num_items = self.accelerator.gather_for_metrics(inputs["labels"].ne(-100).sum())
        assert len(num_items) == 2
        return (loss, outputs) if return_outputs else loss


def gathering(folder, **settings):
    torch.set_num_threads(1)
    case = Case(folder, gpt2, h.token_samples(13))  # 8, and 5: three on one process, two on another
    return case.make(max_steps=2, ddp_backend="gloo", **settings)


def test_losses_that_gather_are_computed_as_often_on_all_processes(tmp_path):
    whole_run = Case(tmp_path, gpt2, h.token_samples(13)).run(layout=(8, 1), max_steps=2)

    def work():
        trainer = gathering(tmp_path, trainer_class=mixed(Gathering), layout=(1, 4))
        trainer.train()
        return trainer.run.losses, trainer.num_calls

    (losses, num_calls), (_, on_other) = without_errors(on_two_ranks(work))
    assert losses == pytest.approx(whole_run.losses, rel=1e-6)
    assert num_calls == on_other


@pytest.mark.parametrize("fails_at", [2, 4])
def test_an_error_where_other_processes_gather_is_raised_at_once(tmp_path, fails_at):
    def work():
        trainer = gathering(tmp_path, trainer_class=mixed(Gathering), layout=(2, 2))
        trainer.fails_at = fails_at
        try:
            trainer.train()
        except Exception as error:
            return type(error).__name__, str(error)

    first, (kind, message) = on_two_ranks(work)
    assert first is not None
    assert kind == "OutOfMemory"
    assert "compute_loss gathers" in message
