"""hf_ga.finetune on two processes, started by the real `accelerate launch`: the same run as on one, written once, and no hang."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import finetune_worker
import pytest
import torch
import transformers as tf
from accelerate.utils import DistributedType
from launching import PORTS, environment
from runs import filled_place, job_config, lines_of, ragged_rows, relative_distance, save_jobs, train_job, write_rows

import hf_ga
from hf_ga.parallel import processes
from hf_ga.run import cli, finetune

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "accelerate_configs"
JOB = "translations"  # encoder and decoder, dropout, texts generated in evaluations and for the file to predict
LIMIT = 150  # seconds; nothing here takes half of it on a machine with two busy cores


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with filled_place(tmp_path_factory.mktemp("processes")) as folder:
        save_jobs(folder)
        often = {"max_steps": 60, "eval_steps": 60, "save_steps": 60, "predict_with_generate": False}
        train_job(folder, folder / "base", JOB, **often, learning_rate=1e-2, lr_scheduler_type="linear")
        write_rows(folder / "one.jsonl", ragged_rows(1, seed=4))
        yield folder


def settings_of(place, output, **more):
    """The job with everything on."""
    rows = [{"source": text} for text in ("the samples of", "", "window", "one step and", "every")]
    predict = {"predict_file": write_rows(place / "predict.jsonl", rows), "per_device_eval_batch_size": 2}
    trained = {"model_name_or_path": str(place / "base")}
    return job_config(place, output, JOB, **{**trained, **predict, "save_total_limit": 9, "report_to": "tensorboard", **more})


def command(profile, *arguments):
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", PROFILES / f"{profile}.yaml"]
    return [*map(str, (*launcher, *arguments))]


def launch(script, *arguments, profile="cpu_2", place=None, flags=()):
    """Returns the finished process."""
    words = command(profile, *flags, script, *arguments)
    return subprocess.run(words, env=environment(place), capture_output=True, text=True, timeout=LIMIT)


def launch_machines(script, *arguments, place):
    """Two machines with one process each, which meet at a port of this one. Returns what each printed."""
    port = next(PORTS)
    flags = ["--num_processes", "2", "--num_machines", "2", "--main_process_port", port, "--machine_rank"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment(place)}
    with ExitStack() as stack:
        words = [command("multi_node", *flags, machine, script, *arguments) for machine in (0, 1)]
        machines = [stack.enter_context(subprocess.Popen(of_one, **pipes)) for of_one in words]
        for machine in machines:
            stack.callback(machine.kill)  # where it has ended already, nothing happens
        printed = [machine.communicate(timeout=LIMIT)[0] for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], printed
    return printed


def worker_of(config):
    """The script and its arguments, with a folder for its records."""
    records = Path(f"{config.output_dir} records")
    records.mkdir()
    (records / "config.json").write_text(json.dumps(config.to_dict()))
    return finetune_worker.__file__, records / "config.json", records


def run_worker(place, config, **how):
    """Returns what the two processes recorded, and what they printed."""
    words = worker_of(config)
    done = launch(*words, place=place, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return recorded_in(words[-1]), done


def recorded_in(records):
    found = [json.loads((records / f"{index}.json").read_text()) for index in (0, 1)]
    assert [one["processes"] for one in found] == [2, 2]
    return found


@pytest.fixture(scope="module")
def one(place):
    return train_job(place, place / "one", JOB, **vars_of(settings_of(place, place / "one"))), place / "one"


def vars_of(config):
    return {name: value for name, value in config.to_dict().items() if name != "output_dir"}


@pytest.fixture(scope="module")
def two(place):
    return *run_worker(place, settings_of(place, place / "two")), place / "two"


def predictions_of(*runs):
    return [[json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()] for run in runs]


def assert_same_lines(output, reference, loss=1e-5, evaluation=1e-6, after=0):
    """Of the steps after that many: a run that goes on in another folder begins new lines."""
    for line, other in zip(lines_of(output), lines_of(reference)[after:], strict=True):
        assert line.keys() == other.keys()
        for name in line.keys() - {"tokens_per_second"}:
            off = evaluation * 10 if "perplexity" in name else evaluation if name.startswith("eval_") else loss
            assert line[name] == pytest.approx(other[name], rel=off), (line["step"], name)


def files_of(folder):
    """Without trackers, whose names hold the time."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in files if not name.startswith("trackers")}


# -- DDP --------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow("starts processes")
def test_two_processes_are_the_same_run(one, two):
    """With dropout, losses and evaluations of every step, and the weights at the end."""
    assert_same_lines(two[2], one[1])
    assert relative_distance(two[2], one[1]) <= 5e-5
    assert "= 1 process x 2 micro-batches x 8" in one[0]["layout"]
    assert "= 2 processes x 1 micro-batch x 8" in two[0][0]["summary"]["layout"]
    for name in ("test_loss", "test_exact_match", "test_rougeL", "test_num_targets", "eval_rougeL"):
        assert two[0][0]["summary"][name] == pytest.approx(one[0][name], rel=1e-6), name


