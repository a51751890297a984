"""The cells of a notebook, without a kernel, which would import the libraries anew; run by
`test_notebook.py`.

    python tests/scripts/notebook_worker.py JOB.json

JOB.json is the list of the cells. Prints what they print, and ends at the first error.
"""

import json
import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell

if __name__ == "__main__":
    shell = InteractiveShell.instance()
    for cell in json.loads(Path(sys.argv[1]).read_text()):
        shell.run_cell(cell).raise_error()
