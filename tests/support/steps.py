"""Steps of a small model on one process, and whether they left everything as it was."""

import torch

import hf_ga


class Training:
    """A prepared model with optimizer and schedule, and what it consists of at any time."""

    def __init__(self, accelerator, model, fused=False):
        self.accelerator = accelerator
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.9**number)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)

    def step(self, window, **options):
        return hf_ga.train_step(
            self.accelerator,
            self.model,
            self.optimizer,
            window,
            scheduler=self.scheduler,
            **options,
        )

    def snapshot(self):
        states = self.optimizer.state_dict()["state"]
        tensors = [
            *self.model.state_dict().values(),
            *(states[i][name] for i in states for name in sorted(states[i])),
        ]
        return [t.detach().clone() for t in tensors], self.scheduler.state_dict()


def same(snapshot, other):
    """Bit for bit; a NaN is equal to a NaN."""
    (tensors, schedule), (others, other_schedule) = snapshot, other
    return (
        schedule == other_schedule
        and len(tensors) == len(others)
        and all(map(_equal, tensors, others))
    )


def _equal(tensor, other):
    return torch.equal(tensor.isnan(), other.isnan()) and torch.equal(
        tensor.nan_to_num(), other.nan_to_num()
    )
