"""Examine one head: gradients of hf_ga and of Trainer against plain PyTorch on the full batch (the
truth), and dropout.

`scripts/sweep_heads.py` runs this for every architecture of transformers.
"""

import inspect
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import hf_ga
from heads.small_models import build_small, small_config, switch_off_dropout
from heads.small_samples import KINDS, WIDTHS, PaddingCollator, Sample, make_samples
from hf_ga.check.arms import trainer_arm
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.training import Given, remember

TOLERANCE = 1e-5  # of the norm of the true gradient, over all parameters together
DROPOUT = 0.1
MICRO_BATCH, ACCUMULATION = 2, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "8x1": {"per_device_batch_size": 8},
    "2x4": {"per_device_batch_size": 2},
    "1x8": {"per_device_batch_size": 1},
    "uneven": {"planner": partial(plan_by_sizes, sizes=[3, 1, 4])},
}
# auto class mapping -> kinds of its heads
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
Gradient = list[Tensor]
Refusals = (hf_ga.LossNotAdditive, hf_ga.UnkeyedRandomness, hf_ga.ConfigError)


class OutOfScope(Exception):
    """A class of the mappings that is neither a text head nor an image classifier with
    attention.
    """


@dataclass(frozen=True)
class Head:
    """A model class and its kind of problem."""

    model_type: str
    class_name: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.class_name} ({self.kind})"


@dataclass
class Verdict:
    """The measurements of one head. Errors are relative to the norm of the truth, over all
    parameters together.

    Attributes:
        status: "right", "refused", "wrong", "not built" or "out of scope". reason: the error, or
            its message.
        trainer_ratio: norm of Trainer's gradient / norm of the truth.
        dropout: "none drawn", "agree", "differ", "refused", "error" or "" (not examined).
        dropout_error: the largest relative error between two layouts. dropout_effect: that to no
            dropout.
    """

    head: Head
    status: str = "not built"
    reason: str = ""
    error: float | None = None
    rule: str = ""
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
        return self.trainer_error is not None and self.trainer_error <= TOLERANCE


def all_heads() -> list[Head]:
    """Every class of the mappings, once per kind of its first mapping; with router losses if the
    config supports them.
    """
    heads: dict[str, list[Head]] = {}
    for mapping, kinds in MAPPINGS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for model_type, classes in names.items():
            for class_name in [classes] if isinstance(classes, str) else classes:
                heads.setdefault(
                    class_name,
                    [
                        Head(model_type, class_name, k)
                        for k in kinds
                        if k != ROUTER or _routes(model_type)
                    ],
                )
    return [head for of_class in heads.values() for head in of_class]


def examine(head: Head) -> Verdict:
    """Build the head and compare all gradients. An error of the model becomes a verdict, not an
    exception.
    """
    verdict = Verdict(head)
    try:
        model, samples, collate = build_head(head, 0.0)
        truth = true_gradient(model, samples, collate)
        if not all(g.isfinite().all() for g in truth) or not norm(truth):
            raise ValueError(f"its true gradient has the norm {norm(truth)}")
    except OutOfScope as error:
        verdict.status, verdict.reason = "out of scope", str(error)
        return verdict
    except Exception as error:
        verdict.reason = described(error)
        return verdict
    _examine_hf_ga(verdict, model, samples, collate, truth)
    _examine_trainer(verdict, model, samples, collate, truth)
    if verdict.status == "right":
        _examine_dropout(verdict, head, truth)
    return verdict


def build_head(head: Head, dropout: float) -> tuple[PreTrainedModel, list[Sample], PaddingCollator]:
    """The small model of a head with its samples and collate function."""
    model_class = getattr(transformers, head.class_name)
    _check_text(head, model_class)
    decoder = {"is_decoder": True} if head.kind.startswith("causal LM") else {}
    config = small_config(_config_class(head, model_class), dropout, **KINDS[head.kind], **decoder)
    pad_id = _with_special_tokens(config)
    model = build_small(model_class, config)
    if head.kind == "image classification" and not any(
        "Attention" in type(module).__name__ for module in model.modules()
    ):
        raise OutOfScope("an image classifier without attention layers")
    if not dropout:
        switch_off_dropout(model)
        _check_router(head, model, pad_id)
    return (
        model,
        make_samples(head.kind, head.class_name, config),
        PaddingCollator(pad_id, WIDTHS.get(head.model_type, 0)),
    )


def true_gradient(model: nn.Module, samples: list[Sample], collate: PaddingCollator) -> Gradient:
    """One forward and backward of the head's own loss over all samples at once: torch and
    transformers only.
    """
    model.zero_grad(set_to_none=True)
    model(**collate(samples)).loss.backward()
    return taken_gradient(model)


def hf_ga_gradient(
    model: nn.Module,
    samples: list[Sample],
    collate: PaddingCollator,
    rule: hf_ga.Rule | None = None,
    **layout: Any,
) -> tuple[Gradient, hf_ga.Rule]:
    """hf_ga's gradient of the same samples in a layout, and the proven (or given) rule."""
    accelerator = Accelerator(cpu=True)
    windows = hf_ga.WindowLoader(
        samples,
        collate,
        accelerator=accelerator,
        global_batch_size=len(samples),
        shuffle=False,
        **layout,
    )
    model.zero_grad(set_to_none=True)
    remember(accelerator, model, Given(rule=rule))
    for window in windows:
        hf_ga.backward_window(accelerator, model, window)
    return taken_gradient(model), rule or next(iter(windows.state.rules.values()))


