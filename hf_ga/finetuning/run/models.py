"""Loads tokenizer and model by name, or builds small ones if no name is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hf_ga.embedding.layout import saved_pooling
from hf_ga.embedding.model import EmbeddingModel
from hf_ga.errors import ConfigError, DataError
from hf_ga.finetuning.data import corpus
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.data.tasks import Task
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.finetuning.run.run import Setup

# Positions start at pad_token_id + 1: RoBERTa's 514 positions are for 512 tokens.
COUNT_FROM_PADDING = {
    "camembert",
    "data2vec-text",
    "ibert",
    "longformer",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}


def load_tokenizer(config: FinetuneConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer; without a model, the one trained on the embedded corpus.

    Raises:
        ConfigError: there is none under that name.
    """
    if config.model_name_or_path is None:
        return corpus.load_stdlib_tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.model_name_or_path, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise _not_loadable("tokenizer", config, error) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {config.model_name_or_path} has neither a padding nor an "
            "end-of-text token: set one."
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if config.task == "token-classification" and isinstance(
        getattr(backend, "pre_tokenizer", None), ByteLevel
    ):
        # Words are tokenized one by one, each with a leading space as in running text. RoBERTa's
        # class needs the argument.
        options = {"trust_remote_code": config.trust_remote_code, "add_prefix_space": True}
        tokenizer = AutoTokenizer.from_pretrained(config.model_name_or_path, **options)
        tokenizer.backend_tokenizer.pre_tokenizer.add_prefix_space = True
    return tokenizer


