"""Weights and optimizer of a plain checkpoint through FSDP's shards and back, on two processes; run by `pairs_worker.py`."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers as tf
from accelerate import Accelerator
from forked import together
from torch import nn

from hf_ga.parallel.prepare import enable_fsdp_on_cpu, prepare
from hf_ga.recovery.checkpoint import load_checkpoint, save_checkpoint
from hf_ga.run.optimizers import build_optimizer

CASES = {  # optimizer, model, kind; Adam and RAdam have their state in the form of AdamW
    "a bias with two names": ("adamw", "bert", "fsdp2"),  # FSDP1 cannot train BERT's tied head
    "parameters without state": ("adamw", "unused", "fsdp1"),
    "numbers beside moments": ("nadam", "gpt", "fsdp2"),
    "numbers beside moments, FSDP1": ("nadam", "gpt", "fsdp1"),
    "one moment": ("rmsprop", "gpt", "fsdp2"),
    "no state": ("sgd", "gpt", "fsdp1"),
}
ALONE = SimpleNamespace(is_main_process=True, num_processes=1)  # all that saving needs of an Accelerator
SIZES = {"vocab_size": 301, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def made(name: str, optim: str, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """gpt: tied embeddings. bert: a bias with two names too. unused: a BERT whose pooler gets no gradient."""
    torch.manual_seed(3)
    if name == "gpt":
        model = tf.GPT2LMHeadModel(tf.GPT2Config(**SIZES, n_positions=64))
    else:
        model = (tf.BertForMaskedLM if name == "bert" else tf.BertModel)(tf.BertConfig(**SIZES, intermediate_size=32))
    return model, build_optimizer(model, optim, rate, weight_decay=10 * rate)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for seed in range(3):
        ids = torch.randint(0, 301, (4, 9), generator=torch.Generator().manual_seed(seed))
        model(ids)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def into_shards(checkpoint: Path, sharded: Path, optim: str, name: str) -> None:
    """On each process: other weights and rates, loaded over, and written by FSDP."""
    accelerator = Accelerator(cpu=True)
    enable_fsdp_on_cpu(accelerator)
    model, optimizer = made(name, optim, rate=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model, optimizer = prepare(accelerator, model, optimizer)
    load_checkpoint(checkpoint, model, optimizer)
    save_checkpoint(accelerator, sharded, model, optimizer, {}, step=4, keep=1)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if k not in ("betas", "params")} for group in state["param_groups"]]
    moments = {f"{i} {k}": torch.as_tensor(v) for i, of_one in state["state"].items() for k, v in of_one.items() if v is not None}
    return {**model.state_dict(), **moments, "groups": torch.tensor(list(str(groups).encode()))}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of all that is missing, too much, or has another bit."""
    names = found.keys() | expected.keys()
    return sorted(n for n in names if n not in found or n not in expected or not torch.equal(found[n], expected[n]))


def result_of(folder: Path, optim: str, name: str, kind: str) -> dict:
    """What came back, compared bit for bit with what was written."""
    model, optimizer = made(name, optim, rate=1e-2)
    train(model, optimizer)
    checkpoint = save_checkpoint(ALONE, folder / f"{optim} {name} {kind}", model, optimizer, {}, step=3, keep=1)
    sharded = checkpoint.parent / "sharded"
    codes = together(lambda: into_shards(checkpoint, sharded, optim, name), kind, 2)
    other = made(name, optim, rate=0.5)
    before = different(contents(*other), contents(model, optimizer))
    load_checkpoint(sharded / "checkpoint-4", *other)
    after = different(contents(*other), contents(model, optimizer))
    shutil.rmtree(checkpoint.parent)
    return {"codes": sorted(codes), "before": len(before), "after": after, "values": len(contents(model, optimizer))}
