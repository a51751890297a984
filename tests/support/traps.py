"""Which of the kinds in `trap_kinds.py` each door accepts, and how wrong the gradient then is.

    python tests/support/traps.py --seeds 10 --rates 0.1 0.05 0.02 0.01

prints a table. A window of 64 samples is split into micro-batches of 8. Its gradient, as the
optimizer sees it, is compared with that of one full batch in float64. A trial uses the rows that
the door chooses by itself.
"""

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import helpers as h
import numpy as np
import torch
import transformers as tf
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainers import arguments, make_trainer
from trap_kinds import KINDS, WINDOW, Features, Kind, Rows

import hf_ga

MICRO_BATCH = 8
LIMIT = 1e-5  # of the relative error of a gradient, all parameters together
RATES = (0.1, 0.05, 0.02, 0.01)
MEANS_OF_TORCH = {
    "control: classification",
    "control: regression",
    "control: multi-label",
    "control: unlabelled rows (-100)",
    "class weights",
    "class weights of y",
    "class weights of y, smoothed",
    "unknown labels -1",
    "unknown labels -1 of y",
    "NaN targets",
    "column of labelled rows",
}


@dataclass(frozen=True)
class Outcome:
    """What a door did with a data set.

    Attributes:
        accepted: No error was raised.
        error: The largest relative error of the gradients of the updates that were made; 0.0
            without any.
        message: Of the error that was raised.
        is_foreign: It was not one of `hf_ga.errors`.
        num_updates: Updates of the optimizer.
        seconds: Of the door, without the reference.
    """

    accepted: bool
    error: float
    message: str = ""
    is_foreign: bool = False
    num_updates: int = 0
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether an update was made with a wrong gradient (also before a later refusal)."""
        return not self.error <= LIMIT


class Recorder:
    """Keeps the gradients that an optimizer with a learning rate of 0 is stepped with."""

    def __init__(self, model: nn.Module) -> None:
        self.gradients: list[h.Gradients] = []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.optimizer.register_step_pre_hook(lambda *_: self.gradients.append(h.gradients(model)))


# Doors: each trains a model on all windows


def own_loop(kind: Kind, model: nn.Module, rows: Rows, recorder: Recorder) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    windows = hf_ga.WindowLoader(
        rows,
        h.pad_right,
        accelerator=accelerator,
        per_device_batch_size=MICRO_BATCH,
        global_batch_size=WINDOW,
        shuffle=False,
    )
    model, optimizer = hf_ga.prepare(
        accelerator, model, recorder.optimizer, windows, loss_fn=kind.loss_fn
    )
    for window in windows:
        hf_ga.train_step(accelerator, model, optimizer, window)


def inputs_of(kind: Kind, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model without a loss of its own is called with."""
    return batch if kind.loss_fn is None else {"x": batch["x"]}


def with_loss(kind: Kind) -> type:
    """An ExactTrainer with the mean of the `loss_fn` over its batch."""

    def compute_loss(
        self: tf.Trainer,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ):
        outputs = model(**inputs_of(kind, inputs))
        total, number = kind.loss_fn(outputs, inputs)
        return (total / number, outputs) if return_outputs else total / number

    return type("OwnLossTrainer", (hf_ga.ExactTrainer,), {"compute_loss": compute_loss})


def exact_trainer(kind: Kind, model: nn.Module, rows: Rows, recorder: Recorder) -> None:
    trainer_class = hf_ga.ExactTrainer if kind.loss_fn is None else with_loss(kind)
    train_with(trainer_class, model, rows, recorder)


def loss_sums_of_the_trainer(kind: Kind, model: nn.Module, rows: Rows, recorder: Recorder) -> None:
    def loss_sums(self: tf.Trainer, outputs: Any, batch: dict[str, Tensor]) -> tuple:
        return kind.loss_fn(outputs, batch)

    trainer_class = type("SumsTrainer", (hf_ga.ExactTrainer,), {"loss_sums": loss_sums})
    train_with(trainer_class, model, rows, recorder)


def train_with(trainer_class: type, model: nn.Module, rows: Rows, recorder: Recorder) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            Path(folder),
            layout=(MICRO_BATCH, WINDOW // MICRO_BATCH),
            num_train_epochs=1,
            logging_strategy="no",
            max_grad_norm=0.0,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
        )
        trainer = make_trainer(
            trainer_class,
            model,
            args,
            rows,
            data_collator=h.pad_right,
            optimizers=(recorder.optimizer, None),
        )
        trainer.train()


def loop_of_accelerate(
    kind: Kind,
    model: nn.Module,
    rows: Rows,
    recorder: Recorder,
    accelerator_class: type = hf_ga.Accelerator,
) -> None:
    """The loop of Accelerate's documentation with the model's own loss, or with a sum and a number,
    which only `hf_ga.Accelerator` takes.
    """

    def backward(accelerator: Any, outputs: Any, batch: dict[str, Tensor]) -> None:
        if kind.loss_fn is None:
            accelerator.backward(outputs.loss)
            return
        total, number = kind.loss_fn(outputs, batch)
        accelerator.backward(total, num_targets=number)

    accumulate(kind, model, rows, recorder, backward, accelerator_class)


