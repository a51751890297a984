"""SLURM without SLURM: what would be submitted, restarts, and real jobs of submitit's local executor."""

import importlib.util
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
from accelerate.commands.launch import launch_command_parser
from submitit import DebugExecutor

from hf_ga.errors import ConfigError, HfGaError
from hf_ga.run import slurm
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.slurm import NodeJob, main_process_port, run_to_end
from hf_ga.run.slurm_executors import minutes_of

ROOT = Path(__file__).parent.parent
SUBMIT, TEMPLATE = ROOT / "scripts" / "submit_slurm.py", ROOT / "scripts" / "slurm" / "finetune.sbatch"
RESUME = ["--resume_from_checkpoint", "auto"]

# A run of two processes: sums a number over them, notes its flags, and plays a run that is preempted once.
RUN = """
import json, os, sys, time
from pathlib import Path
import psutil, torch, torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator()
number = torch.tensor([float(accelerator.process_index + 1)])
if accelerator.num_processes > 1:
    dist.all_reduce(number)
folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
accelerator.wait_for_everyone()
first = not list(folder.glob("checkpoint-*"))
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    folder.mkdir(exist_ok=True)
    found = {"sum": number.item(), "processes": accelerator.num_processes, "kind": str(accelerator.distributed_type)}
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps(found | {"flags": sys.argv[1:], "pid": os.getpid()}) + "\\n")
    if "--preempt" in sys.argv and first:
        (folder / "checkpoint-7").mkdir()
        launcher = psutil.Process().parent()  # SLURM tells every process of the job
        launcher.send_signal(12)
        launcher.parent().send_signal(12)
if "--preempt" in sys.argv and first:
    time.sleep(100)
accelerator.end_training()  # else gloo's threads may abort a process that ends
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("submit_slurm_script", SUBMIT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("ACCELERATE_USE_CPU")  # the job must set it itself
    (tmp_path / "run.py").write_text(RUN)
    return str(tmp_path / "run.py")


def starts(folder):
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


def parsed(words):
    """A launch as Accelerate's own parser reads it."""
    assert words[:2] == ["accelerate", "launch"]
    return launch_command_parser().parse_args([word if word != "PORT" else "1" for word in words[2:]])


# ------------------------------------------------------------------------------------------------------------ what is submitted


def dry_run(script, capsys, arguments):
    assert script.main([*arguments.split(), "--dry_run", "--", "train.py", "--output_dir", "a b"]) == 0
    text, _, nodes = capsys.readouterr().out.partition("# what the task on each node starts")
    return text, [shlex.split(line.partition(": ")[2]) for line in nodes.splitlines()[1:]]


def test_dry_run_prints_the_batch_script(script, capsys, tmp_path):
    asked = "--nodes 3 --gpus_per_node 4 --time 1-12:00:00 --partition big --account me --mem 480G --cpus_per_task 32"
    more = f"--sbatch qos=high --sbatch constraint=h200 --job_name trial --folder {tmp_path}"
    text, commands = dry_run(script, capsys, f"{asked} {more}")
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH"))
    wanted = {"nodes": "3", "gpus-per-node": "4", "ntasks-per-node": "1", "time": "2160", "partition": "big", "account": "me"}
    wanted |= {"mem": "480G", "cpus-per-task": "32", "constraint": "h200", "qos": "high", "job-name": "trial", "requeue": ""}
    assert {name: options.get(name) for name in wanted} == wanted
    assert options["signal"].startswith("USR2@") and options["output"] == f"{tmp_path}/%j_0_log.out"
    (srun,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "--kill-on-bad-exit=1" in srun and "--cpus-per-task=32" in srun and f"-m submitit.core._submit {tmp_path}" in srun
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=10).returncode == 0
    assert [parsed(words).machine_rank for words in commands] == [0, 1, 2]
    for words in commands:
        read = parsed(words)
        assert (read.multi_gpu, read.num_machines, read.num_processes, read.main_process_ip) == (True, 3, 12, "HOST")
        assert (read.training_script, read.training_script_args) == ("train.py", ["--output_dir", "a b"])


def test_dry_run_without_what_is_not_asked_for(script, capsys):
    text, _ = dry_run(script, capsys, "--gpus_per_node 0 --processes_per_node 2 --setup 'x'".replace("'", ""))
    assert not [name for name in ("gpus", "--partition", "--account", "--mem", "--cpus-per-task") if name in text]
    assert "\n# setup\nx\n" in text


