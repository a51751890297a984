"""Examine one head (a model class of transformers with a loss): compare hf_ga's gradients in
several layouts, and Trainer's gradient, with that of plain PyTorch on the full batch, and hf_ga's
gradients with dropout in the same layouts with one another.

`scripts/sweep_heads.py` runs this for every architecture of transformers.
"""

import inspect
import math
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from common import flat
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import hf_ga
from heads.small_models import build_small, small_config, switch_off_dropout
from heads.small_samples import KINDS, PADDED_LENGTHS, PaddingCollator, Sample, make_samples
from hf_ga.check.arms import trainer_arm
from hf_ga.check.gradients import relative_error, take_gradients
from hf_ga.engine.look.trial import LossFacts
from hf_ga.order.plan import plan_by_sizes
from hf_ga.training import LossSettings, try_before

# Largest relative error of a right gradient, over all parameters together.
TOLERANCE = 1e-5
DROPOUT = 0.1
MICRO_BATCH = 2
ACCUMULATION = 4
# Name of a layout -> arguments of `WindowLoader`.
LAYOUTS: dict[str, dict[str, Any]] = {
    "8x1": {"per_device_batch_size": 8},
    "2x4": {"per_device_batch_size": 2},
    "1x8": {"per_device_batch_size": 1},
    "uneven": {"planner": partial(plan_by_sizes, sizes=[3, 1, 4])},
}
# Auto class mapping of transformers -> kinds of heads that its classes are examined as.
MAPPINGS: dict[str, tuple[str, ...]] = {
    "CAUSAL_LM": ("causal LM", "causal LM with router loss"),
    "MASKED_LM": ("masked LM",),
    "SEQUENCE_CLASSIFICATION": ("sequence classification", "regression", "multi-label"),
    "TOKEN_CLASSIFICATION": ("token classification",),
    "QUESTION_ANSWERING": ("question answering",),
    "MULTIPLE_CHOICE": ("multiple choice",),
    "SEQ_TO_SEQ_CAUSAL_LM": ("seq2seq",),
    "NEXT_SENTENCE_PREDICTION": ("next sentence",),
    "PRETRAINING": ("pre-training",),
    "IMAGE_CLASSIFICATION": ("image classification",),
}
ROUTER = "causal LM with router loss"
REFUSALS = (hf_ga.LossNotAdditive, hf_ga.UnkeyedRandomness, hf_ga.ConfigError)


class OutOfScope(Exception):
    """Raised for a model class that the sweep of heads does not cover, because it is neither a text
    head nor an image classifier with attention.
    """


@dataclass(frozen=True)
class Head:
    """A head of the sweep: a model class of transformers, and the kind of its loss.

    Attributes:
        model_type: The architecture, such as "bert".
        class_name: Name of the model class.
        kind: The kind of loss, a key of `small_samples.KINDS`.
    """

    model_type: str
    class_name: str
    kind: str

    @property
    def name(self) -> str:
        """The class with the kind of loss, for tables, such as "BertForMaskedLM (masked LM)"."""
        return f"{self.class_name} ({self.kind})"


@dataclass
class Verdict:
    """The result of examining one head. Relative errors are over all parameters together, compared
    with the true gradient: that of plain PyTorch on the full batch.

    Attributes:
        head: The head.
        status: hf_ga's result: "right" (in all layouts), "refused" (hf_ga raised that it does not
            support the model), "wrong", "not built" or "out of scope".
        reason: Why it is not "right": the relative error, or the message of an exception.
        error: Largest relative error of hf_ga's gradients in the layouts. None: there is none.
        terms: Each term of the loss, as hf_ga read it.
        speed_ups: Names of the speed-ups that hf_ga used.
        trainer_error: Relative error of Trainer's gradient. None: Trainer raised.
        trainer_ratio: Norm of Trainer's gradient divided by that of the true gradient.
        trainer_reason: Message of the exception that Trainer raised.
        dropout: Whether hf_ga's gradients with dropout agree between the layouts: "agree",
            "differ", "none drawn" (the model has no dropout), "refused", "error", or "" (not
            examined).
        dropout_reason: Why the layouts do not agree.
        dropout_error: Largest relative error between two layouts.
        dropout_effect: Smallest relative error between a layout and the gradient without dropout.
        seconds: Duration of the examination.
    """

    head: Head
    status: str = "not built"
    reason: str = ""
    error: float | None = None
    terms: tuple[str, ...] = ()
    speed_ups: tuple[str, ...] = ()
    trainer_error: float | None = None
    trainer_ratio: float | None = None
    trainer_reason: str = ""
    dropout: str = ""
    dropout_reason: str = ""
    dropout_error: float | None = None
    dropout_effect: float | None = None
    seconds: float = 0.0

    @property
    def trainer_right(self) -> bool:
        """Whether Trainer's gradient equals the true gradient, up to `TOLERANCE`."""
        return self.trainer_error is not None and self.trainer_error <= TOLERANCE


