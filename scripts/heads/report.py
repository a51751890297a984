"""The report of a sweep over heads (model classes of transformers with a loss): one line per head, a
summary, heads.md and heads.json.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from common import table

from heads.one_head import ACCUMULATION, DROPOUT, LAYOUTS, MICRO_BATCH, TOLERANCE, Verdict

# Values of `Verdict.status` for heads that were built.
BUILT = ("right", "refused", "wrong")
# Values of `Verdict.dropout` for heads that draw dropout.
DRAWING = ("agree", "differ", "refused", "error")

METHOD = f"""The sweep takes every class of ten auto mappings of transformers (causal LM, masked LM, sequence and token
classification, question answering, multiple choice, seq2seq, next sentence, pre-training, image classification), and builds a small
model from its config class with seeded random weights, without network. A head is a class with a kind of problem: sequence
classifiers count three times (classes, regression, multi-label), mixtures of experts twice if their causal loss can have a part for
the router. A class that occurs in several mappings counts once. Each head gets 8 samples of 4 to 21 tokens and a collate function
that only pads. If it has targets per token, their numbers differ by more than a factor of 3; for question answering, some answers
are cut off at the start, the end or both.

- **Truth**: `model(**collate(all_samples)).loss.backward()`, with torch and transformers only, in float32 without dropout.
- **hf_ga**: the loss is tried on the samples as `prepare(..., windows)` does, then `backward_window` computes the samples as one
  window, with the speed-ups that passed their trials, in the layouts {", ".join(LAYOUTS)} (micro-batch x accumulation; uneven is
  3, 1, 4, sorted by length). Right: in all of them. Refused: it raises an error.
- **Loss**: the terms of the loss, as hf_ga read them in the trial.
- **Trainer**: the gradient that `transformers.Trainer` passes to its optimizer for the same model, samples and order, with
  {ACCUMULATION} micro-batches of {MICRO_BATCH}.
- **Error**: ||g - truth|| / ||truth|| over all parameters together, the largest of the layouts; right is at most {TOLERANCE:.0e}.
  Ratio: ||g|| / ||truth||.
- **Dropout**: the model is built again with all dropout probabilities {DROPOUT}. hf_ga's gradients in the same layouts agree if no
  two differ by more than {TOLERANCE:.0e}, and each differs from the gradient without dropout by more than ten times that. Whether a
  model draws at all is read from torch's generator, not from hf_ga. Dropping layers for a whole batch (`layerdrop`), routing noise
  and masking of inputs are off, because they cannot be tied to a sample.

In scope are, of the pre-training mapping, classes whose forward takes `input_ids` with `labels` or `start_positions` (a loss of
text), and of the image mapping, models that have a module called attention. Multimodal models get text alone, as far as they take
it. Heads that are out of scope or could not be built are listed at the end and not counted."""


def line(verdict: Verdict) -> str:
    """Describe the verdict on a head in one line for the terminal: the cells of its table row, and
    the reason if something is wrong.
    """
    cells = [verdict.head.name, verdict.status]
    if verdict.status in BUILT:
        cells = _table_row(verdict)
    reason = verdict.reason or verdict.dropout_reason
    return " | ".join(filter(None, [*cells, reason[:160]]))


def summary(verdicts: list[Verdict]) -> list[str]:
    """Summarize a sweep in four sentences: how many heads were built, how many gradients of hf_ga
    and of Trainer are right, and for how many heads the layouts agree with dropout.
    """
    built = [verdict for verdict in verdicts if verdict.status in BUILT]
    num_classes = len({verdict.head.class_name for verdict in built})
    num_architectures = len({verdict.head.model_type for verdict in built})
    status = Counter(verdict.status for verdict in verdicts)
    refused_share = _percent(status["refused"], len(built))

    trainer_right = sum(verdict.trainer_right for verdict in built)
    # The gradient is too large by the accumulation steps where Trainer does not divide by them.
    trainer_times_4 = sum(
        round(verdict.trainer_ratio) == 4
        for verdict in built
        if verdict.trainer_ratio is not None and not verdict.trainer_right
    )

    dropout = Counter(verdict.dropout for verdict in built)
    num_drawing = sum(dropout[name] for name in DRAWING)
    agree_share = _percent(dropout["agree"], num_drawing)
    return [
        f"{len(built)} heads built, of {num_classes} classes and {num_architectures} "
        f"architectures; {status['not built']} could not be built, {status['out of scope']} are "
        "out of scope.",
        f"hf_ga: {status['right']} right, {status['refused']} refused ({refused_share}), "
        f"{status['wrong']} wrong.",
        f"transformers.Trainer: {trainer_right} right, {len(built) - trainer_right} not "
        f"(gradient about 4 times too large for {trainer_times_4}).",
        f"Dropout {DROPOUT}: {num_drawing} heads draw it; hf_ga's layouts agree for "
        f"{dropout['agree']} ({agree_share}), differ for {dropout['differ']}, refused for "
        f"{dropout['refused']}, error for {dropout['error']}. {dropout['none drawn']} draw none.",
    ]


def write_report(verdicts: list[Verdict], num_heads: int, folder: Path, minutes: float) -> None:
    """Write the report of a sweep, heads.md and heads.json, with the verdicts so far.

    Args:
        verdicts: The verdicts so far.
        num_heads: Number of heads that the sweep examines.
        folder: The folder of the two files; created if it does not exist.
        minutes: Duration of the sweep so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }
    metadata = {
        "versions": versions,
        "minutes": round(minutes, 1),
        "tolerance": TOLERANCE,
        "summary": summary(verdicts),
        "examined": len(verdicts),
        "listed": num_heads,
    }
    # One line for each head, so that diffs of the file are readable.
    heads = ",\n".join(json.dumps(_json_entry(verdict)) for verdict in verdicts)
    opened_object = json.dumps(metadata, indent=1).removesuffix("\n}")
    (folder / "heads.json").write_text(f'{opened_object},\n "heads": [\n{heads}\n]\n}}\n')
    shown_versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    origin = f"{shown_versions}; {len(verdicts)} of {num_heads} heads in {minutes:.0f} minutes."
    (folder / "heads.md").write_text(_format_page(verdicts, origin))


