"""The sweep over heads: the shrinking rule, the samples, the verdicts, and that one bad head costs no other."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from heads import one_head as sweep
from heads import report as sweep_report
from heads import run as sweep_run
from heads.one_head import TOLERANCE, Head, Verdict, all_heads, build_head, examine
from heads.small_models import MOST_PARAMETERS, VOCABULARY, build_small, small_config
from heads.small_samples import IGNORED, KINDS, PaddingCollator, make_samples
from sweep_workers import serve_strange_heads
from torch import nn

SAMPLE = [  # one of each kind, and of architectures that differ: attention, state space, experts, width that matters, two texts
    Head("gpt2", "GPT2LMHeadModel", "causal LM"),
    Head("mamba", "MambaForCausalLM", "causal LM"),
    Head("mixtral", "MixtralForCausalLM", "causal LM with router loss"),
    Head("fnet", "FNetForMaskedLM", "masked LM"),
    Head("xlnet", "XLNetForSequenceClassification", "sequence classification"),
    Head("llama", "LlamaForSequenceClassification", "regression"),
    Head("roberta", "RobertaForSequenceClassification", "multi-label"),
    Head("deberta-v2", "DebertaV2ForTokenClassification", "token classification"),
    Head("bert", "BertForQuestionAnswering", "question answering"),
    Head("albert", "AlbertForMultipleChoice", "multiple choice"),
    Head("t5", "T5ForConditionalGeneration", "seq2seq"),
    Head("bert", "BertForNextSentencePrediction", "next sentence"),
    Head("bert", "BertForPreTraining", "pre-training"),
    Head("vit", "ViTForImageClassification", "image classification"),
]
CLASSIFIER = Head("bert", "BertForSequenceClassification", "sequence classification")


@pytest.mark.parametrize("head", SAMPLE, ids=lambda head: head.name)
def test_hf_ga_is_right_and_its_dropout_layouts_agree(head):
    verdict = examine(head)
    assert verdict.status == "right", verdict
    assert verdict.error <= TOLERANCE
    assert verdict.dropout == ("none drawn" if head.model_type == "mamba" else "agree"), verdict


def test_the_sample_has_every_kind():
    assert {head.kind for head in SAMPLE} == set(KINDS)


def test_trainer_multiplies_a_bert_classifier_by_four():
    """The negative control: the same comparison fails Trainer, whose gradient is 4 times the true one."""
    model, samples, collate = build_head(CLASSIFIER, 0.0)
    truth = sweep.true_gradient(model, samples, collate)
    gradient = sweep.trainer_gradient(model, samples, collate)
    assert sweep.relative_error([g / 4 for g in gradient], truth) < TOLERANCE
    assert not examine(CLASSIFIER).trainer_right


def test_a_mean_of_means_is_called_wrong(monkeypatch):
    def naive(model, samples, collate, **layout):
        model.zero_grad(set_to_none=True)
        for i in range(0, len(samples), 2):
            (model(**collate(samples[i : i + 2])).loss / 4).backward()
        return sweep.taken_gradient(model), sweep.hf_ga.ProvenLoss

    monkeypatch.setattr(sweep, "hf_ga_gradient", naive)
    monkeypatch.setattr(sweep.hf_ga.ProvenLoss, "name", "naive", raising=False)
    verdict = examine(SAMPLE[0])
    assert verdict.status == "wrong"
    assert verdict.error > 1e-2


def test_truth_is_the_sum_of_the_samples_own_gradients():
    """Another way to the same gradient: each sample alone, without padding, weighted by its predicted tokens."""
    model, samples, collate = build_head(SAMPLE[0], 0.0)
    truth = sweep.true_gradient(model, samples, collate)
    counts = [sum(label != IGNORED for label in s["labels"][1:]) for s in samples]
    parts = [sweep.true_gradient(model, [sample], collate) for sample in samples]
    expected = [sum(g * n for g, n in zip(column, counts, strict=True)) / sum(counts) for column in zip(*parts, strict=True)]
    assert sweep.relative_error(expected, truth) < TOLERANCE


def test_a_batchnorm_model_is_refused_with_its_reason():
    verdict = examine(Head("levit", "LevitForImageClassification", "image classification"))
    assert verdict.status == "refused"
    assert "BatchNorm" in verdict.reason


def test_what_is_no_head_of_this_sweep_is_not_counted():
    assert examine(Head("deepseek_v3", "DeepseekV3ForCausalLM", "causal LM with router loss")).status == "out of scope"
    assert examine(Head("resnet", "ResNetForImageClassification", "image classification")).status == "out of scope"
    assert examine(Head("vit_mae", "ViTMAEForPreTraining", "pre-training")).status == "out of scope"
    failed = examine(Head("lxmert", "LxmertForQuestionAnswering", "question answering"))
    assert failed.status == "not built"
    assert "visual_feats" in failed.reason


@pytest.mark.parametrize("name", ["BertConfig", "LlamaConfig", "T5Config", "DeepseekV3Config", "Gemma3TextConfig", "SwinConfig"])
def test_the_shrinking_rule_makes_any_config_small(name):
    config_class = getattr(tf, name)
    config, full = small_config(config_class), config_class()
    assert config.hidden_size <= 64 < full.hidden_size
    assert config.num_hidden_layers <= 4
    assert getattr(config, "vocab_size", 0) <= VOCABULARY


def test_the_shrinking_rule_keeps_what_makes_an_architecture():
    """Each kind of layer, grouped-query attention, experts, and special tokens that stay apart."""
    gemma = small_config(tf.Gemma3TextConfig)
    assert set(gemma.layer_types) == {"sliding_attention", "full_attention"}
    assert len(gemma.layer_types) == gemma.num_hidden_layers
    mixtral = small_config(tf.MixtralConfig)
    assert (mixtral.num_attention_heads, mixtral.num_key_value_heads) == (4, 2)
    assert (mixtral.num_local_experts, mixtral.num_experts_per_tok) == (4, 2)
    bart = small_config(tf.BartConfig)
    assert bart.eos_token_id == 2 and bart.pad_token_id == 1
    composite = small_config(tf.Qwen2VLConfig)
    assert composite.text_config.hidden_size == 32
    assert len({composite.image_token_id, composite.video_token_id, composite.vision_start_token_id}) == 3
    assert max(composite.image_token_id, composite.video_token_id) < VOCABULARY


def test_dropout_is_set_everywhere_but_for_whole_layers():
    assert small_config(tf.BertConfig, 0.1).attention_probs_dropout_prob == 0.1
    bart = small_config(tf.BartConfig, 0.1)
    assert (bart.dropout, bart.attention_dropout, bart.encoder_layerdrop) == (0.1, 0.1, 0.0)
    assert small_config(tf.BartConfig, 0.0).dropout == 0.0
    assert small_config(tf.BartConfig, 0.1).hidden_size == small_config(tf.BartConfig, 0.0).hidden_size


def test_weights_are_seeded_and_none_is_degenerate():
    first, again = (build_small(tf.BertForSequenceClassification, small_config(tf.BertConfig)) for _ in range(2))
    for p, q in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p.isfinite().all() and p.count_nonzero() == p.numel()


def test_a_model_that_stays_large_is_not_built():
    class Large(tf.BertModel):
        def __init__(self, config):
            super().__init__(config)
            self.large = nn.Linear(MOST_PARAMETERS, 1)

    with pytest.raises(ValueError, match="after shrinking"):
        build_small(Large, small_config(tf.BertConfig))


@pytest.mark.parametrize("kind", ["causal LM", "masked LM", "token classification", "seq2seq"])
def test_target_counts_differ_by_a_factor_of_three(kind):
    samples = make_samples(kind, "", small_config(tf.T5Config))
    counts = [sum(label != IGNORED for label in sample["labels"]) for sample in samples]
    assert len(samples) == 8
    assert max(counts) >= 3 * min(counts) > 0
    pairs = [sum(counts[i : i + 2]) for i in range(0, 8, 2)]
    assert len(set(pairs)) > 1  # else a mean of means would be right


def test_some_answers_are_cut_off_start_and_end_apart():
    """So that the two means of a question answering head have different counts."""
    samples = make_samples("question answering", "", small_config(tf.BertConfig))
    inside = {name: sum(s[name] < len(s["input_ids"]) for s in samples) for name in ("start_positions", "end_positions")}
    assert inside == {"start_positions": 6, "end_positions": 5}


def test_the_collate_function_pads_each_entry_with_its_own_filler():
    samples = [
        {"input_ids": [5, 6], "attention_mask": [1, 1], "labels": [5, -100], "start_positions": 1, "choices": [[1], [2]]},
        {"input_ids": [7], "attention_mask": [1], "labels": [7], "start_positions": 0, "choices": [[3, 4], [5, 6]]},
    ]
    batch = PaddingCollator(pad_id=9)(samples)
    assert batch["input_ids"].tolist() == [[5, 6], [7, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [[5, -100], [7, -100]]
    assert batch["start_positions"].tolist() == [1, 0]
    assert batch["choices"].tolist() == [[[1, 0], [2, 0]], [[3, 4], [5, 6]]]
    assert PaddingCollator(9, width=4)(samples)["input_ids"].tolist() == [[5, 6, 9, 9], [7, 9, 9, 9]]
    assert PaddingCollator(9, width=4)([{"labels": [0.0, 1.0]}])["labels"].tolist() == [[0.0, 1.0]]
    assert batch["input_ids"].dtype == torch.int64
    assert PaddingCollator(0)([{"labels": 0.5}, {"labels": 1.0}])["labels"].dtype == torch.float32


def test_at_least_450_heads_of_every_kind_are_listed_once():
    heads = all_heads()
    assert len(heads) == len(set(heads)) >= 450
    assert {head.kind for head in heads} == set(KINDS)
    chosen = sweep_run.evenly_spread(heads, 40)
    assert len(chosen) == len(set(chosen)) == 40
    assert len({head.kind for head in chosen}) >= 8
    assert sweep_run.evenly_spread(heads[:3], 40) == sorted(heads[:3], key=lambda head: (head.kind, head.class_name))


def test_a_head_that_kills_its_process_or_hangs_costs_no_other():
    names = ("fine", "kills", "good", "hangs", "last")
    heads = [SimpleNamespace(name=name, model_type="x", class_name=name, kind="causal LM") for name in names]
    verdicts = list(sweep_run.sweep(heads, jobs=1, time_limit=2.0, serve=serve_strange_heads))
    assert [v.class_name for v in verdicts] == [head.class_name for head in heads]
    assert [v.status for v in verdicts] == ["right", "not built", "right", "not built", "right"]
    assert "died (3)" in verdicts[1].reason
    assert "longer than 2 s" in verdicts[3].reason


@pytest.mark.parametrize(("status", "code"), [("right", 0), ("refused", 0), ("not built", 0), ("wrong", 1)])
def test_the_exit_code_and_the_report_tell_a_wrong_head(monkeypatch, tmp_path, capsys, status, code):
    def fake(heads, jobs, time_limit):
        for head in heads:
            yield Verdict(head.name, head.model_type, head.class_name, head.kind, status, "why | so", 0.25)

    monkeypatch.setattr(sweep_run, "sweep", fake)
    assert sweep_run.main(["--only", "^BertForMaskedLM", "--output_dir", str(tmp_path)]) == code
    content = json.loads((tmp_path / "heads.json").read_text())
    assert [head["status"] for head in content["heads"]] == [status]
    assert status in capsys.readouterr().out
    assert "BertForMaskedLM (masked LM)" in (tmp_path / "heads.md").read_text()


def test_bad_flags_are_told_in_one_line(capsys):
    assert sweep_run.main(["--only", "NoSuchHead"]) == 2
    assert "no head matches" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        sweep_run.main(["--jobs", "0"])


def test_the_summary_counts():
    names = ["name", "model_type", "class_name", "kind"]

    def verdict(i, **values):
        return Verdict(**dict.fromkeys(names, f"{i}"), **values)

    verdicts = [
        verdict(0, status="right", error=1e-7, trainer_error=1e-7, trainer_ratio=1.0, dropout="agree"),
        verdict(1, status="right", error=1e-7, trainer_error=3.0, trainer_ratio=4.02, dropout="none drawn"),
        verdict(2, status="refused", trainer_error=np.inf, trainer_ratio=1.0),
        verdict(3, status="right", error=1e-7, dropout="differ", dropout_error=0.1, dropout_effect=0.2),
        verdict(4),
    ]
    built, hf_ga, trainer, dropout = sweep_report.summary(verdicts)
    assert built.startswith("4 heads built, of 4 classes") and "1 could not be built" in built
    assert "3 right, 1 refused (25.0 %), 0 wrong" in hf_ga
    assert "1 right, 3 not (gradient about 4 times too large for 1)" in trainer
    assert "2 heads draw it; hf_ga's layouts agree for 1 (50.0 %), differ for 1" in dropout