def all_heads() -> list[Head]:
    """List the heads of all model classes in transformers' auto mappings (`MAPPINGS`).

    A class has one head for each kind of loss of the first mapping that contains it; the kind with
    router loss only if its config supports that.
    """
    heads_of_class: dict[str, list[Head]] = {}
    for mapping, kinds in MAPPINGS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for model_type, classes in names.items():
            config_class = transformers.CONFIG_MAPPING[model_type]
            has_router = hasattr(config_class, "output_router_logits")
            for name in [classes] if isinstance(classes, str) else classes:
                heads = [Head(model_type, name, kind) for kind in kinds]
                heads = [head for head in heads if head.kind != ROUTER or has_router]
                heads_of_class.setdefault(name, heads)
    return [head for heads in heads_of_class.values() for head in heads]


def examine(head: Head) -> Verdict:
    """Examine one head of transformers: build a small model, compare the gradients of hf_ga and
    Trainer with the true one and, if hf_ga's is right, examine dropout. Exceptions become part of
    the verdict.
    """
    verdict = Verdict(head)
    try:
        model, samples, collate = build_head(head, 0.0)
        truth = true_gradient(model, samples, collate)
        norm = float(truth.norm())
        if not norm or not math.isfinite(norm):
            raise ValueError(f"its true gradient has the norm {norm}")
    except OutOfScope as error:
        verdict.status = "out of scope"
        verdict.reason = str(error)
        return verdict
    except Exception as error:
        verdict.reason = describe_error(error)
        return verdict
    _examine_hf_ga(verdict, model, samples, collate, truth)
    _examine_trainer(verdict, model, samples, collate, truth)
    if verdict.status == "right":
        _examine_dropout(verdict, head, truth)
    return verdict


def build_head(head: Head, dropout: float) -> tuple[PreTrainedModel, list[Sample], PaddingCollator]:
    """Build a small random model of a head, its samples and their collate function.

    Args:
        head: The head.
        dropout: Dropout probability at all sites.

    Raises:
        OutOfScope: If the sweep does not cover the head.
    """
    model_class = getattr(transformers, head.class_name)
    if head.kind == "pre-training":
        _check_text(model_class)
    attributes = dict(KINDS[head.kind])
    if head.kind.startswith("causal LM"):
        attributes["is_decoder"] = True
    config = small_config(model_class.config_class, dropout, **attributes)
    pad_id = _set_special_tokens(config)
    model = build_small(model_class, config)
    if head.kind == "image classification":
        _check_attention(model)
    samples = make_samples(head.kind, head.class_name, config)
    collate = PaddingCollator(pad_id, PADDED_LENGTHS.get(head.model_type, 0))
    if not dropout:
        switch_off_dropout(model)
        if head.kind == ROUTER:
            _check_router(model, collate(samples))
    return model, samples, collate


def true_gradient(model: nn.Module, samples: list[Sample], collate: PaddingCollator) -> Tensor:
    """Compute the correct gradient with plain torch and transformers: one forward and backward of
    the head's own loss over all samples in one batch. Like all gradients of the sweep, it is one
    vector of all trainable parameters, 0 where there is none.
    """
    model.zero_grad(set_to_none=True)
    loss = model(**collate(samples)).loss
    loss.backward()
    return flat(take_gradients(model))


def try_head(model: nn.Module, samples: list[Sample], collate: PaddingCollator) -> LossFacts:
    """Try the loss of a model on some samples, as `hf_ga.prepare` does."""
    return try_before(Accelerator(cpu=True), model, samples, collate, LossSettings())


def hf_ga_gradient(
    model: nn.Module,
    samples: list[Sample],
    collate: PaddingCollator,
    facts: LossFacts,
    **layout: Any,
) -> Tensor:
    """Compute the gradient of the samples with hf_ga, as one window (the samples of one optimizer
    step) split into micro-batches.

    Args:
        model: The model.
        samples: The samples of the window.
        collate: The collate function.
        facts: What `try_head` found.
        layout: Arguments of `WindowLoader` that split the window into micro-batches.
    """
    accelerator = Accelerator(cpu=True)
    windows = hf_ga.WindowLoader(
        samples,
        collate,
        accelerator=accelerator,
        global_batch_size=len(samples),
        shuffle=False,
        **layout,
    )
    facts.note_padding(windows.state)
    model.zero_grad(set_to_none=True)
    (window,) = windows
    hf_ga.backward_window(accelerator, model, window)
    return flat(take_gradients(model))


def trainer_gradient(model: nn.Module, samples: list[Sample], collate: PaddingCollator) -> Tensor:
    """Return the gradient of the samples that `transformers.Trainer` passes to its optimizer, in
    micro-batches of `MICRO_BATCH` samples in their order.
    """
    micro_batches = [
        collate(samples[start : start + MICRO_BATCH])
        for start in range(0, len(samples), MICRO_BATCH)
    ]
    _, gradients = trainer_arm()(model, micro_batches, ACCUMULATION, "fp32")
    return flat(gradients)


def draws_randomness(model: nn.Module, samples: list[Sample], collate: PaddingCollator) -> bool:
    """Whether a training forward draws random numbers from torch's global generator, as dropout
    does. Runs the forward, which advances the generator.
    """
    before = torch.get_rng_state()
    with torch.no_grad():
        model(**collate(samples))
    return not torch.equal(before, torch.get_rng_state())


