"""Writes docs/cli.md from the options of the configuration: `python docs/generate_cli.py`."""

import inspect
import re
import sys
from dataclasses import Field, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from check_equivalence import CheckConfig  # noqa: E402  (found by the path above)

from hf_ga.data.options import DataOptions  # noqa: E402
from hf_ga.run.cli import EXIT_CODES  # noqa: E402
from hf_ga.run.config import FinetuneConfig  # noqa: E402

INTRODUCTION = f"""# All flags

Made by `python docs/generate_cli.py` from the options in `hf_ga/run/config.py` and `hf_ga/data/options.py`.

`accelerate launch scripts/finetune.py` takes these flags, with dashes or underscores. The first argument may be a YAML or JSON file
with the same names; flags on the command line override the file. A switch (default: off) takes no value; a list takes its values
with spaces between. Mixed precision and the number of processes are flags of `accelerate launch`. [Fine-tuning](finetune.md) shows
the flags in use.

{EXIT_CODES}
"""
CHECKER = """
## Flags of the checker

`python scripts/check_equivalence.py` takes the flags above and these; flags about training and output files have no effect.
"""


def groups() -> dict[str, list[Field]]:
    """The options of a run under the comments that stand above them in `FinetuneConfig`; those of the data come first."""
    by_name = {field.name: field for field in fields(FinetuneConfig)}
    result, group = {"data": list(fields(DataOptions))}, "data"
    for comment, name in re.findall(r"^    (?:# (.+)|(\w+): .+ = option\()", inspect.getsource(FinetuneConfig), re.MULTILINE):
        group = comment or group
        result.setdefault(group, []).extend([by_name[name]] if name else [])
    return result


def table(options: list[Field]) -> str:
    rows = [f"| `{flag(option)}` | {default(option)} | {option.metadata['help']} |" for option in options]
    return "\n".join(["", "| flag | default | meaning |", "|---|---|---|", *rows, ""])


def flag(option: Field) -> str:
    return option.metadata.get("aliases", [f"--{option.name}"])[0]


def default(option: Field) -> str:
    """Empty where the meaning gives a default that depends on other flags."""
    if option.default is None:
        return ""
    return "off" if option.default is False else f"`{option.default}`"


def page() -> str:
    parts = [INTRODUCTION]
    for group, options in groups().items():
        parts.append(f"\n## {group.capitalize()}\n{table(options)}")
    own = [option for option in fields(CheckConfig) if option.name in CheckConfig.__annotations__]
    return "".join([*parts, CHECKER, table(own)])


if __name__ == "__main__":
    (ROOT / "docs" / "cli.md").write_text(page(), encoding="utf-8")
