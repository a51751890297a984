"""Tokenizer and model by name, or the small ones that are built from a configuration where no name is given."""

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ga import corpus
from hf_ga.config import FinetuneConfig
from hf_ga.data import PreparedData
from hf_ga.errors import ConfigError

# Their first position is pad_token_id + 1: RoBERTa's 514 positions are for 512 tokens.
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
        tokenizer = AutoTokenizer.from_pretrained(config.model_name_or_path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loadable("tokenizer", config, error) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {config.model_name_or_path} has no padding and no end-of-text token: set one of them.")
    tokenizer.padding_side = "right"  # training pads at the right, whatever generation wants
    return tokenizer


def load_model_config(config: FinetuneConfig, data: PreparedData) -> PretrainedConfig:
    """The model's configuration, checked against the data.

    Raises:
        ConfigError: there is none under that name, max_length is beyond its positions, or token ids are beyond its vocabulary.
    """
    if config.model_name_or_path is None:
        model_config = data.task.small_config(data.tokenizer, config.max_length, data.labels)
    else:
        try:
            model_config = AutoConfig.from_pretrained(config.model_name_or_path, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            raise _not_loadable("model", config, error) from error
    limit = getattr(model_config, "max_position_embeddings", None)
    if limit and model_config.model_type in COUNT_FROM_PADDING:
        limit -= (model_config.pad_token_id or 0) + 1
    if limit and config.max_length > limit:
        raise ConfigError(f"max_length {config.max_length} is beyond the {limit} positions of the model: use at most {limit}.")
    if data.labels:
        model_config.num_labels = len(data.labels)
        model_config.problem_type = "single_label_classification"  # a pretrained head may have been for something else
        model_config.id2label = dict(enumerate(data.labels))
        model_config.label2id = {name: index for index, name in enumerate(data.labels)}
    vocabulary = getattr(model_config, "vocab_size", None)
    if vocabulary and len(data.tokenizer) > vocabulary:
        raise ConfigError(
            f"the tokenizer has {len(data.tokenizer)} tokens, the model only {vocabulary}: use the one that belongs to it."
        )
    if getattr(model_config, "pad_token_id", None) is None:
        model_config.pad_token_id = data.tokenizer.pad_token_id
    return model_config


def load_model(config: FinetuneConfig, model_config: PretrainedConfig, data: PreparedData) -> PreTrainedModel:
    """The model with its head, in float32. Seed torch's generator first: new weights are drawn from it.

    Raises:
        ConfigError: the weights cannot be loaded, or the model has no gradient checkpointing.
    """
    auto_class = data.task.auto_class
    if config.model_name_or_path is None:
        model = auto_class.from_config(model_config)
    else:
        try:
            model = auto_class.from_pretrained(
                config.model_name_or_path,
                config=model_config,
                dtype=torch.float32,
                trust_remote_code=config.trust_remote_code,
                ignore_mismatched_sizes=bool(data.labels),  # a new head for other labels
            )
        except (OSError, ValueError, KeyError) as error:
            raise _not_loadable("model", config, error) from error
    if config.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"{type(model).__name__} does not support gradient checkpointing: leave --gradient_checkpointing out."
            )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _not_loadable(what: str, config: FinetuneConfig, error: Exception) -> ConfigError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"cannot load the {what} of model_name_or_path {config.model_name_or_path!r}: {reason} Give a hub id or a folder that "
        "save_pretrained wrote."
    )