def describe_error(error: Exception) -> str:
    """Describe an exception for a table: its type, the first 400 characters of its message, and the
    file and line that raised it.
    """
    message = " ".join(str(error).split())[:400]
    frames = traceback.extract_tb(error.__traceback__)
    place = ""
    if frames:
        last = frames[-1]
        place = f" ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"
    return f"{type(error).__name__}: {message}{place}"


def _examine_hf_ga(
    verdict: Verdict,
    model: nn.Module,
    samples: list[Sample],
    collate: PaddingCollator,
    truth: Tensor,
) -> None:
    """Compare hf_ga's gradients in several layouts (micro-batch sizes) with the true gradient, and
    write status, error and reason into the verdict, in place.
    """
    try:
        facts = try_head(model, samples, collate)
        errors = {
            name: relative_error(hf_ga_gradient(model, samples, collate, facts, **layout), truth)
            for name, layout in LAYOUTS.items()
        }
    except Exception as error:
        verdict.status = "refused" if isinstance(error, REFUSALS) else "wrong"
        verdict.reason = describe_error(error)
        return
    worst = max(errors, key=errors.__getitem__)
    verdict.error = errors[worst]
    verdict.terms = facts.terms
    verdict.speed_ups = facts.speed_ups.names
    verdict.status = "right" if verdict.error <= TOLERANCE else "wrong"
    if verdict.status == "wrong":
        verdict.reason = f"error {verdict.error:.1e} in the layout {worst}"


def _examine_trainer(
    verdict: Verdict,
    model: nn.Module,
    samples: list[Sample],
    collate: PaddingCollator,
    truth: Tensor,
) -> None:
    """Compare Trainer's gradient with the true one, and write the error, or Trainer's exception,
    into the verdict, in place.
    """
    try:
        gradient = trainer_gradient(model, samples, collate)
    except Exception as error:
        verdict.trainer_reason = describe_error(error)
        return
    verdict.trainer_error = relative_error(gradient, truth)
    verdict.trainer_ratio = float(gradient.norm() / truth.norm())


def _examine_dropout(verdict: Verdict, head: Head, truth: Tensor) -> None:
    """Compare hf_ga's gradients with dropout in several layouts with each other, and with the
    gradient without dropout, `truth`; write the result into the verdict, in place.
    """
    try:
        model, samples, collate = build_head(head, DROPOUT)
        if not draws_randomness(model, samples, collate):
            verdict.dropout = "none drawn"
            return
        facts = try_head(model, samples, collate)
        gradients = [
            hf_ga_gradient(model, samples, collate, facts, **layout) for layout in LAYOUTS.values()
        ]
    except Exception as error:
        verdict.dropout = "refused" if isinstance(error, REFUSALS) else "error"
        verdict.dropout_reason = describe_error(error)
        return
    verdict.dropout_error = max(
        relative_error(a, b) for a in gradients for b in gradients if a is not b
    )
    verdict.dropout_effect = min(relative_error(g, truth) for g in gradients)
    agree = verdict.dropout_error <= TOLERANCE and verdict.dropout_effect > 10 * TOLERANCE
    verdict.dropout = "agree" if agree else "differ"
    if not agree:
        verdict.dropout_reason = (
            f"layouts differ by {verdict.dropout_error:.1e}, from no dropout by "
            f"{verdict.dropout_effect:.1e}"
        )


def _check_router(model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    """Raise OutOfScope if the loss of a head with router loss is the same without it."""
    with torch.no_grad():
        without = model(**batch, output_router_logits=False).loss
        with_router = model(**batch, output_router_logits=True).loss
    if torch.equal(without, with_router):
        raise OutOfScope("its loss has no part for the router")


def _check_attention(model: PreTrainedModel) -> None:
    """Raise OutOfScope if an image classifier has no module with "Attention" in its class name."""
    if not any("Attention" in type(module).__name__ for module in model.modules()):
        raise OutOfScope("an image classifier without attention layers")


def _check_text(model_class: type[PreTrainedModel]) -> None:
    """Raise OutOfScope for a pre-training class whose forward does not take `input_ids` and labels
    of text.
    """
    names = inspect.signature(model_class.forward).parameters
    has_labels = "labels" in names or "start_positions" in names
    if "input_ids" not in names or not has_labels:
        raise OutOfScope("pre-training without a loss of text labels")


def _set_special_tokens(config: transformers.PreTrainedConfig) -> int:
    """Set the padding id, and the id that a decoder starts with, where a config leaves them to the
    tokenizer; return the padding id. Changes the config and its text config, in place.
    """
    text_config = config.get_text_config()
    default = 0
    for name in ("pad_token_id", "decoder_start_token_id"):
        for part in (text_config, config):
            token_id = getattr(part, name, None)
            if not isinstance(token_id, int) or token_id < 0:
                setattr(part, name, default)
        # By default a decoder starts with the padding token.
        default = text_config.pad_token_id
    return text_config.pad_token_id
