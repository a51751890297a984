"""Check the gradient accumulation of other libraries with hf_ga's checker, and write docs/peers.md.

    pip install -e ".[finetune,peers]"
    python scripts/peers.py                      # two minutes on two cores

Each peer trains one window with its own code and its defaults. The checker compares the gradient
before the optimizer step with that of one float64 forward and backward of the whole window. A peer
whose package is not installed is named in the page as not checked.
"""

import argparse
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from common import Shape, build_model, collate, table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, logging

import hf_ga
from hf_ga.check.arms import accelerate_arm, trainer_arm
from hf_ga.check.gradients import Gradients, take_gradients
from hf_ga.embedding.losses import InfoNCE
from hf_ga.embedding.model import ATTENTION_MASK, INPUT_IDS, EmbeddingModel
from hf_ga.finetuning.data.encoding.pairs import collate_pairs, tokenize_pairs
from hf_ga.finetuning.data.formats import corpus

PAGE = Path(__file__).parents[1] / "docs" / "peers.md"
NUM_SAMPLES = 32
MAX_LENGTH = 64
TEMPERATURE = 0.05
DROPOUT = 0.1

Batch = dict[str, Tensor]
Step = Callable[..., Any]  # step(model, micro_batches, accumulation_steps) of the checker


# Training steps for `hf_ga.check_equivalence`: each leaves the window's gradient in `.grad`, or
# returns it.


def plain_step(model: nn.Module, micro_batches: list[Batch], accumulation_steps: int) -> None:
    """Accumulate gradients as most PyTorch tutorials do: divide each micro-batch's mean loss by the
    accumulation steps. Leaves the window's gradient in `.grad`.

    Args:
        model: The model.
        micro_batches: The collated micro-batches of the window.
        accumulation_steps: Micro-batches of a full window.
    """
    for batch in micro_batches:
        loss = model(**batch).loss / accumulation_steps
        loss.backward()


def counting_step(
    model: nn.Module, micro_batches: list[Batch], accumulation_steps: int
) -> tuple[None, Gradients]:
    """Accumulate gradients as Accelerate's guide does for samples of different lengths: divide the
    sum of each micro-batch's losses by the window's targets, and multiply by the accumulation
    steps, because Accelerate divides by them.

    Args:
        model: The model.
        micro_batches: The collated micro-batches of the window.
        accumulation_steps: Micro-batches of a full window.

    Returns:
        None in place of the loss, and the gradients.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation_steps)
    loader = DataLoader(micro_batches, batch_size=1, collate_fn=lambda items: items[0])
    prepared, loader = accelerator.prepare(model, loader)
    num_targets = 0
    for batch in micro_batches:
        shifted_labels = batch["labels"][:, 1:]
        num_targets += int((shifted_labels != -100).sum())
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch, num_items_in_batch=num_targets).loss
            accelerator.backward(loss * accumulation_steps)
    return None, take_gradients(prepared)


def lightning_step(
    model: nn.Module, micro_batches: list[Batch], accumulation_steps: int
) -> tuple[None, Gradients]:
    """Accumulate gradients with Lightning's Trainer and its `accumulate_grad_batches`.

    Args:
        model: The model.
        micro_batches: The collated micro-batches of the window.
        accumulation_steps: Micro-batches of a full window.

    Returns:
        None in place of the loss, and the gradients.
    """
    from lightning.pytorch import LightningModule, Trainer

    getLogger("lightning.pytorch").setLevel(ERROR)

    class Module(LightningModule):
        """Wraps the model for Lightning, and takes its gradients before the optimizer step."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.gradients: Gradients = {}

        def training_step(self, batch: Batch, index: int) -> Tensor:
            """Return the model's own loss of one micro-batch."""
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Return an optimizer that changes nothing: SGD with learning rate 0."""
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            """Move the accumulated gradients into `self.gradients`."""
            self.gradients = take_gradients(self.model)

    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulation_steps,
        barebones=True,
    )
    trainer.fit(module, DataLoader(micro_batches, batch_size=None))
    return None, module.gradients


def sft_step() -> Step:
    """Make a training step that accumulates gradients with TRL's SFTTrainer and its default loss.

    SFTTrainer prepares its dataset itself, so it gets placeholder rows, one for each micro-batch;
    the collator replaces them by the micro-batches.
    """
    from datasets import Dataset
    from trl import SFTTrainer

    class MicroBatchSFTTrainer(SFTTrainer):
        """SFTTrainer whose `train_dataset` is a list of collated micro-batches."""

        def __init__(self, train_dataset: list[Batch], **arguments: Any) -> None:
            indices = list(range(len(train_dataset)))
            rows = Dataset.from_dict({"input_ids": [[1, 2]] * len(indices), "index": indices})
            arguments["data_collator"] = lambda items: dict(train_dataset[items[0]["index"]])
            tokenizer = corpus.load_stdlib_tokenizer()
            super().__init__(train_dataset=rows, processing_class=tokenizer, **arguments)

    return trainer_arm(MicroBatchSFTTrainer)


def cached_step(model: EmbeddingModel, micro_batches: list[Batch], accumulation_steps: int) -> None:
    """Accumulate gradients as the trainer of sentence-transformers does: compute its cached
    contrastive loss of each micro-batch, and divide it by the accumulation steps. Leaves the
    window's gradient in `.grad`.

    Args:
        model: The model.
        micro_batches: The collated micro-batches of the window.
        accumulation_steps: Micro-batches of a full window.
    """
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
    )

    class Encoder(nn.Sequential):
        """The part of a SentenceTransformer that the loss uses."""

        def forward(self, features: Batch) -> Batch:
            """Add the text's vectors to the features, as "sentence_embedding"."""
            return features | {"sentence_embedding": self[0].encode(**features)}

    loss_fn = CachedMultipleNegativesRankingLoss(
        Encoder(model), scale=1 / TEMPERATURE, mini_batch_size=2
    )
    for batch in micro_batches:
        features = [
            {
                "input_ids": batch[INPUT_IDS + column],
                "attention_mask": batch[ATTENTION_MASK + column],
            }
            for column in ("anchor", "positive")
        ]
        loss = loss_fn(features, None) / accumulation_steps
        loss.backward()