@pytest.mark.slow("starts processes")
def test_both_processes_hold_the_same(two):
    """The same weights to the bit, and the same summary, which is that of the file."""
    first, second = two[0]
    assert first["ddp"] and second["ddp"]
    assert first["weights"] == second["weights"] == first["summary"]["weights_sha256"]
    assert first["summary"] == second["summary"] == json.loads((two[2] / "summary.json").read_text())


@pytest.mark.slow("starts processes")
def test_predictions_of_two_processes_are_those_of_one(one, two):
    found, expected = predictions_of(two[2], one[1])
    assert found == expected and [row["prediction"] is None for row in found] == [False, True, False, False, False]
    assert len({row["prediction"]["text"] for row in found if row["prediction"]}) >= 3  # so an exchange would be seen


@pytest.mark.slow("starts processes")
def test_files_and_lines_are_written_once(one, two):
    _, done, output = two
    of_ranks = {f"checkpoint-{step}/shards/shard-00002-model-00001-of-00001.safetensors" for step in (3, 6, 8)}
    assert files_of(output) - of_ranks == files_of(
        one[1]
    ) and "checkpoint-3/shards/shard-00001-model-00001-of-00001.safetensors" in files_of(output)
    num_trackers = [len(list((run / "trackers").rglob("events*"))) for run in (output, one[1])]
    assert num_trackers[0] == num_trackers[1] > 0
    printed = done.stdout + done.stderr
    for text in (
        "window of 16 samples",
        "T5ForConditionalGeneration, ",
        "step 3: validation loss",
        "rows predicted",
        "output     ",
    ):
        assert printed.count(text) == 1, text
    assert printed.count("tokenizing train:   0%") == 1  # the other process found it in the cache


@pytest.mark.slow("starts processes")
def test_resuming_on_one_process_what_two_began(one, two, place, tmp_path):
    settings = vars_of(settings_of(place, tmp_path / "out")) | {"resume_from_checkpoint": str(two[2] / "checkpoint-3")}
    summary = train_job(place, tmp_path / "out", JOB, **settings)
    assert summary["steps"] == 8
    assert_same_lines(tmp_path / "out", one[1], after=3)
    assert relative_distance(tmp_path / "out", one[1]) <= 5e-5


@pytest.mark.slow("long")
@pytest.mark.slow("starts processes")
def test_resuming_on_two_machines_what_one_process_began(one, place, tmp_path):
    """Machines as the profile multi_node has them; only the first one prints."""
    words = worker_of(settings_of(place, tmp_path / "out", resume_from_checkpoint=str(one[1] / "checkpoint-6")))
    printed = launch_machines(*words, place=place)
    assert ["window of 16 samples" in text for text in printed] == [True, False]
    first, second = recorded_in(words[-1])
    assert first["weights"] == second["weights"] and first["summary"]["steps"] == 8
    assert_same_lines(tmp_path / "out", one[1], after=6)
    assert relative_distance(tmp_path / "out", one[1]) <= 5e-5
    assert relative_distance(one[1] / "checkpoint-6", one[1]) > 1e-4  # the control: the last two steps move the weights by more


# -- FSDP -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classes(place):
    """One process, and one validation row: fewer than processes."""
    more = {"validation_file": str(place / "one.jsonl"), "per_device_eval_batch_size": 2, "save_steps": 3, "save_total_limit": 9}
    predict = {"predict_file": write_rows(place / "texts.jsonl", [{"text": row["text"]} for row in ragged_rows(5, seed=3)])}
    train_job(place, place / "classes", "classes", **more, **predict)
    return place / "classes", {**more, **predict}


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(
    "version", [pytest.param(1, marks=pytest.mark.slow("long")), 2]
)  # FSDP1 is one of test_resume_layouts.py's nine
def test_fsdp_is_the_same_run(version, classes, place):
    """Shards on both processes; a validation row for one of them; the model that is saved is whole."""
    reference, more = classes
    config = job_config(place, place / f"fsdp{version}", "classes", **more)
    flags = ["--num_processes", "2", "--mixed_precision", "no"]
    (first, second), _ = run_worker(place, config, profile=f"fsdp{version}", flags=flags)
    output = place / f"fsdp{version}"
    assert first["fsdp_units"] == second["fsdp_units"] >= 3 and not first["ddp"]
    assert first["summary"] == second["summary"]
    assert_same_lines(output, reference)
    assert relative_distance(output, reference) <= 5e-5
    assert tf.AutoModelForSequenceClassification.from_pretrained(output / "best").num_labels == 3
    assert {"best/model.safetensors", "summary.json"} <= files_of(output)
    found, expected = predictions_of(output, reference)
    for row, other in zip(found, expected, strict=True):
        assert row["prediction"]["label"] == other["prediction"]["label"]
        assert row["prediction"]["score"] == pytest.approx(other["prediction"]["score"], abs=2e-6)
    resumed_on_one_process(place, output, reference, more)


