"""Evaluates small models on one and three processes and writes what each process got; run by `test_evaluation.py`.

    python tests/run/evaluation_worker.py OUTPUT_DIR/job.json

The processes are forked, so that the libraries are imported once; the process group (gloo) is real. Not by `notebook_launcher`: the
threads of its agent run while it forks, and a process that is forked while one of them looks a host name up waits for ever.
"""

import json
import sys
from functools import partial
from pathlib import Path

import helpers
import torch
import transformers as tf
from accelerate import Accelerator
from forked import together

from hf_ga.run.evaluation import Reader, evaluate, evaluation_windows
from hf_ga.run.metrics import TEXT_METRICS
from hf_ga.run.readers import logits_reader
from hf_ga.training import prove_targets

BATCH_SIZE = 7
PROCESSES = (1, 3)


def louder(model, factor=3):
    """Outputs that differ much from sample to sample."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor if parameter.dim() > 1 else 1)
    return model


def ragged(count):
    """Every fourth without a target: its first label is not predicted."""
    samples = helpers.token_samples(count, ignored_share=0.3)
    none = [[s["labels"][0]] + [helpers.IGNORED] * (len(s["labels"]) - 1) for s in samples]
    return [{**s, "labels": none[i]} if i % 4 == 0 else s for i, s in enumerate(samples)]


def read_texts(outputs, batch, micro_batch):
    """Each sample's likeliest tokens as words, against its own ids."""
    ids = [row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    made = [row[: len(own)].tolist() for row, own in zip(outputs.logits.argmax(-1), ids, strict=True)]
    return [" ".join(map(str, row)) for row in made], [" ".join(str(i % 5) for i in row) for row in ids]


# name -> (model, samples, metrics)
CASES = {
    "causal LM": (lambda: louder(helpers.gpt2()), partial(ragged, 53), ()),
    "router": (lambda: helpers.mixtral(router_coefficient=0.5), partial(ragged, 53), ()),
    "width": (helpers.xlnet_classifier, partial(helpers.class_samples, 300), ("accuracy",)),
    "classes": (lambda: louder(helpers.bert_classifier(), 4), partial(helpers.class_samples, 53), ("accuracy", "f1")),
    "tags": (lambda: louder(helpers.bert_token_classifier()), partial(helpers.tag_samples, 53), ("accuracy", "f1")),
    "texts": (lambda: louder(helpers.gpt2()), partial(ragged, 53), ()),
    "own loss": (helpers.plain_tagger, partial(helpers.weighted_samples, 20), ()),
    "one sample": (lambda: louder(helpers.gpt2()), lambda: ragged(53)[1:2], ()),
    "no targets": (lambda: louder(helpers.gpt2()), lambda: [helpers.without_targets(s) for s in ragged(5)], ()),
}


def evaluated(accelerator, model, samples, batch_size, rule, reader=None):
    lengths = [len(s["input_ids"]) for s in samples]
    windows = evaluation_windows(
        samples, helpers.pad_right, accelerator=accelerator, batch_size=batch_size, lengths=lengths, proven=rule
    )
    return evaluate(accelerator, model, windows, rule, reader)


def measured(accelerator, name):
    make, samples_of, metrics = CASES[name]
    model, samples = make(), samples_of()
    probes = samples if len(samples) > 5 else ragged(53)
    loss_fn = helpers.weighted_token_loss if name == "own loss" else None
    rule = prove_targets(model, probes[1:33], helpers.pad_right, loss_fn=loss_fn)
    reader = logits_reader(metrics) if metrics else Reader(TEXT_METRICS, read_texts, True) if name == "texts" else None
    return evaluated(accelerator, accelerator.prepare(model), samples, BATCH_SIZE, rule, reader)


def run(folder):
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    accelerator = Accelerator(cpu=True)
    results = {name: measured(accelerator, name) for name in CASES}
    name = f"{accelerator.num_processes}-{accelerator.process_index}.json"
    Path(folder, name).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    for count in PROCESSES:
        if (codes := together(partial(run, Path(sys.argv[1]).parent), "ddp", count)) != {0}:
            sys.exit(f"{count} processes ended with {codes}")
