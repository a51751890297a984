"""The command `hf-ga`, which is also `python -m hf_ga` and `scripts/finetune.py`."""

import sys

from hf_ga.errors import MissingPackage


def main() -> int:
    """Fine-tune with the flags of the command line. Returns the exit code: 2 also where packages of
    the extra `finetune` are missing, explained in one line.
    """
    try:
        from hf_ga.finetuning.run.cli import finetune_main
    except MissingPackage as error:
        print("error:", error, file=sys.stderr)
        return 2
    return finetune_main()


if __name__ == "__main__":
    sys.exit(main())
