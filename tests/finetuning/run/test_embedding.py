"""`--task embedding`: windows against one float64 batch, metrics against loops and against
sentence-transformers, whole runs, and what is refused.
"""

import json
import math
from dataclasses import replace
from functools import partial

import helpers as h
import numpy as np
import pairs
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from forked import on_ranks, without_errors
from runs import (
    COLOURS,
    WORDS,
    lines_of,
    relative_distance,
    saved_weights,
    small_config,
    write_rows,
)

import hf_ga
from hf_ga.errors import ConfigError
from hf_ga.finetuning.run.build import build_run, evaluate_split, prepare_setup
from hf_ga.finetuning.run.scores.retrieval import retrieval_metrics, spearman
from hf_ga.order.plan import plan_by_sizes

pytestmark = pytest.mark.usefixtures("own_accelerator_state")


def words(rng, number):
    return rng.choice(WORDS[3:], number).tolist()


def retrieval_rows(count, seed):
    """The positive has two words of the anchor, in reverse, and its colour."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        kept = words(rng, 2)
        first = [list(COLOURS)[i % 3], *kept, *words(rng, rng.integers(0, 4))]
        second = [COLOURS[first[0]], *kept[::-1]]
        rows.append({"anchor": " ".join(first), "positive": " ".join(second)})
    return rows


def scored_rows(count, seed):
    """The score is how many words of the second text are the colours of the first's."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        first = rng.choice(list(COLOURS), 3)
        second = rng.choice(list(COLOURS.values()), 3)
        score = float(len({COLOURS[word] for word in first} & {*second}))
        rows.append({"sentence1": " ".join(first), "sentence2": " ".join(second), "score": score})
    return rows


@pytest.fixture(scope="module")
def rows(place):
    """Folder with rows of both kinds, beside the models."""
    for name, make in (("retrieval", retrieval_rows), ("scored", scored_rows)):
        for seed, (split, count) in enumerate({"train": 60, "validation": 40}.items()):
            write_rows(place / f"{name}.{split}.jsonl", make(count, seed))
    return place


def config(place, output, kind="retrieval", still=True, **more):
    settings = {
        "task": "embedding",
        "model_name_or_path": str(place / f"job-bert{'-still' * still}"),
        "dataset_name": str(place / f"{kind}.train.jsonl"),
        "validation_file": str(place / f"{kind}.validation.jsonl"),
        "text_column": None,
        "learning_rate": 1e-3,
    }
    return small_config(place, output, **{**settings, **more})


# -- windows


def gradient(place, sizes, **more):
    """Gradient and loss of the first window, in micro-batches of these sizes; the run, the window."""
    accelerator = Accelerator(cpu=True)
    run = build_run(prepare_setup(config(place, place / "unused", **more), accelerator))
    planner = partial(plan_by_sizes, sizes=sizes)
    run.windows.splitter = replace(run.windows.splitter, planner=planner)
    window = next(iter(run.windows))
    result = hf_ga.backward_window(accelerator, run.model, window)
    return h.gradients(run.model), float(result.loss), run, window


def both_directions(model):
    """The loss by a matrix of similarities: InfoNCE with a learned temperature, symmetric."""

    def loss(outputs, batch):
        anchors, positives = (F.normalize(outputs[name], dim=-1) for name in ("anchor", "positive"))
        similarities = anchors @ positives.T / outputs["log_temperature"].exp()
        known = batch["text_id_anchor"][:, None] == batch["text_id_anchor"]
        known |= batch["text_id_positive"][:, None] == batch["text_id_positive"]
        similarities = similarities.masked_fill(known & ~torch.eye(len(known)).bool(), -math.inf)
        target = torch.arange(len(anchors))
        forth = F.cross_entropy(similarities, target)
        return (forth + F.cross_entropy(similarities.T, target)) / 2

    return loss


LEARNED = {"learn_temperature": True, "symmetric_loss": True}


