"""What two processes say where one cannot write its shards or finish a checkpoint. Run by `pairs_worker.py`."""

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from disk_limits import limit_at

import hf_ga
from hf_ga.recovery import checkpoint
from hf_ga.run.cli import parse_config


def said(config: hf_ga.FinetuneConfig) -> str:
    try:
        return f"trained {hf_ga.finetune(config)['steps']} steps"
    except hf_ga.CheckpointError as error:
        return str(error)


def run(folder: Path) -> None:
    rank, config = int(os.environ["RANK"]), parse_config([str(folder / "run.json")])
    again, copy = replace(config, resume_from_checkpoint="auto"), Path(config.output_dir) / "copy"
    records = {}
    with limit_at(checkpoint, "save_shards", call=2, size=1_000) if rank == 1 else nullcontext():
        records["shards of process 1"] = said(config)
    with limit_at(checkpoint, "_finish", call=1, size=10) if rank == 0 else nullcontext():
        records["manifest"] = said(again)
    if rank == 0:
        shutil.copytree(copy.with_name("checkpoint-2"), copy)
        (copy / "shards" / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"")
    records["damaged"] = said(replace(config, resume_from_checkpoint=str(copy)))
    records["room"] = said(again)  # last: the processes part at the end of a run
    (folder / f"{rank}.json").write_text(json.dumps(records))
