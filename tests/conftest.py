"""Set before anything else is imported: no network, one thread (the models are tiny, and threads
would wait for each other).
"""

import os
from contextlib import suppress
from pathlib import Path

SUPPORT = (
    Path(__file__).parent / "support"
)  # what tests of several rooms share; the programs that tests start find it, too
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
)

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
    os.environ[name] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # of the processes that tests start: threads of several would wait for each other
# Where tests compute on all threads, beside other processes: threads that wait give their core up.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

with suppress(ImportError):
    # It configures logging when imported, which closes handlers' streams: before pytest has its
    # own. The GPU's tests run where it is not installed.
    import submitit  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    """The libraries are imported where tests run: with `-n`, in its workers only."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("each_process")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests are spread evenly over the others: those start processes, and two of
    them seldom run beside each other. They go from Z to A: the longest are in scripts/ and run/,
    and the last one should be short.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    place = {}
    for files in (sorted(slow, reverse=True), sorted({item.path for item in items} - slow)):
        place |= {path: i / len(files) for i, path in enumerate(files)}
    items.sort(key=lambda item: (place[item.path], item.path))  # stable within a file