@pytest.mark.parametrize("sizes", [[16], [7, 1, 5, 3], [1]], ids=str)
def test_a_window_is_one_batch_in_any_micro_batches(sizes, rows):
    """With dropout, against one float64 batch with the same masks; the temperature, too."""
    found, _, run, window = gradient(rows, sizes, still=False, **LEARNED)
    truth = pairs.full_batch_gradient(run.model, window, both_directions)
    assert h.relative_error(found, truth) < 2e-6
    assert truth["log_temperature"].abs() > 1e-3
    error = found["log_temperature"].double() - truth["log_temperature"]
    assert error.abs() < 2e-6 * h.norm(truth)


def test_control_negatives_of_micro_batches_only(rows):
    """The mean of the losses of micro-batches of 4 is another loss."""
    whole, _, run, window = gradient(rows, [4], **LEARNED)
    run.model.zero_grad()
    micro_batches = window.micro_batches
    for micro_batch in micro_batches:
        outputs = run.model(**micro_batch.batch)
        (both_directions(run.model)(outputs, micro_batch.batch) / len(micro_batches)).backward()
    assert h.relative_error(h.gradients(run.model), whole) > 0.1


def of_rank(place, sizes):
    _, _, run, window = gradient(place, sizes, still=False, **LEARNED)
    model = run.model.module
    truth = pairs.full_batch_gradient(model, window, both_directions)
    return h.gradients(model), truth, evaluate_split(run, run.model)


@pytest.mark.slow("starts processes")
def test_ranks(rows):
    """Gradients of 2 and 3 ranks, and their evaluations."""
    run = gradient(rows, [16], still=False, **LEARNED)[2]
    alone = evaluate_split(run, run.model)
    for ranks, sizes in ((2, [5]), (3, [7, 1, 5, 3])):
        for found, truth, evaluated in without_errors(
            on_ranks(partial(of_rank, rows, sizes), ranks)
        ):
            assert h.relative_error(found, truth) < 2e-6
            assert evaluated == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow("starts processes")
def test_runs_on_several_processes_are_that_on_one(rows, tmp_path):
    """Losses, metrics, the learned temperature and the saved model."""
    settings = {"max_steps": 3, "eval_steps": 3, "save_steps": 3, **LEARNED}
    alone = hf_ga.finetune(config(rows, tmp_path / "alone", still=False, **settings))
    for kind, processes in (("ddp", 3), ("fsdp2", 2)):
        output = tmp_path / kind
        together = config(rows, output, still=False, **settings)
        work = partial(hf_ga.finetune, together)
        found, *_ = without_errors(on_ranks(work, processes, kind, limit=200))
        for line, expected in zip(lines_of(output), lines_of(tmp_path / "alone"), strict=True):
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name in ("eval_loss", "eval_ndcg_at_10", "temperature"):
            assert found[name] == pytest.approx(alone[name], rel=1e-4)
        assert relative_distance(output, tmp_path / "alone") < 1e-4


# -- metrics


def ranked(query, documents):
    return sorted(range(len(documents)), key=lambda k: -float(query @ documents[k]))


def test_retrieval_by_hand():
    """Queries 0 and 3 are one text with two positives; document 6 is missing, 7 equals 1."""
    generator = torch.Generator().manual_seed(3)
    queries = F.normalize(torch.randn(4, 3, generator=generator), dim=-1)
    documents = F.normalize(torch.randn(40, 3, generator=generator), dim=-1)
    queries[3] = queries[0]
    documents[:3] = F.normalize(queries[:3] + 0.5 * documents[:3], dim=-1)
    documents[6] = queries[1]
    documents[7] = documents[1]
    query_ids = torch.tensor([5, 6, 7, 5])
    document_ids = torch.arange(100, 140)
    document_ids[6] = 0
    document_ids[7] = document_ids[1]
    kept = [k for k in range(40) if k not in (6, 7)]
    relevant = {0: {0, 3}, 1: {1}, 2: {2}}
    expected = dict.fromkeys(("recall_at_1", "recall_at_10", "mrr_at_10", "ndcg_at_10"), 0.0)
    for query, right in relevant.items():
        order = [kept[k] for k in ranked(queries[query], documents[kept])][:10]
        places = [place for place, k in enumerate(order, start=1) if k in right]
        best = sum(1 / math.log2(place + 1) for place in range(1, len(right) + 1))
        expected["recall_at_1"] += (order[0] in right) / len(right) / 3
        expected["recall_at_10"] += len(places) / len(right) / 3
        expected["mrr_at_10"] += (1 / places[0] if places else 0) / 3
        expected["ndcg_at_10"] += sum(1 / math.log2(place + 1) for place in places) / best / 3
    found = retrieval_metrics(queries, documents, query_ids, document_ids)
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0 < found["recall_at_10"] < 1
    apart = retrieval_metrics(queries, documents, torch.arange(1, 5), document_ids)
    assert apart != pytest.approx(expected, abs=1e-3)  # four queries with one positive each


