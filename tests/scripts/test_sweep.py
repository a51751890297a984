"""The sweep over heads: the shrinking rule, the samples, the verdicts, and that one bad head costs
no other.
"""

import json
from types import SimpleNamespace

import pytest
import sweep_heads
import torch
from common import flat
from forked import FORK
from heads import one_head as sweep
from heads.one_head import TOLERANCE, Head, Verdict, all_heads, build_head, examine
from heads.small_samples import KINDS, PaddingCollator
from sweep_workers import send_strange_verdict

from hf_ga.check.gradients import relative_error, take_gradients

SIMPLE = ("gpt2", "bert", "mixtral", "t5", "vit")  # between them, heads of all kinds


@pytest.mark.slow("builds a model of each kind")
def test_samples_of_every_kind_have_a_loss():
    heads = {head.kind: head for head in all_heads() if head.model_type in SIMPLE}
    assert set(heads) == set(KINDS)
    for head in heads.values():
        model, samples, collate = build_head(head, 0.0)
        assert model(**collate(samples)).loss.isfinite(), head


def test_hf_ga_is_right_and_trainer_multiplies_a_bert_classifier_by_four():
    """The negative control: the same comparison fails Trainer, whose gradient is 4 times the true
    one. Dropout layouts agree.
    """
    classifier = Head("bert", "BertForSequenceClassification", "sequence classification")
    model, samples, collate = build_head(classifier, 0.0)
    truth = sweep.true_gradient(model, samples, collate)
    gradient = sweep.trainer_gradient(model, samples, collate)
    assert relative_error(gradient / 4, truth) < TOLERANCE
    verdict = examine(classifier)
    assert (verdict.status, verdict.dropout, verdict.trainer_right) == ("right", "agree", False), (
        verdict
    )


def test_a_mean_of_means_is_called_wrong(monkeypatch):
    def naive(model, samples, collate, facts, **layout):
        model.zero_grad(set_to_none=True)
        for i in range(0, len(samples), 2):
            (model(**collate(samples[i : i + 2])).loss / 4).backward()
        return flat(take_gradients(model))

    monkeypatch.setattr(sweep, "hf_ga_gradient", naive)
    verdict = examine(Head("gpt2", "GPT2LMHeadModel", "causal LM"))
    assert verdict.status == "wrong"
    assert verdict.error > 1e-2


@pytest.mark.parametrize(
    ("head", "status", "reason"),
    [
        (
            Head("levit", "LevitForImageClassification", "image classification"),
            "refused",
            "BatchNorm",
        ),
        (
            Head("deepseek_v3", "DeepseekV3ForCausalLM", "causal LM with router loss"),
            "out of scope",
            "router",
        ),
        (Head("vit_mae", "ViTMAEForPreTraining", "pre-training"), "out of scope", "text labels"),
        (
            Head("lxmert", "LxmertForQuestionAnswering", "question answering"),
            "not built",
            "visual_feats",
        ),
    ],
)
def test_what_is_not_compared_has_its_reason(head, status, reason):
    verdict = examine(head)
    assert verdict.status == status
    assert reason in verdict.reason


def test_the_collate_function_pads_each_entry_with_its_own_filler():
    samples = [{"input_ids": [5, 6], "labels": [5, -100], "start": 1, "choices": [[1], [2]]}]
    samples.append({"input_ids": [7], "labels": [7], "start": 0, "choices": [[3, 4], [5, 6]]})
    batch = PaddingCollator(pad_id=9)(samples)
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == (
        [[5, 6], [7, 9]],
        [[5, -100], [7, -100]],
    )
    assert (batch["start"].tolist(), batch["choices"].tolist()) == (
        [1, 0],
        [[[1, 0], [2, 0]], [[3, 4], [5, 6]]],
    )
    assert PaddingCollator(9, min_length=4)(samples)["input_ids"].tolist() == [
        [5, 6, 9, 9],
        [7, 9, 9, 9],
    ]


def test_at_least_450_heads_of_every_kind_are_listed_once():
    heads = all_heads()
    assert len(heads) == len(set(heads)) >= 450
    assert {head.kind for head in heads} == set(KINDS)
    chosen = sweep_heads.evenly_spread(heads, 40)
    assert len(chosen) == len(set(chosen)) == 40
    assert len({head.kind for head in chosen}) >= 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd's threads survive no fork")
def test_a_head_that_kills_its_process_or_hangs_costs_no_other(monkeypatch):
    """Its server is this process, which has the imports."""
    monkeypatch.setattr(sweep_heads, "SERVER", FORK)
    names = ("fine", "kills", "good", "hangs", "last")
    heads = [SimpleNamespace(class_name=name) for name in names]
    verdicts = list(sweep_heads.sweep(heads, jobs=1, time_limit=1.0, send=send_strange_verdict))
    assert [v.head for v in verdicts] == heads
    assert [v.status for v in verdicts] == ["right", "not built", "right", "not built", "right"]
    assert "died (3)" in verdicts[1].reason
    assert "longer than 1 s" in verdicts[3].reason


@pytest.mark.parametrize(("status", "code"), [("refused", 0), ("wrong", 1)])
def test_the_exit_code_and_the_report_tell_a_wrong_head(
    monkeypatch, tmp_path, capsys, status, code
):
    def fake(heads, jobs, time_limit):
        for head in heads:
            yield Verdict(head, status, "why | so", 0.25)

    monkeypatch.setattr(sweep_heads, "sweep", fake)
    assert sweep_heads.main(["--only", "NoSuchHead"]) == 2
    assert "no head matches" in capsys.readouterr().err
    assert sweep_heads.main(["--only", "^BertForMaskedLM", "--output_dir", str(tmp_path)]) == code
    assert [
        head["status"] for head in json.loads((tmp_path / "heads.json").read_text())["heads"]
    ] == [status]
    printed = capsys.readouterr().out
    assert status in printed
    assert ("1 wrong" if status == "wrong" else "1 refused (100.0 %), 0 wrong") in printed
    assert "BertForMaskedLM (masked LM)" in (tmp_path / "heads.md").read_text()
