"""--class_weights and --weight_column: gradients, losses of evaluations and summaries against one
float64 batch by hand, and what is refused.
"""

import copy
from dataclasses import replace
from functools import partial

import helpers as h
import numpy as np
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from forked import on_two_ranks, without_errors
from runs import JOBS, job_config, lines_of, write_rows
from sklearn.utils.class_weight import compute_class_weight
from steps import backward_window

import hf_ga
from hf_ga.finetuning.data import sources
from hf_ga.finetuning.run.build import build_run, chosen_loss_fn, prepare_setup, samples_to_try
from hf_ga.finetuning.run.flags.cli import parse_config
from hf_ga.order.order import epoch_order
from hf_ga.order.plan import plan_by_sizes

pytestmark = pytest.mark.usefixtures("own_accelerator_state")
LAYOUTS = {"16x1": [16], "uneven": [7, 1, 5, 3], "1x16": [1]}
COUNT, RARE = 100, 41  # one row in 100 has the rare label
SEED, WINDOW = 7, 16  # of `small_config`
EMPTY = epoch_order(COUNT, SEED, 0)[WINDOW : 2 * WINDOW]  # rows of the second window: weight 0
WEIGHED = {"weight_column": "w"}


def weights_of_rows(count, empty=()):
    drawn = np.random.default_rng(9).choice([0.0, 0.5, 1.0, 3.0], count)
    drawn[list(empty)] = 0.0
    drawn[RARE % count] = 1.5
    return drawn.tolist()


def rows_of(name, count, empty=()):
    """Rows of a job with the weight `w`, one with a rare label."""
    rng = np.random.default_rng(1)
    rows = [{**JOBS[name][1](i, rng), "w": w} for i, w in enumerate(weights_of_rows(count, empty))]
    if "label" in rows[0]:
        rows = [{**row, "label": {"blue": "red"}.get(row["label"], row["label"])} for row in rows]
        rows[RARE % count]["label"] = "blue"
    return rows


@pytest.fixture(scope="module")
def weighed(place):
    """The rows of two jobs, each a file with weights."""
    for name in ("classes", "tags", "causal LM, row by row", "masked LM", "translations"):
        write_rows(place / f"{name}.weighed.jsonl", rows_of(name, COUNT, EMPTY))
        write_rows(place / f"{name}.checked.jsonl", rows_of(name, 20))
    return place


def config_of(place, output, name, **more):
    files = {
        "dataset_name": str(place / f"{name}.weighed.jsonl"),
        "validation_file": str(place / f"{name}.checked.jsonl"),
        "test_file": None,
    }
    return job_config(place, output, name, **{**files, "still": True, **more})


def balanced(name, rows):
    """Label -> weight, by scikit-learn."""
    found = [[row["label"]] if "label" in row else row["tags"] for row in rows]
    flat = [label for labels in found for label in labels]
    labels = sorted(set(flat))
    weights = compute_class_weight("balanced", classes=np.array(labels), y=flat)
    return dict(zip(labels, weights.tolist(), strict=True))


class Weighted:
    """A run as `hf_ga.finetune` builds it, and its loss by hand."""

    def __init__(self, place, name, **flags):
        self.accelerator = Accelerator(cpu=True)
        config = config_of(
            place, place / "unused", name, per_device_train_batch_size=WINDOW, **flags
        )
        self.rows = rows_of(name, COUNT, EMPTY)
        self.run = build_run(prepare_setup(config, self.accelerator))
        self.class_weights = (
            list(balanced(name, self.rows).values()) if flags.get("class_weights") else None
        )
        self.smoothing = config.label_smoothing_factor
        self.windows = {layout: self.windows_of(sizes) for layout, sizes in LAYOUTS.items()}

    def windows_of(self, sizes):
        planner = partial(plan_by_sizes, sizes=sizes)
        self.run.windows.splitter = replace(self.run.windows.splitter, planner=planner)
        self.run.windows.set_epoch(0)
        return list(self.run.windows)

    def gradient(self, layout, which):
        run = self.run
        run.model.zero_grad()
        loss_fn = chosen_loss_fn(run)
        window = self.windows[layout][which]
        result = backward_window(self.accelerator, run.model, window, loss_fn=loss_fn)
        return result, h.gradients(run.model)

    def by_hand(self, which, dtype=torch.float64, is_weighted=True):
        """Loss and gradient of a window as one batch."""
        (micro_batch,) = self.windows["16x1"][which].micro_batches
        model = copy.deepcopy(self.run.model)
        if hasattr(model, "_original_forward"):
            del model.forward, model._original_forward
        model = model.to(dtype).train()
        model.zero_grad()
        batch = {k: v for k, v in micro_batch.batch.items() if k != "row_weights"}
        of_rows = [self.rows[i]["w"] if is_weighted else 1.0 for i in micro_batch.sample_ids]
        of_classes = self.class_weights if is_weighted else None
        loss = mean_by_hand(model, batch, of_rows, of_classes)
        loss.backward()
        return loss.item(), h.gradients(model)


