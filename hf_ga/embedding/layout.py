"""The files that `sentence_transformers.SentenceTransformer` needs to load a saved transformers
model: its pooling, and the normalization of the embeddings.
"""

import json
from pathlib import Path
from typing import Any

import torch

from hf_ga.embedding.pooling import POOLINGS
from hf_ga.errors import ConfigError

POOLING_FILE = "1_Pooling/config.json"
# Name of a module of sentence-transformers -> its folder below the model's.
MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
# Name of a pooling -> its key in `POOLING_FILE`. All versions of sentence-transformers read these
# keys; the one of the model's pooling is true.
POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}


def write_sentence_transformers_files(
    folder: Path, pooling: str, embedding_dim: int, max_length: int | None
) -> None:
    """Write the JSON files that let `SentenceTransformer(folder)` load a saved transformers model
    with its pooling and normalization.

    Args:
        folder: The folder of the saved model.
        pooling: One of `POOLINGS`.
        embedding_dim: The size of the pooled embedding, which is the model's hidden size.
        max_length: The maximum number of tokens of a text, or None for the tokenizer's limit.
    """
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": module_folder,
            "type": f"sentence_transformers.models.{name}",
        }
        for index, (name, module_folder) in enumerate(MODULES.items())
    ]
    pooling_flags = {key: name == pooling for name, key in POOLING_KEYS.items()}
    import transformers  # here: the losses of embeddings do not wait for it

    versions = {"transformers": transformers.__version__, "pytorch": torch.__version__}
    files = {
        "modules.json": modules,
        "config_sentence_transformers.json": {
            "__version__": versions,
            "similarity_fn_name": "cosine",
        },
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        POOLING_FILE: {"word_embedding_dimension": embedding_dim, **pooling_flags},
        "2_Normalize/config.json": {},
    }
    for file_name, content in files.items():
        path = folder / file_name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def saved_pooling(model_name_or_path: str) -> str | None:
    """Read the pooling of an embedding model that was saved by sentence-transformers or by this
    package.

    Args:
        model_name_or_path: A model id on the Hub, or a folder.

    Returns:
        One of `POOLINGS`, or None if the model was saved without a pooling, or its file cannot be
        downloaded.

    Raises:
        ConfigError: If it was saved with a pooling that is not in `POOLINGS`.
    """
    from transformers.utils import cached_file  # here: as above

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
    """List the poolings of embeddings that are enabled in the content of sentence-transformers'
    pooling file (`1_Pooling/config.json`).

    Newer versions write the names in `pooling_mode`, older ones a flag for each pooling.

    >>> _poolings_in({"pooling_mode": "mean"})
    ['mean']
    >>> _poolings_in({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    ['cls']
    """
    if "pooling_mode" not in settings:
        return [name for name, key in POOLING_KEYS.items() if settings.get(key)]
    names = settings["pooling_mode"]
    if isinstance(names, str):
        return [names]
    return names
