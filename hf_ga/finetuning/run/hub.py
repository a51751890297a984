"""Upload of the trained model to the Hugging Face Hub: `push_to_hub`."""

import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.utils import validate_repo_id

from hf_ga.errors import ConfigError, UploadFailed
from hf_ga.finetuning.data.files import is_file
from hf_ga.finetuning.data.options import as_list
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.parallel.processes import raise_on_all_ranks
from hf_ga.recovery.files import write_text
from hf_ga.recovery.latest import LATEST
from hf_ga.recovery.lock import LOCK
from hf_ga.recovery.manifest import PREFIX

# Not uploaded: files for resuming, the best model (which `from_pretrained` does not read), rows of
# the user.
IGNORED = (f"{PREFIX}*", LATEST, LOCK, "best/*", "trackers/*", "predictions.jsonl")


def check_login(config: FinetuneConfig, accelerator: Accelerator) -> None:
    """Check the login and the name of the repository before any work.

    Raises:
        ConfigError: no valid token, one without write access, or an invalid name; on all processes.
    """
    with raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            try:
                validate_repo_id(_name(config))
                user = HfApi(token=config.hub_token).whoami()
                if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
                    raise ValueError("the token has no write access")
            except Exception as error:  # of several HTTP libraries
                raise ConfigError(
                    f"push_to_hub cannot upload to {_name(config)}: {_reason(config, error)} Log "
                    "in with `hf auth login` and a "
                    "token with write access, set hub_model_id to user/name, or omit push_to_hub."
                ) from error


def upload(config: FinetuneConfig, summary: dict[str, Any]) -> str:
    """Upload the model of a finished run with a model card; returns its address. For the main
    process.

    Raises:
        UploadFailed: all files are in `output_dir`.
    """
    api, name, folder = HfApi(token=config.hub_token), _name(config), Path(config.output_dir)
    try:
        write_text(folder / "README.md", _card(config, name, summary))
        repo = api.create_repo(
            name, private=config.hub_private_repo or None, exist_ok=True
        )  # None: the organization's default
        message = f"Trained with hf_ga {version('hf_ga')}"
        api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=folder,
            commit_message=message,
            ignore_patterns=list(IGNORED),
        )
    except Exception as error:  # of several HTTP libraries
        command = ["hf", "upload", name, str(folder), *["--private"] * config.hub_private_repo]
        command += [word for pattern in IGNORED for word in ("--exclude", pattern)]
        raise UploadFailed(
            f"the upload to {name} failed: {_reason(config, error)} The run has finished and "
            f"{folder} contains the model: upload "
            f"it with `{shlex.join(command)}`."
        ) from error
    return str(repo)


def _name(config: FinetuneConfig) -> str:
    return config.hub_model_id or Path(config.output_dir).resolve().name


def _reason(config: FinetuneConfig, error: Exception) -> str:
    """The first sentence of an error, without the token, which some contain."""
    first = re.split(r"\n|\.\s|\.$", str(error).strip())[0] or type(error).__name__
    token = config.hub_token or get_token()
    return (first.replace(token, "***") if token else first) + "."


def _card(config: FinetuneConfig, name: str, summary: dict[str, Any]) -> str:
    model = config.model_name_or_path
    datasets = [
        d
        for d in as_list(config.dataset_name)
        if not (d == "stdlib" or is_file(d) or Path(d).exists())
    ]
    card_data = ModelCardData(
        library_name="sentence-transformers" if config.task == "embedding" else "transformers",
        base_model=model if model and not Path(model).exists() else None,
        datasets=datasets or None,
        tags=["hf_ga", config.task],
    )
    metrics = {
        k: v
        for k, v in summary.items()
        if k.startswith(("eval_", "test_")) and not k.endswith("num_targets")
    }
    table = "\n".join(
        ["| metric | value |", "|---|---|", *(f"| {k} | {v:.4f} |" for k, v in metrics.items())]
    )
    return (
        f"---\n{card_data.to_yaml()}\n---\n\n# {name.rpartition('/')[2]}\n\n"
        f"Fine-tuned with hf_ga {version('hf_ga')} ({config.task}, {summary['steps']} optimizer "
        "steps).\n\n"
        f"Data: {summary['data']}\n\n{table}\n"
    )
