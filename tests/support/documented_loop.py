"""The training loop of Accelerate's documentation around any Accelerator, and the models that it
trains.

https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation, with the clipping of
https://huggingface.co/docs/accelerate/quicktour. Nothing here calls hf_ga.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import accelerate
import helpers as h
import torch
import transformers as tf
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, set_seed
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

WINDOW = 16  # samples of one update over all processes
EPOCHS = 2
SEED = 42
# AdamW divides a gradient by its own size: with the usual eps of 1e-8 it makes a full step of the
# rounding of a gradient that is zero (the bias of an attention's keys).
LEARNING_RATE = 1e-2
EPS = 1e-4
Weights = dict[str, torch.Tensor]


class TupleModel(nn.Module):
    """No HuggingFace: is called with positions and returns (loss, logits)."""

    def __init__(self) -> None:
        super().__init__()
        self.tagger = h.PlainTagger(dropout=0.1)

    def forward(self, input_ids, labels):
        logits = self.tagger(input_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=h.IGNORED)
        return loss, logits


@h.seeded
def gpt2_with_lora() -> nn.Module:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["c_attn"])
    config.fan_in_fan_out = True  # as GPT-2 keeps its weights
    return get_peft_model(h.gpt2(dropout=0.1), config)


@h.seeded
def mixtral() -> nn.Module:
    """With a balancing loss of the router that is large enough to show."""
    config = tf.MixtralConfig(
        **h.LLAMA_SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.1,
        output_router_logits=True,
        attention_dropout=0.1,
    )
    return tf.MixtralForCausalLM(config)


def question_samples(num_samples: int) -> list[dict]:
    """Start and end of an answer; every third start and every fourth end lie behind the text, where
    the head ignores them: its two means have different numbers of targets.
    """
    samples = []
    for index, sample in enumerate(h.token_samples(num_samples)):
        length = len(sample["input_ids"])
        start = index % length
        samples.append(
            {
                "input_ids": sample["input_ids"],
                "attention_mask": sample["attention_mask"],
                "start_positions": 99 if index % 3 == 0 else start,
                "end_positions": 99 if index % 4 == 0 else length - 1,
            }
        )
    return samples


def text_samples(num_samples: int) -> list[dict]:
    """Without labels: the collate function makes them."""
    return [{"input_ids": sample["input_ids"]} for sample in h.token_samples(num_samples)]


def mask_at_random(samples: list[dict]) -> tf.BatchEncoding:
    """HuggingFace's collator, which draws from torch's generator."""
    vocabulary = {f"token{i}": i for i in range(h.VOCABULARY)}
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="token2")),
        pad_token="token0",
        mask_token="token1",
    )
    return tf.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)(samples)


def pad_to_tuple(samples: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    batch = h.pad_right(samples)
    return batch["input_ids"], batch["labels"]


def loss_of_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def loss_of_tuple(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    loss, _ = model(inputs, targets)
    return loss


@dataclass(frozen=True)
class Case:
    """A model, what it is trained on, and how it is called."""

    build: Callable[[], nn.Module]
    make_samples: Callable[[int], list] = h.token_samples
    collate: Callable[[list], Any] = h.pad_right
    compute_loss: Callable[[nn.Module, Any], torch.Tensor] = loss_of_outputs
    max_norm: float = 0.1  # below every gradient's, so that all are clipped


CASES = {
    "GPT-2": Case(lambda: h.gpt2(0.1)),
    "BERT classification": Case(lambda: h.bert_classifier(0.1), h.class_samples),
    "BERT masked LM": Case(lambda: h.bert_masked_lm(0.1), text_samples, mask_at_random),
    "T5": Case(lambda: h.t5(0.1)),
    "tuples": Case(h.seeded(TupleModel), h.plain_samples, pad_to_tuple, loss_of_tuple),
    "XLNet": Case(lambda: h.xlnet_classifier(0.1), h.class_samples),
    "LoRA": Case(gpt2_with_lora, max_norm=0.02),
    "Mixtral": Case(mixtral),
    "questions": Case(lambda: h.bert_question_answering(0.1), question_samples),
}


@dataclass(frozen=True)
class Layout:
    """How a window is split. An Accelerator is given either of the last two."""

    per_device_batch_size: int
    accumulation_steps: int = 1
    global_batch_size: int | None = None

    def make(self, accelerator_class: type, **options: Any) -> accelerate.Accelerator:
        """A fresh accelerator, whatever those before it have set."""
        reset_states()
        if self.global_batch_size is not None:
            return accelerator_class(global_batch_size=self.global_batch_size, **options)
        return accelerator_class(gradient_accumulation_steps=self.accumulation_steps, **options)

    def __str__(self) -> str:
        if self.global_batch_size is not None:
            return f"{self.per_device_batch_size} of {self.global_batch_size}"
        return f"{self.per_device_batch_size}x{self.accumulation_steps}"


FULL_BATCH = Layout(16, 1)
TWO_STEPS = Layout(8, 2)
UNEVEN = Layout(3, global_batch_size=WINDOW)
LAYOUTS = {
    1: [FULL_BATCH, TWO_STEPS, UNEVEN],
    2: [Layout(8, 1), Layout(4, 2), UNEVEN],
    3: [Layout(6, global_batch_size=WINDOW), Layout(2, global_batch_size=WINDOW)],
}


def reset_states() -> None:
    """Accelerators of one process share their states; the process group stays."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if PartialState(cpu=True).distributed_type == DistributedType.FSDP:  # of shards on CPUs
        PartialState().distributed_type = DistributedType.MULTI_CPU


@dataclass
class Trained:
    """What a run did.

    Attributes:
        weights: those that are trained, by the names of the model that was not wrapped.
        norms: of the gradients, before they are clipped, one for each update.
        rates: learning rates of the updates.
    """

    num_processes: int

    weights: Weights = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def num_updates(num_samples: int) -> int:
    return EPOCHS * -(-num_samples // WINDOW)


def train(accelerator_class: type, layout: Layout, case: Case, num_samples: int) -> Trained:
    """The documented loop on windows of 16 samples."""
    accelerator = layout.make(accelerator_class)
    trained = Trained(accelerator.num_processes)
    set_seed(SEED)
    samples = case.make_samples(num_samples)
    training_dataloader = DataLoader(
        samples,
        shuffle=True,
        collate_fn=case.collate,
        batch_size=layout.per_device_batch_size,
    )
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    scheduler = tf.get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=(num_updates(num_samples) + 1) * accelerator.num_processes,
    )
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    for _ in range(EPOCHS):
        model.train()
        for batch in training_dataloader:
            with accelerator.accumulate(model):
                loss = case.compute_loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), case.max_norm)
                    trained.norms.append(float(whole(norm)))
                    trained.rates.append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    trained.weights = trained_weights(model)
    return trained


def trained_weights(model: nn.Module) -> Weights:
    """Copies of those that are trained, whole and by the names of the model that was not wrapped;
    all ranks must call it.
    """
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return _copies(model)
    return _copies(model)


def _copies(model: nn.Module) -> Weights:
    return {
        _plain(name): whole(parameter.detach()).clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _plain(name: str) -> str:
    """Without what DDP and FSDP put in front."""
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers a shard of FSDP2."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distance(weights: Weights, others: Weights) -> float:
    """Norm of the difference over the norm of the weights."""
    return h.relative_error(weights, others)
