"""Loops that people write around an Accelerator, on one window of 16 samples that is trained on
three times, without dropout: the full batch of Accelerate's own Accelerator is the reference, and
the order of the samples does not matter. Nothing here calls hf_ga.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import accelerate
import helpers as h
import torch
from accelerate.utils import set_seed
from documented_loop import EPS, FULL_BATCH, LEARNING_RATE, WINDOW, Layout, Weights, trained_weights
from torch import nn
from torch.utils.data import DataLoader

UPDATES = 3
Step = Callable[[Any, nn.Module, Any], None]
Loop = Callable[[Any, nn.Module, Any, Any], None]


def documented(step: Step) -> Loop:
    """Accelerate's loop around (accelerator, model, batch) -> None, which calls backward."""

    def loop(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for _ in range(UPDATES):
            model.train()
            for batch in loader:
                with accelerator.accumulate(model):
                    step(accelerator, model, batch)
                    optimizer.step()
                    optimizer.zero_grad()

    return loop


@dataclass
class Attempt:
    """A loop, and what it trains.

    Attributes:
        options: of the accelerator. loader_options: of the DataLoader.
        model: the last one that was trained, not wrapped. start: its weights before.
    """

    loop: Loop
    build: Callable[[], nn.Module] = h.bert_token_classifier
    samples: list = field(default_factory=lambda: h.tag_samples(WINDOW))
    collate: Callable[[list], Any] = h.pad_right
    options: dict = field(default_factory=dict)
    loader_options: dict = field(default_factory=lambda: {"shuffle": True})
    model: nn.Module | None = None
    start: Weights = field(default_factory=dict)

    def run(self, accelerator_class: type, layout: Layout) -> Weights:
        """Weights at the end."""
        accelerator = layout.make(accelerator_class, **self.options)
        set_seed(2)
        loader = DataLoader(
            self.samples,
            collate_fn=self.collate,
            batch_size=layout.per_device_batch_size,
            **self.loader_options,
        )
        self.model = self.build()
        self.start = trained_weights(self.model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, eps=EPS)
        model, optimizer, loader = accelerator.prepare(self.model, optimizer, loader)
        self.loop(accelerator, model, optimizer, loader)
        return trained_weights(self.model)

    def full_batch(self) -> Weights:
        """What is right: Accelerate's own accelerator with one batch for the whole window."""
        return self.run(accelerate.Accelerator, FULL_BATCH)

    def moved(self) -> bool:
        """Whether any weight differs from the start."""
        now = trained_weights(self.model)
        return any(not torch.equal(now[name], self.start[name]) for name in now)
