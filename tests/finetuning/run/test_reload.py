"""What a run saves is the trained model: loaded again as a user would, it has the same tensors and
outputs. Each fault that is planted in a saved folder is found and named.
"""

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from runs import job_config, lines_of, train_job
from safetensors.torch import load_file, save_file

import hf_ga
from hf_ga.errors import SavedModelDiffers
from hf_ga.finetuning.run.build import build_model, prepare_setup
from hf_ga.finetuning.run.flags import cli
from hf_ga.finetuning.run.model import reload
from hf_ga.finetuning.run.model.adapters import save_adapter
from hf_ga.finetuning.run.results import outputs
from hf_ga.model.forward import argument_filter

CAUSAL = "causal LM, row by row"
LORA = {"lora_r": 2, "learning_rate": 2e-2}
SHORT = {"max_steps": 2, "eval_steps": 2, "save_steps": 2}
EXACT = {"relative_error": 0.0, "tolerance": 1e-4, "rows": 4}


def save_llama(folder: Path, tokenizer: tf.PreTrainedTokenizerBase) -> None:
    """With tied embeddings."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        **sizes, vocab_size=len(tokenizer), num_attention_heads=2, tie_word_embeddings=True
    )
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_experts(folder: Path, tokenizer: tf.PreTrainedTokenizerBase) -> None:
    """With a buffer that is saved: the bias of the choice of experts."""
    config = tf.DeepseekV3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    torch.manual_seed(0)
    model = tf.DeepseekV3ForCausalLM(config)
    model.get_buffer(BUFFER).copy_(torch.tensor([0.5, 0.0, 0.0, 0.0]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


BUFFER = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def models(place):
    """The folder of the models: `job-gpt` (tied), `job-bert`, `llama`, `experts`, `half` (a GPT-2
    in bf16).
    """
    tokenizer = tf.AutoTokenizer.from_pretrained(place / "job-gpt")
    save_llama(place / "llama", tokenizer)
    save_experts(place / "experts", tokenizer)
    half = tf.AutoModelForCausalLM.from_pretrained(place / "job-gpt", dtype=torch.bfloat16)
    half.save_pretrained(place / "half")
    tokenizer.save_pretrained(place / "half")
    return place


@pytest.fixture
def saved(models, tmp_path) -> Callable[..., SimpleNamespace]:
    """Save a model whose trained parameters have moved, as a run does."""

    def save(base: str, **flags) -> SimpleNamespace:
        name = "classes" if base == "job-bert" else CAUSAL
        config = job_config(models, tmp_path, name, model_name_or_path=str(models / base), **flags)
        setup = prepare_setup(config, Accelerator(cpu=True))
        model = build_model(setup)
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)
        folder = tmp_path / "folder"
        folder.mkdir()
        weights = model.state_dict()
        expected = reload.expected_outputs(setup, model)
        if config.lora_r:
            save_adapter(folder, model, weights, config)
        else:
            outputs._save_in_original_dtype(folder, model, setup.dtype, weights)
        check = partial(reload.check_saved, setup, folder, model, weights, expected)
        return SimpleNamespace(folder=folder, model=model, expected=expected, check=check)

    return save


def change_tensors(folder: Path, change: Callable[[dict], None]) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_settings(folder: Path, **settings) -> None:
    (file,) = [*folder.glob("config.json"), *folder.glob("adapter_config.json")]
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def convert(folder: Path, dtype: torch.dtype) -> None:
    change_tensors(folder, lambda t: t.update({name: v.to(dtype) for name, v in t.items()}))
    change_settings(folder, dtype=str(dtype).removeprefix("torch."))


def without(*parts: str) -> Callable[[Path], None]:
    """Delete the tensors that have one of these parts in their names."""

    def plant(folder: Path) -> None:
        def delete(tensors: dict) -> None:
            found = [name for name in tensors if any(part in name for part in parts)]
            assert found
            for name in found:
                del tensors[name]

        change_tensors(folder, delete)

    return plant


def with_changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    return lambda folder: change_tensors(folder, lambda t: t.update({name: change(t[name])}))


# What was saved, what is done to the folder, words of the message.
FAULTS = {
    "an untied weight": (
        "job-gpt",
        {},
        lambda folder: change_settings(folder, tie_word_embeddings=False),
        ["tensors differ: lm_head.weight (other values)"],
    ),
    "a lost buffer": ("experts", {}, without(BUFFER), [f"{BUFFER} (other values)"]),
    "a lost weight": (
        "job-bert",
        {},
        without("classifier", "pooler"),
        ["tensors differ:", "classifier.weight (other values)"],
    ),
    "a weight that is a little off": (
        "job-gpt",
        {},
        with_changed("transformer.h.0.attn.c_attn.weight", lambda weight: weight * (1 + 1e-6)),
        ["tensors differ: transformer.h.0.attn.c_attn.weight (other values)"],
    ),
    "one tensor in a wrong dtype": (
        "job-gpt",
        {},
        with_changed("transformer.wpe.weight", torch.Tensor.half),
        ["tensors differ: transformer.wpe.weight (other values)"],
    ),
    "a wrong dtype": (
        "half",
        {},
        lambda folder: convert(folder, torch.float16),
        ["it loads in torch.float16, not in torch.bfloat16"],
    ),
    "a dtype that loses digits": (
        "job-gpt",
        {},
        lambda folder: convert(folder, torch.bfloat16),
        ["it loads in torch.bfloat16, not in torch.float32"],
    ),
    "a dtype that nobody asked for": (
        "half",
        {},
        lambda folder: convert(folder, torch.float32),
        ["it loads in torch.float32, not in torch.bfloat16"],
    ),
    "another shape": (
        "job-gpt",
        {},
        lambda folder: (
            with_changed("transformer.wpe.weight", lambda w: w[:32].clone())(folder),
            change_settings(folder, n_positions=32),
        ),
        ["transformer.wpe.weight (shape [32, 16], not [64, 16])"],
    ),
    "a layer less": (
        "job-gpt",
        {},
        lambda folder: (without(".h.1.")(folder), change_settings(folder, n_layer=1)),
        ["transformer.h.1.attn.c_attn.bias (missing)", ", and 7 more"],
    ),
    "another activation": (
        "job-gpt",
        {},
        lambda folder: change_settings(folder, activation_function="relu"),
        ["its weights are those that were saved, but the relative error of its outputs (logits)"],
    ),
    "another activation in bf16": (
        "half",
        {},
        lambda folder: change_settings(folder, activation_function="relu"),
        ["its weights are those that were saved, but the relative error of its outputs (logits)"],
    ),
    "no configuration": (
        "job-gpt",
        {},
        lambda folder: (folder / "config.json").unlink(),
        ["it cannot be loaded ("],
    ),
    "a missing adapter module": (
        "job-gpt",
        LORA,
        without("h.0.mlp.c_fc"),
        ["tensors differ:", "h.0.mlp.c_fc.lora_B.default.weight (other values)"],
    ),
    "a missing head beside the adapters": (
        "job-bert",
        LORA,
        without("classifier"),
        ["it cannot be loaded (KeyError: ", "classifier"],
    ),
    "another scale": (
        "job-gpt",
        LORA,
        lambda folder: change_settings(folder, lora_alpha=8),
        ["its weights are those that were saved, but the relative error of its outputs (logits)"],
    ),
    "an adapter in a wrong dtype": (
        "job-gpt",
        LORA,
        lambda folder: change_tensors(
            folder, lambda t: t.update({name: v.bfloat16() for name, v in t.items()})
        ),
        ["lora_A.default.weight (other values)"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(fault, saved):
    """The control: without it, the same folder passes."""
    base, flags, plant, words = FAULTS[fault]
    made = saved(base, **flags)
    result = made.check()
    assert result["relative_error"] <= result["tolerance"]
    assert result["rows"] == 4
    if base != "half":
        assert result == EXACT
    plant(made.folder)
    with pytest.raises(SavedModelDiffers) as found:
        made.check()
    assert str(found.value).startswith(f"{made.folder} is not the trained model: ")
    for word in words:
        assert word in str(found.value), str(found.value)


def test_the_error_of_a_bf16_model_is_that_of_rounding(saved):
    """By hand, from the model in memory; and not much more is tolerated."""
    made = saved("half")
    result = made.check()
    batch = argument_filter(made.model)(made.expected.batch)
    loaded = tf.AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    with torch.no_grad():
        trained, rounded = (model.eval()(**batch).logits for model in (made.model, loaded))
    distance = float((rounded - trained).norm() / trained.norm())
    assert 1e-4 < distance < 1e-2
    assert result["relative_error"] == pytest.approx(distance, rel=1e-4)
    assert result["tolerance"] == pytest.approx(distance + 1e-4, rel=1e-3)


def test_products_in_low_precision(launched, models, saved, tmp_path):
    """The merged model rounds in other places than base and adapters; another function is still
    found.
    """
    launched("bf16")
    summary = train_job(models, tmp_path / "out", CAUSAL, **SHORT, **LORA)
    check = summary["saved_model"]
    assert 1e-4 < check["relative_error"] < 0.3 * check["tolerance"]
    assert summary["saved_adapter"]["relative_error"] == 0
    made = saved("job-gpt")
    assert made.check()["relative_error"] == 0
    change_settings(made.folder, activation_function="relu")
    with pytest.raises(SavedModelDiffers, match="the relative error of its outputs"):
        made.check()


def test_relative_errors_by_hand():
    nan = torch.nan
    inf = torch.inf
    expected = {"logits": torch.tensor([3.0, 4.0, nan, -inf]), "scores": torch.tensor([2.0])}
    same = {name: value.clone() for name, value in expected.items()}
    assert reload.relative_error(same, expected) == 0
    off = same | {"logits": torch.tensor([3.0, 5.0, nan, -inf])}
    assert reload.relative_error(off, expected) == pytest.approx(1 / 5)
    assert reload.relative_error(off | {"scores": torch.tensor([3.0])}, expected) == 0.5
    assert reload.relative_error(same | {"scores": torch.tensor([nan])}, expected) == inf
    assert reload.relative_error({"scores": same["scores"]}, expected) == inf
    assert reload.relative_error(same | {"scores": torch.ones(2)}, expected) == inf


KINDS = {
    "BERT classifier": ("classes", {}),
    "bf16 weights and adapters": (CAUSAL, {"model_name_or_path": "half", **LORA}),
    "translations": ("translations", {"predict_with_generate": False}),
    "adapters and a new head": ("classes", LORA),
    "a whole tied module": (CAUSAL, {**LORA, "lora_modules_to_save": ["lm_head"]}),
}
if find_spec("bitsandbytes") is not None:
    KINDS["QLoRA"] = (CAUSAL, {**LORA, "load_in_4bit": True})


@pytest.mark.parametrize("kind", KINDS)
def test_runs_say_that_what_they_saved_is_what_they_trained(kind, models, tmp_path):
    name, flags = KINDS[kind]
    if "model_name_or_path" in flags:
        flags = flags | {"model_name_or_path": str(models / flags["model_name_or_path"])}
    summary = train_job(models, tmp_path / "out", name, **SHORT, **flags)
    checks = {key: summary.get(key) for key in ("saved_model", "saved_adapter", "saved_best")}
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (checks["saved_adapter"] is not None) == ("lora_r" in flags)
    for check in filter(None, checks.values()):
        assert check["relative_error"] <= check["tolerance"] < 0.02
        assert check["rows"] == 4
    if "bf16" not in kind:
        assert checks["saved_best"] == EXACT


def evaluated(models: Path, folder: Path, output: Path, **flags) -> float:
    flags |= {"model_name_or_path": str(folder), "eval_only": True, "test_file": None}
    return train_job(models, output, CAUSAL, **flags)["eval_loss"]


@pytest.fixture(scope="module")
def loss_of_llama(models, tmp_path_factory):
    return evaluated(models, models / "llama", tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("targets", [["q_proj", "embed_tokens"], ["lm_head"]])
def test_an_adapter_on_tied_embeddings(targets, models, loss_of_llama, tmp_path):
    """Both folders evaluate to the loss of the run, the merged one untied. The control: the base
    does not.
    """
    base = models / "llama"
    output = tmp_path / "out"
    flags = {"lora_r": 4, "learning_rate": 0.05, "max_steps": 4, "eval_steps": 4}
    summary = train_job(
        models,
        output,
        CAUSAL,
        model_name_or_path=str(base),
        lora_target_modules=targets,
        test_file=None,
        **flags,
    )
    loss = pytest.approx(summary["eval_loss"], rel=1e-6)
    adapter = str(output / "adapter")
    assert evaluated(models, output, tmp_path / "merged") == loss
    assert evaluated(models, base, tmp_path / "adapter", adapter_name_or_path=adapter) == loss
    assert abs(loss_of_llama - summary["eval_loss"]) > 0.1
    assert not json.loads((output / "config.json").read_text())["tie_word_embeddings"]
    names = load_file(output / "model.safetensors").keys()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names


def test_tied_adapters_are_refused(models, tmp_path):
    """PEFT's `ensure_weight_tying` makes two parameters of the same memory."""
    base = tf.AutoModelForCausalLM.from_pretrained(models / "llama")
    settings = peft.LoraConfig(
        r=2, target_modules=["embed_tokens"], ensure_weight_tying=True, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(base, settings)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 4
    assert len({p.untyped_storage().data_ptr() for p in trained}) == 2
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    flags = {
        "model_name_or_path": str(models / "llama"),
        "adapter_name_or_path": str(tmp_path / "adapter"),
    }
    with pytest.raises(hf_ga.ConfigError, match=r"has ensure_weight_tying: .* share memory"):
        train_job(models, tmp_path / "out", CAUSAL, **flags)


def merged_by_peft(model: torch.nn.Module) -> torch.nn.Module:
    """In place, under both names of a tied weight."""
    return model.merge_and_unload(safe_merge=True)


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings")
def test_a_wrong_model_ends_the_command(models, tmp_path, monkeypatch, capsys):
    """Exit code 2, no summary, the checkpoint is kept; once the cause is gone, the run resumes from
    it, and saves without training again.
    """
    output = tmp_path / "out"
    flags = {
        "model_name_or_path": str(models / "llama"),
        "lora_target_modules": ["q_proj", "embed_tokens"],
    }
    config = job_config(models, output, CAUSAL, **SHORT, **LORA, **flags)
    (tmp_path / "run.json").write_text(json.dumps(config.to_dict()))
    with monkeypatch.context() as patch:
        patch.setattr(outputs, "merge_adapters", merged_by_peft)
        assert cli.finetune_main([str(tmp_path / "run.json")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {output} is not the trained model: its weights are those that")
    assert f"The checkpoint {output / 'checkpoint-2'} is kept" in error
    assert not (output / "summary.json").exists()
    lines = lines_of(output)
    resume = ["--resume_from_checkpoint", "auto"]
    assert cli.finetune_main([str(tmp_path / "run.json"), *resume]) == 0
    summary = json.loads((output / "summary.json").read_text())
    assert summary["saved_model"]["relative_error"] < 1e-5
    assert lines_of(output) == lines


def test_a_wrong_best_model_ends_the_run_at_once(models, tmp_path, monkeypatch):
    """At the first evaluation, before there is a checkpoint."""
    save = outputs._save_in_original_dtype

    def save_without_a_bias(folder: Path, *args) -> None:
        save(folder, *args)
        without("h.0.mlp.c_fc.bias")(folder)

    monkeypatch.setattr(outputs, "_save_in_original_dtype", save_without_a_bias)
    flags = {"max_steps": 4, "eval_steps": 1, "save_steps": 4}
    with pytest.raises(SavedModelDiffers, match=r"best is not .*c_fc\.bias \(other values\)") as e:
        train_job(models, tmp_path / "out", CAUSAL, **flags)
    assert "There is no checkpoint yet" in str(e.value)
    assert isinstance(e.value, hf_ga.HfGaError)
    assert not (tmp_path / "out" / "checkpoint-4").exists()
