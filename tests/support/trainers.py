"""Runs of transformers' Trainer and of hf_ga's, side by side: what each step's gradient was, what
was logged, the last weights.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from helpers import Gradients, gradients, pad_right
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers.trainer_callback import PrinterCallback

from hf_ga import ExactTrainer, ExactTrainerMixin

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


def arguments(
    folder: Path, layout: tuple[int, int], kind: type = tf.TrainingArguments, **more
) -> tf.TrainingArguments:
    """Plain gradient descent: an adaptive optimizer would turn the sign of a rounding error into a
    step.
    """
    quiet = {
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    sizes = {"per_device_train_batch_size": layout[0], "gradient_accumulation_steps": layout[1]}
    training = {
        "num_train_epochs": 2,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 1e9,
        "seed": 3,
    }
    return kind(**{"output_dir": str(folder), **quiet, **sizes, **training, **more})


def make_trainer(
    trainer_class: type, model: torch.nn.Module, args: tf.TrainingArguments, samples: Any, **more
) -> Any:
    """A quiet trainer; its `run` keeps what it does."""
    run = Run()
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=samples,
        callbacks=[run, *more.pop("callbacks", [])],
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    run.trainer = trainer
    trainer.run = run
    return trainer


def mixed(base: type) -> type:
    """The mixin before a trainer of one's own."""
    return type("Mixed", (ExactTrainerMixin, base), {})


class Case:
    """A model, its samples, and how to train it in any layout."""

    def __init__(self, folder: Path, build: Callable, samples: list, dropout: float = 0.1) -> None:
        self.folder = folder
        self.samples = samples
        self.model = build(dropout)

    def make(
        self,
        trainer_class: type = ExactTrainer,
        layout: tuple[int, int] = (4, 4),
        trainer: dict | None = None,
        **args,
    ) -> Any:
        """A trainer of a copy of the model. trainer: what it is given besides its arguments."""
        given = {"model": copy.deepcopy(self.model), "data_collator": pad_right, **(trainer or {})}
        return make_trainer(
            trainer_class,
            args=arguments(self.folder, layout, **args),
            samples=self.samples,
            **given,
        )

    def run(self, *how, resume: int | None = None, **more) -> Run:
        """The finished run. resume: number of a checkpoint."""
        trainer = self.make(*how, **more)
        trainer.train(resume_from_checkpoint=resume and str(self.folder / f"checkpoint-{resume}"))
        return trainer.run


WORDS = [f"w{i}" for i in range(35)]


def word_tokenizer() -> tf.PreTrainedTokenizerFast:
    """Of 40 tokens: `WORDS` and five special ones."""
    special = {
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    words = Tokenizer(
        WordLevel(
            {word: i for i, word in enumerate([*special.values(), *WORDS])}, unk_token="<unk>"
        )
    )
    words.pre_tokenizer = WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def weight_error(run: Run, reference: Run) -> float:
    """`distance` of the last weights."""
    return distance(run.weights[-1], reference.weights[-1])


def distance(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """||w - w'|| / ||w'|| of all tensors together."""
    with torch.no_grad():
        off = torch.stack(
            [(weights[name] - reference[name]).double().norm() for name in reference]
        ).norm()
        return float(off / torch.stack([w.double().norm() for w in reference.values()]).norm())
