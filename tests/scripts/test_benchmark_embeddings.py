"""The benchmark of embeddings: equal to sentence-transformers without dropout; with dropout, only
hf_ga has one gradient for all micro-batches.
"""

import re

import pytest
import transformers as tf
from runs import WORDS

from hf_ga.embedding.model import EmbeddingModel
from hf_ga.finetuning.data.formats import corpus

pytest.importorskip("sentence_transformers")
embeddings = pytest.importorskip("benchmark.embeddings")
pytestmark = pytest.mark.usefixtures("own_accelerator_state")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """24 pairs, without equal texts, in windows of 12 and micro-batches of 4."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = corpus.train_tokenizer([" ".join(WORDS)] * 3, 300)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = tf.BertConfig(
        vocab_size=len(tokenizer), intermediate_size=32, max_position_embeddings=64, **sizes
    )
    EmbeddingModel(tf.BertModel(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pairs = [
        (" ".join([WORDS[i % 7], *WORDS[i % 3 : i % 9 + 4]]) + f" {i}", f"{WORDS[i % 11]} {i}")
        for i in range(24)
    ]
    return embeddings.Setting(str(folder), pairs, window_size=12, micro_batch_size=4)


def numbers(text):
    return [float(number) for number in re.findall(r"\d\.\d+(?:e-\d+)?", text)]


def test_equal_without_dropout(setting, capsys):
    embeddings.without_dropout(setting, num_windows=1)
    first = capsys.readouterr().out.splitlines()[0]
    ours, theirs, error = numbers(first.partition("loss")[2])
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert error < 1e-5


def test_one_gradient_with_dropout(setting, capsys):
    embeddings.with_dropout(setting, (4, 2))
    ours, theirs = (
        numbers(line.partition("and 2:")[2])[-1] for line in capsys.readouterr().out.splitlines()
    )
    assert ours < 1e-5
    assert theirs > 0.1
