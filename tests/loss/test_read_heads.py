"""The losses of transformers' heads are read as the right number of terms."""

import pytest
import torch
import transformers as hf

from hf_ga.loss import read_terms, undivided

NUM_SAMPLES = 3
WIDTH = 6
SMALL = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_labels": 4,
}
LLAMA = hf.LlamaConfig(**SMALL, num_key_value_heads=2)
DISTILBERT = {"vocab_size": 30, "dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2}


def ids():
    return torch.randint(1, 30, (NUM_SAMPLES, WIDTH))


def token_labels(num_labels=4):
    labels = torch.randint(num_labels, (NUM_SAMPLES, WIDTH))
    labels[0, 2:] = -100
    return labels


def ctc_labels():
    """Without 0, the blank. -100 stays: with other negative labels, torch reads foreign memory."""
    labels = token_labels(29)
    return labels.where(labels < 0, labels + 1)


def row_labels(num_labels=4):
    return torch.randint(num_labels, (NUM_SAMPLES,))


def bert_config(**options):
    return hf.BertConfig(**SMALL | options)


def vit_config():
    size = {"image_size": 8, "patch_size": 4, "num_labels": 4}
    return hf.ViTConfig(**{k: v for k, v in SMALL.items() if k != "num_labels"} | size)


def wav2vec2_config():
    return hf.Wav2Vec2Config(
        **{k: v for k, v in SMALL.items() if k != "num_labels"},
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        ctc_loss_reduction="mean",
        mask_time_prob=0.0,
        apply_spec_augment=False,
    )


def t5_config():
    return hf.T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip


def heads():
    """(make the model, make its inputs, divisors of its terms)"""
    targets = 2 + 2 * WIDTH
    return {
        "classification": (
            lambda: hf.BertForSequenceClassification(bert_config()),
            lambda: {"input_ids": ids(), "labels": row_labels()},
            [NUM_SAMPLES],
        ),
        "multi-label": (
            lambda: hf.BertForSequenceClassification(bert_config()),
            lambda: {"input_ids": ids(), "labels": torch.rand(NUM_SAMPLES, 4)},
            [NUM_SAMPLES * 4],
        ),
        "regression": (
            lambda: hf.DistilBertForSequenceClassification(
                hf.DistilBertConfig(**DISTILBERT, num_labels=1)
            ),
            lambda: {"input_ids": ids(), "labels": torch.rand(NUM_SAMPLES)},
            [NUM_SAMPLES],
        ),
        "tokens": (
            lambda: hf.BertForTokenClassification(bert_config()),
            lambda: {"input_ids": ids(), "labels": token_labels()},
            [targets],
        ),
        "answers": (
            lambda: hf.BertForQuestionAnswering(bert_config(num_labels=2)),
            lambda: {
                "input_ids": ids(),
                "start_positions": torch.tensor([1, 2, WIDTH]),  # the last one is outside: ignored
                "end_positions": torch.tensor([1, 3, 4]),
            },
            [2, 3],
        ),
        "choices": (
            lambda: hf.BertForMultipleChoice(bert_config()),
            lambda: {"input_ids": ids()[:, None].repeat(1, 2, 1), "labels": row_labels(2)},
            [NUM_SAMPLES],
        ),
        "masked": (
            lambda: hf.BertForMaskedLM(bert_config()),
            lambda: {"input_ids": ids(), "labels": token_labels(30)},
            [targets],
        ),
        "next sentence": (
            lambda: hf.BertForNextSentencePrediction(bert_config()),
            lambda: {"input_ids": ids(), "labels": row_labels(2)},
            [NUM_SAMPLES],
        ),
        "pretraining": (
            lambda: hf.BertForPreTraining(bert_config()),
            lambda: {
                "input_ids": ids(),
                "labels": token_labels(30),
                "next_sentence_label": row_labels(2),
            },
            [targets, NUM_SAMPLES],
        ),
        "gpt2": (
            lambda: hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=16)
            ),
            lambda: {"input_ids": ids(), "labels": token_labels(30)},
            [1 + 2 * (WIDTH - 1)],  # shifted by one
        ),
        "llama": (
            lambda: hf.LlamaForCausalLM(LLAMA),
            lambda: {"input_ids": ids(), "labels": token_labels(30)},
            [1 + 2 * (WIDTH - 1)],
        ),
        "llama with num_items_in_batch": (
            lambda: hf.LlamaForCausalLM(LLAMA),
            lambda: {
                "input_ids": ids(),
                "labels": token_labels(30),
                "num_items_in_batch": torch.tensor(50),
            },
            [50],
        ),
        "t5": (
            lambda: hf.T5ForConditionalGeneration(t5_config()),
            lambda: {"input_ids": ids(), "labels": token_labels(30)},
            [targets],
        ),
        "images": (
            lambda: hf.ViTForImageClassification(vit_config()),
            lambda: {"pixel_values": torch.randn(NUM_SAMPLES, 3, 8, 8), "labels": row_labels()},
            [NUM_SAMPLES],
        ),
        "speech": (
            lambda: hf.Wav2Vec2ForCTC(wav2vec2_config()),
            lambda: {
                "input_values": torch.randn(NUM_SAMPLES, 200),
                "labels": ctc_labels(),
            },
            [NUM_SAMPLES],
        ),
    }


@pytest.mark.parametrize("name", heads())
def test_transformers_head(name):
    make_model, make_inputs, divisors = heads()[name]
    torch.manual_seed(0)
    model = make_model().train()
    loss = model(**make_inputs()).loss
    terms = read_terms(loss, num_samples=NUM_SAMPLES)
    assert [term.divisor for term in terms] == divisors
    assert not any(term.is_penalty for term in terms)
    [expected] = torch.autograd.grad(loss, [next(model.parameters())], retain_graph=True)
    with undivided(terms, [1 / term.divisor for term in terms]):
        loss.backward()
    assert torch.allclose(next(model.parameters()).grad, expected, rtol=1e-4, atol=1e-8)
