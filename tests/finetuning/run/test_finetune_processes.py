"""The command on two processes, as the launcher sets them up: the same run as on one, written once;
DDP, FSDP, two machines, streams.
"""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import peft
import processes_worker
import pytest
import torch
import transformers as tf
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from forked import on_ranks, run_script, without_errors
from runs import (
    job_config,
    lines_of,
    ragged_rows,
    relative_distance,
    small_config,
    train,
    train_job,
    write_rows,
)

import hf_ga
from hf_ga import run
from hf_ga.finetuning.run.accelerator import check_sharded
from hf_ga.finetuning.run.flags import cli
from hf_ga.parallel import processes

PROFILES = Path(__file__).parents[3] / "accelerate_configs"
# encoder and decoder, dropout, texts generated in evaluations and for the file to predict
JOB = "translations"
STREAM = {"streaming": True, "shuffle_buffer_size": 20}
LORA = {"lora_r": 2, "lora_dropout": 0.1, "use_dora": True}  # the matrices of LoRA, and magnitudes
slow = pytest.mark.slow("starts two processes for eight runs")


def settings_of(place, output, **more):
    """The job with everything on."""
    rows = [{"source": text} for text in ("the samples of", "", "window", "one step and", "every")]
    predict = {
        "predict_file": write_rows(place / "predict.jsonl", rows),
        "per_device_eval_batch_size": 2,
    }
    trained = {"model_name_or_path": str(place / "base")}
    return job_config(
        place,
        output,
        JOB,
        **{**trained, **predict, "save_total_limit": 9, "report_to": "tensorboard", **more},
    )


def classes_of(place, output, **more):
    """One validation row: fewer than processes."""
    texts = [{"text": row["text"]} for row in ragged_rows(5, seed=3)]
    files = {"validation_file": write_rows(place / "one.jsonl", ragged_rows(1, seed=4))}
    files["predict_file"] = write_rows(place / "texts.jsonl", texts)
    return job_config(
        place,
        output,
        "classes",
        **files,
        per_device_eval_batch_size=2,
        save_steps=3,
        save_total_limit=9,
        **more,
    )


def variables_of(profile):
    """What the launcher sets for a profile."""
    words = [
        "--config_file",
        str(PROFILES / f"{profile}.yaml"),
        "--num_processes",
        "2",
        "--mixed_precision",
        "no",
        "script.py",
    ]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    found = {
        k: v
        for k, v in prepare_multi_gpu_env(args).items()
        if k.startswith(("ACCELERATE_", "FSDP_"))
    }
    return found | {"ACCELERATE_USE_CPU": "true"}


@pytest.fixture(scope="module")
def one(place):
    """The runs on one process: translations (of a model that has learnt something), classes, a
    stream, LoRA.
    """
    often = {"max_steps": 30, "eval_steps": 30, "save_steps": 30, "predict_with_generate": False}
    train_job(place, place / "base", JOB, **often, learning_rate=1e-2, lr_scheduler_type="linear")
    summary = hf_ga.finetune(settings_of(place, place / "one"))
    hf_ga.finetune(classes_of(place, place / "classes"))
    train(place, place / "streamed", **STREAM)
    train(place, place / "adapted", **LORA)
    return summary, place / "one"


