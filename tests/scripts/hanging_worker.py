"""Writes figures, as the benchmark does after each section, then starts another process and waits
for it for ever; run by `test_gpu_report.py` as a part of the report that hangs.

python hanging_worker.py OUTPUT_FOLDER
"""

import json
import subprocess
import sys
from pathlib import Path

FIGURES = {"sections": [{"title": "gpt: ragged samples", "rows": [["hf_ga", 7.0]], "bounds": []}]}


def main() -> None:
    """Write the figures, print the number of the child process, and hang."""
    Path(sys.argv[1], "benchmark.json").write_text(json.dumps(FIGURES))
    child = subprocess.Popen(["sleep", "1000"])
    print("child", child.pid, flush=True)
    child.wait()


if __name__ == "__main__":
    main()