# The models and data with which the libraries are checked.


def language_model(dropout: float) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Build a small GPT-2, and load one window of docstrings from Python's standard library.

    Returns:
        The model and its tokenized samples.
    """
    tokenizer = corpus.load_stdlib_tokenizer()
    texts = corpus.load_stdlib()["train"]["text"][:NUM_SAMPLES]
    ids = tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    samples = [{"input_ids": row} for row in ids]
    shape = Shape("gpt", layers=2, width=64, heads=4, words=len(tokenizer))
    model = build_model(shape, dropout, MAX_LENGTH)
    model.loss_type = None  # as users' models have it; with it, Trainer counts other labels
    return model, samples


def embedding_model() -> tuple[nn.Module, list[dict[str, Any]], Callable]:
    """Build a small BERT with mean pooling, and load one window of text pairs, the first and second
    half of a docstring.

    Returns:
        The model, its tokenized pairs, and the function that collates them.
    """
    tokenizer = corpus.load_stdlib_tokenizer()
    words_of_rows = [text.split() for text in corpus.load_stdlib()["train"]["text"]]
    texts = [words for words in words_of_rows if len(words) > 1][:NUM_SAMPLES]
    halves = {
        "anchor": [" ".join(words[: len(words) // 2]) for words in texts],
        "positive": [" ".join(words[len(words) // 2 :]) for words in texts],
    }
    encoded = tokenize_pairs(halves, tokenizer, MAX_LENGTH)
    samples = [
        {"input_ids": input_ids, "text_ids": text_ids}
        for input_ids, text_ids in zip(encoded["input_ids"], encoded["text_ids"], strict=True)
    ]
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
    )
    model = EmbeddingModel(BertModel(config, add_pooling_layer=False))
    return model, samples, partial(collate_pairs, pad_token_id=tokenizer.pad_token_id)


# Title in the page -> (package, function that makes the training step).
LANGUAGE_MODEL_PEERS: dict[str, tuple[str, Callable[[], Step]]] = {
    "transformers.Trainer": ("transformers", trainer_arm),
    "TRL SFTTrainer": ("trl", sft_step),
    "Accelerate, documented loop": ("accelerate", accelerate_arm),
    "Accelerate, targets counted by hand": ("accelerate", lambda: counting_step),
    "Lightning, accumulate_grad_batches": ("lightning", lambda: lightning_step),
    "PyTorch, loss / accumulation steps": ("torch", lambda: plain_step),
}
EMBEDDING_PEERS: dict[str, tuple[str, Callable[[], Step]]] = {
    "sentence-transformers, cached loss": ("sentence_transformers", lambda: cached_step),
}


def installed_steps(peers: dict[str, tuple[str, Callable[[], Step]]]) -> dict[str, Step]:
    """Make the training steps of the libraries that are installed; the others are omitted.

    Args:
        peers: Title -> (package, function that makes the training step).

    Returns:
        Title -> training step.
    """
    return {title: make() for title, (package, make) in peers.items() if find_spec(package)}


def check_all() -> list[tuple[str, hf_ga.EquivalenceReport]]:
    """Check the gradient accumulation of all installed libraries: on a language model without and
    with dropout, and on an embedding model.

    Returns:
        A title and the report of each check.
    """
    torch.manual_seed(0)
    reports = []
    for dropout in (0.0, DROPOUT):
        model, samples = language_model(dropout)
        steps = installed_steps(LANGUAGE_MODEL_PEERS)
        report = hf_ga.check_equivalence(model, samples, collate, steps=steps)
        reports.append((f"A language model (GPT-2), dropout {dropout:g}", report))
    model, pairs, collate_texts = embedding_model()
    loss = InfoNCE(TEMPERATURE)
    steps = installed_steps(EMBEDDING_PEERS)
    report = hf_ga.check_equivalence(model, pairs, collate_texts, steps=steps, whole_batch=loss)
    return [*reports, (f"Embeddings (BERT, InfoNCE over the window), dropout {DROPOUT:g}", report)]


# The page docs/peers.md.

INTRODUCTION = f"""# How other libraries accumulate

