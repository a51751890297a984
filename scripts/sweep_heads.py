"""Builds every head of the installed transformers small, and checks the gradients of hf_ga and Trainer, without and with dropout.

    python scripts/sweep_heads.py                  # about 40 heads, evenly spread
    python scripts/sweep_heads.py --full           # all of them
    python scripts/sweep_heads.py --only "Bert.*Classification"

Writes heads.md and heads.json. The exit code is 1 if hf_ga is wrong for a head.
"""

from heads.run import main

if __name__ == "__main__":
    raise SystemExit(main())
