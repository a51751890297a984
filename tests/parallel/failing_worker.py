"""Run by `accelerate launch`: python failing.py OUTPUT_DIR KIND. Process 1 fails, as a user's data or model may."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from processes import h, make_accelerator, make_windows, prepare, save
from torch import nn

import hf_ga

SAMPLES = 16


class Fails(RuntimeError):
    """On purpose."""


class Bomb(nn.Module):
    """A classifier that can fail in its forward, and a collate function that can fail as well."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.armed = h.bert_classifier(0.1), ""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        if self.armed == "forward":
            raise Fails("a forward of process 1 went wrong")
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    def collate(self, samples: list[dict]) -> dict:
        if self.armed == "collate":
            raise Fails("row 7 cannot be decoded")
        return h.pad_right(samples)


def survives_in_collate(folder: Path) -> None:
    """The step collates again where a window must have one width."""
    accelerator, bomb = make_accelerator("ddp"), Bomb()
    model, _, rule = prepare(accelerator, "ddp", bomb, h.class_samples(SAMPLES), collate=bomb.collate)
    (window,) = make_windows(accelerator, h.class_samples(SAMPLES), bomb.collate, global_batch_size=SAMPLES)
    bomb.armed = "collate" if accelerator.process_index == 1 else ""
    backward = partial(hf_ga.backward_window, accelerator, model, window, targets=replace(rule, pad_to_window=True))
    survives(accelerator, folder, "collate", backward, lambda: setattr(bomb, "armed", ""))


def survives_in_the_router(folder: Path) -> None:
    """The pass in which experts are counted ends in another sum than that of the status."""
    accelerator, samples, base = make_accelerator("ddp"), h.token_samples(SAMPLES), h.mixtral(0.5)
    model, _, rule = prepare(accelerator, "ddp", base, samples)
    (window,) = make_windows(accelerator, samples, global_batch_size=SAMPLES)
    handle = base.register_forward_pre_hook(fail_on_one(accelerator.process_index))
    survives(accelerator, folder, "router", partial(hf_ga.backward_window, accelerator, model, window, targets=rule), handle.remove)


def survives(accelerator: Accelerator, folder: Path, name: str, backward: Callable, disarm: Callable) -> None:
    """What each process raises in the window, and the loss of the same window after that."""
    try:
        backward()
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    disarm()
    save(accelerator, folder, name, None, said=said, loss=backward().loss)


def fail_on_one(process_index: int) -> Callable:
    def hook(module: nn.Module, inputs: tuple) -> None:
        if process_index == 1:
            raise Fails("an expert is missing in row \udc80")  # a text that cannot be encoded

    return hook


def ends(folder: Path, kind: str) -> None:
    """What nobody catches: the launcher must end all processes."""
    accelerator, bomb = make_accelerator(kind), Bomb()
    model, _, rule = prepare(accelerator, kind, bomb, h.class_samples(SAMPLES), collate=bomb.collate)
    windows = make_windows(accelerator, h.class_samples(SAMPLES), bomb.collate, global_batch_size=4, per_device_batch_size=1)
    for window in windows:
        hf_ga.backward_window(accelerator, model, window, targets=rule)
        if window.index == 1 and accelerator.process_index == 1:
            bomb.armed = "collate" if kind == "ddp" else "forward"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "ddp":
        survives_in_collate(Path(sys.argv[1]))
        survives_in_the_router(Path(sys.argv[1]))
    ends(Path(sys.argv[1]), sys.argv[2])
