"""One process of a run with elastic machines: `python worker.py job.json`.

The job has the door (what trains), the folder of the output and of the ledger, the number of
epochs, the least seconds of a step, so that events meet a run, and the settings of the command.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import Shape, build_model, collate
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hf_ga
from elastic.inputs import (
    MICRO_BATCH_SIZE,
    NUM_SAMPLES,
    SAVE_STEPS,
    WINDOW_SIZE,
    WINDOWS_PER_EPOCH,
)
from elastic.ledger import LedgerWriter
from hf_ga.loading.window import Window

VOCABULARY = 100
Job = dict[str, Any]


def main() -> None:
    """Train, and write the ledger and the last weights."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    set_seed(0)
    DOORS[job["door"]](job)


def make_writer(job: Job, accelerator: Accelerator) -> LedgerWriter:
    """Make the writer of this process's lines."""
    rank = accelerator.process_index
    return LedgerWriter(Path(job["ledger"]), rank, accelerator.num_processes, job["pace"])


def end(job: Job, accelerator: Accelerator, model: nn.Module) -> None:
    """Write the last weights, and end the process group."""
    if accelerator.is_main_process:
        output = Path(job["output"])
        output.mkdir(parents=True, exist_ok=True)
        save_model(accelerator.unwrap_model(model), str(output / "model.safetensors"))
    accelerator.end_training()


def train_command(job: Job) -> None:
    """Fine-tune with the command; a sample is identified by its token ids, as trained on."""
    from hf_ga.finetuning.run import loop  # here, as the other doors start faster without it

    train_step = loop.train_step
    writers: list[LedgerWriter] = []

    def step(
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        window: Window,
        **kwargs: Any,
    ) -> hf_ga.StepResult:
        """Train on a window, then write its line."""
        result = train_step(accelerator, model, optimizer, window, **kwargs)
        if not writers:
            writers.append(make_writer(job, accelerator))
        samples = []
        for micro_batch in window.micro_batches:
            batch = micro_batch.batch
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                samples.append(ids[mask.bool()].tolist())
        writers[0].write(window.epoch * WINDOWS_PER_EPOCH + window.index, samples, result.loss)
        return result

    loop.train_step = step
    hf_ga.finetune(hf_ga.FinetuneConfig(**job["settings"]))


def train_accelerate(job: Job) -> None:
    """Train the loop of the documentation with `hf_ga.Accelerator`."""
    accelerator = hf_ga.Accelerator(cpu=True, global_batch_size=WINDOW_SIZE)
    train_loop(job, accelerator)


def train_stock(job: Job) -> None:
    """Train the same loop with Accelerate's own, and the nearest number of accumulation steps."""
    accelerator = Accelerator(cpu=True)
    num_samples = MICRO_BATCH_SIZE * accelerator.num_processes
    accelerator.gradient_accumulation_steps = WINDOW_SIZE // num_samples
    train_loop(job, accelerator)


def train_loop(job: Job, accelerator: Accelerator) -> None:
    """Train a small model with dropout on random samples: features, a label, a number."""
    is_stock = type(accelerator) is accelerate.Accelerator
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, 8, generator=generator)
    labels = torch.randint(8, (NUM_SAMPLES,), generator=generator)
    dataset = TensorDataset(features, labels, torch.arange(NUM_SAMPLES))
    loader = DataLoader(dataset, batch_size=MICRO_BATCH_SIZE, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    writer = make_writer(job, accelerator)
    output = Path(job["output"])
    if is_stock:
        epoch, step, skipped = resume_by_hand(accelerator, output)
    else:
        start = accelerator.resume(output)
        epoch, step, skipped = start.epoch, start.step, 0
    while epoch < job["epochs"]:
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        skipped = 0
        ids: list[int] = []
        losses: list[Tensor] = []
        for inputs, targets, numbers in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            ids += accelerator.gather_for_metrics(numbers).tolist()
            losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            if is_stock:
                value = accelerator.reduce(torch.stack(losses).mean(), "mean")
            else:
                value = accelerator.window_loss
            # A window that was computed again has shown its samples again.
            own = [*dict.fromkeys(ids)] if accelerator.is_main_process else []
            writer.write(step, own, float(value))
            ids, losses = [], []
            step += 1
            if step % SAVE_STEPS == 0:
                accelerator.save_state(str(output / f"step_{step}"))
        epoch += 1
    end(job, accelerator, model)


def resume_by_hand(accelerator: Accelerator, folder: Path) -> tuple[int, int, int]:
    """Resume as Accelerate's examples do: by the step in the name of the newest folder.

    Returns:
        The epoch, the number of steps done, and the number of batches to skip.
    """
    steps = [int(path.name.removeprefix("step_")) for path in folder.glob("step_*")]
    for step in sorted(steps, reverse=True):
        try:
            accelerator.load_state(str(folder / f"step_{step}"))
        except Exception as error:
            print(f"step {step} cannot be loaded: {error}", flush=True)
            continue
        epoch, in_epoch = divmod(step, WINDOWS_PER_EPOCH)
        return epoch, step, in_epoch * accelerator.gradient_accumulation_steps
    return 0, 0, 0


class RecordingTrainer(hf_ga.ExactTrainer):
    """Notes the numbers of the samples of each window, as the model was trained on them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start with an empty window."""
        super().__init__(*args, **kwargs)
        self.numbers: list[int] = []
        self._slots: Any = None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Tensor:
        """Note the samples, unless they are a rehearsal's, and compute Trainer's loss."""
        window = self._window
        if window._slots is not self._slots:  # a new window, or the same one again
            self._slots = window._slots
            self.numbers = []
        if window.engine.slot.is_counted:
            self.numbers += inputs["input_ids"][:, 0].tolist()
        return super().compute_loss(model, inputs, **kwargs)


class KeepLedger(tf.TrainerCallback):
    """Writes the line of each window of a trainer."""

    def __init__(self, trainer: RecordingTrainer, writer: LedgerWriter) -> None:
        """Start before the first step."""
        self.trainer = trainer
        self.writer = writer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the line of a window."""
        loss = float(self.trainer._window.engine.gradient.loss)
        self.writer.write(state.global_step - 1, self.trainer.numbers, loss)


def train_exact_trainer(job: Job) -> None:
    """Train a small GPT-2 with `ExactTrainer`; the first token of a row is its number."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(NUM_SAMPLES):
        length = 4 + number % 9
        others = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": [number, *others]})
    num_samples = MICRO_BATCH_SIZE * int(os.environ.get("WORLD_SIZE", "1"))
    arguments = tf.TrainingArguments(
        job["output"],
        use_cpu=True,
        num_train_epochs=job["epochs"],
        per_device_train_batch_size=MICRO_BATCH_SIZE,
        gradient_accumulation_steps=WINDOW_SIZE // num_samples,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        save_total_limit=3,
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        seed=0,
    )
    set_seed(0)
    model = build_model(Shape("gpt", layers=2, width=16, heads=2, words=VOCABULARY), positions=32)
    trainer = RecordingTrainer(model, arguments, train_dataset=rows, data_collator=collate)
    writer = make_writer(job, trainer.accelerator)
    trainer.add_callback(KeepLedger(trainer, writer))
    trainer.train(resume_from_checkpoint="auto")
    end(job, trainer.accelerator, trainer.model)


DOORS: dict[str, Callable[[Job], None]] = {
    "command": train_command,
    "accelerate": train_accelerate,
    "trainer": train_exact_trainer,
    "stock": train_stock,  # the control
}

if __name__ == "__main__":
    main()
