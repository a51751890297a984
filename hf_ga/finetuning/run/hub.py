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

    Args:
        config: The configuration of the run.
        accelerator: The accelerator of the run. All processes must call it.

    Raises:
        ConfigError: If there is no valid token, or one without write access, or the name is
            invalid; on all processes.
    """
    with raise_on_all_ranks(accelerator):
        if not accelerator.is_main_process:
            return
        # Several HTTP libraries raise errors of their own.
        try:
            validate_repo_id(_name(config))
            user = HfApi(token=config.hub_token).whoami()
            access_token = user.get("auth", {}).get("accessToken", {})
            if access_token.get("role") == "read":
                raise ValueError("the token has no write access")
        except Exception as error:
            raise ConfigError(
                f"push_to_hub cannot upload to {_name(config)}: {_reason(config, error)} Log "
                "in with `hf auth login` and a token with write access, set hub_model_id to "
                "user/name, or omit push_to_hub."
            ) from error


def upload(config: FinetuneConfig, summary: dict[str, Any]) -> str:
    """Upload the model of a finished run with a model card. For the main process.

    Args:
        config: The configuration of the run.
        summary: The results of the run, for the model card.

    Returns:
        The address of the repository.

    Raises:
        UploadFailed: If the upload fails; all files are in `output_dir`.
    """
    api = HfApi(token=config.hub_token)
    name = _name(config)
    folder = Path(config.output_dir)
    # Several HTTP libraries raise errors of their own.
    try:
        write_text(folder / "README.md", _card(config, name, summary))
        # None: the organization's default.
        private = config.hub_private_repo or None
        repo = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=folder,
            commit_message=f"Trained with hf_ga {version('hf_ga')}",
            ignore_patterns=list(IGNORED),
        )
    except Exception as error:
        command = _upload_command(config, name, folder)
        raise UploadFailed(
            f"the upload to {name} failed: {_reason(config, error)} The run has finished and "
            f"{folder} contains the model: upload it with `{command}`."
        ) from error
    return str(repo)


def _upload_command(config: FinetuneConfig, name: str, folder: Path) -> str:
    """Return the shell command that uploads the same files."""
    words = ["hf", "upload", name, str(folder)]
    if config.hub_private_repo:
        words.append("--private")
    for pattern in IGNORED:
        words += ["--exclude", pattern]
    return shlex.join(words)


def _name(config: FinetuneConfig) -> str:
    """Return the name of the repository: by default that of the output folder."""
    return config.hub_model_id or Path(config.output_dir).resolve().name


def _reason(config: FinetuneConfig, error: Exception) -> str:
    """Return the first sentence of an error, without the token, which some contain."""
    sentences = re.split(r"\n|\.\s|\.$", str(error).strip())
    first = sentences[0] or type(error).__name__
    token = config.hub_token or get_token()
    if token:
        first = first.replace(token, "***")
    return f"{first}."


def _card(config: FinetuneConfig, name: str, summary: dict[str, Any]) -> str:
    """Return the text of the model card."""
    model = config.model_name_or_path
    is_of_hub = bool(model) and not Path(model).exists()
    datasets = [dataset for dataset in as_list(config.dataset_name) if _is_of_hub(dataset)]
    card_data = ModelCardData(
        library_name="sentence-transformers" if config.task == "embedding" else "transformers",
        base_model=model if is_of_hub else None,
        datasets=datasets or None,
        tags=["hf_ga", config.task],
    )
    lines = ["| metric | value |", "|---|---|"]
    for key, value in summary.items():
        if key.startswith(("eval_", "test_")) and not key.endswith("num_targets"):
            lines.append(f"| {key} | {value:.4f} |")
    table = "\n".join(lines)
    return (
        f"---\n{card_data.to_yaml()}\n---\n\n# {name.rpartition('/')[2]}\n\n"
        f"Fine-tuned with hf_ga {version('hf_ga')} ({config.task}, {summary['steps']} optimizer "
        "steps).\n\n"
        f"Data: {summary['data']}\n\n{table}\n"
    )


def _is_of_hub(dataset: str) -> bool:
    """Whether the name of a dataset is one of the hub, not a file or the embedded corpus."""
    return dataset != "stdlib" and not is_file(dataset) and not Path(dataset).exists()
