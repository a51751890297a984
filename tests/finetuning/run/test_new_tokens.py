"""`--resize_token_embeddings`: rows for tokens that a model lacks are drawn as transformers does,
trained (with LoRA, they alone of their embedding), saved, and the same after a stop.
"""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.utils import set_seed
from runs import WORDS, job_config, lines_of, train_job, write_rows
from safetensors.torch import load_file

import hf_ga
from hf_ga.finetuning.run.build import build_model, prepare_setup

CAUSAL = "causal LM, row by row"
NEW = ["<one>", "<two>"]
STEPS = {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "learning_rate": 2e-2}
LORA = {"lora_r": 2}


def rows(count: int) -> list[dict]:
    return [
        {"text": f"{NEW[i % 2]} {' '.join(WORDS[: 2 + i % 5])} {NEW[i % 2]}", "label": str(i % 2)}
        for i in range(count)
    ]


def with_new_tokens(model: tf.PreTrainedModel, folder: Path, place: Path) -> None:
    """A model, and its tokenizer with two tokens and a padding token that it has no rows for."""
    model.save_pretrained(folder)
    tokenizer = tf.AutoTokenizer.from_pretrained(place / "job-gpt")
    assert len(tokenizer) == model.config.vocab_size
    tokenizer.add_tokens(NEW)
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def models(place):
    """`tied` and `untied` (Llama without a padding token), `encoder` (BERT); rows with the new
    tokens.
    """
    num_tokens = len(tf.AutoTokenizer.from_pretrained(place / "job-gpt"))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    for name in ("tied", "untied"):
        torch.manual_seed(0)
        config = tf.LlamaConfig(
            **sizes,
            vocab_size=num_tokens,
            num_attention_heads=2,
            tie_word_embeddings=name == "tied",
        )
        with_new_tokens(tf.LlamaForCausalLM(config), place / name, place)
    encoder = tf.AutoModelForMaskedLM.from_pretrained(place / "job-bert")
    with_new_tokens(encoder, place / "encoder", place)
    write_rows(place / "new.jsonl", rows(24))
    write_rows(place / "new.validation.jsonl", rows(8))
    return place


def flags_for(models: Path, name: str, **more) -> dict:
    files = {
        "dataset_name": str(models / "new.jsonl"),
        "validation_file": str(models / "new.validation.jsonl"),
        "test_file": None,
        "text_column": "text",
    }
    task = {"task": "text-classification"} if name == "encoder" else {}
    flags = {"model_name_or_path": str(models / name), "resize_token_embeddings": True}
    return {**files, **flags, **task, **STEPS, **more}


def train_new(models: Path, output: Path, name: str, **more) -> dict:
    return train_job(models, output, CAUSAL, **flags_for(models, name, **more))


def built(models: Path, output: Path, name: str, **more) -> torch.nn.Module:
    config = job_config(models, output, CAUSAL, **flags_for(models, name, **more))
    return build_model(prepare_setup(config, Accelerator(cpu=True)))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_new_rows_are_those_of_transformers(name, models, tmp_path, capsys):
    """Under the seed of the run; another seed draws others."""
    set_seed(7)
    expected = tf.AutoModelForCausalLM.from_pretrained(models / name)
    num_old = expected.config.vocab_size
    expected.resize_token_embeddings(num_old + 3)
    model = built(models, tmp_path, name, seed=7)
    assert f"3 new rows in the embeddings, {num_old} to {num_old + 2}" in capsys.readouterr().out
    assert model.config.vocab_size == num_old + 3
    for embedding in ("get_input_embeddings", "get_output_embeddings"):
        found, reference = (getattr(m, embedding)().weight for m in (model, expected))
        assert torch.equal(found, reference)
        other = getattr(built(models, tmp_path, name, seed=8), embedding)().weight
        assert torch.equal(found[:num_old], other[:num_old])
        assert not torch.equal(found[num_old:], other[num_old:])


def test_a_model_with_all_rows_is_left_alone(models, tmp_path, capsys):
    model = built(models, tmp_path, "tied", model_name_or_path=str(models / "job-gpt"))
    assert "resize_token_embeddings has no effect" in capsys.readouterr().out
    loaded = tf.AutoModelForCausalLM.from_pretrained(models / "job-gpt")
    assert torch.equal(model.lm_head.weight, loaded.lm_head.weight)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "embed" in name or "lm_head" in name
    }


