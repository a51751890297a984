"""Computes windows of small models on the CPU and on the stand-in device, and writes what differed and what the host waited for.

python tests/stand_in_worker.py OUTPUT_DIR
"""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import helpers
import stand_in_device
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn import functional as F

import hf_ga
from hf_ga.data.spans import read_answers
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.run.evaluation import evaluate, evaluation_windows
from hf_ga.trainer.exact_trainer import WindowLoss

CPU, DROPOUT = torch.device("cpu"), 0.3


def choices(count):
    """Three texts a sample, of which one is right: a mask with three axes."""
    lengths = helpers.ragged_lengths(3 * count)
    texts = [[1 + (7 * i + j) % (helpers.VOCABULARY - 1) for j in range(n)] for i, n in enumerate(lengths)]
    masks = [[1] * n for n in lengths]
    return [
        {"input_ids": texts[i : i + 3], "attention_mask": masks[i : i + 3], "labels": i // 3 % 3} for i in range(0, 3 * count, 3)
    ]


def pad_choices(samples):
    names = ("input_ids", "attention_mask")
    flat = helpers.pad_right([{name: sample[name][k] for name in names} for sample in samples for k in range(3)])
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {**{name: flat[name].unflatten(0, (-1, 3)) for name in names}, "labels": labels}


@helpers.seeded
def chooser(dropout=0.0):
    return helpers._bert(tf.BertForMultipleChoice, dropout)


def same_length(count):
    return [sample for sample in helpers.token_samples(8 * count) if len(sample["input_ids"]) == 9][:count]


tokens, classes = partial(helpers.token_samples, 24), partial(helpers.class_samples, 24)
MODELS = {
    "GPT-2": (helpers.gpt2, tokens),
    "Llama": (helpers.llama, tokens),
    "BERT": (helpers.bert_masked_lm, tokens),
    "classes": (helpers.bert_classifier, classes),
    "T5": (helpers.t5, tokens),
    "router": (lambda dropout: helpers.mixtral(0.5), tokens),
    "width": (helpers.xlnet_classifier, classes),
    "choices": (chooser, partial(choices, 24)),
    "one length": (helpers.gpt2, partial(same_length, 16)),
}


def sum_over_samples(outputs, batch):
    """Its count is a number, which the host knows."""
    return F.cross_entropy(outputs.logits, batch["labels"], reduction="sum"), len(batch["labels"])


OWN_LOSS = (helpers.plain_tagger, partial(helpers.weighted_samples, 24))
# name -> (model, samples, how windows are planned and proven, more)
CASES = {
    **{name: (*model, {}, {}) for name, model in MODELS.items()},
    **{f"{name}, packed": (*MODELS[name], {"padding_free": True}, {}) for name in ("GPT-2", "Llama", "BERT")},
    **{f"{name}, by length": (*MODELS[name], {"by_length": True}, {}) for name in ("GPT-2", "BERT")},
    "own loss": (*OWN_LOSS, {}, {"loss_fn": helpers.weighted_token_loss}),
    "own loss that counts on the host": (*MODELS["classes"], {}, {"loss_fn": sum_over_samples}),
}


def accelerator_on(device):
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=device == CPU)


def computed(device, make, samples_of, how, more):
    """Gradients of the windows of an epoch, one after the other, an evaluation, and what was waited for in each."""
    accelerator, samples = accelerator_on(device), samples_of()
    assert accelerator.device == device
    collate = pad_choices if make is chooser else helpers.pad_right
    model = accelerator.prepare(make(DROPOUT))
    rule = hf_ga.prove_targets(model, samples, collate, padding_free=how.get("padding_free", False), **more)
    lengths = [max(map(len, s["input_ids"])) if make is chooser else len(s["input_ids"]) for s in samples]
    sizes = {"per_device_batch_size": 2, "global_batch_size": 8, "lengths": lengths if how.get("by_length") else None}
    windows = WindowLoader(samples, collate, accelerator=accelerator, seed=0, **sizes)
    found, waits = [], []
    for window in windows:
        model.zero_grad()
        stand_in_device.waits.clear()
        hf_ga.backward_window(accelerator, model, window, targets=rule, **more)
        waits += stand_in_device.waits
        found.append({name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})
    stand_in_device.waits.clear()
    batches = evaluation_windows(samples, collate, accelerator=accelerator, batch_size=4, lengths=lengths, rule=rule)
    results = evaluate(accelerator, model, batches, rule, **more)
    forwards = sum(len(window.batches) for window in batches)
    return {
        "gradients": found,
        "results": results,
        "waits": waits,
        "waits of evaluation": list(stand_in_device.waits),
        "forwards of evaluation": forwards,
        "packed": rule.packing is not None,
    }


