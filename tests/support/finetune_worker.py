"""hf_ga.finetune as `accelerate launch` starts it, and what each process had at the end; used by `pins.py` and the tests of runs.

    accelerate launch ... tests/support/finetune_worker.py CONFIG.json RECORDS_DIR

RECORDS_DIR gets a file for each process.
"""

import json
import os
import sys
from pathlib import Path

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hf_ga.exact.forward import unwrapped
from hf_ga.recovery.checkpoint import state_sha256
from hf_ga.run import finetune
from hf_ga.run.cli import parse_config


def recorded(run) -> dict:
    """What kind of model it is, and the hash of this process's own copy."""
    units = [module for module in run.model.modules() if isinstance(module, FullyShardedDataParallel | FSDPModule)]
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


if __name__ == "__main__":
    records: dict = {}
    record_the_end(records)
    summary = finetune.finetune(parse_config([sys.argv[1]]))
    Path(sys.argv[2], f"{os.environ['RANK']}.json").write_text(json.dumps({**records, "summary": summary}))
