"""Upload the trained model to the Hugging Face Hub: the flag `push_to_hub`."""

import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.utils import validate_repo_id

from hf_ga.errors import ConfigError, UploadFailed
from hf_ga.finetuning.data.options import as_list
from hf_ga.finetuning.data.sources import is_hub_id
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.recovery.files import write_text
from hf_ga.recovery.latest import LATEST
from hf_ga.recovery.lock import LOCK
from hf_ga.recovery.manifest import PREFIX

# Patterns of files in the output folder that are not uploaded: checkpoints and other files for
# resuming, the best model (`from_pretrained` does not read it), and predictions for the user's
# rows.
NOT_UPLOADED = (f"{PREFIX}*", LATEST, LOCK, "best/*", "trackers/*", "predictions.jsonl")


def check_login(config: FinetuneConfig) -> None:
    """Check, before a fine-tuning run starts, that this user can upload to the Hugging Face Hub:
    the login, the access rights of the token, and the repository's name. Call it on the main
    process only.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: If there is no valid token, the token has no write access, or the name of the
            repository is invalid.
    """
    repo_id = _repo_id(config)
    # huggingface_hub raises errors of its own and of several HTTP libraries.
    try:
        validate_repo_id(repo_id)
        user = HfApi().whoami()
        access_token = user.get("auth", {}).get("accessToken", {})
        if access_token.get("role") == "read":
            raise ValueError("the token has no write access")
    except Exception as error:
        raise ConfigError(
            f"push_to_hub cannot upload to {repo_id}: {_short_reason(error)} Log "
            "in with `hf auth login` and a token with write access, set hub_model_id to "
            "user/name, or omit push_to_hub."
        ) from error


def upload(config: FinetuneConfig, summary: dict[str, Any]) -> str:
    """Upload the model of a finished run to the Hugging Face Hub, after writing a model card,
    README.md, to the output folder. Call it on the main process only.

    Args:
        config: The configuration of the run.
        summary: The results of the run, as in summary.json, for the model card.

    Returns:
        The URL of the repository on the Hub.

    Raises:
        UploadFailed: If the upload fails. The output folder still contains the model; the error
            shows the command that uploads it.
    """
    api = HfApi()
    repo_id = _repo_id(config)
    folder = Path(config.output_dir)
    # huggingface_hub raises errors of its own and of several HTTP libraries.
    try:
        write_text(folder / "README.md", _model_card(config, repo_id, summary))
        # None instead of False: an organization may have private repositories by default.
        private = config.hub_private_repo or None
        repo_url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            # Includes the name of the user, which `repo_id` may lack.
            repo_id=repo_url.repo_id,
            folder_path=folder,
            commit_message=f"Trained with hf_ga {version('hf_ga')}",
            ignore_patterns=list(NOT_UPLOADED),
        )
    except Exception as error:
        command = ["hf", "upload", repo_id, str(folder)]
        if config.hub_private_repo:
            command.append("--private")
        for pattern in NOT_UPLOADED:
            command += ["--exclude", pattern]
        raise UploadFailed(
            f"the upload to {repo_id} failed: {_short_reason(error)} The run has finished "
            f"and {folder} contains the model: upload it with `{shlex.join(command)}`."
        ) from error
    return str(repo_url)


def _repo_id(config: FinetuneConfig) -> str:
    """Return the repository on the Hugging Face Hub to upload to, `name` or `user/name`: the flag
    `hub_model_id`, or the name of the output folder by default.
    """
    return config.hub_model_id or Path(config.output_dir).resolve().name


def _short_reason(error: Exception) -> str:
    """Return the first sentence of an error of the Hugging Face Hub, or the name of its class if it
    has no message. The user's token, which some messages contain, is replaced by `***`.
    """
    sentences = re.split(r"\n|\.\s|\.$", str(error).strip())
    reason = sentences[0] or type(error).__name__
    token = get_token()
    if token:
        reason = reason.replace(token, "***")
    return f"{reason}."


def _model_card(config: FinetuneConfig, repo_id: str, summary: dict[str, Any]) -> str:
    """Return the text of a run's model card for the Hugging Face Hub: metadata (base model,
    datasets, tags), the data, and a table of validation and test metrics.
    """
    base_model = config.model_name_or_path
    if base_model is not None and Path(base_model).exists():
        # A local folder is no model of the Hub.
        base_model = None
    hub_datasets = [
        name for name in as_list(config.dataset_name) if is_hub_id(name) and not Path(name).exists()
    ]
    metadata = ModelCardData(
        library_name="sentence-transformers" if config.task == "embedding" else "transformers",
        base_model=base_model,
        datasets=hub_datasets or None,
        tags=["hf_ga", config.task],
    )
    table_lines = ["| metric | value |", "|---|---|"]
    for name, value in summary.items():
        if name.startswith(("eval_", "test_")) and not name.endswith("num_targets"):
            table_lines.append(f"| {name} | {value:.4f} |")
    table = "\n".join(table_lines)
    title = repo_id.rpartition("/")[2]
    return (
        f"---\n{metadata.to_yaml()}\n---\n\n# {title}\n\n"
        f"Fine-tuned with hf_ga {version('hf_ga')} ({config.task}, {summary['steps']} optimizer "
        "steps).\n\n"
        f"Data: {summary['data']}\n\n{table}\n"
    )
