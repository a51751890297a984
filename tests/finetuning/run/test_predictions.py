"""Predictions and evaluations of trained models, against plain transformers: one row at a time,
without padding, by hand.
"""

import json

import pytest
import torch
import transformers as tf
from runs import JOBS, learn_job, train_job, write_rows

import hf_ga
from hf_ga.finetuning.data.tasks import TASKS

LONG = (
    "step every split gives same update while dropout stays keyed by position and one step every "
    "split gives same step and one of"
)
TEXTS = [
    "the samples",
    "",
    "window of",
    LONG,
    "größer 東京 🙂",
    None,
    "of one step and every split",
]
LENGTH = 24
# What is asked of each job: the column(s) of a text. Labels are not there; `note` is handed on.
# Texts: test_generation.py.
COLUMNS = {
    "classes": lambda text: {"text": text},
    "pairs": lambda text: {"sentence1": text, "sentence2": text and f"window {text}"},
    "numbers": lambda text: {"text": text},
    "label sets": lambda text: {"text": text},
    "tags": lambda text: {"tokens": None if text is None else text.split()},
    "answers": lambda text: {"question": "position", "context": text},
    "choices": lambda text: {"question": text, "choices": ["step red", "every", f"is {text}"]},
}


def rows_to_predict(name):
    return [{"note": f"é{i}", **COLUMNS[name](text)} for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def trained(place):
    """Each job's run once, with predictions at its end; classifiers hardly trained, so that nothing
    is obvious.
    """
    known = {}

    def run(name):
        if name not in known:
            output = place / "out" / name
            file = write_rows(place / f"{name}.predict.jsonl", rows_to_predict(name))
            more = {"predict_file": file, "per_device_eval_batch_size": 3, "max_length": LENGTH}
            if "task" in JOBS[name][2]:
                more |= {"max_steps": 4, "learning_rate": 1e-2}
            known[name] = learn_job(place, output, name, **more), output
        return known[name]

    return run


def read(folder):
    return [
        json.loads(line)
        for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    ]


class ByHand:
    """Plain transformers on one row; its pipeline where it has one that cuts as we do."""

    def __init__(self, name, folder):
        self.name = name
        task = TASKS[JOBS[name][2]["task"]]
        self.tokenizer = tf.AutoTokenizer.from_pretrained(folder)
        self.model = task.auto_class.from_pretrained(folder).eval()
        if task.pipeline == "text-classification":
            self.pipeline = tf.pipeline(
                task.pipeline, model=self.model, tokenizer=self.tokenizer, device="cpu"
            )

    @torch.no_grad()
    def answer(self, row):
        """Of all spans of the context, and of <cls> for none, that with the largest sum of
        logits.
        """
        encoded = self.tokenizer(
            row["question"],
            row["context"],
            truncation="only_second",
            max_length=LENGTH,
            return_tensors="pt",
        )
        outputs = self.model(**{k: encoded[k] for k in ("input_ids", "attention_mask")})
        begin = outputs.start_logits[0]
        end = outputs.end_logits[0]
        places = [i for i, part in enumerate(encoded.sequence_ids()) if part == 1]
        sums = {(i, j): float(begin[i] + end[j]) for i in places for j in places if i <= j}
        sums[0, 0] = float(begin[0] + end[0])
        i, j = max(sums, key=sums.get)
        score = float(torch.tensor(list(sums.values())).softmax(0).max())
        if i == 0:
            return {"answer": "", "score": pytest.approx(score, abs=2e-6), "start": 0, "end": 0}
        start = encoded.token_to_chars(i).start
        stop = encoded.token_to_chars(j).end
        start += row["context"][start] == " "
        text = row["context"][start:stop]
        return {
            "answer": text,
            "score": pytest.approx(score, abs=2e-6),
            "start": start,
            "end": stop,
        }

    @torch.no_grad()
    def choice(self, row):
        logits = []
        for text in row["choices"]:
            encoded = self.tokenizer(
                row["question"], text, truncation=True, max_length=LENGTH, return_tensors="pt"
            )
            inputs = {k: encoded[k].unsqueeze(0) for k in ("input_ids", "attention_mask")}
            logits.append(self.model(**inputs).logits.flatten())
        probabilities = torch.cat(logits).softmax(-1)
        return {
            "choice": int(probabilities.argmax()),
            "score": pytest.approx(float(probabilities.max()), abs=2e-6),
        }

    @torch.no_grad()
    def tags(self, row):
        """Of each word that of its first piece."""
        cut = {"truncation": True, "max_length": LENGTH}
        encoded = self.tokenizer(
            row["tokens"], is_split_into_words=True, return_tensors="pt", **cut
        )
        best = self.model(input_ids=encoded["input_ids"]).logits[0].argmax(-1)
        tags = [None] * len(row["tokens"])
        for piece, word in reversed(list(enumerate(encoded.word_ids()))):
            if word is not None:
                tags[word] = self.model.config.id2label[int(best[piece])]
        return {"tags": tags}

    def prediction(self, row):
        own = {"answers": self.answer, "choices": self.choice, "tags": self.tags}
        if self.name in own:
            return own[self.name](row)
        texts = (
            {"text": row["sentence1"], "text_pair": row["sentence2"]}
            if self.name == "pairs"
            else row["text"]
        )
        found = self.pipeline(texts, top_k=None, truncation=True, max_length=LENGTH)
        if self.name == "numbers":
            return {"value": pytest.approx(found[0]["score"], rel=1e-4, abs=1e-6)}
        if self.name == "label sets":
            scores = {score["label"]: score["score"] for score in found}
            labels = [name for name in self.model.config.id2label.values() if scores[name] > 0.5]
            return {"labels": labels, "scores": pytest.approx(scores, abs=2e-6)}
        return {"label": found[0]["label"], "score": pytest.approx(found[0]["score"], abs=2e-6)}


OTHERS = ("pairs", "label sets", "choices", "causal LM, blocks", "masked LM")
SLOW = pytest.mark.slow("a run and predictions of other heads")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW if n in OTHERS else []) for n in COLUMNS]
)
def test_predictions_are_those_of_one_row_at_a_time(name, trained):
    _, output = trained(name)
    by_hand = ByHand(name, output)
    rows = rows_to_predict(name)
    found = read(output)
    assert [{k: v for k, v in row.items() if k != "prediction"} for row in found] == rows
    expected = [
        by_hand.prediction(row) if text else None for row, text in zip(rows, TEXTS, strict=True)
    ]
    assert [row["prediction"] for row in found] == expected
    assert [
        row["prediction"] for row in found[::-1]
    ] != expected  # the control: they are told apart
    assert "größer" in (output / "predictions.jsonl").read_text(encoding="utf-8")


