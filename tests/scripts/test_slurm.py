"""submit_slurm.py without SLURM: the batch script, the launch commands, and a real job of
submitit's local executor.
"""

import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import submit_slurm
from accelerate.commands.launch import launch_command_parser
from submit_slurm import RESUME, NodeJob, minutes_of, run_to_end

from hf_ga.errors import HfGaError

SUBMIT = Path(submit_slurm.__file__)

PREEMPTED = Path(__file__).with_name("preempted_worker.py")
SAVING = Path(__file__).with_name("saving_worker.py")


def parsed(words):
    """A launch as Accelerate's own parser reads it."""
    assert words[:2] == ["accelerate", "launch"]
    return launch_command_parser().parse_args(
        [word if word != "PORT" else "1" for word in words[2:]]
    )


def test_dry_run_prints_the_batch_script_and_each_launch(capsys):
    asked = (
        "--nodes 3 --gpus_per_node 4 --time 1-12:00:00 --partition big --cpus_per_task 32 "
        "--sbatch mem=480G --sbatch qos=high"
    )
    asked += " --setup x --accelerate_config fsdp.yaml --mixed_precision bf16"
    assert (
        submit_slurm.main([*asked.split(), "--dry_run", "--", "train.py", "--output_dir", "a b"])
        == 0
    )
    text, *commands = capsys.readouterr().out.split("# node ")
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    )
    wanted = {
        "nodes": "3",
        "gpus-per-node": "4",
        "ntasks-per-node": "1",
        "time": "2160",
        "partition": "big",
        "mem": "480G",
    }
    wanted |= {"cpus-per-task": "32", "qos": "high", "job-name": "hf_ga", "requeue": ""}
    assert {name: options.get(name) for name in wanted} == wanted
    assert options["signal"].startswith("USR2@")
    (srun,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "--kill-on-bad-exit=1" in srun
    assert "--cpus-per-task=32" in srun
    assert text.index("\nx\n") < text.index(srun)
    for rank, command in enumerate(commands):
        read = parsed(shlex.split(command.partition(": ")[2]))
        assert (read.machine_rank, read.num_machines, read.num_processes, read.main_process_ip) == (
            rank,
            3,
            12,
            "HOST",
        )
        assert (read.multi_gpu, read.config_file, read.mixed_precision) == (
            False,
            "fsdp.yaml",
            "bf16",
        ), "DDP would win over FSDP"
        assert (read.training_script, read.training_script_args) == (
            "train.py",
            ["--output_dir", "a b", *RESUME],
        )


def test_a_job_is_submitted(capsys, tmp_path, monkeypatch):
    """With stand-ins for srun and sbatch, which keeps the file that it gets."""
    for name, body in {
        "srun": "",
        "sbatch": f'cp "$1" {tmp_path}/got.sh\necho Submitted batch job 1234567',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert (
        submit_slurm.main(
            ["--nodes", "2", "--folder", str(tmp_path / "jobs"), "--time", "90", "--", "train.py"]
        )
        == 0
    )
    assert capsys.readouterr().out == f"job 1234567, log: {tmp_path}/jobs/1234567_0_log.out\n"
    text = (tmp_path / "got.sh").read_text()
    assert all(
        f"#SBATCH --{option}\n" in text
        for option in ("nodes=2", "time=90", "gpus-per-node=8", "requeue")
    )
    submission = pickle.loads((tmp_path / "jobs" / "1234567_submitted.pkl").read_bytes())
    assert submission.function == NodeJob(("train.py",), 2, 8)
    assert (submission._timeout_min, submission._timeout_countdown) == (90, 3)
    assert (
        pickle.loads(cloudpickle.dumps(submission.function.checkpoint())).function
        == submission.function
    )  # queued again


def test_errors(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # no srun
    for arguments, message in [
        (
            "scripts/finetune.py --learning_rat 1",
            "unknown flag --learning_rat. Did you mean --learning_rate?",
        ),
        ("scripts/finetune.py --max_length 0", "max_length must be at least"),
        ("train.py", "SLURM is not available on this machine"),
    ]:
        assert submit_slurm.main(["--", *arguments.split()]) == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")


def test_time_limits():
    assert [minutes_of(text) for text in ("90", "24:00:00", "00:00:01", "1-02:03:04")] == [
        90,
        1440,
        1,
        1564,
    ]
    with pytest.raises(ValueError):
        minutes_of("1:2")


def test_launch_words_by_hand():
    job = NodeJob(("train.py", "--x", "1"), nodes=2, processes_per_node=8)
    rank_1 = (
        "--multi_gpu --num_machines 2 --num_processes 16 --machine_rank 1 --main_process_ip n0 "
        "--main_process_port 29"
    )
    assert job.launch_words(1, "n0", 29) == [
        *f"accelerate launch {rank_1} train.py --x 1".split(),
        *RESUME,
    ]
    expected = {
        4: "--multi_gpu --num_machines 1 --num_processes 4 --main_process_port 0",
        1: "--num_machines 1 --num_processes 1",
    }
    for processes, flags in expected.items():
        one_node = NodeJob(("train.py",), nodes=1, processes_per_node=processes)
        assert one_node.launch_words(0, "n0", 29) == [
            *f"accelerate launch {flags} train.py".split(),
            *RESUME,
        ]


@pytest.mark.slow("starts processes")
def test_a_preempted_job_of_two_processes_is_queued_again_and_resumes(tmp_path, monkeypatch):
    """Through the script and submitit's local executor, to processes that meet. Then SLURM's signal
    reaches launcher and task: the task queues itself again, ends both processes, and the second
    start resumes.
    """
    monkeypatch.delenv("ACCELERATE_USE_CPU")  # the job must set it itself
    flags = (
        "--cluster local --wait --gpus_per_node 0 --processes_per_node 2 --time 11 --folder "
        f"{tmp_path / 'jobs'} --"
    )
    command = [
        sys.executable,
        str(SUBMIT),
        *flags.split(),
        str(PREEMPTED),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, second = (
        json.loads(line) for line in (tmp_path / "out" / "starts.jsonl").read_text().splitlines()
    )
    for start in (first, second):
        assert start["flags"][-2:] == list(RESUME)
        assert (start["sum"], start["kind"]) == (3.0, "DistributedType.MULTI_CPU")
    assert not Path(f"/proc/{first['pid']}").exists(), (
        "the first start would go on writing beside the second"
    )
    (log,) = (tmp_path / "jobs").glob("*_0_log.out")
    lines = [line for line in log.read_text().splitlines() if line.startswith("accelerate launch ")]
    assert [parsed(shlex.split(line)).num_processes for line in lines] == [2, 2]


@pytest.fixture
def launches(monkeypatch):
    """Arguments of `run_to_end` of the jobs that run in this process."""
    made = []
    monkeypatch.setattr(submit_slurm, "run_to_end", lambda *given: made.append(given) or 0)
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    before = signal.getsignal(signal.SIGTERM)
    yield made
    signal.signal(signal.SIGTERM, before)


def test_a_task_reads_its_node_from_slurm(launches, monkeypatch):
    given = {
        "JOB_ID": "1234567",
        "JOB_NUM_NODES": "2",
        "NODEID": "1",
        "PROCID": "1",
        "NTASKS": "2",
        "JOB_NODELIST": "node[7,9]",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    NodeJob(("train.py",), nodes=2, processes_per_node=8)()
    ((words, variables, _),) = launches
    read = parsed(words)
    assert (read.machine_rank, read.main_process_ip, read.main_process_port) == (1, "node7", 24567)
    assert "ACCELERATE_USE_CPU" not in variables
    assert variables["PATH"].startswith(str(Path(sys.executable).parent))


@pytest.mark.parametrize("terminated", [False, True])
def test_a_terminated_task_waits_to_be_queued_again(terminated, launches, monkeypatch):
    """SIGTERM ends the launched processes before the signal that queues the job again. Control:
    another failure raises at once.
    """
    waited = []
    monkeypatch.setattr(submit_slurm.time, "sleep", waited.append)
    monkeypatch.setattr(
        submit_slurm,
        "run_to_end",
        lambda *_: (terminated and os.kill(os.getpid(), signal.SIGTERM)) or 1,
    )
    monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", "12")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "debug")
    with pytest.raises(HfGaError, match="exit code 1 of"):
        NodeJob(("train.py",), nodes=1, processes_per_node=2)()
    assert waited == [submit_slurm.SIGNAL_SECONDS] * terminated


def test_run_to_end_ignores_the_signal_and_gives_the_exit_code():
    """Catches children that die of USR2 before the job is queued again. Control: of another signal
    they die.
    """
    words = lambda name: ["bash", "-c", f"kill -{name} $$; exit 5"]  # noqa: E731
    assert run_to_end(words("USR2"), dict(os.environ), signal.SIGUSR2) == 5
    assert run_to_end(words("USR1"), dict(os.environ), signal.SIGUSR2) == -10


def test_run_to_end_lets_the_run_save(tmp_path, monkeypatch):
    """When this process is ended."""
    file = tmp_path / "file"
    wait = subprocess.Popen.wait

    def ended(process):
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        while not file.exists() or not file.read_text():
            time.sleep(0.01)
        raise SystemExit

    monkeypatch.setattr(subprocess.Popen, "wait", ended)
    with pytest.raises(SystemExit):
        run_to_end([sys.executable, str(SAVING), str(file)], dict(os.environ), signal.SIGUSR2)
    assert file.read_text() == "saved"
