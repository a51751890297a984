"""On two processes: a layer makes NaN of two samples that only process 1 has. Run by `pairs_worker.py`."""

import hashlib
import json
import time
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from processes import h, make_accelerator, make_windows, prepare
from torch import nn
from torch.distributed.tensor import DTensor

import hf_ga
from hf_ga.errors import NonFinite

KINDS = ("ddp", "fsdp2")
SAMPLES, WINDOW, BAD_WINDOW, BAD_TOKEN = 96, 32, 1, h.VOCABULARY - 1


def marked(samples: list[dict], bad: list[int]) -> list[dict]:
    """The bad samples hold the bad token, no other does. Lengths and labels stay."""
    tokens = [[min(token, BAD_TOKEN - 1) for token in sample["input_ids"]] for sample in samples]
    for i in bad:
        tokens[i][0] = BAD_TOKEN
    return [{**sample, "input_ids": ids} for sample, ids in zip(samples, tokens, strict=True)]


def spoil(model: nn.Module, where: str) -> None:
    """Of the bad samples, the output of the second layer or only the gradient that goes into it."""
    is_bad: list[torch.Tensor] = []

    def look(module, args, kwargs):
        is_bad[:] = [(kwargs["input_ids"] == BAD_TOKEN).any(1)]

    def change(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        rows = is_bad[0].view(-1, 1, 1)
        changed = torch.where(rows, torch.nan, hidden) if where == "forward" else hidden
        if where == "backward" and hidden.requires_grad:
            changed.register_hook(lambda gradient: torch.where(rows, torch.inf, gradient))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    model.register_forward_pre_hook(look, with_kwargs=True)
    model.bert.encoder.layer[1].register_forward_hook(change)


def trained(kind: str, samples: list[dict], where: str, on_nonfinite: str, *, leave_out: bool = False) -> tuple[dict, list]:
    """What was said and done, and this process's part of the weights."""
    accelerator, base = make_accelerator(kind), h.bert_classifier(0.1)
    model, optimizer, rule = prepare(accelerator, kind, base, marked(samples, []), speed_ups=[])  # `spoil` knows samples
    spoil(base, where)
    options = {"targets": rule, "max_grad_norm": 1.0 if where == "forward" else None, "on_nonfinite": on_nonfinite}
    results, said, began = [], None, time.monotonic()
    for window in make_windows(accelerator, samples, global_batch_size=WINDOW, planner=h.by_number(8)):
        if leave_out and window.index == BAD_WINDOW:
            continue
        try:
            results.append(hf_ga.train_step(accelerator, model, optimizer, window, **options))
        except NonFinite as error:
            said = str(error)
            break
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    tensors = [*model.parameters(), *(t for t in states if isinstance(t, torch.Tensor))]
    tensors = [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]
    causes = [r.cause for r in results]
    return {"said": said, "causes": causes, "seconds": time.monotonic() - began}, tensors


def scenario(kind: str, where: str) -> dict:
    accelerator = make_accelerator(kind)
    samples = marked(h.class_samples(SAMPLES), [])
    windows = list(make_windows(accelerator, samples, global_batch_size=WINDOW, planner=h.by_number(8)))
    own = windows[BAD_WINDOW].micro_batches[-1].sample_ids[:2].tolist()
    of_all = gather_object([own])
    samples = marked(samples, of_all[1])
    stopped, weights_then = trained(kind, samples, where, "stop")
    skipped, weights = trained(kind, samples, where, "skip")
    left_out, control = trained(kind, samples, where, "stop", leave_out=True)
    assert left_out["said"] is None
    return {
        "bad": of_all[1],
        "micro_batch": gather_object([windows[BAD_WINDOW].micro_batches[-1].sample_ids.tolist()]),
        "said": stopped["said"],
        "seconds": stopped["seconds"],
        "causes": skipped["causes"],
        "is_finite": all(bool(t.isfinite().all()) for t in (*weights_then, *weights)),
        "as_left_out": len(weights) == len(control) and all(map(torch.equal, weights, control)),
        "moved": any(not torch.equal(a, b) for a, b in zip(weights_then, weights, strict=True)),
        "sha256": hashlib.sha256(b"".join(t.numpy().tobytes() for t in weights)).hexdigest(),
    }


def run(folder: Path) -> None:
    found = {f"{kind} {where}": scenario(kind, where) for kind in KINDS for where in ("forward", "backward")}
    (folder / f"{PartialState().process_index}.json").write_text(json.dumps(found))
