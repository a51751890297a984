"""The README is true: its Python blocks run, its commands run (shortened), and continuous integration runs its test command."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Trainer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
CHECKS = [line for line in COMMANDS if line.startswith("python scripts/check_equivalence.py")]
SWEEPS = [line for line in COMMANDS if line.startswith("python scripts/sweep_heads.py")]
PLANS = [line for line in COMMANDS if line.startswith(("python scripts/plan_batch.py", "python scripts/submit_slurm.py"))]
RUNS = [line.split("&& ")[-1] for line in COMMANDS if "finetune" in line and line not in PLANS]


def test_the_demonstration_fails_and_then_passes(capsys):
    """A demonstration in which both arms agree, or none, would catch nothing."""
    exec(compile(PYTHON_BLOCKS[0], "README.md", "exec"), {"__name__": "demonstration"})
    off = [float(value) for value in re.findall(r"off by (\S+)", capsys.readouterr().out)]
    assert off[0] > 0.1
    assert off[1] < 1e-6


def test_the_notebook_snippet_runs(capsys):
    exec(compile(PYTHON_BLOCKS[3], "README.md", "exec"), {"__name__": "snippet"})
    printed = capsys.readouterr().out
    assert [int(n) for n in re.findall(r"(\d+) targets in the last window", printed)] == [4, 4]


def test_the_check_convicts_the_step_and_acquits_ours(capsys):
    names: dict = {}
    exec(compile(PYTHON_BLOCKS[1], "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "hf_ga: passed" in printed and "mine: FAILED" in printed and "x4.00" in printed
    assert names["report"].arm("hf_ga").passed and not names["report"].passed


def test_the_one_import_line_gives_a_trainer():
    names: dict = {}
    exec(compile(PYTHON_BLOCKS[2], "README.md", "exec"), names)
    assert issubclass(names["Trainer"], Trainer) and names["Trainer"] is not Trainer


def test_all_python_blocks_are_tried():
    assert len(PYTHON_BLOCKS) == 4
    assert len(RUNS) == 12
    assert len(PLANS) == 2
    assert len(CHECKS) == 1
    assert len(SWEEPS) == 1


SHORTER = ["--max_steps", "2", "--max_length", "16", "--per_device_eval_batch_size", "256"]
PLAIN = ["accelerate launch scripts/finetune.py", "hf-ga finetune"]  # nothing between the launcher and the script


@pytest.mark.launch
def test_the_commands_run(tmp_path):
    """In one folder and in this order, as some resume; shortened to a few steps and few tokens. First those that tell the launcher
    something, and one of each other kind, by themselves, then the others without importing everything for each.
    """
    kinds = [next((kind for kind in PLAIN if command.startswith(kind)), "") for command in RUNS]
    themselves = [n for n, kind in enumerate(kinds) if not kind or kinds.index(kind) == n]
    assert len(themselves) == 5 and {kinds[n] for n in themselves} == {"", *PLAIN}
    for command in (RUNS[n] for n in themselves):
        words = [str(ROOT / word) if word.startswith(("scripts/", "accelerate_configs/")) else word for word in command.split()]
        words[0] = str(Path(sys.executable).parent / words[0])
        result = subprocess.run([*words, *SHORTER], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, f"{command}\n{result.stderr[-3000:]}"
    others = [[*c.removeprefix(kinds[n]).split(), *SHORTER] for n, c in enumerate(RUNS) if n not in themselves]
    (tmp_path / "job.json").write_text(json.dumps(others))
    words = [sys.executable, str(ROOT / "tests" / "command_lines.py"), "job.json"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=480)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "outputs/finetune/summary.json").exists() and (tmp_path / "outputs/safe/summary.json").exists()


def test_the_plans_are_printed(tmp_path, capsys, monkeypatch):
    """The exact layout with the lines that the README shows, and the batch script with the launch command of each node."""
    monkeypatch.chdir(tmp_path)
    printed = []
    for command in PLANS:
        _, script, *flags = shlex.split(command)
        monkeypatch.setattr(sys, "argv", [script, *(str(ROOT / flag) if flag.startswith("scripts/") else flag for flag in flags)])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        printed.append(capsys.readouterr().out)
    shown = [line for line in README.splitlines() if line.startswith("    ") and "3072" in line]
    assert len(shown) == 2 and all(line.strip() in printed[0].splitlines() for line in shown)
    assert "#SBATCH" in printed[1] and "--num_processes 16" in printed[1]


@pytest.mark.launch
def test_the_check_runs(tmp_path):
    """With a quick window; it must pass, as `--assert` says by the exit code."""
    words = [str(ROOT / word) if word.startswith("scripts/") else word for word in CHECKS[0].split()[1:]]
    command = [sys.executable, *words, "--quick", "--compare", "none", "--max_length", "16"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "hf_ga: passed" in result.stdout and (tmp_path / "outputs/check/report.html").exists()


@pytest.mark.launch
def test_the_sweep_runs(tmp_path):
    """Of fewer heads; none may be wrong."""
    words = [str(ROOT / word) if word.startswith("scripts/") else word for word in SWEEPS[0].split()[1:]]
    words = [word.replace("^BertFor", "^BertFor(Mask|Quest)") for word in words]
    result = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 right, 0 refused" in result.stdout and (tmp_path / "outputs/heads/heads.md").exists()


def test_ci_runs_the_test_command():
    """What the README tells a newcomer to run is what continuous integration runs."""
    command = next(line for line in COMMANDS if "pytest" in line)
    ci = (ROOT / ".ci/run").read_text()
    for part in command.split(" && ")[2:]:
        assert part.removeprefix("pip install ") in ci, part


def test_the_main_command_comes_early():
    lines = README.splitlines()
    assert next(i for i, line in enumerate(lines) if "accelerate launch scripts/finetune.py" in line) < 40
