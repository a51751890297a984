"""Training a part of a model: LoRA against PEFT's own way of loading, and parameters frozen by
name.
"""

import json
import shutil
from importlib.util import find_spec

import peft
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from runs import JOBS, checkpointed, job_config, lines_of, train_job
from safetensors.torch import load_file
from torch import nn

import hf_ga
from hf_ga.finetuning.data.tasks import TASKS
from hf_ga.finetuning.run.build import build_model, prepare_setup
from hf_ga.finetuning.run.model.adapters import freeze

LORA = {"lora_r": 4, "lora_dropout": 0.1, "learning_rate": 2e-2}
# What is trained whole beside the adapters: the head, and what the checkpoint of a masked LM does
# not have.
NEW = {
    "causal LM, row by row": [],
    "classes": [
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "classifier.bias",
        "classifier.weight",
    ],
}
TEXT = "window samples is one step"


@pytest.fixture(scope="module")
def adapted(place):
    known = {}

    def run(name):
        if name not in known:
            known[name] = (
                train_job(place, place / "lora" / name, name, **LORA, eval_steps=8),
                place / "lora" / name,
            )
        return known[name]

    return run


def auto_class(name):
    return TASKS[JOBS[name][2].get("task", "causal-lm")].auto_class


def base_of(place, name, **more):
    return auto_class(name).from_pretrained(place / f"job-{JOBS[name][0]}", **more)


@torch.no_grad()
def logits_of(model, folder):
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    return model.eval()(
        **{k: v for k, v in tokenizer(TEXT, return_tensors="pt").items() if k != "token_type_ids"}
    ).logits


def peft_file(folder):
    return {
        k.removeprefix("base_model.model."): v
        for k, v in load_file(folder / "adapter_model.safetensors").items()
    }


@pytest.mark.parametrize("name", NEW)
def test_adapters_and_new_weights_are_all_that_is_trained(name, adapted, place):
    """The saved model by hand: base + alpha / r x B A where there is an adapter, new weights as in
    its file, else the base.
    """
    _, output = adapted(name)
    saved = load_file(output / "model.safetensors")
    base = base_of(place, name).state_dict()
    adapter = peft_file(output / "adapter")
    assert sorted(key for key in adapter if "lora" not in key) == NEW[name]
    settings = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 8, 0.1)
    changed = []
    for key, value in saved.items():
        module = key.removesuffix(".weight")
        if f"{module}.lora_A.weight" in adapter:
            update = (
                2
                * adapter[f"{module}.lora_B.weight"].double()
                @ adapter[f"{module}.lora_A.weight"].double()
            )
            update = (
                update.T if JOBS[name][0] != "bert" else update
            )  # GPT-2 has its matrices the other way round
            assert (value - base[key] - update).norm() <= 1e-6 * value.norm()
            assert update.norm() > 1e-3
            changed.append(module)
        elif key in NEW[name]:
            assert torch.equal(value, adapter[key])
        else:
            assert torch.equal(value, base[key]), key
    assert len(changed) * 2 == sum("lora" in key for key in adapter)
    assert len(changed) >= 8


@pytest.mark.parametrize("name", NEW)
def test_adapter_on_its_base_is_the_saved_model(name, adapted, place):
    summary, output = adapted(name)
    merged = logits_of(auto_class(name).from_pretrained(output), output)
    labels = {"num_labels": len(summary["labels"])} if summary["labels"] else {}
    for folder in ("adapter", "best"):
        torch.manual_seed(99)  # new weights of the base are other ones than in the run
        base = base_of(place, name, **labels)
        alone = logits_of(base, output)
        loaded = logits_of(peft.PeftModel.from_pretrained(base, output / folder), output)
        if folder == "adapter":
            assert (loaded - merged).norm() <= 1e-5 * merged.norm()
        assert (alone - merged).norm() > 1e-3 * merged.norm()


def test_checkpoints_hold_what_is_trained_and_resume_bit_for_bit(adapted, place, tmp_path):
    name = "classes"
    summary, output = adapted(name)
    kept = checkpointed(output / "checkpoint-8")["model"]
    whole = [
        key.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
        for key in kept
        if "lora" not in key
    ]
    assert sorted(whole) == NEW[name]
    assert len([key for key in kept if "lora" in key]) == len(
        [key for key in peft_file(output / "adapter") if "lora" in key]
    )
    resumed = train_job(
        place,
        tmp_path / "out",
        name,
        **LORA,
        eval_steps=8,
        resume_from_checkpoint=str(output / "checkpoint-6"),
    )
    assert resumed["weights_sha256"] == summary["weights_sha256"]
    assert [line["loss"] for line in lines_of(tmp_path / "out")] == [
        line["loss"] for line in lines_of(output)[6:]
    ]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        output / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow("whole runs; quick tests cover its parts")
