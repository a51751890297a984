"""Pooling by hand, and folders that sentence-transformers loads."""

import json

import pytest
import torch
import transformers as tf
from torch import nn

from hf_ga.embedding.layout import saved_pooling
from hf_ga.embedding.model import EmbeddingModel
from hf_ga.embedding.pooling import POOLINGS
from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.formats import corpus

TEXTS = ["a cat", "the cat sat on the mat and looked at the dog", "dogs", "mat " * 40]


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.train_tokenizer([" ".join(TEXTS)], 280)


def encoder(tokenizer):
    torch.manual_seed(2)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    config = tf.BertConfig(
        vocab_size=len(tokenizer),
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.2,
        **sizes,
    )
    return tf.BertModel(config)


def decoder(tokenizer):
    torch.manual_seed(2)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 64, "initializer_range": 0.2}
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return tf.GPT2Model(tf.GPT2Config(vocab_size=len(tokenizer), **sizes, **ends))


def encoded(tokenizer, texts, max_length=32, side="right"):
    batch = tokenizer(
        texts,
        padding=True,
        truncation=True,
        max_length=max_length,
        padding_side=side,
        return_tensors="pt",
    )
    return batch["input_ids"], batch["attention_mask"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean", [[2.0, 20.0], [9.0, 90.0]]),
        ("cls", [[1.0, 10.0], [9.0, 90.0]]),
        ("lasttoken", [[3.0, 30.0], [9.0, 90.0]]),
    ],
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_pooling_by_hand(name, expected, side):
    """Tokens 1, 2, 3 and 9; the padding has large numbers."""
    first = [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]
    padding = [[700.0, 7.0]] * 2
    second = [[9.0, 90.0]]
    rows = [first, second + padding if side == "right" else padding + second]
    mask = [[1, 1, 1], [1, 0, 0] if side == "right" else [0, 0, 1]]
    found = POOLINGS[name](torch.tensor(rows), torch.tensor(mask))
    assert found.tolist() == expected


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_have_length_1_and_do_not_depend_on_the_batch(pooling, tokenizer):
    model = EmbeddingModel(encoder(tokenizer), pooling).eval()
    together = model.encode(*encoded(tokenizer, TEXTS))
    alone = torch.cat([model.encode(*encoded(tokenizer, [text])) for text in TEXTS])
    assert torch.allclose(together, alone, atol=1e-6)
    assert torch.allclose(together.norm(dim=1), torch.ones(len(TEXTS)))
    other = next(name for name in POOLINGS if name != pooling)
    control = EmbeddingModel(model.encoder, other).eval().encode(*encoded(tokenizer, TEXTS))
    assert not torch.allclose(together, control, atol=1e-3)


def test_outputs_of_a_batch(tokenizer):
    model = EmbeddingModel(encoder(tokenizer), temperature=0.05).eval()
    batch = {"text_id_anchor": torch.tensor([1, 2]), "score": torch.zeros(2)}
    for column, texts in (("anchor", TEXTS[:2]), ("positive", TEXTS[2:])):
        ids, mask = encoded(tokenizer, texts)
        batch |= {f"input_ids_{column}": ids, f"attention_mask_{column}": mask}
    outputs = model(**batch)
    assert list(outputs) == ["anchor", "positive", "log_temperature"]
    assert outputs["positive"].shape == (2, 16)
    assert outputs["log_temperature"].shape == ()
    assert outputs["log_temperature"].exp().item() == pytest.approx(0.05)
    assert model.temperature == pytest.approx(0.05)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "log_temperature" in trained
    assert not any("pooler" in name for name in trained)  # they would never have a gradient


def test_models_that_cannot_be_used(tokenizer):
    with pytest.raises(ConfigError, match="unknown pooling 'max': use one of mean, cls, lasttoken"):
        EmbeddingModel(encoder(tokenizer), "max")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = tf.T5Model(tf.T5Config(vocab_size=len(tokenizer), **sizes))
    with pytest.raises(ConfigError, match="t5 has both: use another model, or its encoder alone"):
        EmbeddingModel(t5)


@pytest.mark.parametrize(
    ("make", "pooling"), [*((encoder, name) for name in POOLINGS), (decoder, "lasttoken")]
)
def test_sentence_transformers_gives_the_same_vectors(make, pooling, tokenizer, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    model = EmbeddingModel(make(tokenizer), pooling, temperature=0.1, max_length=32).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert saved_pooling(str(tmp_path)) == pooling
    loaded = package.SentenceTransformer(str(tmp_path), device="cpu")
    theirs = torch.from_numpy(loaded.encode(TEXTS))
    with torch.no_grad():
        assert torch.allclose(theirs, model.encode(*encoded(tokenizer, TEXTS)), atol=1e-6)
        longer = model.encode(*encoded(tokenizer, TEXTS, max_length=64))
    assert not torch.allclose(theirs, longer, atol=1e-3)  # the last text was truncated
    assert loaded.similarity_fn_name == "cosine"


def test_saved_weights_are_those_that_are_given(tokenizer, tmp_path):
    """Under FSDP, the model's own are shards."""
    model = EmbeddingModel(encoder(tokenizer), temperature=0.1)
    weights = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=weights)
    loaded = tf.AutoModel.from_pretrained(tmp_path)
    assert all(bool((p == 0.5).all()) for p in loaded.parameters())
    assert isinstance(loaded.pooler, nn.Module)


def test_poolings_of_other_models(tmp_path):
    assert saved_pooling(str(tmp_path)) is None
    file = tmp_path / "1_Pooling" / "config.json"
    file.parent.mkdir()
    for content, expected in (
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, "lasttoken"),
    ):
        file.write_text(json.dumps(content))
        assert saved_pooling(str(tmp_path)) == expected
    for content, named in (
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, "mean [+] max"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=f"saved with the pooling {named}, which is not"):
            saved_pooling(str(tmp_path))
