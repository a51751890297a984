"""What tests of runs share: a folder with small models and rows, files for bad input, no progress
bars.
"""

import shutil

import datasets
import pytest
import transformers as tf
from bad_files import FILES
from runs import filled_place, save_jobs, without_curves

from hf_ga.finetuning.data.formats import corpus


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(autouse=True, scope="module")
def _no_curves():
    """Drawn in `test_the_script_makes_the_run_of_the_function`."""
    with without_curves():
        yield


@pytest.fixture(scope="session")
def _filled(tmp_path_factory):
    with filled_place(tmp_path_factory.mktemp("filled")) as folder:
        save_jobs(folder)
    return folder


@pytest.fixture(scope="module")
def place(_filled, tmp_path_factory):
    """A folder of the module's own, with the models, rows and jobs of `runs`; the cache of datasets
    goes there too.
    """
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(_filled, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """FILES, a tiny GPT-2 in `gpt`, a tiny BERT in `bert`, and the configuration of a BART, all of
    64 positions.
    """
    folder = tmp_path_factory.mktemp("input")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    tokenizer = corpus.train_tokenizer(["some words to train on", "more words"], 280)
    sizes = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 16,
    }
    gpt2 = tf.GPT2Config(
        **sizes,
        n_positions=64,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    bert = tf.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=64)
    tf.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt")
    tf.BertForMaskedLM(bert).save_pretrained(folder / "bert")
    roberta = tf.RobertaConfig(
        **sizes, intermediate_size=16, max_position_embeddings=64, pad_token_id=1
    )
    tf.RobertaForMaskedLM(roberta).save_pretrained(folder / "roberta")
    tf.BartConfig(vocab_size=len(tokenizer), max_position_embeddings=64).save_pretrained(
        folder / "bart"
    )
    for name in ("gpt", "bert", "bart", "roberta", "no_weights"):
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def no_model(monkeypatch, tmp_path):
    """Building any transformers model fails the test; the data's cache stays in the test's
    folder.
    """

    def build(self, *args, **kwargs):
        raise AssertionError(f"a {type(self).__name__} was built before the input was checked")

    monkeypatch.setattr(tf.PreTrainedModel, "__init__", build)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