def test_another_base_under_the_same_name_is_refused(place, tmp_path):
    """Its frozen weights are not in the checkpoint."""
    shutil.copytree(place / "job-gpt", tmp_path / "base")
    settings = {**LORA, "model_name_or_path": str(tmp_path / "base"), "max_steps": 1}
    train_job(place, tmp_path / "out", "causal LM, row by row", **settings)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias[0] += 1e-3
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(hf_ga.CheckpointError, match="has other settings: base_model"):
        train_job(
            place,
            tmp_path / "out",
            "causal LM, row by row",
            **settings,
            resume_from_checkpoint="auto",
        )


@pytest.mark.slow("a whole run; its parts are quick")
@pytest.mark.parametrize(
    ("name", "precision", "frozen"),
    [("classes", "bf16", torch.bfloat16), ("causal LM, row by row", "no", torch.float32)],
)
def test_a_bf16_base_stays_bf16_where_that_is_computed_in(
    name, precision, frozen, launched, place, tmp_path
):
    launched(precision)
    base_of(place, name, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    tf.AutoTokenizer.from_pretrained(place / f"job-{JOBS[name][0]}").save_pretrained(
        tmp_path / "bf16"
    )
    settings = {**LORA, "model_name_or_path": str(tmp_path / "bf16"), "max_steps": 3}
    config = job_config(place, tmp_path, name, **settings)
    setup = prepare_setup(config, Accelerator(cpu=True))
    assert setup.dtype == torch.bfloat16
    model = build_model(setup)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {frozen}
    if precision == "no":
        return
    summary = train_job(place, tmp_path / "out", name, **settings)
    lines = lines_of(tmp_path / "out")
    assert "bf16 autocast" in summary["precision"]
    assert all(line["loss"] < 10 and line["grad_norm"] > 0 for line in lines)
    assert {v.dtype for v in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_lora_on_layers_by_name(place, tmp_path):
    flags = {
        **LORA,
        "learning_rate": None,
        "lora_target_modules": ["c_attn"],
        "lora_alpha": 3.0,
        "max_steps": 2,
        "eval_steps": 2,
    }
    assert (
        train_job(place, tmp_path / "out", "causal LM, row by row", **flags)["learning_rate"]
        == 2e-4
    )  # the default
    adapter = peft_file(tmp_path / "out" / "adapter")
    assert len(adapter) == 4
    assert all("c_attn" in key for key in adapter)
    assert (
        json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())["lora_alpha"]
        == 3
    )
    with pytest.raises(
        hf_ga.ConfigError, match=r"LoRA cannot be added: Target modules .*q_proj.* not found"
    ):
        train_job(
            place, tmp_path / "new", "causal LM, row by row", **LORA, lora_target_modules=["q_proj"]
        )
    assert not (tmp_path / "new").exists()


HAS_BITSANDBYTES = (
    find_spec("bitsandbytes") is not None
)  # every process that imports it starts a second later: an extra
KINDS = {
    "DoRA": {"use_dora": True},
    **({"QLoRA": {"load_in_4bit": True}} if HAS_BITSANDBYTES else {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_adapters_do_not_depend_on_the_split(kind, place, tmp_path):
    """The saved model is that of PEFT on the base in its own precision; the control: the base
    alone.
    """
    name = "causal LM, row by row"
    settings = {"lora_r": 2, "lora_dropout": 0.1, "max_steps": 3, **KINDS[kind]}
    for size in (16, 3):
        train_job(place, tmp_path / str(size), name, per_device_train_batch_size=size, **settings)
    adapters = [peft_file(tmp_path / size / "adapter") for size in ("16", "3")]
    assert adapters[0].keys() == adapters[1].keys()
    for key, value in adapters[0].items():
        assert (adapters[1][key] - value).norm() <= 1e-5 * value.norm(), key
    merged = logits_of(auto_class(name).from_pretrained(tmp_path / "3"), tmp_path / "3")
    loaded = logits_of(
        peft.PeftModel.from_pretrained(base_of(place, name), tmp_path / "3" / "adapter"),
        tmp_path / "3",
    )
    assert (loaded - merged).norm() <= 1e-5 * merged.norm()
    assert (logits_of(base_of(place, name), tmp_path / "3") - merged).norm() > 1e-4 * merged.norm()


def test_a_new_layer_in_4_bits_is_refused(place, tmp_path):
    """It would be frozen as it was drawn."""
    message = (
        r"load_in_4bit would freeze .*pooler\.dense"
        if HAS_BITSANDBYTES
        else r'pip install "hf_ga\[qlora\]"'
    )
    with pytest.raises(hf_ga.ConfigError, match=message):
        train_job(place, tmp_path / "out", "classes", lora_r=2, load_in_4bit=True)


def test_an_adapter_is_trained_further(adapted, place, tmp_path):
    """Before its first step the loss is that of the trained adapter."""
    name = "causal LM, row by row"
    _, output = adapted(name)
    more = {"adapter_name_or_path": str(output / "adapter"), "max_steps": 1, "learning_rate": 1e-9}
    summary = train_job(place, tmp_path / "out", name, **more)
    whole = train_job(
        place,
        tmp_path / "merged",
        name,
        model_name_or_path=str(output),
        max_steps=1,
        learning_rate=1e-9,
    )
    assert summary["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)
    with pytest.raises(hf_ga.ConfigError, match="cannot load the adapter 'missing'"):
        train_job(place, tmp_path / "new", name, adapter_name_or_path="missing")


def test_without_peft(place, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_ga.finetuning.run.flags.config.find_spec", lambda name: None)
    with pytest.raises(
        hf_ga.ConfigError, match=r'adapters need the package peft: pip install "hf_ga\[finetune\]"'
    ):
        train_job(place, tmp_path / "out", "classes", lora_r=4)


FROZEN = {
    "module": (["bert.embeddings"], lambda name: name.startswith("bert.embeddings.")),
    "patterns": (
        ["bert.embeddings.*", "*.layer.[1-9].*"],
        lambda name: "embeddings" in name or ".layer.1." in name,
    ),
    "all but the head": (["bert"], lambda name: name.startswith("bert.")),
    "several modules": (
        ["*.bias", "bert.encoder.layer.0.attention"],
        lambda n: n.endswith(".bias") or "layer.0.attention" in n,
    ),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_by_name(kind, place):
    patterns, is_frozen = FROZEN[kind]
    model = tf.AutoModelForSequenceClassification.from_pretrained(place / "job-bert", num_labels=3)
    freeze(model, patterns)
    found = {name: not parameter.requires_grad for name, parameter in model.named_parameters()}
    assert found == {name: is_frozen(name) for name in found}
    assert len(set(found.values())) == 2


@pytest.mark.slow("whole runs; quick tests cover its parts")
def test_frozen_weights_keep_their_bits(place, tmp_path):
    """Weight decay included; all others move, and without the flag they all do."""
    torch.manual_seed(7)
    before = tf.AutoModelForSequenceClassification.from_pretrained(place / "job-bert", num_labels=3)
    before.save_pretrained(tmp_path / "start")
    tf.AutoTokenizer.from_pretrained(place / "job-bert").save_pretrained(tmp_path / "start")
    settings = {
        "model_name_or_path": str(tmp_path / "start"),
        "max_steps": 2,
        "weight_decay": 0.1,
        "learning_rate": 1e-2,
    }
    patterns, is_frozen = FROZEN["several modules"]
    train_job(place, tmp_path / "out", "classes", **settings, freeze=patterns)
    train_job(place, tmp_path / "free", "classes", **settings)
    after, free = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "free"))
    for name, value in before.named_parameters():
        assert torch.equal(after[name], value) == is_frozen(name), name
        assert not torch.equal(free[name], value)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.hidden = nn.Linear(3, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight


def test_a_shared_parameter_goes_by_all_its_names():
    for name in ("embedding", "output", "output.weight"):
        model = Shared()
        freeze(model, [name])
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {
            "hidden.weight",
            "hidden.bias",
        }


def test_patterns_that_freeze_nothing_or_all(place, tmp_path):
    for patterns, words in [
        (
            ["embeding"],
            r"freeze: no parameter is named 'embeding'; the nearest is embedding\.weight\.",
        ),
        (
            ["hidden", "hiden.bias"],
            r"no parameter is named 'hiden\.bias'; the nearest is hidden\.bias\.",
        ),
        (["embedding", "hidden.*"], r"freeze embedding hidden\..* freezes all"),
    ]:
        with pytest.raises(hf_ga.ConfigError, match=words):
            freeze(Shared(), patterns)
    with pytest.raises(
        hf_ga.ConfigError, match=r"no parameter is named 'bert\.embedings'; the nearest is bert\."
    ):
        train_job(place, tmp_path / "out", "classes", freeze=["bert.embedings"])
    assert not (tmp_path / "out").exists()