def trainer_gradient(model: nn.Module, samples: list[Sample], collate: PaddingCollator) -> Gradient:
    """The gradient that `transformers.Trainer` passes to its optimizer, for the same samples in the
    same order.
    """
    micro_batches = [
        collate(samples[start : start + MICRO_BATCH])
        for start in range(0, len(samples), MICRO_BATCH)
    ]
    _, gradients = trainer_arm()(model, micro_batches, ACCUMULATION, "fp32")
    return [*gradients.values()]


def draws_randomness(model: nn.Module, samples: list[Sample], collate: PaddingCollator) -> bool:
    """Whether a training forward draws from torch's generator."""
    before = torch.get_rng_state()
    with torch.no_grad():
        model(**collate(samples))
    return not torch.equal(before, torch.get_rng_state())


def taken_gradient(model: nn.Module) -> Gradient:
    """Copies of the gradients, zeros if a trainable parameter has none; removes them from the
    model.
    """
    taken = [
        (torch.zeros_like(p) if p.grad is None else p.grad).detach().clone()
        for p in model.parameters()
        if p.requires_grad
    ]
    model.zero_grad(set_to_none=True)
    return taken


def norm(gradient: Gradient) -> float:
    """L2 norm over all parameters, in float64."""
    return float(torch.stack([g.double().norm() for g in gradient]).norm())


def relative_error(gradient: Gradient, reference: Gradient) -> float:
    """||gradient - reference|| / ||reference||; a NaN is infinite."""
    value = norm(
        [g.double() - r.double() for g, r in zip(gradient, reference, strict=True)]
    ) / norm(reference)
    return value if value == value else float("inf")


def described(error: Exception) -> str:
    """Type, message and last line of the source, short enough for a table."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}{place}"


def _examine_hf_ga(
    verdict: Verdict,
    model: nn.Module,
    samples: list[Sample],
    collate: PaddingCollator,
    truth: Gradient,
) -> None:
    try:
        gradient, rule = hf_ga_gradient(model, samples, collate, per_device_batch_size=MICRO_BATCH)
    except Exception as error:
        verdict.status, verdict.reason = (
            "refused" if isinstance(error, Refusals) else "wrong",
            described(error),
        )
        return
    verdict.error, verdict.rule = relative_error(gradient, truth), rule.name
    verdict.status = "right" if verdict.error <= TOLERANCE else "wrong"
    if verdict.status == "wrong":
        verdict.reason = f"error {verdict.error:.1e}"


def _examine_trainer(
    verdict: Verdict,
    model: nn.Module,
    samples: list[Sample],
    collate: PaddingCollator,
    truth: Gradient,
) -> None:
    try:
        gradient = trainer_gradient(model, samples, collate)
    except Exception as error:
        verdict.trainer_reason = described(error)
        return
    verdict.trainer_error, verdict.trainer_ratio = (
        relative_error(gradient, truth),
        norm(gradient) / norm(truth),
    )


def _examine_dropout(verdict: Verdict, head: Head, truth: Gradient) -> None:
    try:
        model, samples, collate = build_head(head, DROPOUT)
        if not draws_randomness(model, samples, collate):
            verdict.dropout = "none drawn"
            return
        rule = hf_ga.prove_targets(model, samples, collate)  # once for all layouts
        gradients = [
            hf_ga_gradient(model, samples, collate, rule, **layout)[0]
            for layout in LAYOUTS.values()
        ]
    except Exception as error:
        verdict.dropout, verdict.dropout_reason = (
            "refused" if isinstance(error, Refusals) else "error",
            described(error),
        )
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


def _routes(model_type: str) -> bool:
    return hasattr(transformers.CONFIG_MAPPING[model_type], "output_router_logits")


def _check_router(head: Head, model: PreTrainedModel, pad_id: int) -> None:
    """Raise OutOfScope if the model's loss has no router term."""
    if head.kind != ROUTER:
        return
    batch = PaddingCollator(pad_id)(make_samples(head.kind, head.class_name, model.config))
    with torch.no_grad():
        losses = [
            model(**batch, output_router_logits=with_loss).loss for with_loss in (False, True)
        ]
    if torch.equal(*losses):
        raise OutOfScope("its loss has no part for the router")


def _check_text(head: Head, model_class: type[PreTrainedModel]) -> None:
    """Raise OutOfScope for pre-training classes without a loss of text labels."""
    names = inspect.signature(model_class.forward).parameters
    if head.kind == "pre-training" and not (
        "input_ids" in names and {"labels", "start_positions"} & set(names)
    ):
        raise OutOfScope("pre-training without a loss of text labels")


def _config_class(head: Head, model_class: type[PreTrainedModel]) -> type:
    """The config class: a text model of a multimodal family is listed under the family's config,
    but has its own.
    """
    own = getattr(model_class, "config_class", None)
    return own if isinstance(own, type) else transformers.CONFIG_MAPPING[head.model_type]


def _with_special_tokens(config: transformers.PreTrainedConfig) -> int:
    """Set the special token ids that a config leaves to the tokenizer. Returns the padding id."""
    text = config.get_text_config()
    chosen = 0
    for name in ("pad_token_id", "decoder_start_token_id"):
        for part in (text, config):
            if not isinstance(value := getattr(part, name, None), int) or value < 0:
                setattr(part, name, chosen)
        chosen = text.pad_token_id
    return text.pad_token_id
