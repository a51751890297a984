"""Write the page docs/cli.md from the flags of the command: `python docs/generate_cli.py`."""

import sys
from dataclasses import Field, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
# So that this tree is imported, and not an installed hf_ga.
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from check_equivalence import CheckConfig  # noqa: E402  (found by the path above)

from hf_ga.finetuning.data.options import flag_groups  # noqa: E402
from hf_ga.finetuning.run.flags import arguments  # noqa: E402
from hf_ga.finetuning.run.flags.config import FinetuneConfig  # noqa: E402

# The text of docs/cli.md above the lists.
CLI_INTRODUCTION = """# All flags

The flags of `accelerate launch scripts/finetune.py`; [Fine-tuning](finetune.md) shows them in use. Command lines of
[transformers' example scripts](#from-an-example-script) run, too.

- In parentheses: the default. A switch (off) takes no value; several values are separated by spaces. Names may have dashes or underscores.
- The first argument may be a YAML or JSON file with the same names; flags on the command line override it.
- The number of processes and mixed precision are flags of `accelerate launch`.
- [Exit codes](troubleshooting.md#exit-codes) tell errors from stops.
"""
# The text of docs/cli.md above the list of the checker's flags.
CHECKER_INTRODUCTION = """
## Flags of the checker

`python scripts/check_equivalence.py` takes the flags above and these; flags about training and output files have no effect.
"""
# The end of docs/cli.md.
SCRIPTS_SECTION = f"""
## From an example script

The published command lines of transformers' example scripts run: replace the script by `scripts/finetune.py`, and add `--task` with the
script's name.

```text
python run_glue.py --model_name_or_path google-bert/bert-base-cased --task_name mrpc ...
accelerate launch scripts/finetune.py --task run_glue --model_name_or_path google-bert/bert-base-cased --task_name mrpc ...
```

`--task` takes {", ".join(arguments.TASK_OF_SCRIPT)}, each also with `_no_trainer`.
Flags that you omit have the defaults of the script, not those above:
{", ".join(f"{name} {value}" for name, value in arguments.TRAINING_DEFAULTS.items())},
the script's lengths (at most the model's positions), blocks of tokens for language models, and no clipping for `_no_trainer`.
With `--do_train`, hf_ga's own tasks (`--task text-classification`, ...) use these defaults, too.

Every flag of the scripts and every field of `TrainingArguments` is known. What has another name here is converted (`--bf16`,
`--train_file`). What would change the training is refused with a remedy. Flags about speed, logging and the form of checkpoints have no
effect: the run prints them, each with what happens instead.

The batch of an update, its loss and the optimizer are those of the script. What differs:

- The same `--seed` gives another order of samples, other masks and other dropout.
- `run_clm`: each text ends with the end-of-text token, and the last, shorter block is trained on, too.
- `run_clm`, `run_mlm`: `--max_train_samples` counts rows, not blocks.
- `run_qa`: the answer is the best of all spans and no answer, whatever its length (`--n_best_size`, `--max_answer_length`).
- A run always evaluates. Without validation rows, it holds out `--validation_split_percentage` of the training rows.
- `--optim adafactor` is torch's implementation.
"""


def options_list(options: list[Field]) -> str:
    """Return a Markdown list of options with their defaults and help texts."""
    lines = [
        f"- `{flag_name(option)}`{default_text(option)}: {option.metadata['help']}"
        for option in options
    ]
    return "\n".join(["", *lines, ""])


def flag_name(option: Field) -> str:
    """Return the flag of an option on the command line: its first alias, or `--` and its name."""
    return option.metadata.get("aliases", [f"--{option.name}"])[0]


def default_text(option: Field) -> str:
    """Return the default of an option in parentheses, as the documentation shows it: `off` for a
    switch, and "" for None, where the help text explains the default.
    """
    if option.default is None:
        return ""
    return " (off)" if option.default is False else f" (`{option.default}`)"


def cli_page() -> str:
    """Return the text of docs/cli.md: lists of the flags of a run and of the checker, and what
    happens to those of transformers' example scripts.
    """
    parts = [CLI_INTRODUCTION]
    for heading, options in flag_groups(FinetuneConfig).items():
        parts.append(f"\n## {heading.capitalize()}\n{options_list(options)}")
    # Without those inherited from FinetuneConfig, except the ones with another default.
    checker_options = [
        option for option in fields(CheckConfig) if option.name in CheckConfig.__annotations__
    ]
    return "".join([*parts, CHECKER_INTRODUCTION, options_list(checker_options), SCRIPTS_SECTION])


if __name__ == "__main__":
    (ROOT / "docs" / "cli.md").write_text(cli_page(), encoding="utf-8")
