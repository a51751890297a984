"""The command `hf-ga`, which is also `python -m hf_ga` and `scripts/finetune.py`."""

import sys

from hf_ga.errors import MissingPackage


def main() -> int:
    """Run the fine-tuning command with the flags of the command line.

    Returns:
        The exit code of the command; 2, after printing the error as one line, if packages of the
        extra `finetune` are not installed.
    """
    # Imported here, so that missing packages are reported in one line instead of a traceback.
    try:
        from hf_ga.finetuning.run.flags.cli import finetune_main
    except MissingPackage as error:
        print("error:", error, file=sys.stderr)
        return 2
    return finetune_main()


if __name__ == "__main__":
    sys.exit(main())
