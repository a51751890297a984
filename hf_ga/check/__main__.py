"""The command `python -m hf_ga.check train.py`."""

import sys

from hf_ga.check.script import main

if __name__ == "__main__":
    sys.exit(main())
