"""Same bits: with `same_bits` a run ends with the same weights down to the last bit, on any number
of processes, with any per-device batch size, and when it is killed and resumed on another number of
processes.

Oracle: SHA-256 of the weights, and metrics.jsonl without its times. Negative control: without the
    flag the weights differ.
"""

import json
from itertools import chain

import pytest
from forked import phase, run_phases
from runs import filled_place, lines_of, small_config

CHUNK, STEPS = 4, 6  # samples; an epoch has three full windows and a short one
KINDS = {  # settings; "no flag" is the control
    "GPT-2": {},
    "BERT, masked LM, bf16": {"task": "masked-lm", "model": "bert"},
    "no flag": {"same_bits": None},
}
LAYOUTS = [(1, CHUNK), (4, 4 * CHUNK)]  # processes, per-device batch size
IN_ALL_LAYOUTS = ("GPT-2", "no flag")  # the other kinds are stopped on 3 processes, too


def phases_of(place, folder, kind, model="gpt", **settings):
    """A run on one process, in other layouts and, with the flag, one that is killed on 3 processes
    and resumed on 2; output folders: 0, 1, 2.
    """
    settings = {
        "model_name_or_path": str(place / model),
        "same_bits": CHUNK,
        "max_steps": STEPS,
        **settings,
    }
    settings |= {"save_steps": 2, "eval_steps": 3, "max_grad_norm": 0.01, "learning_rate": 3e-3}

    def run(number, size, processes, windows=None, **more):
        config = small_config(
            place, folder / str(number), per_device_train_batch_size=size, **settings, **more
        )
        return phase(
            config,
            processes=processes,
            windows=windows,
            precision="bf16" if "bf16" in kind else "no",
        )

    layouts = LAYOUTS if kind in IN_ALL_LAYOUTS else LAYOUTS[:1]
    phases = [run(number, size, processes) for number, (processes, size) in enumerate(layouts)]
    if settings["same_bits"]:
        phases += [run(2, CHUNK, 3, windows=3), run(2, 2 * CHUNK, 2, resume_from_checkpoint="auto")]
    return phases


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs of each kind, all done by one process that has imported everything."""
    folder = tmp_path_factory.mktemp("same bits")
    with filled_place(folder / "place") as place:
        of_kinds = (
            phases_of(place, folder / kind, kind, **settings) for kind, settings in KINDS.items()
        )
        run_phases(folder / "job", [*chain.from_iterable(of_kinds)])
    return folder


def found_in(folder):
    """Of each run: hash of the weights, and its lines without times and numbers of processes."""
    of_layout = ("tokens_per_second", "num_processes")
    runs = sorted(folder.iterdir())
    hashes = [json.loads((run / "summary.json").read_text())["weights_sha256"] for run in runs]
    return hashes, [
        [{k: v for k, v in line.items() if k not in of_layout} for line in lines_of(run)]
        for run in runs
    ]


@pytest.mark.slow("trains on up to four processes")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "no flag"])
def test_every_layout_ends_with_the_same_bits(kind, runs):
    hashes, lines = found_in(runs / kind)
    assert len(hashes) == (len(LAYOUTS) + 1 if kind in IN_ALL_LAYOUTS else 2)
    assert set(hashes) == {hashes[0]}
    assert all(line == lines[0] for line in lines)
    assert len(lines[0]) == STEPS
    assert any("eval_loss" in line for line in lines[0])
    assert min(line["grad_norm"] for line in lines[0]) > 0.01  # every gradient was clipped


@pytest.mark.slow("trains on up to four processes")
def test_without_the_flag_bits_differ(runs):
    hashes, _ = found_in(runs / "no flag")
    assert len(set(hashes)) == len(LAYOUTS)
