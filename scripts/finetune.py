"""Fine-tune a model: `accelerate launch scripts/finetune.py --help` lists the flags."""

import sys

from hf_ga.run.cli import finetune_main

if __name__ == "__main__":
    sys.exit(finetune_main())
