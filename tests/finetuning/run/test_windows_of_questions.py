"""Question answering over windows of long contexts: metrics and predictions are those of questions,
computed here with plain transformers, window by window; the update does not depend on the split.
"""

import json

import numpy as np
import pytest
import torch
import transformers as tf
from accelerate.state import AcceleratorState
from forked import on_two_ranks, without_errors
from runs import learn_job, relative_distance, train_job, write_rows

import hf_ga
from hf_ga.finetuning.data.data import prepare_data
from hf_ga.finetuning.data.encoding.spans import Span
from hf_ga.finetuning.run.scores.readers import answer_metrics
from hf_ga.order.plan import plan_by_sizes

JOB = "answers"
LONGEST = 10
STRIDE = 3
CUT = {"max_length": LONGEST, "doc_stride": STRIDE, "per_device_eval_batch_size": 3}


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(place):
    """A model that has learnt some answers, with its evaluation at the end and predictions."""
    AcceleratorState._reset_state(True)  # the precision of an earlier test would be that of the run
    rows = rows_of(place / f"{JOB}.validation.jsonl")
    asked = [{"question": row["question"], "context": row["context"]} for row in rows]
    asked.insert(2, {"question": "position", "context": ""})
    file = write_rows(place / "asked.jsonl", asked)
    more = {"max_steps": 30, "eval_steps": 30, "save_steps": 30, "predict_file": file}
    learn_job(place, place / "learnt", JOB, **CUT, **more)
    return place / "learnt"


def by_hand(model_folder, row):
    """The answer to one row: its windows one at a time, all of their spans in loops."""
    tokenizer = tf.AutoTokenizer.from_pretrained(model_folder)
    model = tf.AutoModelForQuestionAnswering.from_pretrained(model_folder).eval()
    encoded = tokenizer(
        row["question"],
        row["context"],
        truncation="only_second",
        max_length=LONGEST,
        stride=STRIDE,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    best = (-np.inf, "")
    none = np.inf
    for i, ids in enumerate(encoded["input_ids"]):
        with torch.no_grad():
            found = model(torch.tensor([ids]))
        start = found.start_logits[0].tolist()
        end = found.end_logits[0].tolist()
        none = min(none, start[0] + end[0])
        places = [k for k, part in enumerate(encoded.sequence_ids(i)) if part == 1]
        characters = encoded["offset_mapping"][i]
        for j in places:
            for k in places:
                text = row["context"][characters[j][0] : characters[k][1]].strip()
                if j <= k and start[j] + end[k] > best[0]:
                    best = (start[j] + end[k], text)
    return ("" if none > best[0] else best[1]), len(encoded["input_ids"])


def test_metrics_and_predictions_by_hand(model, place):
    rows = rows_of(place / f"{JOB}.validation.jsonl")
    answers, windows = zip(*(by_hand(model, row) for row in rows), strict=True)
    assert max(windows) >= 2
    assert sum(windows) > len(rows)
    right = [
        answer == (row["answers"]["text"] or [""])[0]
        for answer, row in zip(answers, rows, strict=True)
    ]
    assert 0 < np.mean(right) < 1 or len(set(answers)) > 2  # the control: answers differ
    summary = json.loads((model / "summary.json").read_text())
    assert summary["eval_exact_match"] == np.mean(right)  # of questions
    assert np.mean(right) != pytest.approx(np.average(right, weights=windows))  # of windows
    assert summary["eval_num_targets"] == 2 * sum(windows)  # starts and ends of samples
    found = [row["prediction"] for row in rows_of(model / "predictions.jsonl")]
    assert found.pop(2) is None
    assert [prediction["answer"] for prediction in found] == list(answers)
    for prediction, row in zip(found, rows, strict=True):
        text = row["context"][prediction["start"] : prediction["end"]]
        assert text == prediction["answer"]


def config_of(place, model, output):
    return hf_ga.FinetuneConfig(
        task="question-answering",
        eval_only=True,
        model_name_or_path=str(model),
        validation_file=str(place / f"{JOB}.validation.jsonl"),
        predict_file=str(place / "asked.jsonl"),
        output_dir=str(output),
        **CUT,
    )


@pytest.mark.slow("starts two processes")
def test_windows_of_a_question_on_two_ranks(model, place, tmp_path):
    """Each rank has some windows of a question; both give the answers and metrics of one."""
    config = config_of(place, model, tmp_path / "one")
    tokenizer = tf.AutoTokenizer.from_pretrained(model)
    samples = prepare_data(config, tokenizer).splits["validation"]
    question_of = np.cumsum(np.array(samples["window_index"][:]) == 0)
    first, second = plan_by_sizes(np.array(samples["length"][:]), 2, [3])
    shares = [set(question_of[np.concatenate(share)]) for share in (first, second)]
    assert shares[0] & shares[1]  # questions of both ranks
    alone = hf_ga.finetune(config)

    def work():
        return hf_ga.finetune(config_of(place, model, tmp_path / "two"))

    measured = {name for name in alone if name.startswith("eval_")}
    for results in without_errors(on_two_ranks(work)):
        assert {name: results[name] for name in measured} == {
            name: pytest.approx(alone[name], rel=1e-6) for name in measured
        }
    files = [rows_of(tmp_path / name / "predictions.jsonl") for name in ("one", "two")]
    assert files[0] == files[1] == rows_of(model / "predictions.jsonl")


def test_mean_over_questions_not_windows():
    """A question of three windows answered rightly and one of one window answered wrongly."""

    def span(answer, score):
        return Span(answer, 0, len(answer), score, 0.0, score)

    spans = [span("red", 5.0), span("blue", 4.0), span("green", 3.0), span("red", 1.0)]
    references = [["red"]] * 3 + [["the green sea"]]
    found = answer_metrics([0, 1, 2, 0], references, spans)
    assert found == {"exact_match": 0.5, "f1": 0.5}
    other = answer_metrics([0, 0, 0, 0], references, spans)  # the control: four questions
    assert other["exact_match"] == 0.25


@pytest.mark.slow("runs in several layouts")
def test_the_update_does_not_depend_on_the_split(place):
    """Windows are samples: micro-batches of 8 or of 3 of a window train the same model."""
    settings = {"doc_stride": STRIDE, "max_length": LONGEST, "max_steps": 2, "eval_steps": 2}
    for name, size in (("eights", 8), ("threes", 3)):
        train_job(place, place / name, JOB, per_device_train_batch_size=size, **settings)
    distance = relative_distance(place / "threes", place / "eights")
    assert distance <= 5e-5
    train_job(place, place / "cut", JOB, **{**settings, "doc_stride": None})
    assert relative_distance(place / "cut", place / "eights") > 10 * distance  # the control
