"""Computes small models on the CPU and on another device, and writes what differed and what the
host waited for.

python tests/stand_in_worker.py OUTPUT_DIR standin|cuda
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import helpers as h
import runs
import stand_in_device
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from steps import backward_window, train_step
from tried import later, tried

import hf_ga
from hf_ga.finetuning.run import loop
from hf_ga.finetuning.run.scores.evaluation import evaluate_samples, evaluation_windows
from hf_ga.trainer.exact_trainer import TrainerWindow

CPU = torch.device("cpu")
DROPOUT = 0.3
CASES = {  # model, samples, own loss
    "GPT-2": (h.gpt2, h.token_samples, None),
    "router": (lambda dropout: h.mixtral(0.5), h.token_samples, None),
    "own loss": (h.plain_tagger, h.weighted_samples, h.weighted_token_loss),
}


def accelerator_on(device):
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_CPU"] = str(device == CPU).lower()
    accelerator = Accelerator(cpu=device == CPU)
    assert accelerator.device.type == device.type
    return accelerator


def noted(work, *args, **kwargs):
    """The result, and what the host waited for."""
    stand_in_device.waits.clear()
    result = work(*args, **kwargs)
    return result, list(stand_in_device.waits)


def computed(device, build, make_samples, loss_fn):
    """Gradients of the windows of an epoch, an evaluation, and what was waited for in each."""
    accelerator = accelerator_on(device)
    samples = make_samples(16)
    model = build(DROPOUT).to(device)
    tried(model, samples, loss_fn=loss_fn)
    model = accelerator.prepare(model)
    sizes = {"per_device_batch_size": 2, "global_batch_size": 8, "seed": 0}
    grads = []
    waits = []
    micro_batches = 0
    for window in hf_ga.WindowLoader(samples, h.pad_right, accelerator=accelerator, **sizes):
        model.zero_grad()
        micro_batches += len(window.micro_batches)
        # Rehearsals wait, in the few windows that have one.
        waits += noted(backward_window, accelerator, model, later(window), loss_fn=loss_fn)[1]
        grads.append(
            {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        )
    lengths = [len(sample["input_ids"]) for sample in samples]
    settings = {"accelerator": accelerator, "batch_size": 4, "lengths": lengths}
    make_windows = partial(evaluation_windows, samples, h.pad_right, **settings)
    results, of_evaluation = noted(
        evaluate_samples, accelerator, model, make_windows, loss_fn=loss_fn
    )
    forwards = sum(len(window.batches) for window in make_windows())
    told = {"results": results, "waits": waits, "micro-batches": micro_batches}
    told["windows"] = len(grads)
    return grads, {**told, "waits of evaluation": of_evaluation, "forwards": forwards}


def compared(device, *case):
    (expected, on_cpu), (grads, there) = computed(CPU, *case), computed(device, *case)
    errors = [
        h.relative_error(found, reference) for found, reference in zip(grads, expected, strict=True)
    ]
    another = h.relative_error(grads[0], expected[1])
    return {
        **there,
        "error": max(errors),
        "error of another window": another,
        "results on the CPU": on_cpu["results"],
    }


def steps(device):
    """What an optimizer step waits for, and whoever reads what it did, with clipping and without;
    behind the first one.
    """
    accelerator = accelerator_on(device)
    model = accelerator.prepare(h.gpt2(DROPOUT))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = []
    windows = hf_ga.WindowLoader(h.token_samples(24), h.pad_right, accelerator=accelerator, seed=0)
    for window, max_grad_norm in zip(windows, (None, 1.0, None), strict=True):
        result, waits = noted(
            train_step, accelerator, model, optimizer, window, max_grad_norm=max_grad_norm
        )
        found.append(waits + noted(lambda result=result: (result.loss, result.grad_norm))[1])
    return found[1:]


def usual_loop(device):
    """The control: a loop that adds up the losses of micro-batches as numbers."""
    model = accelerator_on(device).prepare(h.gpt2())
    batches = [h.pad_right(h.token_samples(24)[i : i + 2]) for i in range(0, 8, 2)]
    batches = [
        {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        for batch in batches
    ]
    return noted(lambda: sum(model(**batch).loss.item() for batch in batches))[1]


def trainers(device, folder):
    """Losses of ExactTrainer with two sizes of micro-batches, and what its forwards waited for."""
    losses = {}
    waits = []
    part = TrainerWindow._compute_loss
    own = tf.TrainingArguments.device.fget

    def watched(self, *args, **kwargs):
        term, of_part = noted(part, self, *args, **kwargs)
        waits.extend(of_part)
        return term

    there = property(lambda self: (own(self), device)[1])
    with (
        mock.patch.object(tf.TrainingArguments, "device", there),
        mock.patch.object(TrainerWindow, "_compute_loss", watched),
    ):
        for size in (2, 4):
            accelerator_on(device)
            sizes = {
                "per_device_train_batch_size": size,
                "gradient_accumulation_steps": 8 // size,
                "max_steps": 2,
            }
            quiet = {
                "report_to": [],
                "save_strategy": "no",
                "disable_tqdm": True,
                "logging_steps": 1,
            }
            args = tf.TrainingArguments(folder, dataloader_pin_memory=False, **sizes, **quiet)
            data = {"train_dataset": h.token_samples(24), "data_collator": h.pad_right}
            trainer = hf_ga.ExactTrainer(model=h.gpt2(DROPOUT), args=args, **data)
            trainer.train()
            losses[size] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "waits": waits}


def whole_runs(device, folder):
    """A run on the CPU and one on the device, and one that is stopped there and goes on."""
    step = loop.train_step
    found = {}
    short = {"max_steps": 4, "eval_steps": 2, "save_steps": 2}

    def stops(*args, **kwargs):
        found["steps"] = found.get("steps", 0) + 1
        if found["steps"] == 4:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    with runs.filled_place(folder / "place") as place:
        for name, where in (("on the CPU", CPU), ("whole", device)):
            accelerator_on(where)
            found[name] = runs.train(place, folder / name, **short)["weights_sha256"]
        with mock.patch.object(loop, "train_step", stops):
            try:
                runs.train(place, folder / "cut", **short)
            except KeyboardInterrupt:
                found["stopped"] = True
        found["cut"] = runs.train(place, folder / "cut", **short, resume_from_checkpoint="auto")[
            "weights_sha256"
        ]
        found["distance"] = runs.relative_distance(folder / "whole", folder / "on the CPU")
        found["of one step"] = runs.relative_distance(
            folder / "on the CPU", folder / "on the CPU" / "checkpoint-2"
        )
    return found


def mixed_devices(device):
    """What is said of operands on two devices."""
    try:
        torch.ones(2, device=device) + torch.ones(2)
    except RuntimeError as error:
        return str(error)
    return ""


def equivalence(device):
    report = hf_ga.check_equivalence(h.gpt2(DROPOUT).to(device), h.token_samples(16), h.pad_right)
    return {"passed": report.passed, "text": str(report)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    folder = Path(sys.argv[1])
    device = stand_in_device.set_up() if sys.argv[2] == "standin" else torch.device(sys.argv[2])
    found = {name: compared(device, *case) for name, case in CASES.items()}
    found |= {"steps": steps(device), "usual loop": usual_loop(device)}
    found |= {
        "mixed": mixed_devices(device),
        "equivalence": equivalence(device),
        "trainers": trainers(device, folder / "trainer"),
    }
    (folder / "found.json").write_text(json.dumps({**found, "runs": whole_runs(device, folder)}))