def test_setup_lines_come_before_the_run(script, capsys):
    assert script.main(["--setup", "module load cuda", "--setup", "export A=1", "--dry_run", "--", "train.py"]) == 0
    text = capsys.readouterr().out
    assert text.index("\nmodule load cuda\nexport A=1\n") < text.index("\nsrun ")


def test_submitting_hands_over_what_the_dry_run_prints(script, capsys, tmp_path, monkeypatch):
    """With stand-ins for srun and sbatch, which keeps the file that it gets; the job is what a task would then load."""
    (tmp_path / "bin").mkdir()
    for name, body in {"srun": "", "sbatch": f'cp "$1" {tmp_path}/got.sh\necho Submitted batch job 1234567'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    flags = ["--nodes", "2", "--folder", str(tmp_path / "jobs"), "--time", "90"]
    command = ["--", "train.py", "--output_dir", "out"]
    assert script.main([*flags, "--dry_run", *command]) == 0
    printed = capsys.readouterr().out.partition("# what the task on each node starts")[0].strip()
    assert script.main([*flags, *command]) == 0
    assert capsys.readouterr().out == f"job 1234567, log: {tmp_path}/jobs/1234567_0_log.out\n"
    assert (tmp_path / "got.sh").read_text().strip() == printed
    submission = pickle.loads((tmp_path / "jobs" / "1234567_submitted.pkl").read_bytes())
    assert submission.function == NodeJob(tuple(command[1:]), 2, 8, output_dir="out")
    assert (submission._timeout_min, submission._timeout_countdown) == (90, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nodes 0 -- train.py", "nodes must be at least 1, got 0."),
        ("--gpus_per_node -1 -- train.py", "gpus_per_node must be at least 0, got -1."),
        ("--max_timeouts -1 -- train.py", "max_timeouts must be at least 0, got -1."),
        ("--processes_per_node 2 -- train.py", "processes_per_node is gpus_per_node (8), got 2: leave it out."),
        ("--sbatch constraint -- train.py", "sbatch takes NAME=VALUE, got constraint."),
        ("--time soon -- train.py", "time must be minutes, minutes:seconds"),
        ("--dry_run", "there is nothing to run: put the script and its flags last, after --."),
        ("-- scripts/finetune.py --learning_rat 1", "unknown flag --learning_rat. Did you mean --learning_rate?"),
        ("-- scripts/finetune.py --max_length 0", "max_length must be at least"),
        ("--nodes 2 --cluster local -- train.py", "cluster local is this machine: nodes must be 1, got 2."),
        ("-- train.py", "this machine submits to no SLURM: "),
    ],
)
def test_bad_input_is_one_line(arguments, message, script, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # no srun
    assert script.main(arguments.split()) == 2
    out = capsys.readouterr()
    assert out.err.startswith(f"error: {message}") and out.err.count("\n") == 1 and not out.out


def test_submitit_is_asked_for(script, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert script.main(["--", "train.py"]) == 2
    assert capsys.readouterr().err == 'error: submitit is not installed: pip install "hf_ga[slurm]".\n'


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 91),
        ("0:01", 1),
        ("24:00:00", 1440),
        ("00:00:01", 1),
        ("2-12", 3600),
        ("1-00:30", 1470),
        ("1-2:3:4", 1564),
    ],
)
def test_time_as_slurm_writes_it(text, minutes):
    assert minutes_of(text) == minutes


@pytest.mark.parametrize("text", ["", "-5", "1:2:3:4", "1-", "1-1:2:3:4", "1-2-3", "ten", "1.5", "0", "0:00"])
def test_time_refused(text):
    with pytest.raises(ConfigError, match="time must be"):
        minutes_of(text)


def test_ports():
    assert main_process_port("1234567") == 24567 == main_process_port("1234567_0"[:-2])
    assert len({main_process_port(str(job)) for job in range(100, 1100)}) == 1000
    assert all(1024 < main_process_port(job) < 32768 for job in ("0", "9999", "123_4", "local"))


# ----------------------------------------------------------------------------------------------------------------- node commands


def test_node_commands_by_hand():
    job = NodeJob(("train.py", "--x", "1"), nodes=2, processes_per_node=8)
    rank_1 = "--multi_gpu --num_machines 2 --num_processes 16 --machine_rank 1 --main_process_ip n0 --main_process_port 29"
    assert job.node_command(1, "n0", 29) == f"accelerate launch {rank_1} train.py --x 1".split()
    expected = {4: "--multi_gpu --num_machines 1 --num_processes 4 --main_process_port 0", 1: "--num_machines 1 --num_processes 1"}
    for processes, flags in expected.items():
        one_node = NodeJob(("train.py",), nodes=1, processes_per_node=processes)
        assert one_node.node_command(0, "n0", 29) == f"accelerate launch {flags} train.py".split()