def resumed_on_one_process(place, sharded, reference, more):
    """From the shards of two processes; the control is that the steps after the checkpoint move the weights."""
    output = place / f"{sharded.name} on one"
    train_job(place, output, "classes", **more, resume_from_checkpoint=str(sharded / "checkpoint-3"))
    assert_same_lines(output, reference, after=3)
    assert relative_distance(output, reference) <= 5e-5 < 1e-4 < relative_distance(reference / "checkpoint-3", reference)


@pytest.mark.slow("long")
@pytest.mark.slow("starts processes")
def test_resuming_under_fsdp_is_the_run_that_never_stopped(classes, place, tmp_path):
    """Bit for bit on the same layout; one that FSDP2 wrote goes on under FSDP1; damage is found."""
    _, more = classes
    flags = ["--num_processes", "2", "--mixed_precision", "no"]
    whole = place / "fsdp2 whole"
    (undisturbed, _), _ = run_worker(place, job_config(place, whole, "classes", **more), profile="fsdp2", flags=flags)
    for profile in ("fsdp2", "fsdp1"):
        config = job_config(place, tmp_path / profile, "classes", **more, resume_from_checkpoint=str(whole / "checkpoint-3"))
        (resumed, _), _ = run_worker(place, config, profile=profile, flags=flags)
        assert_same_lines(tmp_path / profile, whole, *([0.0, 0.0] if profile == "fsdp2" else []), after=3)
        same = resumed["summary"]["weights_sha256"] == undisturbed["summary"]["weights_sha256"]
        assert same == (profile == "fsdp2")
    shard = next((whole / "checkpoint-6" / "shards").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(hf_ga.CheckpointError, match=f"{shard.name} is damaged"):
        train_job(place, tmp_path / "damaged", "classes", **more, resume_from_checkpoint=str(whole / "checkpoint-6"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"task": "seq2seq", "predict_with_generate": True}, "generate with the saved model and --eval_only"),
        ({"task": "seq2seq", "predict_file": "rows.jsonl"}, "generate with the saved model and --eval_only"),
        ({"lora_r": 4}, "FSDP does not support lora_r, .*: use DDP"),
        ({"model_name_or_path": "gpt"}, "fsdp_cpu_ram_efficient_loading, .* set it to false"),
    ],
)
def test_what_fsdp_cannot_do_is_refused(more, message):
    plugin = SimpleNamespace(fsdp_version=2, cpu_ram_efficient_loading=True)
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, state=SimpleNamespace(fsdp_plugin=plugin))
    finetune._check_sharded(hf_ga.FinetuneConfig(), accelerator)
    with pytest.raises(hf_ga.ConfigError, match=message):
        finetune._check_sharded(hf_ga.FinetuneConfig(**more), accelerator)


# -- errors -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow("starts processes")
def test_what_is_wrong_for_all_is_said_once(tmp_path):
    flags = ("--dataset_name", tmp_path / "missing.jsonl", "--output_dir", tmp_path / "out")
    done = launch(ROOT / "scripts/finetune.py", *flags)
    assert done.returncode != 0
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
    assert errors == [f"error: the file {tmp_path / 'missing.jsonl'} does not exist."]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow("starts processes")
def test_an_exception_on_one_process_ends_both(place, tmp_path):
    """The other one waits for it in a sum that never comes."""
    config = job_config(place, tmp_path / "out", "classes")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    done = launch(finetune_worker.__file__, tmp_path / "config.json", tmp_path, "1", place=place)
    since = re.search(rf"OSError: {finetune_worker.MESSAGE} since ([\d.]+)", done.stderr)
    assert done.returncode != 0 and since is not None and time.time() - float(since[1]) < 60
    assert [line["step"] for line in lines_of(tmp_path / "out")] == [1, 2]  # what was done before
    assert not list(tmp_path.glob("[01].json"))


@pytest.mark.parametrize(("rank", "waits"), [(None, []), ("0", []), ("1", [cli.PATIENCE])])
def test_the_others_wait_before_they_complain(rank, waits, monkeypatch):
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert cli.finetune_main(["--no_such_flag"]) == 2 and waited == waits


# -- cores ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "local", "threads"), [(8, 3, 2), (8, 1, 8), (2, 4, 1), (2, 2, 1)])
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
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")  # the control: started without the launcher, the user's choice stays
    processes.share_cores(accelerator)
    assert used == [threads]
