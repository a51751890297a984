"""What tests of two processes need, each pair forked from one process that has imported everything.

    python tests/recovery/pairs_worker.py JOB.json

JOB.json: {"folder": with a folder for each scenario, which writes there; what went wrong is in codes.json}.
"""

import json
import sys
import warnings
from functools import partial
from pathlib import Path

import full_disk_worker
import memory_worker
import nonfinite_worker
import round_trip_worker
import torch
import transformers as tf
from forked import together

SCENARIOS = {  # folder: what each process does, the environment of `accelerate launch`
    "nonfinite": (nonfinite_worker.run, "ddp"),
    "memory": (memory_worker.run, "ddp"),
    "full disk": (full_disk_worker.run, "fsdp2"),
}

if __name__ == "__main__":
    tf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # torch's own, about its next releases
    torch.set_num_threads(1)
    folder = Path(json.loads(Path(sys.argv[1]).read_text())["folder"])
    codes = {name: sorted(together(partial(run, folder / name), kind, 2)) for name, (run, kind) in SCENARIOS.items()}
    trips = {name: round_trip_worker.result_of(folder, *case) for name, case in round_trip_worker.CASES.items()}
    (folder / "found.json").write_text(json.dumps({"codes": codes, "round trips": trips}))