def mean_by_hand(model, batch, of_rows, of_classes):
    """Sum of weights x negative log-likelihoods / sum of weights, one target after the other."""
    logits = model(**batch).logits
    labels = batch["labels"]
    if "GPT2" in type(model).__name__:
        logits = logits[:, :-1]
        labels = labels[:, 1:]
    log_p = logits.log_softmax(-1)
    total = weight = 0.0
    for row, of_row in enumerate(of_rows):
        for place, label in enumerate(labels[row].reshape(-1).tolist()):
            if label != h.IGNORED:
                w = of_row * (of_classes[label] if of_classes else 1.0)
                total = total - w * log_p[row].reshape(-1, log_p.shape[-1])[place, label]
                weight = weight + w
    return total / weight


CASES = {
    "both": ("classes", {**WEIGHED, "class_weights": "balanced"}),
    "classes alone": ("classes", {"class_weights": "balanced"}),
    "tags": ("tags", {**WEIGHED, "class_weights": ["balanced"]}),
    "causal": ("causal LM, row by row", WEIGHED),
    "masked": ("masked LM", WEIGHED),
    "translations": ("translations", {**WEIGHED, "predict_with_generate": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_split_is_the_weighted_mean_of_the_batch(case, weighed):
    name, flags = CASES[case]
    this = Weighted(weighed, name, **flags)
    if not this.run.config.weight_column:
        this.rows = [{**row, "w": 1.0} for row in this.rows]
    ids = [m.sample_ids for window in this.windows["16x1"] for m in window.micro_batches]
    which = next(i for i, of_window in enumerate(ids) if RARE in of_window)
    loss64, grads64 = this.by_hand(which)
    _, full = this.by_hand(which, torch.float32)
    for layout in LAYOUTS:
        result, grads = this.gradient(layout, which)
        h.assert_promise_1(grads, full, grads64)
        assert result.loss == pytest.approx(loss64, rel=2e-6)
    _, plain = this.by_hand(which, is_weighted=False)
    assert h.relative_error(plain, grads64) > 1e-2, "control: without weights"


def eval_loss_by_hand(output, place, name, of_classes):
    """Of the saved model, one row at a time."""
    rows = rows_of(name, 20)
    model = tf.AutoModelForSequenceClassification.from_pretrained(output).double().eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(output)
    total = weight = 0.0
    for row in rows:
        with torch.no_grad():
            logits = model(**tokenizer(row["text"], return_tensors="pt")).logits
        w = row["w"] * of_classes[row["label"]]
        total -= w * float(logits.log_softmax(-1)[0, model.config.label2id[row["label"]]])
        weight += w
    return total / weight, weight


@pytest.fixture(scope="module")
def finished(weighed):
    """A run with everything, of which the second window has weight 0."""
    config = config_of(
        weighed,
        weighed / "done",
        "classes",
        class_weights="balanced",
        **WEIGHED,
        save_total_limit=9,
    )
    return hf_ga.finetune(config), weighed / "done"


def test_a_run(finished, weighed):
    summary, output = finished
    expected = balanced("classes", rows_of("classes", COUNT, EMPTY))
    assert summary["class_weights"] == pytest.approx(expected)
    assert expected["blue"] > 30
    assert list(summary["class_weights"]) == summary["labels"] == ["blue", "green", "red"]
    loss, weight = eval_loss_by_hand(output, weighed, "classes", expected)
    last = lines_of(output)[-1]
    assert summary["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert last["eval_num_targets"] == pytest.approx(weight, rel=1e-6)
    ones = dict.fromkeys(expected, 1.0)
    plain, _ = eval_loss_by_hand(output, weighed, "classes", ones)
    assert summary["eval_loss"] != pytest.approx(plain, rel=1e-3), "control: without weights"
    skipped = [line["skipped"] for line in lines_of(output)]
    assert skipped == [False, True] + [False] * 7
    assert all(line["skipped"] or np.isfinite(line["loss"]) for line in lines_of(output))


def test_eval_only_reports_the_loss_of_the_run(finished, weighed, tmp_path):
    summary, output = finished
    config = config_of(
        weighed,
        tmp_path,
        "classes",
        still=False,
        model_name_or_path=str(output),
        class_weights=list(summary["class_weights"].values()),
        eval_only=True,
        **WEIGHED,
    )
    found = hf_ga.finetune(config)
    assert found["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-6)
    assert found["class_weights"] == summary["class_weights"]


def test_another_weight_is_another_run(finished, weighed, tmp_path):
    _, output = finished
    resumed = {"resume_from_checkpoint": str(output / "checkpoint-3"), **WEIGHED}
    again = config_of(weighed, tmp_path / "a", "classes", class_weights="balanced", **resumed)
    assert hf_ga.finetune(again)["weights_sha256"] == finished[0]["weights_sha256"]
    numbers = config_of(weighed, tmp_path / "b", "classes", class_weights=[1, 2, 3], **resumed)
    with pytest.raises(
        hf_ga.CheckpointError, match=r"class_weights 'balanced' -> \[1.0, 2.0, 3.0\]"
    ):
        hf_ga.finetune(numbers)
    other = [{**row, "w": row["w"] + 1} for row in rows_of("classes", COUNT, EMPTY)]
    changed = config_of(
        weighed,
        tmp_path / "c",
        "classes",
        class_weights="balanced",
        **resumed,
    )
    (tmp_path / "other").mkdir()
    changed.dataset_name = write_rows(tmp_path / "other" / "classes.weighed.jsonl", other)
    with pytest.raises(hf_ga.CheckpointError, match="other settings: data"):
        hf_ga.finetune(changed)


def test_a_stream_has_the_same_weights(weighed, tmp_path):
    """In the order of the rows, without dropout: the first window is the first 16 rows."""
    name = "causal LM, row by row"
    config = config_of(
        weighed, tmp_path, name, streaming=True, shuffle_buffer_size=0, max_steps=1, **WEIGHED
    )
    hf_ga.finetune(config)
    model = tf.AutoModelForCausalLM.from_pretrained(config.model_name_or_path).double()
    tokenizer = tf.AutoTokenizer.from_pretrained(config.model_name_or_path)
    total = weight = plain = 0.0
    for row in rows_of(name, COUNT, EMPTY)[:WINDOW]:
        ids = torch.tensor([[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]])
        loss = model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        total = total + row["w"] * loss
        weight = weight + row["w"] * (ids.shape[1] - 1)
        plain += loss
    (line,) = lines_of(tmp_path)
    assert line["loss"] == pytest.approx(total / weight, rel=1e-5)
    assert line["num_targets"] == weight != plain


def test_the_loss_is_tried_on_rows_with_a_weight(weighed):
    data = prepare_setup(
        config_of(weighed, weighed / "unused", "classes", **WEIGHED), Accelerator()
    )
    weights = [sample["weight"] for sample in samples_to_try(data.data)]
    assert len(weights) > 1
    assert min(weights) > 0 == min(data.data.splits["train"]["weight"])


def test_most_rows_may_have_weight_0(weighed, tmp_path):
    """The loss is tried on rows that weigh something."""
    rows = rows_of("classes", COUNT)
    rows = [{**row, "w": 1.0 if i in (10, 50, 91) else 0.0} for i, row in enumerate(rows)]
    config = config_of(weighed, tmp_path / "out", "classes", max_steps=1, **WEIGHED)
    config.dataset_name = write_rows(tmp_path / "few.jsonl", rows)
    assert hf_ga.finetune(config)["steps"] == 1


def test_the_same_bits(weighed, tmp_path):
    """Weights that are no whole numbers, in a run with everything that weighs."""
    flags = {
        **WEIGHED,
        "class_weights": "balanced",
        "label_smoothing_factor": 0.1,
        "same_bits": 4,
        "max_steps": 3,
    }
    found = [
        hf_ga.finetune(
            config_of(
                weighed,
                tmp_path / str(size),
                "tags",
                per_device_train_batch_size=size,
                global_batch_size=WINDOW,
                **flags,
            )
        )
        for size in (8, 4)
    ]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


@pytest.mark.slow("starts two processes")
def test_two_processes(weighed, tmp_path):
    """The same bits; only one of them has the rare class."""
    flags = {**WEIGHED, "class_weights": "balanced", "same_bits": 4, "global_batch_size": WINDOW}

    def run(output):
        config = config_of(weighed, output, "classes", per_device_train_batch_size=4, **flags)
        summary = hf_ga.finetune(config)
        return summary["layout"], summary["weights_sha256"], summary["eval_loss"]

    layout, *of_one = run(tmp_path / "one")
    for layout_of_two, *of_two in without_errors(on_two_ranks(lambda: run(tmp_path / "two"))):
        assert layout_of_two != layout
        assert of_two == of_one


def test_flags_and_files_give_numbers(tmp_path):
    assert parse_config(["--class_weights", "1", "20"]).class_weights == [1.0, 20.0]
    assert parse_config(["--class_weights", "balanced"]).class_weights == "balanced"
    path = tmp_path / "run.yaml"
    path.write_text("class_weights: [1, 20]\n")
    assert parse_config([str(path)]).class_weights == [1.0, 20.0]
    path.write_text("class_weights: balanced\n")
    assert parse_config([str(path)]).class_weights == "balanced"


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (-1.0, r"1 of 20 train rows have -1.0 .first: row 3, counted from 0"),
        (float("nan"), "20 train rows have nan"),
        (None, "20 train rows have None"),
        (1e39, "20 train rows have 1e.39"),
    ],
)
def test_weights_that_are_none(weight, message, place, tmp_path):
    rows = rows_of("classes", 20)
    rows[3]["w"] = weight
    data = write_rows(tmp_path / "bad.jsonl", rows)
    config = config_of(place, tmp_path / "out", "classes", **WEIGHED)
    config.dataset_name = data
    with pytest.raises(hf_ga.DataError, match=message):
        hf_ga.finetune(config)


def test_a_streamed_weight_that_is_none(place, tmp_path, monkeypatch):
    """Behind the rows that are read ahead."""
    monkeypatch.setattr(sources, "NUM_READ_AHEAD", 10)
    name = "causal LM, row by row"
    rows = rows_of(name, 20)
    config = config_of(place, tmp_path / "out", name, streaming=True, **WEIGHED)
    config.validation_file = write_rows(tmp_path / "good.jsonl", rows)
    rows[15]["w"] = -2.0
    config.dataset_name = write_rows(tmp_path / "bad.jsonl", rows)
    with pytest.raises(hf_ga.DataError, match=r"1 of 20 streamed rows have -2.0"):
        hf_ga.finetune(config)


def test_rows_that_cannot_be_weighed(place, tmp_path):
    rows = rows_of("classes", 20)
    config = config_of(place, tmp_path / "out", "classes", **WEIGHED)
    config.validation_file = write_rows(tmp_path / "good.jsonl", rows)
    config.dataset_name = write_rows(tmp_path / "zero.jsonl", [{**row, "w": 0} for row in rows])
    with pytest.raises(hf_ga.DataError, match="weight_column is 0 in all 20 train rows"):
        hf_ga.finetune(config)
    config = config_of(place, tmp_path / "out", "classes", class_weights=[1, 2])
    config.dataset_name = config.validation_file = str(tmp_path / "good.jsonl")
    with pytest.raises(hf_ga.ConfigError, match=r"2 numbers for 3 labels.*order: blue, green, red"):
        hf_ga.finetune(config)
