"""Writes docs/cli.md and docs/flags.md from the options of the configuration: `python
docs/generate_cli.py`.
"""

import inspect
import re
import sys
from dataclasses import Field, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from check_equivalence import CheckConfig  # noqa: E402  (found by the path above)
from transformers import Seq2SeqTrainingArguments  # noqa: E402

from hf_ga.finetuning.data.options import DataOptions  # noqa: E402
from hf_ga.finetuning.run import arguments  # noqa: E402
from hf_ga.finetuning.run.config import FinetuneConfig  # noqa: E402

INTRODUCTION = """# All flags

The flags of `accelerate launch scripts/finetune.py`; [Fine-tuning](finetune.md) shows them in use, and
[From an example script](flags.md) lists the flags of transformers' example scripts that are accepted, too.

- Names may have dashes or underscores. A switch (default: off) takes no value; several values are separated by spaces.
- The first argument may be a YAML or JSON file with the same names; flags on the command line override it.
- The number of processes and mixed precision are flags of `accelerate launch`.
- Exit codes: see [Troubleshooting](troubleshooting.md#exit-codes).

`python docs/generate_cli.py` writes this page from `hf_ga/finetuning/run/config.py` and `hf_ga/finetuning/data/options.py`.
"""
SCRIPTS = f"""# From an example script

The published command lines of transformers' example scripts train with hf_ga: replace the script by `scripts/finetune.py`, and add
`--task` with the script's name.

```text
python run_glue.py --model_name_or_path google-bert/bert-base-cased --task_name mrpc ...
accelerate launch scripts/finetune.py --task run_glue --model_name_or_path google-bert/bert-base-cased --task_name mrpc ...
```

`--task` takes {", ".join(arguments.SCRIPTS)}, each also with `_no_trainer`.
Flags that you leave out have the defaults of the script, not those in [All flags](cli.md):
{", ".join(f"{name} {value}" for name, value in arguments.TRAINING_DEFAULTS.items())},
the script's lengths (at most the model's positions), blocks of tokens for language models, and no clipping for `_no_trainer`.
A flag by hf_ga's name overrides one by the script's name. With `--do_train`, hf_ga's own tasks (`--task text-classification`, ...)
use these defaults, too.

The batch of an update, its loss and the optimizer are those of the script. What differs:

- The same `--seed` gives another order of samples, other masks and other dropout.
- `run_clm`: each text ends with the end-of-text token, and the last, shorter block is trained on, too.
- `run_clm`, `run_mlm`: `--max_train_samples` counts rows, not blocks.
- `run_qa`: the answer is the best of all spans and no answer, whatever its length (`--n_best_size`, `--max_answer_length`).
- A run always evaluates. Without validation rows, it holds out `--validation_split_percentage` of the training rows.
- `--optim adafactor` is torch's implementation.

## Every flag

The fields of TrainingArguments and the flags of the scripts:

- same: hf_ga has this flag. A flag's name: hf_ga has this flag under that name. converted: to hf_ga's flags, as described.
- no effect: accepted, for this reason. printed: accepted, and the run prints what differs.
- refused: an error with this remedy, unless the value is off or the default.

`python docs/generate_cli.py` writes this table from `hf_ga/finetuning/run/arguments.py`.

"""
OF_SCRIPTS = """model_name_or_path trust_remote_code dataset_name dataset_config_name validation_file test_file streaming block_size
    validation_split_percentage text_column max_length max_target_length doc_stride source_prefix mlm_probability num_beams max_train_samples
    # flags of the scripts that hf_ga has under the same name
    max_eval_samples max_predict_samples"""
CHECKER = """
## Flags of the checker

`python scripts/check_equivalence.py` takes the flags above and these; flags about training and output files have no effect.
"""


def groups() -> dict[str, list[Field]]:
    """The options of a run under the comments that stand above them in `FinetuneConfig`; those of
    the data come first.
    """
    by_name = {field.name: field for field in fields(FinetuneConfig)}
    result, group = {"data": list(fields(DataOptions))}, "data"
    for comment, name in re.findall(
        r"^    (?:# (.+)|(\w+): .+ = option\()", inspect.getsource(FinetuneConfig), re.MULTILINE
    ):
        group = comment or group
        result.setdefault(group, []).extend([by_name[name]] if name else [])
    return result


def table(options: list[Field]) -> str:
    rows = [
        f"| `{flag(option)}` | {default(option)} | {option.metadata['help']} |"
        for option in options
    ]
    return "\n".join(["", "| flag | default | meaning |", "|---|---|---|", *rows, ""])


def flag(option: Field) -> str:
    return option.metadata.get("aliases", [f"--{option.name}"])[0]


def default(option: Field) -> str:
    """Empty where the meaning gives a default that depends on other flags."""
    if option.default is None:
        return ""
    return "off" if option.default is False else f"`{option.default}`"


def same_names() -> list[str]:
    """Flags that need no table: TrainingArguments or the scripts have them, too."""
    of_training = {option.name for option in fields(Seq2SeqTrainingArguments)}
    return [
        option.name
        for option in fields(FinetuneConfig)
        if option.name in of_training | set(OF_SCRIPTS.split())
    ]


def flags_page() -> str:
    """What happens to each field of TrainingArguments and to each flag of the example scripts."""
    rows = dict.fromkeys(same_names(), ("same", ""))
    rows |= {name: (f"`--{option}`", "") for name, option in arguments.RENAMED.items()}
    rows |= {name: ("converted", meaning) for name, meaning in arguments.CONVERTED.items()}
    rows |= {
        name: ("no effect", reason)
        for reason, names in arguments.NO_EFFECT.items()
        for name in names.split()
    }
    rows |= {name: ("printed", reason) for name, reason in arguments.DIFFERENT.items()}
    rows |= {
        name: ("refused", remedy)
        for remedy, names in arguments.REFUSED.items()
        for name in names.split()
    }
    lines = [
        f"| `--{name}` | {effect} | {meaning} |" for name, (effect, meaning) in sorted(rows.items())
    ]
    return "\n".join(
        [SCRIPTS + "| flag | effect | meaning, reason or remedy |", "|---|---|---|", *lines, ""]
    )


def page() -> str:
    parts = [INTRODUCTION]
    for group, options in groups().items():
        parts.append(f"\n## {group.capitalize()}\n{table(options)}")
    own = [option for option in fields(CheckConfig) if option.name in CheckConfig.__annotations__]
    return "".join([*parts, CHECKER, table(own)])


if __name__ == "__main__":
    (ROOT / "docs" / "cli.md").write_text(page(), encoding="utf-8")
    (ROOT / "docs" / "flags.md").write_text(flags_page(), encoding="utf-8")
