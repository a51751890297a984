"""The loop of Accelerate's examples/by_feature/checkpointing.py, with the accumulation of
transformers' run_*_no_trainer.py: it saves states, and continues from one. Nothing here calls
hf_ga.
"""

import os
from pathlib import Path

import torch
import transformers as tf
from accelerate.utils import set_seed
from documented_loop import (
    EPOCHS,
    EPS,
    LEARNING_RATE,
    Case,
    Layout,
    Trained,
    num_updates,
    trained_weights,
    whole,
)
from torch.utils.data import DataLoader


def train_with_states(
    accelerator_class: type,
    layout: Layout,
    case: Case,
    num_samples: int,
    *,
    output_dir: Path | None = None,
    checkpointing_steps: int | str | None = None,
    resume_from_checkpoint: Path | None = None,
    stop_after: str | None = None,
    seed: int = 42,
    **options,
) -> Trained:
    """Two epochs, or what is left of them.

    Args:
        output_dir: where states go. checkpointing_steps: updates between them, or "epoch".
        resume_from_checkpoint: a folder `step_{updates}` or `epoch_{number}`.
        stop_after: name of a state; the run ends as soon as it is saved.
        options: of the accelerator.

    Returns:
        norms and rates of the updates of this run only.
    """
    accelerator = layout.make(accelerator_class, **options)
    trained = Trained(accelerator.num_processes)
    set_seed(seed)
    train_dataloader = DataLoader(
        case.make_samples(num_samples),
        shuffle=True,
        collate_fn=case.collate,
        batch_size=layout.per_device_batch_size,
    )
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    lr_scheduler = tf.get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=(num_updates(num_samples) + 1) * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    completed_steps = 0
    starting_epoch = 0
    resume_step = None
    if resume_from_checkpoint:
        accelerator.load_state(resume_from_checkpoint)
        training_difference = os.path.splitext(os.path.basename(resume_from_checkpoint))[0]
        if "epoch" in training_difference:
            starting_epoch = int(training_difference.replace("epoch_", "")) + 1
        else:
            completed_steps = int(training_difference.replace("step_", ""))
            resume_step = completed_steps * accelerator.gradient_accumulation_steps
            starting_epoch = resume_step // len(train_dataloader)
            resume_step -= starting_epoch * len(train_dataloader)

    def save(name: str) -> bool:
        accelerator.save_state(output_dir / name)
        return name == stop_after

    for epoch in range(starting_epoch, EPOCHS):
        model.train()
        if resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                loss = case.compute_loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), case.max_norm)
                    trained.norms.append(float(whole(norm)))
                    trained.rates.append(lr_scheduler.get_last_lr()[0])
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                if (
                    isinstance(checkpointing_steps, int)
                    and completed_steps % checkpointing_steps == 0
                    and save(f"step_{completed_steps}")
                ):
                    return trained
        if checkpointing_steps == "epoch" and save(f"epoch_{epoch}"):
            return trained
    trained.weights = trained_weights(model)
    return trained
