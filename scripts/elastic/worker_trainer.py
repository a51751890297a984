"""ExactTrainer as one worker: `python worker_trainer.py output ledger epochs pace`."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor, nn

import hf_ga
from elastic.inputs import MICRO_BATCH_SIZE, NUM_SAMPLES, SAVE_STEPS, WINDOW_SIZE
from elastic.ledger import LedgerWriter

VOCABULARY = 100


class RecordingTrainer(hf_ga.ExactTrainer):
    """Notes the samples of each window, as the model was trained on them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start with an empty window."""
        super().__init__(*args, **kwargs)
        self.numbers: list[int] = []
        self._slots: Any = None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Tensor:
        """Note the samples, unless they are a rehearsal's, and compute Trainer's loss."""
        window = self._window
        if window.slots is not self._slots:  # a new window, or the same one again
            self._slots = window.slots
            self.numbers = []
        if window.engine.slot.is_counted:
            self.numbers += inputs["input_ids"][:, 0].tolist()
        return super().compute_loss(model, inputs, **kwargs)


class KeepLedger(tf.TrainerCallback):
    """Writes the line of each window after its log.

    Args:
        trainer: The trainer.
        writer: Writes the lines.
        pace: The least number of seconds of a step.
    """

    def __init__(self, trainer: RecordingTrainer, writer: LedgerWriter, pace: float) -> None:
        """Start before the first step."""
        self.trainer = trainer
        self.writer = writer
        self.pace = pace
        self.losses: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the line of a window."""
        loss = float(self.trainer._window.engine.gradient.loss)
        self.writer.write(state.global_step - 1, self.trainer.numbers, loss)
        time.sleep(self.pace)


def main() -> None:
    """Train, and write the ledger and the last weights."""
    output, ledger, epochs, pace = sys.argv[1:]
    torch.set_num_threads(1)
    num_processes = tf.TrainingArguments(output, use_cpu=True).world_size
    arguments = tf.TrainingArguments(
        output,
        use_cpu=True,
        num_train_epochs=int(epochs),
        per_device_train_batch_size=MICRO_BATCH_SIZE,
        gradient_accumulation_steps=WINDOW_SIZE // (MICRO_BATCH_SIZE * num_processes),
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        save_total_limit=3,
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        seed=0,
    )
    trainer = RecordingTrainer(
        make_model(), arguments, train_dataset=make_rows(), data_collator=pad_right
    )
    writer = LedgerWriter(Path(ledger), arguments.process_index, num_processes)
    trainer.add_callback(KeepLedger(trainer, writer, float(pace)))
    trainer.train(resume_from_checkpoint="auto")
    if trainer.is_world_process_zero():
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        weights.pop("lm_head.weight")  # tied
        save_file(weights, Path(output) / "model.safetensors")
    trainer.accelerator.end_training()


def make_model() -> nn.Module:
    """Make a small GPT-2 with dropout."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCABULARY, **sizes))


def make_rows() -> list[dict[str, list[int]]]:
    """Make rows of different lengths; the first token is the row's number."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(NUM_SAMPLES):
        length = 4 + number % 9
        others = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": [number, *others]})
    return rows


def pad_right(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Collate rows: pad with token 0, which the attention mask and the labels leave out."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }


if __name__ == "__main__":
    main()