@pytest.fixture(scope="module")
def runs_of_two(one, place):
    """A folder with the records of all phases, whose runs are in `place`, each under the name of
    its phase.
    """
    on_machines = {**variables_of("multi_node"), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    from_3 = {"resume_from_checkpoint": str(place / "fsdp2" / "checkpoint-3")}
    phases = {
        "two": (settings_of(place, place / "two"), variables_of("cpu_2")),
        "machines": (
            settings_of(
                place, place / "machines", resume_from_checkpoint=str(one[1] / "checkpoint-6")
            ),
            on_machines,
        ),
        "fsdp1": (classes_of(place, place / "fsdp1"), variables_of("fsdp1")),
        "fsdp2": (classes_of(place, place / "fsdp2"), variables_of("fsdp2")),
        "fsdp2 again": (classes_of(place, place / "fsdp2 again", **from_3), variables_of("fsdp2")),
        "lora": (small_config(place, place / "lora", **LORA), variables_of("fsdp2")),
        "lora under fsdp1": (
            small_config(place, place / "lora under fsdp1", **LORA),
            variables_of("fsdp1"),
        ),
        "stream": (small_config(place, place / "stream", **STREAM), variables_of("cpu_2")),
        "error": (
            small_config(place, place / "error", dataset_name=str(place / "missing.jsonl")),
            variables_of("cpu_2"),
        ),
    }
    folder = place / "records"
    job = []
    folder.mkdir()
    for name, (config, variables) in phases.items():
        (folder / f"{name}.config.json").write_text(
            json.dumps({k: v for k, v in config.to_dict().items() if v is not None})
        )
        job.append(
            {"name": name, "flags": [str(folder / f"{name}.config.json")], "environment": variables}
        )
    with pytest.MonkeyPatch.context() as patch:  # a cache of their own, empty at first
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache 2")
        run_script(processes_worker.__file__, folder, job)
    return folder


def records_of(folder, name):
    return [json.loads((folder / name / f"{rank}.json").read_text()) for rank in (0, 1)]


def summary_of(output):
    return json.loads((output / "summary.json").read_text())


def predictions_of(*outputs):
    return [
        [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
        for output in outputs
    ]


def assert_same_run(output, reference, loss=1e-5, evaluation=1e-6, after=0):
    """The lines of the steps after that many (a run that goes on in another folder begins new
    lines), and the weights.
    """
    for line, other in zip(lines_of(output), lines_of(reference)[after:], strict=True):
        assert line.keys() == other.keys()
        for name in line.keys() - {"tokens_per_second", "num_processes"}:
            allowed = (
                evaluation * 10
                if "perplexity" in name
                else evaluation
                if name.startswith("eval_")
                else loss
            )
            assert line[name] == pytest.approx(other[name], rel=allowed), (line["step"], name)
    assert relative_distance(output, reference) <= 5e-5


def files_of(folder):
    """Without trackers, whose names hold the time."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in files if not name.startswith("trackers")}


@slow
def test_two_processes_are_the_same_run(one, runs_of_two, place):
    """With dropout: losses and evaluations of every step, and the weights at the end, which both
    have to the bit.
    """
    assert_same_run(place / "two", one[1])
    summary, (first, second) = summary_of(place / "two"), records_of(runs_of_two, "two")
    assert "1 process x 2 micro-batches x 8" in one[0]["layout"]
    assert "2 processes x 1 micro-batch x 8" in summary["layout"]
    for name in ("test_loss", "test_exact_match", "test_rougeL", "test_num_targets", "eval_rougeL"):
        assert summary[name] == pytest.approx(one[0][name], rel=1e-6), name
    assert first["ddp"]
    assert second["ddp"]
    assert [first["processes"], second["processes"]] == [2, 2]
    assert first["weights"] == second["weights"] == summary["weights_sha256"]
    found, expected = predictions_of(place / "two", one[1])
    assert found == expected
    assert [row["prediction"] is None for row in found] == [
        False,
        True,
        False,
        False,
        False,
    ]
    texts = [row["prediction"]["text"] for row in found if row["prediction"]]
    assert len(set(texts)) > 1, "so an exchange would be seen"


@slow
def test_files_and_lines_are_written_once(one, runs_of_two, place):
    output = place / "two"
    printed = (runs_of_two / "two" / "log").read_text()
    of_ranks = {
        f"checkpoint-{step}/shards/shard-00002-model-00001-of-00001.safetensors"
        for step in (3, 6, 8)
    }
    assert files_of(output) - of_ranks == files_of(one[1])
    assert "checkpoint-3/shards/shard-00001-model-00001-of-00001.safetensors" in files_of(output)
    num_trackers = [len(list((run / "trackers").rglob("events*"))) for run in (output, one[1])]
    assert num_trackers[0] == num_trackers[1] > 0
    for text in (
        "window of 16 samples",
        "T5ForConditionalGeneration, ",
        "step 3: validation loss",
        "rows predicted",
        "output  ",
    ):
        assert printed.count(text) == 1, text


@slow
def test_two_machines_go_on_with_what_one_process_began(one, runs_of_two, place):
    """Only the first prints. The control: the last two steps move the weights by more."""
    assert (runs_of_two / "machines" / "log").read_text().count("window of 16 samples") == 1
    first, second = records_of(runs_of_two, "machines")
    assert first["weights"] == second["weights"]
    assert_same_run(place / "machines", one[1], after=6)
    assert relative_distance(one[1] / "checkpoint-6", one[1]) > 1e-4


@slow
def test_a_stream_is_the_same_run(runs_of_two, place):
    assert summary_of(place / "stream")["layout"].startswith("window of 16 samples = 2 processes")
    assert_same_run(place / "stream", place / "streamed")


@slow
@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_is_the_same_run(version, runs_of_two, place):
    """Shards on both processes; a validation row for one of them; the model that is saved is
    whole.
    """
    output = place / f"fsdp{version}"
    reference = place / "classes"
    first, second = records_of(runs_of_two, f"fsdp{version}")
    assert first["fsdp_units"] == second["fsdp_units"] >= 3
    assert first["fsdp"] == version
    assert not first["ddp"]
    assert_same_run(output, reference)
    assert tf.AutoModelForSequenceClassification.from_pretrained(output / "best").num_labels == 3
    assert {"best/model.safetensors", "summary.json"} <= files_of(output)
    found, expected = predictions_of(output, reference)
    for row, other in zip(found, expected, strict=True):
        assert row["prediction"]["label"] == other["prediction"]["label"]
        assert row["prediction"]["score"] == pytest.approx(other["prediction"]["score"], abs=2e-6)
    assert relative_distance(reference / "checkpoint-3", reference) > 1e-4  # the control


@slow
def test_lora_and_dora_under_fsdp_are_the_same_run(runs_of_two, place):
    """The merged model, and the adapters in PEFT on the base model."""
    output = place / "lora"
    assert_same_run(output, place / "adapted")
    merged, base = (
        tf.AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (output, place / "gpt")
    )
    ids = torch.arange(12)[None]
    logits = merged(ids).logits
    for folder in ("adapter", "best"):
        adapted = peft.PeftModel.from_pretrained(
            tf.AutoModelForCausalLM.from_pretrained(place / "gpt"), output / folder
        ).eval()
        torch.testing.assert_close(adapted(ids).logits, logits, rtol=1e-5, atol=1e-5)
    assert (base(ids).logits - logits).abs().max() > 1e-4  # the control


@slow
@pytest.mark.parametrize("name", ["two", "fsdp1", "fsdp2", "lora", "lora under fsdp1"])
def test_saved_models_are_loaded_and_compared(name, runs_of_two, place):
    """Also with the outputs of a sharded model, whose forwards are collectives."""
    summary = summary_of(place / name)
    checks = [summary["saved_model"], summary["saved_best"]]
    if name.startswith("lora"):
        checks.append(summary["saved_adapter"])
    for check in checks:
        assert check["relative_error"] < 1e-5
        assert check["rows"] >= 2


@slow
def test_resuming_under_fsdp_is_the_run_that_never_stopped(runs_of_two, place):
    """Bit for bit; on other layouts: tests/recovery/test_resume_layouts.py."""
    assert_same_run(place / "fsdp2 again", place / "fsdp2", 0.0, 0.0, after=3)
    assert (
        summary_of(place / "fsdp2")["weights_sha256"]
        == summary_of(place / "fsdp2 again")["weights_sha256"]
    )
    assert records_of(runs_of_two, "fsdp2 again")[0]["fsdp"] == 2


def test_what_fsdp_cannot_do_is_refused():
    plugin = SimpleNamespace(fsdp_version=2, cpu_ram_efficient_loading=True)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin)
    )
    check_sharded(hf_ga.FinetuneConfig(), accelerator)
    for more, message in [
        (
            {"task": "seq2seq", "predict_with_generate": True},
            "generate with the saved model and --eval_only",
        ),
        (
            {"task": "seq2seq", "predict_file": "rows.jsonl"},
            "generate with the saved model and --eval_only",
        ),
        ({"lora_r": 2, "resize_token_embeddings": True}, "tied embeddings share .*: use DDP"),
    ]:
        with pytest.raises(hf_ga.ConfigError, match=message):
            check_sharded(hf_ga.FinetuneConfig(**more), accelerator)
    plugin.fsdp_version = 1
    with pytest.raises(hf_ga.ConfigError, match="FSDP1 does not support fsdp_cpu_ram_efficient"):
        check_sharded(hf_ga.FinetuneConfig(), accelerator)


@slow
@pytest.mark.parametrize(
    "more",
    [
        {"model": "bert", "task": "text-classification", "label_column": "label"},
        {"model": "gpt", "lora_r": 4},
        {"model": "gpt", "freeze": ["transformer.wte"], "gradient_checkpointing": True},
    ],
    ids=["a new head", "adapters", "a frozen tied weight"],
)
def test_weights_of_the_main_process_make_the_same_run(place, tmp_path, more):
    """Bit for bit: process 1 loads nothing, and tries nothing."""
    more = dict(more)
    name = str(place / more.pop("model"))
    summaries = []
    for kind in ("fsdp2", "fsdp2 from main"):
        config = small_config(
            place,
            tmp_path / kind,
            model_name_or_path=name,
            max_steps=2,
            eval_steps=2,
            save_steps=2,
            **more,
        )
        found = on_ranks(partial(hf_ga.finetune, config), 2, kind, limit=200)
        summaries.append(without_errors(found)[0])
    first, second = summaries
    assert second["weights_sha256"] == first["weights_sha256"]
    assert second["eval_loss"] == first["eval_loss"]
    assert second["loss"] == first["loss"]
    if not config.lora_r:  # adapters are resumed: weights from two places
        return
    resumed = replace(config, max_steps=3, resume_from_checkpoint="auto", resume_with_changes=True)
    found = on_ranks(partial(hf_ga.finetune, resumed), 2, "fsdp2 from main", limit=200)
    assert without_errors(found)[0]["steps"] == 3


@slow
def test_what_is_wrong_for_all_is_said_once(runs_of_two, place):
    """The first process ends before the other one complains."""
    errors = [
        line
        for line in (runs_of_two / "error" / "log").read_text().splitlines()
        if line.startswith("error:")
    ]
    assert errors == [f"error: the file {place / 'missing.jsonl'} does not exist."]
    assert not (place / "error").exists()


@pytest.mark.parametrize(("rank", "waits"), [(None, []), ("0", []), ("1", [run.PATIENCE])])
def test_the_others_wait_before_they_complain(rank, waits, monkeypatch):
    waited = []
    monkeypatch.setattr(run.time, "sleep", waited.append)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert cli.finetune_main(["--no_such_flag"]) == 2
    assert waited == waits


@pytest.mark.parametrize(("cores", "local", "threads"), [(8, 3, 2), (8, 1, 8), (2, 4, 1)])
def test_processes_share_the_cores_of_their_machine(cores, local, threads, monkeypatch):
    """Those on this machine count, not all 16."""
    used = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    accelerator = SimpleNamespace(num_processes=16, device=torch.device("cpu"))
    processes.share_cores(accelerator)
    assert used == [threads]
    monkeypatch.delenv(
        "ACCELERATE_MIXED_PRECISION"
    )  # the control: started without the launcher, the user's choice stays
    processes.share_cores(accelerator)
    assert used == [threads]