def test_a_file_without_rows_to_predict_from(place, trained, tmp_path):
    """All texts empty: every row has None."""
    file = write_rows(tmp_path / "rows.jsonl", [{"text": ""}, {"text": ""}])
    evaluate(place, tmp_path / "out", "classes", trained("classes")[1], predict_file=file)
    assert read(tmp_path / "out") == [{"text": "", "prediction": None}] * 2


def content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def evaluate(place, output, name, model, **more):
    return train_job(
        place,
        output,
        name,
        eval_only=True,
        model_name_or_path=str(model),
        **{"max_length": LENGTH, **more},
    )


@pytest.mark.parametrize(
    "name", ["classes", "answers", *(pytest.param(name, marks=SLOW) for name in OTHERS)]
)
def test_eval_only_gives_the_numbers_of_the_end_of_training(name, place, trained, tmp_path):
    if name in COLUMNS:
        summary, output = trained(name)
    else:
        output = tmp_path / "run"
        summary = train_job(place, output, name, max_steps=3)
    before = content(output)
    results = evaluate(place, output, name, output, per_device_eval_batch_size=5)
    assert json.loads((output / "evaluation.json").read_text()) == results
    measured = {k: v for k, v in results.items() if k.startswith(("eval_", "test_"))}
    off = {
        k: 1e-4 if "pearson" in k else 1e-6 for k in measured
    }  # hardly trained predictions hardly vary
    assert len(measured) >= 6
    assert measured == {k: pytest.approx(summary[k], rel=1e-5, abs=off[k]) for k in measured}
    assert content(output) == before | {
        output / "evaluation.json": (output / "evaluation.json").read_bytes()
    }


@pytest.mark.parametrize("name", ["classes", "answers"])
def test_a_head_that_was_not_trained_is_not_evaluated(name, place, tmp_path):
    with pytest.raises(
        hf_ga.ConfigError,
        match=r"eval_only: .*job-bert has no trained head for .*(classifier|qa_outputs).bias.* "
        r"Train it first",
    ):
        evaluate(place, tmp_path / "out", name, place / "job-bert")
    assert not (tmp_path / "out").exists()


def test_labels_keep_the_order_of_the_trained_head(place, trained, tmp_path):
    """A file with two of the three labels, whose own order would be another one."""
    _, output = trained("classes")
    rows = [
        {"text": f"{word} {'step ' * i}", "label": label}
        for i in range(5)
        for word, label in (("the", "red"), ("window", "green"))
    ]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    results = evaluate(
        place,
        tmp_path / "out",
        "classes",
        output,
        validation_file=file,
        test_file=None,
        predict_file=file,
    )
    by_hand = ByHand("classes", output)
    hits = [by_hand.prediction(row)["label"] == row["label"] for row in rows]
    assert results["eval_accuracy"] == sum(hits) / len(hits)
    assert [row["prediction"]["label"] for row in read(tmp_path / "out")] == [
        by_hand.prediction(row)["label"] for row in rows
    ]


def test_labels_that_the_head_does_not_know(place, trained, tmp_path):
    """As many as it has, so they would fit, and silently be taken for others."""
    _, output = trained("classes")
    rows = [{"text": "some words", "label": label} for label in ("green", "red", "violet")]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        hf_ga.DataError,
        match=r"rows have the labels .*violet.* was trained on blue, green, red\. Use its names",
    ):
        evaluate(
            place,
            tmp_path / "out",
            "classes",
            output,
            dataset_name=file,
            validation_file=file,
            test_file=None,
        )


def test_predictions_alone_of_a_head_without_names(place, trained, tmp_path):
    """No dataset is read; the labels are those of the trained head."""
    _, output = trained("classes")
    model = tf.AutoModelForSequenceClassification.from_pretrained(output)
    model.config.id2label = {i: f"LABEL_{i}" for i in range(3)}
    model.config.label2id = {name: i for i, name in model.config.id2label.items()}
    model.save_pretrained(tmp_path / "model")
    tf.AutoTokenizer.from_pretrained(output).save_pretrained(tmp_path / "model")
    alone = {"dataset_name": "stdlib", "validation_file": None, "test_file": None}
    evaluate(
        place,
        tmp_path / "out",
        "classes",
        tmp_path / "model",
        predict_file=str(place / "classes.predict.jsonl"),
        **alone,
    )
    number = {"blue": "LABEL_0", "green": "LABEL_1", "red": "LABEL_2"}
    labels = [row["prediction"] and row["prediction"]["label"] for row in read(tmp_path / "out")]
    assert labels == [
        row["prediction"] and number[row["prediction"]["label"]] for row in read(output)
    ]
