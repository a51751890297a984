"""Experiment trackers: one run reports to all that are installed; each library's files contain the
values of metrics.jsonl.
"""

import json
import sqlite3
from importlib.util import find_spec
from pathlib import Path

import pytest
from runs import lines_of, small_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hf_ga
from hf_ga.finetuning.run.accelerator import tracker_names
from hf_ga.finetuning.run.flags.cli import parse_config

TOKEN = "hf_TheSecret"
PAGE = (Path(__file__).parents[3] / "docs/finetune.md").read_text()
SHOWN = parse_config(
    next(line for line in PAGE.splitlines() if "--report_to tensorboard --" in line).split()[3:]
)


def of_tensorboard(folder, name):
    folders = {
        path.parent for path in (folder / "out" / "trackers" / SHOWN.project).rglob("events.*")
    }
    events = [EventAccumulator(str(folder)).Reload() for folder in folders]
    return [
        (s.step, s.value) for e in events if name in e.Tags()["scalars"] for s in e.Scalars(name)
    ]


def of_trackio(folder, name):
    database = sqlite3.connect(folder / "trackio" / f"{SHOWN.project}.db")
    rows = [
        (step, json.loads(m))
        for step, m in database.execute(
            "select step, metrics from metrics where run_name = ?", [SHOWN.run_name]
        )
    ]
    assert database.execute("select count(distinct run_id) from metrics").fetchall() == [(1,)]
    database.close()
    assert not any(
        "__step" in values for _, values in rows
    )  # the name that trackio gives to a value called step
    return [(step, values[name]) for step, values in rows if name in values]


def of_mlflow(folder, name=None):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name(SHOWN.project).experiment_id])
    assert (run.info.run_name, run.data.params["learning_rate"]) == (SHOWN.run_name, "0.0003")
    return (
        [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        if name
        else run.info.run_id
    )


def of_wandb(folder, name):
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((folder / "out" / "trackers" / "wandb").glob("offline-run-*/*.wandb")):
        records = [Record.FromString(data) for data in wandb_records(path.read_bytes())]
        (run,) = [record.run for record in records if record.HasField("run")]
        assert (run.project, run.display_name) == (SHOWN.project, SHOWN.run_name)
        for record in records:
            items = {
                (item.key or item.nested_key[0]): json.loads(item.value_json)
                for item in record.history.item
            }
            found += [(items["_step"], items[name])] if name in items else []
    return found


def wandb_records(data):
    """The records of a file in LevelDB's log format: blocks of 32 KiB, a header of 7 bytes before
    each part of a record.
    """
    position, record = 7, b""  # after the file's own header
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        size = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


READERS = {
    "tensorboard": of_tensorboard,
    "trackio": of_trackio,
    "mlflow": of_mlflow,
    "wandb": of_wandb,
}
INSTALLED = [name for name in READERS if find_spec(name)]  # all: pip install -e ".[trackers]"


@pytest.fixture(scope="module")
def reported(place, tmp_path_factory):
    """The folder of a run with the flags that the docs show, resumed from its third step, of
    eight.
    """
    folder = tmp_path_factory.mktemp("reported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.setenv("HF_TOKEN", TOKEN)
        patch.chdir(folder)
        names = {
            "report_to": ",".join(INSTALLED),
            "project": SHOWN.project,
            "run_name": SHOWN.run_name,
        }
        for more in ({}, {"resume_from_checkpoint": str(folder / "out" / "checkpoint-3")}):
            hf_ga.finetune(small_config(place, folder / "out", save_total_limit=9, **names, **more))
            if "mlflow" in INSTALLED:
                patch.setenv("MLFLOW_RUN_ID", of_mlflow(folder))  # of the first run, for the second
    return folder


@pytest.mark.parametrize("tracker", INSTALLED)
def test_trackers_contain_what_metrics_contain(tracker, reported):
    lines = lines_of(reported / "out")
    compared = 0
    for name in (
        "loss",
        "grad_norm",
        "learning_rate",
        "eval_loss",
        "eval_perplexity",
        "num_targets",
    ):
        found = READERS[tracker](reported, name)
        expected = [(line["step"], line[name]) for line in lines if name in line]
        expected = expected + [pair for pair in expected if pair[0] > 3]  # of the resumed run
        assert [step for step, _ in found] == [step for step, _ in expected], (name, found)
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in expected], rel=1e-6
        )
        compared += len(found)
    assert compared == 4 * 13 + 2 * 5


def test_no_tracker_gets_the_token(reported):
    files = [path for path in reported.rglob("*") if path.is_file()]
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    assert len(files) > 20


def test_a_tracker_that_cannot_start_stops_the_run_before_it_begins(place, tmp_path, monkeypatch):
    def no_login(*args, **kwargs):
        (tmp_path / "out" / "trackers" / "wandb").mkdir()
        raise ValueError("no API key\nmore")

    monkeypatch.setattr("accelerate.Accelerator.init_trackers", no_login)
    with pytest.raises(
        hf_ga.ConfigError, match="report_to tensorboard cannot start: no API key Log in"
    ):
        hf_ga.finetune(small_config(place, tmp_path / "out", report_to="tensorboard"))
    hf_ga.FinetuneConfig(
        output_dir=str(tmp_path / "out")
    ).check_output_dir()  # it can be used again


def test_names_of_trackers(monkeypatch):
    monkeypatch.setattr(
        "hf_ga.finetuning.run.accelerator.get_available_trackers",
        lambda: ["tensorboard", "aim"],
    )
    assert tracker_names("none") == tracker_names("") == []
    assert tracker_names("aim, tensorboard") == ["aim", "tensorboard"]
    assert tracker_names("all") == ["tensorboard", "aim"]
    with pytest.raises(
        hf_ga.ConfigError,
        match=r"report_to wandb is not an installed tracker .* install its package",
    ):
        tracker_names("tensorboard,wandb")
