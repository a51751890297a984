"""`hf_ga.finetune` on two processes, phase after phase, each on processes that are forked with
everything imported; run by `test_finetune_processes.py`.

    python tests/finetuning/run/processes_worker.py JOB.json

JOB.json is a list of phases: a name; flags of the command; the environment of the launcher. The
    folder of JOB.json gets a folder
for each phase: what each rank had at the end, its exit code, and what they printed.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch.distributed.checkpoint.state_dict  # noqa: F401  (so that no process imports it by itself)
import transformers as tf
from forked import together
from runs import without_curves
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hf_ga.finetuning.run import finetune
from hf_ga.finetuning.run.flags import cli
from hf_ga.model.forward import unwrapped
from hf_ga.recovery.checkpoint import state_sha256


def recorded(run) -> dict:
    """What kind of model it is, and the hash of this process's own copy."""
    units = [
        module
        for module in run.model.modules()
        if isinstance(module, FullyShardedDataParallel | FSDPModule)
    ]
    is_ddp = isinstance(run.model, DistributedDataParallel)
    return {
        "processes": run.accelerator.num_processes,
        "ddp": is_ddp,
        "fsdp_units": len(units),
        "fsdp": 1 + any(isinstance(module, FSDPModule) for module in units),
        "weights": state_sha256(unwrapped(run.model).state_dict()) if is_ddp else None,
    }


def record_the_end(records: dict) -> None:
    """`records` is filled where training is over."""
    finish = finetune._finish

    def finish_and_record(run, *args, **kwargs):
        records.update(recorded(run))
        return finish(run, *args, **kwargs)

    finetune._finish = finish_and_record


def run(phase: dict, folder: Path) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(phase["environment"])
    records: dict = {}
    record_the_end(records)
    code = cli.finetune_main(phase["flags"])
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps({"code": code, **records}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(job: Path) -> None:
    for phase in json.loads(job.read_text()):
        folder = job.parent / phase["name"]
        folder.mkdir()
        codes = together(partial(run, phase, folder), "ddp", 2)
        if codes != {0} and phase["name"] != "error":
            sys.exit(f"{phase['name']}: {codes}\n{(folder / 'log').read_text()[-3000:]}")


if __name__ == "__main__":
    tf.logging.set_verbosity_error()
    with without_curves():
        main(Path(sys.argv[1]))
