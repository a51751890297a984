"""The report of a sweep: one line per head, a summary, Markdown and JSON."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from heads.one_head import ACCUMULATION, DROPOUT, LAYOUTS, MICRO_BATCH, TOLERANCE, Verdict

BUILT = ("right", "refused", "wrong")
# What `Verdict.dropout` is for heads that draw dropout.
DRAWING = ("agree", "differ", "refused", "error")

METHOD = f"""The sweep takes every class of ten auto mappings of transformers (causal LM, masked LM, sequence and token
classification, question answering, multiple choice, seq2seq, next sentence, pre-training, image classification), and builds a small
model from its config class with seeded random weights, without network. A head is a class with a kind of problem: sequence
classifiers count three times (classes, regression, multi-label), mixtures of experts twice if their causal loss can have a part for
the router. A class that occurs in several mappings counts once. Each head gets 8 samples of 4 to 21 tokens and a collate function
that only pads. If it has targets per token, their numbers differ by more than a factor of 3; for question answering, some answers
are cut off at the start, the end or both.

- **Truth**: `model(**collate(all_samples)).loss.backward()`, with torch and transformers only, in float32 without dropout.
- **hf_ga**: `WindowLoader` and `backward_window` with {ACCUMULATION} micro-batches of {MICRO_BATCH}. Refused: it raises an error.
- **Trainer**: the gradient that `transformers.Trainer` passes to its optimizer for the same model, samples, order and layout.
- **Error**: ||g - truth|| / ||truth|| over all parameters together; right is at most {TOLERANCE:.0e}. Ratio: ||g|| / ||truth||.
- **Dropout**: the model is built again with all dropout probabilities {DROPOUT}. hf_ga's gradients in the layouts
  {", ".join(LAYOUTS)} (micro-batch x accumulation; uneven is 3, 1, 4, sorted by length) agree if no two differ by more than
  {TOLERANCE:.0e}, and each differs from the gradient without dropout by more than ten times that. Whether a model draws at all is
  read from torch's generator, not from hf_ga. Dropping layers for a whole batch (`layerdrop`), routing noise and masking of inputs
  are off, because they cannot be tied to a sample.

In scope are, of the pre-training mapping, classes whose forward takes `input_ids` with `labels` or `start_positions` (a loss of
text), and of the image mapping, models that have a module called attention. Multimodal models get text alone, as far as they take
it. Heads that are out of scope or could not be built are listed at the end and not counted."""


def line(verdict: Verdict) -> str:
    """Describe a head in one line: its row of the table, and the reason."""
    cells = [verdict.head.name, verdict.status]
    if verdict.status in BUILT:
        cells = _row(verdict)
    reason = verdict.reason or verdict.dropout_reason
    return " | ".join(filter(None, [*cells, reason[:160]]))


def summary(verdicts: list[Verdict]) -> list[str]:
    """Return the counts as sentences."""
    built = [v for v in verdicts if v.status in BUILT]
    status = Counter(v.status for v in verdicts)
    dropout = Counter(v.dropout for v in built)
    drawing = sum(dropout[name] for name in DRAWING)
    ratios = Counter(
        round(v.trainer_ratio) for v in built if v.trainer_ratio is not None and not v.trainer_right
    )
    return [
        f"{len(built)} heads built, of {len({v.head.class_name for v in built})} classes and "
        f"{len({v.head.model_type for v in built})} architectures; {status['not built']} could "
        "not be built, "
        f"{status['out of scope']} are out of scope.",
        f"hf_ga: {status['right']} right, {status['refused']} refused "
        f"({_percent(status['refused'], len(built))}), "
        f"{status['wrong']} wrong.",
        f"transformers.Trainer: {sum(v.trainer_right for v in built)} right, "
        f"{sum(not v.trainer_right for v in built)} not "
        f"(gradient about 4 times too large for {ratios[4]}).",
        f"Dropout {DROPOUT}: {drawing} heads draw it; hf_ga's layouts agree for {dropout['agree']} "
        f"({_percent(dropout['agree'], drawing)}), differ for {dropout['differ']}, refused for "
        f"{dropout['refused']}, error for "
        f"{dropout['error']}. {dropout['none drawn']} draw none.",
    ]


def write_report(verdicts: list[Verdict], num_heads: int, folder: Path, minutes: float) -> None:
    """Write heads.md and heads.json with the verdicts so far.

    Args:
        verdicts: The verdicts so far.
        num_heads: Number of heads to examine.
        folder: The folder of the two files.
        minutes: Duration so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }
    about = {
        "versions": versions,
        "minutes": round(minutes, 1),
        "tolerance": TOLERANCE,
        "summary": summary(verdicts),
    }
    about |= {"examined": len(verdicts), "listed": num_heads}
    heads = ",\n".join(json.dumps(_entry(verdict)) for verdict in verdicts)
    head_of_file = json.dumps(about, indent=1).removesuffix("\n}")
    (folder / "heads.json").write_text(f'{head_of_file},\n "heads": [\n{heads}\n]\n}}\n')
    where = ", ".join(f"{name} {version}" for name, version in versions.items())
    where = f"{where}; {len(verdicts)} of {num_heads} heads in {minutes:.0f} minutes."
    (folder / "heads.md").write_text(_markdown(verdicts, where))