def test_spearman_by_hand():
    """Pearson's correlation of ranks; equal scores have their mean rank."""
    angles = torch.tensor([0.1, 0.9, 0.5, 1.3, 0.2])
    first = torch.tensor([[1.0, 0.0]]).repeat(5, 1)
    second = torch.stack([angles.cos(), angles.sin()], dim=1)
    scores = torch.tensor([5.0, 2.0, 2.0, 1.0, 4.0])
    expected = np.corrcoef([5, 2, 3, 1, 4], [5, 2.5, 2.5, 1, 4])[0, 1]
    assert spearman(first, second, scores) == pytest.approx(expected, abs=1e-12)
    assert spearman(first, second, torch.ones(5)) == 0.0


# -- whole runs


def trained(place, output, kind="retrieval", **more):
    settings = {
        "max_steps": 40,
        "eval_steps": 40,
        "save_steps": 40,
        "learning_rate": 5e-3,
        "learn_temperature": kind == "retrieval",
        "matryoshka_dims": [32, 8],
    }
    return hf_ga.finetune(config(place, output, kind, **{**settings, **more}))


def evaluated(place, output, model, kind="retrieval"):
    settings = {"model_name_or_path": str(model), "eval_only": True, "max_steps": None}
    only_validation = {"dataset_name": str(place / f"{kind}.validation.jsonl")}
    return hf_ga.finetune(config(place, output, kind, **settings, **only_validation))


def texts_of(place, kind, *columns):
    lines = (place / f"{kind}.validation.jsonl").read_text().splitlines()
    return [[json.loads(line)[column] for line in lines] for column in columns]


