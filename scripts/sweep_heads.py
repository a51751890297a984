"""Every head of the installed transformers, built small: is hf_ga right, is Trainer, do layouts agree under dropout?

    python scripts/sweep_heads.py                  # about 40 heads, evenly spread
    python scripts/sweep_heads.py --full           # all of them
    python scripts/sweep_heads.py --only "Bert.*Classification"

Writes heads.md and heads.json. The exit code is 1 if hf_ga is wrong for a head.
"""

from heads.run import main

if __name__ == "__main__":
    raise SystemExit(main())
