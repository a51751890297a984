"""ExactTrainer, the checker and a whole run with the threads, allocator and variables that a fresh
shell has.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PRIVATE = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "GLIBC_TUNABLES",
    "MALLOC_",
    "ACCELERATE_",
)
# Each leaves the largest relative error between splits in `error`.
CASES = {
    # It once planned micro-batches for two threads where Trainer takes
    # `gradient_accumulation_steps` of them.
    "ExactTrainer": """
from helpers import gpt2, token_samples
from trainers import Case, weight_error
case = Case(folder, gpt2, token_samples(48))
error = weight_error(case.run(layout=(4, 4), num_train_epochs=1), case.run(layout=(16, 1), num_train_epochs=1))
""",
    "check_equivalence": """
from helpers import gpt2, pad_right, token_samples
from hf_ga import check_equivalence
error = check_equivalence(gpt2(0.1), token_samples(12), pad_right).max_error
""",
    "finetune.py": """
from runs import filled_place, relative_distance, small_config
with filled_place(folder) as place:
    for size in (3, 16):
        config = small_config(place, folder / f"micro-batches of {size}", per_device_train_batch_size=size, max_steps=4)
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        sys.argv[1:] = [str(folder / "config.json")]
        try:
            runpy.run_path("SCRIPT", run_name="__main__")
        except SystemExit as end:
            assert end.code == 0
error = relative_distance(folder / "micro-batches of 3", folder / "micro-batches of 16")
""".replace("SCRIPT", str(Path(__file__).parents[2] / "scripts" / "finetune.py")),
}
BEGIN = (
    "import json, runpy, sys, tempfile, torch; from pathlib import Path; folder, errors = "
    "Path(tempfile.mkdtemp()), {}"
)
NEXT = (
    "errors[NAME] = error; from accelerate.state import AcceleratorState; "
    "AcceleratorState._reset_state(True)"
)
END = "print(json.dumps([torch.get_num_threads(), errors]))"


@pytest.mark.slow("starts a process")
def test_splits_agree_with_all_threads():
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)
    }
    cases = [case + NEXT.replace("NAME", repr(name)) + "\n" for name, case in CASES.items()]
    command = [sys.executable, "-c", "".join([BEGIN, *cases, END])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-4000:]
    num_threads, errors = json.loads(done.stdout.splitlines()[-1])
    assert num_threads == len(os.sched_getaffinity(0))
    assert errors.keys() == CASES.keys() and max(errors.values()) < 1e-6