One window of {NUM_SAMPLES} samples in float32, in five layouts of the [checker](checker.md), of
which two are shown. Each library runs its own code with its defaults. The relative error is that of
the gradient before the optimizer step, beside one float64 forward and backward of the window; the
limit is about 1e-6. Causes have the [names of the
checker](checker.md#the-model-and-data-of-a-command). `python scripts/peers.py` writes this page.

Without dropout, the error is that of the mean: most loops weight a micro-batch with few targets as
one with many. Counting the targets of the whole window mends that. No other library has dropout
that is independent of the split."""
# The layouts whose errors the page shows.
SHOWN_LAYOUTS = ("even", "one by one")


def format_page(reports: list[tuple[str, hf_ga.EquivalenceReport]]) -> str:
    """Format the page docs/peers.md from the titles and reports of the checks, with the versions of
    the libraries and the names of those that are not installed.
    """
    parts = [INTRODUCTION]
    for title, report in reports:
        parts.append(f"## {title}\n\n{format_table(report)}")
    parts.append(f"Versions: {format_versions()}.")
    missing = [name for name, (package, _) in all_peers().items() if not find_spec(package)]
    if missing:
        parts.append(f"Not checked, as the package is not installed: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def format_table(report: hf_ga.EquivalenceReport) -> str:
    """Format a Markdown table with one row for each library: the relative error of its gradient in
    `SHOWN_LAYOUTS`, in how many layouts it passed, and the causes that the checker found.
    """
    table_rows = []
    for arm in report.arms:
        rows = report.arm(arm).rows
        shown = [row for row in rows if row.layout in SHOWN_LAYOUTS]
        cells = ["refused" if row.refused else f"{row.error:.0e}" for row in shown]
        num_passed = sum(row.passed for row in rows)
        causes = ", ".join(dict.fromkeys(cause.name for cause in report.causes(arm)))
        table_rows.append([arm, *cells, f"{num_passed} of {len(rows)}", causes])
    return table(["", *SHOWN_LAYOUTS, "passed", "causes"], table_rows)


def all_peers() -> dict[str, tuple[str, Callable[[], Step]]]:
    """Return all libraries to check: title -> (package, function that makes the training step)."""
    return LANGUAGE_MODEL_PEERS | EMBEDDING_PEERS


def format_versions() -> str:
    """List the installed packages of the checked libraries with their versions, in one line."""
    packages = dict.fromkeys(package for package, _ in all_peers().values())
    is_installed = [name for name in packages if find_spec(name)]
    return ", ".join(f"{name.replace('_', '-')} {version(name)}" for name in is_installed)


def main() -> None:
    """Check all installed libraries, print the reports, and write the page docs/peers.md."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=PAGE, help="the page (default: docs/peers.md)"
    )
    output = parser.parse_args().output
    logging.set_verbosity_error()
    reports = check_all()
    for _, report in reports:
        print(report, end="\n\n")
    output.write_text(format_page(reports), encoding="utf-8")
    print(f"written: {output}")


if __name__ == "__main__":
    main()