def load_base_config(config: FinetuneConfig) -> PretrainedConfig | None:
    """The configuration of the named model; None for the small default model.

    Raises:
        ConfigError: there is none under that name.
    """
    if config.model_name_or_path is None:
        return None
    try:
        return AutoConfig.from_pretrained(
            config.model_name_or_path, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise _not_loadable("model", config, error) from error


def known_labels(base: PretrainedConfig | None) -> list[str] | None:
    """Label names of a trained model; None if it has only the default LABEL_0, ..."""
    names = dict(getattr(base, "id2label", None) or {})
    ordered = [str(names[key]) for key in sorted(names)]
    return None if ordered == [f"LABEL_{i}" for i in range(len(ordered))] else ordered


def complete_config(
    base: PretrainedConfig | None, config: FinetuneConfig, data: PreparedData
) -> PretrainedConfig:
    """The model's configuration with the task's labels, checked against the data.

    Raises:
        ConfigError: samples are longer than its positions, or token ids are beyond its vocabulary.
            DataError: an evaluation has labels that the model was not trained on.
    """
    model_config = (
        data.task.small_config(data.tokenizer, config.sequence_length) if base is None else base
    )
    if data.task.pipeline == "text-generation":
        _refuse_encoder(model_config)
    if data.task.labels == "target" and not model_config.is_encoder_decoder:
        raise ConfigError(
            "seq2seq needs an encoder with a decoder, such as T5 or BART; "
            f"{model_config.model_type} has only one of them: "
            "use another model, or train a decoder on prompts with completions with --task "
            "causal-lm."
        )
    limit = num_positions(model_config)
    if limit and config.sequence_length > limit:
        name = "block_size" if config.block_size else "max_length"
        raise ConfigError(
            f"{name} {config.sequence_length} is beyond the {limit} positions of the model: use "
            f"at most {limit}."
        )
    generates = data.task.labels == "target" and (
        config.predict_file or config.predict_with_generate
    )
    if generates and limit and config.max_new_tokens >= limit:
        raise ConfigError(
            f"max_new_tokens {config.max_new_tokens} must be below the {limit} positions of the "
            "model."
        )
    _set_labels(model_config, config, data)
    _check_vocabulary(model_config, config, data)
    padding = data.tokenizer.pad_token_id
    has_row = padding not in new_token_ids(model_config, data.tokenizer)
    if getattr(model_config, "pad_token_id", None) is None and has_row:
        model_config.pad_token_id = padding
    return model_config


def num_positions(model_config: PretrainedConfig | None) -> int | None:
    """Maximum tokens of a sample; None: no limit."""
    limit = getattr(model_config, "max_position_embeddings", None)
    if model_config and limit and model_config.model_type in COUNT_FROM_PADDING:
        limit -= (model_config.pad_token_id or 0) + 1
    return limit


def new_token_ids(model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> range:
    """The ids of the tokenizer's tokens that have no row in the model's embedding."""
    vocabulary = getattr(model_config.get_text_config(), "vocab_size", None)
    last = max(tokenizer.get_vocab().values(), default=0)
    num_ids = max(last + 1, len(tokenizer))
    return range(vocabulary or num_ids, num_ids)


def _check_vocabulary(
    model_config: PretrainedConfig, config: FinetuneConfig, data: PreparedData
) -> None:
    """Check that every token id has a row in the model's embedding, or gets one."""
    new_ids = new_token_ids(model_config, data.tokenizer)
    if not new_ids or config.resize_token_embeddings:
        return
    last = new_ids[-1]
    token = data.tokenizer.convert_ids_to_tokens(last)
    raise ConfigError(
        f"the tokenizer has {len(data.tokenizer)} tokens (the last, {token!r}, has id {last}), "
        f"but the model has {new_ids.start}: use the model's tokenizer, or add rows for the new "
        "tokens with --resize_token_embeddings."
    )


def _set_labels(model_config: PretrainedConfig, config: FinetuneConfig, data: PreparedData) -> None:
    """Copy the data's labels to the configuration; without any, copy the trained head's labels to
    the data.
    """
    if data.task.labels == "answers":
        model_config.num_labels = 2  # start and end logits
    if data.task.labels in ("none", "answers", "choice", "target", "pairs"):
        return
    known = known_labels(model_config)
    if (
        config.eval_only
        and known
        and data.labels not in (known, [str(i) for i in range(len(known))])
    ):
        unknown = ", ".join(name for name in data.labels if name not in known)
        raise DataError(
            f"eval_only: the rows have labels that {config.model_name_or_path} was not trained "
            f"on: {unknown or 'fewer'}; it "
            f"was trained on {', '.join(known)}. Use its names, remove other rows, or train it on "
            "them."
        )
    if data.task.labels == "number":
        model_config.num_labels = 1
    elif data.labels:
        model_config.num_labels = len(data.labels)
        model_config.id2label = dict(enumerate(data.labels))
        model_config.label2id = {name: index for index, name in enumerate(data.labels)}
    else:
        data.labels = [str(model_config.id2label[i]) for i in range(model_config.num_labels)]
    model_config.problem_type = data.task.problem_type  # overrides a pretrained head's


def _refuse_encoder(model_config: PretrainedConfig) -> None:
    """Raise ConfigError for an encoder: as a causal LM it has no causal mask, so tokens would see
    their targets.
    """
    is_encoder = (
        type(model_config) in MODEL_FOR_MASKED_LM_MAPPING and not model_config.is_encoder_decoder
    )
    if is_encoder and not getattr(model_config, "is_decoder", False):
        raise ConfigError(
            f"{model_config.model_type} is an encoder and attends to the tokens that causal-lm "
            "predicts: use --task masked-lm, a "
            "decoder, or is_decoder true in its config.json."
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the block, transformers logs errors only. Its report of new weights is pages long."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def compute_dtype(setup: Setup) -> torch.dtype:
    """The dtype that products are computed in."""
    precisions = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return precisions.get(setup.accelerator.mixed_precision, torch.float32)


def base_dtype(setup: Setup) -> torch.dtype:
    """The dtype that a run loads weights in: float32; if they are frozen under adapters, their own
    if autocast computes in it.
    """
    computed = compute_dtype(setup)
    return computed if setup.config.has_adapters and setup.dtype == computed else torch.float32


def load_model(
    setup: Setup, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel | EmbeddingModel, list[str]]:
    """The model with its head (for embeddings, its pooling) and, with `resize_token_embeddings`,
    a row for each token. New weights are drawn from torch's generator: seed it first.

    Args:
        setup: Of the run.
        dtype: Of the weights. Default: see `base_dtype`.

    Returns:
        (model, names of parameters missing from the named model)

    Raises:
        ConfigError: the weights cannot be loaded, an evaluation has no trained head, or gradient
            checkpointing is unsupported.
    """
    config, task = setup.config, setup.data.task
    four_bit = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": compute_dtype(setup),
    }
    if config.model_name_or_path is None:
        model, new = task.auto_class.from_config(setup.model_config), []
    else:
        try:
            with quiet_transformers():
                model, loaded = task.auto_class.from_pretrained(
                    config.model_name_or_path,
                    config=setup.model_config,
                    dtype=dtype or base_dtype(setup),
                    trust_remote_code=config.trust_remote_code,
                    ignore_mismatched_sizes=task.labels
                    not in ("none", "target", "pairs"),  # new head for new labels
                    output_loading_info=True,
                    quantization_config=BitsAndBytesConfig(**four_bit)
                    if config.load_in_4bit
                    else None,
                )
        except (OSError, ValueError, KeyError) as error:
            raise _not_loadable("model", config, error) from error
        new = sorted([*loaded["missing_keys"], *(key[0] for key in loaded["mismatched_keys"])])
        if task.labels == "pairs":  # an encoder's own pooler is not used
            new = [name for name in new if not name.startswith("pooler.")]
        _check_new_weights(model, new, config)
        if config.resize_token_embeddings:
            _add_rows(model, setup)
    return _configured(model, config, task), new


def empty_model(setup: Setup) -> PreTrainedModel | EmbeddingModel:
    """The model of `load_model` with its parameters on the meta device, for a process that gets its
    shards of them from the main process.
    """
    config = setup.config
    task = setup.data.task
    options: dict[str, Any] = {}
    if config.model_name_or_path is not None:
        options["dtype"] = base_dtype(setup)
        options["trust_remote_code"] = config.trust_remote_code
    with init_empty_weights():
        model = task.auto_class.from_config(setup.model_config, **options)
        if config.resize_token_embeddings:
            _add_rows(model, setup, draws_values=False)
    model.tie_weights()  # each parameter was replaced by one of its own
    return _configured(model, config, task)


def _configured(
    model: PreTrainedModel, config: FinetuneConfig, task: Task
) -> PreTrainedModel | EmbeddingModel:
    """The model with the task's loss, with gradient checkpointing and, for embeddings, with its
    pooling.

    Raises:
        ConfigError: gradient checkpointing is unsupported.
    """
    if (
        config.task == "causal-lm" and model.loss_type is None
    ):  # transformers does not find it by GPT-2's class name, and warns
        model.loss_type = "ForCausalLM"
    if config.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"{type(model).__name__} does not support gradient checkpointing: omit "
                "--gradient_checkpointing."
            )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _with_pooling(model, config) if task.labels == "pairs" else model


def _add_rows(model: PreTrainedModel, setup: Setup, *, draws_values: bool = True) -> None:
    """Give each token a row in the embeddings.

    Args:
        model: As it was loaded.
        setup: Of the run.
        draws_values: transformers draws new rows around the mean of the others. False: for a model
            on the meta device, which has no values.
    """
    tokenizer = setup.data.tokenizer
    new_ids = new_token_ids(setup.model_config, tokenizer)
    if not new_ids:
        return
    with quiet_transformers():
        model.resize_token_embeddings(new_ids.stop, mean_resizing=draws_values)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id


def _with_pooling(encoder: PreTrainedModel, config: FinetuneConfig) -> EmbeddingModel:
    name = config.model_name_or_path
    pooling = config.pooling
    if pooling is None and name is not None:
        pooling = saved_pooling(name)
    return EmbeddingModel(
        encoder,
        pooling or "mean",
        temperature=config.initial_temperature if config.learn_temperature else None,
        max_length=config.max_length,
    )


def _check_new_weights(model: PreTrainedModel, new: list[str], config: FinetuneConfig) -> None:
    """Raise ConfigError if an evaluation has no trained head, or if 4-bit weights are new ones."""
    if config.eval_only and new:
        raise ConfigError(
            f"eval_only: {config.model_name_or_path} has no trained head for {config.task}; new "
            "weights would be: "
            f"{', '.join(new[:3])}. Train it first."
        )
    if packed := [
        name
        for name in new
        if hasattr(model.get_submodule(name.rpartition(".")[0]), "compute_dtype")
    ]:
        raise ConfigError(
            f"load_in_4bit would freeze weights that {config.model_name_or_path} lacks: "
            f"{', '.join(packed[:3])}. Name a model "
            "that has them, or omit load_in_4bit."
        )


def _not_loadable(what: str, config: FinetuneConfig, error: Exception) -> ConfigError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"cannot load the {what} of model_name_or_path {config.model_name_or_path!r}: {reason} "
        "Give a hub id or a folder that "
        "save_pretrained wrote."
    )