def compared(device, *case):
    on_cpu, there = computed(CPU, *case), computed(device, *case)
    pairs = list(zip(there.pop("gradients"), on_cpu["gradients"], strict=True))
    errors = [helpers.relative_error(found, reference) for found, reference in pairs]
    another = helpers.relative_error(pairs[0][0], pairs[1][1])
    return {**there, "error": max(errors), "error of another window": another, "results on the CPU": on_cpu["results"]}


def steps(device, max_grad_norm):
    """What one optimizer step waits for after its window, and whoever reads what it did."""
    accelerator = accelerator_on(device)
    model = accelerator.prepare(helpers.gpt2(DROPOUT))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    windows = WindowLoader(helpers.token_samples(24), helpers.pad_right, accelerator=accelerator, seed=0)
    found = []
    for window in windows:
        stand_in_device.waits.clear()
        result = hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=max_grad_norm)
        assert result.loss > 0 and (result.grad_norm or 1) > 0
        found.append(list(stand_in_device.waits))
    return found[1:]  # the first one proves the model


def answers(device):
    """What reading the answers of four samples waits for."""
    sample = {"starts": [-1, 0, 4, 8], "ends": [-1, 3, 7, 12], "context": "one two four", "no_answer": 0}
    logits = torch.arange(16.0).reshape(4, 4).to(device)
    stand_in_device.waits.clear()
    assert [a.text for a in read_answers(SimpleNamespace(start_logits=logits, end_logits=logits), [sample] * 4)] == ["four"] * 4
    return list(stand_in_device.waits)


def usual_loop(device):
    """The control: a loop that adds up the losses of micro-batches as numbers."""
    accelerator = accelerator_on(device)
    model, total = accelerator.prepare(helpers.gpt2()), 0.0
    batches = [helpers.pad_right(helpers.token_samples(24)[i : i + 2]) for i in range(0, 8, 2)]
    batches = [{name: value.to(device, non_blocking=True) for name, value in batch.items()} for batch in batches]
    stand_in_device.waits.clear()
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        total += loss.item()
    return list(stand_in_device.waits)


def equivalence(device):
    """Whether the check passes for hf_ga and for a mean of means."""

    def mean_of_means(model, micro_batches):
        for batch in micro_batches:
            (helpers.mean_loss(model, batch) / len(micro_batches)).backward()

    found = {}
    for name, step in (("hf_ga", None), ("mean of means", mean_of_means)):
        model = helpers.gpt2(DROPOUT if step is None else 0.0).to(device)
        steps = {"step": step} if step else {}
        report = hf_ga.check_equivalence(model, helpers.token_samples(16), helpers.pad_right, steps=steps)
        found[name] = {"passed": report.passed, "text": str(report)}
    return found


def trainers(device, folder):
    """Losses of ExactTrainer with two sizes of micro-batches, and what the second of two windows waited for in its forwards."""
    losses, waits = {}, []
    part = WindowLoss.part

    def noted(self, *args, **kwargs):
        before = len(stand_in_device.waits)
        term = part(self, *args, **kwargs)
        waits.extend(stand_in_device.waits[before:])
        return term

    fget = tf.TrainingArguments.device.fget
    with (
        mock.patch.object(tf.TrainingArguments, "device", property(lambda self: (fget(self), device)[1])),
        mock.patch.object(WindowLoss, "part", noted),
    ):
        for size in (2, 4):
            AcceleratorState._reset_state(reset_partial_state=True)
            sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "max_steps": 2}
            quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
            arguments = tf.TrainingArguments(folder, dataloader_pin_memory=False, **sizes, **quiet)
            data = {"train_dataset": helpers.token_samples(24), "data_collator": helpers.pad_right}
            trainer = hf_ga.ExactTrainer(model=helpers.gpt2(DROPOUT), args=arguments, **data)
            trainer.train()
            losses[size] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "waits": waits}


def mixed_devices(device):
    """What is said of operands on two devices."""
    try:
        torch.ones(2, device=device) + torch.ones(2)
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    device = stand_in_device.set_up()
    results = {name: compared(device, *case) for name, case in CASES.items()}
    results |= {
        "answers": answers(device),
        "steps": [steps(device, norm) for norm in (1.0, None)],
        "usual loop": usual_loop(device),
    }
    results |= {"mixed": mixed_devices(device), "equivalence": equivalence(device), "trainers": trainers(device, sys.argv[1])}
    Path(sys.argv[1], "found.json").write_text(json.dumps(results))