def _format_page(verdicts: list[Verdict], origin: str) -> str:
    """Format heads.md: summary, counts by kind, heads that are wrong or refused, the method, and a
    table of all heads. `origin` names versions and duration.
    """
    built = [v for v in verdicts if v.status in BUILT]
    parts = [
        "# Every head",
        "Does hf_ga compute the full-batch gradient of your model, and does "
        "`transformers.Trainer`? Search for its class.",
        "`OMP_NUM_THREADS=1 python scripts/sweep_heads.py --full --output_dir docs` writes the "
        "page and heads.json.",
        origin,
        "\n".join(f"- {sentence}" for sentence in summary(verdicts)),
        "## By kind",
        _table_by_kind(built),
        *_reason_list("## Wrong", [v for v in built if v.status == "wrong"]),
        *_reason_list("## Refused", [v for v in built if v.status == "refused"]),
        *_reason_list(
            "## Dropout: drawn, but the layouts do not agree",
            [v for v in built if v.dropout in DRAWING[1:]],
        ),
        "## Method",
        METHOD,
        "## All heads",
        table(
            [
                "head",
                "hf_ga",
                "error",
                "loss",
                "Trainer",
                "error",
                "ratio",
                f"dropout {DROPOUT}",
            ],
            [_table_row(verdict) for verdict in built],
            alignment="---",
        ),
        *_reason_list("## Not built", [v for v in verdicts if v.status == "not built"]),
        *_reason_list("## Out of scope", [v for v in verdicts if v.status == "out of scope"]),
    ]
    return "\n\n".join(parts) + "\n"


def _table_by_kind(built: list[Verdict]) -> str:
    """Format a Markdown table that counts the heads by kind of loss (one row each): how many are
    right, refused and wrong, Trainer's right ones, and those whose layouts agree with dropout.
    """
    rows = []
    for kind in dict.fromkeys(verdict.head.kind for verdict in built):
        verdicts = [verdict for verdict in built if verdict.head.kind == kind]
        status = Counter(verdict.status for verdict in verdicts)
        dropout = Counter(verdict.dropout for verdict in verdicts)
        num_drawing = sum(dropout[name] for name in DRAWING)
        rows.append(
            [
                kind,
                len(verdicts),
                *(status[name] for name in BUILT),
                sum(verdict.trainer_right for verdict in verdicts),
                f"{dropout['agree']} of {num_drawing}",
            ]
        )
    return table(["kind", "heads", *BUILT, "Trainer right", "dropout layouts agree"], rows)


def _reason_list(title: str, verdicts: list[Verdict]) -> list[str]:
    """Format a title and a Markdown list of heads with their reasons; nothing without heads."""
    lines = [f"- {v.head.name}: {v.reason or v.dropout_reason}" for v in verdicts]
    return [title, "\n".join(lines)] if lines else []


def _table_row(verdict: Verdict) -> list[str]:
    """Format the cells of one head (a model class with its loss) in the report's table of all heads:
    hf_ga's result, Trainer's, and dropout.
    """
    ratio = ""
    if verdict.trainer_ratio is not None:
        ratio = f"{verdict.trainer_ratio:.2f}"
    return [
        verdict.head.name,
        verdict.status,
        _format_error(verdict.error),
        _format_terms(verdict.terms),
        _trainer_status(verdict),
        _format_error(verdict.trainer_error),
        ratio,
        _format_dropout(verdict),
    ]


def _trainer_status(verdict: Verdict) -> str:
    """Return whether Trainer's gradient is "right" or "wrong"; "fails" if Trainer raised."""
    if verdict.trainer_right:
        return "right"
    if verdict.trainer_error is not None:
        return "wrong"
    return "fails"


def _format_dropout(verdict: Verdict) -> str:
    """Format the table cell on dropout: whether the layouts agree, with the largest relative error
    between two of them; "-" if dropout was not examined.
    """
    if verdict.dropout_error is None:
        return verdict.dropout or "-"
    return f"{verdict.dropout} {verdict.dropout_error:.0e}"


def _format_terms(terms: tuple[str, ...]) -> str:
    """Format the terms of a loss for a table cell: each means "the mean of" what is named."""
    return " + ".join(term.removeprefix("the mean of ") for term in terms)


def _format_error(value: float | None) -> str:
    """Format a relative error with two digits; return "" for None."""
    return "" if value is None else f"{value:.1e}"


def _percent(count: int, total: int) -> str:
    """Format a count as a percentage of a total; "0.0 %" if both are 0."""
    return f"{100 * count / max(total, 1):.1f} %"


def _json_entry(verdict: Verdict) -> dict[str, Any]:
    """Return the entry of a head in heads.json: the attributes of head and verdict, without empty
    ones, and floats rounded to three digits.
    """
    values = vars(verdict.head) | vars(verdict) | {"trainer_right": verdict.trainer_right}
    entry = {}
    for name, value in values.items():
        if name == "head" or value in (None, "", ()):
            continue
        entry[name] = float(f"{value:.3g}") if isinstance(value, float) else value
    return entry
