"""Runs of transformers' Trainer and of hf_ga's, side by side: what each step's gradient was, what was logged, the last weights."""

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from helpers import Gradients, gradients
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers.trainer_callback import PrinterCallback

gc.freeze()  # Trainer collects garbage before each training; looking at all the imported libraries takes a third of a second
LAYOUTS = [(16, 1), (4, 4), (1, 16)]  # per-device batch, accumulation steps: one window


@dataclass
class Run(tf.TrainerCallback):
    """A callback that keeps what a run did."""

    gradients: list[Gradients] = field(default_factory=list)
    logs: list[dict] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    trainer: Any = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(gradients(model))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.logs.append(dict(logs))

    def on_substep_end(self, args, state, control, **kwargs):
        self.events.append("substep")

    def on_step_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.events.append("step")
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})

    @property
    def losses(self) -> list[float]:
        return [log["loss"] for log in self.logs]


def arguments(folder: Path, layout: tuple[int, int], **more) -> tf.TrainingArguments:
    """Plain gradient descent: an adaptive optimizer would turn the sign of a rounding error into a step."""
    return tf.TrainingArguments(**settings(folder, layout, **more))


def settings(folder: Path, layout: tuple[int, int], **more) -> dict:
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False, "use_cpu": True}
    sizes = {"per_device_train_batch_size": layout[0], "gradient_accumulation_steps": layout[1]}
    training = {"num_train_epochs": 2, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9, "seed": 3}
    return {"output_dir": str(folder), **quiet, **sizes, **training, **more}


def make_trainer(trainer_class: type, model: torch.nn.Module, args: tf.TrainingArguments, samples: Any, **more) -> Any:
    """A quiet trainer; its `run` keeps what it does."""
    run = Run()
    trainer = trainer_class(model=model, args=args, train_dataset=samples, callbacks=[run, *more.pop("callbacks", [])], **more)
    trainer.remove_callback(PrinterCallback)
    run.trainer, trainer.run = trainer, run
    return trainer


def trained(trainer_class: type, model: torch.nn.Module, args: tf.TrainingArguments, samples: Any, **more) -> Run:
    """The finished run."""
    resume = more.pop("resume", None)
    trainer = make_trainer(trainer_class, model, args, samples, **more)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.run


WORDS = [f"w{i}" for i in range(35)]


def word_tokenizer() -> tf.PreTrainedTokenizerFast:
    """Of 40 tokens: `WORDS` and five special ones."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
    words = Tokenizer(WordLevel({word: i for i, word in enumerate([*special.values(), *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def weight_error(run: Run, reference: Run) -> float:
    """`distance` of the last weights."""
    return distance(run.weights[-1], reference.weights[-1])


def distance(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """||w - w'|| / ||w'|| of all tensors together."""
    with torch.no_grad():
        off = torch.stack([(weights[name] - reference[name]).double().norm() for name in reference]).norm()
        return float(off / torch.stack([w.double().norm() for w in reference.values()]).norm())
