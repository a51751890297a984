"""The README is true: its Python blocks run, its commands run (shortened), and continuous integration runs its test command."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
RUNS = [line.split("&& ")[-1] for line in COMMANDS if "finetune" in line]


def test_the_demonstration_fails_and_then_passes(capsys):
    """A demonstration in which both arms agree, or none, would catch nothing."""
    exec(compile(PYTHON_BLOCKS[0], "README.md", "exec"), {"__name__": "demonstration"})
    off = [float(value) for value in re.findall(r"off by (\S+)", capsys.readouterr().out)]
    assert off[0] > 0.1
    assert off[1] < 1e-6


def test_the_notebook_snippet_runs(capsys):
    exec(compile(PYTHON_BLOCKS[1], "README.md", "exec"), {"__name__": "snippet"})
    printed = capsys.readouterr().out
    assert [int(n) for n in re.findall(r"(\d+) targets in the last window", printed)] == [4, 4]


def test_all_python_blocks_are_tried():
    assert len(PYTHON_BLOCKS) == 2
    assert len(RUNS) == 7


@pytest.mark.launch
def test_the_commands_run(tmp_path):
    """In one folder and in this order, since the last one resumes; shortened to a few steps and few tokens."""
    scripts = Path(sys.executable).parent
    for command in RUNS:
        words = command.split()
        words = [str(ROOT / word) if word.startswith(("scripts/", "accelerate_configs/")) else word for word in words]
        words[0] = str(scripts / words[0])
        shortened = [*words, "--max_steps", "2", "--max_length", "16", "--per_device_eval_batch_size", "256"]
        result = subprocess.run(shortened, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, f"{command}\n{result.stderr[-3000:]}"
    assert (tmp_path / "outputs/finetune/summary.json").exists()


def test_ci_runs_the_test_command():
    """What the README tells a newcomer to run is what continuous integration runs."""
    command = next(line for line in COMMANDS if "pytest" in line)
    ci = (ROOT / ".ci/run").read_text()
    for part in command.split(" && ")[2:]:
        assert part.removeprefix("pip install ") in ci, part


def test_the_main_command_comes_early():
    lines = README.splitlines()
    assert next(i for i, line in enumerate(lines) if "accelerate launch scripts/finetune.py" in line) < 40