def test_a_config_file_is_not_overruled(script, capsys):
    """Catches `--multi_gpu` beside an FSDP file: Accelerate then wraps in DDP and says nothing."""
    asked = "--nodes 2 --accelerate_config fsdp.yaml --mixed_precision bf16 --dry_run -- train.py"
    assert script.main(asked.split()) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition(": ")[2])
    read = parsed(words)
    assert (read.multi_gpu, read.config_file, read.mixed_precision, read.num_processes) == (False, "fsdp.yaml", "bf16", 16)


# ---------------------------------------------------------------------------------------------------------------------- restarts


def save(folder, step, when):
    (folder / f"checkpoint-{step}").mkdir(parents=True)
    os.utime(folder / f"checkpoint-{step}", (when, when))


@pytest.fixture
def started(tmp_path):
    """A job that began at second 1000 in an empty folder, as it is after one preemption."""
    job = NodeJob(("finetune.py", "--output_dir", str(tmp_path / "out")), 1, 2, output_dir=str(tmp_path / "out"))
    job.first_start, job.found_empty = 1000.0, True
    return job


def resubmitted(job):
    """The job that `checkpoint` queues, through submitit's pickles."""
    return pickle.loads(cloudpickle.dumps(job.checkpoint())).function


def test_checkpoint_queues_a_run_that_resumes(started, tmp_path):
    save(tmp_path / "out", 5, when=2000)
    assert started.words_of_start() == list(started.command), "control: the first start has no reason to resume"
    again = resubmitted(started)
    assert again == replace(started, restarts=1)
    assert again.words_of_start() == [*started.command, *RESUME]
    assert again.node_command(0, "n0", 29)[-2:] == RESUME
    assert resubmitted(again).restarts == 2


def test_resumed_flags_are_taken_by_finetune(started, tmp_path):
    """Catches a restart that finetune.py refuses, or that deletes the run."""
    save(tmp_path / "out", 5, when=2000)
    first = [*started.command, "--overwrite-output-dir", "--resume_from_checkpoint", "elsewhere"]
    words = resubmitted(replace(started, command=tuple(first))).words_of_start()
    config = slurm.parse_config(words[1:])
    config.check()
    assert (config.resume_from_checkpoint, config.overwrite_output_dir) == ("auto", False)
    assert slurm.parse_config(first[1:]).overwrite_output_dir, "control: the flags as they were would begin anew"


def test_restart_before_the_first_checkpoint_begins_anew(started, tmp_path):
    (tmp_path / "out").mkdir()
    assert resubmitted(started).words_of_start() == list(started.command)
    (tmp_path / "out" / "metrics.jsonl").touch()
    assert resubmitted(started).words_of_start() == [*started.command, "--overwrite_output_dir"]
    # In a folder that held something before, nothing is deleted: finetune.py refuses, or overwrites because it was told to.
    assert resubmitted(replace(started, found_empty=False)).words_of_start() == list(started.command)
    told = replace(started, command=(*started.command, "--overwrite_output_dir"))
    assert resubmitted(told).words_of_start() == list(told.command)


def test_a_checkpoint_of_an_earlier_run_is_not_resumed(started, tmp_path):
    save(tmp_path / "out", 5, when=500)
    told = replace(started, command=(*started.command, "--overwrite_output_dir"), found_empty=False)
    assert resubmitted(told).words_of_start() == list(told.command)
    save(tmp_path / "out", 6, when=1500)
    assert resubmitted(told).words_of_start()[-4:] == [*RESUME, "--overwrite_output_dir", "false"]


