"""Is every split of a window the full batch? Takes the flags of finetune.py: `python scripts/check_equivalence.py --help`."""

import sys

from hf_ga.run.cli import check_main

if __name__ == "__main__":
    sys.exit(check_main())
