"""A short model card: what was trained on what, in which layout, and how good it is."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from hf_ga.data.sources import FILE_KINDS
from hf_ga.data.tasks import TASKS
from hf_ga.run.config import FinetuneConfig

RESULTS = ("train_loss", "eval_", "test_")  # how the names of results in a summary begin


def write_model_card(config: FinetuneConfig, summary: dict[str, Any], folder: Path) -> None:
    """Write `README.md` into a model's folder, with the metadata that model hubs read.

    Args:
        summary: what `summary.json` holds.
    """
    named, dataset = config.model_name_or_path, Path(config.dataset_name)
    is_local = dataset.exists() or dataset.suffix in FILE_KINDS or dataset.suffix == ".gz"
    metadata = ModelCardData(
        library_name="peft" if config.lora_r and not (folder / "config.json").exists() else "transformers",
        pipeline_tag=TASKS[config.task].pipeline,
        tags=["hf_ga"],
        # A hub only knows ids and names, not somebody's folders.
        base_model=None if named is None or Path(named).exists() else named,
        datasets=None if is_local or config.dataset_name == "stdlib" else [config.dataset_name],
    )
    results = {name: value for name, value in summary.items() if name.startswith(RESULTS) and isinstance(value, int | float)}
    settings = {
        "task": config.task,
        "first weights": Path(named).name if named else "random",
        "data": summary["data"].replace(config.dataset_name, dataset.name) if is_local else summary["data"],
        "layout": summary["layout"],
        "precision": summary["precision"],
        "optimizer": f"{config.optim}, peak learning rate {summary['learning_rate']:g}, {config.lr_scheduler_type} schedule",
        "optimizer steps": summary["steps"],
        "seed": config.seed,
    }
    lines = [
        f"---\n{metadata.to_yaml()}\n---\n",
        f"# {folder.resolve().name}\n",
        "Fine-tuned with hf_ga: the same update for every split of a window into micro-batches.\n",
        _table("setting", settings),
        _table("result", {name: f"{value:.4f}" for name, value in results.items()}),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in summary["versions"].items()) + ".\n",
    ]
    (folder / "README.md").write_text("\n".join(lines))


def _table(title: str, rows: dict[str, Any]) -> str:
    return "\n".join([f"| {title} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]) + "\n"