def test_slurms_own_restart_resumes(tmp_path, monkeypatch):
    """A node failed: SLURM counts the restart, and `checkpoint` was never called."""
    job = NodeJob(("train.py",), 1, 2, output_dir=str(tmp_path))
    save(tmp_path, 5, when=2000)
    job._note_start()
    assert job.words_of_start() == ["train.py"] and not job.found_empty
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = NodeJob(("train.py",), 1, 2, output_dir=str(tmp_path))
    again._note_start()
    assert again.words_of_start() == ["train.py", *RESUME]


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("scripts/finetune.py", FinetuneConfig().output_dir),
        ("scripts/finetune.py --output-dir=there", "there"),
        ("scripts/finetune.py run.yaml", "of the file"),
        ("train.py --output_dir there --x", "there"),
        ("train.py --output_dir=there", "there"),
        ("train.py --x", None),
    ],
)
def test_where_the_checkpoints_are(words, folder, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("output_dir: of the file\n")
    resources = script.read_resources(script.make_parser().parse_args([]))
    assert slurm.node_job(words.split(), resources, []).output_dir == folder


# -------------------------------------------------------------------------------------------------------------------- real jobs


@pytest.mark.launch
def test_a_preempted_job_of_two_processes_is_queued_again_and_resumes(run_file, tmp_path):
    """Through the script and submitit's local executor, to processes that meet. Then SLURM's signal reaches launcher and task: the
    task queues itself again, ends both processes, and the second start resumes."""
    flags = f"--cluster local --wait --gpus_per_node 0 --processes_per_node 2 --time 11 --folder {tmp_path / 'jobs'} --"
    command = [sys.executable, str(SUBMIT), *flags.split(), run_file, "--output_dir", str(tmp_path / "out"), "--preempt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.endswith("\ndone\n"), done.stderr
    first, second = starts(tmp_path / "out")
    assert first["flags"][-1] == "--preempt" and second["flags"][-2:] == RESUME
    for start in (first, second):
        assert (start["sum"], start["processes"], start["kind"]) == (3.0, 2, "DistributedType.MULTI_CPU")
    assert not Path(f"/proc/{first['pid']}").exists(), "the first start would go on writing beside the second"
    (log,) = (tmp_path / "jobs").glob("*_0_log.out")
    lines = [line for line in log.read_text().splitlines() if line.startswith("accelerate launch ")]
    assert [parsed(shlex.split(line)).num_processes for line in lines] == [2, 2]


@pytest.fixture
def launches(monkeypatch):
    """What jobs of this process launch, as (words, environment); each ends at once with exit code 0, or the one put into `code`."""
    made, code = [], []
    monkeypatch.setattr(slurm, "run_to_end", lambda words, environment, signal: made.append((words, environment)) or sum(code))
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    return made, code


@pytest.mark.parametrize("code", [0, 3])
def test_waiting_tells_how_the_run_ended(code, launches, script, capsys, tmp_path, monkeypatch):
    """In this process, by submitit's own executor for debugging."""
    launches[1].append(code)
    monkeypatch.setattr(script, "local_executor", lambda folder, resources: DebugExecutor(folder))
    monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", "12")
    flags = ["--cluster", "local", "--gpus_per_node", "0", "--folder", str(tmp_path)]
    assert script.main([*flags, "--wait", "--", "train.py"]) == bool(code)
    ((words, environment),) = launches[0]
    assert words == ["accelerate", "launch", "--num_machines", "1", "--num_processes", "1", "train.py"]
    assert environment["ACCELERATE_USE_CPU"] == "true" and "ACCELERATE_USE_CPU" not in os.environ
    out = capsys.readouterr()
    assert out.out.startswith("job ") and ("\ndone\n" in out.out) == (not code)
    assert ("node 0: exit code 3 of accelerate launch" in out.err) == bool(code)


def test_a_task_of_slurm_knows_its_node(launches, monkeypatch):
    """What SLURM tells the task on its second node, read by submitit."""
    told = {"JOB_ID": "1234567", "JOB_NUM_NODES": "2", "NODEID": "1", "PROCID": "1", "NTASKS": "2", "JOB_NODELIST": "node[7,9]"}
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    job = NodeJob(("train.py",), nodes=2, processes_per_node=8)
    job()
    ((words, environment),) = launches[0]
    read = parsed(words)
    assert (read.machine_rank, read.main_process_ip, read.main_process_port) == (1, "node7", 24567)
    assert (read.num_machines, read.num_processes) == (2, 16)
    assert "ACCELERATE_USE_CPU" not in environment and environment["PATH"].startswith(str(Path(sys.executable).parent))


def test_a_task_that_is_terminated_waits_to_be_queued_again(launches, monkeypatch):
    """SLURM's SIGTERM ends the launched processes before the signal that queues the job again. Control: another failure is told."""
    waited = []
    monkeypatch.setattr(slurm.time, "sleep", waited.append)
    monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", "12")
    job = NodeJob(("train.py",), nodes=1, processes_per_node=2)
    launches[1].append(1)
    for terminated in (False, True):
        if terminated:
            monkeypatch.setattr(slurm, "run_to_end", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or 1)
        with pytest.raises(HfGaError, match="exit code 1 of"):
            job()
        assert waited == [slurm.SIGNAL_SECONDS] * terminated
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_run_to_end_ignores_the_signal_and_gives_the_exit_code():
    """Catches children that die of USR2 before the job is queued again. Control: of another signal they die."""
    words = lambda name: ["bash", "-c", f"kill -{name} $$; exit 5"]  # noqa: E731
    assert run_to_end(words("USR2"), dict(os.environ), "USR2") == 5
    assert run_to_end(words("USR1"), dict(os.environ), "USR2") == -10


# What `accelerate launch` of one process does: it ends at once, and the run, which saves, a little later.
SAVES = """
import os, signal, sys, time
if os.fork():
    signal.pause()
def save(*_):
    time.sleep(1)
    open(sys.argv[1], "w").write("saved")
    os._exit(0)
signal.signal(signal.SIGTERM, save)
open(sys.argv[1], "w").write("runs")
time.sleep(60)
"""


@pytest.mark.parametrize(("grace", "left"), [(20, "saved"), (-10, "runs")])
def test_run_to_end_lets_the_run_save(grace, left, tmp_path, monkeypatch):
    """When this process is ended. The control: without time to do so, it is killed."""

    wait = subprocess.Popen.wait

    def ended(process):
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        while not (tmp_path / "file").exists() or not (tmp_path / "file").read_text():
            time.sleep(0.01)
        raise SystemExit

    monkeypatch.setattr(slurm, "GRACE_SECONDS", grace)
    monkeypatch.setattr(subprocess.Popen, "wait", ended)
    with pytest.raises(SystemExit):
        run_to_end([sys.executable, "-c", SAVES, str(tmp_path / "file")], dict(os.environ), "USR2")
    assert (tmp_path / "file").read_text() == left


# --------------------------------------------------------------------------------------------------------------- sbatch template


@pytest.fixture
def cluster(tmp_path):
    """Folder with stand-ins: srun runs the command once for each node, accelerate prints its arguments one a line."""
    fakes = {
        "scontrol": 'printf "node7\\nnode9\\n"',
        "srun": 'while [[ "$1" == --* ]]; do shift; done\nfor id in 0 1; do SLURM_NODEID=$id "$@"; done',
        "accelerate": 'printf "%s\\n" accelerate "$@" END',
    }
    for name, body in fakes.items():
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path / "bin"


def run_template(cluster, *arguments, **environment):
    known = {"JOB_NODELIST": "node[7,9]", "JOB_ID": "1234567", "JOB_NUM_NODES": "2", "GPUS_ON_NODE": "8"}
    variables = {f"SLURM_{name}": value for name, value in known.items()} | environment
    variables["PATH"] = f"{cluster}:{os.environ['PATH']}"
    command = ["bash", TEMPLATE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=20, cwd=cluster.parent)
    assert done.returncode == 0, done.stderr
    return [block.splitlines() for block in done.stdout.split("END\n")[:-1]]


def test_template_launches_both_nodes(cluster):
    """The same commands as the Python way."""
    found = run_template(cluster, "--global_batch_size", "3072", "--text_column", "a b")
    flags = ("--output_dir", "outputs/finetune", *RESUME, "--global_batch_size", "3072", "--text_column", "a b")
    script = ("scripts/finetune.py", *flags)
    job = NodeJob(script, nodes=2, processes_per_node=8)
    assert found == [job.node_command(rank, "node7", main_process_port("1234567")) for rank in (0, 1)]
    assert slurm.parse_config(parsed(found[1]).training_script_args).text_column == "a b"


def test_template_saves_before_the_limit_and_goes_on(cluster):
    """SLURM's signal is the one that torch's launcher passes on; each start goes on where there is a checkpoint."""
    (options,) = [line for line in TEMPLATE.read_text().splitlines() if line.startswith("#SBATCH --signal=")]
    name, seconds = options.removeprefix("#SBATCH --signal=").split("@")
    grace = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", TEMPLATE.read_text())
    assert name == "TERM" and int(grace[1]) < int(seconds)
    for words in run_template(cluster, "--seed", "1", OUTPUT_DIR="out"):
        assert words[words.index("scripts/finetune.py") :] == ["scripts/finetune.py", "--output_dir", "out", *RESUME, "--seed", "1"]


def test_template_is_commented_line_by_line():
    lines = TEMPLATE.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert len(options) >= 8 and all(lines[i - 1].startswith("# ") for i in options)
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(options) < first_command, "sbatch reads no option after the first command"
    assert subprocess.run(["bash", "-n", TEMPLATE], timeout=10).returncode == 0
