"""`on_evaluate` and `compute_metrics` of `finetune`, against Trainer's own evaluation of the saved
model.
"""

import numpy as np
import pytest
import transformers as tf
from runs import job_config, small_config

import hf_ga
from hf_ga.finetuning.data.data import prepare_data
from hf_ga.finetuning.run.model.models import load_tokenizer

HEADS = {
    "tags": tf.AutoModelForTokenClassification,
    "answers": tf.AutoModelForQuestionAnswering,
    "translations": tf.AutoModelForSeq2SeqLM,
}


def predictions_of_trainer(config, name, compute_metrics):
    """In batches of 4, in the order of the data."""
    data = prepare_data(config, load_tokenizer(config))
    settings = {
        "output_dir": config.output_dir,
        "per_device_eval_batch_size": 4,
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = tf.Seq2SeqTrainingArguments(
        **settings, use_cpu=True, predict_with_generate=config.predict_with_generate
    )
    trainer = (tf.Seq2SeqTrainer if name == "translations" else tf.Trainer)(
        HEADS[name].from_pretrained(config.output_dir),
        arguments,
        data.collate,
        compute_metrics=compute_metrics,
    )
    more = {"max_new_tokens": 8, "num_beams": 1} if name == "translations" else {}
    return trainer.evaluate(data.samples("validation"), **more)


def real(prediction):
    """The entries that do not depend on the batches, that is, without the padding within them."""
    logits, labels = prediction
    if isinstance(labels, tuple):  # the logits of the first and the last token of the answer
        return [logits[i][np.arange(len(labels[i])), labels[i]] for i in (0, 1)]
    if logits.ndim > 2:
        return [logits[labels != -100]]
    return [row[row > 2] for ids in prediction for row in ids]  # without special tokens


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow("generates") if name == "translations" else [])
        for name in HEADS
    ],
)
def test_compute_metrics_gets_what_trainer_gives_it(name, place, tmp_path):
    """Ragged arrays in three batches by length, sorted by sample. The control: in another order
    they differ.
    """
    seen = []
    evaluations = []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {
            "rows": np.float32(sum(map(len, real(prediction)))),
            "eval_mine": 0.25,
            "loss": -1.0,
        }

    def on_evaluate(metrics, model):
        evaluations.append(metrics)
        assert not model.training

    steps = {
        "max_steps": 2,
        "eval_steps": 2,
        "learning_rate": 1e-2,
        "per_device_eval_batch_size": 5,
    }
    config = job_config(place, tmp_path / "out", name, **steps, metric_for_best_model="mine")
    summary = hf_ga.finetune(config, on_evaluate=on_evaluate, compute_metrics=compute_metrics)
    ours = seen[1]  # that before the first step found `mine`
    expected = predictions_of_trainer(config, name, compute_metrics)
    theirs = seen[-1]
    for one, other in zip(real(ours), real(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    if name != "translations":  # Seq2SeqTrainer pads in another way
        assert np.array_equal(ours.label_ids, theirs.label_ids)
        assert not np.allclose(real(ours)[0], real(theirs)[0][::-1], rtol=1e-2)
    assert [summary[k] for k in ("eval_rows", "eval_mine")] == [
        expected[k] for k in ("eval_rows", "eval_mine")
    ]
    assert summary["eval_loss"] > 0  # not the user's
    assert summary["best_eval_mine"] == summary["eval_mine"] == summary["test_mine"] == 0.25
    assert "eval_accuracy" not in summary
    assert [next(iter(metrics)) for metrics in evaluations] == [
        "eval_loss",
        "eval_loss",
        "test_loss",
    ]
    assert evaluations[-1]["test_rows"] == summary["test_rows"] == sum(map(len, real(seen[2])))


def test_a_language_model_keeps_only_what_it_compares(place, tmp_path):
    seen = []

    def argmax(logits, labels):
        assert logits.shape[:2] == labels.shape
        return logits.argmax(-1)

    def accuracy(prediction):
        seen.append(prediction)
        return {"accuracy": np.mean(prediction.predictions[:, :-1] == prediction.label_ids[:, 1:])}

    config = small_config(place, tmp_path / "out", max_steps=1, eval_steps=1)
    summary = hf_ga.finetune(config, compute_metrics=accuracy, preprocess_logits_for_metrics=argmax)
    assert seen[0].predictions.shape == seen[0].label_ids.shape
    assert summary["eval_perplexity"] > 1 > summary["eval_accuracy"]


def test_mistakes_are_found_before_the_first_step(place, tmp_path):
    config = job_config(place, tmp_path / "out", "classes", metric_for_best_model="f1")
    for made, message in (
        ({"F1": 1.0}, "unknown .* 'eval_f1': use one of .*eval_F1"),
        ({"f1": [1.0]}, "a dict of names and numbers"),
    ):
        with pytest.raises(hf_ga.ConfigError, match=message):
            hf_ga.finetune(config, compute_metrics=lambda prediction, made=made: made)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
