"""Runs `kill_test.py --elastic` on machines that are forked from this process, with shorter times;
run by `test_elastic_kills.py`. Forked from a test's process, with the threads that other tests have
left there, a worker may hang.

python machines_worker.py --elastic ... --output_dir FOLDER
"""

import sys
from types import SimpleNamespace

import kill_test
from elastic import launching, run, worker  # noqa: F401 - what the forked processes import
from forked import ForkedPython
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

QUICK_RENDEZVOUS = {"keep_alive_interval": 1, "keep_alive_max_attempt": 4, "last_call_timeout": 2}


class QuickRun(run.ElasticRun):
    """With shorter steps: its workers start at once."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.pace /= 4


if __name__ == "__main__":
    run.ElasticRun = QuickRun
    run.END_SECONDS = 5.0
    launching.subprocess = SimpleNamespace(Popen=ForkedPython)
    launching.RENDEZVOUS |= QUICK_RENDEZVOUS
    subprocess_handler.Popen = ForkedPython
    sys.exit(kill_test.main())
