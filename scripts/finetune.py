"""Fine-tune a model: `accelerate launch scripts/finetune.py --help` lists the flags."""

import sys

from hf_ga.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