def loss_of_the_loop(kind: Kind, model: nn.Module, rows: Rows, recorder: Recorder) -> None:
    """The same loop, which computes the mean loss from the model's outputs."""
    loss_of_outputs = model.loss
    model.loss = None

    def backward(accelerator: Any, outputs: Tensor, batch: dict[str, Tensor]) -> None:
        if kind.loss_fn is None:
            labels = batch["y"] if "y" in batch else batch["labels"]
            loss = loss_of_outputs(outputs, labels, batch.get("weights"))
        else:
            total, number = kind.loss_fn(outputs, batch)
            loss = total / number
        accelerator.backward(loss)

    accumulate(kind, model, rows, recorder, backward, hf_ga.Accelerator)


def accumulate(
    kind: Kind,
    model: nn.Module,
    rows: Rows,
    recorder: Recorder,
    backward: Callable[[Any, Any, dict[str, Tensor]], None],
    accelerator_class: type,
) -> None:
    """One epoch. backward: (accelerator, outputs, batch) -> a call of the accelerator's."""
    steps = WINDOW // MICRO_BATCH
    accelerator = accelerator_class(cpu=True, gradient_accumulation_steps=steps)
    loader = DataLoader(rows, batch_size=MICRO_BATCH, collate_fn=h.pad_right)
    model, optimizer, loader = accelerator.prepare(model, recorder.optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            outputs = model(**inputs_of(kind, batch))
            backward(accelerator, outputs, batch)
            optimizer.step()
            optimizer.zero_grad()


Door = Callable[[Kind, nn.Module, Rows, Recorder], None]
DOORS: dict[str, Door] = {
    "own loop": own_loop,
    "ExactTrainer": exact_trainer,
    "loss_sums": loss_sums_of_the_trainer,
    "Accelerator": loop_of_accelerate,
    "loop's loss": loss_of_the_loop,
}
PLAIN_ACCELERATE = partial(loop_of_accelerate, accelerator_class=accelerate.Accelerator)


# Measuring


def run(kind: Kind, door: str, rate: float, seed: int, num_windows: int | None = None) -> Outcome:
    """Train on one data set.

    Args:
        kind: One of `KINDS`.
        door: One of `DOORS`.
        rate: Share of odd rows.
        seed: Of the data set.
        num_windows: Windows in the data set, all of which are trained on. Default: as the kind
            says.

    Example:
        run(KINDS["class weights"], "own loop", rate=0.1, seed=0).error
    """
    return run_door(kind, DOORS[door], rate, seed, num_windows or kind.num_windows)


def run_door(kind: Kind, door: Door, rate: float, seed: int, num_windows: int) -> Outcome:
    """As `run`, through any door."""
    reset_accelerate()
    generator = np.random.default_rng([seed, round(rate * 1000)])
    rows = kind.make_rows(generator, WINDOW * num_windows, rate)
    model = kind.build()
    recorder = Recorder(model)
    message = ""
    is_foreign = False
    start = time.perf_counter()
    try:
        door(kind, model, rows, recorder)
    except hf_ga.HfGaError as error:
        message = one_line(error)
    except Exception as error:
        message = one_line(error)
        is_foreign = True
    seconds = time.perf_counter() - start
    num_updates = len(recorder.gradients)
    if not message and num_updates != num_windows:
        message = f"{num_updates} updates in {num_windows} windows"
        is_foreign = True
    return Outcome(
        accepted=not message,
        error=largest_error(kind, rows, recorder.gradients),
        message=message,
        is_foreign=is_foreign,
        num_updates=num_updates,
        seconds=seconds,
    )


def reset_accelerate() -> None:
    """Forget what an error left behind in the states that all accelerators share."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def largest_error(kind: Kind, rows: Rows, gradients: list[h.Gradients]) -> float:
    """The largest relative error of the gradients of the first windows; infinite for a NaN."""
    model = kind.build()
    errors = [0.0]
    for index, found in enumerate(gradients):
        reference = full_batch(kind, model, rows[index * WINDOW : (index + 1) * WINDOW])
        error = h.relative_error(found, reference)
        errors.append(error if error == error else float("inf"))
    return max(errors)


def full_batch(kind: Kind, model: nn.Module, rows: Rows) -> h.Gradients:
    """One forward and backward of all rows together in float64; changes the dtype of the model."""
    model = model.double()
    model.zero_grad()
    batch = {
        name: values.double() if values.is_floating_point() else values
        for name, values in h.pad_right(rows).items()
    }
    outputs = model(**inputs_of(kind, batch))
    if kind.loss_fn is None:
        loss = outputs.loss
    else:
        total, number = kind.loss_fn(outputs, batch)
        loss = total / number
    loss.backward()
    return h.gradients(model)


def must_be_accepted(kind: Kind, door: str) -> bool:
    """Whether the kind is right as it is passed to this door: ExactTrainer's compute_loss gets the
    mean of a `loss_fn`, whose weights it cannot know; its loss_sums gets both. Of a loop's loss, `hf_ga.Accelerator`
    knows the means that torch's functions compute.
    """
    if door == "loop's loss":
        return kind.name in MEANS_OF_TORCH
    return kind.is_right and (kind.loss_fn is None or door != "ExactTrainer")


def doors_of(kind: Kind) -> list[str]:
    """The doors that a kind can go through: a loop has no loss of a language model."""
    doors = [*DOORS]
    if kind.loss_fn is None:
        doors.remove("loss_sums")
    if not isinstance(kind.build(), Features):
        doors.remove("loop's loss")
    return doors


def is_fault(kind: Kind, door: str, outcome: Outcome) -> bool:
    """Whether an outcome breaks the promise.

    A sum and a number that a loop of Accelerate computes itself are taken at their word: nobody but
    the loop can compute them for other groups of samples.
    """
    if outcome.is_foreign:
        return True
    if must_be_accepted(kind, door) and not outcome.accepted:
        return True
    if door == "Accelerator" and kind.loss_fn is not None and not kind.is_right:
        return False
    return outcome.is_wrong and (outcome.accepted or not kind.may_be_late)


def describe(kind: Kind, door: str, rate: float, seed: int, outcome: Outcome) -> str:
    state = "accepted" if outcome.accepted else "foreign" if outcome.is_foreign else "refused"
    return (
        f"{kind.name} | {door} | rate {rate:g} | seed {seed}: {state}, error {outcome.error:.1e}, "
        f"{outcome.num_updates} updates. {outcome.message:.300}"
    )


def data_sets(kind: Kind, rates: Sequence[float], num_seeds: int) -> list[tuple[float, int]]:
    """(rate, seed) of the data sets to try. An adversary of many windows has no rate."""
    if kind.num_windows > 1:
        return [(rates[0], seed) for seed in range(min(num_seeds, 3))]
    return [(rate, seed) for rate in rates for seed in range(num_seeds)]


# The command


def table_row(kind: Kind, door: str, outcomes: list[Outcome]) -> str:
    accepted = sum(outcome.accepted for outcome in outcomes)
    wrong = sum(outcome.is_wrong for outcome in outcomes)
    foreign = sum(outcome.is_foreign for outcome in outcomes)
    faults = sum(is_fault(kind, door, outcome) for outcome in outcomes)
    largest = max(outcome.error for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    return (
        f"| {kind.name:36} | {'yes' if must_be_accepted(kind, door) else '':5} | {door:12} "
        f"| {accepted:3}/{len(outcomes):<3} | {wrong:5} | {largest:7.1e} | {foreign:7} "
        f"| {faults:6} | {seconds:5.1f} |"
    )


HEADER = (
    f"| {'kind':36} | right | {'door':12} | accept. | wrong | largest | foreign | faults | secs. |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", help="parts of names; default: all")
    parser.add_argument("--doors", nargs="+", choices=[*DOORS], default=[*DOORS])
    parser.add_argument("--seeds", type=int, default=10, help="data sets for each rate")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--windows", type=int, help="in each data set; default: 1, or the kind's")
    parser.add_argument("--messages", action="store_true", help="print one of each kind of error")
    args = parser.parse_args()
    set_up()
    parts = args.kinds or [""]
    kinds = [kind for kind in KINDS.values() if any(part in kind.name for part in parts)]
    print(HEADER)
    print("|".join(["", *("-" * len(cell) for cell in HEADER.split("|")[1:-1]), ""]))
    num_faults = 0
    for kind in kinds:
        num_windows = args.windows if kind.num_windows == 1 else None
        for door in doors_of(kind):
            if door not in args.doors:
                continue
            outcomes = {}
            for rate, seed in data_sets(kind, args.rates, args.seeds):
                outcomes[rate, seed] = run(kind, door, rate, seed, num_windows)
            print(table_row(kind, door, [*outcomes.values()]), flush=True)
            num_faults += sum(is_fault(kind, door, outcome) for outcome in outcomes.values())
            if args.messages:
                print_messages(outcomes)
    print(f"\n{num_faults} faults")


def print_messages(outcomes: dict[tuple[float, int], Outcome]) -> None:
    shown = set()
    for (rate, seed), outcome in outcomes.items():
        if outcome.message and outcome.message[:60] not in shown:
            shown.add(outcome.message[:60])
            print(f"    rate {rate:g}, seed {seed}: {outcome.message:.300}")


def set_up() -> None:
    """As tests/conftest.py."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main()