def test_a_run_learns_and_sentence_transformers_measures_the_same(rows, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    before = evaluated(rows, tmp_path / "before", rows / "job-bert-still")
    summary = trained(rows, tmp_path / "run", pooling="cls")
    again = evaluated(rows, tmp_path / "again", tmp_path / "run")  # with the saved pooling
    assert again["eval_ndcg_at_10"] == pytest.approx(summary["eval_ndcg_at_10"], rel=1e-6)
    assert summary["eval_recall_at_1"] > before["eval_recall_at_1"] + 0.2
    assert summary["eval_ndcg_at_10"] > before["eval_ndcg_at_10"] + 0.2
    assert summary["temperature"] != pytest.approx(0.05, rel=1e-3)
    assert summary["eval_loss"] < lines_of(tmp_path / "run")[0]["loss"]
    model = package.SentenceTransformer(str(tmp_path / "run"), device="cpu")
    anchors, positives = texts_of(rows, "retrieval", "anchor", "positive")
    queries = {text: text for text in anchors}
    relevant = {text: set() for text in anchors}
    for anchor, positive in zip(anchors, positives, strict=True):
        relevant[anchor].add(positive)
    theirs = evaluation.InformationRetrievalEvaluator(
        queries, {text: text for text in positives}, relevant, write_csv=False
    )(model)
    names = ("recall@1", "recall@10", "mrr@10", "ndcg@10")
    for name in names:
        assert summary[f"eval_{name.replace('@', '_at_')}"] == pytest.approx(
            theirs[f"cosine_{name}"], abs=1e-6
        )


def test_scored_pairs(rows, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    before = evaluated(rows, tmp_path / "before", rows / "job-bert-still", "scored")
    summary = trained(rows, tmp_path / "run", "scored")
    assert summary["eval_spearman"] > before["eval_spearman"] + 0.1
    assert summary["temperature"] is None
    model = package.SentenceTransformer(str(tmp_path / "run"), device="cpu")
    columns = texts_of(rows, "scored", "sentence1", "sentence2", "score")
    theirs = evaluation.EmbeddingSimilarityEvaluator(*columns, write_csv=False)(model)
    assert summary["eval_spearman"] == pytest.approx(theirs["spearman_cosine"], abs=1e-6)


def test_evaluation_does_not_depend_on_the_batch_size(rows, tmp_path):
    results = []
    for size in (3, 64):
        run = build_run(
            prepare_setup(
                config(rows, tmp_path / "unused", per_device_eval_batch_size=size),
                Accelerator(cpu=True),
            )
        )
        results.append(evaluate_split(run, run.model))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_a_resumed_run_is_the_same_to_the_last_bit(rows, tmp_path):
    settings = {"max_steps": 4, "save_steps": 2, "eval_steps": 4, "learn_temperature": True}
    whole = hf_ga.finetune(config(rows, tmp_path / "run", still=False, **settings))
    first = saved_weights(tmp_path / "run")
    resumed = hf_ga.finetune(
        config(
            rows,
            tmp_path / "run",
            still=False,
            resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"),
            **settings,
        )
    )
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    again = saved_weights(tmp_path / "run")
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_own_metrics_get_all_vectors(rows, tmp_path):
    seen = []

    def compute_metrics(prediction):
        anchors, positives = prediction.predictions
        seen.append((anchors.shape, positives.shape, prediction.label_ids))
        return {"cosine": float((anchors * positives).sum(1).mean())}

    summary = hf_ga.finetune(
        config(rows, tmp_path / "run", max_steps=1, eval_steps=1),
        compute_metrics=compute_metrics,
    )
    assert seen == [((40, 32), (40, 32), None)]
    assert -1 < summary["eval_cosine"] < 1


# -- what is refused


def test_functions_for_logits_are_refused(rows, tmp_path):
    with pytest.raises(ConfigError, match="is for logits, but the task embedding has vectors"):
        hf_ga.finetune(
            config(rows, tmp_path / "run"),
            compute_metrics=lambda prediction: {},
            preprocess_logits_for_metrics=lambda logits, labels: logits,
        )


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("scored", {"learn_temperature": True}, "learn_temperature is for anchors with positives"),
        ("scored", {"symmetric_loss": True}, "symmetric_loss is for .* .the column 'score'."),
        (
            "scored",
            {"metric_for_best_model": "mrr_at_10"},
            "mrr_at_10 cannot be computed from pairs with a score: use loss or spearman",
        ),
        (
            "retrieval",
            {"metric_for_best_model": "spearman"},
            "spearman cannot be computed from anchors with positives: use loss or recall_at_1, ",
        ),
        ("retrieval", {"matryoshka_dims": [64]}, "matryoshka_dims 64 is beyond the 32 numbers"),
        ("retrieval", {"matryoshka_dims": [0]}, "matryoshka_dims must be at least 1, got 0"),
        ("retrieval", {"pooling": "max"}, "unknown pooling 'max': use one of mean, cls, lasttoken"),
        ("retrieval", {"temperature": 0.0}, "temperature must be greater than 0"),
        ("retrieval", {"lora_r": 2}, "lora_r applies to the task .*, not embedding"),
        ("retrieval", {"weight_column": "score"}, "weight_column applies to the task"),
        ("retrieval", {"predict_file": "x"}, "predict_file applies to the task"),
        ("retrieval", {"task": "causal-lm", "pooling": "cls"}, "pooling applies to the task embed"),
    ],
)
def test_flags_that_do_not_fit(kind, flags, message, rows, tmp_path):
    with pytest.raises(ConfigError, match=message):
        hf_ga.finetune(config(rows, tmp_path / "run", kind, **flags))
