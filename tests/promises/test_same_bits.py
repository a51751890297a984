"""Same bits: with `same_bits` a run ends with the same weights down to the last bit, on any number of processes, with any
per-device batch size, and when it is killed and resumed on another number of processes.

Oracle: SHA-256 of the weights, and metrics.jsonl without its times. Negative control: without the flag the weights differ.
"""

import json

import pytest
from forked import phase, run_phases
from runs import filled_place, lines_of, small_config

CHUNK, STEPS = 4, 6  # samples; an epoch has three full windows and a short one
KINDS = {
    "GPT-2": {},
    "BERT, masked LM, bf16": {"task": "masked-lm", "model": "bert"},
    "LoRA": {"lora_r": 2, "lora_dropout": 0.1},
}
LAYOUTS = [(1, CHUNK), (4, 4 * CHUNK)]  # processes, per-device batch size


def phases_of(place, folder, same_bits, model="gpt", **settings):
    """A run in each layout, and one that is killed on 3 processes and resumed on 2; output folders: 0, 1, 2, ..."""
    settings |= {"model_name_or_path": str(place / model), "same_bits": same_bits, "max_steps": STEPS}
    settings |= {"save_steps": 2, "eval_steps": 3, "max_grad_norm": 0.01, "learning_rate": 3e-3}

    def run(number, size, **more):
        return small_config(place, folder / str(number), per_device_train_batch_size=size, **settings, **more)

    whole = [phase(run(number, size), processes=processes) for number, (processes, size) in enumerate(LAYOUTS)]
    killed = phase(run(len(LAYOUTS), CHUNK), processes=3, windows=3)
    return [*whole, killed, phase(run(len(LAYOUTS), 2 * CHUNK, resume_from_checkpoint="auto"), processes=2)]


def found_in(folder):
    """Of each run: hash of the weights, and its lines without times."""
    runs = sorted(folder.iterdir())
    hashes = [json.loads((run / "summary.json").read_text())["weights_sha256"] for run in runs]
    return hashes, [[{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines_of(run)] for run in runs]


@pytest.mark.slow("trains on up to four processes")
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_ends_with_the_same_bits(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16" if "bf16" in kind else "no")
    with filled_place(tmp_path) as place:
        run_phases(tmp_path / "job", phases_of(place, tmp_path / "runs", CHUNK, **KINDS[kind]))
    hashes, lines = found_in(tmp_path / "runs")
    assert len(hashes) == len(LAYOUTS) + 1
    assert set(hashes) == {hashes[0]}
    assert all(line == lines[0] for line in lines)
    assert len(lines[0]) == STEPS
    assert any("eval_loss" in line for line in lines[0])
    assert min(line["grad_norm"] for line in lines[0]) > 0.01  # every gradient was clipped


@pytest.mark.slow("trains on up to four processes")
def test_without_the_flag_bits_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with filled_place(tmp_path) as place:
        run_phases(tmp_path / "job", phases_of(place, tmp_path / "runs", None)[: len(LAYOUTS)])
    hashes, _ = found_in(tmp_path / "runs")
    assert len(set(hashes)) == len(LAYOUTS)