def _markdown(verdicts: list[Verdict], where: str) -> str:
    """Return the text of heads.md; `where` names versions and duration."""
    built = [v for v in verdicts if v.status in BUILT]
    parts = [
        "# Every head",
        "Does hf_ga compute the full-batch gradient of your model, and does "
        "`transformers.Trainer`? Search for its class.",
        "`OMP_NUM_THREADS=1 python scripts/sweep_heads.py --full --output_dir docs` writes the "
        "page and heads.json.",
        where,
        "\n".join(f"- {sentence}" for sentence in summary(verdicts)),
        "## By kind",
        _by_kind(built),
        *_listed("## Wrong", {v.head.name: v.reason for v in built if v.status == "wrong"}),
        *_listed("## Refused", {v.head.name: v.reason for v in built if v.status == "refused"}),
        *_listed(
            "## Dropout: drawn, but the layouts do not agree",
            {v.head.name: v.dropout_reason for v in built if v.dropout in DRAWING[1:]},
        ),
        "## Method",
        METHOD,
        "## All heads",
        _table(
            [
                "head",
                "hf_ga",
                "error",
                "targets",
                "Trainer",
                "error",
                "ratio",
                f"dropout {DROPOUT}",
            ],
            (_row(v) for v in built),
        ),
        *_listed(
            "## Not built", {v.head.name: v.reason for v in verdicts if v.status == "not built"}
        ),
        *_listed(
            "## Out of scope",
            {v.head.name: v.reason for v in verdicts if v.status == "out of scope"},
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _by_kind(built: list[Verdict]) -> str:
    """Return the table of counts, one row per kind of head."""
    rows = []
    for kind in dict.fromkeys(v.head.kind for v in built):
        of_kind = [v for v in built if v.head.kind == kind]
        status = Counter(v.status for v in of_kind)
        dropout = Counter(v.dropout for v in of_kind)
        trainer = sum(v.trainer_right for v in of_kind)
        drawing = sum(dropout[name] for name in DRAWING)
        rows.append(
            [
                kind,
                len(of_kind),
                *(status[s] for s in BUILT),
                trainer,
                f"{dropout['agree']} of {drawing}",
            ]
        )
    return _table(["kind", "heads", *BUILT, "Trainer right", "dropout layouts agree"], rows)


def _listed(title: str, reasons: dict[str, str]) -> list[str]:
    """Return a title and a list of heads with their reasons; nothing if there are none."""
    if not reasons:
        return []
    return [title, "\n".join(f"- {name}: {reason}" for name, reason in reasons.items())]


def _row(verdict: Verdict) -> list[str]:
    """Return a head's row of the table of all heads."""
    ratio = ""
    if verdict.trainer_ratio is not None:
        ratio = f"{verdict.trainer_ratio:.2f}"
    return [
        verdict.head.name,
        verdict.status,
        _short(verdict.error),
        verdict.rule,
        _status_of_trainer(verdict),
        _short(verdict.trainer_error),
        ratio,
        _dropout(verdict),
    ]


def _status_of_trainer(verdict: Verdict) -> str:
    """Return "right", "wrong", or "fails" if Trainer raises an exception."""
    if verdict.trainer_right:
        return "right"
    if verdict.trainer_error is not None:
        return "wrong"
    return "fails"


def _table(header: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown."""
    lines = []
    for cells in (header, ["---"] * len(header), *rows):
        escaped = [str(cell).replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


def _dropout(verdict: Verdict) -> str:
    """Return the cell of dropout: the verdict, and the largest error between two layouts."""
    if verdict.dropout_error is None:
        return verdict.dropout or "-"
    return f"{verdict.dropout} {verdict.dropout_error:.0e}"


def _short(value: float | None) -> str:
    """Return a number with two digits, "" for None."""
    return "" if value is None else f"{value:.1e}"


def _percent(part: int, whole: int) -> str:
    """Return a share in percent."""
    return f"{100 * part / max(whole, 1):.1f} %"


def _entry(verdict: Verdict) -> dict[str, Any]:
    """Return a head's entry in heads.json, numbers with three digits."""
    values = vars(verdict.head) | vars(verdict) | {"trainer_right": verdict.trainer_right}
    entry = {}
    for name, value in values.items():
        if name == "head" or value in (None, ""):
            continue
        entry[name] = float(f"{value:.3g}") if isinstance(value, float) else value
    return entry
