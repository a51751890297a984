"""The files with which `sentence_transformers.SentenceTransformer` loads a folder of a transformers
model: its pooling, and that vectors have length 1.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import cached_file

from hf_ga.embedding.pooling import POOLINGS
from hf_ga.errors import ConfigError

POOLING_FILE = "1_Pooling/config.json"
# Name of a module -> its folder.
MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
# The keys of `POOLING_FILE` that all versions of sentence-transformers read; one of them is true.
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}


def write_layout(folder: Path, pooling: str, size: int, max_length: int | None) -> None:
    """Write the files beside those of the model.

    Args:
        folder: The folder of the model.
        pooling: One of `POOLINGS`.
        size: The size of a vector, the same before and after the pooling.
        max_length: Largest number of tokens of a text. None: the tokenizer's limit.
    """
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(MODULES.items())
    ]
    flags = {flag: name == pooling for name, flag in FLAGS.items()}
    versions = {"transformers": transformers.__version__, "pytorch": torch.__version__}
    files = {
        "modules.json": modules,
        "config_sentence_transformers.json": {
            "__version__": versions,
            "similarity_fn_name": "cosine",
        },
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        POOLING_FILE: {"word_embedding_dimension": size, **flags},
        "2_Normalize/config.json": {},
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def saved_pooling(model_name_or_path: str) -> str | None:
    """Find the pooling with which a model was saved by sentence-transformers, or by `write_layout`.

    Args:
        model_name_or_path: A hub id or a folder.

    Returns:
        One of `POOLINGS`. None: the model was saved without any.

    Raises:
        ConfigError: If it was saved with a pooling that is not in `POOLINGS`.
    """
    path = cached_file(
        model_name_or_path,
        POOLING_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return None
    text = Path(path).read_text(encoding="utf-8")
    names = _poolings_in(json.loads(text))
    if len(names) != 1 or names[0] not in POOLINGS:
        raise ConfigError(
            f"{model_name_or_path} was saved with the pooling {' + '.join(names)}, which is not "
            f"supported: choose another with pooling, one of {', '.join(POOLINGS)}."
        )
    return names[0]


def _poolings_in(settings: dict[str, Any]) -> list[str]:
    """List the poolings that are on in the settings of `POOLING_FILE`."""
    if "pooling_mode" not in settings:
        return [name for name, flag in FLAGS.items() if settings.get(flag)]
    named = settings["pooling_mode"]
    if isinstance(named, str):
        return [named]
    return named
