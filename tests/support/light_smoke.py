"""The library with nothing installed but torch, accelerate, transformers, numpy, safetensors and
what these install: a loop of one's own, a stream, ExactTrainer, the checker, and the error for the
rest.

`tests/test_light.py` runs this with the other packages hidden. An environment that does not have
them needs no pytest:

    python3 -m venv bare && bare/bin/pip install torch==2.13.0 && bare/bin/pip install -e .
    bare/bin/python tests/support/light_smoke.py
"""

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from not_installed import FINETUNE
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import hf_ga

torch.set_num_threads(1)
SAMPLES = [{"input_ids": list(range(1, 4 + 5 * i % 23))} for i in range(16)]


class Stream:
    """The samples as a dataset that can only be read from its start."""

    def __iter__(self):
        yield from SAMPLES


def collate(samples):
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    ones = [torch.ones_like(row) for row in rows]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence(ones, batch_first=True),
        "labels": pad_sequence(rows, batch_first=True, padding_value=-100),
    }


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    )


def own_loop(make_loader, size):
    """Weights after two updates on windows of 8 samples, `size` of them at a time."""
    accelerator = Accelerator(cpu=True)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer)
    windows = make_loader(accelerator, {"per_device_batch_size": size, "global_batch_size": 8})
    for window in windows:
        hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
    return weights(model)


def from_list(accelerator, sizes):
    return hf_ga.WindowLoader(SAMPLES, collate, accelerator=accelerator, **sizes)


def from_stream(accelerator, sizes):
    return hf_ga.StreamLoader(
        Stream(), collate, accelerator=accelerator, shuffle_buffer_size=0, **sizes
    )


def accelerate_loop(size):
    """Weights after two updates of Accelerate's loop on windows of 8 samples."""
    accelerator = hf_ga.Accelerator(cpu=True, gradient_accumulation_steps=8 // size)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(SAMPLES, batch_size=size, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def trainer(size):
    """Weights after two updates of ExactTrainer on windows of 8 samples, `size` of them at a
    time.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            optim="sgd",
            learning_rate=0.1,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        exact = hf_ga.ExactTrainer(gpt2(), arguments, collate, SAMPLES)
        exact.train()
        assert exact.state.global_step == 2
        return weights(exact.model)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def compare(name, run):
    """Both splits give the same weights, which are not those of the start."""
    whole = run(8)
    error = (run(2) - whole).norm() / (whole - weights(gpt2())).norm()
    assert error < 1e-4, f"{name}: relative error {error:.1e} of the update"
    print(f"{name}: relative error {error:.1e} of the update in micro-batches of 2 against 8")


def check():
    report = hf_ga.check_equivalence(gpt2(), SAMPLES, collate, ["uneven"])
    assert report.passed, report
    with tempfile.TemporaryDirectory() as folder:
        report.save(folder)
        page = (Path(folder) / "report.html").read_text()
    plot = "plot" if "<img" in page else "no plot"
    assert ('needs matplotlib: pip install "hf_ga[finetune]"' in page.replace("&quot;", '"')) == (
        plot == "no plot"
    )
    print(f"check_equivalence: {report.verdict('hf_ga')}; {plot} in report.html")


def refused(name):
    """Names of the fine-tuning command say what to install."""
    try:
        getattr(hf_ga, name)
    except ImportError as error:
        assert isinstance(error, hf_ga.MissingPackage)
        print(f"{name}: {error}")
    else:
        raise AssertionError(f"hf_ga.{name} needs none of the missing packages")


if __name__ == "__main__":
    assert hf_ga.plan_batch(8, per_device_train_batch_size=3).layout.accumulation_steps == 3
    compare("WindowLoader, prepare, train_step", lambda size: own_loop(from_list, size))
    compare("StreamLoader, prepare, train_step", lambda size: own_loop(from_stream, size))
    compare("Accelerator", accelerate_loop)
    compare("ExactTrainer", trainer)
    check()
    refused("finetune")
    refused("FinetuneConfig")
    loaded = sorted(name for name in FINETUNE if name in sys.modules)
    assert not loaded, loaded