@pytest.mark.parametrize(("name", "kind"), [("tied", LORA), ("untied", {}), ("encoder", LORA)])
def test_new_rows_are_trained_saved_and_the_same_after_a_stop(name, kind, models, tmp_path):
    """With LoRA, all other rows of the embeddings keep their bits."""
    summary = train_new(models, tmp_path / "out", name, **kind)
    start = built(models, tmp_path / "start", name)
    num_old = start.config.vocab_size - 3
    before = start.state_dict()
    found = weights_of(tmp_path / "out")
    rows = {key for key, tensor in found.items() if len(tensor) == num_old + 3}
    assert len(rows) == (2 if name == "untied" else 1)
    for key in rows:
        new = [num_old, num_old + 1]  # nothing trains the padding in an encoder
        assert (found[key][new] - before[key][new]).norm() > 1e-3
        assert torch.equal(found[key][:num_old], before[key][:num_old]) == bool(kind)
    assert summary["saved_model"]["relative_error"] < 1e-5
    evaluation = train_new(
        models,
        tmp_path / "again",
        name,
        model_name_or_path=str(tmp_path / "out"),
        eval_only=True,
        resize_token_embeddings=False,
    )
    assert evaluation["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-6)
    checkpoint = {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-2")}
    resumed = train_new(models, tmp_path / "resumed", name, **kind, **checkpoint)
    assert resumed["weights_sha256"] == summary["weights_sha256"]
    losses = [line["loss"] for line in lines_of(tmp_path / "out")]
    assert [line["loss"] for line in lines_of(tmp_path / "resumed")] == losses[2:]


def test_the_adapter_holds_the_new_rows_only(models, tmp_path):
    """It gives the merged model on a base that is resized in whatever way."""
    output = tmp_path / "out"
    train_new(models, output, "untied", **LORA)
    saved = load_file(output / "adapter" / "adapter_model.safetensors")
    assert [saved[name].shape for name in saved if "embed_tokens" in name] == [(3, 16)]
    assert [saved[name].shape for name in saved if "lm_head" in name] == [(3, 16)]
    merged = tf.AutoModelForCausalLM.from_pretrained(output)
    base = tf.AutoModelForCausalLM.from_pretrained(models / "untied")
    base.resize_token_embeddings(merged.config.vocab_size, mean_resizing=False)
    adapted = peft.PeftModel.from_pretrained(base, output / "adapter")
    ids = torch.arange(merged.config.vocab_size)[None]
    with torch.no_grad():
        expected, found = (model.eval()(ids).logits for model in (merged, adapted))
        with adapted.disable_adapter():
            control = adapted(ids).logits
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert (control - expected).norm() > 1e-2 * expected.norm()


def test_an_adapter_with_new_rows_is_evaluated_and_trained_further(models, tmp_path):
    summary = train_new(models, tmp_path / "out", "tied", **LORA)
    adapter = {"adapter_name_or_path": str(tmp_path / "out" / "adapter")}
    evaluation = train_new(models, tmp_path / "again", "tied", eval_only=True, **adapter)
    assert evaluation["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-6)
    still = {"max_steps": 1, "eval_steps": 1, "learning_rate": 1e-9}
    further = train_new(models, tmp_path / "further", "tied", **adapter, **still)
    assert further["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-6)


WHOLE = {"lora_modules_to_save": ["embed_tokens", "lm_head"]}


def test_embeddings_that_are_trained_in_full(models, tmp_path):
    summary = train_new(models, tmp_path / "out", "tied", **LORA, **WHOLE)
    assert summary["saved_adapter"]["relative_error"] < 1e-5
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


REFUSED = {
    "frozen rows": (
        "tied",
        {"freeze": ["model.embed_tokens"]},
        r"freeze freezes the embedding, whose new rows",
    ),
    "rows with an adapter": (
        "tied",
        {**LORA, "lora_target_modules": ["q_proj", "embed_tokens"]},
        r"cannot train the new rows of model\.embed_tokens .*alone.* is in lora_target_modules",
    ),
    "one of two in full": (
        "untied",
        {**LORA, "lora_modules_to_save": ["lm_head"]},
        r"is in lora_modules_to_save without the other.* model\.embed_tokens lm_head",
    ),
    "rows with a bias": (
        "encoder",
        {**LORA, "task": "masked-lm"},
        r"cannot train the new rows of .*cls\.predictions\.decoder alone.* has a bias",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_new_rows_that_would_not_be_trained(case, models, tmp_path):
    name, flags, words = REFUSED[case]
    with pytest.raises(hf_ga.ConfigError, match=words):
        built(models, tmp_path, name, **flags)


def test_an_adapter_without_the_new_rows(models, tmp_path):
    base = tf.AutoModelForCausalLM.from_pretrained(models / "tied")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "old")
    with pytest.raises(hf_ga.ConfigError, match=r"does not train the rows of the 3 new tokens"):
        built(models, tmp_path / "out", "tied", adapter_name_or_path=str(tmp_path / "old"))
