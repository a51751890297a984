"""Promise 3, same after a stop: a run that is killed and resumed ends with the weights of the run
that was never stopped, bit for bit.

Oracle: the undisturbed run. Negative control: the killed run's last checkpoint, whose weights are
    others.
"""

import json
import time
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from forked import start_script
from runs import filled_place, relative_distance, small_config

import hf_ga

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"
STEPS, LIMIT = 30, 120  # optimizer steps; seconds


def kill_after(config, checkpoint: str) -> None:
    """Start the run as a process of its own, and send SIGKILL once the checkpoint is there."""
    output = Path(config.output_dir)
    (output.parent / "config.json").write_text(json.dumps(config.to_dict()))
    words = [str(SCRIPT), str(output.parent / "config.json")]
    with TemporaryFile("w+") as printed:
        run = start_script(words, output.parent, printed, printed)
        began = time.monotonic()
        while (
            not (output / checkpoint).exists()
            and run.poll() is None
            and time.monotonic() - began < LIMIT
        ):
            time.sleep(0.002)
        run.kill()
        run.wait()
        printed.seek(0)
        assert (output / checkpoint).exists(), printed.read()[-2000:]
    assert not (output / "summary.json").exists(), "the run ended before it was killed"


def check(folder: Path, **more) -> None:
    with filled_place(folder) as place:  # a GPT-2 with dropout 0.1, ragged texts
        settings = {
            "max_steps": STEPS,
            "save_steps": 5,
            "eval_steps": 10,
            "save_total_limit": 99,
            **more,
        }
        undisturbed = hf_ga.finetune(small_config(place, place / "undisturbed", **settings))
        kill_after(small_config(place, place / "killed", **settings), "checkpoint-10")
        resumed = hf_ga.finetune(
            small_config(place, place / "killed", **settings, resume_from_checkpoint="auto")
        )
        assert resumed["weights_sha256"] == undisturbed["weights_sha256"]
        assert relative_distance(place / "killed" / "checkpoint-10", place / "undisturbed") > 1e-4
        lines = [
            json.loads(line)
            for line in (place / "killed" / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]


@pytest.mark.slow("three runs")
def test_a_killed_run_is_resumed_bit_for_bit(tmp_path):
    check(tmp_path)
